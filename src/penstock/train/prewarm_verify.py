"""Prove that something leaves a training run as it was.

In:    what is to be proven harmless, and how a step of the run is computed.
Out:   nothing, or an error that names the first thing that differs.
Where: the trainer's thread; in DDP and FSDP on all ranks at once.
State: none afterwards. While it runs, copies of everything.

Before and after are compared bit by bit, and so are the real steps that follow against the same steps
without it: that optimizer state which is there differs from none is no fault, if it leads to the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.train.prewarm_bits import alike, form, local, memory
from penstock.train.prewarm_keep import OF_TORCH, is_users, kept, names_kept, random_states
from penstock.train.prewarm_optimizer import has_state, step_kept
from penstock.train.prewarm_pass import Clock, Pass, unsettled

PLAIN = (type(None), bool, int, float, str, Tensor, np.ndarray)
"""Attributes of modules that can be compared; what hides in other objects shows in the real steps, if it matters."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Facts = dict[str, Any]
Names = Mapping[nn.Parameter, str]


def prove(
    warm: Callable[[], Any],
    one_pass: Pass,
    optimizers: list[Optimizer],
    names: Names,
    schedulers: list[Any],
    real_steps: int,
) -> None:
    """Raise if `warm` changes anything that training can see."""
    model = one_pass.model
    fresh = [optimizer for optimizer in optimizers if not has_state(optimizer)]

    def facts() -> Facts:
        return everything(model, names, optimizers, one_pass.scaler, schedulers)

    @contextmanager
    def undone() -> Iterator[None]:
        with ExitStack() as stack:
            for helper in [*schedulers, *([] if one_pass.scaler is None else [one_pass.scaler])]:
                stack.callback(names_kept(vars(helper), type(helper).__name__))
            for optimizer in optimizers:
                stack.enter_context(step_kept(optimizer))
                stack.callback(state_kept(optimizer))
            stack.enter_context(kept(model, names, copied=list(names)))
            yield

    def steps() -> Facts:
        for _ in range(real_steps):
            for parameter in names:
                parameter.grad = None
            one_pass.run(Clock(one_pass.device))
            for optimizer in optimizers:
                one_pass.scaler.step(optimizer) if one_pass.scaler is not None else optimizer.step()
            if one_pass.scaler is not None and optimizers:
                one_pass.scaler.update()
        return facts()

    with undone():
        before = facts()
        warm()
        after = facts()
        if difference := first_difference(before, after, skip=made_by(fresh, names)):
            raise ConfigError(
                f"verify_prewarm: {difference} changed. Training would not be what it is without it."
            )
        del before, after
        if unsettled(model):
            # DDP adds gradients up in another order once its buckets are final: not in the middle of a comparison.
            with undone():
                for _ in range(2):
                    steps()
        with undone():
            with_it = steps()
    with undone():
        without = steps()
    if difference := first_difference(without, with_it):
        with undone():
            again = steps()
        if other := first_difference(without, again):
            raise ConfigError(
                f"verify_prewarm: nothing can be proven, for two runs of {real_steps} steps from the same bits differ in {other} "
                "without any prewarm. See torch.use_deterministic_algorithms."
            )
        raise ConfigError(
            f"verify_prewarm: {difference} differs after {real_steps} real step(s) from what it would be without it"
        )


def made_by(fresh: list[Optimizer], names: Names) -> tuple[str, ...]:
    """What may appear: the state of optimizers that had none. Whether it is right, the real steps show."""
    return tuple(
        f"optimizer state of {names[p]!r}"
        for one in fresh
        for group in one.param_groups
        for p in group["params"]
    )


def everything(
    model: nn.Module, names: Names, optimizers: list[Optimizer], scaler: Any, schedulers: list[Any]
) -> Facts:
    """All that training can see, by name; tensors are copies."""
    facts: Facts = {}
    for parameter, name in names.items():
        facts[f"parameter {name!r}"] = snapshot(parameter)
        facts[f"gradient of {name!r}"] = snapshot(parameter.grad)
        facts[f"requires_grad of {name!r}"] = parameter.requires_grad
    for name, buffer in model.named_buffers():
        facts[f"buffer {name!r}"] = snapshot(buffer)
    for name, module in model.named_modules():
        facts[f"mode of module {name or 'model'!r}"] = module.training
        for key, value in vars(module).items():
            if key in HOOKS:
                facts[f"{key!r} of module {name or 'model'!r}"] = list(value)
            elif key not in OF_TORCH and is_users(module) and comparable(value):
                facts[f"attribute {key!r} of module {name or 'model'!r}"] = snapshot(value)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            facts[f"extra state of module {name or 'model'!r}"] = snapshot(module.get_extra_state())
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    facts[f"{key!r} of group {number} of {type(optimizer).__name__}"] = snapshot(
                        value
                    )
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    facts[f"optimizer state of {names[parameter]!r}: {key!r}"] = snapshot(value)
    for name, state in random_states().items():
        facts[f"state of the random numbers of {name}"] = snapshot(state)
    for helper in [*schedulers, *([] if scaler is None else [scaler])]:
        facts[f"state of {type(helper).__name__}"] = snapshot(helper.state_dict())
    return facts


def comparable(value: Any) -> bool:
    # A copy of an array of objects holds other objects.
    return isinstance(value, PLAIN) and not (
        isinstance(value, np.ndarray) and value.dtype.hasobject
    )


def snapshot(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    plain = local(value)
    if not memory(plain):
        return form(plain)
    return (
        copy.deepcopy(plain) if plain.is_quantized else plain.clone()
    )  # torch clones only some that are quantized


def first_difference(one: Facts, other: Facts, skip: tuple[str, ...] = ()) -> str | None:
    """The name of the first thing that is not the same in both, or not in both."""
    for name in [*one, *(name for name in other if name not in one)]:
        if skip and name.startswith(skip):
            continue
        if name not in one or name not in other or not alike(one[name], other[name]):
            return name
    return None


def state_kept(optimizer: Optimizer) -> Callable[[], None]:
    """The state of an optimizer, tables and tensors."""
    tables = [
        (key, value, names_kept(value, f"the state of {type(optimizer).__name__}"))
        for key, value in optimizer.state.items()
    ]

    def undo() -> None:
        optimizer.state.clear()
        for key, value, restore in tables:
            restore()
            optimizer.state[key] = value

    return undo

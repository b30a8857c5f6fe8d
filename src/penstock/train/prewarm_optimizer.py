"""Have an optimizer make its state and load its kernels, and leave it as one that has never stepped.

In:    an optimizer without state, and parameters that have gradients.
Out:   its state, made and brought to the values of a first step; or dropped, where those are not known.
Where: the trainer's thread.
State: for the time of the step, group values, attributes, hooks, and copies of weights where needed.

The step has gradients of zero, a rate of zero and no weight decay, so weights get zeros added. That leaves their bits
alone unless they are `sensitive`, as -0.0 and NaN are: those tensors are copied. Of an optimizer that is not listed here all weights
are copied and compared, and its state is dropped: it had none, so none is what a fresh one has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam
from torch.optim import optimizer as optimizer_module

from penstock.errors import ConfigError
from penstock.train.prewarm_bits import copy_of, local, nbytes, sensitive, write
from penstock.train.prewarm_keep import names_kept, table_kept

FRESH: dict[type[Optimizer], dict[str, float]] = {
    torch.optim.Adam: {},
    torch.optim.AdamW: {},
    torch.optim.Adadelta: {},
    torch.optim.Adamax: {},
    torch.optim.RAdam: {},
    torch.optim.RMSprop: {},
    torch.optim.NAdam: {"mu_product": 1.0},
    # The first step takes the gradient itself for the buffer. -0.0 is what gives it back bit by bit when it is added
    # to; 0.0 would turn a gradient of -0.0 into 0.0.
    torch.optim.SGD: {"momentum_buffer": -0.0},
}
"""Optimizers whose state is known, and what it begins with where that is not zero."""


def refuse(optimizer: Any) -> None:
    """Say what cannot be promised."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"prewarm: optimizer is a {kind}, not a torch.optim.Optimizer: pass the optimizer inside it, or None to warm "
            "the model alone"
        )
    if isinstance(optimizer, LBFGS | SparseAdam):
        why = (
            "calls the model as often as it likes"
            if isinstance(optimizer, LBFGS)
            else "wants sparse gradients"
        )
        raise ConfigError(
            f"prewarm: {kind} {why}; a step of it cannot be undone. Pass optimizer=None."
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"prewarm: group {number} of {kind} has differentiable=True: its step belongs to a graph and cannot be "
                "undone. Pass optimizer=None."
            )
        if "lr" not in group:
            raise ConfigError(
                f"prewarm: group {number} of {kind} has no 'lr' that could be zero for a step. Pass optimizer=None."
            )


def has_state(optimizer: Optimizer) -> bool:
    return any(
        len(state) > 0 if isinstance(state, Mapping) else True for state in optimizer.state.values()
    )


def known(optimizer: Optimizer) -> bool:
    return type(optimizer) in FRESH


def zero_step(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> int:
    """A step that changes no weight: state is made, kernels are loaded. Returns the bytes that were copied for it."""
    stepping = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    for parameter in stepping:
        if parameter.grad.layout is not torch.strided:
            raise ConfigError(
                f"prewarm: the gradient of {names[parameter]!r} is sparse, and there is no zero step for it. Use "
                "sparse=False, or pass optimizer=None."
            )
        parameter.grad.zero_()
    delicate = {p for p in stepping if sensitive(p)}
    copies = [(p, copy_of(p)) for p in stepping if p in delicate or not known(optimizer)]
    changed: list[nn.Parameter] = []
    try:
        with step_kept(optimizer):
            for group in optimizer.param_groups:
                calm(group)
            optimizer.step()
    except BaseException:
        optimizer.state.clear()
        raise
    finally:
        changed = [parameter for parameter, saved in copies if write(parameter, saved)]
    if suspicious := [names[parameter] for parameter in changed if parameter not in delicate]:
        optimizer.state.clear()
        raise ConfigError(
            f"prewarm: a step of {type(optimizer).__name__} with gradients of zero, lr 0 and weight_decay 0 changed "
            f"{suspicious[0]!r}{f' and {len(suspicious) - 1} more' if suspicious[1:] else ''}. Everything is put back. Pass "
            "optimizer=None to warm the model alone."
        )
    return sum(nbytes(piece) for _, saved in copies for piece in saved)


def calm(group: dict[str, Any]) -> None:
    """Values with which gradients of zero give an update of zero. Others are set in place of them, never in them."""
    # Where steps can be captured in a graph the rate is divided by, and so must not be zero; zero is the update anyway.
    rate = 1.0 if group.get("capturable") else 0.0
    for name, value in (("lr", rate), ("weight_decay", 0.0)):
        if name in group:
            old = group[name]
            group[name] = torch.full_like(old, value) if isinstance(old, Tensor) else value
    if isinstance(group.get("eps"), float | int):
        group["eps"] = 1.0  # the usual 1e-8 is 0 in float16, and zero over zero is NaN


@contextmanager
def step_kept(optimizer: Optimizer) -> Iterator[None]:
    """Put back group values and attributes (a scheduler notes there that a step was taken), and call no hooks."""
    with ExitStack() as stack:
        for group in optimizer.param_groups:
            stack.callback(
                names_kept(group, f"a group of {type(optimizer).__name__}", frozenset({"params"}))
            )
        stack.callback(
            names_kept(
                vars(optimizer), type(optimizer).__name__, frozenset({"state", "param_groups"})
            )
        )
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in vars(optimizer):
                setattr(optimizer, name, OrderedDict())
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            hooks = getattr(optimizer_module, name, None)
            if isinstance(hooks, dict):
                stack.callback(table_kept(hooks))
                hooks.clear()
        yield


def make_fresh(optimizer: Optimizer) -> tuple[int, str | None]:
    """Bring the state to what a first step begins with. Returns its bytes, or why it was dropped instead."""
    kind = type(optimizer)
    why = None
    if kind not in FRESH:
        why = f"dropped again: what the state of {kind.__name__} begins with is not known"
    elif kind is SGD and any(
        group["momentum"] != 0 and group["dampening"] != 0 for group in optimizer.param_groups
    ):
        why = "dropped again: with dampening, the first step of SGD differs from all others"
    elif any(
        isinstance(v, int | float) for state in optimizer.state.values() for v in state.values()
    ):
        why = f"dropped again: {kind.__name__} of this version of torch counts its steps elsewhere than in tensors"
    if why is not None:
        optimizer.state.clear()
        return 0, why
    total = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                plain = local(value)
                (torch.view_as_real(plain) if plain.is_complex() else plain).fill_(
                    FRESH[kind].get(name, 0.0)
                )
                total += nbytes(value)
    return total, None

"""Take the cost of a first training step before the first step, without changing a bit.

In:    a model, its optimizer, and a batch of the shape that training will have.
Out:   the same model and optimizer, with kernels loaded, graphs compiled, buckets built and optimizer state made.
Where: the trainer's thread, before the first step; in DDP and FSDP on all ranks at once.
State: none afterwards. While it runs, copies of the buffers and of gradients that were there already.
Cost:  what it takes off the first step; it saves time only where that waits for something else, such as data.

See docs/prewarm.md for what is promised, what is refused, and how to prove it on a model of your own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, MissingExtra

try:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parameter import is_lazy
    from torch.optim import Optimizer
except ImportError as error:  # pragma: no cover - torch is here wherever the tests run
    raise MissingExtra("torch", "prewarm()", "torch") from error

from penstock.train.prewarm_bits import checksum, nbytes
from penstock.train.prewarm_keep import kept, names_kept
from penstock.train.prewarm_optimizer import has_state, make_fresh, refuse, zero_step
from penstock.train.prewarm_pass import Autocast, Clock, Loss, Pass, default_loss, in_ddp, reset_sharded, unsettled
from penstock.train.prewarm_verify import prove

Optimizers = Optimizer | Sequence[Optimizer] | None
DDP_PASSES = 2
"""DDP builds its final buckets at the beginning of the second pass."""
COMMUTING = 2
"""Ranks whose gradients can be added in any order with the same result."""


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What a prewarm did."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    total_s: float
    """All of it, copies and checks included."""
    passes: int
    """Forward and backward passes, micro-steps counted."""
    state_bytes: int
    """Optimizer state that was made and stays; on this rank."""
    copied_bytes: int
    """Parameters that were copied for a while, because something might have changed them; on this rank."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not done, and why."""


def prewarm(
    model: nn.Module,
    optimizer: Optimizers,
    batch: Any,
    *,
    loss: Loss | None = None,
    steps: int = 1,
    accumulate: int = 1,
    autocast: Autocast = None,
    scheduler: Any = None,
    scaler: Any = None,
    copy_parameters: bool = False,
    rebuild_buckets: bool | None = None,
) -> Prewarmed:
    """Run forward, backward and optimizer once, and leave everything as it was to the last bit.

    `batch` is (inputs, targets), a Batch or a mapping of what the model takes. It is copied, so that any
    will do: the first one of the loader, which is trained on afterwards, or zeros of the same shape.

    `loss` is a callable of model and batch; without it, what the model returns as its loss, or cross
    entropy of its logits. `optimizer` may be several, or None. `accumulate` micro-steps make a step;
    `autocast` is a dtype or a context manager; `scaler` and `scheduler` are those of the training loop.

    `steps`: more than one where something is warm only later (some modes of torch.compile). Each costs a step.
    `copy_parameters`: for a model that writes to its own parameters. Costs their memory once more.
    `rebuild_buckets`: whether DDP builds its final buckets now, which takes a pass more. None: where that changes no bit.
    With three ranks or more it changes the order in which the gradients of the first real step are added up.
    """
    begun = time.perf_counter()
    optimizers = _as_list(optimizer)
    names = _names(model, optimizers)
    _refuse(model, optimizers, names, steps, accumulate)
    exchange, passes, why_not = _buckets(model, steps, rebuild_buckets)
    device = next(iter(names)).device
    skipped = {} if model.training else {"training mode": "the model is in eval mode, and so that is what was warmed"}
    stepping = [one for one in optimizers if not has_state(one)]
    if len(stepping) < len(optimizers):
        skipped["optimizer"] = "it has state already, which is not touched"
    elif not optimizers:
        skipped["optimizer"] = "none was given"
    if why_not is not None:
        skipped["buckets of DDP"] = why_not

    copied = list(names) if copy_parameters else _written_by_their_module(model)
    step_copies = 0
    sums = {parameter: checksum(parameter) for parameter in names}
    clock = Clock(device)
    one_pass = Pass(model, batch, loss or default_loss, accumulate, autocast, scaler, device, exchange)
    state_bytes = 0
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for helper in [scaler, *_as_list(scheduler)]:
            if helper is not None:
                stack.callback(names_kept(vars(helper)))
        for ddp in in_ddp(model):
            # After a pass without exchange it would not send its buffers to the other ranks in the next.
            stack.callback(setattr, ddp, "require_forward_param_sync", ddp.require_forward_param_sync)
        stack.enter_context(_dropped_on_failure(stepping))
        stack.enter_context(kept(model, names, copied))
        stack.enter_context(_sharded_again_on_failure(model))
        for number in range(passes):
            _no_gradients(names)
            one_pass.run(clock)
            if number < steps:
                for one in stepping:
                    with clock.time("optimizer_s"):
                        step_copies = max(step_copies, zero_step(one, names))
        for one in stepping:
            made, dropped = make_fresh(one)
            state_bytes += made
            if dropped is not None:
                skipped["optimizer state"] = dropped
    _check(sums, names)
    return Prewarmed(
        forward_s=clock.forward_s,
        backward_s=clock.backward_s,
        optimizer_s=clock.optimizer_s,
        total_s=time.perf_counter() - begun,
        passes=passes * accumulate,
        state_bytes=state_bytes,
        copied_bytes=sum(map(nbytes, copied)) + step_copies,
        skipped=skipped,
    )


def verify_prewarm(
    model: nn.Module,
    optimizer: Optimizers,
    batch: Any,
    *,
    loss: Loss | None = None,
    steps: int = 1,
    accumulate: int = 1,
    autocast: Autocast = None,
    scheduler: Any = None,
    scaler: Any = None,
    copy_parameters: bool = False,
    rebuild_buckets: bool | None = None,
    real_steps: int = 3,
    warm: Callable[[], Any] | None = None,
) -> None:
    """Prove on this very model that a prewarm changes nothing, or raise a ConfigError that names what it changed.

    Bit by bit: everything before and after it, and then `real_steps` real steps on `batch` after it against
    the same steps without it. Afterwards everything is as it was, and an optimizer that had no state has none.
    Needs about four times the memory of parameters, buffers and optimizer state: for a small twin of the
    real thing, or a machine with room. `warm` is called in place of `prewarm`, to put something else to the test.
    """
    optimizers = _as_list(optimizer)
    names = _names(model, optimizers)
    _refuse(model, optimizers, names, steps, accumulate)
    if real_steps < 1:
        raise ConfigError(f"verify_prewarm: real_steps={real_steps} must be 1 or more")

    def default() -> None:
        prewarm(
            model, optimizer, batch, loss=loss, steps=steps, accumulate=accumulate, autocast=autocast,
            scheduler=scheduler, scaler=scaler, copy_parameters=copy_parameters, rebuild_buckets=rebuild_buckets,
        )  # fmt: skip

    one_pass = Pass(model, batch, loss or default_loss, accumulate, autocast, scaler, next(iter(names)).device)
    with torch.inference_mode(False), torch.enable_grad():
        prove(warm or default, one_pass, optimizers, names, _as_list(scheduler), real_steps)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _names(model: nn.Module, optimizers: list[Any]) -> dict[nn.Parameter, str]:
    """Every parameter once, those of the model first, with a name to show."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"prewarm: model is a {type(model).__name__}, not a torch.nn.Module")
    for optimizer in optimizers:
        refuse(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"group {number}, parameter {place} of {type(optimizer).__name__}")
    return names


def _refuse(
    model: nn.Module, optimizers: list[Any], names: Mapping[nn.Parameter, str], steps: int, accumulate: int
) -> None:
    for setting, value in (("steps", steps), ("accumulate", accumulate)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"prewarm: {setting}={value!r} must be a whole number from 1 on")
    if not any(parameter.requires_grad for parameter in names):
        raise ConfigError("prewarm: no parameter requires a gradient, so there is no training step to warm")
    for parameter, name in names.items():
        if is_lazy(parameter):
            raise ConfigError(
                f"prewarm: {name!r} has no shape yet, and the pass that gives it one draws random numbers. Run the model "
                "once, then make the optimizer, then call prewarm."
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"prewarm: {name!r} has a hook that runs when its gradient is ready, and may take an optimizer step with "
                "it. Register such hooks after prewarm."
            )
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                f"prewarm: {name or 'the model'!r} is wrapped in FullyShardedDataParallel, whose flat parameters it cannot "
                "look after. Use torch.distributed.fsdp.fully_shard."
            )
        if isinstance(module, DistributedDataParallel):
            for hook, state in getattr(module, "_comm_hooks", []):
                if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
                    raise ConfigError(
                        f"prewarm: the communication hook {getattr(hook, '__name__', hook)} of DDP keeps a "
                        f"{type(state).__name__}, which a pass changes. Register it after prewarm."
                    )


def _buckets(model: nn.Module, steps: int, rebuild: bool | None) -> tuple[bool, int, str | None]:
    """Whether ranks exchange gradients, in how many passes, and why DDP does not get its final buckets, if so."""
    waiting = unsettled(model)
    if not waiting:
        return True, steps, None
    ranks = max(ddp.process_group.size() for ddp in waiting)
    if rebuild or (rebuild is None and ranks <= COMMUTING):
        return True, max(steps, DDP_PASSES), None
    if any(ddp.static_graph for ddp in waiting):
        raise ConfigError(
            f"prewarm: DDP with static_graph=True on {ranks} ranks exchanges gradients in its first pass, and builds buckets "
            "after it that change the order in which gradients are added up. Pass rebuild_buckets=True if that may be."
        )
    if rebuild is None:
        return False, steps, f"on {ranks} ranks that would change the order in which gradients are added up"
    return False, steps, "not asked for"


def _written_by_their_module(model: nn.Module) -> list[Tensor]:
    """Parameters that a forward pass writes to, as far as torch's own modules go: embeddings with a largest norm."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]


def _no_gradients(parameters: Mapping[nn.Parameter, str]) -> None:
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def _dropped_on_failure(optimizers: list[Optimizer]) -> Iterator[None]:
    """These had no state before."""
    try:
        yield
    except BaseException:
        for optimizer in optimizers:
            optimizer.state.clear()
        raise


@contextmanager
def _sharded_again_on_failure(model: nn.Module) -> Iterator[None]:
    """A pass that ends in the middle leaves FSDP in the middle too."""
    try:
        yield
    except BaseException:
        reset_sharded(model)
        raise


def _check(sums: Mapping[nn.Parameter, int], names: Mapping[nn.Parameter, str]) -> None:
    for parameter, before in sums.items():
        if checksum(parameter) != before:
            raise ConfigError(
                f"prewarm: the model writes to its parameter {names[parameter]!r} in a forward or backward pass. Parameters "
                "are not copied unless asked for, so its old bits are gone: load or make the model again, and pass "
                "copy_parameters=True."
            )

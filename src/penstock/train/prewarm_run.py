"""What `prewarm` does: the order of things, and what is refused.

In:    as `prewarm`.
Out:   as `prewarm`.
Where: the trainer's thread; the only file of these that `prewarm` imports, so that torch is imported no earlier.
State: none afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.train.prewarm import How, Prewarmed
from penstock.train.prewarm_bits import checksum, nbytes, opaque
from penstock.train.prewarm_keep import kept, names_kept
from penstock.train.prewarm_optimizer import has_state, make_fresh, refuse, zero_step
from penstock.train.prewarm_pass import Clock, Pass, default_loss, in_ddp, reset_sharded, unsettled
from penstock.train.prewarm_verify import prove

Optimizers = Optimizer | Sequence[Optimizer] | None
DDP_PASSES = 2
"""DDP builds its final buckets at the beginning of the second pass."""
COMMUTING = 2
"""Ranks whose gradients can be added in any order with the same result."""


def prewarm(model: nn.Module, optimizer: Optimizers, batch: Any, how: How) -> Prewarmed:
    """See `penstock.prewarm`."""
    begun = time.perf_counter()
    optimizers = _as_list(optimizer)
    names = _names(model, optimizers)
    _refuse(model, optimizers, names, how.steps, how.accumulate)
    exchange, passes, why_not = _buckets(model, how.steps, how.rebuild_buckets)
    device = next(iter(names)).device
    skipped = (
        {}
        if model.training
        else {"training mode": "the model is in eval mode, and so that is what was warmed"}
    )
    stepping = [one for one in optimizers if not has_state(one)]
    if len(stepping) < len(optimizers):
        skipped["optimizer"] = "it has state already, which is not touched"
    elif not optimizers:
        skipped["optimizer"] = "none was given"
    if why_not is not None:
        skipped["buckets of DDP"] = why_not

    copied = list(names) if how.copy_parameters else _written_by_their_module(model)
    step_copies = 0
    looked_after = set(map(id, copied))
    sums = _sums(parameter for parameter in names if id(parameter) not in looked_after)
    clock = Clock(device)
    one_pass = Pass(
        model,
        batch,
        how.loss or default_loss,
        how.accumulate,
        how.autocast,
        how.scaler,
        device,
        exchange,
    )
    state_bytes = 0
    fault: str | None = None
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for helper in [how.scaler, *_as_list(how.scheduler)]:
            if helper is not None:
                stack.callback(names_kept(vars(helper), type(helper).__name__))
        for ddp in in_ddp(model):
            # After a pass without exchange it would not send its buffers to the other ranks in the next.
            stack.callback(
                setattr, ddp, "require_forward_param_sync", ddp.require_forward_param_sync
            )
        stack.enter_context(_dropped_on_failure(stepping))
        stack.enter_context(kept(model, names, copied))
        stack.enter_context(_sharded_again_on_failure(model))
        for number in range(passes):
            _no_gradients(names)
            one_pass.run(clock)
            fault = fault or _fault(sums, names, _WRITES_TO_ITSELF)
            if number < how.steps and stepping:
                for one in stepping:
                    with clock.time("optimizer_s"):
                        step_copies = max(step_copies, zero_step(one, names))
                # Apart from the pass, or the model would be blamed for what a step has done.
                fault = fault or _fault(sums, names, _STEP_CHANGED_IT)
        for one in stepping:
            made, dropped = make_fresh(one)
            state_bytes += made
            if dropped is not None:
                skipped["optimizer state"] = dropped
        if (
            fault is not None
        ):  # no earlier: the other ranks may have seen nothing, and would wait in the next pass
            raise ConfigError(fault)
    return Prewarmed(
        forward_s=clock.forward_s,
        backward_s=clock.backward_s,
        optimizer_s=clock.optimizer_s,
        total_s=time.perf_counter() - begun,
        passes=passes * how.accumulate,
        state_bytes=state_bytes,
        copied_bytes=sum(map(nbytes, copied)) + step_copies,
        skipped=skipped,
    )


def verify_prewarm(
    model: nn.Module,
    optimizer: Optimizers,
    batch: Any,
    how: How,
    real_steps: int,
    warm: Callable[[], Any] | None,
) -> None:
    """See `penstock.train.prewarm.verify_prewarm`."""
    optimizers = _as_list(optimizer)
    names = _names(model, optimizers)
    _refuse_count("real_steps", real_steps, "verify_prewarm")
    _refuse(model, optimizers, names, how.steps, how.accumulate)

    def default() -> None:
        prewarm(model, optimizer, batch, how)

    one_pass = Pass(
        model,
        batch,
        how.loss or default_loss,
        how.accumulate,
        how.autocast,
        how.scaler,
        next(iter(names)).device,
    )
    with torch.inference_mode(False), torch.enable_grad():
        prove(warm or default, one_pass, optimizers, names, _as_list(how.scheduler), real_steps)


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
                names.setdefault(
                    parameter, f"group {number}, parameter {place} of {type(optimizer).__name__}"
                )
    return names


def _refuse_count(setting: str, value: Any, caller: str = "prewarm") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{caller}: {setting}={value!r} must be a whole number from 1 on")


def _refuse(
    model: nn.Module,
    optimizers: list[Any],
    names: Mapping[nn.Parameter, str],
    steps: int,
    accumulate: int,
) -> None:
    _refuse_count("steps", steps)
    _refuse_count("accumulate", accumulate)
    if not any(parameter.requires_grad for parameter in names):
        raise ConfigError(
            "prewarm: no parameter requires a gradient, so there is no training step to warm"
        )
    for tensor, name in [
        *names.items(),
        *((buffer, name) for name, buffer in model.named_buffers()),
    ]:
        if is_lazy(tensor):
            raise ConfigError(
                f"prewarm: {name!r} has no shape yet, and the pass that gives it one draws random numbers. Run the model "
                "once, then make the optimizer, then call prewarm."
            )
        if opaque(tensor):
            raise ConfigError(
                f"prewarm: {name!r} is a {type(tensor).__name__} whose memory cannot be seen, so it cannot be promised that "
                "its bits stay. Train without prewarm."
            )
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
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
        return (
            False,
            steps,
            f"on {ranks} ranks that would change the order in which gradients are added up",
        )
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


_WRITES_TO_ITSELF = "the model writes to its parameter {name!r} in a forward or backward pass"
_STEP_CHANGED_IT = (
    "an optimizer step with gradients of zero, lr 0 and weight_decay 0 changed parameter {name!r}"
)


def _sums(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Hashable]:
    drawn: dict[torch.device, Tensor] = {}
    return {parameter: checksum(parameter, drawn) for parameter in parameters}


def _fault(
    sums: Mapping[nn.Parameter, Hashable], names: Mapping[nn.Parameter, str], what: str
) -> str | None:
    """What to say of the first parameter that is not what it was, if there is one."""
    for parameter, now in _sums(sums).items():
        if now != sums[parameter]:
            return (
                f"prewarm: {what.format(name=names[parameter])}. Parameters are not copied unless asked for, so its old bits "
                "are gone: load or make the model again, and pass copy_parameters=True."
            )
    return None

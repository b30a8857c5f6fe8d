"""Run a training step in advance to load kernels and compile graphs, without changing a bit.

Copies every tensor that a step may change, runs forward, backward and an optimizer step, restores the
copies and compares. Raises for anything that cannot be restored. Under DDP and FSDP2, all ranks
must call it together. Takes the time of a step, and memory for a second copy of parameters and
buffers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config import whole_number
from penstock.errors import ConfigError, missing_extra
from penstock.types import IGNORE

try:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parameter import is_lazy
    from torch.optim import Optimizer

    from penstock.train.distributed import local, syncing
except ImportError as error:
    raise missing_extra("torch", "prewarm", "torch") from error

FRESH: dict[type[Optimizer], dict[str, float]] = {
    torch.optim.Adam: {},
    torch.optim.AdamW: {},
    torch.optim.Adadelta: {},
    torch.optim.Adamax: {},
    torch.optim.RAdam: {},
    torch.optim.RMSprop: {},
    torch.optim.NAdam: {"mu_product": 1.0},
    # The first step takes the gradient itself as the buffer. Adding it to -0.0 gives its exact bits;
    # adding it to 0.0 would turn -0.0 into 0.0.
    torch.optim.SGD: {"momentum_buffer": -0.0},
}
"""Optimizers whose initial state is known: zeros, except for these values."""

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Tensors whose memory can be copied bit by bit, if they are strided."""
EXACT_RANKS = 2
"""Floating-point sums of two numbers do not depend on the order; sums of three do."""
DDP_PASSES = 2
"""DDP builds its final buckets at the start of the second pass."""


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """The result of a prewarm."""

    seconds: float
    passes: int
    """The number of forward and backward passes."""
    state_bytes: int
    """Bytes of new optimizer state on this rank."""
    copied_bytes: int
    """Bytes of temporary copies of tensors on this rank."""
    skipped: dict[str, str]
    """Skipped parts, with the reason."""


def prewarm(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    batch: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int = 1,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
) -> Prewarmed:
    """Run a training step and leave everything as it was, to the last bit.

    Afterwards, kernels are loaded, graphs compiled, DDP's buckets built and optimizer state
    created. Parameters, buffers, gradients, modes, module attributes and random numbers are
    unchanged. The optimizer itself is not stepped: prewarm steps a copy, resets the copy's state to
    its initial values, and moves that state to the optimizer.

    optimizer: one, several, or None for the model alone. An optimizer with state is skipped.
    batch: (inputs, targets), a Batch, or a mapping of the model's arguments. Only shapes matter.
    loss: a function of model and batch. Defaults to the loss that the model returns, or to the cross
        entropy of its logits.
    steps: more than 1 if later steps still warm up, as in some modes of torch.compile.
    accumulate: micro-steps per step. autocast: a dtype such as torch.bfloat16.
    """
    started = time.perf_counter()
    whole_number("steps", steps, 1)
    whole_number("accumulate", accumulate, 1)
    given: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers: list[Any] = [each for each in given if each is not None]
    parameters = _named_parameters(model, optimizers)
    exchange, passes, skipped = _plan_passes(model, steps)
    twins = {}
    for each in optimizers:
        if reason := _why_not_warm(each):
            skipped["optimizer"] = reason
        else:
            # A copy with the same options and parameters, without hooks and schedulers.
            twins[each] = type(each)([dict(group) for group in each.param_groups])
    device = next(iter(parameters.values())).device.type
    wrote = ""
    with _restoring(model, parameters, batch) as snapshot:
        for number in range(passes):
            for parameter in parameters.values():
                parameter.grad = None
            for micro_step in range(accumulate):
                with syncing(model, exchange and micro_step == accumulate - 1):
                    with nullcontext() if autocast is None else torch.autocast(device, autocast):
                        value = (loss or _default_loss)(model, batch)
                    _check_loss(value)
                    torch.autograd.backward(value)
            # Raised after all passes, because other ranks may be in their next one.
            wrote = wrote or next(filter(snapshot.differs, parameters), "")
            for twin in twins.values() if number < steps else ():
                twin.step()
                snapshot.restore(parameters)
    if wrote:
        raise ConfigError(
            f"prewarm: a forward or backward pass writes to parameter {wrote!r}, perhaps in a hook "
            "that steps an optimizer. Its other changes cannot be restored: train without prewarm."
        )
    state_bytes = sum([_hand_over(twin, each) for each, twin in twins.items()])
    seconds = time.perf_counter() - started
    return Prewarmed(seconds, passes * accumulate, state_bytes, snapshot.nbytes, skipped)


def _named_parameters(model: Any, optimizers: list[Any]) -> dict[str, Tensor]:
    """Return all parameters by name. Raise ConfigError if anything cannot be restored."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"prewarm: model is a {type(model).__name__}, not a torch.nn.Module")
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    own = set(parameters.values())
    for each in optimizers:
        if not isinstance(each, Optimizer):
            kind = type(each).__name__
            raise ConfigError(f"prewarm: optimizer is a {kind}, not a torch.optim.Optimizer")
        if any(
            parameter not in own for group in each.param_groups for parameter in group["params"]
        ):
            raise ConfigError(f"prewarm: {type(each).__name__} has parameters that the model lacks")
    if not any(parameter.requires_grad for parameter in own):
        raise ConfigError("prewarm: no parameter requires a gradient")
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(f"prewarm: {name!r} has no shape yet. Run the model once first.")
        plain = local(tensor)
        if type(plain) not in PLAIN or plain.layout is not torch.strided or plain.is_quantized:
            kind = f"{type(plain).__name__} of {plain.layout} and {plain.dtype}"
            raise ConfigError(f"prewarm: {name!r} is a {kind}, which cannot be restored bit by bit")
    for name, module in model.named_modules():
        kind = type(module).__name__
        has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
        if has_extra_state or kind == "FullyShardedDataParallel":
            what = "its extra state" if has_extra_state else "its flat parameters (use fully_shard)"
            raise ConfigError(f"prewarm: {name!r} is a {kind}: {what} cannot be restored")
    return parameters


def _plan_passes(model: nn.Module, steps: int) -> tuple[bool, int, dict[str, str]]:
    """Return if ranks exchange gradients, the number of passes, and skipped parts."""
    ddp = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    world = max((each.process_group.size() for each in ddp), default=1)
    if world <= EXACT_RANKS:
        return True, max(steps, DDP_PASSES if ddp else 1), {}
    reason = f"on {world} ranks they would change the order in which gradients are summed"
    if any(each.static_graph for each in ddp):
        raise ConfigError(f"prewarm: static_graph=True builds DDP's final buckets: {reason}")
    return False, steps, {"DDP buckets": reason}


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss in the model's output, or the cross entropy of its logits."""
    targets: Any
    if isinstance(batch, Mapping):
        output, targets = model(**batch), batch.get("labels")
    elif hasattr(batch, "inputs"):
        output, targets = model(batch.inputs), batch.targets
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        output, targets = model(batch[0]), batch[1]
    else:
        raise ConfigError(
            f"prewarm: batch is a {type(batch).__name__}; without loss= it must be (inputs, targets), "
            "a Batch or a mapping of the model's arguments"
        )
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    value: Any = output if named is None else named
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if not isinstance(value, Tensor) or getattr(targets, "shape", None) != value.shape[:-1]:
        raise ConfigError(
            f"prewarm: the model returned a {type(output).__name__}, which is neither a loss nor "
            "logits for the targets: pass loss=function(model, batch)"
        )
    cross_entropy = nn.functional.cross_entropy
    return cross_entropy(value.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        needed = "a tensor with one element that depends on a parameter"
        raise ConfigError(f"prewarm: the loss must be {needed}, not {found}")


# The optimizer


def _why_not_warm(optimizer: Optimizer) -> str:
    """Return the reason for skipping an optimizer, or an empty text."""
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        return f"{name} already has state"
    groups = optimizer.param_groups
    odd = any(group.get("dampening") or group.get("differentiable") for group in groups)
    is_known = type(optimizer) in FRESH and not odd
    return "" if is_known else f"the initial state of {name} is not known"


def _hand_over(twin: Optimizer, optimizer: Optimizer) -> int:
    """Move the copy's state to the optimizer, reset to its initial values. Return its bytes."""
    total = 0
    for parameter, state in twin.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                local(value).fill_(FRESH[type(optimizer)].get(name, 0.0))
                total += local(value).nbytes
        optimizer.state[parameter] = state
    return total


# The snapshot


def _bits(plain: Tensor) -> Tensor:
    """Return a tensor's bytes. Compared as numbers, NaN would differ and -0.0 equal 0.0."""
    return plain.resolve_conj().contiguous().flatten().view(torch.uint8)


class _Snapshot:
    """Copies of tensors, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {name: each for name, each in tensors.items() if not each.is_meta}
        self.copies = {name: local(each).clone() for name, each in self._tensors.items()}
        self.nbytes = sum(copy.nbytes for copy in self.copies.values())

    def differs(self, name: str) -> bool:
        """Compare a tensor with its copy, bit by bit."""
        now, then = local(self._tensors[name]), self.copies[name]
        return now.shape != then.shape or not torch.equal(_bits(now), _bits(then))

    @torch.no_grad()
    def restore(self, names: Iterable[str]) -> None:
        """Copy changed tensors back. Unchanged ones may be expanded, which cannot be written."""
        for name in filter(self.differs, list(names)):
            with suppress(RuntimeError):  # checked below
                local(self._tensors[name]).copy_(self.copies[name])
            if self.differs(name):
                raise ConfigError(f"prewarm: {name!r} cannot be restored: build the model again")


@contextmanager
def _restoring(model: nn.Module, parameters: dict[str, Tensor], batch: Any) -> Iterator[_Snapshot]:
    """Restore everything that a step changes, except the optimizer, even after an exception."""
    tensors = parameters | dict(model.named_buffers())
    tensors |= {f"tensor {i} of the batch": each for i, each in enumerate(_tensors_in(batch))}
    cuda: Any = torch.cuda
    devices = range(cuda.device_count()) if cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for name, parameter in parameters.items():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            if parameter.grad is not None:
                tensors[f"gradient of {name}"] = parameter.grad
        for name, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                # Stays warm, but after a pass without exchange it would not send its buffers.
                synced = module.require_forward_param_sync
                stack.callback(setattr, module, "require_forward_param_sync", synced)
            else:
                for key, value in {"": vars(module), **vars(module)}.items():
                    if isinstance(value, Tensor):
                        tensors.setdefault(f"{name}.{key}", value)
                    elif isinstance(value, list | dict | set):
                        stack.callback(_put_back, value, value.copy())
        snapshot = _Snapshot(tensors)
        stack.callback(snapshot.restore, snapshot.copies)
        yield snapshot


def _put_back(container: Any, items: Any) -> None:
    """Restore the items of a module's container: its attributes, or an attribute."""
    container.clear()
    container.extend(items) if isinstance(items, list) else container.update(items)


def _tensors_in(batch: Any) -> list[Tensor]:
    if hasattr(batch, "inputs"):
        batch = [batch.inputs, batch.targets]
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return [each for each in parts if isinstance(each, Tensor)]

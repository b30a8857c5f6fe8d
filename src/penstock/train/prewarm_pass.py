"""One forward and one backward pass, as a training loop would do them.

In:    a model, and a batch of the shape that training will have.
Out:   gradients, and how long it took.
Where: the trainer's thread; in DDP and FSDP on all ranks at once, for the passes talk to the other ranks.
State: none. Each pass gets a copy of the batch, so that a model may write to its inputs.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.encode.batch import Batch
from penstock.errors import ConfigError
from penstock.types import IGNORE

Loss = Callable[[nn.Module, Any], Tensor]
Autocast = torch.dtype | AbstractContextManager[Any] | None


@dataclass
class Clock:
    """Seconds by part."""

    device: torch.device
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was queued belongs to this part
        setattr(self, part, getattr(self, part) + time.perf_counter() - begun)


@dataclass(frozen=True)
class Pass:
    """How a step of the training loop computes its gradients."""

    model: nn.Module
    batch: Any
    loss: Loss
    accumulate: int
    autocast: Autocast
    scaler: Any
    device: torch.device
    exchange: bool = True
    """Whether the ranks exchange gradients, as they do in training."""

    def run(self, clock: Clock) -> None:
        """All micro-steps of one step. As in training, gradients are exchanged with the last one."""
        for micro_step in range(self.accumulate):
            batch = copy_batch(self.batch)
            last = micro_step == self.accumulate - 1
            with nullcontext() if last and self.exchange else gradients_stay_here(self.model):
                with clock.time("forward_s"), self._autocast():
                    loss = self.loss(self.model, batch)
                check_loss(loss)
                if self.scaler is not None:
                    loss = self.scaler.scale(loss)
                with clock.time("backward_s"):
                    torch.autograd.backward(loss)

    def _autocast(self) -> AbstractContextManager[Any]:
        if isinstance(self.autocast, torch.dtype):
            return torch.autocast(self.device.type, dtype=self.autocast)
        return nullcontext() if self.autocast is None else self.autocast


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise ConfigError(
            f"prewarm: loss must be a tensor with one element, not {form}: pass loss=callable(model, batch)"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "prewarm: the loss depends on no parameter that requires a gradient, so there is no backward pass to warm"
        )


def copy_batch(value: Any) -> Any:
    """The same shapes, strides, types, devices and contents in other memory, so that the caller's stays untouched."""
    if isinstance(value, Tensor):
        return copy_tensor(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Batch):
        twin = copy.copy(value)
        for name in ("inputs", "targets", "positions", "cu_seqlens", "data"):
            setattr(twin, name, copy_batch(getattr(value, name)))
        return twin
    if isinstance(value, Mapping):
        # Of the same kind, for some models ask for attributes.
        table: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            table[key] = copy_batch(item)
        return table
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy_batch, value))
    if isinstance(value, list | tuple):
        return type(value)(map(copy_batch, value))
    return value


def copy_tensor(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    twin = plain.clone()
    ordinary = type(tensor) is Tensor and plain.layout is torch.strided and not plain.is_nested
    if ordinary and twin.stride() != plain.stride():
        # A compiled model asks for the strides it has seen; rows cut out of longer ones keep theirs.
        if all(
            stride > 0 for stride, size in zip(plain.stride(), plain.shape, strict=True) if size > 1
        ):
            twin = torch.empty_strided(
                plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device
            ).copy_(plain)
        else:
            twin = plain
    # Marks of torch.compile, such as which sizes vary; but not what the copy has of its own, as the memory of a jagged one.
    vars(twin).update(
        {name: value for name, value in vars(tensor).items() if name not in vars(twin)}
    )
    return twin.requires_grad_(tensor.requires_grad)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """What the model calls its loss, or else cross entropy of its logits with the targets."""
    if isinstance(batch, Mapping):
        return loss_of(model(**batch), batch.get("labels"))
    if not isinstance(batch, Batch) and not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise ConfigError(
            f"prewarm: batch is a {type(batch).__name__}; without loss= it must be (inputs, targets), a Batch or a mapping "
            "of what the model takes"
        )
    inputs, targets = (torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in batch)
    if targets is not None and takes_targets(model):
        return loss_of(model(inputs, targets), targets)
    return loss_of(model(inputs), targets)


def takes_targets(model: nn.Module) -> bool:
    """Whether the second argument of the model itself, whatever it is wrapped in, is for the targets."""
    inner: Any = model
    while isinstance(inner, nn.Module) and (
        hasattr(inner, "_orig_mod") or isinstance(inner, DistributedDataParallel)
    ):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [
        p.name for p in inspect.signature(inner.forward).parameters.values() if p.kind in positional
    ]
    return len(names) > 1 and (
        names[1] == "y" or any(word in names[1] for word in ("target", "label"))
    )


def loss_of(output: Any, targets: Any) -> Tensor:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    parts = [named, *(output if isinstance(output, list | tuple) else [output])]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    for tensor in tensors:
        if tensor.numel() == 1 and tensor.dim() == 0:
            return tensor
    if not tensors or not isinstance(targets, Tensor) or tensors[0].shape[:-1] != targets.shape:
        raise ConfigError(
            f"prewarm: the model returned a {type(output).__name__} that is neither a loss nor logits for targets of shape "
            f"{tuple(targets.shape) if isinstance(targets, Tensor) else None}: pass loss=callable(model, batch)"
        )
    return nn.functional.cross_entropy(
        tensors[0].flatten(0, -2), targets.flatten(), ignore_index=IGNORE
    )


def in_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def unsettled(model: nn.Module) -> list[DistributedDataParallel]:
    """Those of DDP whose buckets will be built anew in the pass after the first exchange of gradients."""
    return [
        ddp
        for ddp in in_ddp(model)
        if not getattr(ddp, "_has_rebuilt_buckets", False)
        and (ddp.static_graph or not ddp.find_unused_parameters)
    ]


def sharded(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return (
        [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
    )


def reset_sharded(model: nn.Module) -> None:
    """Bring FSDP back to where a pass begins."""
    below: set[nn.Module] = set()
    for module in sharded(model):
        if hasattr(module, "reset_iter_state"):
            if module not in below:  # the outermost looks after all below it
                module.reset_iter_state()
                below.update(module.modules())
        else:  # in older versions of torch parameters can be sharded again, and the rest is for whoever makes the model anew
            module.reshard()


@contextmanager
def gradients_stay_here(model: nn.Module) -> Iterator[None]:
    """Add gradients up without exchanging them, as training does in all micro-steps but the last."""
    with ExitStack() as stack:
        for module in in_ddp(model):
            stack.enter_context(module.no_sync())
        for module in sharded(model):
            module.set_requires_gradient_sync(False, recurse=False)
            stack.callback(module.set_requires_gradient_sync, True, recurse=False)
        yield

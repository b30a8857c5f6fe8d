"""One process, DDP or FSDP2: join the other ranks, wrap the model, sum over ranks.

Ranks communicate over gloo on CPUs and NCCL on GPUs. The GPU path has not been run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.config import current_shard, launched
from penstock.errors import ConfigError, PeerFailed
from penstock.feed.collectives import GlooRanks, Ranks
from penstock.train.options import Parallel, TrainOptions, parallel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of this rank, and its group of ranks."""

    parallel: Parallel
    device: torch.device
    dtype: torch.dtype
    """The type to compute in."""
    ranks: Ranks


@contextmanager
def join_ranks(options: TrainOptions, device_name: str | None) -> Iterator[Placement]:
    """Join the process group, if there are other ranks, and leave it at the end."""
    try:
        yield _join(options, device_name)
    except RuntimeError as error:
        # Gloo has no exception of its own: its errors name its source files.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        shard, first_line = current_shard(), str(error).partition("\n")[0][:300]
        raise PeerFailed(
            f"rank {shard.rem} of {shard.mod} lost the other ranks: one of them has exited or "
            f"hangs; see its own output ({first_line})"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(options: TrainOptions, device_name: str | None) -> Placement:
    shard = current_shard()
    how, device = parallel(options, shard.mod), torch.device(device_name or "cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {options.device}: torch finds no GPU. Use --device cpu.")
        torch.cuda.set_device(device)
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    name = options.dtype if options.dtype != "auto" else "bfloat16" if has_bf16 else "float32"
    ranks = Ranks()
    if how != "single":
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout_s = options.collective_timeout
        alone: dict[str, Any] = {}
        if not launched():
            alone = {"store": vars(dist)["HashStore"](), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **alone)
        if shard.mod > 1:
            # The others wait for the vote of a rank, which may wait this long for data.
            waits_s = max(options.loader_timeout, options.stall_timeout)
            ranks = GlooRanks(timeout_s + waits_s)
    return Placement(how, device, getattr(torch, name), ranks)


def wrap(model: nn.Module, placement: Placement) -> nn.Module:
    """Return the model wrapped in DDP or FSDP2, if any."""
    device, dtype = placement.device, placement.dtype
    if placement.parallel == "ddp":
        # Buffers never change, so they need not be sent. torch has renamed the argument.
        known = inspect.signature(DistributedDataParallel).parameters
        names = ("forward_sync_buffers", "broadcast_buffers")
        arguments: dict[str, Any] = {next(name for name in names if name in known): False}
        ids = [device.index] if device.type == "cuda" else None
        arguments |= {"device_ids": ids, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, **arguments)
    if placement.parallel == "fsdp":
        # Inputs are not cast: the rotary tables need float32.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def syncing(model: nn.Module, exchange: bool) -> Iterator[None]:
    """Exchange gradients between ranks in backward passes, or only accumulate them locally."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(exchange, recurse=False)
                stack.callback(module.set_requires_gradient_sync, True, recurse=False)
            elif isinstance(module, DistributedDataParallel) and not exchange:
                stack.enter_context(module.no_sync())
        yield


def autocast(placement: Placement) -> AbstractContextManager[Any]:
    """Compute in `placement.dtype`. FSDP2 casts by its own policy."""
    if placement.dtype == torch.float32 or placement.parallel == "fsdp":
        return nullcontext()
    return torch.autocast(placement.device.type, placement.dtype)


def add_up(values: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Replace values with their sum over all ranks."""
    if placement.parallel != "single":
        dist.all_reduce(values)
    return values


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank."""
    plain = tensor.detach()
    return plain.to_local() if hasattr(plain, "to_local") else plain


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, on every rank."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def scatter(ranks: Ranks, deal: Callable[[], list[T]]) -> T:
    """Call `deal` on rank 0 and return its n-th item on rank n. A failure raises on every rank."""
    if ranks.group is None:
        return deal()[0]
    items: list[Any] = []
    error: Exception | None = None
    if ranks.rank == 0:
        try:
            items = [(item, "") for item in deal()]
        except Exception as failed:
            error, items = failed, [(None, f"{type(failed).__name__}: {failed}")] * ranks.world
    received: list[Any] = [None]
    dist.scatter_object_list(received, items or None, src=0, group=ranks.group)
    item, reason = received[0]
    if reason:
        raise PeerFailed(f"rank 0: {reason}") from error
    dealt: T = item
    return dealt

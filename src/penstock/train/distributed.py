"""One process, DDP or FSDP2: where a run's ranks meet, and how a model is spread over them.

In:    the options, and what the launcher left in the environment.
Out:   this rank's device and its peers; the model, wrapped.
Where: the trainer's thread.
State: torch's default process group, from `meet` to `part`.

On CPUs the ranks talk over gloo, on GPUs over NCCL. The GPU side was written without one at hand and has not been run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from penstock.config import current_shard, launched
from penstock.errors import ConfigError, PeerFailed
from penstock.feed.collectives import GlooRanks, Ranks
from penstock.train.options import Parallel, TrainOptions, parallel


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank runs."""

    parallel: Parallel
    device: torch.device
    peers: Ranks

    @property
    def first(self) -> bool:
        """Whether it is the rank that speaks for all."""
        return self.peers.rank == 0


def meet(options: TrainOptions, device_name: str | None) -> Place:
    """Wait for the other ranks, if there are any."""
    shard = current_shard()
    how = parallel(options, shard.mod)
    device = torch.device(device_name or "cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {options.device}: torch sees no GPU here. Use --device cpu, or install a build of torch for CUDA."
            )
        torch.cuda.set_device(device)
    if how == "single":
        return Place(how, device, Ranks())
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=options.collective_timeout)
    if launched():
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            raise PeerFailed(
                f"rank {shard.rem} of {shard.mod} did not meet the others within {options.collective_timeout:g} s "
                f"({str(error).partition(chr(10))[0][:300]}). See that all ranks are started and can reach "
                "MASTER_ADDR, or allow more with --collective-timeout."
            ) from error
    else:  # nobody else is there to be met
        dist.init_process_group(backend, store=_store(), rank=0, world_size=1, timeout=timeout)
    if shard.mod == 1:
        return Place(how, device, Ranks())
    # A rank may wait for data as long as its limits allow before it votes, and the others wait for its vote.
    patience = options.collective_timeout + max(options.loader_timeout, options.stall_timeout)
    return Place(how, device, GlooRanks(patience))


def _store() -> Any:
    return vars(dist)["HashStore"]()


@contextlib.contextmanager
def blaming_peers() -> Iterator[None]:
    """One of training's collectives that fails because another rank has ended, or hangs, says just that."""
    try:
        yield
    except RuntimeError as error:
        # Gloo has no exception of its own: its errors are known by the file that they come from.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        shard, told = current_shard(), str(error).partition("\n")[0][:300]
        raise PeerFailed(
            f"rank {shard.rem} of {shard.mod} lost the other ranks: one of them has ended or hangs; see its own output ({told})"
        ) from error


def part() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def computes_in(options: TrainOptions, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in."""
    if options.dtype != "auto":
        chosen: torch.dtype = getattr(torch, options.dtype)
        return chosen
    return (
        torch.bfloat16
        if device.type == "cuda" and torch.cuda.is_bf16_supported()
        else torch.float32
    )


def spread(model: nn.Module, place: Place, dtype: torch.dtype) -> nn.Module:
    """The model, as this rank holds it."""
    if place.parallel == "ddp":
        ids = [place.device.index] if place.device.type == "cuda" else None
        # Its buffers are tables that never change: nobody has to send them. Newer releases call that by another name.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        unsent: dict[str, Any] = {
            next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known): False
        }
        return nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True, **unsent
        )
    if place.parallel == "fsdp":
        narrow = None if dtype == torch.float32 else dtype
        # Inputs stay as they are: the tables of the rotation would lose their digits.
        policy = MixedPrecisionPolicy(
            param_dtype=narrow,
            reduce_dtype=None if narrow is None else torch.float32,
            cast_forward_inputs=False,
        )
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def bare(model: nn.Module) -> nn.Module:
    """The model without DDP around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextlib.contextmanager
def synchronising(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Whether a backward pass adds its gradients up over the ranks; only a step's last one has to."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        yield
    elif isinstance(model, nn.parallel.DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
    else:
        yield


def computing(place: Place, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Mixed precision, where it is asked for; FSDP2 sees to its own."""
    if dtype == torch.float32 or place.parallel == "fsdp":
        return contextlib.nullcontext()
    return torch.autocast(place.device.type, dtype)


def add_up(values: torch.Tensor, place: Place) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if place.parallel != "single":
        dist.all_reduce(values)
    return values


def local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient."""
    part: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


def whole(norm: torch.Tensor) -> torch.Tensor:
    """A number that all ranks have, out of a DTensor."""
    value: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return value

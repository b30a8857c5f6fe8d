"""Ranks end a finite stream together.

In:    whether this rank has another batch.
Out:   the batch, if every rank has one; None if one has none; an error if one failed.
Where: the trainer's thread, once a batch: all ranks ask for their batches in step.
State: a process group of its own, on the CPU, so that training's collectives are not disturbed.
Cost:  one small collective a batch. Endless streams do without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from penstock.errors import ConfigError, LoaderTimeout, PeerFailed, UnevenRanks
from penstock.feed.ranks import reaching
from penstock.types import Shard
from penstock.watch.stage_timer import RANKS, Clock, NullClock

T = TypeVar("T")

FAILED, ENDED, READY = 0, 1, 2
DEADLINE_S = 300.0


class RankAgreement:
    """What all ranks do next."""

    def __init__(self, shard: Shard, clock: Clock | None = None) -> None:
        self._clock = clock or NullClock()
        distributed = _distributed()
        if distributed is None or distributed.get_world_size() != shard.mod:
            raise UnevenRanks(
                f"epochs=… on {shard.mod} ranks: their shares of the text differ in length, so they have to agree "
                "where to end, and torch.distributed is not initialised. Call init_process_group first, or use "
                "epochs=None and count steps, or give shard=… to let each reader run to its own end."
            )
        self._distributed = distributed
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))

    def next(self, take: Callable[[], T | None]) -> T | None:
        """This rank's batch, if all ranks have theirs."""
        try:
            batch = take()
        except LoaderTimeout:
            raise  # nobody has to know: the caller will ask again
        except Exception:
            # If the others cannot be told, they are gone: this rank's own error says more than that.
            with suppress(PeerFailed):
                self._least(FAILED)
            raise
        least = self._least(ENDED if batch is None else READY)
        if least == FAILED:
            raise PeerFailed("another rank failed to get its batch; its own error says why")
        return batch if least == READY else None

    def _least(self, status: int) -> int:
        import torch

        value = torch.tensor([status], dtype=torch.int32)
        with self._clock.stage(RANKS), reaching(self._distributed, DEADLINE_S):
            self._distributed.all_reduce(
                value, op=self._distributed.ReduceOp.MIN, group=self._group
            )
        return int(value.item())


def from_rank_0(make: Callable[[], bytes]) -> bytes:
    """What rank 0 makes, on every rank. If it fails there, it fails everywhere."""
    distributed = _distributed()
    if distributed is None:
        raise ConfigError(
            "share_listing=True needs torch.distributed to be initialised: call init_process_group first, or leave it out"
        )
    import torch

    first = distributed.get_rank() == 0
    made, error = b"", None
    with reaching(distributed, DEADLINE_S):
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
        try:
            if first:
                try:
                    made = b"+" + make()
                except Exception as failed:
                    made, error = f"-{type(failed).__name__}: {failed}".encode(), failed
            size = torch.tensor([len(made)], dtype=torch.int64)
            distributed.broadcast(size, src=0, group=group)
            room = torch.empty(int(size), dtype=torch.uint8)
            data = torch.frombuffer(bytearray(made), dtype=torch.uint8) if first else room
            distributed.broadcast(data, src=0, group=group)
            distributed.barrier(group=group)  # nobody lets go before all have it
        finally:
            distributed.destroy_process_group(group)
    if error is not None:
        raise error
    whole = bytes(data.numpy())
    if whole[:1] == b"-":
        raise PeerFailed(f"rank 0 could not list the data: {whole[1:].decode('utf-8', 'replace')}")
    return whole[1:]


def _distributed() -> Any:
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None

"""Exchange small values between ranks, separately from the collectives of training.

Every exchange runs on the trainer's thread, over its own gloo process group on the CPU, and has a
deadline: a dead or hung rank raises `PeerFailed`. All ranks must make the same calls in the same
order. A single rank needs neither torch nor a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from penstock.config import torch_distributed
from penstock.errors import ConfigError, LoaderTimeout, PeerFailed
from penstock.types import Shard
from penstock.watch.stage_timer import RANKS, Clock, NullClock

T = TypeVar("T")

DEADLINE_S = 300.0
MAX_TEXT = 4000
"""Longest text that is sent to other ranks, in characters."""

FAILED, ENDED, READY = 0, 1, 2


class Ranks:
    """The ranks of a run. This base class is a run of one rank."""

    rank, world = 0, 1
    group: Any = None
    """The process group on the CPU; None for a single rank."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of all ranks, in rank order. All ranks must pass equally many."""
        return [list(values)]

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order, cut to `MAX_TEXT` characters."""
        return [text]


class GlooRanks(Ranks):
    """All ranks of an initialised torch.distributed. Creating it is a collective."""

    def __init__(self, deadline_s: float = DEADLINE_S, clock: Clock | None = None) -> None:
        """Create the process group.

        deadline_s: how long to wait for other ranks. It must cover everything a rank does between
            two calls, such as a checkpoint or a compilation. A larger value detects a hang later.
        clock: records the time spent here as stage "ranks".
        """
        from torch import distributed

        self._distributed = distributed
        self._deadline_s, self._clock = deadline_s, clock or NullClock()
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        with self._reaching():
            self.group = distributed.new_group(
                backend="gloo", timeout=timedelta(seconds=deadline_s)
            )

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        import torch

        own = torch.tensor(values)
        gathered = [torch.empty_like(own) for _ in range(self.world)]
        with self._reaching():
            self._distributed.all_gather(gathered, own, group=self.group)
        return [each.tolist() for each in gathered]

    def gather_texts(self, text: str) -> list[str]:
        return self.gather_objects(text[:MAX_TEXT])

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Pickles them."""
        gathered: list[Any] = [None] * self.world
        with self._reaching():
            self._distributed.all_gather_object(gathered, value, group=self.group)
        return gathered

    def close(self) -> None:
        """Wait for all ranks, then destroy the group."""
        with self._reaching():
            self._distributed.barrier(group=self.group)
        self._distributed.destroy_process_group(self.group)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn gloo's errors into `PeerFailed` and record the time."""
        try:
            with self._clock.stage(RANKS):
                yield
        except RuntimeError as error:
            raise PeerFailed(
                f"rank {self.rank} of {self.world} could not reach the other ranks within "
                f"{self._deadline_s:g} s: one of them has exited or hangs; see its own output "
                f"({str(error).splitlines()[0][:300]})"
            ) from error


class RankAgreement:
    """Ends a finite stream on all ranks after the same number of batches."""

    def __init__(self, shard: Shard, clock: Clock | None = None) -> None:
        distributed = torch_distributed()
        if distributed is None or distributed.get_world_size() != shard.mod:
            raise ConfigError(
                f"epochs=… on {shard.mod} ranks: their parts of the data differ in length, so they must agree where to "
                "end, but torch.distributed is not initialised. Call init_process_group first, or use epochs=None and "
                "count steps, or pass shard=… to let each rank run to its own end."
            )
        self._ranks = GlooRanks(clock=clock)

    def next(self, take: Callable[[], T | None]) -> T | None:
        """Return this rank's batch, or None if the stream of any rank has ended."""
        try:
            batch = take()
        except Exception as error:
            # A LoaderTimeout is not reported to other ranks, because the caller retries.
            if not isinstance(error, LoaderTimeout):
                with suppress(PeerFailed):  # this rank's own error is raised below
                    self._ranks.gather([FAILED])
            raise
        votes = [vote for (vote,) in self._ranks.gather([ENDED if batch is None else READY])]
        if FAILED in votes:
            raise PeerFailed(
                f"rank {votes.index(FAILED)} of {len(votes)} failed to get its batch; see its own output"
            )
        return None if ENDED in votes else batch


def from_rank_0(make: Callable[[], bytes]) -> bytes:
    """Call `make` on rank 0 and return its result on every rank. A failure raises on every rank."""
    if torch_distributed() is None:
        raise ConfigError(
            "share_listing=True needs torch.distributed: call init_process_group first, or leave it out"
        )
    ranks = GlooRanks()
    made: bytes | str = b""
    try:
        if ranks.rank == 0:
            made = make()
    except BaseException as error:
        made = f"{type(error).__name__}: {error}"
        raise
    finally:
        made = ranks.gather_objects(made)[0]
        ranks.close()
    if isinstance(made, str):
        raise PeerFailed(f"rank 0 could not list the data: {made}")
    return made

"""The interface between the loader and a kind of data.

A `Source` describes data: fingerprints for the state, first positions, and the `work` that workers
do, an object whose methods are pure functions of their arguments. Opened for a `RunContext`, it gives
a `Producer` of batches. Sources of packed rows open `Lanes`, which a mixture can interleave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from penstock.encode.batch import Batch
from penstock.encode.batching import Batcher
from penstock.feed.worker_pool import Pool
from penstock.types import Address, LanePosition, MiB, Shard, StreamPosition
from penstock.watch.stage_timer import Clock, NullClock

if TYPE_CHECKING:
    from penstock.encode.rows import Packer
    from penstock.state import State


BEGINNING = StreamPosition(0, 0)
BLOCK_BYTES = 8 * MiB
"""Small batches are made together up to this size: 32 batches of 16 rows of 1024 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """How a stream is run, and from where. `settings` fills in the first part from the user's
    options, the loader the second part from its state."""

    shuffle: bool
    seed: int
    batch_size: int
    drop_last: bool
    epochs: int | None
    shard: Shard
    alone: bool
    """True if the user gave the shard: it need not keep in step with others."""
    n_workers: int
    workers: str
    cpus: frozenset[int] | None
    prefetch_size: int
    row_bytes: int
    """Bytes of a row in the queue; 0 if that is not known beforehand."""
    queue_bytes: int
    """Bytes that the queue, the batch in hand and the device copies are expected to take."""
    read_ahead_bytes: int
    tensors: bool
    device: str | None

    lanes: int = 1
    skip: frozenset[Address] = frozenset()
    weights: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For mixtures: from which global row on which weights hold."""
    first_epoch: int = 0
    end_epoch: int | None = None
    by_epoch: bool = False
    """True if each lane ends with its epoch, for a mixture that then reopens it."""
    positions: Mapping[int, LanePosition] = field(default_factory=dict)
    start: StreamPosition = BEGINNING
    state: Callable[[StreamPosition], dict[str, Any]] = StreamPosition._asdict
    clock: Clock = field(default_factory=NullClock)

    @property
    def own_lanes(self) -> range:
        return range(self.shard.rem, self.lanes, self.shard.mod)

    @property
    def block(self) -> int:
        """Batches that are made at once: more than one if they are small."""
        return max(1, BLOCK_BYTES // (self.row_bytes * self.batch_size)) if self.row_bytes else 1


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


class Counted(Protocol):
    """Something that runs and counts what it does: by default, what its inner parts do."""

    inner: Sequence[Counted] = ()

    def totals(self) -> dict[str, int]:
        """Return what was read into the stream, by its name in `Stats`."""
        return sum((Counter(each.totals()) for each in self.inner), Counter())

    def bad(self) -> dict[str, int]:
        """Return the number of rejected records by reason."""
        return sum((Counter(each.bad()) for each in self.inner), Counter())

    def gauges(self) -> dict[str, Any]:
        """Return the state of read-ahead and fetches, for telemetry."""
        return {name: value for each in self.inner for name, value in each.gauges().items()}

    def stop(self) -> None:
        """Cancel what is under way, without waiting."""
        for each in self.inner:
            each.stop()

    def close(self) -> None:
        """Release everything. Called once no worker runs any more."""
        for each in self.inner:
            each.close()


class Work:
    """What workers do: methods that are pure functions of their arguments. It can be pickled."""

    clock: Clock

    def stop(self) -> None:
        """Cancel what is under way, without waiting."""

    def close(self) -> None:
        """Close files and connections. Called once no worker runs any more."""


class Producer(Counted, Protocol):
    """Makes the batches of one run, on the producer thread."""

    def take(self, n: int) -> list[Batch]:
        """Return the next batches, at most `n`; none at the end of a finite stream."""


class Lanes(Counted, Protocol):
    """A rank's lanes of a source of rows."""

    packers: Sequence[Packer]

    def reopen(self, index: int, epoch: int) -> None:
        """Begin an epoch with one lane: it gets a new packer."""
        return


class Source(Protocol):
    """A dataset as the loader sees it. Implementations inherit from it and override what differs."""

    by_lane: bool = False
    """True if the state has a position for each lane; otherwise a row number is enough."""
    shuffles: bool = False
    """The default of `shuffle`."""
    even: bool = False
    """True if all ranks get equally many batches of a finite stream without coordination."""
    skip: frozenset[Address] = frozenset()

    def data_id(self) -> dict[str, Any]:
        """Return what identifies the data in a state."""

    def tokenizer_id(self) -> dict[str, Any]:
        """Return what identifies the ids in a state."""
        return {}

    def settings_id(self) -> dict[str, Any]:
        """Return the settings that the stream depends on."""
        return {}

    def first_position(self, epoch: int) -> LanePosition:
        """Return where a lane begins an epoch."""
        return LanePosition(epoch=epoch)

    def first_source(self, epoch: int) -> Any:
        """Return where an iterable of samples begins an epoch."""
        return None

    def check_state(self, state: State) -> None:
        """Raise `StateError` or `SourceError` for a state that cannot belong to this data."""
        return

    def row_bytes(self) -> int:
        """Return what a row takes in the queue; 0 if that is not known beforehand."""
        return 0

    def listings(self) -> list[tuple[float, float]]:
        """Return when files were listed, once: for the timing of the first batch."""
        return []

    def length(self) -> int | None:
        """Return the rows or samples of an epoch, if known."""
        return None

    def batches(self, run: RunContext) -> int | None:
        """Return the batches of a pass, if they are known and do not follow from `length`."""
        return None

    def work(self, run: RunContext) -> Any:
        """Return the `Work` of a run."""

    def open(self, run: RunContext, pool: Pool, work: Any) -> Producer:
        """Begin a run. `work` is this process's copy of what the pool's workers call."""


@runtime_checkable
class RowSource(Source, Protocol):
    """A source whose rows all have `seq_len + 1` ids."""

    by_lane: bool = True
    seq_len: int
    positions: bool
    dtype: np.dtype[Any]

    def row_bytes(self) -> int:
        return (3 if self.positions else 2) * 8 * self.seq_len

    def open_lanes(self, run: RunContext, pool: Pool, work: Any) -> Lanes:
        """Open the lanes of this rank."""

    def open(self, run: RunContext, pool: Pool, work: Any) -> Producer:
        return RowProducer(self, run, self.open_lanes(run, pool, work))


class RowProducer(Batcher, Producer):
    """Deals batches from the lanes of a run."""

    def __init__(
        self, source: RowSource, run: RunContext, lanes: Lanes, total_rows: int | None = None
    ) -> None:
        """`total_rows` is for map-style data: see `Batcher`."""
        super().__init__(lanes.packers, source, run, total_rows)
        self.lanes, self.inner = lanes, [lanes]

    def totals(self) -> dict[str, int]:
        packed = sum((packer.counts for packer in self.lanes.packers), Counter())
        return super().totals() | packed

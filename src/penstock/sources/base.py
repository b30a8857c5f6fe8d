"""The interface between the loader and a kind of data.

A `Source` describes data: fingerprints for the state, first positions, and the `Work` that workers
do, whose methods are pure functions of their arguments. `Source.open` starts a run and returns a
`Producer` of batches. Sources of packed rows open `Lanes`, which a mixture can interleave.
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
"""Small batches are made together, up to this size: 32 batches of 16 rows of 1024 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The parameters of one run. `settings` fills the first group of fields from the user's
    options; the loader fills the second group from its state."""

    shuffle: bool
    seed: int
    batch_size: int
    drop_last: bool
    epochs: int | None
    shard: Shard
    alone: bool
    """True for an explicit shard, which does not coordinate with other ranks."""
    n_workers: int
    workers: str
    cpus: frozenset[int] | None
    prefetch_size: int
    row_bytes: int
    """Bytes of a row in the queue; 0 if unknown."""
    queue_bytes: int
    """Estimated bytes of the queue, the current batch and the device copies."""
    read_ahead_bytes: int
    tensors: bool
    device: str | None

    lanes: int = 1
    skip: frozenset[Address] = frozenset()
    weights: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For mixtures: pairs of a global row and the weights from that row on."""
    first_epoch: int = 0
    end_epoch: int | None = None
    by_epoch: bool = False
    """True if each lane stops at the end of its epoch, so that a mixture can reopen it."""
    positions: Mapping[int, LanePosition] = field(default_factory=dict)
    start: StreamPosition = BEGINNING
    state: Callable[[StreamPosition], dict[str, Any]] = StreamPosition._asdict
    clock: Clock = field(default_factory=NullClock)

    @property
    def own_lanes(self) -> range:
        return range(self.shard.rem, self.lanes, self.shard.mod)

    @property
    def block(self) -> int:
        """Return the number of batches to make at once: more than one if they are small."""
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
    """A component with counters. By default it merges those of its inner components."""

    inner: Sequence[Counted] = ()

    def totals(self) -> dict[str, int]:
        """Return counters of the data read into the stream, keyed by field of `Stats`."""
        return sum((Counter(each.totals()) for each in self.inner), Counter())

    def bad(self) -> dict[str, int]:
        """Return the number of rejected records by reason."""
        return sum((Counter(each.bad()) for each in self.inner), Counter())

    def gauges(self) -> dict[str, Any]:
        """Return the state of read-ahead and fetches, for telemetry."""
        return {name: value for each in self.inner for name, value in each.gauges().items()}

    def stop(self) -> None:
        """Cancel pending work without waiting."""
        for each in self.inner:
            each.stop()

    def close(self) -> None:
        """Release all resources. Called after the workers have stopped."""
        for each in self.inner:
            each.close()


class Work:
    """The methods that workers call: pure functions of their arguments. Can be pickled."""

    clock: Clock

    def stop(self) -> None:
        """Cancel pending work without waiting."""

    def close(self) -> None:
        """Close files and connections. Called after the workers have stopped."""


class Producer(Counted, Protocol):
    """Makes the batches of one run, on the producer thread."""

    def take(self, n: int) -> list[Batch]:
        """Return up to `n` batches; an empty list at the end of a finite stream."""


class Lanes(Counted, Protocol):
    """The lanes of a row source that belong to this rank."""

    packers: Sequence[Packer]

    def reopen(self, index: int, epoch: int) -> None:
        """Start an epoch in one lane, with a new packer."""
        return


class Source(Protocol):
    """A dataset as the loader sees it. Implementations override what differs."""

    by_lane: bool = False
    """True if the state needs a position for each lane, False if a row number is enough."""
    shuffles: bool = False
    """The default of `shuffle`."""
    even: bool = False
    """True if all ranks get the same number of batches from a finite stream, uncoordinated."""
    skip: frozenset[Address] = frozenset()

    def data_id(self) -> dict[str, Any]:
        """Return the fields of a state that identify the data."""

    def tokenizer_id(self) -> dict[str, Any]:
        """Return the fields of a state that identify the tokenizer."""
        return {}

    def settings_id(self) -> dict[str, Any]:
        """Return the settings that determine the stream."""
        return {}

    def first_position(self, epoch: int) -> LanePosition:
        """Return the position of a lane at the start of an epoch."""
        return LanePosition(epoch=epoch)

    def first_source(self, epoch: int) -> Any:
        """Return the position of an iterable of samples at the start of an epoch."""
        return None

    def check_state(self, state: State) -> None:
        """Raise `StateError` or `SourceError` if a state cannot belong to this data."""
        return

    def row_bytes(self) -> int:
        """Return the bytes of a row in the queue; 0 if unknown."""
        return 0

    def listings(self) -> list[tuple[float, float]]:
        """Return and clear the times at which files were listed, for the first-batch timing."""
        return []

    def length(self) -> int | None:
        """Return the number of rows or samples in an epoch, if known."""
        return None

    def batches(self, run: RunContext) -> int | None:
        """Return the number of batches in a pass, if known and not derived from `length`."""
        return None

    def work(self, run: RunContext) -> Any:
        """Return the `Work` of a run."""

    def open(self, run: RunContext, pool: Pool, work: Any) -> Producer:
        """Start a run. `work` is this process's copy of the `Work` that the pool's workers call."""


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
    """Makes batches from the rows of a run's lanes."""

    def __init__(
        self, source: RowSource, run: RunContext, lanes: Lanes, total_rows: int | None = None
    ) -> None:
        """`total_rows` is for map-style data: see `Batcher`."""
        super().__init__(lanes.packers, source, run, total_rows)
        self.lanes, self.inner = lanes, [lanes]

    def totals(self) -> dict[str, int]:
        packed = sum((packer.counts for packer in self.lanes.packers), Counter())
        return super().totals() | packed

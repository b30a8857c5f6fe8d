"""What a loader needs to know of data, whatever its kind.

A `Source` describes: fingerprints for the state, places to begin at, and the `work` that workers do,
an object whose methods are pure functions of their arguments. Opened for a `Run`, it gives a
`Producer` of batches. Sources of packed rows open `Lanes` instead, which a mixture can share, and
`RowsProducer` deals batches from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.encode.batch import Batch, Position
from penstock.feed.pool import Pool
from penstock.state import State
from penstock.types import Address, Shard
from penstock.watch.spans import Clock, Quiet

if TYPE_CHECKING:
    from penstock.encode.rows import Packer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a stream is run, and from where on. Only the first five decide what it is."""

    shuffle: bool
    seed: int
    lanes: int
    skip: frozenset[Address]
    weights: tuple[tuple[int, tuple[int, ...]], ...]
    """For mixtures: from which global row on which weights hold."""
    shard: Shard
    alone: bool
    """Whether this shard need not go in step with others."""
    batch_size: int
    n_workers: int
    prefetch_size: int
    queue_bytes: int
    """What the queue may take, where the size of a batch is not known beforehand."""
    read_ahead_bytes: int
    drop_last: bool
    first_epoch: int
    end_epoch: int | None
    tensors: bool
    narrow: bool
    """Whether batches are on their way to a device, where they are widened."""
    report_docs: int
    places: Mapping[int, Any]
    source: Any
    """For an iterable of samples: where it stands."""
    row: int
    batch: int
    state: Callable[[Position], dict[str, Any]]
    clock: Clock = field(default_factory=Quiet)
    """What threads measure their time with."""

    @property
    def own_lanes(self) -> range:
        return range(self.shard.rem, self.lanes, self.shard.mod)


class Producer(Protocol):
    """Makes the batches of one run, on one thread at a time: the producer's, or whoever stands in for it."""

    def next(self) -> list[Batch]:
        """The next batches; none at the end of a finite stream."""

    def at_once(self) -> list[Batch]:
        """The next batches, if they can be made without waiting for anybody; else none. Whoever takes one of them
        calls its `finish`."""

    def totals(self) -> dict[str, int]:
        """What was read into the stream, by name as in `Stats`."""

    def bad(self) -> dict[str, int]:
        """Records left out, by reason."""

    def stop(self) -> None:
        """Have whoever reads stop soon. Waits for nobody."""

    def close(self) -> None:
        """Let go of everything. Called when no thread runs any more."""


class Lanes(Protocol):
    """The lanes of one run of a source of rows."""

    @property
    def packers(self) -> Sequence[Packer]: ...
    def totals(self) -> dict[str, int]: ...
    def bad(self) -> dict[str, int]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Source(Protocol):
    """A dataset, as the loader sees it. Those who are one say so, and write only what differs."""

    by_lane: bool
    """Whether the state is kept by lane. Where it is not, a row's number says it all."""
    shuffles: bool
    """Whether it is shuffled unless told otherwise."""
    even: bool
    """Whether all ranks get equally many batches of a finite stream without having to agree on it."""
    skip: frozenset[Address]
    report_docs: int = 2000
    """Documents between two log lines; 0 for none."""

    def data_id(self) -> dict[str, Any]:
        """Identifies the data in a state."""

    def tokenizer_id(self) -> dict[str, Any]:
        """Identifies the ids in a state."""

    def settings_id(self) -> dict[str, Any]:
        """The settings that the stream depends on."""

    def first_place(self, epoch: int) -> Any:
        """Where a lane begins an epoch."""

    def start(self, epoch: int) -> Any:
        """For an iterable of samples: where it stands at the beginning of an epoch."""
        return None

    def check_place(self, value: Any) -> Any:
        """A place as it was saved, checked. Raises `StateFormat`."""

    def check_data(self, state: State) -> None:
        """Say more of data that changed than that it did, where that can be known. Raises `SourceChanged`."""
        return

    def check_state(self, state: State) -> None:
        """Whatever else has to fit. Raises `StateFormat`."""
        return

    def row_bytes(self) -> int:
        """About what a row of a batch takes in the queue; 0 where that is not known beforehand."""

    def listings(self) -> list[tuple[float, float]]:
        """From when to when files were listed for it: told once, to the first loader that reads them."""
        return []

    def length(self) -> int | None:
        """Rows or samples in an epoch, where that is known."""
        return None

    def work(self, run: Run) -> Any:
        """What the workers do. It can be pickled."""

    def open(self, run: Run, pool: Pool, work: Any) -> Producer:
        """Begin a run. `work` is what the pool's threads call, or in other processes copies of it."""


def row_bytes(seq_len: int, positions: bool) -> int:
    """Inputs, targets and where they are given positions: 8 bytes each."""
    return (3 if positions else 2) * 8 * seq_len


class RowSource(Source, Protocol):
    """A source whose rows all have `seq_len + 1` ids, dealt from lanes."""

    by_lane: bool = True
    shuffles: bool = False
    even: bool = False
    seq_len: int
    positions: bool
    dtype: np.dtype[Any]

    def open_lanes(self, run: Run, pool: Pool, work: Any) -> Lanes: ...

    def row_bytes(self) -> int:
        return row_bytes(self.seq_len, self.positions)

    def open(self, run: Run, pool: Pool, work: Any) -> Producer:
        return RowsProducer(self, run, self.open_lanes(run, pool, work))


class RowsProducer:
    """Deals batches from the lanes of a run."""

    def __init__(self, source: RowSource, run: Run, lanes: Lanes) -> None:
        from penstock.encode.deal import Batcher

        self._lanes = lanes
        self._batcher = Batcher(
            lanes.packers,
            shard=run.shard,
            lanes=run.lanes,
            batch_size=run.batch_size,
            seq_len=source.seq_len,
            drop_last=run.drop_last,
            extras=source.positions,
            tensors=run.tensors,
            narrow=source.dtype if run.narrow else None,
            most=run.prefetch_size if run.n_workers else 1,
            row=run.row,
            batch=run.batch,
            state=run.state,
            clock=run.clock,
        )
        self.next, self.at_once = self._batcher.next, self._batcher.at_once
        self.bad = lanes.bad
        self.stop = lanes.stop
        self.close = lanes.close
        self.lanes = lanes

    def totals(self) -> dict[str, int]:
        names = ("cropped_tokens", "padded_tokens", "dropped_tokens")
        packed = {name: sum(getattr(p.counts, name) for p in self._lanes.packers) for name in names}
        return self._lanes.totals() | packed

"""Map-style data: token files, synthetic rows, a user's own dataset with `__len__` and `__getitem__`.

The state is one number, the next global row. Row g of a pass is sample `permute(g mod length)` of
epoch g div length, so any number of ranks can continue from it. Rows of ids go through the same
batcher as text (`RowLanes`); samples of the user's own are collated by the workers, a task a batch
(`SampleProducer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.encode.rows import FixedMark, Mark, PackCounts, Packer, Rows
from penstock.encode.window import Ids
from penstock.errors import NoData
from penstock.feed.worker_pool import Pool, Task
from penstock.order.permute import permute
from penstock.order.shuffle import I64, mix
from penstock.sources.base import Lanes, Producer, RowProducer, RowSource, RunContext, narrowed
from penstock.sources.samples import (
    SampleProducer,
    Samples,
    SampleWork,
    is_rows,
    refuse_text,
    span_of,
)
from penstock.types import LanePosition, Shard, Span

TASK_TOKENS = 1 << 19
"""Ids that one task reads, at most: many enough to make its own cost and that of a permutation small.
The first tasks read fewer, so that the first batch does not wait."""
FIRST_ROWS = 32
TASK_SAMPLES = 128
"""The most samples of a user's own dataset that one task reads: each may take milliseconds."""
_ROWS = 5  # a permutation of rows shares no key with those of `order.plan`


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which sample each row of a stream is."""

    length: int
    shuffle: bool
    seed: int
    first_epoch: int

    def samples(self, rows: I64) -> tuple[I64, I64]:
        """Return the sample and the epoch of each row."""
        epochs = rows // self.length
        samples = rows - epochs * self.length
        epochs = epochs + self.first_epoch
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                there = epochs == epoch
                key = mix(self.seed, _ROWS, epoch)
                samples[there] = permute(self.length, key, samples[there])
        return samples, epochs

    def parts(
        self, first: int, end: int | None, shard: Shard, repeat: int | None, sizes: tuple[int, int]
    ) -> Iterator[tuple[I64, I64]]:
        """Yield the samples and epochs of a shard's own rows [first, end), part by part. Parts grow
        from the first size to the second. From the global row `repeat` on, the first rows are
        repeated."""
        size, largest = sizes
        while end is None or first < end:
            last = first + size if end is None else min(first + size, end)
            rows = np.arange(first, last, dtype=np.int64) * shard.mod + shard.rem
            yield self.samples(rows if repeat is None else rows % repeat)
            first, size = last, min(2 * size, largest)


def spans_of(dataset: Any, index: int) -> list[Span]:
    """Return where a sample comes from, as far as its dataset knows."""
    if hasattr(dataset, "spans"):
        spans: list[Span] = dataset.spans(index)
        return spans
    return span_of(type(dataset).__name__, index)


def own_rows(total: int, run: RunContext) -> int:
    """Return how many of `total` rows a rank reads, with those that are repeated at the end."""
    full, left = divmod(total, run.batch_size * run.shard.mod)
    if run.drop_last or not left:
        return full * run.batch_size
    if run.alone or run.shard.mod == 1:
        return len(range(run.shard.rem, total, run.shard.mod))
    # All ranks get a full last batch: the first rows are repeated.
    return (full + 1) * run.batch_size


@dataclass(slots=True)
class IndexedRows:
    """Some rows of a lane."""

    ids: Ids
    samples: I64
    epochs: I64
    dataset: Any
    valid: None = None

    def __getitem__(self, part: slice) -> IndexedRows:
        return IndexedRows(self.ids[part], self.samples[part], self.epochs[part], self.dataset)

    @property
    def epoch(self) -> int:
        return min(int(self.epochs[0]), int(self.epochs[-1]))

    def boundaries(self) -> tuple[I64, I64]:
        if not is_rows(self.dataset):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        boundaries: tuple[I64, I64] = self.dataset.boundaries(self.samples)
        return boundaries

    def spans(self, row: int) -> list[Span]:
        return spans_of(self.dataset, int(self.samples[row]))


class IndexedPacker:
    """The rows l, l + n, l + 2n, … of a stream: lane l of n. Read by workers, a few tasks ahead."""

    def __init__(
        self,
        source: MapStyleSource,
        pool: Pool,
        parts: Iterator[tuple[I64, I64]],
        start: LanePosition,
    ) -> None:
        """`parts`: the samples and epochs to ask for. `start.row` counts the lane's own rows."""
        self._source, self._pool, self._parts = source, pool, parts
        self._start, self._next = start, start.row
        self._tasks: deque[tuple[I64, I64, Task[Any]]] = deque()
        self._rest: IndexedRows | None = None
        self.counts = PackCounts()
        self.failed: Exception | None = None

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        while n > 0 and (rows := self._rest or self._read()) is not None:
            taken = rows[:n]
            self._rest = rows[n:] if len(rows.ids) > n else None
            out.append(taken)
            self._next += len(taken.ids)
            n -= len(taken.ids)
        return out

    def mark(self) -> Mark:
        return FixedMark(self._start._replace(row=self._next))

    def _read(self) -> IndexedRows | None:
        self._submit_ahead()
        while self._tasks and self.failed is None:
            samples, epochs, task = self._tasks.popleft()
            try:
                ids = narrowed(np.asarray(task.result()), self._source.dtype)
                return IndexedRows(ids, samples, epochs, self._source.dataset)
            except Exception as error:
                if len(samples) == 1:
                    self.failed = error  # raised by the batcher, after the rows that came before it
                    break
                for i in reversed(range(len(samples))):
                    self._tasks.appendleft(self._ask(samples[i : i + 1], epochs[i : i + 1]))
        return None

    def _submit_ahead(self) -> None:
        while len(self._tasks) <= self._pool.n_workers:
            part = next(self._parts, None)
            if part is None:
                return
            self._tasks.append(self._ask(*part))

    def _ask(self, samples: I64, epochs: I64) -> tuple[I64, I64, Task[Any]]:
        width = self._source.seq_len + 1
        return samples, epochs, self._pool.submit("rows", samples, epochs, width)


class RowLanes(Lanes):
    """A rank's lanes of map-style rows, as part of a mixture."""

    def __init__(self, source: MapStyleSource, run: RunContext, pool: Pool) -> None:
        self._source, self._run, self._pool = source, run, pool
        self.packers: list[Packer] = [
            self._packer(lane, run.positions[lane]) for lane in run.own_lanes
        ]

    def _packer(self, lane: int, start: LanePosition) -> IndexedPacker:
        """Return a lane's packer. Its position counts rows from the beginning of an epoch."""
        run, length = self._run, self._source.length()
        order = RowOrder(length, run.shuffle, run.seed, start.epoch)
        end = len(range(lane, length, run.lanes)) if run.by_epoch else None
        shard, sizes = Shard(run.lanes, lane), self._source.task_rows()
        parts = order.parts(start.row, end, shard, None, sizes)
        return IndexedPacker(self._source, self._pool, parts, start)

    def reopen(self, index: int, epoch: int) -> None:
        lane = self._run.own_lanes[index]
        self.packers[index] = self._packer(lane, LanePosition(epoch=epoch))


class OneLane(Lanes):
    """All rows of a rank, outside of a mixture."""

    def __init__(self, packer: Packer) -> None:
        self.packers = [packer]


class MapStyleSource(RowSource):
    """A map-style dataset as the loader sees it. In a mixture its samples must be rows of ids."""

    by_lane = False
    shuffles = True
    even = True

    def __init__(
        self,
        dataset: Any,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset, self._preprocess, self._collate = dataset, preprocess, collate
        self.rows = is_rows(dataset) and preprocess is None and collate is None
        """True if the dataset reads rows of ids itself, many at once."""
        self.positions = bool(getattr(dataset, "positions", False)) and self.rows
        self.seq_len = int(getattr(dataset, "seq_len", None) or 0)
        """0 if it is not known: a mixture then sets it."""
        self.dtype = np.dtype(dataset.dtype if self.rows else np.uint32)
        self._length = len(dataset)
        if self._length < 1:
            raise NoData(f"{type(dataset).__name__} has no samples: its length is {self._length}")
        if isinstance(dataset, list | tuple) and preprocess is None and collate is None:
            refuse_text(dataset[0])

    def data_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "data_id", None)
        about: dict[str, Any] = known() if known else {"type": type(self.dataset).__name__}
        return about | {"length": self._length}

    def settings_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "settings_id", None)
        settings: dict[str, Any] = known() if known is not None else {}
        return settings

    def row_bytes(self) -> int:
        return super().row_bytes() if self.rows else 0

    def length(self) -> int:
        return self._length

    def work(self, run: RunContext) -> SampleWork:
        return SampleWork(self.dataset, self._preprocess, self._collate, run)

    def open(self, run: RunContext, pool: Pool, work: Any) -> Producer:
        total = None if run.end_epoch is None else (run.end_epoch - run.first_epoch) * self._length
        n_rows: int | None = None
        if total is not None:
            n_rows = own_rows(total, run)
            if n_rows == 0 and run.drop_last:
                raise NoData(
                    f"{total} samples do not fill one batch of {run.batch_size} on each of "
                    f"{run.shard.mod} ranks. Use a smaller batch_size, more epochs, or drop_last=False."
                )
        order = RowOrder(self._length, run.shuffle, run.seed, run.first_epoch)
        # The rank's first row at or after the global one of the state.
        first = -(-(run.start.row - run.shard.rem) // run.shard.mod)
        sizes = self.task_rows() if self.rows else (run.batch_size, run.batch_size)
        parts = order.parts(first, n_rows, run.shard, total, sizes)
        if not self.rows:
            tasks = (pool.submit("batch", Samples(*part)) for part in parts)
            return SampleProducer(run, pool, tasks, partial(spans_of, self.dataset), total)
        packer = IndexedPacker(self, pool, parts, LanePosition(row=first))
        run = replace(run, lanes=run.shard.mod, drop_last=False)
        return RowProducer(self, run, OneLane(packer), total)

    def task_rows(self) -> tuple[int, int]:
        """Return how many rows the first tasks read, and how many later ones."""
        most = max(1, TASK_TOKENS // (self.seq_len + 1))
        return FIRST_ROWS, most if self.rows else min(most, TASK_SAMPLES)

    def open_lanes(self, run: RunContext, pool: Pool, work: Any) -> RowLanes:
        return RowLanes(self, run, pool)

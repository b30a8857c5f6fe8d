"""Map-style data: token files, synthetic rows, a user's own dataset with `__len__` and `__getitem__`.

The state is one number, the next global row. Row g of a pass is sample `permute(g mod length)` of
epoch g div length, so any number of ranks can resume from it. Rows of ids use the same
batcher as text (`RowsSource`); workers collate user-defined samples, one batch per task
(`SampleSource`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from penstock.encode.rows import Mark, Packer, Rows, fixed
from penstock.encode.window import Ids
from penstock.errors import SourceError
from penstock.feed.worker_pool import Pool, Task
from penstock.order.permute import permute
from penstock.order.shuffle import I64, mix
from penstock.sources.base import Lanes, Producer, RowProducer, RowSource, RunContext
from penstock.sources.samples import (
    Collate,
    CollatedSource,
    Preprocess,
    SampleProducer,
    Samples,
    span_of,
)
from penstock.types import LanePosition, Shard, Span

TASK_TOKENS = 1 << 20
"""Input ids per task: enough to amortize the cost of a task and of a permutation. The first tasks read
fewer, so that the first batch does not wait. A power of two, so that few batches span two tasks."""
FIRST_ROWS = 32
_ROWS = 5  # keeps the keys of row permutations apart from those of `order.plan`


def sample_parts(
    run: RunContext,
    length: int,
    shard: Shard,
    epoch: int,
    rows: tuple[int, int | None],
    sizes: tuple[int, int],
    repeat: int | None = None,
) -> Iterator[tuple[I64, I64]]:
    """Yield the samples and epochs of a shard's rows [first, end), part by part.

    Row 0 is in `epoch`. Part sizes double from the first of `sizes` to the second. From the global
    row `repeat` on, the stream repeats its first rows.
    """
    (first, end), (size, largest) = rows, sizes
    while end is None or first < end:
        last = first + size if end is None else min(first + size, end)
        numbers = np.arange(first, last, dtype=np.int64) * shard.mod + shard.rem
        passes, samples = np.divmod(numbers if repeat is None else numbers % repeat, length)
        epochs = passes + epoch
        if run.shuffle:
            for each in np.unique(epochs).tolist():
                there = epochs == each
                samples[there] = permute(length, mix(run.seed, _ROWS, each), samples[there])
        yield samples, epochs
        first, size = last, min(2 * size, largest)


def spans_of(dataset: Any, index: int) -> list[Span]:
    """Return the origin of a sample: from its dataset if that has `spans`."""
    if hasattr(dataset, "spans"):
        return list(dataset.spans(index))
    return span_of(type(dataset).__name__, index)


def rows_of_pass(run: RunContext, length: int | None) -> int:
    """Return the rows or samples of one pass on this rank. `length` is that of an epoch."""
    if length is None or run.epochs is None:
        kind = "an endless stream" if run.epochs is None else "a stream of unknown length"
        raise TypeError(f"{kind} has no len()")
    return own_rows(length * run.epochs, run)


def own_rows(total: int, run: RunContext) -> int:
    """Return the number of rows a rank reads out of `total`, including repeated rows."""
    full, left = divmod(total, run.batch_size * run.shard.mod)
    if run.drop_last or not left:
        return full * run.batch_size
    if run.alone or run.shard.mod == 1:
        return len(range(run.shard.rem, total, run.shard.mod))
    # Repeating the first rows fills the last batch on every rank.
    return (full + 1) * run.batch_size


@dataclass(slots=True)
class IndexedRows:
    """Consecutive rows of a lane."""

    ids: Ids
    samples: I64
    of_epochs: I64
    dataset: Any
    start: LanePosition
    """The position of the first row."""
    valid: None = None

    def part(self, first: int, last: int | None) -> IndexedRows:
        """Return the rows [first, last)."""
        ids, samples, epochs = (a[first:last] for a in (self.ids, self.samples, self.of_epochs))
        return IndexedRows(ids, samples, epochs, self.dataset, self.position(first))

    def epochs(self) -> I64:
        return self.of_epochs

    def position(self, row: int) -> LanePosition:
        return self.start._replace(row=self.start.row + row)

    def boundaries(self) -> tuple[I64, I64]:
        boundaries: tuple[I64, I64] = self.dataset.boundaries(self.samples)
        return boundaries

    def spans(self, row: int) -> list[Span]:
        return spans_of(self.dataset, int(self.samples[row]))


class IndexedPacker:
    """Packs the rows l, l + n, l + 2n, … of a stream: lane l of n. Workers read a few tasks ahead."""

    def __init__(
        self, dataset: Any, pool: Pool, parts: Iterator[tuple[I64, I64]], start: LanePosition
    ) -> None:
        """`parts` yields the samples and epochs of each task. `start.row` counts this lane's rows."""
        self._dataset, self._pool, self._parts = dataset, pool, parts
        self._start, self._next = start, start.row
        self._tasks: deque[tuple[I64, I64, Task[Any]]] = deque()
        self._rest: IndexedRows | None = None
        self.counts: Counter[str] = Counter()
        self.failed: Exception | None = None

    def fill(self, n: int) -> int:
        self._rest = self._rest or self._read()
        return 0 if self._rest is None else len(self._rest.ids)

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        while n > 0 and (rows := self._rest or self._read()) is not None:
            taken = rows.part(0, n)
            self._rest = rows.part(n, None) if len(rows.ids) > n else None
            out.append(taken)
            self._next += len(taken.ids)
            n -= len(taken.ids)
        return out

    def mark(self) -> Mark:
        return fixed(self._start._replace(row=self._next))

    def _read(self) -> IndexedRows | None:
        for part in islice(self._parts, self._pool.n_workers + 1 - len(self._tasks)):
            self._tasks.append((*part, self._pool.submit("rows", part[0])))
        if not self._tasks or self.failed is not None:
            return None
        samples, epochs, task = self._tasks.popleft()
        try:
            start = self._start._replace(row=self._next)
            return IndexedRows(task.result(), samples, epochs, self._dataset, start)
        except Exception as error:
            self.failed = error  # the batcher raises it after the rows before it
            return None


class RowLanes(Lanes):
    """The lanes of map-style rows on this rank: one, or several in a mixture."""

    def __init__(
        self,
        source: RowsSource,
        run: RunContext,
        pool: Pool,
        end: int | None = None,
        repeat: int | None = None,
    ) -> None:
        """For `end` and `repeat` see `sample_parts`."""
        self._source, self._run, self._pool = source, run, pool
        self._end, self._repeat = end, repeat
        self.packers: list[Packer] = [
            self._packer(lane, run.positions[lane]) for lane in run.own_lanes
        ]

    def _packer(self, lane: int, start: LanePosition) -> IndexedPacker:
        """Return a lane's packer. Its position counts rows from the start of an epoch."""
        run, source, length = self._run, self._source, self._source.length()
        end = len(range(lane, length, run.lanes)) if run.by_epoch else self._end
        shard, rows = Shard(run.lanes, lane), (start.row, end)
        parts = sample_parts(run, length, shard, start.epoch, rows, source.task_rows, self._repeat)
        return IndexedPacker(source.dataset, self._pool, parts, start)

    def reopen(self, index: int, epoch: int) -> None:
        lane = self._run.own_lanes[index]
        self.packers[index] = self._packer(lane, LanePosition(epoch=epoch))


class SampleSource(CollatedSource):
    """A user's map-style dataset as the loader sees it."""

    shuffles = True
    even = True

    def __init__(
        self, dataset: Any, preprocess: Preprocess = None, collate: Collate = None
    ) -> None:
        super().__init__(preprocess, collate, dataset)
        self.dataset, self._length = dataset, len(dataset)
        if self._length < 1:
            raise SourceError(
                f"{type(dataset).__name__} has no samples: its length is {self._length}"
            )
        if isinstance(dataset, list | tuple):
            self.check_sample(dataset[0])

    def data_id(self) -> dict[str, Any]:
        return {"type": type(self.dataset).__name__, "length": self._length}

    def length(self) -> int:
        return self._length

    def rows_of(self, run: RunContext) -> tuple[tuple[int, int | None], int | None]:
        """Return the rows [first, end) of this rank in a pass, and the total over all ranks."""
        # This rank's first row at or after the state's global row.
        first = -(-(run.start.row - run.shard.rem) // run.shard.mod)
        if run.end_epoch is None:
            return (first, None), None
        total = (run.end_epoch - run.first_epoch) * self._length
        end = own_rows(total, run)
        if end == 0 and run.drop_last:
            raise SourceError(
                f"{total} samples do not fill one batch of {run.batch_size} on each of "
                f"{run.shard.mod} ranks. Use a smaller batch_size, more epochs, or drop_last=False."
            )
        return (first, end), total

    def open(self, run: RunContext, pool: Pool, work: Any) -> Producer:
        rows, total = self.rows_of(run)
        sizes = (run.batch_size, run.batch_size)
        parts = sample_parts(run, self._length, run.shard, run.first_epoch, rows, sizes, total)
        tasks = (pool.submit("batch", Samples(*part)) for part in parts)
        return SampleProducer(run, pool, tasks, partial(spans_of, self.dataset), total)


class RowsSource(SampleSource, RowSource):
    """A dataset that reads many rows of ids at once: token files, synthetic data."""

    by_lane = False

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.seq_len, self.dtype = dataset.seq_len, np.dtype(dataset.dtype)
        self.positions = bool(getattr(dataset, "positions", False))
        self.task_rows = FIRST_ROWS, max(1, TASK_TOKENS // self.seq_len)
        """The rows of the first task, and the maximum for later ones."""

    def data_id(self) -> dict[str, Any]:
        return {**self.dataset.data_id(), "length": self._length}

    def settings_id(self) -> dict[str, Any]:
        return dict(self.dataset.settings_id())

    def open(self, run: RunContext, pool: Pool, work: Any) -> Producer:
        (first, end), total = self.rows_of(run)
        start = {run.shard.rem: LanePosition(run.first_epoch, row=first)}
        run = replace(run, lanes=run.shard.mod, drop_last=False, positions=start)
        return RowProducer(self, run, RowLanes(self, run, pool, end, total), total)

    def open_lanes(self, run: RunContext, pool: Pool, work: Any) -> RowLanes:
        return RowLanes(self, run, pool)

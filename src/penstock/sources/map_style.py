"""Map-style data: token files, synthetic rows, a user's own dataset with `__len__` and `__getitem__`.

The state is one number, the next global row. Row g of a pass is sample `permute(g mod length)` of
epoch g div length, so any number of ranks can continue from it. Rows of ids go through the same
batcher as text (`RowLanes`); samples of the user's own are collated by the workers, a task a batch
(`SampleProducer`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, can_wrap
from penstock.encode.rows import FixedMark, Mark, PackCounts, Packer, Rows
from penstock.encode.window import Ids
from penstock.errors import ConfigError, NoData
from penstock.feed.worker_pool import Pool, Task
from penstock.order.permute import permute
from penstock.order.shuffle import I64, mix
from penstock.sources.base import Lanes, Producer, RowProducer, RowSource, RunContext, Source
from penstock.sources.samples import SampleWork, is_rows
from penstock.types import LanePosition, MiB, Shard, Span, StreamPosition

log = logging.getLogger("penstock")

TASK_TOKENS = 1 << 19
"""Ids that one task reads, at most: many enough to make its own cost and that of a permutation small.
The first tasks read fewer, so that the first batch does not wait."""
FIRST_ROWS = 32
TASK_SAMPLES = 128
"""The most samples of a user's own dataset that one task reads: each may take milliseconds."""
PROBE_BYTES = 256 * MiB
"""If memory is tighter than this, the first batch shows how large batches are before more are made."""
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

    def own(self, first: int, last: int, shard: Shard, repeat: int | None) -> tuple[I64, I64]:
        """Return the samples and epochs of a shard's own rows [first, last). From the global row
        `repeat` on, the first rows are repeated."""
        rows = np.arange(first, last, dtype=np.int64) * shard.mod + shard.rem
        return self.samples(rows if repeat is None else rows % repeat)


def spans_of(dataset: Any, index: int) -> list[Span]:
    """Return where a sample comes from, as far as its dataset knows."""
    if hasattr(dataset, "spans"):
        spans: list[Span] = dataset.spans(index)
        return spans
    return [Span(type(dataset).__name__, None, None, index, (0, 0), (0, 0))]


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

    def split(self, n: int) -> tuple[IndexedRows, IndexedRows]:
        """Return the first `n` rows and the others."""
        ids, samples, epochs = self.ids, self.samples, self.epochs
        first = IndexedRows(ids[:n], samples[:n], epochs[:n], self.dataset)
        return first, IndexedRows(ids[n:], samples[n:], epochs[n:], self.dataset)


class IndexedPacker:
    """The rows l, l + n, l + 2n, … of a stream: lane l of n. Read by workers, a few tasks ahead."""

    def __init__(
        self,
        source: MapStyleRows,
        order: RowOrder,
        pool: Pool,
        shard: Shard,
        start: LanePosition,
        end: int | None,
        repeat: int | None,
    ) -> None:
        """`start.row` and `end` count the lane's own rows. `repeat`: rows from there on are the
        first ones again."""
        self._source, self._order, self._pool, self._shard = source, order, pool, shard
        self._start, self._end, self._repeat = start, end, repeat
        self._next = self._submitted = start.row
        self._size = FIRST_ROWS
        self._max_size = max(1, TASK_TOKENS // (source.seq_len + 1))
        if not source.packed:
            self._max_size = min(self._max_size, TASK_SAMPLES)
        self._tasks: deque[tuple[I64, I64, Task[Any]]] = deque()
        self._rest: IndexedRows | None = None
        self.counts = PackCounts()
        self.failed: Exception | None = None

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        while n > 0 and (rows := self._rest or self._read()) is not None:
            self._rest = None
            if len(rows.ids) > n:
                rows, self._rest = rows.split(n)
            out.append(rows)
            self._next += len(rows.ids)
            n -= len(rows.ids)
        return out

    def mark(self) -> Mark:
        return FixedMark(self._start._replace(row=self._next))

    def _read(self) -> IndexedRows | None:
        while len(self._tasks) <= self._pool.n_workers and self._submit():
            pass
        if not self._tasks:
            return None
        samples, epochs, task = self._tasks.popleft()
        try:
            ids = self._source.narrowed(task.result())
        except Exception as error:  # raised by the batcher, after the rows that came before it
            self.failed = error
            self._tasks.clear()
            return None
        n = len(ids)
        if n < len(samples):  # the rest begins with a row that cannot be read: ask for its error
            self._ask(samples[n:], epochs[n:], urgent=True)
            self._tasks.rotate(1)
        return IndexedRows(ids, samples[:n], epochs[:n], self._source.dataset)

    def _submit(self) -> bool:
        last = self._submitted + self._size
        last = last if self._end is None else min(last, self._end)
        if last <= self._submitted:
            return False
        self._ask(*self._order.own(self._submitted, last, self._shard, self._repeat))
        self._submitted = last
        self._size = min(2 * self._size, self._max_size)
        return True

    def _ask(self, samples: I64, epochs: I64, urgent: bool = False) -> None:
        width = self._source.seq_len + 1
        task = self._pool.submit("rows", samples, epochs, width, urgent=urgent)
        self._tasks.append((samples, epochs, task))


class RowLanes(Lanes):
    """A rank's lanes of map-style rows. Outside of a mixture there is one, the rank itself."""

    def __init__(
        self, source: MapStyleRows, run: RunContext, pool: Pool, packers: list[IndexedPacker]
    ) -> None:
        self._source, self._run, self._pool = source, run, pool
        self.packers: list[Packer] = [*packers]

    def reopen(self, index: int, epoch: int) -> None:
        lane = self._run.own_lanes[index]
        self.packers[index] = self._source.lane_packer(
            self._run, self._pool, lane, LanePosition(epoch=epoch)
        )


class MapStyleSource(Source):
    """A map-style dataset as the loader sees it."""

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
        self.positions = bool(getattr(dataset, "positions", False)) and self.rows
        self._length = len(dataset)
        if self._length < 1:
            raise NoData(f"{type(dataset).__name__} has no samples: its length is {self._length}")
        texts = isinstance(dataset, list | tuple) and isinstance(dataset[0], str)
        if texts and preprocess is None and collate is None:
            raise ConfigError(
                "these are texts, which need a tokenizer: "
                "TextDataset.from_iterable(texts, tokenizer=…, seq_len=…)"
            )

    def data_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "data_id", None)
        about: dict[str, Any] = known() if known else {"type": type(self.dataset).__name__}
        return about | {"length": self._length}

    def settings_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "settings_id", None)
        settings: dict[str, Any] = known() if known is not None else {}
        return settings

    def row_bytes(self) -> int:
        return MapStyleRows(self, int(self.dataset.seq_len)).row_bytes() if self.rows else 0

    def length(self) -> int:
        return self._length

    def work(self, run: RunContext) -> SampleWork:
        return SampleWork(
            self.dataset,
            preprocess=self._preprocess,
            collate=self._collate,
            seed=run.seed,
            clock=run.clock,
        )

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
            if n_rows * run.shard.mod > total and run.shard.mod > 1 and not run.alone:
                again = n_rows * run.shard.mod - total
                log.warning("the last batch of a pass repeats the first %d of its rows", again)
        order = RowOrder(self._length, run.shuffle, run.seed, run.first_epoch)
        if not self.rows:
            return SampleProducer(self.dataset, order, run, pool, n_rows, total)
        rows = MapStyleRows(self, int(self.dataset.seq_len))
        # The rank's first row at or after the global one of the state.
        start = LanePosition(row=-(-(run.start.row - run.shard.rem) // run.shard.mod))
        packer = IndexedPacker(rows, order, pool, run.shard, start, n_rows, total)
        return RowProducer(
            rows,
            run,
            RowLanes(rows, run, pool, [packer]),
            n_lanes=run.shard.mod,
            drop_last=False,
            total_rows=total,
        )


class MapStyleRows(RowSource):
    """Map-style data whose samples are rows of ids: by itself or, by lane, as part of a mixture."""

    def __init__(self, source: MapStyleSource, seq_len: int) -> None:
        self.seq_len, self.dataset, self.positions = seq_len, source.dataset, source.positions
        self.samples = source.length()
        self.packed = source.rows
        """True if the dataset reads rows of ids itself, many at once."""
        self.dtype = np.dtype(source.dataset.dtype if source.rows else np.uint32)
        self._source = source

    def data_id(self) -> dict[str, Any]:
        return self._source.data_id()

    def settings_id(self) -> dict[str, Any]:
        return self._source.settings_id()

    def work(self, run: RunContext) -> SampleWork:
        return self._source.work(run)

    def narrowed(self, read: Any) -> Ids:
        """Return rows in this source's type of id."""
        ids: Ids = np.asarray(read)
        if ids.dtype == self.dtype:
            return ids
        limit = np.iinfo(self.dtype).max
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) > limit):
            raise ConfigError(f"ids from {ids.min()} to {ids.max()} do not fit in {self.dtype}")
        return ids.astype(self.dtype)

    def lane_packer(
        self, run: RunContext, pool: Pool, lane: int, start: LanePosition
    ) -> IndexedPacker:
        """Return a lane's packer. Its position counts rows from the beginning of an epoch."""
        order = RowOrder(self.samples, run.shuffle, run.seed, start.epoch)
        shard = Shard(run.lanes, lane)
        end = None
        if run.by_epoch:
            end = len(range(lane, self.samples, run.lanes))
        return IndexedPacker(self, order, pool, shard, start, end, None)

    def open_lanes(self, run: RunContext, pool: Pool, work: Any) -> RowLanes:
        packers = [self.lane_packer(run, pool, lane, run.positions[lane]) for lane in run.own_lanes]
        return RowLanes(self, run, pool, packers)


@dataclass(frozen=True, slots=True)
class SamplesOrigin:
    """Which samples a batch was made of."""

    row: int
    batch: int
    dataset: Any
    samples: I64

    def position(self) -> StreamPosition:
        return StreamPosition(self.row, self.batch)

    def spans(self) -> list[list[Span]]:
        return [spans_of(self.dataset, index) for index in self.samples.tolist()]


class SampleProducer(Producer):
    """Has batches of samples made ahead, a task each, and gives them out in order."""

    def __init__(
        self,
        dataset: Any,
        order: RowOrder,
        run: RunContext,
        pool: Pool,
        n_rows: int | None,
        total: int | None,
    ) -> None:
        """`n_rows`: the rows of this rank in a finite stream; `total`: those of all ranks."""
        self._dataset, self._order, self._run, self._pool = dataset, order, run, pool
        self._n_rows, self._total = n_rows, total
        self._row, self._batch = run.start.row, run.start.batch
        self._next = -(-(run.start.row - run.shard.rem) // run.shard.mod)
        self._tasks: deque[tuple[I64, Task[Batch]]] = deque()
        self._batch_bytes = self._samples = 0

    def next(self) -> Batch | None:
        self._submit_ahead()
        if not self._tasks:
            return None
        samples, task = self._tasks.popleft()
        batch = task.result()
        self._batch_bytes = batch.nbytes
        self._submit_ahead()
        run = self._run
        self._row += run.batch_size * run.shard.mod
        if self._total is not None:
            self._row = min(self._row, self._total)
        batch.index, self._batch = self._batch, self._batch + 1
        self._samples += len(samples)
        batch._origin = SamplesOrigin(self._row, self._batch, self._dataset, samples)
        batch._state = run.state
        if run.wraps and can_wrap():
            batch.to_torch()
        return batch

    def _submit_ahead(self) -> None:
        """Keep every worker busy, and one batch waiting, within the memory for read-ahead."""
        while len(self._tasks) <= self._pool.n_workers:
            if self._tasks and self._is_full():
                return
            last = self._next + self._run.batch_size
            last = last if self._n_rows is None else min(last, self._n_rows)
            if last <= self._next:
                return
            samples, epochs = self._order.own(self._next, last, self._run.shard, self._total)
            self._tasks.append((samples, self._pool.submit("batch", samples, epochs)))
            self._next = last

    def _is_full(self) -> bool:
        limit = self._run.read_ahead_bytes
        if not self._batch_bytes:
            return limit < PROBE_BYTES
        return (len(self._tasks) + 2) * self._batch_bytes > limit

    def totals(self) -> dict[str, int]:
        return {"documents": self._samples}

    def gauges(self) -> dict[str, Any]:
        return {"python": True}

"""Lanes of data that can be addressed: for mixtures, where it shares lanes with streams.

In:    a dataset of rows of ids, and a place for each lane.
Out:   rows, by lane: lane l of n has the rows l, l + n, l + 2n, … of the stream.
Where: rows are fetched by the workers, and dealt on the producer thread.
State: for each lane, the epoch at which it began to count and the rows it has had since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.encode.rows import PackCounts, Rows
from penstock.errors import BadRecord, StateFormat
from penstock.feed.pool import Pool, Task
from penstock.sources.indexed import IndexedSource, Order, spans_of
from penstock.sources.samples import Fetched, is_rows
from penstock.sources.source import Run
from penstock.state import is_count, show
from penstock.types import Span

I64 = np.ndarray[Any, np.dtype[np.int64]]
Ids = np.ndarray[Any, np.dtype[Any]]

TASK_TOKENS = 1 << 16
"""About how many ids are fetched at once."""


class IndexedPlace(NamedTuple):
    """Where a lane stands."""

    epoch: int
    row: int = 0

    def place(self) -> IndexedPlace:
        return self

    def to_list(self) -> list[int]:
        return list(self)


@dataclass(slots=True)
class IndexedRows:
    """Some rows of a lane."""

    ids: Ids
    first: IndexedPlace
    samples: I64
    epochs: I64
    dataset: Any
    valid: None = None

    def mark(self, row: int) -> IndexedPlace:
        return IndexedPlace(self.first.epoch, self.first.row + row)

    def epoch(self, row: int) -> int:
        return int(self.epochs[row])

    def boundaries(self) -> tuple[I64, I64]:
        if not is_rows(self.dataset):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows, columns = self.dataset.boundaries(self.samples)
        inside = columns < self.dataset.seq_len
        return rows[inside], columns[inside]

    def spans(self, row: int) -> list[Span]:
        return spans_of(self.dataset, int(self.samples[row]))


class IndexedPacker:
    """Gives out the rows of one lane."""

    def __init__(
        self,
        source: IndexedRowSource,
        order: Order,
        lane: int,
        run: Run,
        start: IndexedPlace,
        pool: Pool,
    ) -> None:
        self._source = source
        self._order = order
        self._lane, self._lanes = lane, run.lanes
        self._pool = pool
        self._next = self._asked = start.row
        self._base = start.epoch
        self._end: int | None = None
        if run.end_epoch is not None:
            total = (run.end_epoch - start.epoch) * order.length
            self._end = max(0, -(-(total - lane) // run.lanes))
        self._size = max(1, min(64, TASK_TOKENS // source.seq_len))
        self._tasks: deque[tuple[I64, I64, Task[Fetched]]] = deque()
        self._rest: IndexedRows | None = None
        self.counts = PackCounts()
        self.failed: Exception | None = None
        self._ended_by: Exception | None = None  # it fails once the rows before are given out

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        while n > 0 and self.failed is None:
            rows = self._rest or self._fetch()
            self._rest = None
            if rows is None:
                break
            have = len(rows.ids)
            if have > n:
                rows, self._rest = _cut(rows, n)
            out.append(rows)
            self._next += len(rows.ids)
            n -= len(rows.ids)
        return out

    def holds(self, n: int) -> bool:
        return self._rest is not None and len(self._rest.ids) >= n

    def at_hand(self) -> int:
        return 0  # they come in pieces

    def mark(self) -> IndexedPlace:
        return IndexedPlace(self._base, self._next)

    def _fetch(self) -> IndexedRows | None:
        if self._ended_by is not None:
            self.failed = self._ended_by
            return None
        while len(self._tasks) <= self._pool.n_workers and self._ask():
            pass
        if not self._tasks:
            return None
        samples, epochs, task = self._tasks.popleft()
        try:
            fetched = task.result()
            ids = self._source.narrowed(fetched.ids)
        except Exception as error:
            self.failed = error  # raised by whoever deals the rows, after those that came before it
            return None
        self._ended_by = fetched.failed
        if not len(ids):
            self.failed = self._ended_by
            return None
        return IndexedRows(
            ids, self.mark(), samples[: len(ids)], epochs[: len(ids)], self._source.dataset
        )

    def _ask(self) -> bool:
        last = (
            self._asked + self._size
            if self._end is None
            else min(self._asked + self._size, self._end)
        )
        if last <= self._asked:
            return False
        rows = np.arange(self._asked, last, dtype=np.int64) * self._lanes + self._lane
        samples, epochs = self._order.samples(rows)
        self._tasks.append(
            (samples, epochs, self._pool.submit("rows", samples, epochs, self._source.seq_len + 1))
        )
        self._asked = last
        return True


def _cut(rows: IndexedRows, n: int) -> tuple[IndexedRows, IndexedRows]:
    head = IndexedRows(rows.ids[:n], rows.first, rows.samples[:n], rows.epochs[:n], rows.dataset)
    return head, IndexedRows(
        rows.ids[n:], rows.mark(n), rows.samples[n:], rows.epochs[n:], rows.dataset
    )


class IndexedLanes:
    """The lanes of one run."""

    def __init__(self, source: IndexedRowSource, run: Run, pool: Pool) -> None:
        self.packers = []
        for lane in run.own_lanes:
            place: IndexedPlace = run.places[lane]
            order = Order(source.samples, run.shuffle, run.seed, place.epoch)
            self.packers.append(IndexedPacker(source, order, lane, run, place, pool))

    def totals(self) -> dict[str, int]:
        return {}

    def bad(self) -> dict[str, int]:
        return {}

    def stop(self) -> None: ...

    def close(self) -> None: ...


class IndexedRowSource:
    """Addressable rows, as a mixture sees them."""

    def __init__(self, source: IndexedSource, seq_len: int) -> None:
        self.seq_len = seq_len
        self.dataset = source.dataset
        self.positions = source.positions
        self.samples = source.length() or 0
        self.dtype: np.dtype[Any] = np.dtype(source.dataset.dtype if source.rows else np.uint32)
        self.data_id, self.settings_id, self.tokenizer_id = (
            source.data_id,
            source.settings_id,
            source.tokenizer_id,
        )
        self.work = source.work

    def first_place(self, epoch: int) -> IndexedPlace:
        return IndexedPlace(epoch)

    def check_place(self, value: Any) -> IndexedPlace:
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(is_count, value)):
            raise StateFormat(
                f"the place of rows that can be addressed is not 2 counts: {show(value)}"
            )
        return IndexedPlace(*value)

    def narrowed(self, ids: Ids) -> Ids:
        """Ids in this source's type."""
        if ids.dtype == self.dtype:
            return ids
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(self.dtype).max):
            raise BadRecord(
                f"{type(self.dataset).__name__} gave ids from {ids.min()} to {ids.max()}: none can be negative"
            )
        return ids.astype(self.dtype)

    def open_lanes(self, run: Run, pool: Pool, work: Any) -> IndexedLanes:
        return IndexedLanes(self, run, pool)

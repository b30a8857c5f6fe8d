"""Data that can be addressed: token files, synthetic rows, a user's own map-style dataset.

In:    anything with `__len__` and `__getitem__`; `__getitems__`, PyTorch's batch convention, where it has it.
Out:   batches.
Where: `SampleWork` fetches, preprocesses and puts together on the workers; the rest is arithmetic on
       the producer thread.
State: the number of the next row, over all ranks. Row g of a pass is sample `permute(g mod length)` of
       epoch g div length, so any number of ranks can go on from it.
Cost:  nothing in memory but the batches. Cheap batches are made a few at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, Position, torch_is_here
from penstock.errors import ConfigError, NoData, StateFormat
from penstock.feed.pool import InlinePool, Pool, Task, ThreadPool
from penstock.order.permute import LONGEST, permute
from penstock.order.shuffle import mix
from penstock.sources.samples import Made, SampleWork, is_rows, reached
from penstock.sources.source import Producer, Run, Source, row_bytes
from penstock.state import State
from penstock.types import Address, MiB, Shard, Span

log = logging.getLogger("penstock")

I64 = np.ndarray[Any, np.dtype[np.int64]]

_ROWS = 4  # see order.plan: an order of rows shares no key with one of files, chunks or documents
TASK_S = 2e-3
"""Batches that take less are made together, until they take about this long: handing one over costs
a twentieth of a millisecond."""
CHEAP_S = 2e-4
"""Batches that take less are made by the producer itself: to tell a worker takes longer."""
LEFT_TOKENS = 1 << 21
"""Ids gathered at once for whoever takes batches as fast as they come: enough to make Python and the handing over cheap,
few enough for the processor's caches, where they are found again when they are widened."""
LEFT = 128
"""Batches that these are at most: what was taken is written down when some more are made."""
NEEDED = 8
"""Of these, whoever has none at all gathers one part in so many, and waits no longer than for that."""
CAREFUL_BYTES = 256 * MiB
"""Where memory is tighter than this, one batch tells how large they are before others are asked for."""
PLAN_ROWS = 4096
"""Rows whose samples are worked out at once."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which sample each row of a stream is."""

    length: int
    shuffle: bool
    seed: int
    first_epoch: int

    def samples(self, rows: I64) -> tuple[I64, I64]:
        """The sample and the epoch of each row."""
        epoch = int(rows.min()) // self.length
        if int(rows.max()) < (epoch + 1) * self.length:  # as usual: no need to divide each
            at = rows - epoch * self.length
            epoch += self.first_epoch
            key = mix(self.seed, _ROWS, epoch)
            return permute(self.length, key, at) if self.shuffle else at, np.full(len(rows), epoch)
        epochs = rows // self.length
        at = rows - epochs * self.length
        epochs = epochs + self.first_epoch
        if not self.shuffle:
            return at, epochs
        samples = np.empty_like(at)
        for epoch in np.unique(epochs).tolist():
            there = epochs == epoch
            samples[there] = permute(self.length, mix(self.seed, _ROWS, epoch), at[there])
        return samples, epochs


@dataclass(slots=True)
class Group:
    """Batches that are made together."""

    row: int
    """The global row at which the first begins."""
    whole: int
    """Rows of one batch, over all ranks."""
    batch: int
    size: int
    samples: I64
    epochs: I64
    dataset: Any
    total: int | None
    """Rows of a finite stream: it goes on from there if more epochs are asked for later."""

    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)

    def reached(self) -> list[int]:
        """The epoch that each batch has reached."""
        first, count = int(self.epochs[0]), len(self)
        # Rows ascend, and epochs with them, but for a last batch that is filled up with the first rows.
        ascend = self.total is None or self.row + count * self.whole <= self.total
        if ascend and first == int(self.epochs[-1]):
            return [first] * count
        return [reached(part) for part in self.parts(self.epochs)]

    def parts(self, values: I64) -> list[I64]:
        """What belongs to each batch."""
        return [values[i : i + self.size] for i in range(0, len(values), self.size)]


@dataclass(slots=True)
class FetchedFrom:
    """One batch of a group, and where the stream goes on after it."""

    group: Group
    number: int

    def position(self) -> Position:
        group, after = self.group, self.number + 1
        row = group.row + after * group.whole
        return Position(
            row if group.total is None else min(row, group.total), group.batch + after, ()
        )

    def spans(self) -> list[list[Span]]:
        group = self.group
        samples = group.samples[self.number * group.size : (self.number + 1) * group.size]
        return [spans_of(group.dataset, index) for index in samples.tolist()]


def spans_of(dataset: Any, index: int) -> list[Span]:
    """Where a sample comes from, as far as its dataset says."""
    if hasattr(dataset, "spans"):
        spans: list[Span] = dataset.spans(index)
        return spans
    return [Span(type(dataset).__name__, None, None, index, (0, 0), (0, 0))]


class IndexedProducer:
    """Has batches made ahead, and gives them out in order."""

    def __init__(
        self, dataset: Any, length: int, run: Run, pool: Pool, rows: bool, work: SampleWork
    ) -> None:
        # Threads share what a dataset keeps, so the producer may make batches itself; processes do not.
        self._own: Pool = InlinePool(work) if type(pool) is ThreadPool else pool
        self._cheap = False
        self._dataset = dataset
        self._run = run
        self._pool = pool
        self._order = Order(length, run.shuffle, run.seed, run.first_epoch)
        self._total = None if run.end_epoch is None else (run.end_epoch - run.first_epoch) * length
        self._row, self._batch = run.row, run.batch
        self._ahead: tuple[I64, I64] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._size = PLAN_ROWS // 16  # the first batch does not wait long for its order
        self._tasks: deque[tuple[Group, Task[Made]]] = deque()
        self._most = max(1, run.prefetch_size // 2) if pool.n_workers else 1
        self._leaves = rows and not run.narrow and not getattr(dataset, "positions", False)
        self._group = self._left = 1
        """Batches to make at once: as they are handed out, or with their ids left as they are."""
        self._batch_bytes = 0
        self._samples = 0
        self._failed: Exception | None = None
        self.rows_known = rows
        self.stop = self.close = _nothing

    def next(self, leave: bool = False) -> list[Batch]:
        """The next batches; none at the end of a finite stream. `leave` their ids as they are, where that can be."""
        if self._failed is not None:
            raise self._failed
        if not self._tasks:
            self._ask_ahead(leave, needed=True)
            if not self._tasks:
                return []
        group, task = self._tasks.popleft()
        made = task.result()
        self._failed = made.failed
        if not made.batches:
            return self.next()
        self._adapt(made)
        if leave or not self._cheap:
            self._ask_ahead(leave)  # the workers go on while these are finished
        run = self._run
        wrap = run.tensors and not run.narrow and not leave and torch_is_here()
        state, number = run.state, group.batch
        for i, batch in enumerate(made.batches):
            batch.index = number + i
            batch._origin, batch._state = FetchedFrom(group, i), state
            if not leave:
                batch.finish()
            if wrap:
                batch.to_torch()
        self._samples += min(len(group.samples), len(made.batches) * group.size)
        return made.batches

    def at_once(self) -> list[Batch]:
        """The next batches, if they can be made without waiting for anybody; else none."""
        if not self._cheap or self._own is self._pool or self._failed is not None:
            return []
        return self.next(leave=self._leaves) if not self._tasks or self._tasks[0][1].ready() else []

    def totals(self) -> dict[str, int]:
        return {} if self.rows_known else {"documents": self._samples}

    def bad(self) -> dict[str, int]:
        return {}

    def _adapt(self, made: Made) -> None:
        """Make as many batches at once as are worth a task of their own, within the bounds of memory."""
        each = made.seconds / len(made.batches)
        # What was cheap once has to be clearly dear to count as such: a core may be taken away at any time.
        self._cheap = each < (3 * CHEAP_S if self._cheap else CHEAP_S)
        self._batch_bytes = max(1, made.nbytes // len(made.batches))
        fitting = max(
            1, self._run.read_ahead_bytes // self._batch_bytes // (self._pool.n_workers + 1)
        )
        self._group = max(1, min(self._most, fitting, int(TASK_S / max(each, 1e-6))))
        if self._leaves:
            left = LEFT_TOKENS // (self._run.batch_size * self._dataset.seq_len)
            self._left = max(self._group, min(fitting, LEFT, left))

    def _ask_ahead(self, leave: bool = False, needed: bool = False) -> None:
        """Keep every worker busy, and one piece of work waiting. What is cheap, whoever needs it makes itself; whoever
        takes batches as fast as they come finishes these while workers gather the ids of those that follow."""
        under_way = sum([len(group) for group, _ in self._tasks])
        workers = self._pool.n_workers if leave or not self._cheap else 0
        while len(self._tasks) <= workers and not self._full(under_way):
            most = (
                max(self._group, self._left // NEEDED if needed else self._left)
                if leave
                else self._group
            )
            group = self._plan(most)
            if group is None:
                return
            pool = self._own if self._cheap and (needed or not leave) else self._pool
            self._tasks.append((group, self._submit(pool, group, leave)))
            under_way += len(group)
            needed = False

    def _submit(self, pool: Pool, group: Group, leave: bool) -> Task[Made]:
        if self.rows_known:
            return pool.submit("row_batches", group.samples, group.size, group.reached(), leave)
        return pool.submit("batches", group.parts(group.samples), group.parts(group.epochs))

    def _full(self, under_way: int) -> bool:
        if not self._tasks:
            return False
        if not self._batch_bytes and not self.rows_known:
            return self._run.read_ahead_bytes < CAREFUL_BYTES
        # One group more than those under way: the one that was made last waits for room in the queue.
        return (under_way + 2 * self._group) * self._batch_bytes > self._run.read_ahead_bytes

    def _plan(self, most: int) -> Group | None:
        """The samples of the next batches of this shard, so many at most, or None at the end."""
        run, total = self._run, self._total
        size, whole = run.batch_size, run.batch_size * run.shard.mod
        fitting = most if total is None else min(most, (total - self._row) // whole)
        if fitting > 0:
            samples, epochs = self._planned(fitting * size)
        else:
            assert total is not None
            rows = self._last(self._rows(size), total)
            if not len(rows):
                return None
            samples, epochs = self._order.samples(rows)
            fitting = 1
        group = Group(self._row, whole, self._batch, size, samples, epochs, self._dataset, total)
        self._row += fitting * whole
        self._batch += fitting
        return group

    def _rows(self, n: int) -> I64:
        """The next rows of this shard, by their numbers in the global stream."""
        world = self._run.shard.mod
        return (
            self._row
            + (self._run.shard.rem - self._row) % world
            + world * np.arange(n, dtype=np.int64)
        )

    def _planned(self, n: int) -> tuple[I64, I64]:
        """The samples of the next rows. A permutation costs as much for a few as for hundreds."""
        indices, epochs = self._ahead
        if len(indices) < n:
            indices, epochs = self._order.samples(self._rows(max(n, self._size)))
            self._size = PLAN_ROWS
        self._ahead = indices[n:], epochs[n:]
        return indices[:n], epochs[:n]

    def _last(self, rows: I64, total: int) -> I64:
        """What is left of a finite stream for the last batch."""
        run = self._run
        if run.drop_last or self._row >= total:
            return rows[:0]
        if run.shard.mod == 1 or run.alone:
            return rows[rows < total]
        # All ranks have to get a full batch, so the first rows of the pass stand in for those missing.
        again = self._row + run.batch_size * run.shard.mod - total
        log.warning("the last batch of the pass is filled up with the first %d of its rows", again)
        return rows % total


def _nothing() -> None:
    """There is nothing to stop or close: maps and arrays go with their last user."""


class IndexedSource(Source):
    """A dataset that can be addressed, as the loader sees it."""

    by_lane = False
    shuffles = True
    even = True

    def __init__(
        self,
        dataset: Any,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self._preprocess = preprocess
        self._collate = collate
        self.rows = is_rows(dataset) and preprocess is None and collate is None
        self.positions = bool(getattr(dataset, "positions", False)) and self.rows
        self.skip: frozenset[Address] = frozenset()
        self._length = len(dataset)
        if self._length < 1:
            raise NoData(f"{type(dataset).__name__} has no samples: its length is {self._length}")
        texts = isinstance(dataset, list | tuple) and isinstance(dataset[0], str)
        if texts and preprocess is None and collate is None:
            raise ConfigError(
                "these are texts, and a loader needs to know how to tokenize them: "
                "TextDataset.from_iterable(texts, tokenizer=…, seq_len=…)"
            )

    def data_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "data_id", None)
        about: dict[str, Any] = (
            known() if known is not None else {"type": type(self.dataset).__name__}
        )
        return about | {"length": self._length}

    def tokenizer_id(self) -> dict[str, Any]:
        return {}

    def settings_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "settings_id", None)
        return dict(known()) if known is not None else {}

    def first_place(self, epoch: int) -> Any:
        return None

    def check_place(self, value: Any) -> Any:
        raise StateFormat(
            f"data that can be addressed has no lanes, and the state has a place for one: {value!r}"
        )

    def check_state(self, state: State) -> None:
        if max(state.row, state.first) >= LONGEST:
            raise StateFormat(
                f"the state stands at row {state.row} of epoch {state.first}: no stream is that long"
            )

    def row_bytes(self) -> int:
        return row_bytes(int(self.dataset.seq_len), self.positions) if self.rows else 0

    def length(self) -> int | None:
        return self._length

    def work(self, run: Run) -> SampleWork:
        return SampleWork(
            self.dataset,
            preprocess=self._preprocess,
            collate=self._collate,
            seed=run.seed,
            positions=self.positions,
            narrow=run.narrow,
            clock=run.clock,
        )

    def open(self, run: Run, pool: Pool, work: Any) -> Producer:
        total = None if run.end_epoch is None else (run.end_epoch - run.first_epoch) * self._length
        whole = run.batch_size * run.shard.mod
        if total is not None and run.drop_last and total < whole:
            raise NoData(
                f"{total} samples do not fill one batch of {run.batch_size} on each of {run.shard.mod} ranks. "
                "Use a smaller batch_size, more epochs, or drop_last=False."
            )
        return IndexedProducer(self.dataset, self._length, run, pool, self.rows, work)


def steps(
    length: int, epochs: int, batch_size: int, shard: Shard, *, alone: bool, drop_last: bool
) -> int:
    """Batches of one pass."""
    total, whole = length * epochs, batch_size * shard.mod
    full, left = divmod(total, whole)
    # What is left fills a last batch, if this shard has any of it or gets some of the first rows instead.
    return full + (not drop_last and left > (shard.rem if alone else 0))

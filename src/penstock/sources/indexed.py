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
from penstock.feed.pool import Pool, Task
from penstock.order.permute import permute
from penstock.order.shuffle import mix
from penstock.sources.samples import Made, SampleWork, is_rows
from penstock.sources.source import Producer, Run
from penstock.types import Address, Shard, Span

log = logging.getLogger("penstock")

I64 = np.ndarray[Any, np.dtype[np.int64]]

_ROWS = 4  # see order.plan: an order of rows shares no key with one of files, chunks or documents
TASK_S = 2e-3
"""Batches that take less are made together, until they take about this long: handing one over costs
a twentieth of a millisecond."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which sample each row of a stream is."""

    length: int
    shuffle: bool
    seed: int
    first_epoch: int

    def samples(self, rows: I64) -> tuple[I64, I64]:
        """The sample and the epoch of each row."""
        epochs = rows // self.length
        at = rows - epochs * self.length
        epochs = epochs + self.first_epoch
        if not self.shuffle:
            return at, epochs
        first, last = int(epochs[0]), int(epochs[-1])
        if first == last:
            return permute(self.length, mix(self.seed, _ROWS, first), at), epochs
        samples = np.empty_like(at)
        for epoch in np.unique(epochs).tolist():
            there = epochs == epoch
            samples[there] = permute(self.length, mix(self.seed, _ROWS, epoch), at[there])
        return samples, epochs


@dataclass(frozen=True, slots=True)
class FetchedFrom:
    """The samples of a batch, and where the stream goes on."""

    row: int
    batch: int
    indices: I64
    dataset: Any

    def position(self) -> Position:
        return Position(self.row, self.batch, ())

    def spans(self) -> list[list[Span]]:
        if hasattr(self.dataset, "spans"):
            return [self.dataset.spans(index) for index in self.indices.tolist()]
        name = type(self.dataset).__name__
        return [[Span(name, None, None, index, (0, 0), (0, 0))] for index in self.indices.tolist()]


class IndexedProducer:
    """Has batches made ahead, and gives them out in order."""

    def __init__(self, dataset: Any, length: int, run: Run, pool: Pool, rows: bool) -> None:
        self._dataset = dataset
        self._run = run
        self._pool = pool
        self._order = Order(length, run.shuffle, run.seed, run.first_epoch)
        self._total = None if run.end_epoch is None else (run.end_epoch - run.first_epoch) * length
        self._row, self._batch = run.row, run.batch
        self._tasks: deque[tuple[list[FetchedFrom], list[int], Task[Made]]] = deque()
        self._most = max(1, run.prefetch_size // 2) if pool.n_workers else 1
        self._group = 1
        self._batch_bytes = 0
        self._samples = 0
        self._rows_known = rows
        self.stop = self.close = _nothing

    def next(self) -> list[Batch]:
        """The next batches; none at the end of a finite stream."""
        self._ask_ahead()
        if not self._tasks:
            return []
        origins, epochs, task = self._tasks.popleft()
        made = task.result()
        self._adapt(made)
        for origin, epoch, batch in zip(origins, epochs, made.batches, strict=True):
            batch.epoch, batch.index = epoch, origin.batch - 1
            batch._origin, batch._state = origin, self._run.state
            if self._run.tensors and not self._run.narrow and torch_is_here():
                batch.to_torch()
            self._samples += len(origin.indices)
        self._ask_ahead()
        return made.batches

    def totals(self) -> dict[str, int]:
        return {} if self._rows_known else {"documents": self._samples}

    def bad(self) -> dict[str, int]:
        return {}

    def _adapt(self, made: Made) -> None:
        """Make as many batches at once as are worth a task of their own, within the bounds of memory."""
        each = made.seconds / len(made.batches)
        self._batch_bytes = max(1, made.nbytes // len(made.batches))
        fitting = max(1, self._run.read_ahead_bytes // self._batch_bytes // (self._pool.n_workers + 1))
        self._group = max(1, min(self._most, fitting, int(TASK_S / max(each, 1e-6))))

    def _ask_ahead(self) -> None:
        """Keep every worker busy, and one piece of work waiting."""
        under_way = sum(len(origins) for origins, _, _ in self._tasks)
        while len(self._tasks) <= self._pool.n_workers and not self._full(under_way):
            origins: list[FetchedFrom] = []
            epochs: list[I64] = []
            for _ in range(self._group):
                if (planned := self._plan()) is None:
                    break
                origins.append(planned[0])
                epochs.append(planned[1])
            if not origins:
                return
            task = self._pool.submit("batches", [o.indices for o in origins], epochs)
            self._tasks.append((origins, [int(e.min()) for e in epochs], task))
            under_way += len(origins)

    def _full(self, under_way: int) -> bool:
        return bool(self._tasks) and (under_way + self._group) * self._batch_bytes > self._run.read_ahead_bytes

    def _plan(self) -> tuple[FetchedFrom, I64] | None:
        """The samples of the next batch of this shard, or None at the end."""
        run = self._run
        world, size = run.shard.mod, run.batch_size
        whole = size * world
        rows = self._row + (run.shard.rem - self._row) % world + world * np.arange(size, dtype=np.int64)
        if self._total is not None and self._row + whole > self._total:
            rows = self._last(rows, self._total)
            if not len(rows):
                return None
        self._row += whole
        self._batch += 1
        indices, epochs = self._order.samples(rows)
        return FetchedFrom(self._row, self._batch, indices, self._dataset), epochs

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


class IndexedSource:
    """A dataset that can be addressed, as the loader sees it."""

    by_lane = False
    shuffles = True
    even = True

    def __init__(
        self,
        dataset: Any,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        pad: int | None = None,
    ) -> None:
        self.dataset = dataset
        self._preprocess = preprocess
        self._collate = collate
        self._pad = pad
        self.rows = is_rows(dataset) and preprocess is None and collate is None
        self.positions = bool(getattr(dataset, "positions", False)) and self.rows
        self.skip: frozenset[Address] = frozenset()
        self._length = len(dataset)
        if self._length < 1:
            raise NoData(f"{type(dataset).__name__} has no samples: its length is {self._length}")
        if isinstance(dataset[0] if isinstance(dataset, list | tuple) else None, str):
            raise ConfigError(
                "these are texts, and a loader needs to know how to tokenize them: "
                "TextDataset.from_iterable(texts, tokenizer=…, seq_len=…)"
            )

    def data_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "data_id", None)
        about: dict[str, Any] = known() if known is not None else {"type": type(self.dataset).__name__}
        return about | {"length": self._length}

    def tokenizer_id(self) -> dict[str, Any]:
        return {}

    def settings_id(self) -> dict[str, Any]:
        known = getattr(self.dataset, "settings_id", None)
        return dict(known()) if known is not None else {}

    def first_place(self, epoch: int) -> Any:
        return None

    def check_place(self, value: Any) -> Any:
        raise StateFormat(f"data that can be addressed has no lanes, and the state has a place for one: {value!r}")

    def row_bytes(self) -> int:
        return 2 * 8 * int(self.dataset.seq_len) if self.rows else 0

    def length(self) -> int | None:
        return self._length

    def work(self, run: Run) -> SampleWork:
        return SampleWork(
            self.dataset,
            preprocess=self._preprocess,
            collate=self._collate,
            pad=self._pad,
            seed=run.seed,
            positions=self.positions,
            narrow=run.narrow,
        )

    def open(self, run: Run, pool: Pool, work: Any) -> Producer:
        total = None if run.end_epoch is None else (run.end_epoch - run.first_epoch) * self._length
        whole = run.batch_size * run.shard.mod
        if total is not None and run.drop_last and total < whole:
            raise NoData(
                f"{total} samples do not fill one batch of {run.batch_size} on each of {run.shard.mod} ranks. "
                "Use a smaller batch_size, more epochs, or drop_last=False."
            )
        return IndexedProducer(self.dataset, self._length, run, pool, self.rows)


def steps(length: int, epochs: int, batch_size: int, shard: Shard, drop_last: bool) -> int:
    """Batches of one pass."""
    whole = batch_size * shard.mod
    total = length * epochs
    return total // whole if drop_last else -(-total // whole)

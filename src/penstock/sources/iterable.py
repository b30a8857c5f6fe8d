"""An iterable of samples: mappings, arrays or anything else.

It is read in order by one task after the other; `preprocess` and `collate` run on all workers. Every
rank reads the whole iterable and keeps its own samples. Nothing is shuffled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, can_wrap
from penstock.errors import ConfigError, StateFormat
from penstock.feed.worker_pool import Pool, Task
from penstock.order.shuffle import I64
from penstock.read.resumable_iterator import END, ResumableIterator, name_of, shared_position
from penstock.sources.base import Producer, RunContext, Source
from penstock.sources.samples import SampleWork, refuse_stop_iteration
from penstock.state import State
from penstock.types import Span, StreamPosition, is_count


@dataclass(slots=True)
class ReadSamples:
    """The samples of one batch, and the iterable's position after it."""

    samples: list[Any]
    numbers: I64
    epochs: I64
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class IterableOrigin:
    """Which samples a batch was made of."""

    name: str
    row: int
    batch: int
    numbers: I64
    after: dict[str, Any]

    def position(self) -> StreamPosition:
        return StreamPosition(self.row, self.batch, (), self.after)

    def spans(self) -> list[list[Span]]:
        return [
            [Span(self.name, None, None, number, (0, 0), (0, 0))]
            for number in self.numbers.tolist()
        ]


class SampleReader:
    """Reads the iterable batch by batch. One read runs at a time."""

    def __init__(self, items: ResumableIterator, run: RunContext, texts_allowed: bool) -> None:
        self._items, self._run, self._texts_allowed = items, run, texts_allowed
        self._opened = self._ended = False

    def read(self, _previous: Any = None) -> ReadSamples:
        """Return the samples of the next batch; none after the end."""
        try:
            with self._run.clock.stage("fetch"), refuse_stop_iteration():
                return self._read()
        except Exception as error:
            items = self._items
            error.add_note(f"in stage fetch, sample {items.taken} of epoch {items.epoch}")
            raise

    def _read(self) -> ReadSamples:
        run, items = self._run, self._items
        if not self._opened:
            self._opened = True
            at = run.start.source
            if run.end_epoch is not None and at["epoch"] >= run.end_epoch:
                self._ended = True
            else:
                items.open(at["epoch"], at["taken"], at.get("state"))
        own: list[tuple[Any, int, int]] = []
        whole, count = run.batch_size * run.shard.mod, 0
        while count < whole and not self._ended:
            item = items.take()
            if item is END:
                self._ended = run.end_epoch is not None and items.epoch + 1 >= run.end_epoch
                if not self._ended:
                    items.next_epoch()
                continue
            if isinstance(item, str) and not self._texts_allowed:
                raise ConfigError(
                    "these are texts, which need a tokenizer: "
                    "TextDataset.from_iterable(…, tokenizer=…, seq_len=…)"
                )
            if count % run.shard.mod == run.shard.rem:
                own.append((item, items.taken - 1, items.epoch))
            count += 1
        if count < whole and run.drop_last:
            own = []
        numbers = np.array([number for _, number, _ in own], np.int64)
        epochs = np.array([epoch for *_, epoch in own], np.int64)
        return ReadSamples([item for item, *_ in own], numbers, epochs, self._position())

    def _position(self) -> dict[str, Any]:
        if self._ended:
            return {"epoch": self._run.end_epoch, "taken": 0}
        state = self._items.state()
        position = {"epoch": self._items.epoch, "taken": self._items.taken}
        return position if state is None else position | {"state": state}


class IterableSampleWork(SampleWork):
    """What workers do with samples that were read."""

    def collate_read(self, read: ReadSamples) -> tuple[Batch | None, ReadSamples]:
        """Return the batch, or None if there are no samples, and the rest of what was read."""
        batch = None
        if read.samples:
            with refuse_stop_iteration():
                batch = self.collated(read.samples, read.numbers, read.epochs)
        read.samples = []
        return batch, read


class IterableProducer(Producer):
    """Has batches made ahead, and gives them out in order."""

    def __init__(
        self, name: str, items: ResumableIterator, run: RunContext, pool: Pool, texts_allowed: bool
    ) -> None:
        self._name, self._run, self._pool = name, run, pool
        self._reader = SampleReader(items, run, texts_allowed)
        self._last: Task[ReadSamples] | None = None
        self._tasks: deque[Task[tuple[Batch | None, ReadSamples]]] = deque()
        self._row, self._batch = run.start.row, run.start.batch
        self._samples = self._batch_bytes = 0

    def next(self) -> Batch | None:
        self._submit_ahead()
        batch, read = self._tasks.popleft().result()
        if batch is None:
            return None
        self._batch_bytes = batch.nbytes
        self._submit_ahead()
        run = self._run
        self._row += run.batch_size * run.shard.mod
        batch.index, self._batch = self._batch, self._batch + 1
        self._samples += len(read.numbers)
        batch._origin = IterableOrigin(self._name, self._row, self._batch, read.numbers, read.after)
        batch._state = run.state
        if run.wraps and can_wrap():
            batch.to_torch()
        return batch

    def _submit_ahead(self) -> None:
        while len(self._tasks) <= self._pool.n_workers:
            full = (len(self._tasks) + 1) * self._batch_bytes > self._run.read_ahead_bytes
            if self._tasks and full:
                return
            # A function runs in this process, also if workers are processes.
            self._last = self._pool.submit(self._reader.read, after=self._last)
            self._tasks.append(self._pool.submit("collate_read", after=self._last))

    def totals(self) -> dict[str, int]:
        return {"documents": self._samples}

    def gauges(self) -> dict[str, Any]:
        return {"python": True}


class IterableSource(Source):
    """An iterable of samples as the loader sees it."""

    def __init__(
        self,
        source: Any,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._source, self._preprocess, self._collate = source, preprocess, collate
        self._name, self._shared = name_of(source), shared_position(source)

    def data_id(self) -> dict[str, Any]:
        return {"iterable": self._name}

    def first_source(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "taken": 0}

    def check_state(self, state: State) -> None:
        at = state.source
        if not isinstance(at, dict) or not all(is_count(at.get(key)) for key in ("epoch", "taken")):
            raise StateFormat(
                f"invalid state: 'source' must have the iterable's epoch and taken, not {at!r:.80}"
            )

    def work(self, run: RunContext) -> IterableSampleWork:
        return IterableSampleWork(
            None,
            preprocess=self._preprocess,
            collate=self._collate,
            seed=run.seed,
            clock=run.clock,
        )

    def open(self, run: RunContext, pool: Pool, work: Any) -> IterableProducer:
        if run.shuffle:
            raise ConfigError(
                "shuffle=True: an iterable of samples keeps its own order. Shuffle it at its source."
            )
        items = ResumableIterator(self._source, self._name, self._shared)
        texts_allowed = self._preprocess is not None or self._collate is not None
        return IterableProducer(self._name, items, run, pool, texts_allowed)

"""An iterable of samples: mappings, arrays or anything else.

It is read in order by one task after the other; `preprocess` and `collate` run on all workers. Every
rank reads the whole iterable and keeps its own samples. Nothing is shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import ConfigError, StateError
from penstock.feed.worker_pool import Pool, Task
from penstock.read.resumable_iterator import END, ResumableIterator, name_of, shared_position
from penstock.sources.base import RunContext, Source
from penstock.sources.samples import (
    SampleProducer,
    Samples,
    SampleWork,
    refuse_text,
    span_of,
)
from penstock.state import State
from penstock.types import is_count


class SampleReader:
    """Reads the iterable batch by batch. One read runs at a time."""

    def __init__(self, items: ResumableIterator, run: RunContext, texts_allowed: bool) -> None:
        self._items, self._run, self._texts_allowed = items, run, texts_allowed
        self._opened = self._ended = False

    def read(self, _previous: Any = None) -> Samples:
        """Return the samples of the next batch; none after the end."""
        try:
            with self._run.clock.stage("fetch"):
                return self._read()
        except Exception as error:
            items = self._items
            error.add_note(f"in stage fetch, sample {items.taken} of epoch {items.epoch}")
            raise

    def _read(self) -> Samples:
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
            if not self._texts_allowed:
                refuse_text(item)
            if count % run.shard.mod == run.shard.rem:
                own.append((item, items.taken - 1, items.epoch))
            count += 1
        if count < whole and run.drop_last:
            own = []
        numbers = np.array([number for _, number, _ in own], np.int64)
        epochs = np.array([epoch for *_, epoch in own], np.int64)
        return Samples(numbers, epochs, [item for item, *_ in own], self._position())

    def _position(self) -> dict[str, Any]:
        if self._ended:
            return {"epoch": self._run.end_epoch, "taken": 0}
        state = self._items.state()
        position = {"epoch": self._items.epoch, "taken": self._items.taken}
        return position if state is None else position | {"state": state}


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
            raise StateError(
                f"invalid state: 'source' must have the iterable's epoch and taken, not {at!r:.80}"
            )

    def work(self, run: RunContext) -> SampleWork:
        return SampleWork(None, self._preprocess, self._collate, run)

    def open(self, run: RunContext, pool: Pool, work: Any) -> SampleProducer:
        if run.shuffle:
            raise ConfigError(
                "shuffle=True: an iterable of samples keeps its own order. Shuffle it at its source."
            )
        items = ResumableIterator(self._source, self._name, self._shared)
        texts_allowed = self._preprocess is not None or self._collate is not None
        reader = SampleReader(items, run, texts_allowed)

        def tasks() -> Iterator[Task[Any]]:
            last: Task[Any] | None = None
            while True:
                # A function runs in this process, also if workers are processes.
                last = pool.submit(reader.read, after=last)
                yield pool.submit("batch", after=last)

        return SampleProducer(run, pool, tasks(), partial(span_of, self._name))

"""An iterable of samples: mappings, arrays or anything else.

It is read in order by one task after the other; `preprocess` and `collate` run on all workers. Every
rank reads the whole iterable and keeps its own samples. Nothing is shuffled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import ConfigError, StateError
from penstock.feed.worker_pool import Pool, Task
from penstock.read.resumable_iterator import END, ResumableIterator, name_of, shared_position
from penstock.sources.base import RunContext
from penstock.sources.samples import (
    Collate,
    CollatedSource,
    Preprocess,
    SampleProducer,
    Samples,
    span_of,
)
from penstock.state import State
from penstock.types import is_count


class IterableSource(CollatedSource):
    """An iterable of samples as the loader sees it."""

    def __init__(self, source: Any, preprocess: Preprocess = None, collate: Collate = None) -> None:
        super().__init__(preprocess, collate)
        self._source, self._name, self._shared = source, name_of(source), shared_position(source)

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

    def open(self, run: RunContext, pool: Pool, work: Any) -> SampleProducer:
        if run.shuffle:
            raise ConfigError(
                "shuffle=True: an iterable of samples keeps its own order. Shuffle it at its source."
            )
        items = ResumableIterator(self._source, self._name, self._shared)
        batches = self._batches(items, run)

        def read(_previous: Any = None) -> Samples:
            try:
                with run.clock.stage("fetch"):
                    return next(batches)
            except Exception as error:
                error.add_note(f"in stage fetch, sample {items.taken} of epoch {items.epoch}")
                raise

        def tasks() -> Iterator[Task[Any]]:
            last: Task[Any] | None = None
            while True:
                # A function runs in this process, also if workers are processes.
                last = pool.submit(read, after=last)
                yield pool.submit("batch", after=last)

        return SampleProducer(run, pool, tasks(), partial(span_of, self._name))

    def _batches(self, items: ResumableIterator, run: RunContext) -> Iterator[Samples]:
        """Yield the rank's samples of each batch; none for ever after the end."""
        at, end, world = run.start.source, run.end_epoch, run.shard.mod
        ended = end is not None and at["epoch"] >= end
        if not ended:
            items.open(at["epoch"], at["taken"], at.get("state"))
        while True:
            own: list[tuple[int, int, Any]] = []
            count = 0
            while count < run.batch_size * world and not ended:
                item = items.take()
                if item is END:
                    ended = end is not None and items.epoch + 1 >= end
                    if not ended:
                        items.next_epoch()
                    continue
                self.check_sample(item)
                if count % world == run.shard.rem:
                    own.append((items.taken - 1, items.epoch, item))
                count += 1
            if count < run.batch_size * world and run.drop_last:
                own = []
            after: dict[str, Any] = {"epoch": items.epoch, "taken": items.taken}
            if ended:
                after = {"epoch": end, "taken": 0}
            elif (state := items.state()) is not None:
                after["state"] = state
            numbers, epochs = np.array([each[:2] for each in own], np.int64).reshape(-1, 2).T
            yield Samples(numbers, epochs, [item for *_, item in own], after)

"""User-defined samples: fetch, preprocess, collate.

`SampleWork` has pure functions of sample numbers and epochs, for worker threads or processes. Random
numbers depend on seed, epoch and sample. `SampleProducer` keeps batches in progress on the workers.
`IterableSource` reads an iterable of samples in order, one task at a time; every rank reads all of it
and keeps its own samples. Map-style datasets are in `map_style`.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.encode.batch import Batch
from penstock.encode.collate import default_collate, of_value
from penstock.errors import ConfigError, StateError
from penstock.feed.worker_pool import Pool, Task
from penstock.order.shuffle import I64, mix
from penstock.read.resumable_iterator import END, ResumableIterator, SharedPosition, name_of
from penstock.sources.base import Producer, RunContext, Source, Work, noted
from penstock.state import State
from penstock.types import Span, StreamPosition, is_count

Preprocess = Callable[..., Any] | None
Collate = Callable[[list[Any]], Any] | None


@dataclass(slots=True)
class Samples:
    """The samples of a batch."""

    numbers: I64
    epochs: I64
    values: Sequence[Any] | None = None
    """The samples themselves, if already read."""
    after: Any = None
    """For iterables: the position after these samples."""


class SampleWork(Work):
    """Fetches samples and collates them; reads rows of ids."""

    def __init__(
        self, dataset: Any, preprocess: Preprocess, collate: Collate, run: RunContext
    ) -> None:
        self.clock = run.clock
        self._dataset, self._preprocess, self._collate = dataset, preprocess, collate
        self._seed = run.seed
        self._takes_rng = False
        with suppress(TypeError, ValueError):  # some built-in functions have no signature
            self._takes_rng = "rng" in inspect.signature(preprocess).parameters  # type: ignore[arg-type]

    def __str__(self) -> str:
        return type(self._dataset).__name__

    def batch(self, samples: Samples) -> tuple[Batch | None, Samples]:
        """Return a batch and its samples. The batch is None if there are no samples."""
        numbers, epochs, values = samples.numbers, samples.epochs, samples.values
        if not len(numbers):
            return None, samples
        samples.values = None
        values = self._fetch(numbers) if values is None else values
        with self.clock.stage("decode") as timeline:
            prepared = self._prepared(values, numbers, epochs)
        timeline.count("decode", len(values))
        with self.clock.stage("batch"), noted(f"in collate, of samples {_shown(numbers)}"):
            collate = self._collate or default_collate
            batch = of_value(collate(list(prepared)))
        size = getattr(batch.inputs, "size", None)
        batch.tokens = size if isinstance(size, int) else len(values)
        batch.epoch = int(epochs.min())  # the epoch that every sample has reached
        return batch, samples

    def rows(self, indices: I64) -> Any:
        """Return rows of ids from a dataset that reads many at once."""
        with self.clock.stage("fetch", self) as timeline:
            ids = self._dataset.__getitems__(indices)
        timeline.count("fetch", len(ids), ids.nbytes)
        return ids

    def _fetch(self, indices: I64) -> Sequence[Any]:
        dataset, numbers, name = self._dataset, indices.tolist(), str(self)
        samples: list[Any] = []
        with self.clock.stage("fetch", self) as timeline:
            if hasattr(dataset, "__getitems__"):
                with noted(f"in __getitems__ of {name}, samples {_shown(indices)}"):
                    samples = dataset.__getitems__(numbers)
            else:
                for number in numbers:
                    with noted(f"in __getitem__ of {name}, sample {number}"):
                        samples.append(dataset[number])
        if len(samples) != len(numbers):
            raise ConfigError(
                f"__getitems__ of {name} returned {len(samples)} samples for {len(numbers)} indices"
            )
        timeline.count("fetch", len(indices))
        return samples

    def _prepared(self, samples: Sequence[Any], indices: I64, epochs: I64) -> Sequence[Any]:
        if self._preprocess is None:
            return samples
        prepared, rng = [], {}
        for number, epoch, sample in zip(indices.tolist(), epochs.tolist(), samples, strict=True):
            if self._takes_rng:  # seeded by (seed, epoch, number)
                philox = np.random.Philox(mix(self._seed, epoch, number))
                rng = {"rng": np.random.Generator(philox)}
            with noted(f"in preprocess, sample {number}"):
                prepared.append(self._preprocess(sample, **rng))
        return prepared


@dataclass(frozen=True, slots=True)
class SamplesOrigin:
    """The samples that a batch was made of."""

    at: StreamPosition
    numbers: I64
    spans_of: Callable[[int], list[Span]]

    def position(self) -> StreamPosition:
        return self.at

    def spans(self) -> list[list[Span]]:
        return [self.spans_of(number) for number in self.numbers.tolist()]


class SampleProducer(Producer):
    """Submits batches of samples ahead of time, and returns them in order."""

    def __init__(
        self,
        run: RunContext,
        pool: Pool,
        tasks: Iterator[Task[tuple[Batch | None, Samples]]],
        spans_of: Callable[[int], list[Span]],
        total: int | None = None,
    ) -> None:
        """`tasks` submits a batch per step. `total`: the rows of all ranks, if known."""
        self._run, self._pool, self._tasks = run, pool, tasks
        self._spans_of, self._total = spans_of, total
        self._ahead: deque[Task[tuple[Batch | None, Samples]]] = deque()
        self._row, self._batch = run.start.row, run.start.batch
        self._batch_bytes = self._samples = 0

    def take(self, n: int) -> list[Batch]:
        self._submit_ahead()
        batch, samples = self._ahead.popleft().result() if self._ahead else (None, None)
        if batch is None or samples is None:
            return []
        self._batch_bytes = batch.nbytes
        self._submit_ahead()
        run = self._run
        self._row += run.batch_size * run.shard.mod
        if self._total is not None:
            self._row = min(self._row, self._total)
        batch.index, self._batch = self._batch, self._batch + 1
        self._samples += len(samples.numbers)
        after = StreamPosition(self._row, self._batch, (), samples.after)
        batch._origin = SamplesOrigin(after, samples.numbers, self._spans_of)
        batch._state = run.state
        return [batch]

    def _submit_ahead(self) -> None:
        """Keep every worker busy and one more batch waiting, within the read-ahead memory."""
        limit, size = self._run.read_ahead_bytes, self._batch_bytes
        while (ahead := len(self._ahead)) <= self._pool.n_workers:
            if ahead and (ahead + 2) * size > limit:
                return
            if (task := next(self._tasks, None)) is None:
                return
            self._ahead.append(task)

    def totals(self) -> dict[str, int]:
        return {"documents": self._samples}

    def gauges(self) -> dict[str, Any]:
        return {"python": True}


class CollatedSource(Source):
    """User-defined samples, map-style or from an iterable."""

    def __init__(self, preprocess: Preprocess, collate: Collate, indexed: Any = None) -> None:
        """`indexed`: the dataset that workers fetch samples from, if map-style."""
        self._preprocess, self._collate, self._indexed = preprocess, collate, indexed

    def work(self, run: RunContext) -> SampleWork:
        return SampleWork(self._indexed, self._preprocess, self._collate, run)

    def check_sample(self, sample: Any) -> None:
        """Raise if samples are texts and nothing would tokenize them."""
        if isinstance(sample, str) and self._preprocess is None and self._collate is None:
            raise ConfigError(
                "the samples are texts, which need a tokenizer: "
                "TextDataset.from_iterable(texts, tokenizer=…, seq_len=…)"
            )


class IterableSource(CollatedSource):
    """An iterable of samples as the loader sees it."""

    def __init__(self, source: Any, preprocess: Preprocess = None, collate: Collate = None) -> None:
        super().__init__(preprocess, collate)
        self._source, self._name, self._shared = source, name_of(source), SharedPosition(source)

    def data_id(self) -> dict[str, Any]:
        return {"iterable": self._name}

    def first_source(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "taken": 0}

    def check_state(self, state: State) -> None:
        at = state.source
        if not isinstance(at, dict) or not all(is_count(at.get(key)) for key in ("epoch", "taken")):
            raise StateError(
                f"invalid state: 'source' must have 'epoch' and 'taken', not {at!r:.80}"
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
                # A function runs in this process even if workers are processes.
                last = pool.submit(read, after=last)
                yield pool.submit("batch", after=last)

        return SampleProducer(run, pool, tasks(), partial(span_of, self._name))

    def _batches(self, items: ResumableIterator, run: RunContext) -> Iterator[Samples]:
        """Yield the samples of this rank for each batch; empty ones forever after the end."""
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


def span_of(name: str, number: int) -> list[Span]:
    """Return the origin of a sample of which only the number is known."""
    return [Span(name, None, None, number, (0, 0), (0, 0))]


def _shown(indices: I64) -> str:
    return ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")

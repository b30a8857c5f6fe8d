"""Samples that cannot be addressed: an iterable of mappings, arrays or anything else.

In:    an iterable, and what to do with its samples.
Out:   batches.
Where: the iterable is read by one worker thread at a time, in order; `preprocess` and `collate` run on all.
State: the epoch and how many of its samples were taken; see `tape` for a resume.
Cost:  every rank reads the whole iterable and keeps its own samples. Nothing is shuffled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, Position, torch_is_here
from penstock.errors import ConfigError, StateFormat
from penstock.feed.pool import Pool, Task
from penstock.read.tape import END, Tape, known, name_of
from penstock.sources.samples import SampleWork, user_code
from penstock.sources.source import Producer, Run, Source
from penstock.state import State, is_count, show
from penstock.types import Address, Span

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Pulled:
    """The samples of one batch, and where the iterable stands after it."""

    samples: list[Any]
    numbers: I64
    epochs: I64
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PulledFrom:
    """Where a batch of an iterable came from."""

    name: str
    row: int
    batch: int
    numbers: I64
    after: dict[str, Any]

    def position(self) -> Position:
        return Position(self.row, self.batch, (), self.after)

    def spans(self) -> list[list[Span]]:
        return [
            [Span(self.name, None, None, number, (0, 0), (0, 0))]
            for number in self.numbers.tolist()
        ]


class SampleReader:
    """Reads the iterable batch by batch, for whichever worker comes first."""

    def __init__(self, tape: Tape, run: Run, at: dict[str, Any], own_texts: bool) -> None:
        self._tape = tape
        self._own_texts = own_texts
        self._run = run
        self._at = at
        self._lock = threading.Lock()
        self._ready: dict[int, Pulled] = {}
        self._next = 0
        self._opened = self._ended = False
        self._failed: Exception | None = None

    def read(self, number: int) -> Pulled:
        """The samples of a batch; none after the end."""
        with self._lock:
            while number not in self._ready:
                if self._failed is not None:
                    raise self._failed
                try:
                    self._ready[self._next] = self._pull()
                except Exception as error:
                    error.add_note(
                        f"in stage fetch, sample {self._tape.taken} of epoch {self._tape.epoch}"
                    )
                    self._failed = error
                self._next += 1
            return self._ready.pop(number)

    def _pull(self) -> Pulled:
        run, tape = self._run, self._tape
        if not self._opened:
            self._opened = True
            if run.end_epoch is not None and self._at["epoch"] >= run.end_epoch:
                self._ended = True
            else:
                tape.open(self._at["epoch"], self._at["taken"], self._at.get("state"))
        samples: list[Any] = []
        numbers: list[int] = []
        epochs: list[int] = []
        whole = run.batch_size * run.shard.mod
        count = 0
        while count < whole and not self._ended:
            item = tape.take()
            if item is END:
                if run.end_epoch is not None and tape.epoch + 1 >= run.end_epoch:
                    self._ended = True
                else:
                    tape.next_epoch()
                continue
            if isinstance(item, str) and not self._own_texts:
                raise ConfigError(
                    "these are texts, and a loader needs to know how to tokenize them: "
                    "TextDataset.from_iterable(…, tokenizer=…, seq_len=…)"
                )
            if count % run.shard.mod == run.shard.rem:
                samples.append(item)
                numbers.append(tape.taken - 1)
                epochs.append(tape.epoch)
            count += 1
        if count < whole and run.drop_last:
            samples, numbers, epochs = [], [], []
        return Pulled(
            samples, np.array(numbers, np.int64), np.array(epochs, np.int64), self._after()
        )

    def _after(self) -> dict[str, Any]:
        tape = self._tape
        if self._ended:
            return {"epoch": self._run.end_epoch, "taken": 0}
        said = tape.state()
        after = {"epoch": tape.epoch, "taken": tape.taken}
        return after if said is None else after | {"state": said}


class IterableWork(SampleWork):
    """What workers do with samples that were read."""

    def of_pulled(self, pulled: Pulled) -> tuple[Batch | None, Pulled]:
        batch = None
        if pulled.samples:
            with user_code():
                batch = self.of_samples(pulled.samples, pulled.numbers, pulled.epochs)
        pulled.samples = []
        return batch, pulled


class IterableProducer:
    """Has batches made ahead, and gives them out in order."""

    def __init__(self, name: str, tape: Tape, run: Run, pool: Pool, own_texts: bool) -> None:
        self._name = name
        self._run = run
        self._pool = pool
        self._reader = SampleReader(tape, run, run.source, own_texts)
        self._tasks: deque[Task[tuple[Batch | None, Pulled]]] = deque()
        self._asked = 0
        self._row, self._batch = run.row, run.batch
        self._samples = 0
        self._ended = False
        self._bytes = 0

    def next(self) -> list[Batch]:
        """The next batch; none at the end of a finite stream."""
        if self._ended:
            return []
        self._ask_ahead()
        batch, pulled = self._tasks.popleft().result()
        if batch is None:
            self._ended = True
            return []
        self._bytes = batch.nbytes
        self._ask_ahead()
        run = self._run
        self._row += run.batch_size * run.shard.mod
        self._batch += 1
        self._samples += len(pulled.numbers)
        batch.index = self._batch - 1
        batch._origin = PulledFrom(self._name, self._row, self._batch, pulled.numbers, pulled.after)
        batch._state = run.state
        if run.tensors and torch_is_here() and not run.narrow:
            batch.to_torch()
        return [batch]

    def at_once(self) -> list[Batch]:
        """None: somebody else's iterable may take as long as it likes."""
        return []

    def totals(self) -> dict[str, int]:
        return {"documents": self._samples}

    def bad(self) -> dict[str, int]:
        return {}

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def _ask_ahead(self) -> None:
        while len(self._tasks) <= self._pool.n_workers:
            if self._tasks and (len(self._tasks) + 1) * self._bytes > self._run.read_ahead_bytes:
                return
            number = self._asked
            self._asked += 1

            def read(number: int = number) -> tuple[Any, ...]:
                with self._run.clock.stage("fetch", self._name):
                    return (self._reader.read(number),)

            self._tasks.append(self._pool.submit("of_pulled", before=read))


class IterableSource(Source):
    """An iterable of samples, as the loader sees it."""

    by_lane = False
    shuffles = False
    even = False

    def __init__(
        self,
        source: Any,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._source = source
        self._how: dict[str, Any] = {"preprocess": preprocess, "collate": collate}
        self._name = name_of(source)
        self._known = known(source)
        self.skip: frozenset[Address] = frozenset()

    def data_id(self) -> dict[str, Any]:
        return {"iterable": self._name}

    def tokenizer_id(self) -> dict[str, Any]:
        return {}

    def settings_id(self) -> dict[str, Any]:
        return {}

    def first_place(self, epoch: int) -> Any:
        return None

    def start(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "taken": 0}

    def check_place(self, value: Any) -> Any:
        raise StateFormat(
            f"an iterable of samples has no lanes, and the state has a place for one: {show(value)}"
        )

    def check_state(self, state: State) -> None:
        at = state.source
        if not isinstance(at, dict) or not all(is_count(at.get(key)) for key in ("epoch", "taken")):
            raise StateFormat(f"the state does not say where the iterable stands: {show(at)}")

    def row_bytes(self) -> int:
        return 0

    def work(self, run: Run) -> IterableWork:
        return IterableWork(None, **self._how, seed=run.seed, clock=run.clock)

    def open(self, run: Run, pool: Pool, work: Any) -> Producer:
        if run.shuffle:
            raise ConfigError(
                "shuffle=True: an iterable of samples comes in its own order. Shuffle where it is made."
            )
        tape = Tape(self._source, self._name, self._known)
        own_texts = self._how["preprocess"] is not None or self._how["collate"] is not None
        return IterableProducer(self._name, tape, run, pool, own_texts)

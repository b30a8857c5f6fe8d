"""Settings that follow what is measured: one at a time, kept only where it helped, and never the stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import AsyncDataLoader, SyntheticDataset, TextDataset
from penstock.feed.autotune import RETRY_S, WARM_STEPS, Autotune, Knob
from penstock.feed.prefetch_queue import PrefetchQueue
from penstock.feed.worker_pool import ThreadPool
from penstock.watch.attribution import Known, Verdict, judge
from penstock.watch.stage_timer import NullClock
from tests import contracts
from tests.servers import HubServer

# The decisions, on a machine made of numbers


class Machine:
    """A run whose rate is a function of its settings, on a clock of its own."""

    def __init__(
        self, rate: Any, stage: str = "fetch", wait: float = 0.5, **values: tuple[int, int]
    ) -> None:
        self.rate = rate
        self.stage = stage
        self.wait = wait
        self.values = {name: value for name, (value, _) in values.items()}
        self.events: list[dict[str, Any]] = []
        self.history: list[dict[str, int]] = []
        self.now = 0.0
        knobs = [self.knob(name, most) for name, (_, most) in values.items()]
        self.tune = Autotune(knobs, self)

    def knob(self, name: str, most: int) -> Knob:
        def put(value: int) -> None:
            self.values[name] = value

        return Knob(
            name, lambda: self.values[name], put, lambda: most, frozenset({"fetch", "tokenize"})
        )

    def verdict(self) -> Verdict:
        return judge(self.wait, 1.0, {self.stage: self.wait}, Known())

    def event(self, msg: str, **fields: Any) -> None:
        assert msg == "tune"
        self.events.append(fields)

    def run(self, seconds: float) -> Machine:
        until = self.now + seconds
        while self.now < until:
            rate = self.rate(SimpleNamespace(**self.values))
            self.now += 1000 / rate
            self.tune.step(self.now, 1000)
            self.history.append(dict(self.values))
        return self


def test_a_knob_is_turned_until_it_no_longer_helps() -> None:
    machine = Machine(lambda v: 10_000 * min(v.fetches, 16), fetches=(1, 64)).run(60)
    assert machine.values == {"fetches": 16}
    assert [e["kept"] for e in machine.events if e["kept"] is not None] == [True] * 4 + [False]


def test_what_does_not_help_is_undone_and_not_tried_again_at_once() -> None:
    machine = Machine(lambda v: 50_000, a=(2, 8), b=(4, 64)).run(RETRY_S / 2)
    assert machine.values == {"a": 2, "b": 4}
    assert [(e["what"], e["kept"]) for e in machine.events] == [
        ("a", None),
        ("a", False),
        ("b", None),
        ("b", False),
    ]
    machine.run(RETRY_S)
    assert len(machine.events) > 4


def test_one_change_at_a_time() -> None:
    machine = Machine(lambda v: 1_000 * v.a * v.b, a=(1, 8), b=(1, 8)).run(90)
    assert machine.values == {"a": 8, "b": 8}
    for before, after in zip(machine.history, machine.history[1:], strict=False):
        assert sum(before[name] != after[name] for name in before) <= 1


def test_a_run_that_does_not_wait_is_left_alone() -> None:
    machine = Machine(lambda v: 10_000 * v.a, wait=0.005, a=(1, 8)).run(30)
    assert machine.events == []


def test_a_knob_never_goes_beyond_what_it_may() -> None:
    machine = Machine(lambda v: 10_000 * v.a, a=(1, 6)).run(60)
    assert max(values["a"] for values in machine.history) == 6


def test_a_knob_for_other_stages_is_left_alone() -> None:
    assert Machine(lambda v: 10_000 * v.a, stage="copy", a=(1, 8)).run(30).events == []


def test_nothing_is_tried_in_the_first_steps() -> None:
    machine = Machine(lambda v: 10_000 * v.a, a=(1, 8))
    for _ in range(WARM_STEPS):
        machine.now += 3.0
        machine.tune.step(machine.now, 1000)
    assert machine.events == []
    assert machine.run(60).values == {"a": 8}


def test_pauses_are_not_counted_against_a_change() -> None:
    machine = Machine(lambda v: 10_000 * min(v.a, 2), a=(1, 2)).run(5)
    assert [e["kept"] for e in machine.events] == [None]
    for _ in range(40):  # evaluation, for a minute
        machine.now += 1.6
        machine.tune.step(machine.now, 1000, paused_s=1.55)
    assert machine.events[1]["kept"] is True


# The knobs of a real run


def turn_at_random(loader: AsyncDataLoader, rng: random.Random) -> None:
    tuner = loader._tuner
    assert tuner is not None
    knob = rng.choice(list(tuner.knobs))
    knob.set(rng.randint(1, max(1, min(knob.max(), 24))))


def stream(loader: AsyncDataLoader, steps: int, seed: int | None) -> list[Any]:
    """The batches, with every knob turned at random between them."""
    rng = random.Random(seed)
    got = []
    with loader:
        for _ in range(steps):
            got += contracts.take(loader, 1)
            if seed is not None and rng.random() < 0.5:
                turn_at_random(loader, rng)
    return got


def text(corpus: Path, **more: Any) -> AsyncDataLoader:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32)
    return AsyncDataLoader(data, 4, shuffle=True, seed=3, **more)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_the_stream_is_the_same_whatever_is_turned(corpus: Path, seed: int) -> None:
    whole = stream(text(corpus), 120, None)
    assert stream(text(corpus, n_workers=1, prefetch_size="auto"), 120, seed) == whole


def test_the_names_of_the_knobs_by_kind_of_data(corpus: Path, hub: HubServer) -> None:
    def names(data: Any, **more: Any) -> set[str]:
        with AsyncDataLoader(data, 4, prefetch_size="auto", n_workers=1, **more) as loader:
            assert loader._tuner is not None
            return {knob.name for knob in loader._tuner.knobs}

    remote = TextDataset("hf://datasets/org/data", tokenizer="byte", seq_len=32, cache=False)
    assert names(remote) == {"fetches", "n_workers", "read_ahead", "prefetch_size"}
    assert names(TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32)) == {
        "n_workers",
        "read_ahead",
        "prefetch_size",
    }
    assert names(SyntheticDataset(100, 32, 1000, 0)) == {"n_workers", "prefetch_size"}
    assert names([[i] for i in range(100)]) == {"n_workers"}
    assert names([[i] for i in range(100)], workers="process") == set()


@pytest.fixture
def hub(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        files = {
            path.name: path.read_bytes() for path in sorted((corpus / "parquet").glob("*.parquet"))
        }
        server.add("org/data", files)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_requests_in_flight_may_change_at_any_time(hub: HubServer) -> None:
    def make(**more: Any) -> AsyncDataLoader:
        data = TextDataset("hf://datasets/org/data", tokenizer="byte", seq_len=32, cache=False)
        return AsyncDataLoader(data, 4, **more)

    whole = stream(make(), 100, None)
    assert stream(make(prefetch_size="auto"), 100, 1) == whole
    assert stream(make(prefetch_size="auto"), 100, 2) == whole


def test_memory_for_a_longer_queue_comes_out_of_read_ahead(corpus: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=1024)
    with AsyncDataLoader(
        data, 8, n_workers=1, memory_limit=8 << 20, prefetch_size="auto"
    ) as loader:
        assert loader._tuner is not None
        knob = next(k for k in loader._tuner.knobs if k.name == "prefetch_size")
        batch = 8 * 1024 * 16
        assert knob.max() * batch <= (8 << 20) // 2
        lanes: Any = loader._pipeline._producer.lanes  # type: ignore[union-attr]
        before = lanes.read_ahead_bytes
        knob.set(knob.max())
        assert before - lanes.read_ahead_bytes == (knob.max() - 8) * batch
        contracts.take(loader, 5)


# Pools and queues that change their size


class Work:
    def square(self, n: int) -> int:
        return n * n


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_a_pool_of_changing_size_loses_no_work(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    pool = ThreadPool(sizes[0], Work())
    tasks = []
    for size in sizes:
        tasks += [pool.submit("square", n) for n in range(rng.randint(0, 20))]
        pool.resize(size)
        assert pool.n_workers == size
    last = [pool.submit("square", n) for n in range(10)]
    assert [task.result() for task in last] == [n * n for n in range(10)]
    assert all(isinstance(task.result(), int) for task in tasks)
    pool.stop()
    assert pool.join(10)


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), warm=st.integers(0, 12))
def test_a_queue_of_changing_size_keeps_order_and_bound(sizes: list[int], warm: int) -> None:
    numbers = iter(range(10_000))
    queue: PrefetchQueue[int] = PrefetchQueue(lambda: next(numbers), sizes[0], clock=NullClock())
    queue.start()
    got: list[Any] = []
    if warm:
        queue.fill(warm, 10)
    for size in sizes:
        queue.resize(size)
        got += [queue.get(10) for _ in range(8)]
    got += [queue.get(10) for _ in range(24)]  # what was made under a larger size is used up
    assert got == list(range(len(got)))
    assert queue.fill(sizes[-1], 10) == sizes[-1]
    assert queue.depth <= sizes[-1]
    queue.stop()
    assert queue.join(10)

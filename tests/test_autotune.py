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
from penstock.feed.autotune import RETRY_S, Autotune, Knob
from penstock.watch.attribution import Known, Verdict, judge
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


def test_a_run_that_does_not_wait_is_left_alone() -> None:
    machine = Machine(lambda v: 10_000 * v.a, wait=0.005, a=(1, 8)).run(30)
    assert machine.events == []


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

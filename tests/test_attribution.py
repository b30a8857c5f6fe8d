"""Attribution: a delay that is put into one stage is charged to that stage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, TextDataset
from penstock.encode.batching import Batcher
from penstock.encode.tokenizer import Tokenizer
from penstock.read.storage import PlainFile
from penstock.read.validation import ChunkValidator
from penstock.sources.chunk_lanes import ChunkLane
from penstock.watch.attribution import Known, band, charge, judge
from penstock.watch.stage_timer import (
    RANKS,
    WAIT,
    Segment,
    TaskTimeline,
    ThreadTimeline,
)
from tests.servers import HubServer

DELAY_S = 0.2


def wait(seconds: float = DELAY_S) -> None:
    threading.Event().wait(seconds)


def delay(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, seconds: float = DELAY_S) -> None:
    """Put a delay into a method."""
    original = getattr(kind, name)

    def slow(self: Any, *args: Any, **more: Any) -> Any:
        wait(seconds)
        return original(self, *args, **more)

    monkeypatch.setattr(kind, name, slow)


PLACES: dict[str, tuple[type, str]] = {
    "fetch": (PlainFile, "_read"),
    "decode": (ChunkValidator, "documents"),
    "tokenize": (Tokenizer, "encode"),
    "pack": (ChunkLane, "next_window"),
    "batch": (Batcher, "_arrays"),
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A garbage collection in a test session takes as long as a delay, and strikes whichever stage allocates."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small row groups: what is not the delay is next to nothing."""
    folder = tmp_path_factory.mktemp("small")
    texts = [f"document {i} " + "words of it " * 12 for i in range(400)]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=10)
    return folder


def shares(loader: AsyncDataLoader) -> dict[str, float]:
    """Of the time in `next` after the first step, by stage."""
    timer = loader.telemetry.timer
    wait, by_stage = timer.rolling.wait, timer.charges()
    assert sum(by_stage.values()) == pytest.approx(wait, rel=1e-6)
    return {stage: seconds / wait for stage, seconds in by_stage.items()}


def run(data: Any, steps: int, **how: Any) -> dict[str, float]:
    """Seconds of waiting by stage."""
    with AsyncDataLoader(data, 4, **how) as loader:
        for _ in range(steps):
            next(loader)
        shares(loader)
        return dict(loader.telemetry.timer.charges())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stage", list(PLACES))
def test_a_delay_in_one_stage_is_charged_to_that_stage(
    small: Path, monkeypatch: pytest.MonkeyPatch, stage: str, workers: int
) -> None:
    data = TextDataset(small, tokenizer="byte", seq_len=64)
    how = {"steps": 8 if stage == "batch" else 50, "n_workers": workers, "prefetch_size": 2}
    usual = sum(run(data, **how).values())
    delay(monkeypatch, *PLACES[stage])
    found = run(data, **how)
    exposed = (
        sum(found.values()) - usual
    )  # what the delay added; a busy machine waits without it too
    assert exposed > 0.5
    assert found[stage] >= 0.95 * exposed, (found, usual)


@pytest.fixture
def far() -> Iterator[HubServer]:
    """A server that takes its time, with a file that is too large to come at once."""
    sink = pa.BufferOutputStream()
    texts = [np.random.default_rng(i).bytes(2000).hex() for i in range(300)]
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=5)
    with HubServer(latency_s=0.1) as hub:
        hub.add("org/data", {"a.parquet": sink.getvalue().to_pybytes()})
        yield hub


def test_a_slow_server_is_charged_to_fetch_and_the_parts_of_a_fetch_are_told_apart(
    far: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", far.endpoint)
    data = TextDataset(
        "hf://datasets/org/data", tokenizer="byte", seq_len=64, cache=False, remote={"fetches": 1}
    )
    with AsyncDataLoader(data, 4, n_workers=1) as loader:
        for _ in range(480):
            next(loader)
        found, stats = loader.telemetry.timer.charges(), loader.stats()
    far.latency_s = 0.0
    exposed = sum(found.values()) - sum(run(data, 480, n_workers=1).values())
    assert exposed > 0.3
    assert found["fetch"] >= 0.8 * exposed, (
        found,
        exposed,
    )  # a busy machine waits for other things too
    assert stats.fetch["first_byte_s"] > stats.fetch["body_s"]
    assert stats.fetch["p95_ms"] >= 90
    assert "fetch" in stats.verdict
    assert "p95" in stats.verdict


def test_a_slow_hook_on_the_way_to_a_device_is_charged_to_copy(small: Path) -> None:
    data = TextDataset(small, tokenizer="byte", seq_len=64)
    with AsyncDataLoader(data, 4, device="meta", device_preprocess=lambda _: wait(0.1)) as loader:  # type: ignore[func-returns-value]
        for _ in range(12):
            next(loader)
        found = shares(loader)
    assert found["copy"] >= 0.95, found
    assert loader.stats().stages["copy"].items >= 12


class Samples:
    """A user's own data, slow in one place."""

    def __init__(self, slow: str) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if self.slow == "fetch" and index % 4 == 0:
            wait(0.1)
        return np.full(8, index)


def prepared(sample: Any) -> Any:
    if sample[0] % 4 == 0:
        wait(0.1)
    return sample


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize(("slow", "stage"), [("fetch", "fetch"), ("preprocess", "decode")])
def test_samples_of_the_users_own_are_charged_by_the_same_names(
    slow: str, stage: str, workers: Any
) -> None:
    preprocess: Callable[[Any], Any] | None = prepared if slow == "preprocess" else None
    how: dict[str, Any] = {
        "steps": 12,
        "shuffle": False,
        "n_workers": 1,
        "workers": workers,
        "prefetch_size": 1,
    }
    usual = sum(run(Samples("nowhere"), **how).values())
    found = run(Samples(slow), preprocess=preprocess, **how)
    exposed = sum(found.values()) - usual
    assert exposed > 0.3
    assert found[stage] >= 0.9 * exposed, (found, usual)


# The rules, on segments made by hand


def task_timeline(begun: float, *done: Segment, before: tuple[Segment, ...] = ()) -> TaskTimeline:
    made = TaskTimeline()
    made.begun, made.ended, made.done = begun, done[-1].end, list(done)
    made.thread = timeline_of([*before, *done])
    return made


def timeline_of(segments: list[Segment]) -> ThreadTimeline:
    timeline = ThreadTimeline()
    timeline.recent.extend(segments)
    return timeline


def test_while_work_waits_for_a_worker_what_that_worker_does_is_to_blame() -> None:
    chunk = task_timeline(
        4.0, Segment(4, 5, "decode"), Segment(5, 6, "tokenize"), before=(Segment(0, 4, "tokenize"),)
    )
    found = charge(timeline_of([Segment(1, 6, WAIT, chunk)]), 1, 6)
    assert found.seconds == {"tokenize": 4.0, "decode": 1.0}


def test_a_thread_without_a_core_is_charged_to_those_who_have_them() -> None:
    packing = timeline_of([Segment(0, 10, "pack", cpu=2.0)])
    busy = [
        timeline_of([Segment(-5, 15, "tokenize", cpu=19.0)]),
        timeline_of([Segment(0, 10, "tokenize", cpu=9.0)]),
    ]
    found = charge(packing, 0, 10, timelines=[packing, *busy], cores=2)
    # The others had 18.5 of 20 seconds of a core, and it had 2: the 8 that it lacked were theirs.
    assert found.seconds == pytest.approx({"pack": 2.0, "tokenize": 8.0})


# The verdict


@pytest.mark.parametrize(
    ("share", "name"),
    [(0, "excellent"), (0.0099, "excellent"), (0.01, "good"), (0.05, "fair"), (0.199, "fair"), (0.2, "poor"), (1.0, "poor")],
)  # fmt: skip
def test_bands(share: float, name: str) -> None:
    assert band(share) == name


def test_a_verdict_names_the_stages_their_shares_and_what_to_do() -> None:
    known = Known(n_workers=2, cores=4, remote=True, fetch_p95_ms=840, retries=6)
    verdict = judge(1.4, 10.0, {"tokenize": 1.1, "fetch": 0.3}, known)
    assert (
        verdict.line
        == "input-bound 14 %: tokenize 11 %, fetch 3 % (p95 840 ms, 6 retries): raise n_workers 2 → 3"
    )
    assert sum(verdict.shares.values()) == pytest.approx(verdict.data_wait)
    assert band(verdict.data_wait) == "fair"


def test_a_run_that_does_not_wait_is_told_nothing_to_do() -> None:
    verdict = judge(0.03, 10.0, {"batch": 0.03}, Known())
    assert verdict.line == "data wait 0.3 %: excellent"
    assert verdict.advice == ""


@pytest.mark.parametrize(
    ("stage", "known", "advice"),
    [
        ("tokenize", Known(n_workers=2, cores=2), "cache=True"),
        ("tokenize", Known(n_workers=0, cores=2), "n_workers 0 → 1"),
        ("decode", Known(n_workers=2, cores=2, python=True), 'workers="process"'),
        ("fetch", Known(n_workers=2, remote=True, fetches=4), "fetches=4 → 8"),
        ("fetch", Known(n_workers=2, remote=True, fetches=4, link_bound=True), "penstock prepare"),
        ("fetch", Known(n_workers=2), "faster disk, or keep tokens: cache=True"),
        ("fetch", Known(n_workers=2, text=False), "read from a faster disk"),
        ("fetch", Known(n_workers=1, cores=4, text=False, python=True), "n_workers 1 → 2"),
        ("fetch", Known(n_workers=2, tight=True), "memory_limit"),
        ("pack", Known(n_workers=2), "larger batches"),
        ("copy", Known(n_workers=2), "device_preprocess"),
        (RANKS, Known(n_workers=2), "another rank"),
    ],
)  # fmt: skip
def test_advice_fits_the_stage_and_what_is_known(stage: str, known: Known, advice: str) -> None:
    assert advice in judge(3.0, 10.0, {stage: 3.0}, known).line

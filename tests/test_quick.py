"""The short way to a batch that stands ready: the same batches, the same numbers, the same bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.feed.quick import JOTTED, Last, Note

from penstock import AsyncDataLoader, SyntheticDataset, TextDataset
from penstock.watch.consumer import Consumer


def ready(loader: AsyncDataLoader) -> AsyncDataLoader:
    """With its first batch taken and its queue full: from here on batches are taken the short way."""
    next(loader)
    loader.warmup(8, 30)
    return loader


@pytest.fixture
def data() -> SyntheticDataset:
    return SyntheticDataset(vocab_size=100, seq_len=16, num_samples=100_000, seed=1)


def test_batches_taken_the_short_way_are_those_of_the_long_way(corpus: Path) -> None:
    text = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=16)
    with AsyncDataLoader(text, 4, seed=3, n_workers=0) as plain:
        expected = [next(plain).inputs.tolist() for _ in range(60)]
    with AsyncDataLoader(text, 4, seed=3, n_workers=2) as loader:
        given = [next(ready(loader)).inputs.tolist()]
        given += [next(loader).inputs.tolist() for _ in range(58)]
    assert given == expected[1:]


def test_every_step_is_counted_at_once_on_the_trainers_thread(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4) as loader:
        ready(loader)
        for taken in range(2, 2 * JOTTED):
            batch = next(loader)
            stats = loader.stats()
            assert (stats.batches, stats.tokens) == (taken, taken * batch.tokens)
            assert loader.telemetry.consumer.steps == taken
        assert (
            len(loader.telemetry.window.steps) == 2 * JOTTED - 3
        )  # all that have ended, but for the first
        assert stats.wait_s == pytest.approx(sum(stats.wait_by_stage.values()))


def test_another_thread_sees_all_but_the_last_steps(data: SyntheticDataset) -> None:
    seen = []
    with AsyncDataLoader(data, 4) as loader:
        ready(loader)
        for _ in range(3 * JOTTED):
            next(loader)
        watcher = threading.Thread(target=lambda: seen.append(loader.stats().batches))
        watcher.start()
        watcher.join(30)
        assert JOTTED <= seen[0] <= 3 * JOTTED + 1
        assert loader.stats().batches == 3 * JOTTED + 1


def test_the_state_follows_every_batch(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4) as loader:
        ready(loader)
        states = {next(loader).index: loader.state_dict() for _ in range(20)}
    for index, state in states.items():
        with AsyncDataLoader(data, 4, n_workers=0) as again:
            again.load_state_dict(state)
            assert next(again).index == index + 1


def test_the_queue_keeps_to_its_size_and_is_filled_again(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4, prefetch_size=4) as loader:
        ready(loader)
        for _ in range(200):
            next(loader)
            assert loader.queue_depth() <= 8  # four, and four that the warmup lent
        assert loader.warmup(4, 30).filled == 4


def test_a_finite_stream_ends_after_its_last_batch() -> None:
    short = SyntheticDataset(vocab_size=100, seq_len=16, num_samples=40, seed=1)
    with AsyncDataLoader(short, 4, epochs=1) as loader:
        assert [batch.index for batch in ready(loader)] == list(range(1, 10))
        assert loader.stats().batches == 10


def test_a_pause_belongs_to_the_step_that_it_was_made_in(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4) as loader:
        ready(loader)
        for _ in range(5):
            next(loader)
            with loader.pause("eval"):
                pass
        next(loader)
        consumer = loader.telemetry.consumer
        assert consumer.steps == 7
        assert consumer.paused.total["eval"] == pytest.approx(consumer.paused.within_s)


def test_steps_that_were_not_written_down_yet_count_when_another_stream_begins(
    data: SyntheticDataset,
) -> None:
    with AsyncDataLoader(data, 4) as loader:
        state = ready(loader).state_dict()
        tokens = sum(next(loader).tokens for _ in range(9))
        loader.load_state_dict(state)
        tokens += next(loader).tokens
        assert loader.telemetry.consumer.tokens_total == tokens + 64


@given(
    gaps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 50), st.integers(1, 9), st.integers(0, 8)),
        min_size=1,
    ),
    known=st.booleans(),
    tried=st.booleans(),
)
def test_steps_written_down_together_are_those_written_down_one_by_one(
    gaps: list[tuple[int, int, int, int]], known: bool, tried: bool
) -> None:
    steps, now = [], 100.0
    for wait, compute, tokens, depth in gaps:
        steps.append((now, now + wait, tokens, depth))
        now += wait + compute
    one, all_of_them = Consumer(), Consumer()
    for consumer in (one, all_of_them):
        if known:
            consumer.entering(50.0)
            consumer.waited(5.0, {"fetch": 5.0})
            consumer.took(3, 1)
            consumer.pause("eval", 7.0)
        if tried:
            consumer.entering(80.0)
            consumer.waited(4.0, {"fetch": 4.0})
            consumer.pause("eval", 2.0)
    for begun, ended, tokens, depth in steps:
        one.entering(begun)
        one.waited(ended - begun, {"batch": ended - begun})
        one.took(tokens, depth)
    all_of_them.entering(steps[0][0])
    all_of_them.took_ready(steps)
    for consumer in (one, all_of_them):
        consumer.entering(now)
    assert list(all_of_them.window.steps) == list(one.window.steps)
    assert all_of_them.report(now) == one.report(now)
    for name in ("tokens_total", "steps", "wall_s", "wait_s", "finished", "paused", "_depths"):
        assert getattr(all_of_them, name) == getattr(one, name)


def test_a_pause_before_the_call_that_got_the_batch_is_no_time_of_the_step() -> None:
    consumer = Consumer()
    for begin in (0.0, 100.0, 200.0):
        consumer.entering(begin)
        consumer.waited(1.0, {"fetch": 1.0})  # it gave up
        consumer.pause("eval", 30.0)
        consumer.entering(begin + 40)
        consumer.waited(1.0, {"fetch": 1.0})
        consumer.took(1, 0)
    assert consumer.rolling(250.0)["data_wait_pct"] == pytest.approx(100 * 4 / (70 + 20), abs=1e-3)
    consumer.entering(300.0)
    assert [step.wall for step in consumer.window.steps] == [70.0, 70.0]
    assert consumer.wall_s == 300 - consumer.paused.within_s


ASKED = """
import random, signal, time
from penstock import AsyncDataLoader, SyntheticDataset

data = SyntheticDataset(vocab_size=100, seq_len=16, num_samples=1_000_000, seed=1)
asked = 0
with AsyncDataLoader(data, 4, n_workers=2) as loader:
    next(loader)

    def ask(*_):
        global asked
        asked += 1
        state, batches = loader.state_dict()["batch"], loader.stats().batches
        assert state in (taken, taken + 1) and batches <= taken + 1, (state, batches, taken)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 5e-4))

    taken = 1
    signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        assert next(loader).index == taken
        taken += 1
        loader.telemetry.step_fields()
        loader.state_dict()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert loader.stats().batches == taken
print("asked" if asked > 100 else f"asked only {asked} times")
"""


def test_a_signals_handler_may_ask_for_state_and_stats_wherever_it_comes_in() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.returncode) == ("asked\n", 0), done.stderr


def test_a_batch_that_an_error_took_away_on_the_long_way_is_given_again(
    data: SyntheticDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncDataLoader(data, 4) as loader:
        ready(loader)
        taken = [next(loader).index for _ in range(3)]
        assert loader._pipeline is not None
        loader._quick = lambda: None  # so that the long way is taken
        monkeypatch.setattr(
            loader._pipeline, "watch", lambda depths: 1 / 0
        )  # a log handler that raises, say
        with pytest.raises(ZeroDivisionError):
            next(loader)
        monkeypatch.undo()
        assert loader.state_dict()["batch"] == taken[-1] + 1
        for _ in range(30):
            taken.append(next(loader).index)
            assert loader.state_dict()["batch"] == taken[-1] + 1
        assert taken == list(range(1, 34))


def test_what_fails_while_steps_are_written_down_does_not_end_the_stream(
    data: SyntheticDataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with AsyncDataLoader(data, 4) as loader:
        ready(loader)
        trainer, failed = threading.current_thread(), []

        def watch(depths: list[int]) -> None:
            if threading.current_thread() is not trainer:
                failed.append(depths)
                raise ZeroDivisionError

        monkeypatch.setattr(loader.telemetry, "watch", watch)
        for index in range(1, 400):
            assert next(loader).index == index
            time.sleep(5e-4)
        assert failed
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_steps_are_written_down_while_the_producer_adds_to_the_notes() -> None:
    """Threads that change places after almost every bytecode."""
    interval, last, notes = sys.getswitchinterval(), Last(), deque[Note]()
    last._notes, last._room = notes, 8
    ended, rounds, written = threading.Event(), 0, 0

    def produce() -> None:
        made = 0
        while not ended.is_set():
            if len(notes) < 5000:
                notes.extend((made + i, 5, None) for i in range(8))
                made += 8

    thread = threading.Thread(target=produce)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while rounds < 20_000:
            if (ready := len(notes)) > 1:
                last.jotted += [(0.0, 0.0, 1)] * min(ready, 16)
                written += len(last.written(True))
                rounds += 1
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join(30)
    assert last.next == written

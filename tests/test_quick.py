"""The short way to a batch that stands ready: the same batches, the same numbers, the same bounds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock import AsyncDataLoader, SyntheticDataset, TextDataset
from penstock.watch.telemetry import JOTTED


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
    with AsyncDataLoader(text, 4, seed=3, output="numpy", n_workers=0) as plain:
        expected = [next(plain).inputs.tolist() for _ in range(60)]
    with AsyncDataLoader(text, 4, seed=3, output="numpy", n_workers=2) as loader:
        given = [next(ready(loader)).inputs.tolist()]
        given += [next(loader).inputs.tolist() for _ in range(58)]
    assert given == expected[1:]


def test_every_step_is_counted_at_once_on_the_trainers_thread(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4, output="numpy") as loader:
        ready(loader)
        for taken in range(2, 2 * JOTTED):
            batch = next(loader)
            stats = loader.stats()
            assert (stats.batches, stats.tokens) == (taken, taken * batch.tokens)
            assert loader.telemetry.consumer.steps == taken
        assert len(loader.telemetry.window.steps) == 2 * JOTTED - 3  # all that have ended, but for the first
        assert stats.wait_s == pytest.approx(sum(stats.wait_by_stage.values()))


def test_another_thread_sees_all_but_the_last_steps(data: SyntheticDataset) -> None:
    seen = []
    with AsyncDataLoader(data, 4, output="numpy") as loader:
        ready(loader)
        for _ in range(3 * JOTTED):
            next(loader)
        watcher = threading.Thread(target=lambda: seen.append(loader.stats().batches))
        watcher.start()
        watcher.join(30)
        assert 2 * JOTTED <= seen[0] <= 3 * JOTTED + 1
        assert loader.stats().batches == 3 * JOTTED + 1


def test_the_state_follows_every_batch(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4, output="numpy") as loader:
        ready(loader)
        states = {next(loader).index: loader.state_dict() for _ in range(20)}
    for index, state in states.items():
        with AsyncDataLoader(data, 4, output="numpy", n_workers=0) as again:
            again.load_state_dict(state)
            assert next(again).index == index + 1


def test_the_queue_keeps_to_its_size_and_is_filled_again(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4, output="numpy", prefetch_size=4) as loader:
        ready(loader)
        for _ in range(200):
            next(loader)
            assert loader.queue_depth() <= 8  # four, and four that the warmup lent
        assert loader.warmup(4, 30).filled == 4


def test_a_finite_stream_ends_after_its_last_batch() -> None:
    short = SyntheticDataset(vocab_size=100, seq_len=16, num_samples=40, seed=1)
    with AsyncDataLoader(short, 4, epochs=1, output="numpy") as loader:
        assert [batch.index for batch in ready(loader)] == list(range(1, 10))
        assert loader.stats().batches == 10


def test_a_pause_belongs_to_the_step_that_it_was_made_in(data: SyntheticDataset) -> None:
    with AsyncDataLoader(data, 4, output="numpy") as loader:
        ready(loader)
        for _ in range(5):
            next(loader)
            with loader.pause("eval"):
                pass
        next(loader)
        consumer = loader.telemetry.consumer
        assert consumer.steps == 7
        assert consumer.paused.total["eval"] == pytest.approx(consumer.paused.within_s)

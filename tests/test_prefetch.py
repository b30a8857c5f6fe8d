"""The queue of ready batches: who makes them, in which order, and what becomes of them when something happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from penstock.feed.prefetch import Prefetcher

from penstock import AsyncDataLoader, SyntheticDataset
from penstock.feed import prefetch


class Maker:
    """Makes numbers, in lists of three, and knows who made which."""

    def __init__(self, end: int = 10_000) -> None:
        self.by: list[str] = []
        self.end = end
        self.before: Callable[[int], None] = lambda first: None

    def __call__(self) -> list[int]:
        first = 3 * len(self.by)
        self.before(first)
        if first >= self.end:
            return []
        self.by.append(threading.current_thread().name)
        return [first, first + 1, first + 2]

    def here(self) -> int:
        """Lists that were made on the thread that asks."""
        return self.by.count(threading.current_thread().name)


@pytest.fixture
def maker() -> Maker:
    return Maker()


@contextmanager
def running(queue: Prefetcher[int]) -> Iterator[Prefetcher[int]]:
    """A queue that is filled, and that ends."""
    queue.start()
    try:
        yield queue
    finally:
        queue.stop()
        assert queue.join(30)


@pytest.fixture
def queue(maker: Maker) -> Iterator[Prefetcher[int]]:
    with running(Prefetcher(maker, 8)) as queue:
        yield queue


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes items does nothing else, however slow the machine is."""
    monkeypatch.setattr(prefetch, "EAGER_S", 3600.0)
    monkeypatch.setattr(prefetch, "LEASE_S", 60.0)


# Through the loader


def test_rows_left_as_they_are_keep_to_the_memory_limit(eager: None) -> None:
    data = SyntheticDataset(vocab_size=100, seq_len=16_384, num_samples=2_000, seed=1)
    most = 0
    with AsyncDataLoader(data, 1, n_workers=1, memory_limit=8 << 20) as loader:
        for _ in range(300):
            next(loader)
            assert loader._pipeline is not None
            assert loader._pipeline._queue is not None
            at_hand = list(loader._pipeline._queue.at_hand)
            most = max(
                most, sum(batch._left.nbytes for batch in at_hand if batch._left is not None)
            )
    assert most < 8 << 20


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("before", [1, 3])
def test_a_batch_that_an_interrupt_took_away_is_given_again(
    monkeypatch: pytest.MonkeyPatch, before: int, short: bool
) -> None:
    data = SyntheticDataset(vocab_size=100, seq_len=16, num_samples=10_000, seed=1)
    with AsyncDataLoader(data, 4) as loader:
        for _ in range(before):
            next(loader)
            loader.warmup(8, 30)
        assert loader._pipeline is not None
        assert (loader._last.origin is not None) == (before > 1), (
            "the first batch is waited for, the others are not"
        )
        if short:
            loader._last.jotted = Interrupting(loader._last.jotted)
            loader._quick = loader._pipeline.shortcut(loader.telemetry, loader._last)
        else:
            loader._quick = lambda: None  # so that the long way is taken
            usual = loader.telemetry.took

            def interrupt(*args: Any, **kwargs: Any) -> None:
                monkeypatch.setattr(loader.telemetry, "took", usual)
                usual(*args, **kwargs)
                raise KeyboardInterrupt

            monkeypatch.setattr(loader.telemetry, "took", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        assert loader.state_dict()["batch"] == before
        assert [next(loader).index for _ in range(20)] == list(range(before, before + 20))


class Interrupting(list[Any]):
    """Somebody presses Ctrl-C while something is jotted down."""

    def __iadd__(self, things: Any) -> Any:
        raise KeyboardInterrupt


def test_batches_made_in_inference_mode_can_be_trained_on_outside_of_it(eager: None) -> None:
    data = SyntheticDataset(vocab_size=100, seq_len=16, num_samples=100_000, seed=1)
    with AsyncDataLoader(data, 4) as loader:
        with torch.inference_mode():
            for _ in range(201):
                next(loader)
        for _ in range(20):
            assert not next(loader).inputs.is_inference()


def test_a_queue_of_one_does_not_warn_of_being_empty(caplog: pytest.LogCaptureFixture) -> None:
    data = SyntheticDataset(vocab_size=100, seq_len=16, num_samples=10_000, seed=1)
    with AsyncDataLoader(data, 4, prefetch_size=1) as loader:
        for _ in range(300):
            next(loader)
    assert "less than half full" not in caplog.text

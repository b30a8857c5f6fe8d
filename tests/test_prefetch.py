"""The queue of ready batches: who makes them, in which order, and what becomes of them when something happens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from penstock.feed.prefetch import Prefetcher

from penstock import AsyncDataLoader, Mixture, SyntheticDataset, TextDataset
from penstock.encode.batch import Unfinished
from penstock.errors import LoaderClosed, LoaderTimeout
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


def make_here(queue: Prefetcher[int], maker: Maker) -> int:
    """Take items until they are made by whoever takes them. Gives the next one's number."""
    taken = 0
    while not maker.here():
        assert queue.get() == taken
        taken += 1
    return taken


def drain(queue: Prefetcher[int]) -> list[int]:
    """Everything up to the end."""
    return list(iter(queue.get, None))


def test_who_only_takes_items_makes_them_and_they_stay_in_order(
    eager: None, queue: Prefetcher[int], maker: Maker
) -> None:
    first = make_here(queue, maker)
    assert [queue.get() for _ in range(600)] == list(range(first, first + 600))
    assert set(maker.by[-100:]) == {threading.current_thread().name}


def test_who_has_something_else_to_do_has_them_made(
    monkeypatch: pytest.MonkeyPatch, queue: Prefetcher[int], maker: Maker
) -> None:
    monkeypatch.setattr(prefetch, "EAGER_S", 0.0)
    assert [queue.get() for _ in range(600)] == list(range(600))
    assert maker.here() == 0


def test_who_waits_for_no_longer_than_a_time_does_not_begin_to_make_anything(
    eager: None, queue: Prefetcher[int], maker: Maker
) -> None:
    assert [queue.get(timeout=60) for _ in range(600)] == list(range(600))
    assert maker.here() == 0


def test_the_queue_is_filled_again_when_nobody_takes_anything_any_more(
    monkeypatch: pytest.MonkeyPatch, queue: Prefetcher[int], maker: Maker
) -> None:
    monkeypatch.setattr(prefetch, "EAGER_S", 3600.0)
    taken = make_here(queue, maker)
    deadline = time.monotonic() + 30
    while queue.depth < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 5 <= queue.depth <= 8  # what was taken is made up for when it is half of them
    assert [queue.get() for _ in range(30)] == list(range(taken, taken + 30))


def test_a_warmup_fills_the_queue_at_once(
    eager: None, queue: Prefetcher[int], maker: Maker
) -> None:
    make_here(queue, maker)
    assert queue.fill(8, 30) >= 8


@pytest.mark.parametrize("end", [0, 300])
def test_the_end_is_the_end_whoever_gets_there(
    eager: None, maker: Maker, queue: Prefetcher[int], end: int
) -> None:
    first = make_here(queue, maker)
    maker.end = 3 * len(maker.by) + end
    assert drain(queue) == list(range(first, maker.end))
    assert [queue.get() for _ in range(3)] == [None] * 3


def test_a_failure_comes_after_what_was_made_before_it_and_again(
    eager: None, maker: Maker, queue: Prefetcher[int]
) -> None:
    first = make_here(queue, maker)
    last = 3 * len(maker.by) + 30

    def fail(at: int) -> None:
        if at >= last:
            raise ValueError("broken")

    maker.before = fail
    assert [queue.get() for _ in range(last - first)] == list(range(first, last))
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"):
            queue.get()


def test_an_interrupt_while_making_ends_the_queue(
    eager: None, maker: Maker, queue: Prefetcher[int]
) -> None:
    make_here(queue, maker)

    def interrupt(at: int) -> None:
        raise KeyboardInterrupt

    maker.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        drain(queue)
    assert queue.join(30)
    with pytest.raises(LoaderClosed):
        queue.get()


def test_closing_waits_for_whoever_makes_items(eager: None, maker: Maker) -> None:
    queue = Prefetcher(maker, 8)
    queue.start()
    inside, go_on = threading.Event(), threading.Event()

    def linger(at: int) -> None:
        if threading.current_thread() is taker:
            inside.set()
            assert go_on.wait(60)

    def take() -> None:
        while True:
            try:
                queue.get()
            except LoaderClosed:
                return

    taker = threading.Thread(target=take)
    maker.before = linger
    taker.start()
    try:
        assert inside.wait(60)
        queue.stop()
        assert not queue.join(0.1)
    finally:
        go_on.set()
    assert queue.join(30)
    taker.join(30)
    assert not taker.is_alive()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def test_who_came_at_once_makes_items_however_long_the_way_to_wait_is(maker: Maker) -> None:
    queue = Prefetcher(maker, 8, at_once=list)  # which nobody else fills
    got: list[int | None] = []

    def come() -> None:
        queue.left_at = time.perf_counter()
        queue.make_at_once(queue.left_at)
        time.sleep(0.05)
        got.append(queue.get())

    taker = threading.Thread(target=come, daemon=True)
    taker.start()
    taker.join(10)
    assert got == [0]
    assert maker.by == [taker.name]
    assert not queue._in_vain, "it counts once"


@pytest.mark.parametrize("late", [False, True])
def test_who_gave_up_or_came_late_does_not_count_as_one_who_came_at_once(late: bool) -> None:
    queue: Prefetcher[int] = Prefetcher(list, 8, at_once=list)  # which nobody fills
    now = queue.left_at = time.perf_counter()
    queue.make_at_once(now)
    assert queue._in_vain
    if late:
        queue.make_at_once(now + 1)
    else:
        with pytest.raises(LoaderTimeout):
            queue.get(timeout=0.01)
    assert not queue._in_vain


def test_a_producer_does_not_leave_items_to_somebody_who_waits_for_them(
    eager: None, maker: Maker
) -> None:
    got: list[int | None] = []
    queue = Prefetcher(maker, 8)
    with (
        queue._making
    ):  # the producer is about to make the first ones when somebody else asks for them
        queue.start()
        taker = threading.Thread(target=lambda: got.append(queue.get()))
        taker.start()
        eventually(lambda: queue._wanted)
    taker.join(30)
    assert got == [0]
    queue.stop()
    assert queue.join(30)


def test_a_producer_leaves_items_to_somebody_who_makes_them(eager: None, maker: Maker) -> None:
    queue = Prefetcher(maker, 8)
    with queue._making:
        queue.start()
        time.sleep(0.05)  # by now it waits until it may make some
        queue._lease = time.perf_counter() + 60
    time.sleep(0.05)
    assert maker.by == []
    assert [queue.get() for _ in range(3)] == [0, 1, 2]
    queue.stop()
    assert queue.join(30)


def test_the_producer_notices_by_itself_what_was_taken(
    monkeypatch: pytest.MonkeyPatch, queue: Prefetcher[int], maker: Maker
) -> None:
    monkeypatch.setattr(Prefetcher, "attend", lambda queue: None)
    assert queue.fill(8, 30) == 8
    made = len(maker.by)
    for taken in range(3):
        assert queue.at_hand.popleft() == taken
    time.sleep(0.05)
    assert (queue.depth, len(maker.by)) == (5, made), "it is not worth the while yet"
    assert queue.at_hand.popleft() == 3
    eventually(lambda: queue.depth == 8)
    assert drain_some(queue, 4) == list(range(4, 8))


def drain_some(queue: Prefetcher[int], n: int) -> list[int]:
    return [queue.at_hand.popleft() for _ in range(n)]


def test_a_queue_that_runs_low_wakes_the_producer_however_deep_it_sleeps(
    monkeypatch: pytest.MonkeyPatch, queue: Prefetcher[int]
) -> None:
    monkeypatch.setattr(prefetch, "NAP_S", (3600.0, 3600.0))
    assert queue.fill(8, 30) == 8
    eventually(lambda: queue._asleep)
    assert [queue.get(timeout=30) for _ in range(6)] == list(range(6))
    assert queue._asleep
    assert queue.depth == 2
    assert queue.get(timeout=30) == 6
    eventually(lambda: queue.depth == 8)
    assert [queue.get(timeout=30) for _ in range(100)] == list(range(7, 107))


@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
@pytest.mark.parametrize("weigh", [None, lambda item: 1 + item % 7], ids=["alike", "weighed"])
def test_no_sleep_is_slept_through(
    monkeypatch: pytest.MonkeyPatch, capacity: int, weigh: Callable[[int], int] | None
) -> None:
    """With sleeps that never end by themselves, a call that wakes nobody would wait for ever."""
    monkeypatch.setattr(prefetch, "NAP_S", (3600.0, 3600.0))
    rng = random.Random(capacity)
    with running(Prefetcher(Maker(), capacity, weigh=weigh)) as queue:
        for taken in range(900):
            assert queue.get(timeout=30) == taken
            assert len(queue.at_hand) <= capacity
            if rng.random() < 0.2:
                time.sleep(rng.choice([0.0, 1e-4, 1e-3]))


def test_a_warmup_counts_for_as_long_as_its_items_are_there(eager: None, maker: Maker) -> None:
    queue = Prefetcher(maker, 2, at_once=lambda: maker() + maker())
    with running(queue):
        assert queue.fill(9, 30) == queue.depth == 9
        eventually(lambda: queue._asleep)
        queue._lease = time.perf_counter() + 60  # the producer stands back
        assert [queue.get() for _ in range(9)] == list(range(9))
        queue.make_at_once(queue.left_at)
        assert len(queue.at_hand) == 6
        assert queue.depth == 2, "the others take no room yet"


def test_a_producer_that_waits_for_room_fills_up_what_a_warmup_asks_for() -> None:
    queue = Prefetcher(Maker(), 4, weigh=lambda item: 1)
    with running(queue):
        eventually(lambda: queue._blocked)
        assert queue.fill(12, 30) == 12


def test_nobody_waits_for_a_producer_that_was_stopped(queue: Prefetcher[int]) -> None:
    assert queue.fill(8, 30) == 8
    queue.stop()  # and whoever did was interrupted before it joined anything
    assert [queue.get() for _ in range(8)] == list(range(8))
    with pytest.raises(LoaderClosed):
        queue.get(timeout=30)


def test_nobody_makes_what_comes_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, failing, told = Maker(), threading.Event(), threading.Event()

    def fail(first: int) -> None:
        if threading.current_thread().name == "penstock-producer" and first == 6:
            failing.set()
            raise OSError("gone")

    maker.before = fail
    queue = Prefetcher(maker, 8, at_once=maker)
    usual = queue._finish

    def finish(error: BaseException | None) -> None:
        assert queue._making._is_owned(), "whoever gets it next has to know"
        usual(error)
        told.set()

    monkeypatch.setattr(queue, "_finish", finish)
    with running(queue):
        assert failing.wait(30)
        assert told.wait(30)
        monkeypatch.undo()
        assert [queue.get(timeout=30) for _ in range(6)] == list(range(6))
        with pytest.raises(OSError, match="gone"):
            queue.get(timeout=30)


def test_who_takes_nothing_is_looked_after_less_and_less_often(queue: Prefetcher[int]) -> None:
    assert queue.fill(8, 30) == 8
    eventually(lambda: queue._pace_s == prefetch.NAP_S[1])


def test_a_size_that_changes_while_the_producer_sleeps_is_kept_to_at_once(
    monkeypatch: pytest.MonkeyPatch, queue: Prefetcher[int]
) -> None:
    monkeypatch.setattr(prefetch, "NAP_S", (3600.0, 3600.0))
    assert queue.fill(8, 30) == 8
    eventually(lambda: queue._asleep)
    queue.resize(20)
    eventually(lambda: queue.depth == 20)
    queue.resize(2)
    assert [queue.get(timeout=30) for _ in range(19)] == list(range(19))
    eventually(lambda: len(queue.at_hand) == 2)


@pytest.mark.parametrize("waits", [True, False])
def test_what_needs_no_waiting_is_made_at_once(eager: None, maker: Maker, waits: bool) -> None:
    queue = Prefetcher(maker, 8, at_once=lambda: [] if waits else maker())
    with running(queue):
        taken = make_here(queue, maker)
        while queue.at_hand:
            assert queue.get() == taken
            taken += 1
        made = maker.here()
        queue.make_at_once(time.perf_counter())
        assert maker.here() - made == (not waits)
        assert list(queue.at_hand) == ([] if waits else [taken, taken + 1, taken + 2])


def test_nobody_makes_at_once_what_somebody_else_has_made_or_is_making(
    eager: None, maker: Maker
) -> None:
    queue = Prefetcher(maker, 8, at_once=maker)
    with running(queue):
        assert queue.fill(6, 30) >= 6
        queue.make_at_once(time.perf_counter())
        assert maker.here() == 0, "what stands ready comes first"
        taken = make_here(queue, maker)
        while queue.at_hand:
            assert queue.get() == taken
            taken += 1
        with queue._making:
            made = maker.here()
            queue.make_at_once(time.perf_counter())
            assert maker.here() == made
        assert queue.get() == taken


def test_the_end_and_a_failure_come_where_they_would_have_come(eager: None) -> None:
    for fault in (None, OSError("gone")):
        maker = Maker(end=600)

        def fail(first: int, fault: OSError | None = fault, end: int = maker.end) -> None:
            if fault is not None and first >= end:
                raise fault

        maker.before = fail
        queue = Prefetcher(maker, 8, at_once=maker)
        with running(queue):
            given: list[int] = []
            while len(given) < 600:
                queue.make_at_once(time.perf_counter())
                taken = queue.get()
                assert taken is not None
                given.append(taken)
            assert given == list(range(600))
            queue.make_at_once(time.perf_counter())
            assert not queue.at_hand
            if fault is None:
                assert queue.get() is None
            else:
                with pytest.raises(OSError, match="gone"):
                    queue.get()


def test_an_end_that_comes_while_somebody_is_about_to_make_items_is_not_lost(
    eager: None, maker: Maker
) -> None:
    def ended() -> list[int]:
        queue._finish(None)
        return []

    queue = Prefetcher(maker, 8, at_once=ended)  # not started: there is nobody else
    now = queue.left_at = time.perf_counter()
    queue.make_at_once(now)
    assert queue.get(timeout=20) is None
    assert queue.join(30)


# Through the loader


KINDS: dict[str, Callable[[Path], Any]] = {
    "concat": lambda corpus: TextDataset(corpus / "parquet", tokenizer="byte", seq_len=16),
    "bos": lambda corpus: TextDataset(
        corpus / "parquet", tokenizer="byte", seq_len=16, packing="bos"
    ),
    "best_fit": lambda corpus: TextDataset(
        corpus / "parquet", tokenizer="byte", seq_len=16, packing="best_fit"
    ),
    "rows": lambda corpus: SyntheticDataset(vocab_size=100, seq_len=16, num_samples=2_000, seed=1),
    "mixture": lambda corpus: Mixture(
        {"a": (KINDS["concat"](corpus), 0.7), "b": (KINDS["rows"](corpus), 0.3)}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("workers", "lanes"), [(1, 1), (2, 1), (2, 3)])
def test_a_loader_that_is_drained_gives_the_same_stream(
    eager: None, corpus: Path, kind: str, shuffle: bool, workers: int, lanes: int
) -> None:
    streams = []
    for n_workers in (0, workers):
        how: dict[str, Any] = {"lanes": lanes} if kind != "rows" else {}
        with AsyncDataLoader(
            KINDS[kind](corpus),
            4,
            seed=3,
            shuffle=shuffle,
            n_workers=n_workers,
            **how,
        ) as loader:
            batches = [next(loader) for _ in range(500)]
            streams.append(
                [(b.inputs.tolist(), b.targets.tolist(), b.epoch, b.index) for b in batches]
            )
            assert loader.state_dict()["batch"] == 500
    assert streams[0] == streams[1]


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the batches whose ids were left as they are until they were taken."""
    numbers: list[int] = []
    usual = Unfinished.finish

    def finish(batch: Unfinished, wrap: Any = None) -> None:
        numbers.append(batch.index)
        usual(batch, wrap)

    monkeypatch.setattr(Unfinished, "finish", finish)
    return numbers


@pytest.mark.parametrize("kind", ["concat", "rows"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_who_only_takes_batches_has_them_finished_one_by_one(
    eager: None, finished: list[int], corpus: Path, kind: str, shuffle: bool
) -> None:
    with AsyncDataLoader(KINDS[kind](corpus), 4, shuffle=shuffle, n_workers=1) as loader:
        batches = [next(loader) for _ in range(500)]
        assert len(finished) > 250
        assert finished == sorted(finished)
        for batch in batches:
            assert batch.inputs.dtype == batch.targets.dtype == torch.int64
            assert batch.inputs.is_contiguous()
            assert batch.targets.is_contiguous()
            assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        before = [batch.targets.clone() for batch in batches]
        for batch in batches:
            batch.inputs[:] = -1
        assert all(
            np.array_equal(batch.targets, kept) for batch, kept in zip(batches, before, strict=True)
        )


@pytest.mark.parametrize("kind", ["concat", "rows"])
def test_the_state_of_a_batch_that_was_finished_when_it_was_taken_is_its_own(
    eager: None, finished: list[int], corpus: Path, kind: str
) -> None:
    data = KINDS[kind](corpus)
    with AsyncDataLoader(data, 4, seed=3, shuffle=True, n_workers=1) as loader:
        given = [(next(loader), loader.state_dict()) for _ in range(60)]
    assert set(finished) & set(range(40, 59))
    for batch, state in given[40:59:3]:
        with AsyncDataLoader(data, 4, seed=3, shuffle=True, n_workers=0) as again:
            again.load_state_dict(state)
            following = next(again)
        after = given[batch.index + 1][0]
        assert following.index == after.index
        assert np.array_equal(following.inputs, after.inputs)
        assert following.provenance() == after.provenance()


def test_memory_that_cannot_be_had_takes_no_batch_away(
    eager: None, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    usual, failing = Unfinished.finish, True

    def finish(batch: Unfinished, wrap: Any = None) -> None:
        if failing:
            raise MemoryError
        usual(batch, wrap)

    monkeypatch.setattr(Unfinished, "finish", finish)
    with AsyncDataLoader(KINDS["concat"](corpus), 4, n_workers=1) as loader:
        taken: list[int] = []
        for _ in range(2):
            with pytest.raises(MemoryError):
                taken.extend(next(loader).index for _ in range(500))
            assert loader.state_dict()["batch"] == len(taken)
        failing = False
        taken.extend(next(loader).index for _ in range(100))
        assert taken == list(range(len(taken)))


def test_rows_that_cannot_be_had_are_an_error_after_those_before_them(eager: None) -> None:
    with AsyncDataLoader(Failing(at=1_201), 4, shuffle=False, n_workers=1) as loader:
        assert [next(loader).index for _ in range(300)] == list(range(300))
        for _ in range(2):
            with pytest.raises(OSError, match="row 1201"):
                next(loader)


def test_batches_of_all_sizes_that_are_cut_from_chunks_leave_nothing_behind(
    eager: None, corpus: Path
) -> None:
    with AsyncDataLoader(KINDS["concat"](corpus), 1, shuffle=False, n_workers=1) as loader:
        for _ in range(5_000):
            next(loader)
        assert loader._pipeline is not None
        batcher = loader._pipeline._producer._batcher  # type: ignore[attr-defined]
        assert 0 < len(batcher._numbers) < 5_000


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


class Failing(SyntheticDataset):
    """Has a row that cannot be read."""

    def __init__(self, at: int) -> None:
        super().__init__(vocab_size=100, seq_len=16, num_samples=10_000, seed=1)
        self._at = at

    def __getitems__(self, indices: Any) -> Any:
        if self._at in np.asarray(indices).tolist():
            raise OSError(f"row {self._at}")
        return super().__getitems__(indices)


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


class TakenAndLeft:
    """A lock that somebody presses Ctrl-C at, just after it was taken."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._once = lock, True

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken: bool = self._lock.acquire(*args, **kwargs)
        if taken and self._once and threading.current_thread() is threading.main_thread():
            self._once = False
            raise KeyboardInterrupt
        return taken

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_ctrl_c_that_comes_when_the_making_of_items_was_just_taken_over_holds_up_no_shutdown() -> (
    None
):
    made = iter(range(10**9))
    queue: Prefetcher[int] = Prefetcher(lambda: [next(made)], 4, at_once=lambda: [next(made)])
    queue._making = TakenAndLeft(queue._making)
    queue.left_at = perf_counter()
    with pytest.raises(KeyboardInterrupt):
        queue.make_at_once(queue.left_at)
    queue.start()  # it has to wait for whoever has taken over
    queue.stop()
    begun = time.monotonic()
    assert queue.join(60)
    assert time.monotonic() - begun < 30

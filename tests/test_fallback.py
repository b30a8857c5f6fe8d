"""Ranks that go on together: real loaders, threads as ranks, and data that comes when a test lets it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader
from penstock.encode.batch import Batch
from penstock.errors import (
    ConfigError,
    FeedStopped,
    LoaderTimeout,
    SourceChanged,
    StateMismatch,
    TokenizerError,
)
from penstock.feed import fallback
from penstock.feed.collectives import Ranks
from penstock.feed.fallback import BackgroundOpen, Limits, SharedFeed, Turn, loader_states
from tests.feeding import WAIT_S, Numbers, loader, rows


class Together(Ranks):
    """Threads of this process as ranks."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, told: list[Any]) -> None:
        self.rank, self.world, self.group = rank, world, None
        self._barrier, self._told = barrier, told

    @classmethod
    def several(cls, world: int) -> list[Together]:
        barrier, told = threading.Barrier(world), [None] * world
        return [cls(rank, world, barrier, told) for rank in range(world)]

    def _exchange(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait(WAIT_S)
        every = list(self._told)
        self._barrier.wait(WAIT_S)
        return every

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return self._exchange(list(values))

    def gather_texts(self, text: str) -> list[str]:
        return self._exchange(text)


def made_up(step: int, n: int) -> Batch:
    return Batch(np.array([-step]), np.array([n]), epoch=0, index=0, synthetic=True)


@pytest.fixture(autouse=True)
def try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "RETRY_S", 0.0)


@pytest.fixture
def feeds() -> Iterator[Callable[..., SharedFeed]]:
    with ExitStack() as stack:

        def make(
            create: Callable[[], Any], limits: Limits | None = None, **more: Any
        ) -> SharedFeed:
            feed = SharedFeed(create, limits or Limits(), **more)
            stack.callback(feed.close)
            feed.join(Ranks(), made_up)
            return feed

        yield make


SYNTHETIC = Limits(on_stall="synthetic", first_timeout_s=WAIT_S, stall_timeout_s=1.0)
"""A batch that stands ready comes much sooner, however busy the machine is."""


def until_real(feed: SharedFeed, step: int) -> tuple[int, Turn]:
    """Steps without data, up to the first with."""
    for n in range(step, step + 100_000):
        turn = feed.next(n)
        if not turn.batches[0].synthetic:
            return n, turn
    raise AssertionError("the data did not come back")


def test_whoever_is_told_to_stop_waits_for_no_batch(feeds: Callable[..., SharedFeed]) -> None:
    never = threading.Event()
    feed = feeds(never.wait, Limits(first_timeout_s=60.0))
    try:
        begun = time.monotonic()
        assert feed.next(1, stopping=True).stop
        assert time.monotonic() - begun < 30.0
    finally:
        never.set()


class TwoRanks:
    """Two feeds that take their steps in two threads."""

    def __init__(
        self, feeds: Callable[..., SharedFeed], data: Sequence[Numbers], limits: Limits, **more: Any
    ) -> None:
        self.events: list[list[tuple[str, Any]]] = [[] for _ in data]
        self.feeds = []
        for rank, peers in enumerate(Together.several(len(data))):

            def create(rank: int = rank) -> AsyncDataLoader:
                return loader(data[rank], rank, len(data), **more)

            def event(msg: str, rank: int = rank, **fields: Any) -> None:
                if msg == "fallback":
                    self.events[rank].append((fields["to"], fields["at_step"]))

            feed = feeds(create, limits, event=event)
            feed.join(peers, made_up)
            self.feeds.append(feed)
        self._pool = ThreadPoolExecutor(len(data))

    def next(
        self, step: int, count: int = 1, stopping: Sequence[bool] = (False, False)
    ) -> list[Turn]:
        """What each does. Raises what the first raises."""
        return [each.result(WAIT_S) for each in self.asked(step, count, stopping)]

    def asked(
        self, step: int, count: int = 1, stopping: Sequence[bool] = (False, False)
    ) -> list[Any]:
        return [
            self._pool.submit(feed.next, step, count, stopping=stop)
            for feed, stop in zip(self.feeds, stopping, strict=True)
        ]

    def __enter__(self) -> TwoRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def test_batches_that_one_rank_has_are_kept_until_all_have_theirs(
    feeds: Callable[..., SharedFeed],
) -> None:
    data = [Numbers(), Numbers(wall=4)]
    with TwoRanks(feeds, data, SYNTHETIC) as ranks:
        assert [rows(turn.batches) for turn in ranks.next(1)] == [[0, 2], [1, 3]]
        before = [feed.state_dict()["loader"] for feed in ranks.feeds]
        for step in (2, 3, 4):
            assert [rows(turn.batches) for turn in ranks.next(step)] == [[-step], [-step]]
        # Rank 0 has had its next batch for three steps, and it was not trained on.
        assert [feed.state_dict()["loader"] for feed in ranks.feeds] == before
        data[1].opened.set()
        step, turns = 5, ranks.next(5)
        while turns[0].batches[0].synthetic:
            step += 1
            turns = ranks.next(step)
        assert [rows(turn.batches) for turn in turns] == [[4, 6], [5, 7]]
        assert [rows(turn.batches) for turn in ranks.next(step + 1)] == [[8, 10], [9, 11]]
        assert ranks.events[0] == ranks.events[1] == [("synthetic", 2), ("data", step)]
        for feed in ranks.feeds:
            (substituted,) = feed.state_dict()["substituted"]
            assert (substituted["first"], substituted["last"]) == (2, step - 1)
            assert substituted["reason"].startswith(
                "1 of 2 ranks had no data; rank 1: no batch within 1 s"
            )
            assert not feed.substituting


def test_a_step_of_several_batches_is_real_or_made_up_as_a_whole(
    feeds: Callable[..., SharedFeed],
) -> None:
    data = [Numbers(), Numbers(wall=12)]
    with TwoRanks(feeds, data, SYNTHETIC) as ranks:
        assert [rows(turn.batches) for turn in ranks.next(1, 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        # Rank 1 has one of two.
        assert [rows(turn.batches) for turn in ranks.next(2, 2)] == [[-2, -2], [-2, -2]]
        data[1].opened.set()
        step, turns = 3, ranks.next(3, 2)
        while turns[0].batches[0].synthetic:
            step += 1
            turns = ranks.next(step, 2)
        assert [rows(turn.batches) for turn in turns] == [[8, 10, 12, 14], [9, 11, 13, 15]]


def test_when_one_rank_is_to_stop_all_do_and_nothing_is_lost(
    feeds: Callable[..., SharedFeed],
) -> None:
    with TwoRanks(feeds, [Numbers(), Numbers()], Limits()) as ranks:
        ranks.next(1)
        before = [feed.state_dict() for feed in ranks.feeds]
        for turn in ranks.next(2, stopping=(False, True)):
            assert turn == Turn([], stop=True)
        assert [feed.state_dict() for feed in ranks.feeds] == before
        resumed = loader(Numbers())
        resumed.load_state_dict([each["loader"] for each in before])
        with resumed:
            batch = resumed.next_batch(WAIT_S)
        assert batch is not None
        assert rows([batch]) == [4, 5]


def test_the_rank_with_the_least_data_ends_the_run_for_all(
    feeds: Callable[..., SharedFeed],
) -> None:
    with TwoRanks(feeds, [Numbers(20), Numbers(12)], Limits(), epochs=1, drop_last=True) as ranks:
        for step in (1, 2, 3):
            assert all(len(turn.batches) == 1 for turn in ranks.next(step))
        before = [feed.state_dict() for feed in ranks.feeds]
        for _ in range(2):
            assert ranks.next(4) == [Turn([], ended=True), Turn([], ended=True)]
        assert [feed.state_dict() for feed in ranks.feeds] == before


@pytest.mark.parametrize("culprit", [0, 1])
def test_all_ranks_stop_with_one_message_that_names_the_rank_and_the_reason(
    feeds: Callable[..., SharedFeed], culprit: int
) -> None:
    data = [Numbers(), Numbers()]
    data[culprit] = Numbers(wall=4, fault=OSError("the disk is gone."))
    with TwoRanks(feeds, data, Limits()) as ranks:
        ranks.next(1)
        errors = [each.exception(WAIT_S) for each in ranks.asked(2)]
    assert {type(error) for error in errors} == {FeedStopped}
    (told,) = {str(error) for error in errors}
    expected = f"1 of 2 ranks had no data; rank {culprit}: OSError: the disk is gone. All ranks stop together before step 2."
    assert told == expected
    assert isinstance(errors[culprit].__cause__, OSError)


def test_ranks_that_both_fail_are_both_named_with_the_worse_reason(
    feeds: Callable[..., SharedFeed],
) -> None:
    data = [Numbers(wall=0), Numbers(wall=0, fault=OSError("gone"))]
    with TwoRanks(feeds, data, Limits(first_timeout_s=1.5)) as ranks:
        errors = [each.exception(WAIT_S) for each in ranks.asked(1)]
        data[0].opened.set()
    (told,) = {str(error) for error in errors}
    assert told.startswith("2 of 2 ranks had no data; rank 1: OSError: gone")


def test_a_single_rank_that_stalls_says_how_long_it_waited_and_for_what(
    feeds: Callable[..., SharedFeed],
) -> None:
    data = Numbers(wall=2)
    feed = feeds(
        lambda: loader(data),
        Limits(stall_timeout_s=0.05),
        blame=lambda seconds: "waiting for tokenize",
    )
    feed.next(1)
    with pytest.raises(
        FeedStopped, match=r"^no data: no batch within 0\.05 s \(waiting for tokenize\)\. All"
    ):
        feed.next(2)
    data.opened.set()


def test_a_loader_that_failed_is_opened_again_where_it_stood(
    feeds: Callable[..., SharedFeed],
) -> None:
    data = Numbers(wall=7, fault=ConnectionError("reset"))
    feed = feeds(lambda: loader(data), SYNTHETIC)
    assert [rows(feed.next(step).batches) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5]]
    for step in range(4, 40):
        assert rows(feed.next(step).batches) == [-step]
    assert "ConnectionError: reset" in feed.substitutions[0].reason
    data.opened.set()
    step, turn = until_real(feed, 40)
    assert rows(turn.batches) == [6, 7]
    assert rows(feed.next(step + 1).batches) == [8, 9]
    assert [(each.first, each.last) for each in feed.substitutions] == [(4, step - 1)]


def test_a_loader_that_cannot_be_opened_again_at_first_still_goes_on_where_it_stood(
    feeds: Callable[..., SharedFeed],
) -> None:
    class Stubborn(AsyncDataLoader):
        starts = 0

        def start(self) -> Any:
            Stubborn.starts += self._pipeline is None
            if Stubborn.starts in (2, 3):
                raise OSError("too many open files")
            return super().start()

    data = Numbers(wall=5, fault=ConnectionError("reset"))
    feed = feeds(lambda: Stubborn(data, 2, shuffle=False, n_workers=1), SYNTHETIC)
    assert [rows(feed.next(step).batches) for step in (1, 2)] == [[0, 1], [2, 3]]
    assert feed.next(3).batches[0].synthetic
    data.opened.set()
    _, turn = until_real(feed, 4)
    assert Stubborn.starts >= 4
    assert rows(turn.batches) == [4, 5]


def test_data_that_could_not_be_opened_at_first_begins_at_its_beginning(
    feeds: Callable[..., SharedFeed],
) -> None:
    there = threading.Event()

    def create() -> AsyncDataLoader:
        if not there.is_set():
            raise ConnectionError("no route")
        return loader(Numbers())

    feed = feeds(create, SYNTHETIC)
    assert feed.next(1).batches[0].synthetic
    assert feed.state_dict()["loader"] is None
    there.set()
    _, turn = until_real(feed, 2)
    assert rows(turn.batches) == [0, 1]


def test_data_that_takes_too_long_to_open_is_substituted_and_then_taken(
    feeds: Callable[..., SharedFeed],
) -> None:
    there = threading.Event()

    def create() -> AsyncDataLoader:
        assert there.wait(WAIT_S)
        return loader(Numbers())

    feed = feeds(create, Limits(on_stall="synthetic", first_timeout_s=0.05))
    assert feed.loader() is None
    assert feed.next(1).batches[0].synthetic
    assert "its files are still being listed" in feed.substitutions[0].reason
    there.set()
    _, turn = until_real(feed, 2)
    assert rows(turn.batches) == [0, 1]


@pytest.mark.parametrize(
    "mistake", [ConfigError("no such setting"), StateMismatch("of other data"), SourceChanged("it is another file"),
                TokenizerError("no vocabulary")],
)  # fmt: skip
@pytest.mark.parametrize("when", ["at the start", "in the middle"])
def test_a_mistake_is_no_fault_and_stops_the_run_even_where_data_may_be_made_up(
    feeds: Callable[..., SharedFeed], mistake: Exception, when: str
) -> None:
    def create() -> AsyncDataLoader:
        if when == "at the start":
            raise mistake
        return loader(Numbers(wall=2, fault=mistake))

    feed = feeds(create, SYNTHETIC)
    if when == "in the middle":
        feed.next(1)
    with pytest.raises(FeedStopped, match=f"{type(mistake).__name__}: {mistake}"):
        feed.next(2)
    assert not feed.substitutions


def test_a_signal_ends_a_wait_for_data_and_loses_nothing(feeds: Callable[..., SharedFeed]) -> None:
    data = Numbers(wall=5)
    feed = feeds(lambda: loader(data), Limits(stall_timeout_s=WAIT_S))
    feed.interrupt()  # nobody waits: nothing happens
    feed.next(1)
    before = feed.state_dict()
    handler = signal.signal(signal.SIGALRM, lambda number, frame: feed.interrupt())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        # The first of the two is there, and held.
        assert feed.next(2, 2) == Turn([], stop=True)
    finally:
        signal.signal(signal.SIGALRM, handler)
    data.opened.set()
    assert feed.next(2, 2) == Turn([], stop=True), "once told to stop, it stays so"
    assert feed.state_dict() == before


def test_what_was_substituted_before_a_resume_stays_known(feeds: Callable[..., SharedFeed]) -> None:
    data, before = Numbers(wall=2), {"first": 3, "last": 5, "reason": "no data: then"}
    feed = feeds(lambda: loader(data), SYNTHETIC, substituted=[before])
    feed.next(8)
    assert feed.state_dict()["substituted"] == [before]
    feed.next(9)
    data.opened.set()
    earlier, now = feed.state_dict()["substituted"]
    assert earlier == before
    assert (now["first"], now["last"]) == (9, 9)


def test_rewind_gives_the_first_batches_again_and_again(feeds: Callable[..., SharedFeed]) -> None:
    feed = feeds(lambda: loader(Numbers()))
    feed.rewind()  # before it was opened there is nothing to do
    for _ in range(3):
        assert [rows(feed.next(1).batches) for _ in range(2)] == [[0, 1], [2, 3]]
        feed.rewind()
    assert feed.state_dict()["loader"]["batch"] == 0


def test_rewind_goes_back_to_where_a_resumed_loader_began(feeds: Callable[..., SharedFeed]) -> None:
    def create() -> AsyncDataLoader:
        made = loader(Numbers())
        made.load_state_dict(state)
        return made

    with loader(Numbers()) as first:
        first.next_batch(WAIT_S)
        state = first.state_dict()
    feed = feeds(create)
    assert rows(feed.next(1).batches) == [2, 3]
    feed.rewind()
    assert rows(feed.next(1).batches) == [2, 3]


def test_a_feed_can_be_closed_at_any_time_and_twice(feeds: Callable[..., SharedFeed]) -> None:
    never_asked = feeds(lambda: loader(Numbers()))
    never_asked.close()
    data = Numbers(wall=2)
    waiting = feeds(lambda: loader(data), SYNTHETIC)
    waiting.next(1)
    waiting.next(2)
    data.opened.set()
    for feed in (never_asked, waiting):
        feed.close()
        feed.close()


def test_what_ranks_saved_is_put_together_again() -> None:
    def state(n: int) -> dict[str, Any]:
        return {"loader": {"at": n}, "substituted": []}

    unread = {"loader": None, "substituted": []}
    before = {"loader": [{"at": 5}, {"at": 6}], "substituted": []}
    assert loader_states([state(1), state(2)]) == [{"at": 1}, {"at": 2}]
    assert loader_states([state(1), unread]) is None, "nobody had trained on anything yet"
    assert loader_states([state(5), before]) == [{"at": 5}, {"at": 6}], (
        "one never got to open its loader"
    )
    assert loader_states([before, before]) == [{"at": 5}, {"at": 6}]


def test_a_rank_that_never_opened_its_data_saves_what_it_was_to_begin_with(
    feeds: Callable[..., SharedFeed],
) -> None:
    there, resumed = threading.Event(), [{"at": 5}, {"at": 6}]

    def create() -> AsyncDataLoader:
        assert there.wait(WAIT_S)
        return loader(Numbers())

    feed = feeds(create, Limits(on_stall="synthetic", first_timeout_s=0.01), resumed=resumed)
    feed.next(1)
    assert (
        loader_states([{"loader": {"at": 5}}, json.loads(json.dumps(feed.state_dict()))]) == resumed
    )
    there.set()


# Opening in the background


def test_what_takes_longer_than_its_caller_waits_is_there_later() -> None:
    ready = threading.Event()
    opening = BackgroundOpen(lambda: ready.wait(WAIT_S) and "opened")
    with pytest.raises(LoaderTimeout, match=r"not opened within 0\.01 s"):
        opening.result(0.01)
    ready.set()
    assert opening.result(WAIT_S) == "opened"
    assert opening.result(0.0) == "opened"
    opening.close()


def test_a_loader_that_opens_after_close_is_shut_down_with_its_threads() -> None:
    ready = threading.Event()

    def create() -> AsyncDataLoader:
        made = loader(Numbers())
        made.start()
        assert ready.wait(WAIT_S)
        return made

    opening = BackgroundOpen(create, lambda made: made.shutdown())
    opening.close()
    ready.set()
    opening.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("penstock-")]


def test_an_error_while_opening_is_raised_at_each_request() -> None:
    opening = BackgroundOpen(lambda: 1 // 0, lambda made: pytest.fail("nothing was opened"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            opening.result(WAIT_S)
    opening.close()

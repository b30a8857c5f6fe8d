"""Ranks that go on together: real loaders, threads as ranks, and data that comes when a test lets it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader
from penstock.encode.batch import Batch
from penstock.errors import (
    ConfigError,
    SourceError,
    StateError,
)
from penstock.feed import fallback
from penstock.feed.collectives import Ranks
from penstock.feed.fallback import (
    BackgroundOpen,
    FeedStopped,
    Limits,
    SharedFeed,
    Turn,
    loader_states,
)
from tests.feeding import WAIT_S, Numbers, loader, rows


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


@pytest.mark.parametrize(
    "mistake", [ConfigError("no such setting"), StateError("of other data"), SourceError("it is another file"),
                ConfigError("no vocabulary")],
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


# Opening in the background


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

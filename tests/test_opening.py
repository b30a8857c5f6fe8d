"""What is opened on a thread of its own: there later, disposed of when it comes too late, or the error that it was."""

from __future__ import annotations

import re
import threading

import pytest

from penstock import AsyncDataLoader
from penstock.errors import LoaderClosed, LoaderTimeout
from penstock.feed.opening import OPENER, Opening
from tests.feeding import WAIT_S, Numbers, loader


def test_what_takes_longer_than_its_caller_waits_is_there_later() -> None:
    go = threading.Event()
    opening = Opening(lambda: go.wait(WAIT_S) and "made")
    with pytest.raises(LoaderTimeout, match=r"not opened within 0\.01 s"):
        opening.result(0.01)
    assert not opening.done
    go.set()
    assert opening.result(WAIT_S) == "made"
    assert opening.result(0.0) == "made"
    assert opening.done
    opening.close()


def test_what_comes_after_its_opener_has_closed_is_disposed_of() -> None:
    go, disposed = threading.Event(), threading.Event()
    opening = Opening(lambda: go.wait(WAIT_S), lambda made: disposed.set())
    opening.close(timeout_s=0.01)
    assert not disposed.is_set()
    go.set()
    assert disposed.wait(WAIT_S)
    with pytest.raises(LoaderClosed):
        opening.result(WAIT_S)
    opening.close()


def test_what_was_made_is_disposed_of_once() -> None:
    disposed: list[str] = []
    opening = Opening(lambda: "made", disposed.append)
    opening.result(WAIT_S)
    opening.close()
    opening.close()
    assert disposed == ["made"]


def test_what_making_raised_is_raised_whenever_it_is_asked_for() -> None:
    def make() -> str:
        raise ZeroDivisionError("while opening")

    opening = Opening(make, lambda made: pytest.fail("there is nothing to dispose of"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="while opening"):
            opening.result(WAIT_S)
    opening.close()


def test_a_loader_that_is_closed_where_it_is_opened_leaves_no_thread_behind() -> None:
    go = threading.Event()

    def create() -> AsyncDataLoader:
        made = loader(Numbers())
        made.start()
        assert go.wait(WAIT_S)
        return made

    opening = Opening(create, lambda made: made.shutdown())
    opening.close(0.0)
    go.set()
    with pytest.raises(LoaderClosed):
        opening.result(WAIT_S)
    # Disposed of is closed, threads and all, and not only told to close.
    ours = {thread.name for thread in threading.enumerate() if re.match("penstock-", thread.name)}
    assert ours <= {OPENER}
    opening.close(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_disposed_of_is_closed_all_the_same() -> None:
    go = threading.Event()

    def dispose(made: bool) -> None:
        raise ZeroDivisionError("while closing")

    opening = Opening(lambda: go.wait(WAIT_S), dispose)
    opening.close(timeout_s=0.01)
    go.set()
    with pytest.raises(LoaderClosed):
        opening.result(WAIT_S)
    assert opening.done
    opening.close(WAIT_S)

"""Trying again within a budget, side by side and twice at once: what is waited for, what is believed, what ends when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from penstock import RemoteOptions
from penstock.errors import LoaderClosed, RemoteError, SourceChanged
from penstock.feed.spare import SpareThreads
from penstock.read.attempt import Fault, Patience
from penstock.read.http import Refused
from penstock.read.retry import Client, retry_after
from tests.servers import Fault as Wrong
from tests.servers import FileServer

LIMITS = RemoteOptions(
    connect_timeout=1, request_timeout=3, stall_timeout=0.5, backoff=0.001, retry_after_cap=0.05
)
DATA = bytes(range(256)) * 64


@pytest.fixture
def client() -> Iterator[Client]:
    with SpareThreads(4, "side") as side, SpareThreads(8, "attempt") as second:
        one = Client(LIMITS, side=side, second=second)
        yield one
        one.close()


class Failing:
    """Fails with each of some faults, one after the other, and then succeeds."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.attempts = 0

    def __call__(self, patience: Patience) -> str:
        self.attempts += 1
        if self.attempts <= len(self.faults):
            raise self.faults[self.attempts - 1]
        return "done"


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# Within a budget


def test_every_attempt_is_counted_with_its_reason(client: Client) -> None:
    attempt = Failing(Fault("reset", "r"), Fault("stall", "s"), Fault("reset", "r"))
    assert client.keep_trying("a thing", 5.0, attempt) == "done"
    counts = client.tally.counts()
    assert (counts["fault reset"], counts["fault stall"]) == (2, 1)


def test_a_budget_that_runs_out_is_an_error_with_everything_that_happened(client: Client) -> None:
    def attempt(patience: Patience) -> None:
        raise Fault(random.choice(["reset"]), "Connection reset by peer")

    began = time.monotonic()
    with pytest.raises(
        RemoteError,
        match=r"a thing cannot be .* attempts in \d+\.\d s failed \(reset \d+x\); at last: Conn",
    ) as raised:
        client.keep_trying("a thing", 0.3, attempt, setting="retry_budget")
    assert time.monotonic() - began < 30.0
    assert "RemoteOptions(retry_budget=…)" in str(raised.value)
    assert isinstance(raised.value.__cause__, Fault)


def test_a_final_fault_is_raised_at_once_and_names_the_thing(client: Client) -> None:
    attempt = Failing(Fault("gone", "", final=SourceChanged("it is gone")))
    with pytest.raises(SourceChanged, match=r"^a thing: it is gone$"):
        client.keep_trying("a thing", 5.0, attempt)
    assert attempt.attempts == 1


def test_other_exceptions_are_not_tried_again(client: Client) -> None:
    def attempt(patience: Patience) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.keep_trying("a thing", 5.0, attempt)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), (" 1.5 ", 1.5), ("0", 0.0), ("-5", 0.0), ("nan", 0.0), ("", None), ("soon", None), ("1,5", None),
     ("Mon, 99 Foo 2020", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("Mon, 01 Jan 0001 00:00:00 -0000", 0.0)],
)  # fmt: skip
def test_retry_after_is_read_in_every_form(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}) == seconds


# Ending


def test_the_end_wakes_whoever_pauses_or_waits(client: Client) -> None:
    woken = threading.Event()
    begun = threading.Semaphore(0)
    errors: list[BaseException] = []

    def hangs(patience: Patience) -> None:
        patience.when_cancelled(woken.set)
        begun.release()
        woken.wait(20)
        patience.check()

    def fails(patience: Patience) -> None:
        begun.release()
        raise Fault("reset", "", retry_after=30)

    client.limits = replace(LIMITS, retry_after_cap=60)

    def run(attempt: Callable[[Patience], None]) -> None:
        try:
            client.keep_trying("a thing", 60.0, attempt)
        except LoaderClosed as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(attempt,)) for attempt in (hangs, fails)]
    for thread in threads:
        thread.start()
    assert begun.acquire(timeout=20)
    assert begun.acquire(timeout=20)
    client.stop()
    for thread in threads:
        thread.join(10.0)
    assert len(errors) == 2
    with pytest.raises(LoaderClosed):
        client.keep_trying("a thing", 1.0, Failing())


# Side by side


def test_results_come_in_order(client: Client) -> None:
    def make(i: int) -> int:
        time.sleep(0.02 * (4 - i % 5))
        return i

    assert client.side_by_side([partial(make, i) for i in range(12)]) == list(range(12))


# Twice at once


def test_the_second_of_two_attempts_may_win_and_the_first_is_cancelled(client: Client) -> None:
    seen: list[Patience] = []
    ended: list[str] = []

    def attempt(patience: Patience) -> int:
        seen.append(patience)
        number = len(seen)
        if number == 1:
            woken = threading.Event()
            patience.when_cancelled(woken.set)
            assert woken.wait(20)
            ended.append("first")
            patience.check()
        return number

    assert client.first_of(attempt, time.monotonic() + 30, 0.05) == 2
    assert client.tally.hedges == 1
    assert seen[0].cancelled
    until(lambda: bool(ended))
    assert ended == ["first"]


@pytest.mark.parametrize("both", [False, True])
def test_an_attempt_that_fails_leaves_the_other_its_chance(client: Client, both: bool) -> None:
    number = iter(range(2))
    begun = threading.Barrier(2, timeout=30)

    def attempt(patience: Patience) -> str:
        mine = next(number)
        begun.wait()
        time.sleep(0.1 * mine)  # the first one ends first
        if both or mine == 0:
            raise Fault("reset", f"number {mine}")
        return "done"

    if both:
        with pytest.raises(Fault, match="number 0"):
            client.first_of(attempt, time.monotonic() + 30, 0.3)
    else:
        assert client.first_of(attempt, time.monotonic() + 30, 0.3) == "done"


# Redirects and refusals


def test_a_login_never_crosses_to_another_host_or_port(client: Client) -> None:
    with FileServer({"a": DATA}) as first, FileServer({"a": DATA}) as second:
        there, back = second.url_of("a"), first.url + "/b"
        first.fault(Wrong("redirect", path="/a", to=there))
        second.fault(Wrong("redirect", path="/a", to=back))
        first.put("b", DATA)
        reply = client.call(first.url_of("a"), what="a", token="hf_secret")
        assert reply.body == DATA
        basic = {"Authorization": "Basic c2VjcmV0"}
        first.fault(Wrong("redirect", path="/a", to=there))
        client.call(first.url_of("a"), what="a", headers=basic)
        assert [r.headers.get("authorization") for r in first.log] == ["Bearer hf_secret"] * 2 + [
            "Basic c2VjcmV0"
        ]
        assert [r.headers.get("authorization") for r in second.log] == [None, None]


def test_a_redirect_loop_once_is_survived_and_for_ever_an_error(client: Client) -> None:
    with FileServer({"a": DATA}) as server:
        server.fault(Wrong("redirect", times=10))
        assert client.call(server.url_of("a"), what="a").body == DATA
        server.fault(Wrong("redirect", times=None))
        with pytest.raises(RemoteError, match="the file: more than 5 redirects"):
            client.call(server.url_of("a"), what="the file")


def test_a_refusal_is_not_tried_again(client: Client) -> None:
    with FileServer({}) as server:
        with pytest.raises(Refused) as raised:
            client.call(server.url_of("a"), what="a")
        assert raised.value.status == 404
        assert len(server.log) == 1


@pytest.mark.parametrize("kind", ["gzip", "html"])
def test_a_portal_or_something_compressed_never_passes_for_an_answer(
    client: Client, kind: str
) -> None:
    with FileServer({"a": DATA}) as server:
        server.fault(Wrong(kind))
        assert client.call(server.url_of("a"), what="a").body == DATA
        assert len(server.log) == 2

"""Trying again within a budget, side by side and twice at once: what is waited for, what is believed, what ends when."""

from __future__ import annotations

import email.utils
import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import RemoteOptions
from penstock.errors import LoaderClosed, RemoteError, SourceChanged
from penstock.feed import spare
from penstock.feed.spare import SpareThreads
from penstock.read.attempt import Fault, Patience
from penstock.read.http import Refused, Target
from penstock.read.remote import RemoteFiles, Usual
from penstock.read.retry import Client, retry_after
from penstock.types import FileRef
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


def test_an_attempt_has_no_more_time_than_is_left(client: Client) -> None:
    left: list[float] = []

    def attempt(patience: Patience) -> None:
        left.append(patience.deadline - time.monotonic())
        raise Fault("slow", "")

    with pytest.raises(RemoteError):
        client.keep_trying("a thing", 1.0, attempt)
    assert left[0] <= 1.0
    assert left[-1] < left[0]


def test_an_attempt_that_had_hardly_any_time_does_not_hide_what_was_wrong(client: Client) -> None:
    faults = iter([Fault("refused", "Connection refused")])
    with pytest.raises(RemoteError, match="at last: Connection refused"):
        client.keep_trying(
            "a thing",
            0.05,
            Failing(next(faults), *[Fault("deadline", "not done") for _ in range(999)]),
        )


def test_a_final_fault_is_raised_at_once_and_names_the_thing(client: Client) -> None:
    attempt = Failing(Fault("gone", "", final=SourceChanged("it is gone")))
    with pytest.raises(SourceChanged, match=r"^a thing: it is gone$"):
        client.keep_trying("a thing", 5.0, attempt)
    assert attempt.attempts == 1


def test_a_doubtful_fault_is_believed_once_it_was_met_several_times(client: Client) -> None:
    def doubt(text: str) -> Fault:
        return Fault("etag", text, final=SourceChanged(text), doubtful=True)

    b, c, reset = doubt("was a, is b"), doubt("was a, is c"), Fault("reset", "")
    assert client.keep_trying("a thing", 5.0, Failing(b, b, reset, c, c, reset)) == "done"
    with pytest.raises(SourceChanged, match="is b"):
        client.keep_trying("a thing", 5.0, Failing(b, c, reset, b, c, b))


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


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"resolvers"; r=0; t=7'}, 7.0),
        (
            {"ratelimit": '"api";r=12;t=55'},
            None,
        ),  # something is left: it refuses for another reason
        ({"ratelimit": '"api";r=0;t=55', "retry-after": "3"}, 3.0),
        ({"ratelimit": "nonsense"}, None),
    ],
)
def test_the_end_of_a_window_of_requests_is_waited_for(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_as_a_date_is_counted_from_now() -> None:
    value = email.utils.formatdate(time.time() + 100, usegmt=True)
    found = retry_after({"retry-after": value})
    assert found is not None
    assert 50 < found <= 100
    assert retry_after({"retry-after": "1e400"}) == float("inf")


def test_a_server_that_asks_for_a_pause_gets_it_up_to_the_cap(client: Client) -> None:
    for asked, waited in ((0.02, 20), (1e9, 50), (float("inf"), 50)):
        before = client.tally.counts()["retry_wait_ms"]
        client.keep_trying("a thing", 5.0, Failing(Fault("status_429", "", retry_after=asked)))
        assert client.tally.counts()["retry_wait_ms"] - before == pytest.approx(waited, abs=1)


def test_pauses_grow_and_stay_well_within_the_budget(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    with pytest.raises(RemoteError):
        client.keep_trying("a thing", 2.0, Failing(*[Fault("reset", "") for _ in range(999)]))
    assert len(caplog.records) >= 8
    assert [r.levelname for r in caplog.records].count("WARNING") <= 3
    for record in caplog.records:
        assert isinstance(record.args, tuple)
        assert isinstance(record.args[3], float)
        assert record.args[3] <= 0.2


def test_what_the_program_draws_at_random_is_not_changed_by_faults(client: Client) -> None:
    random.seed(7)
    drawn = random.random()
    random.seed(7)
    client.keep_trying("a thing", 5.0, Failing(*[Fault("reset", "") for _ in range(5)]))
    assert random.random() == drawn


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


def test_the_end_may_come_on_a_thread_that_is_in_the_middle_of_something(client: Client) -> None:
    # As when a garbage collection runs there, and closes what nobody holds any more.
    patience = Patience(LIMITS, time.monotonic() + 5)
    threads = SpareThreads(1)
    done = threading.Event()

    def within() -> None:
        with client._lock, patience._lock, threads._lock, client.http._lock:
            patience.cancel()
            client.close()
            threads.stop()
        done.set()

    threading.Thread(target=within, daemon=True).start()
    assert done.wait(10)


# Side by side


def test_results_come_in_order(client: Client) -> None:
    def make(i: int) -> int:
        time.sleep(0.02 * (4 - i % 5))
        return i

    assert client.side_by_side([partial(make, i) for i in range(12)]) == list(range(12))


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_after_a_failure_nothing_more_is_begun(client: Client, failing: int) -> None:
    begun: list[int] = []

    def make(i: int) -> int:
        begun.append(i)
        if i == failing:
            raise RemoteError(f"number {i}")
        time.sleep(0.05)
        return i

    with pytest.raises(RemoteError, match=f"number {failing}"):
        client.side_by_side([partial(make, i) for i in range(400)])
    count = len(begun)
    assert count < 100
    time.sleep(0.15)
    assert len(begun) == count, "nor afterwards"


def test_many_small_files_of_a_server_that_is_gone_fail_within_one_budget(client: Client) -> None:
    with FileServer({"a": DATA}) as server:
        url = server.url_of("a")
    client.limits = replace(LIMITS, retry_budget=0.4)
    files = RemoteFiles(client, {})
    began = time.monotonic()
    with pytest.raises(RemoteError, match="refused"):
        files.read_all([(FileRef(f"{url}{i}", "a", 10, "text"), 0, 10) for i in range(300)])
    assert time.monotonic() - began < 20.0


def test_a_read_that_gets_no_turn_fails_in_time(client: Client) -> None:
    client.limits = replace(LIMITS, retry_budget=0.2, fetches=1)
    files = RemoteFiles(client, {})
    assert files._slots.acquire(timeout=1)
    with pytest.raises(RemoteError, match=r"http://x/a cannot be fetched: 1 other requests"):
        files.read(FileRef("http://x/a", "a", 10, "text"), 0, 10)


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


def test_a_second_attempt_that_had_to_wait_for_a_thread_is_not_made_for_nobody() -> None:
    with SpareThreads(1) as second:
        client = Client(LIMITS, second=second)
        seen: list[Patience] = []

        def attempt(patience: Patience) -> str:
            seen.append(patience)
            until(lambda: client.tally.hedges == 1)
            time.sleep(0.05)  # so that the second one stands in line
            return "done"

        assert client.first_of(attempt, time.monotonic() + 30, 0.05) == "done"
        assert client.tally.hedges == 1
        assert second.submit(lambda: "the thread is free").result(30) == "the thread is free"
        assert len(seen) == 1
        client.close()


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


def test_hedging_does_not_make_itself_wait_longer_and_longer(client: Client) -> None:
    client.limits = replace(LIMITS, stall_timeout=20, request_timeout=30, retry_budget=30)
    with FileServer({"a": DATA}) as server:
        slow = [Wrong("slow", delay_s=30.0, skip=20 + 4 * n) for n in range(6)]
        for fault in slow:
            server.fault(fault)
        files = RemoteFiles(client, {})
        file = FileRef(server.url_of("a"), "a", len(DATA), "text")
        for i in range(60):
            start = 100 * i
            assert files.read(file, start, 90) == DATA[start : start + 90]
        assert sum(fault.struck for fault in slow) == 6
        # Of a busy machine's own slowness a few, up to what is allowed: eight, a tenth, and the last one.
        assert 6 <= client.tally.hedges <= 9 + client.tally.requests // 10
        longest = files._usual.too_long(90)
        assert longest is not None
        assert longest < 2.0, "though a tenth of all reads were slow"


def test_what_is_usual_for_one_size_says_something_of_others() -> None:
    usual = Usual()
    assert usual.too_long(100_000) is None
    for _ in range(20):
        usual.took(100_000, 0.1)
    assert [usual.too_long(n) for n in (10, 1000, 100_000)] == [pytest.approx(0.25)] * 3
    assert usual.too_long(400_000) == pytest.approx(0.7), (
        "four times as long, if all of it were bandwidth"
    )


def test_reads_that_race_for_one_server_never_get_each_others_bytes(client: Client) -> None:
    client.limits = replace(LIMITS, fetches=16)
    with FileServer({"a": DATA}) as server:
        for kind, n in (
            ("reset", 7),
            ("short", 11),
            ("slow", 5),
            ("no_range", 13),
            ("wrong_range", 17),
        ):
            details = {"delay_s": 0.15} if kind == "slow" else {}
            for k in range(1, 12):
                server.fault(Wrong(kind, skip=n * k, **details))
        files = RemoteFiles(client, {})
        file = FileRef(server.url_of("a"), "a", len(DATA), "text")
        rng = random.Random(3)
        ranges = [
            (s := rng.randrange(len(DATA) - 1), rng.randint(1, len(DATA) - s)) for _ in range(250)
        ]
        got = files.read_all([(file, start, length) for start, length in ranges])
        assert got == [bytearray(DATA[s : s + n]) for s, n in ranges]


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


def test_every_hop_has_its_own_time_to_connect(client: Client) -> None:
    client.limits = replace(LIMITS, connect_timeout=0.3, stall_timeout=2.0)
    with FileServer({"a": DATA}) as first, FileServer({"a": DATA}) as second:
        first.fault(Wrong("redirect", to=second.url_of("a"), times=None))
        first.latency_s = 0.5
        assert client.call(first.url_of("a"), what="a").body == DATA
        assert client.tally.faults == {}


def test_a_redirect_with_a_large_body_is_followed_without_reading_it(client: Client) -> None:
    with FileServer({"a": DATA, "big": b"x" * 3_000_000}) as server:
        patience = Patience(LIMITS, time.monotonic() + 5)
        moved = {"Location": server.url_of("a")}
        server.fault(Wrong("status", path="/big", code=302, headers=moved, body=b"x" * 3_000_000))
        target, response = client.follow("GET", Target(server.url_of("big")), {}, None, patience)
        with response:
            assert response.read(len(DATA)) == DATA
        assert target.redirected


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


def test_a_portal_is_seen_in_the_head_of_a_file_too_and_a_page_may_be_one(client: Client) -> None:
    with FileServer({"a.parquet": DATA, "a.html": DATA, "a": DATA}) as server:
        server.fault(Wrong("html", method="HEAD"))
        reply = client.call(server.url_of("a.parquet"), what="a", method="HEAD")
        assert reply.headers["content-length"] == str(len(DATA))
        server.fault(Wrong("html", method="HEAD", times=None))
        for name in ("a.html", "a"):
            assert client.call(server.url_of(name), what="a", method="HEAD").status == 200


# Spare threads


def test_spare_threads_do_as_much_at_once_as_they_may_and_the_rest_after() -> None:
    gate = threading.Event()
    with SpareThreads(3) as threads:
        waiting = [threads.submit(lambda: gate.wait(20)) for _ in range(9)]
        assert sum(t.name == "penstock-spare" for t in threading.enumerate()) == 3
        gate.set()
        assert [future.result(10) for future in waiting] == [True] * 9


def test_a_call_that_comes_while_a_thread_gives_up_waiting_is_still_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spare, "IDLE_S", 0.001)
    with SpareThreads(1) as threads:
        for i in range(300):
            assert threads.submit(lambda i=i: i).result(10) == i
            time.sleep(0.001 if i % 3 else 0.0009)


def test_an_exception_belongs_to_whoever_waits_and_the_thread_goes_on() -> None:
    with SpareThreads(1) as threads:
        failed: Future[Any] = threads.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.result(10)
        assert threads.submit(lambda: 2).result(10) == 2


def test_the_end_drops_what_waits_and_takes_nothing_more() -> None:
    gate, begun = threading.Event(), threading.Event()
    threads = SpareThreads(1)
    running = threads.submit(lambda: begun.set() or gate.wait(20))
    assert begun.wait(10)
    waiting = threads.submit(lambda: 1)
    cancelled = threads.submit(lambda: 2)
    assert cancelled.cancel()
    threads.stop()
    with pytest.raises(LoaderClosed):
        waiting.result(5)
    with pytest.raises(LoaderClosed):
        threads.submit(lambda: 3)
    gate.set()
    assert running.result(5)
    assert threads.join(10.0)
    assert wait([cancelled], timeout=5).done


def test_an_idle_thread_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "IDLE_S", 600.0)  # a thread that ends would hold nothing either

    class Thing:
        pass

    alive: list[Any] = []
    with SpareThreads(1) as threads:
        import weakref

        thing = threads.submit(Thing).result(10)
        alive.append(weakref.ref(thing))
        del thing
        gc.collect()
        until(lambda: alive[0]() is None)


def test_silence_is_noticed_as_soon_after_much_as_after_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("penstock.read.attempt.time", SimpleNamespace(monotonic=lambda: now))
    patience = Patience(RemoteOptions(stall_timeout=10.0, min_bytes_per_s=4096), deadline=1000.0)
    patience.began = 100.0
    patience.deadline = 220.0
    patience.asked()
    now += 0.5
    patience.moved(50_000)  # as much as is due in more than ten seconds

    def wait() -> None:
        nonlocal now
        for _ in range(10):
            now += patience.wait_s()
            patience.waited()

    with pytest.raises(Fault) as caught:
        wait()
    assert (caught.value.reason, round(now, 3)) == ("stall", 110.5)

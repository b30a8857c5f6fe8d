"""Try again, within a budget: the loop that everything remote goes through.

In:    what to do, what to call it in messages, and for how long to keep trying.
Out:   its result; or `RemoteError` with every reason counted; or the error that is final at once.
Where: fetch threads, and whichever thread lists files.
State: the attempts under way, so that a shutdown ends them. Attempts are counted by reason, and the time spent
       waiting between them, so that nobody mistakes retry sleep for bandwidth (see `tally`).
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, TypeVar

from penstock.errors import LoaderClosed, RemoteError
from penstock.options import RemoteOptions
from penstock.read.attempt import Fault, Patience
from penstock.read.http import Http, Refused, Response, Target
from penstock.read.tally import Tally
from penstock.types import KiB, MiB

log = logging.getLogger("penstock")

T = TypeVar("T")

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses that may be different next time."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
SPENT = re.compile(r";\s*r=0\s*;\s*t=(\d{1,6})\b")
HOPS = 5
MAX_PAUSE_S = 10.0
"""The longest pause between two attempts; where the budget is short, a tenth of that."""
BELIEVED = 3
"""So often a doubtful fault has to be met to be believed: among very many reads, two in a row are met by chance."""
MAX_REDIRECT = 64 * KiB
"""A longer body of a redirect is not read to its end, though the connection is lost by that."""


class Threads(Protocol):
    """Somebody with threads to spare."""

    def submit(self, call: Callable[[], T]) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    url: str = field(repr=False)


class Client:
    """Everything remote that one dataset or one run asks for."""

    def __init__(
        self,
        limits: RemoteOptions,
        *,
        http: Http | None = None,
        side: Threads | None = None,
        second: Threads | None = None,
    ) -> None:
        """`side` is for things done side by side, `second` for attempts, which wait for nothing of ours.

        Were they the same, all threads could be waiting for attempts that none is left to make.
        """
        self.limits = limits
        self.http = http or Http()
        self._side = side
        self._second = second
        self.tally = Tally()
        self.http.spent = self.tally.exchange
        self.closing = threading.Event()
        """Set once the run ends: whoever waits for something of it stops waiting."""
        self._random = random.Random()  # the program's own is for what it draws itself
        # Reentrant, because a garbage collection may end the run on a thread that is in here.
        self._lock = threading.RLock()
        self._patiences: dict[int, Patience] = {}

    # Trying

    def keep_trying(
        self,
        what: str,
        budget_s: float,
        attempt: Callable[[Patience], T],
        *,
        setting: str = "metadata_budget",
    ) -> T:
        """The result of an attempt that did not fail.

        `what` names it for people, without secrets; `setting` is where the budget comes from.
        """
        began = time.monotonic()
        deadline = began + budget_s
        tried: Counter[str] = Counter()
        heard: Counter[str] = Counter()
        last: Fault | None = None
        pause = self.limits.backoff
        while True:
            try:
                return self.attempt(attempt, deadline)
            except Fault as fault:
                if self.closing.is_set():
                    raise LoaderClosed("the loader was shut down") from None
                self.tally.add(fault=fault.reason)
                if fault.final is not None:
                    heard[str(fault.final)] += 1
                    if not fault.doubtful or heard[str(fault.final)] >= BELIEVED:
                        raise _named(what, fault) from fault
                tried[fault.reason] += 1
                if last is None or fault.reason != "deadline":
                    last = fault  # an attempt that had little time left says nothing of the server
                delay = pause * self._random.uniform(0.5, 1.0)
                pause = min(2 * pause, MAX_PAUSE_S, budget_s / 10)
                if fault.retry_after is not None:
                    delay = max(delay, min(fault.retry_after, self.limits.retry_after_cap))
                if time.monotonic() + delay >= deadline:
                    raise _gave_up(what, tried, last, time.monotonic() - began, setting) from last
                level = logging.WARNING if tried.total() in (3, 10, 30) else logging.INFO
                log.log(
                    level,
                    "%s: %s; attempt %d in %.1f s",
                    what,
                    fault.detail,
                    tried.total() + 1,
                    delay,
                )
            self.pause(delay)

    def attempt(self, attempt: Callable[[Patience], T], deadline: float) -> T:
        """One attempt, which a shutdown ends."""
        patience = Patience(self.limits, deadline)
        with self._lock:
            if self.closing.is_set():
                raise LoaderClosed("the loader was shut down")
            self._patiences[id(patience)] = patience
        try:
            return attempt(patience)
        finally:
            with self._lock:
                del self._patiences[id(patience)]

    def pause(self, seconds: float) -> None:
        """Wait, unless the loader is shut down meanwhile."""
        self.tally.add(pause_s=seconds)
        if self.closing.wait(seconds):
            raise LoaderClosed("the loader was shut down")

    def stop(self) -> None:
        """End every attempt and every pause. Waits for nobody."""
        with self._lock:
            self.closing.set()
            live = list(self._patiences.values())
        for patience in live:
            patience.cancel()

    def close(self) -> None:
        self.stop()
        self.http.close()

    # Side by side

    def ahead(self, thunk: Callable[[], T]) -> Future[T] | None:
        """Have something done meanwhile, if there is a thread for it."""
        return self._side.submit(thunk) if self._side is not None else None

    def side_by_side(self, thunks: Sequence[Callable[[], T]]) -> list[T]:
        """Their results, in order. After a failure no more of them are begun, and it is raised once none runs."""
        if self._side is None or len(thunks) < 2:
            return [thunk() for thunk in thunks]
        # The caller does the first one itself.
        futures = [self._side.submit(thunk) for thunk in thunks[1:]]
        try:
            first = thunks[0]()
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in ended:
                    future.result()
            return [first, *(future.result() for future in futures)]
        finally:
            wait([future for future in futures if not future.cancel()])

    def first_of(
        self, attempt: Callable[[Patience], T], deadline: float, hedge_after_s: float | None
    ) -> T:
        """An attempt, and a second one beside it should it take longer than most do."""
        if self._second is None or hedge_after_s is None:
            return self.attempt(attempt, deadline)
        patiences: list[Patience] = []
        over = threading.Event()

        def one(patience: Patience) -> T:
            patiences.append(patience)
            if over.is_set():  # it had to wait for a thread, and the other one was faster
                patience.cancel()
            patience.check()
            result = attempt(patience)
            over.set()
            return result

        def run() -> T:
            return self.attempt(one, deadline)

        futures = [self._second.submit(run)]
        try:
            if not wait(futures, timeout=hedge_after_s)[0]:
                self.tally.add(hedges=1)
                futures.append(self._second.submit(run))
            pending = set(futures)
            while True:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                won = next((f for f in done if f.exception() is None), None)
                if won is not None or not pending:
                    return (won or futures[0]).result()
        finally:
            over.set()
            for patience in patiences:
                patience.cancel()

    # Small things, as a whole

    def call(
        self,
        url: str,
        *,
        what: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        ok: Container[int] = (200,),
        max_bytes: int = 64 * MiB,
    ) -> Reply:
        """A whole answer with a status that is `ok`. Redirects are followed as far as they may be."""

        def attempt(patience: Patience) -> Reply:
            with self.follow(method, Target(url), headers or {}, token, patience)[1] as response:
                if response.status in ok:
                    if method != "HEAD":
                        check_encoding(response)
                    if method != "HEAD" or _named_as_data(url):
                        check_page(response)
                    body = response.read(max_bytes if method != "HEAD" else 0)
                    self.tally.add(bytes=len(body))
                    return Reply(response.status, response.headers, body, url)
                raise_for(response)

        return self.keep_trying(what, self.limits.metadata_budget, attempt)

    def follow(
        self,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        token: str | None,
        patience: Patience,
        check: Callable[[Response], None] | None = None,
    ) -> tuple[Target, Response]:
        """Ask, and go where redirects lead; a token goes to the origin it is for, and nowhere else.

        `check` looks at each redirect before it is followed.
        """
        origin = target.origin
        for _ in range(HOPS):
            given = dict(headers)
            if target.origin != origin:
                given.pop("Authorization", None)
            elif token is not None:
                given["Authorization"] = f"Bearer {token}"
            self.tally.add(requests=1)
            response = self.http.open(method, target, given, patience)
            location = response.headers.get("location", "")
            if response.status not in REDIRECTS or not location:
                return target, response
            with response:
                if check is not None:
                    check(response)
                target = target.redirect(location, response.private)
                if response.length is not None and response.length <= MAX_REDIRECT:
                    response.read(MAX_REDIRECT)  # so that the connection can be used again
        text = f"more than {HOPS} redirects"
        raise Fault("redirect", text, final=RemoteError(text), doubtful=True)


def check_encoding(response: Response) -> None:
    """Refuse what is compressed, which nobody asked for."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise Fault("encoded", f"the answer is {encoding[:20]}-encoded, which nobody asked for")


def check_page(response: Response) -> None:
    """Refuse a web page where data was asked for."""
    if response.status == 200 and "html" in response.headers.get("content-type", "").lower():
        raise Fault(
            "html", "a web page came, and no listing or file: a portal or proxy is in the way"
        )


def _named_as_data(url: str) -> bool:
    """Whether an address has an ending, and not that of a web page."""
    name = url.partition("?")[0].rpartition("/")[2].lower()
    return "." in name and not name.endswith((".html", ".htm"))


def raise_for(response: Response) -> NoReturn:
    """Why a status is not what was asked for: to be tried again, or a refusal."""
    status, headers = response.status, response.headers
    if status in AGAIN or 500 <= status < 600:
        asked = retry_after(headers)
        until = f" and asks to wait {asked:.0f} s" if asked else ""
        raise Fault(f"status_{status}", f"the server answered {status}{until}", retry_after=asked)
    if status >= 400:
        raise Refused(status, headers, response.read(MiB))
    raise Fault(f"status_{status}", f"the server answered {status}, which is no answer to this")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, given as a number or as a date.

    Or, where nothing is left of what it allows, until its window ends: `RateLimit: "api";r=0;t=55`, as the Hub says it.
    """
    value = headers.get("retry-after", "").strip()
    if not value:
        spent = SPENT.search(headers.get("ratelimit", ""))
        return float(spent[1]) if spent else None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    import email.utils

    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _gave_up(
    what: str, tried: Counter[str], fault: Fault, seconds: float, setting: str
) -> RemoteError:
    reasons = ", ".join(f"{name} {n}x" if n > 1 else name for name, n in tried.most_common())
    times = "1 attempt" if tried.total() == 1 else f"{tried.total()} attempts"
    return RemoteError(
        f"{what} cannot be fetched: {times} in {seconds:.1f} s failed ({reasons}); at last: {fault.detail}. "
        f"See that the server can be reached, or allow more time: RemoteOptions({setting}=…)."
    )


def _named(what: str, fault: Fault) -> BaseException:
    """The final error, saying of what."""
    final = fault.final
    assert final is not None
    return final if what in str(final) else type(final)(f"{what}: {final}")


__all__ = ["Client", "Reply", "Threads", "check_encoding", "check_page", "raise_for", "retry_after"]

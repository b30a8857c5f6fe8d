"""Bytes of remote files, each answer checked before it is believed.

In:    a `FileRef` with an address, a range.
Out:   exactly those bytes; or an error that names the file, within the budget.
Where: fetch threads; many at once.
State: for each file where its bytes were found last (the Hub answers with a signed address that
       holds for a while) and the ETag they came with; how long recent reads took.

An answer is believed if it is a 206 of the range asked for, has its length, and the size and ETag
that the listing gave. What does not fit is asked for again, a few times; what still does not fit is an error.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.config import hub_token
from penstock.errors import AccessDenied, PenstockError, RemoteError, SourceChanged
from penstock.read.attempt import Answer, Fault, Patience
from penstock.read.http import Refused, Response, Target, version_in
from penstock.read.hub import refused as hub_refused
from penstock.read.hub import resolve_url
from penstock.read.listing import Secret, basic_authorization
from penstock.read.once import Once
from penstock.read.retry import AGAIN, Client, check_encoding, check_page, raise_for
from penstock.types import MODIFIED, FileRef, KiB, MiB, version_change

if TYPE_CHECKING:
    from penstock.read.buckets import Buckets

V = TypeVar("V")

PIECE = 8 * MiB
"""A longer range is fetched in pieces, side by side."""
RECENT = 128
ENOUGH = 8
"""Reads that are remembered, and how many it takes to say what is usual."""
HEDGES = 8
"""Reads that may be asked for twice beyond a tenth of all."""
FILES = 4096
"""Files whose addresses are remembered."""


class RemoteFiles:
    """The remote files of one run."""

    def __init__(self, client: Client, secrets: Mapping[str, Secret]) -> None:
        self._client = client
        self._secrets = secrets
        self._lock = threading.Lock()
        self._found: OrderedDict[str, Target] = OrderedDict()
        self._direct: OrderedDict[str, Target] = OrderedDict()
        self._etags: OrderedDict[str, str] = OrderedDict()
        self._once = Once()
        self._usual = Usual()
        self._buckets: Buckets | None = None
        self._slots = Turnstile(client.limits.fetches)

    def read(self, file: FileRef, start: int, length: int) -> bytearray:
        """A range of a file, which must lie within it."""
        return self.read_all([(file, start, length)])[0]

    def read_all(self, ranges: Sequence[tuple[FileRef, int, int]]) -> list[bytearray]:
        """Ranges of files, side by side; long ones in pieces."""
        out = [bytearray(length) for _, _, length in ranges]
        pieces = [
            partial(self._read, file, start + at, memoryview(data)[at : at + PIECE])
            for (file, start, length), data in zip(ranges, out, strict=True)
            for at in range(0, length, PIECE)
        ]
        self._client.side_by_side(pieces)
        return out

    def resize(self, fetches: int) -> None:
        """Have more or fewer requests under way at once."""
        self._slots.resize(fetches)

    def ahead(self, file: FileRef, start: int, length: int) -> Future[bytearray] | None:
        """The same, meanwhile; None where there is no thread to do it."""
        return self._client.ahead(partial(self.read, file, start, length))

    def _read(self, file: FileRef, start: int, view: memoryview) -> None:
        limits = self._client.limits
        began = time.monotonic()
        if not self._slots.acquire(timeout=limits.retry_budget):
            raise RemoteError(
                f"{file.path} cannot be fetched: {limits.fetches} other requests were under way for "
                f"{limits.retry_budget:.0f} s. See that the server can be reached, or allow more: RemoteOptions(fetches=…)."
            )
        try:
            # What was spent waiting is spent; but for a try or two there is always time.
            budget = max(limits.retry_budget / 4, limits.retry_budget - (time.monotonic() - began))
            self._read_piece(file, start, view, budget)
        finally:
            self._slots.release()

    def _read_piece(self, file: FileRef, start: int, view: memoryview, budget: float) -> None:
        deadline = time.monotonic() + budget
        failed = 0

        def attempt(patience: Patience) -> Answer:
            nonlocal failed
            try:
                answer = self._ask(file, start, len(view), patience)
                self._check(file, answer, len(view))
            except Fault as fault:
                failed += fault.reason != "cancelled"
                if fault.doubtful or failed > 1:
                    self._forget(file)  # another server may have it, or this one in another state
                raise
            # Its own time, not that of a first attempt which it overtook: or the usual would grow with every hedge.
            took = time.monotonic() - patience.began
            self._usual.took(len(view), took)
            self._client.tally.read(took)
            return answer

        def hedged(_: Patience) -> Answer:
            return self._client.first_of(attempt, deadline, self._hedge_after(len(view)))

        answer = self._client.keep_trying(file.path, budget, hedged, setting="retry_budget")
        view[:] = answer.data

    def _hedge_after(self, length: int) -> float | None:
        """Seconds after which to ask a second time; None if that is not to be done."""
        tally = self._client.tally
        # Where everything has become slow, second requests would make it slower.
        if not self._client.limits.hedge or tally.hedges > HEDGES + tally.requests // 10:
            return None
        return self._usual.too_long(length)

    @property
    def closing(self) -> threading.Event:
        """Set once the run ends."""
        return self._client.closing

    def etag(self, file: FileRef) -> str:
        """The ETag that a file's bytes came with, where one did."""
        with self._lock:
            return self._etags.get(file.path, "")

    def expect(self, file: FileRef, etag: str) -> None:
        """Accept bytes with this ETag only: they belong to what was read in an earlier run."""
        with self._lock:
            if etag:
                self._remember(self._etags, file.path, etag)

    # One attempt

    def _ask(self, file: FileRef, start: int, length: int, patience: Patience) -> Answer:
        if file.path.partition("://")[0] in ("http", "https", "hf"):
            return self._over_http(file, start, length, patience)
        return self._bucket_reader().read_range(file, start, length, patience)

    def _bucket_reader(self) -> Buckets:
        with self._lock:
            if self._buckets is None:
                from penstock.read.buckets import Buckets

                self._buckets = Buckets(self._client)
            return self._buckets

    def _over_http(self, file: FileRef, start: int, length: int, patience: Patience) -> Answer:
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        found = self._where(file)
        if found is None and file.path.startswith("hf://") and file.path not in self._direct:
            # Many begin with the same file at once, and the Hub counts how often it is asked where one is.
            found = self._once.wait(file.path, partial(self._where, file))
            if found is None:
                try:
                    return self._from_origin(file, headers, start, length, patience)
                finally:
                    self._once.done(file.path)
        if found is not None:
            self._client.tally.add(requests=1)
            with self._client.http.open("GET", found, headers, patience) as response:
                status = response.status
                if status in AGAIN or status in (200, 206, 416) or status >= 500:
                    return self._answer(file, response, start, length)
            # A signed address holds for a while only: where its bytes are now, the origin is asked again, once.
            self._client.tally.add(fault="expired")
            self._forget(file)
        return self._from_origin(file, headers, start, length, patience)

    def _from_origin(
        self, file: FileRef, headers: dict[str, str], start: int, length: int, patience: Patience
    ) -> Answer:
        hub = file.path.startswith("hf://")
        secret = self._secrets.get(file.path)
        if hub:
            url, token = resolve_url(file.path), hub_token()
        else:
            url, token = secret.reveal() if secret is not None else file.path, None
            url, given = basic_authorization(url)
            headers = headers | given
        origin = Target(url)
        target, response = self._client.follow(
            "GET", origin, headers, token, patience, check=partial(_linked, file)
        )
        elsewhere = target.origin != origin.origin

        def believed() -> None:
            # Only now: a portal, too, sends everybody elsewhere. What needs a login is always asked for at its origin.
            with self._lock:
                self._remember(self._found if elsewhere else self._direct, file.path, target)
            self._once.done(file.path)

        with response:
            status = response.status
            if 400 <= status < 500 and status != 416 and status not in AGAIN:
                gone = response.headers.get("x-error-code", "") in (
                    "EntryNotFound",
                    "RevisionNotFound",
                )
                if hub and not elsewhere and not gone:
                    refusal = Refused(status, response.headers, response.read(MiB))
                    raise Fault(
                        f"status_{status}", "refused", final=hub_refused(file.path, refusal)
                    )
                # An address that was signed a moment ago should be good: a new one is asked for.
                detail = f"the server answered {status}"
                raise Fault(
                    f"status_{status}", detail, final=_no_access(file, status), doubtful=elsewhere
                )
            return self._answer(file, response, start, length, believed)

    def _answer(
        self,
        file: FileRef,
        response: Response,
        start: int,
        length: int,
        believed: Callable[[], None] | None = None,
    ) -> Answer:
        """The body, if the head promises what was asked for; `believed` is called in between."""
        status, headers = response.status, response.headers
        whole = (
            status == 200 and start == 0 and length == file.size and response.length == file.size
        )
        check_encoding(response)
        if not whole:
            check_page(response)
        if status == 416:
            raise _doubt("range", SourceChanged(f"{file.path} has no bytes {start} to {start + length - 1}: it was "
                                                f"{file.size} bytes long when it was listed. {_ADVICE}"))  # fmt: skip
        if status == 200 and not whole:
            raise _doubt("no_range", RemoteError(f"{file.path}: its server does not answer requests for a range of "
                                                 "bytes. Use one that does, or copy the file to disk."))  # fmt: skip
        if status not in (200, 206):
            raise_for(response)
        total: int | None = file.size
        if not whole:
            total = _check_range(headers.get("content-range", ""), start, length)
        if response.length is not None and response.length != length:
            raise Fault("short", f"{response.length} bytes instead of {length}")
        if believed is not None:
            believed()
        data = bytearray(length)
        response.read_into(memoryview(data))
        self._client.tally.add(bytes=length)
        return Answer(data, version_in(headers), total)

    def _check(self, file: FileRef, answer: Answer, length: int) -> None:
        """Whether the bytes are of the file that was listed."""
        if len(answer.data) != length:
            raise Fault("short", f"{len(answer.data)} bytes instead of {length}")
        if answer.total is not None and answer.total != file.size:
            raise _doubt("size", SourceChanged(f"{file.path} changed: it was {file.size} bytes long, it is "
                                               f"{answer.total}. {_ADVICE}"))  # fmt: skip
        etag, listed = plain_etag(answer.etag), plain_etag(file.etag)
        if not etag or etag.startswith(MODIFIED):
            if etag and listed.startswith(MODIFIED) and etag != listed:
                raise _other_etag(file, listed, etag)
            return
        with self._lock:
            # The Hub's own addresses name a commit, whose content cannot change; what serves the bytes may
            # have ETags of its own, and then those are compared with each other.
            if listed.startswith(MODIFIED) or (
                file.path.startswith("hf://") and len(listed) != len(etag)
            ):
                listed = ""
            before = listed or self._etags.get(file.path, "") or etag
            if before == etag:
                self._remember(self._etags, file.path, etag)
        if etag != before:
            raise _other_etag(file, before, etag)

    def _where(self, file: FileRef) -> Target | None:
        """Where a file's bytes were found last."""
        with self._lock:
            return self._found.get(file.path)

    def _forget(self, file: FileRef) -> None:
        with self._lock:
            self._found.pop(file.path, None)

    @staticmethod
    def _remember(table: OrderedDict[str, V], key: str, value: V) -> None:
        table[key] = value
        if len(table) > FILES:
            table.popitem(last=False)


_ADVICE = "Pin a revision (hf://…@sha), restore the file, or start a new run."


def _doubt(reason: str, error: PenstockError) -> Fault:
    """An answer that does not fit what is known of the file. A proxy or a mirror may be at fault."""
    return Fault(reason, str(error), final=error, doubtful=True)


def _linked(file: FileRef, response: Response) -> None:
    """The Hub says of which content its redirect is: it must be the listing's."""
    linked = plain_etag(response.headers.get("x-linked-etag", ""))
    listed = plain_etag(file.etag)
    if linked and listed and len(linked) == len(listed) and linked != listed:
        raise _other_etag(file, listed, linked)


def _other_etag(file: FileRef, before: str, now: str) -> Fault:
    text = f"{file.path} changed: {version_change(before, now)}. {_ADVICE}"
    return _doubt("etag", SourceChanged(text))


def plain_etag(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')


def _check_range(value: str, start: int, length: int) -> int | None:
    """The size of the whole file, from a Content-Range that is the one asked for."""
    unit, _, rest = value.partition(" ")
    span, _, total = rest.partition("/")
    if unit != "bytes" or span != f"{start}-{start + length - 1}":
        came = value[:60] or "no range"
        raise Fault(
            "wrong_range", f"bytes {start}-{start + length - 1} were asked for, {came} came"
        )
    return int(total) if total.isascii() and total.isdigit() and len(total) < 20 else None


def _no_access(file: FileRef, status: int) -> PenstockError:
    if status in (404, 410):
        return SourceChanged(f"{file.path} is gone: its server answers {status}. {_ADVICE}")
    if file.path.startswith("hf://"):
        return AccessDenied(
            f"{file.path}: the server that the Hub names for it refuses access ({status}), also with a new address. "
            "See that this machine's clock is right and that no proxy changes its requests."
        )
    if status in (401, 403, 407, 451):
        return AccessDenied(
            f"{file.path}: its server refuses access ({status}). A signed address may have expired, or a login is "
            "missing: make a new address, or give the login as https://user:password@host/…"
        )
    return RemoteError(
        f"{file.path}: its server answers {status}, which trying again does not change."
    )


class Turnstile:
    """Lets so many in at once, a number that may change."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._free = threading.Condition()

    def acquire(self, timeout: float) -> bool:
        with self._free:
            if not self._free.wait_for(lambda: self._inside < self._limit, timeout):
                return False
            self._inside += 1
            return True

    def release(self) -> None:
        with self._free:
            self._inside -= 1
            self._free.notify()

    def resize(self, limit: int) -> None:
        with self._free:
            self._limit = limit
            self._free.notify_all()


class Usual:
    """How long reads of a size usually take, and so when one takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[int, deque[float]] = {}

    def took(self, length: int, seconds: float) -> None:
        with self._lock:
            self._recent.setdefault(_size(length), deque(maxlen=RECENT)).append(seconds)

    def too_long(self, length: int) -> float | None:
        """Seconds after which a second request is worth its bytes: beyond the slowest twentieth."""
        size = _size(length)
        with self._lock:
            # Of other sizes as well, as long as they would take if all of their time grew with the size.
            recent = sorted(
                seconds * 2.0 ** max(0, size - other)
                for other, times in self._recent.items()
                for seconds in times
            )
        if len(recent) < ENOUGH:
            return None
        p95 = recent[min(len(recent) - 1, int(0.95 * len(recent)))]
        # Where all reads share a link, one a little slower than most is just waiting its turn.
        return 1.5 * p95 + 0.1


def _size(length: int) -> int:
    """Lengths that take about as long; short ones all do."""
    return max(length, 64 * KiB).bit_length()


__all__ = ["RemoteFiles", "Usual", "plain_etag"]

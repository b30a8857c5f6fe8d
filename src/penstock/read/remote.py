"""Bytes of remote files, each answer checked before it is believed.

In:    a `FileRef` with an address, a range.
Out:   exactly those bytes; or an error that names the file, within the budget.
Where: fetch threads; many at once.
State: for each file where its bytes were found last (the Hub answers with a signed address that
       holds for a while) and the ETag they came with; how long recent reads took.

An answer is believed if it is a 206 of the range asked for, has its length, and the size and ETag
that the listing gave. What does not fit is tried again; what does not fit twice is an error.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.config import hub_token
from penstock.errors import AccessDenied, PenstockError, RemoteError, SourceChanged
from penstock.read.attempt import Answer, Fault, Patience
from penstock.read.http import Refused, Response, Target
from penstock.read.hub import refused as hub_refused
from penstock.read.hub import resolve_url
from penstock.read.listing import Secret, basic_authorization
from penstock.read.retry import Client, raise_for
from penstock.types import FileRef, MiB

if TYPE_CHECKING:
    from penstock.read.buckets import Buckets

V = TypeVar("V")

PIECE = 8 * MiB
"""A longer range is fetched in pieces, side by side."""
RECENT = 128
ENOUGH = 16
"""Reads that are remembered, and how many it takes to say what is usual."""
FILES = 4096
"""Files whose addresses are remembered."""


class RemoteFiles:
    """The remote files of one run."""

    def __init__(self, client: Client, secrets: Mapping[str, Secret]) -> None:
        self._client = client
        self._secrets = secrets
        self._lock = threading.Lock()
        self._found: OrderedDict[str, Target] = OrderedDict()
        self._etags: OrderedDict[str, str] = OrderedDict()
        self._usual = Usual()
        self._buckets: Buckets | None = None
        self._slots = threading.BoundedSemaphore(client.limits.fetches)

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

    def ahead(self, file: FileRef, start: int, length: int) -> Future[bytearray] | None:
        """The same, meanwhile; None where there is no thread to do it."""
        return self._client.ahead(partial(self.read, file, start, length))

    def _read(self, file: FileRef, start: int, view: memoryview) -> None:
        with self._slots:
            self._read_piece(file, start, view)

    def _read_piece(self, file: FileRef, start: int, view: memoryview) -> None:
        doubts: list[Exception] = []
        deadline = time.monotonic() + self._client.limits.retry_budget

        def attempt(patience: Patience) -> Answer:
            try:
                answer = self._ask(file, start, len(view), patience)
                self._check(file, answer, len(view))
                return answer
            except _Doubt as doubt:
                # Believed only if it is said twice: a proxy or a mirror may be at fault.
                if any(str(doubt.error) == str(other) for other in doubts):
                    raise Fault(doubt.reason, str(doubt.error), final=doubt.error) from None
                doubts.append(doubt.error)
                self._forget(file)
                raise Fault(doubt.reason, str(doubt.error)) from None

        def hedged(_: Patience) -> Answer:
            began = time.monotonic()
            after = self._usual.too_long(len(view)) if self._client.limits.hedge else None
            answer = self._client.first_of(attempt, deadline, after)
            self._usual.took(len(view), time.monotonic() - began)
            return answer

        answer = self._client.keep_trying(file.path, self._client.limits.retry_budget, hedged)
        view[:] = answer.data

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
        with self._lock:
            found = self._found.get(file.path)
        if found is not None:
            self._client.tally.add(requests=1)
            with self._client.http.open("GET", found, headers, patience) as response:
                if response.status not in (401, 403, 404, 410):
                    return self._answer(file, response, start, length)
            # A signed address holds for a while only: it is asked for again, once.
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
        reply: Target
        reply, response = self._client.follow("GET", origin, headers, token, patience, check=partial(_linked, file))
        with response:
            if response.status in (401, 403, 404, 410, 451):
                if hub and reply.origin == origin.origin:
                    refusal = Refused(response.status, response.headers, response.read(MiB))
                    raise Fault(f"status_{response.status}", "refused", final=hub_refused(file.path, refusal))
                raise Fault(f"status_{response.status}", "refused", final=_no_access(file, response.status))
            if reply != origin:
                with self._lock:
                    self._remember(self._found, file.path, reply)
            return self._answer(file, response, start, length)

    def _answer(self, file: FileRef, response: Response, start: int, length: int) -> Answer:
        """The body, if the head promises what was asked for."""
        status, headers = response.status, response.headers
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise Fault("encoded", f"the answer is {headers['content-encoding']}-encoded, which nobody asked for")
        if status == 416:
            raise _Doubt("range", SourceChanged(f"{file.path} has no bytes {start} to {start + length - 1}: it was "
                                                f"{file.size} bytes long when it was listed. {_ADVICE}"))  # fmt: skip
        whole = status == 200 and start == 0 and length == file.size and response.length == file.size
        if status == 200 and not whole:
            if "html" in headers.get("content-type", ""):
                raise Fault("html", "a web page came instead of data: a portal or proxy is in the way")
            raise _Doubt("no_range", RemoteError(f"{file.path}: its server does not answer requests for a range of "
                                                 "bytes. Use one that does, or copy the file to disk."))  # fmt: skip
        if status not in (200, 206):
            raise_for(response)
        total: int | None = file.size
        if not whole:
            total = _check_range(headers.get("content-range", ""), start, length)
        if response.length is not None and response.length != length:
            raise Fault("short", f"{response.length} bytes instead of {length}")
        data = bytearray(length)
        response.read_into(memoryview(data))
        self._client.tally.add(bytes=length)
        return Answer(data, headers.get("etag", ""), total)

    def _check(self, file: FileRef, answer: Answer, length: int) -> None:
        """Whether the bytes are of the file that was listed."""
        if len(answer.data) != length:
            raise Fault("short", f"{len(answer.data)} bytes instead of {length}")
        if answer.total is not None and answer.total != file.size:
            raise _Doubt("size", SourceChanged(f"{file.path} changed: it was {file.size} bytes long, it is "
                                               f"{answer.total}. {_ADVICE}"))  # fmt: skip
        etag = plain_etag(answer.etag)
        if not etag:
            return
        with self._lock:
            # The Hub's own addresses name a commit, whose content cannot change; what serves the bytes
            # has ETags of its own, so those are compared with each other.
            listed = "" if file.path.startswith("hf://") else plain_etag(file.etag)
            before = listed or self._etags.get(file.path, "")
            if not before:
                self._remember(self._etags, file.path, etag)
                return
        if etag != before:
            raise _Doubt("etag", SourceChanged(f"{file.path} changed: its ETag was {before}, it is {etag}. {_ADVICE}"))

    def _forget(self, file: FileRef) -> None:
        with self._lock:
            self._found.pop(file.path, None)

    @staticmethod
    def _remember(table: OrderedDict[str, V], key: str, value: V) -> None:
        table[key] = value
        if len(table) > FILES:
            table.popitem(last=False)


_ADVICE = "Pin a revision (hf://…@sha), restore the file, or start a new run."


class _Doubt(Exception):
    """An answer that does not fit what is known of the file."""

    def __init__(self, reason: str, error: PenstockError) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error


def _linked(file: FileRef, response: Response) -> None:
    """The Hub says of which content its redirect is: it must be the listing's."""
    linked = plain_etag(response.headers.get("x-linked-etag", ""))
    listed = plain_etag(file.etag)
    if linked and listed and len(linked) == len(listed) and linked != listed:
        raise _Doubt("etag", SourceChanged(f"{file.path} changed: its ETag was {listed}, it is {linked}. {_ADVICE}"))


def plain_etag(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')


def _check_range(value: str, start: int, length: int) -> int | None:
    """The size of the whole file, from a Content-Range that is the one asked for."""
    unit, _, rest = value.partition(" ")
    span, _, total = rest.partition("/")
    if unit != "bytes" or span != f"{start}-{start + length - 1}":
        raise Fault("wrong_range", f"bytes {start}-{start + length - 1} were asked for, {value or 'no range'} came")
    return int(total) if total.isdigit() else None


def _no_access(file: FileRef, status: int) -> PenstockError:
    if status in (404, 410):
        return SourceChanged(f"{file.path} is gone: its server answers {status}. {_ADVICE}")
    return AccessDenied(
        f"{file.path}: its server refuses access ({status}). A signed address may have expired, or a login is missing: "
        "make a new address, or give the login as https://user:password@host/…"
    )


class Usual:
    """How long reads of a size usually take, and so when one takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[int, deque[float]] = {}

    def took(self, length: int, seconds: float) -> None:
        with self._lock:
            self._recent.setdefault(length.bit_length(), deque(maxlen=RECENT)).append(seconds)

    def too_long(self, length: int) -> float | None:
        """Seconds after which a second request is worth its bytes: beyond the slowest twentieth."""
        with self._lock:
            recent = sorted(self._recent.get(length.bit_length(), ()))
        if len(recent) < ENOUGH:
            return None
        p95 = recent[min(len(recent) - 1, int(0.95 * len(recent)))]
        # Where all reads share a link, one a little slower than most is just waiting its turn.
        return 1.5 * p95 + 0.1


__all__ = ["RemoteFiles", "Usual", "plain_etag"]

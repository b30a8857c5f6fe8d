"""Ranges of remote files: retried within a budget, and checked before they are believed.

An answer is believed if it is the range asked for, with its length, of a file with the size and
ETag of the listing. A retry asks only for the bytes that are still missing. An attempt that takes
longer than most is given up early and made again on another connection.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import hub_token
from penstock.errors import LoaderClosed, PenstockError, RemoteError, SourceError
from penstock.options import RemoteOptions
from penstock.read.http import Deadline, Http, Reading, Refused, RequestError, Response, address
from penstock.read.hub import refusal, resolve_url
from penstock.types import MODIFIED, FileRef, MiB, version_change

if TYPE_CHECKING:
    from penstock.feed.worker_pool import ThreadPool
    from penstock.read.buckets import Bucket
    from penstock.read.http import Place
    from penstock.read.listing import Secret

log = logging.getLogger("penstock")

T = TypeVar("T")

PIECE = 8 * MiB
"""A longer range is fetched in pieces, in parallel."""
MAX_BODY = 64 * MiB
"""The longest listing or card."""
MAX_PAUSE_S = 10.0
BELIEVED = 3
"""How often an error that ends a run has to be met to be believed."""
RESTARTS = 8
"""Slow attempts that may be made again, beyond a tenth of all requests."""
GONE = ("EntryNotFound", "RevisionNotFound")
"""What the Hub says of a file that was removed."""
NO_RANGES = "its server does not answer requests for a range of bytes. Copy the file to disk."
ADVICE = "Pin a revision (hf://…@sha), restore the file, or start a new run."


class NetworkStats:
    """Counts of requests, bytes, seconds and faults, shared by many threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._reads: dict[int, deque[float]] = {}
        """How long recent reads took, for each power of two of their lengths."""
        self._lock = threading.Lock()

    def add(self, fault: str = "", **counts: Any) -> None:
        with self._lock:
            self.counts.update(counts)
            self.faults.update([fault] if fault else [])

    def add_read(self, length: int, seconds: float) -> None:
        with self._lock:
            self._reads.setdefault(length.bit_length(), deque(maxlen=128)).append(seconds)

    def slow_s(self, length: int) -> float | None:
        """Return a time that few reads of this length take, or None to be patient."""
        with self._lock:
            recent = sorted(self._reads.get(length.bit_length(), ()))
            # If everything has become slow, more requests would make it slower.
            many = self.counts["restarts"] > RESTARTS + self.counts["requests"] // 10
        # Reads that share a link take turns: one a little slower than most is not stuck.
        known = len(recent) >= 8 and not many
        return 1.5 * recent[int(0.95 * len(recent))] + 0.1 if known else None

    def times(self) -> dict[str, Any]:
        """Return where requests spend their time, over all threads."""
        with self._lock:
            waits, counts = sorted(chain(*self._reads.values())) or [0.0], self.counts
            parts = ("connect_s", "first_byte_s", "body_s", "retry_s")
            return {
                **{name: round(counts[name], 6) for name in parts},
                **{f"p{p}_ms": round(1e3 * waits[len(waits) * p // 101], 3) for p in (50, 95, 99)},
                "requests": counts["requests"],
                "retries": self.faults.total(),
                "bytes": counts["bytes"],
            }

    def totals(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requests": self.counts["requests"],
                "fetched_bytes": self.counts["bytes"],
                "hedges": self.counts["restarts"],
                "retry_wait_ms": round(1e3 * self.counts["retry_s"]),
                **{f"fault {name}": n for name, n in self.faults.items()},
            }


class Network:
    """The connections, limits, retries and counts of one run."""

    def __init__(self, limits: RemoteOptions, threads: ThreadPool | None = None) -> None:
        self.limits = limits
        self.threads = threads
        """Run what can be done in parallel; None to do one after another."""
        self.stats = NetworkStats()
        self.http = Http(self.stats.add)
        self._closing = threading.Event()
        self._random = random.Random()
        # Reentrant: garbage collection may close a loader on a thread that holds the lock.
        self._lock = threading.RLock()
        self._deadlines: set[Deadline] = set()

    def retry(
        self, what: str, attempt: Callable[[Deadline], T], *, setting: str = "metadata_budget",
        first_s: float | None = None,
    ) -> T:  # fmt: skip
        """Return the result of the first attempt that succeeds, within the budget.

        what: names it in messages, without secrets. setting: the option with the budget.
        first_s: how long the first attempt may take before it is given up as unusually slow.
        """
        began, budget_s, pause = (
            time.monotonic(),
            getattr(self.limits, setting),
            self.limits.backoff,
        )
        tried: Counter[str] = Counter()
        met: Counter[str] = Counter()
        last: RequestError | None = None
        while True:
            try:
                return self._try(attempt, began + budget_s, first_s)
            except RequestError as error:
                failed = error
            hedge, first_s = first_s is not None and failed.reason == "deadline", None
            if hedge:
                self.stats.add(restarts=1)
                continue
            self.stats.add(fault=failed.reason)
            tried[failed.reason] += 1
            met[failed.detail] += 1
            if last is None or failed.reason != "deadline":
                last = failed  # an attempt that had little time left says nothing of the server
            delay = pause * self._random.uniform(0.5, 1.0)
            pause = min(2 * pause, MAX_PAUSE_S, budget_s / 10)
            if failed.retry_after is not None:
                delay = max(delay, min(failed.retry_after, self.limits.retry_after_cap))
            spent = time.monotonic() - began
            over = spent + delay >= budget_s
            if last.final is not None and (over or met[last.detail] >= BELIEVED):
                final = last.final
                raise final if what in str(final) else type(final)(f"{what}: {final}") from last
            if over:
                reasons = ", ".join(f"{name} {n}x" for name, n in tried.most_common())
                raise RemoteError(
                    f"{what} cannot be fetched: {tried.total()} attempts in {spent:.1f} s failed "
                    f"({reasons}); at last: {last.detail}. See that the server can be reached, or "
                    f"allow more time: RemoteOptions({setting}=…)."
                ) from last
            level = logging.WARNING if tried.total() in (3, 10, 30) else logging.INFO
            log.log(level, "%s: %s; next attempt in %.1f s", what, failed.detail, delay)
            self.stats.add(retry_s=delay)
            self._closing.wait(delay)

    def _try(self, attempt: Callable[[Deadline], T], until: float, limit_s: float | None) -> T:
        """Make an attempt that a shutdown cancels."""
        deadline = Deadline(self.limits, until)
        if limit_s is not None:
            deadline.until = min(deadline.until, deadline.began + limit_s)
        with self._lock:
            if self._closing.is_set():
                raise LoaderClosed("the loader was shut down")
            self._deadlines.add(deadline)
        try:
            return attempt(deadline)
        finally:
            with self._lock:
                self._deadlines.discard(deadline)

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of calls, made in parallel if there are threads for it."""
        if self.threads is None or len(calls) < 2:
            return [call() for call in calls]
        futures = [self.threads.submit(call, urgent=True) for call in calls[1:]]
        try:
            return [calls[0](), *map(finish, futures, calls[1:])]
        finally:
            for future in futures:
                future.cancel()

    def get(self, url: str, what: str, token: str | None, read: Reading[T]) -> T:
        """Return what `read` makes of a small body and its headers, or raise `Refused`."""
        place, headers = address(url, token)

        def attempt(deadline: Deadline) -> T:
            with self.http.request(place, headers, deadline) as response:
                response.check()
                body = b"".join(response.parts(MAX_BODY))
                self.stats.add(bytes=len(body))
                return read(body, response.headers)

        return self.retry(what, attempt)

    def probe(self, url: str, path: str) -> tuple[int, str]:
        """Return the size and version of a file, by a range: addresses signed for GET refuse HEAD."""
        place, headers = address(url)

        def attempt(deadline: Deadline) -> tuple[int, str]:
            with self.http.request(place, headers | {"Range": "bytes=0-0"}, deadline) as response:
                total = response.headers.get("content-range", "").rpartition("/")[2]
                response.check()
                if response.status != 206 or not total.isdigit():
                    raise RequestError("no_range", RemoteError(f"{path}: {NO_RANGES}"))
                return int(total), response.version()

        try:
            return self.retry(path, attempt)
        except Refused as refused:
            raise _refusal(path, refused, f"does not exist ({refused.status}).") from None

    def stop(self) -> None:
        """Cancel all requests and pauses, without waiting."""
        with self._lock:
            self._closing.set()
            for deadline in self._deadlines:
                deadline.cancel()

    def close(self) -> None:
        self.stop()
        self.http.close()


def finish(future: Future[T], call: Callable[[], T]) -> T:
    """Return a future's result; make the call here if no thread has begun with it.

    So threads of the pool may wait for each other's calls: only those that run are waited for.
    """
    return call() if future.cancel() else future.result()


class RemoteFiles:
    """The remote files of one run."""

    def __init__(self, network: Network, secrets: Mapping[str, Secret]) -> None:
        self._network, self._secrets = network, secrets
        self._found: dict[str, Place] = {}
        """Where redirects led: signed addresses, which hold for a while."""
        self._etags: dict[str, str] = {}
        self._buckets: dict[str, Bucket] = {}

    def read(self, file: FileRef, start: int, length: int) -> bytearray:
        """Return a range of a file, which must lie within it."""
        return self.read_all([(file, start, length)])[0]

    def read_all(self, ranges: Sequence[tuple[FileRef, int, int]]) -> list[bytearray]:
        """Return ranges of files, fetched in parallel; long ones in pieces."""
        out = [bytearray(length) for _, _, length in ranges]
        calls = [
            partial(self._read, file, start + at, memoryview(data)[at : at + PIECE])
            for (file, start, length), data in zip(ranges, out, strict=True)
            for at in range(0, length, PIECE)
        ]
        self._network.gather(calls)
        return out

    def ahead(self, file: FileRef, start: int, length: int) -> Callable[[], bytearray]:
        """Begin to read a range, and return a function that waits for it."""
        read = partial(self.read, file, start, length)
        if self._network.threads is None:
            return read
        return partial(finish, self._network.threads.submit(read, urgent=True), read)

    def _read(self, file: FileRef, start: int, view: memoryview) -> None:
        done, stats = 0, self._network.stats

        def attempt(deadline: Deadline) -> None:
            nonlocal done
            length = len(view) - done
            if not file.path.startswith(("http://", "https://", "hf://")):
                self._read_bucket(file, start, view, deadline)
            else:
                with self._opened(file, start + done, length, deadline) as response:
                    try:
                        response.read_into(view[done:])
                    finally:
                        stats.add(bytes=response.done)
                        # Without an ETag nothing tells that the rest is of the same version.
                        done += response.done if file.path in self._etags else 0
            stats.add_read(length, time.monotonic() - deadline.began)

        slow_s = stats.slow_s(len(view)) if self._network.limits.hedge else None
        self._network.retry(file.path, attempt, setting="retry_budget", first_s=slow_s)

    def _read_bucket(self, file: FileRef, start: int, view: memoryview, deadline: Deadline) -> None:
        from penstock.read.buckets import Bucket, place

        root, key = place(file.path)
        bucket = self._buckets.setdefault(root, Bucket(self._network, root))
        self._check(file, *bucket.read_into(key, start, view, deadline))

    # One attempt

    @contextmanager
    def _opened(self, file: FileRef, start: int, n: int, deadline: Deadline) -> Iterator[Response]:
        """Open a range where it was found last, else at its own address."""
        hub, secret = file.path.startswith("hf://"), self._secrets.get(file.path)
        url = resolve_url(file.path) if hub else secret.text if secret else file.path
        place, headers = address(url, hub_token() if hub else None)
        if (found := self._found.get(file.path)) is not None:
            place, headers = found, {}
        headers["Range"] = f"bytes={start}-{start + n - 1}"
        try:
            with self._network.http.request(place, headers, deadline) as response:
                elsewhere = response.place.origin != place.origin
                try:
                    self._check_head(file, response, start, n)
                except Refused as refused:
                    if found is not None:
                        raise RequestError("expired", f"it answered {refused.status}") from None
                    final = _refusal(file.path, refused, f"is gone ({refused.status}). {ADVICE}")
                    if hub and not elsewhere and refused.code not in GONE:
                        final = refusal(file.path, refused)
                    raise RequestError(f"status_{refused.status}", final) from None
                if elsewhere:
                    self._found[file.path] = response.place
                yield response
        except RequestError:
            self._found.pop(file.path, None)  # it may have expired, or another server may be better
            raise

    def _check_head(self, file: FileRef, response: Response, start: int, length: int) -> None:
        """Raise unless the head of an answer promises the range asked for, of the file listed."""
        wanted = f"bytes {start}-{start + length - 1}"
        if response.status == 416:
            text = f"{file.path} has no {wanted}: it was {file.size} bytes long. {ADVICE}"
            raise RequestError("range", SourceError(text))
        response.check()
        total: int | None = file.size
        if response.status == 206:
            came = response.headers.get("content-range", "")
            span, _, size = came.partition("/")
            if span != wanted:
                raise RequestError("wrong_range", f"{wanted} were asked for, {came[:60]!r} came")
            total = int(size) if size.isdigit() else None
        elif not (start == 0 and length == file.size == response.length):
            raise RequestError("no_range", RemoteError(f"{file.path}: {NO_RANGES}"))
        if response.length not in (None, length):
            reason = "short" if (response.length or 0) < length else "long"
            raise RequestError(reason, f"{response.length} bytes instead of {length}")
        self._check(file, response.version(), total)

    def _check(self, file: FileRef, version: str, total: int | None) -> None:
        """Raise unless an answer is of the file that was listed."""
        if total is not None and total != file.size:
            text = f"{file.path} changed: it was {file.size} bytes long, it is {total}. {ADVICE}"
            raise RequestError("size", SourceError(text))
        before = file.etag
        # A commit of the Hub cannot change, and its storage may have ETags of its own.
        if not before or (file.path.startswith("hf://") and len(before) != len(version)):
            before = self._etags.get(file.path, "")
        dated = version.startswith(MODIFIED)
        if version and before and dated == before.startswith(MODIFIED) and version != before:
            text = f"{file.path} changed: {version_change(before, version)}. {ADVICE}"
            raise RequestError("etag", SourceError(text))
        if version and not dated:
            self._etags[file.path] = version


def _refusal(path: str, refused: Refused, missing: str) -> PenstockError:
    """Return the error for a file that its server refuses."""
    if refused.status in (404, 410):
        return SourceError(f"{path} {missing}")
    if refused.status not in (401, 403, 407, 451):
        text = f"{path}: its server answers {refused.status}, which a retry does not change."
        return RemoteError(text)
    return SourceError(
        f"{path}: its server refuses access ({refused.status}). A signed address may have expired, "
        "or a login is missing: https://user:password@host/…"
    )

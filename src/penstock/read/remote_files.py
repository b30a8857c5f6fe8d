"""Read ranges of remote files, retried within a budget and verified.

An answer is believed if it is the range asked for, with its length, of a file with the size and
ETag of the listing. A retry asks only for the bytes that are still missing. An attempt that takes
longer than most is given up early and made again on another connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from penstock.config import hub_token
from penstock.errors import RemoteError, SourceError
from penstock.read import http
from penstock.read.http import Deadline, Network, Refused, RequestError, Response
from penstock.read.hub import BUCKET, refusal, resolve_url
from penstock.read.listing import Secret
from penstock.types import MODIFIED, FileRef, MiB, version_change

if TYPE_CHECKING:
    from penstock.read.buckets import Bucket

PIECE = 8 * MiB
"""Longer ranges are fetched in pieces, in parallel."""
ADVICE = "Pin a revision (hf://…@sha), restore the file, or start a new run."


class RemoteFiles:
    """The remote files of one run."""

    def __init__(self, network: Network, secrets: Mapping[str, Secret]) -> None:
        self._network, self._secrets = network, secrets
        self._found: dict[str, http.Place] = {}
        """Targets of redirects: signed addresses, which are valid for a while."""
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
        return self._network.begin(partial(self.read, file, start, length))

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
                        # Without an ETag, the rest might be of another version.
                        done += response.done if file.path in self._etags else 0
            stats.add_read(length, time.monotonic() - deadline.began)

        slow_s = stats.slow_s(len(view)) if self._network.limits.hedge else None
        self._network.retry(file.path, attempt, "retry_budget", slow_s)

    def _read_bucket(self, file: FileRef, start: int, view: memoryview, deadline: Deadline) -> None:
        from penstock.read.buckets import Bucket, place

        root, key = place(file.path)
        bucket = self._buckets.setdefault(root, Bucket(self._network, root))
        self._check(file, *bucket.read_into(key, start, view, deadline))

    # One attempt

    @contextmanager
    def _opened(self, file: FileRef, start: int, n: int, deadline: Deadline) -> Iterator[Response]:
        """Open a range at the last redirect's target, or else at the file's own address."""
        hub, secret = file.path.startswith("hf://"), self._secrets.get(file.path)
        url = resolve_url(file.path) if hub else secret.text if secret else file.path
        place, headers = http.address(url, hub_token() if hub else None)
        if (found := self._found.get(file.path)) is not None:
            place, headers = found, {}
        headers["Range"] = f"bytes={start}-{start + n - 1}"
        try:
            with self._network.request(place, headers, deadline) as response:
                elsewhere = response.place.origin != place.origin
                try:
                    self._check_head(file, response, start, n)
                except Refused as refused:
                    if found is not None:
                        raise RequestError("expired", f"it answered {refused.status}") from None
                    final = refused.explained(file.path, f"is gone ({refused.status}). {ADVICE}")
                    if hub and not elsewhere and refused.status != 404:
                        final = refusal(file.path, refused)
                    raise RequestError(f"status_{refused.status}", final) from None
                if elsewhere:
                    self._found[file.path] = response.place
                yield response
        except RequestError:
            self._found.pop(file.path, None)  # it may have expired, or another server may be better
            raise

    def _check_head(self, file: FileRef, response: Response, start: int, length: int) -> None:
        """Raise unless the headers announce the requested range of the listed file."""
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
            raise RequestError("no_range", RemoteError(f"{file.path}: {http.NO_RANGES}"))
        if response.length not in (None, length):
            reason = "short" if (response.length or 0) < length else "long"
            raise RequestError(reason, f"{response.length} bytes instead of {length}")
        if response.xet_hash not in ("", file.etag) and file.path.startswith(BUCKET):
            raise _changed(file, file.etag, response.xet_hash)
        self._check(file, response.version(), total)

    def _check(self, file: FileRef, version: str, total: int | None) -> None:
        """Raise unless the size and version are those of the listing."""
        if total is not None and total != file.size:
            text = f"{file.path} changed: it was {file.size} bytes long, it is {total}. {ADVICE}"
            raise RequestError("size", SourceError(text))
        before = file.etag
        # A commit of the Hub cannot change, and its storage may have ETags of its own.
        other = len(before) != len(version) or file.path.startswith(BUCKET)
        if not before or (file.path.startswith("hf://") and other):
            before = self._etags.get(file.path, "")
        dated = version.startswith(MODIFIED)
        if version and before and dated == before.startswith(MODIFIED) and version != before:
            raise _changed(file, before, version)
        if version and not dated:
            self._etags[file.path] = version


def _changed(file: FileRef, before: str, now: str) -> RequestError:
    text = f"{file.path} changed: {version_change(before, now)}. {ADVICE}"
    return RequestError("etag", SourceError(text))

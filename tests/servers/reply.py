"""A request as it arrived, and the answer to it before any fault.

In:    a parsed request and the content it asks for.
Out:   a `Reply`: status, headers and a span of a content.
Where: the thread of a connection.
State: a `Call` notes what has been sent so far, so that the log also shows calls that are still under way.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import responses
from typing import Any

from tests.servers.content import Content


@dataclass(slots=True)
class Call:
    """A request as a server saw it, and how far its answer has come."""

    time: float
    """When it had arrived, by `time.monotonic()`."""
    port: str
    """`"hub"`, `"cdn"` or `"files"`."""
    connection: int
    """Requests with the same number came over the same connection."""
    method: str
    target: str
    """The address as it was sent: still quoted, with the query."""
    path: str
    query: str
    headers: dict[str, str]
    """All of them, with names in lower case."""
    body: bytes = b""
    alias: str = ""
    """Another path by which a fault may know this request: on the cdn, that of the file on the hub."""
    status: int = 0
    """0 while nothing has been answered."""
    sent: int = 0
    """Bytes of the body sent so far, without headers."""
    fault: str = ""
    """The kind of fault that struck, or an empty string."""

    @property
    def range(self) -> tuple[int, int | None] | None:
        """What the Range header asked for, as a slice: `(a, b + 1)`, `(a, None)` or `(-n, None)`."""
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", "").strip())
        if not found or not any(found.groups()):
            return None
        first, last = found.groups()
        if not first:
            return -int(last), None
        return int(first), int(last) + 1 if last else None

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ").strip()


EMPTY = Content(b"")


@dataclass(slots=True)
class Reply:
    """An answer: what its head says, and the span of a content that is its body."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content: Content = EMPTY
    lo: int = 0
    hi: int = 0
    total: int = 0
    """The size that Content-Range names."""
    length: int | None = None
    """The length that the head states, where it is not that of the body."""
    content_range: bool = True
    """Whether a 206 states its span by itself."""

    @property
    def body_bytes(self) -> int:
        return self.hi - self.lo

    def head(self, chunked: bool = False) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {responses.get(self.status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if self.status == 206 and self.content_range:
            lines.append(f"Content-Range: bytes {self.lo}-{self.hi - 1}/{self.total}")
        if self.status == 416:
            lines.append(f"Content-Range: bytes */{self.total}")
        if chunked:
            lines.append("Transfer-Encoding: chunked")
        elif self.status != 304:
            lines.append(
                f"Content-Length: {self.body_bytes if self.length is None else self.length}"
            )
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def reply_bytes(
    status: int, kind: str, body: bytes, headers: dict[str, str] | None = None
) -> Reply:
    return Reply(
        status, {"Content-Type": kind, **(headers or {})}, Content(body), 0, len(body), len(body)
    )


def reply_json(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Reply:
    body = json.dumps(value, separators=(",", ":")).encode()
    return reply_bytes(status, "application/json; charset=utf-8", body, headers)


def reply_error(status: int, message: str, headers: dict[str, str] | None = None) -> Reply:
    return reply_json({"error": message}, headers, status)


def reply_file(
    call: Call,
    content: Content,
    etag: str,
    headers: dict[str, str] | None = None,
    *,
    dated: bool = True,
) -> Reply:
    """All of a file, or the range asked for. `etag` comes with its quotes, or is empty."""
    own = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **(headers or {})}
    if dated:
        own["Last-Modified"] = formatdate(content.modified, usegmt=True)
    if etag:
        own["ETag"] = etag
    size = content.size
    whole = Reply(200, own, content, 0, size, size)
    # A HEAD describes the whole file.
    if call.range is None or call.method != "GET":
        return whole
    first, stop = call.range
    lo = first if first >= 0 else max(0, size + first)
    hi = size if stop is None else min(stop, size)
    if lo >= hi:
        return Reply(416, own, total=size)
    return Reply(206, own, content, lo, hi, size)

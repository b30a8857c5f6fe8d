"""Faults: what can go wrong with an answer, and which request it happens to.

In:    a request and the answer that it would get.
Out:   the fault that strikes it, if any, and the answer as the fault changes it.
Where: the threads of the connections, one at a time.
State: each fault counts what it let pass and what it struck. `Chaos` decides by its seed and by the request
       itself (path, range, how often it came), so the same requests meet the same faults in any order.
"""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from random import Random
from typing import Any

from tests.servers.content import Content, Flipped
from tests.servers.reply import Call, Reply, reply_bytes

KINDS: dict[str, dict[str, Any]] = {
    "status": {"code": 503, "retry_after": None, "headers": {}, "body": b""},
    "silence": {},
    "stall": {},
    "drip": {"bytes_per_s": 2.0},
    "reset": {},
    "fin": {},
    "truncated_chunked": {},
    "no_range": {},
    "wrong_range": {"shift": 16},
    "short": {"keep": None},
    "long": {},
    "etag": {"value": '"another-version"'},
    "size": {},
    "html": {
        "body": b"<!DOCTYPE html><html><body><h1>Log in to use this network</h1></body></html>"
    },
    "gzip": {},
    "redirect": {"to": "loop", "code": 302},
    "flip": {"bits": 1, "seed": 0},
    "slow": {"delay_s": 1.0},
    "garbage": {"data": b"\x16\x03\x01\x00\xa5 this is no HTTP \x00\xff\r\n\r\n"},
    "huge_headers": {"header_bytes": 1 << 20},
}
"""Every kind of fault, with its details and their defaults."""

SURVIVABLE = (
    "status", "silence", "stall", "drip", "reset", "fin", "truncated_chunked",
    "no_range", "wrong_range", "short", "html", "gzip", "slow", "garbage",
)  # fmt: skip
"""Kinds that a client can notice by itself and get over by asking again."""

CUTTING = ("stall", "drip", "reset", "fin", "truncated_chunked")
"""Kinds that strike in the middle of a body, after a number of bytes."""


def _matches(pattern: str, port: str, method: str, call: Call) -> bool:
    return (
        port in ("any", call.port)
        and method in ("*", call.method)
        and (
            fnmatchcase(call.path, pattern)
            or (call.alias != "" and fnmatchcase(call.alias, pattern))
        )
    )


class Fault:
    """Something that goes wrong with requests that match.

    A fault strikes only where it can: one that changes a range passes over answers without one, and one
    that strikes `after` some bytes of the body passes over shorter bodies.
    """

    def __init__(
        self, kind: str, *, path: str = "*", port: str = "any", method: str = "GET",
        times: int | None = 1, skip: int = 0, after: int = 0, **details: Any,
    ) -> None:  # fmt: skip
        """`path`: a shell pattern for the address's path; on the cdn, for the file's path on the hub as well.
        `port`: "hub", "cdn", "files" or "any". `method`: "GET", "HEAD", … or "*".
        `times`: how often it strikes, `None` for ever. `skip`: how many requests it lets pass before.
        `after`: bytes of the body sent before it strikes; -1 means before the headers.
        """
        assert set(details) <= set(KINDS[kind]), f"{kind} has no such details: {details}"
        self.kind = kind
        self.path = path
        self.port = port
        self.method = method
        self.times = times
        self.skip = skip
        self.after = after
        self.details: dict[str, Any] = {**KINDS[kind], **details}
        self.seen = 0
        """Requests that it could have struck."""
        self.struck = 0
        """Requests that it did strike."""
        self._lock = threading.Lock()

    def choose(self, call: Call, reply: Reply) -> Fault | None:
        """Itself, if it strikes this request."""
        if not _matches(self.path, self.port, self.method, call) or not can_strike(
            self.kind, self.after, call, reply
        ):
            return None
        with self._lock:
            self.seen += 1
            if self.seen <= self.skip or (self.times is not None and self.struck >= self.times):
                return None
            self.struck += 1
            return self


class Chaos:
    """Faults at random, by a seed: each request that matches is struck with the probability `rate`."""

    def __init__(
        self, seed: int, rate: float = 0.05, kinds: Sequence[str] = SURVIVABLE,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """`details` sets details by kind: `{"slow": {"delay_s": 0.2}}`."""
        self.seed = seed
        self.rate = rate
        self.kinds = tuple(kinds)
        self.details = details or {}
        self.struck: Counter[str] = Counter()
        """How often each kind has struck."""
        self._came: Counter[str] = Counter()
        self._lock = threading.Lock()

    def choose(self, call: Call, reply: Reply) -> Fault | None:
        """The fault that strikes this request, if any."""
        key = f"{call.port} {call.method} {call.alias or call.path} {call.headers.get('range', '')}"
        with self._lock:
            self._came[key] += 1
            random = Random(f"{self.seed} {key} {self._came[key]}")
            possible = [kind for kind in self.kinds if can_strike(kind, 0, call, reply)]
            if random.random() >= self.rate or not possible:
                return None
            kind = random.choice(possible)
            self.struck[kind] += 1
        details = dict(self.details.get(kind, {}))
        if kind == "status":
            details.setdefault("code", random.choice((408, 429, 500, 502, 503, 504)))
        if kind == "flip":
            details.setdefault("seed", random.getrandbits(32))
        after = 0
        if kind in CUTTING and call.method != "HEAD":
            # -1: also the head may be missing.
            after = random.randrange(-1, reply.body_bytes)
        return Fault(kind, after=after, **details)


def can_strike(kind: str, after: int, call: Call, reply: Reply) -> bool:
    """Whether a fault of this kind would make a difference to this answer."""
    body = 0 if call.method == "HEAD" else reply.body_bytes
    full = reply.status in (200, 206)
    match kind:
        case "stall" | "drip" | "reset" | "fin":
            return after <= 0 or body > after
        case "truncated_chunked":
            return full and body > max(0, after)
        case "no_range" | "size" | "long":
            return reply.status == 206
        case "wrong_range":
            return reply.status == 206 and reply.total > 1
        case "short":
            return full and body > 1
        case "flip" | "gzip":
            return full and body > 0
        case "etag":
            return "ETag" in reply.headers
    return True


def rewrite(fault: Fault, call: Call, reply: Reply) -> Reply:
    """The answer as this fault changes it; faults of the connection leave it as it is."""
    details = fault.details
    headers = dict(reply.headers)
    match fault.kind:
        case "status":
            headers = dict(details["headers"])
            if details["retry_after"] is not None:
                headers["Retry-After"] = str(details["retry_after"])
            return reply_bytes(details["code"], "text/plain", details["body"], headers)
        case "html":
            return reply_bytes(200, "text/html; charset=utf-8", details["body"])
        case "redirect":
            to = details["to"]
            address = to(call.path) if callable(to) else call.target if to == "loop" else to
            return Reply(details["code"], {"Location": address})
        case "no_range":
            return replace(reply, status=200, lo=0, hi=reply.total)
        case "wrong_range":
            return _shifted(reply, details["shift"])
        case "short":
            keep = reply.body_bytes // 2 if details["keep"] is None else details["keep"]
            return replace(reply, hi=reply.lo + max(1, min(keep, reply.body_bytes - 1)))
        case "etag":
            return replace(reply, headers=headers | {"ETag": details["value"]})
        case "size":
            return replace(reply, total=reply.total + 1)
        case "gzip" | "long":
            packed = reply.content.read(reply.lo, reply.hi) + b"more"
            if fault.kind == "gzip":
                packed = gzip.compress(packed[:-4], 1, mtime=0)
                headers["Content-Encoding"] = "gzip"
            length = len(packed)
            if reply.status == 206:
                headers["Content-Range"] = f"bytes {reply.lo}-{reply.hi - 1}/{reply.total}"
            return Reply(
                reply.status, headers, Content(packed), 0, length, reply.total, content_range=False
            )
        case "flip":
            bits = range(8 * reply.lo, 8 * reply.hi)
            flips: Counter[int] = Counter()
            for bit in Random(details["seed"]).sample(bits, min(details["bits"], len(bits))):
                flips[bit // 8] |= 1 << bit % 8
            return replace(reply, content=Flipped(reply.content, flips))
        case "huge_headers":
            for number in range(max(1, details["header_bytes"] // 4096)):
                headers[f"X-Padding-{number}"] = "x" * 4096
            return replace(reply, headers=headers)
    return reply


def _shifted(reply: Reply, shift: int) -> Reply:
    """The same number of bytes from another place, or what the file has of them."""
    lo = reply.lo + shift
    if lo >= reply.total:
        lo = max(0, reply.lo - shift)
    if lo == reply.lo and reply.body_bytes > 1:
        lo += 1
    return replace(reply, lo=lo, hi=min(lo + reply.body_bytes, reply.total))

"""One connection: requests in, answers out, and the faults that a connection can have.

In:    an accepted socket.
Out:   parsed calls; answers written whole, or as far as a fault lets them go.
Where: the thread of the connection. Another thread may `shutdown()` the socket at any moment: every
       wait here ends then, with `Gone`.
State: bytes that were read past the end of a request.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.types import KiB, MiB
from tests.servers.content import Buffer
from tests.servers.faults import Fault
from tests.servers.reply import Call, Reply

CATCH_UP_S = 0.05


class Gone(Exception):
    """The connection is over: the other side left, the server is closing, or a fault ended it."""


class Link:
    """The bandwidth that all connections of a server share, in small slices, first come, first served."""

    def __init__(self, bytes_per_s: float) -> None:
        self.slice_bytes = int(max(1, min(128 * KiB, bytes_per_s / 200)))
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, size: int, ready_at: float) -> float:
        """When a slice that could have been sent since `ready_at` has gone through."""
        with self._lock:
            self._free_at = max(ready_at, self._free_at) + size / self._bytes_per_s
            return self._free_at


@dataclass(slots=True)
class Head:
    method: str
    target: str
    headers: dict[str, str]
    keep_alive: bool


class Wire:
    def __init__(self, sock: socket.socket, closing: threading.Event, link: Link | None) -> None:
        self._sock = sock
        self._closing = closing
        self._link = link
        self._read = bytearray()

    def wait(self, seconds: float) -> None:
        if seconds > 0 and self._closing.wait(seconds):
            raise Gone

    # Requests

    def _receive(self) -> None:
        try:
            data = self._sock.recv(64 * KiB)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._read += data

    def head(self) -> Head:
        """The next request's line and headers; waits as long as the other side likes."""
        while (end := self._read.find(b"\r\n\r\n")) < 0:
            self._receive()
        lines = self._read[:end].decode("latin-1").split("\r\n")
        del self._read[: end + 4]
        method, target, _ = lines[0].split(" ")
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return Head(method, target, headers, headers.get("connection", "").lower() != "close")

    def body(self, headers: dict[str, str]) -> bytes:
        length = int(headers.get("content-length", "0"))
        while len(self._read) < length:
            self._receive()
        body = bytes(self._read[:length])
        del self._read[:length]
        return body

    # Answers

    def _send(self, data: Buffer, sent: Callable[[int], None] = lambda count: None) -> None:
        """Write all of it. `sent` hears of bytes before they go, so that whoever has them finds them counted."""
        view = memoryview(data)
        while view:
            sent(len(view))
            try:
                count = self._sock.send(view)
            except OSError as error:
                sent(-len(view))
                raise Gone from error
            sent(count - len(view))
            view = view[count:]

    def answer(self, call: Call, reply: Reply, fault: Fault | None) -> None:
        """Write an answer, as far as the fault allows. Raises `Gone` where the fault ends the connection."""
        kind = fault.kind if fault else ""
        if fault and kind == "garbage":
            self._send(fault.details["data"])
            raise Gone
        if kind == "silence":
            self._hush()
        has_body = call.method != "HEAD" and reply.body_bytes > 0
        cut = (
            fault
            if fault and kind in ("stall", "drip", "reset", "fin", "truncated_chunked")
            else None
        )
        if (
            cut
            and cut.kind != "truncated_chunked"
            and (cut.after < 0 or (cut.after == 0 and not has_body))
        ):
            # Before the headers.
            if cut.kind == "drip":
                self._drip(reply.head(), cut.details["bytes_per_s"])
            else:
                self._break(cut)
        call.status = reply.status
        chunked = cut is not None and cut.kind == "truncated_chunked"
        head = reply.head(chunked)
        if not has_body:
            if not (cut and cut.kind == "drip"):
                self._send(head)
            return
        self._body(call, reply, head, cut)

    def _body(self, call: Call, reply: Reply, head: bytes, cut: Fault | None) -> None:
        def count(sent: int) -> None:
            call.sent += sent

        end = reply.hi if cut is None else min(reply.hi, reply.lo + max(0, cut.after))
        step = MiB if self._link is None else self._link.slice_bytes
        chunked = cut is not None and cut.kind == "truncated_chunked"
        if cut is None and reply.body_bytes <= min(step, 16 * KiB):
            # One segment for a small answer.
            self._pace(reply.body_bytes, time.monotonic())
            call.sent = reply.body_bytes
            self._send(head + reply.content.read(reply.lo, reply.hi))
            return
        if not (cut and cut.kind == "drip" and cut.after < 0):
            self._send(head)
        ready_at = time.monotonic()
        for piece in reply.content.pieces(reply.lo, end, step):
            ready_at = self._pace(len(piece), ready_at)
            if chunked:
                self._send(b"%x\r\n" % len(piece))
            self._send(piece, count)
            if chunked:
                self._send(b"\r\n")
        if cut and cut.kind == "drip":
            self._drip(reply.content.read(end, reply.hi), cut.details["bytes_per_s"], count)
        elif cut:
            self._break(cut)

    def _pace(self, size: int, ready_at: float) -> float:
        """Wait for a slice's turn on the link; returns when that was due."""
        if self._link is None:
            return 0.0
        # A late wake-up is made good by the next slices, or the link would be slower than it says.
        due = self._link.take(size, max(ready_at, time.monotonic() - CATCH_UP_S))
        self.wait(due - time.monotonic())
        return due

    # Faults

    def _hush(self) -> None:
        """Say nothing more, until the other side leaves or the server closes."""
        while True:
            self._receive()
            self._read.clear()

    def _drip(
        self, data: Buffer, bytes_per_s: float, sent: Callable[[int], None] = lambda count: None
    ) -> None:
        step = max(1, int(bytes_per_s / 20))
        view = memoryview(data)
        for start in range(0, len(view), step):
            self.wait(step / bytes_per_s)
            self._send(view[start : start + step], sent)
            if select.select([self._sock], [], [], 0)[0]:
                self._receive()

    def _break(self, fault: Fault) -> None:
        """Stop in the middle, in the way of this fault."""
        if fault.kind == "stall":
            self._hush()
        if fault.kind == "reset":
            self._drain()
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Gone

    def _drain(self) -> None:
        """Wait until what was sent has arrived: a reset throws away what is still on its way."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            waiting = struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
            if waiting == 0:
                return
            self.wait(0.001)

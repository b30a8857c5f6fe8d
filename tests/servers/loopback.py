"""A small HTTP/1.1 server on loopback, for one port or several, with latency, bandwidth and faults.

In:    connections to its ports.
Out:   what `answer()` says, as the faults leave it; a log of every request.
Where: a thread per port and one per connection, all named `loopback-…`.
State: the faults, the log and the open connections. `close()` shuts every socket down, which ends every
       wait, also in a stall, and joins every thread.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from copy import copy
from typing import Self
from urllib.parse import unquote

from tests.servers.faults import Chaos, Fault, rewrite
from tests.servers.reply import Call, Reply
from tests.servers.wire import Gone, Head, Link, Wire

JOIN_S = 2.0


class Loopback:
    """What the servers have in common. A server says what it answers in `answer()`."""

    def __init__(
        self, ports: tuple[str, ...], *, latency_s: float = 0.0, bandwidth: float | None = None, port: int = 0,
    ) -> None:  # fmt: skip
        self.latency_s = latency_s
        self._link = Link(bandwidth) if bandwidth else None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._faults: list[Fault | Chaos] = []
        self._calls: list[Call] = []
        self._connection_numbers = itertools.count()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._listeners = {
            name: socket.create_server(("127.0.0.1", 0 if i else port), backlog=512)
            for i, name in enumerate(ports)
        }
        self._addresses = {
            name: f"http://127.0.0.1:{listener.getsockname()[1]}"
            for name, listener in self._listeners.items()
        }
        self._acceptors = [
            threading.Thread(
                target=self._accept, args=item, name=f"loopback-{item[0]}", daemon=True
            )
            for item in self._listeners.items()
        ]

    def _listen(self) -> None:
        """Begin to answer: the last thing that a server does when it is made."""
        for thread in self._acceptors:
            thread.start()

    def answer(self, call: Call) -> Reply:
        raise NotImplementedError

    # For the test

    @property
    def log(self) -> list[Call]:
        """Every request so far, in the order of arrival, also those that are still being answered."""
        with self._lock:
            return [copy(call) for call in self._calls]

    def clear_log(self) -> None:
        with self._lock:
            self._calls.clear()

    def fault(self, fault: Fault | Chaos) -> None:
        """From now on this may happen. Where several faults match, the first that was given strikes."""
        with self._lock:
            self._faults.append(fault)

    def clear_faults(self) -> None:
        with self._lock:
            self._faults.clear()

    def close(self) -> None:
        """Stop listening, cut every connection, join every thread. May be called again."""
        with self._lock:
            self._closing.set()
            for sock in [*self._listeners.values(), *self._open.values()]:
                with contextlib.suppress(OSError):  # not connected any more
                    sock.shutdown(socket.SHUT_RDWR)
            for listener in self._listeners.values():
                listener.close()
            threads = [*self._acceptors, *self._open]
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            raise RuntimeError(f"still running {JOIN_S} s after close(): {', '.join(left)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The threads

    def _accept(self, port: str, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                raise
            with self._lock:
                if self._closing.is_set():
                    sock.close()
                    return
                number = next(self._connection_numbers)
                thread = threading.Thread(
                    target=self._serve,
                    args=(port, sock, number),
                    name=f"loopback-{port}-{number}",
                    daemon=True,
                )
                self._open[thread] = sock
                thread.start()

    def _serve(self, port: str, sock: socket.socket, connection: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(sock, self._closing, self._link)
        try:
            while self._one(wire, port, connection):
                pass
        except Gone:
            pass  # how every connection ends
        finally:
            with self._lock:
                sock.close()
                del self._open[threading.current_thread()]

    def _one(self, wire: Wire, port: str, connection: int) -> bool:
        """Read one request and answer it; whether the connection stays open for another."""
        head = wire.head()
        call = self._note(port, connection, head, wire.body(head.headers))
        reply = self.answer(call)
        fault = self._choose(call, reply)
        wire.wait(self.latency_s)
        if fault:
            call.fault = fault.kind
            if fault.kind == "slow":
                wire.wait(fault.details["delay_s"])
            reply = rewrite(fault, call, reply)
        wire.answer(call, reply, fault)
        return head.keep_alive

    def _note(self, port: str, connection: int, head: Head, body: bytes) -> Call:
        path, _, query = head.target.partition("?")
        with self._lock:
            call = Call(
                time.monotonic(), port, connection,
                head.method, head.target, unquote(path.encode("latin-1")), query, head.headers, body,
            )  # fmt: skip
            self._calls.append(call)
        return call

    def _choose(self, call: Call, reply: Reply) -> Fault | None:
        with self._lock:
            faults = list(self._faults)
        for fault in faults:
            if chosen := fault.choose(call, reply):
                return chosen
        return None

"""One HTTP exchange: a request, and an answer whose every wait has a deadline.

In:    a `Target` (where to), a method, headers, and the `Patience` of the attempt.
Out:   a `Response`: status, headers, and the body, read by the caller; or a `Fault`.
Where: fetch threads; whichever thread lists files.
State: idle connections, behind a lock.
Cost:  no Python per kilobyte: a body of known length is received straight into its buffer.

Why not `obstore` here, which reads the buckets: its HTTP store tells neither status nor headers, and
follows redirects on its own, wherever they lead. The wire format is h11's; nothing is followed unseen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import h11

from penstock.errors import RemoteError
from penstock.read.attempt import Fault, Patience
from penstock.read.connect import (
    MAX_HEAD,
    Connection,
    Connector,
    Dial,
    Resolve,
    Target,
    dial_directly,
    fault_of,
    resolve_here,
)
from penstock.types import MODIFIED, MiB

IDLE = 32
"""Connections kept for later."""
IDLE_S = 60.0
"""And for how long: what lies between may forget a connection that is idle for minutes, without a word."""
RECEIVE = MiB


class Spent(Protocol):
    """Adds up the time that the parts of exchanges take."""

    def __call__(
        self, *, connect_s: float = 0.0, first_byte_s: float = 0.0, body_s: float = 0.0
    ) -> None: ...


def _untold(*, connect_s: float = 0.0, first_byte_s: float = 0.0, body_s: float = 0.0) -> None:
    """Nobody wants to know."""


def version_in(headers: Mapping[str, str]) -> str:
    """What a server says that tells this content of a file from another: its ETag or, as many a plain server, its date."""
    etag = headers.get("etag", "").strip().removeprefix("W/").strip('"')
    date = headers.get("last-modified", "").replace(",", "").strip()
    return etag or (f"{MODIFIED}{date}" if date else "")


class Refused(Exception):
    """A server said no: a status that trying again would not change."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.body = body


class Response:
    """An answer whose body has not been read yet. A context manager."""

    def __init__(
        self,
        http: Http,
        connection: Connection,
        wire: h11.Connection,
        head: h11.Response,
        patience: Patience,
    ):
        self._http, self._connection, self._wire, self._patience = http, connection, wire, patience
        self.status: int = head.status_code
        self.headers: dict[str, str] = {}
        for name, value in head.headers:
            self.headers.setdefault(name.decode("ascii"), value.decode("latin-1"))
        self.private = connection.private
        length = self.headers.get("content-length", "")
        chunked = "transfer-encoding" in self.headers
        self.length = int(length) if length.isdigit() and not chunked else None
        self._whole = False
        self._came = time.perf_counter()
        patience.asked()
        self._keep = (
            head.http_version == b"1.1"
            and "close" not in self.headers.get("connection", "").lower()
        )

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self._patience.when_cancelled(None)
        self._http.spent(body_s=time.perf_counter() - self._came)
        if self._whole and self._keep and not self._patience.cancelled:
            self._http.give_back(self._connection)
        else:
            self._connection.close()

    def read_into(self, view: memoryview) -> None:
        """A body of just this length, straight into a buffer."""
        early, _ = self._wire.trailing_data  # what came with the head
        if self.length is None or len(early) > len(view):
            self._slowly_into(view)
            return
        view[: len(early)] = early
        at, end = len(early), len(view)
        sock, patience = self._connection.sock, self._patience
        while at < end:
            rest = view[at : at + RECEIVE]
            n = _guard(patience, partial(sock.recv_into, rest), sock)
            if n == 0:
                raise Fault("cut", f"the connection ended after {at} of {end} bytes")
            at += n
            if at < end:
                patience.moved(n)
        self._whole = True

    def _slowly_into(self, view: memoryview) -> None:
        body = self.read(len(view))
        if len(body) != len(view):
            raise Fault("short", f"{len(body)} bytes instead of {len(view)}")
        view[:] = body

    def read(self, limit: int) -> bytes:
        """The whole body, if it is no longer than this."""
        parts: list[bytes] = []
        have = 0
        while True:
            event = self._http.next_event(self._wire, self._connection, self._patience)
            if isinstance(event, h11.Data):
                have += len(event.data)
                if have > limit:
                    raise Fault("long", f"more than {limit} bytes came")
                parts.append(bytes(event.data))
            else:
                self._whole = isinstance(event, h11.EndOfMessage)
                self._keep = self._keep and not self._wire.trailing_data[0]
                return b"".join(parts)


def _guard(patience: Patience, act: Callable[[], Any], sock: Any) -> Any:
    """Something that waits for the other end, with the deadline and the names of its faults."""
    while True:
        try:
            sock.settimeout(patience.wait_s())
            result = act()
        except TimeoutError:
            patience.check()
            patience.waited()
        except OSError as error:
            patience.check()
            raise fault_of(error) from error
        else:
            patience.check()
            return result


class Http:
    """The connections of one run. Used by many threads at once."""

    def __init__(self, *, resolve: Resolve = resolve_here, dial: Dial = dial_directly) -> None:
        self._connector = Connector(resolve, dial)
        self.spent: Spent = _untold
        """Told how long the parts of an exchange took."""
        # Reentrant, because a garbage collection may close it on a thread that is in here.
        self._lock = threading.RLock()
        self._idle: list[Connection] = []
        self._closed = False

    def open(
        self, method: str, target: Target, headers: Mapping[str, str], patience: Patience
    ) -> Response:
        """Send a request and read the head of its answer. Nothing is followed."""
        while True:
            connection = self._connection(target, patience)
            try:
                return self._ask(method, target, headers, connection, patience)
            except BaseException as error:
                patience.when_cancelled(None)
                connection.close()
                if not isinstance(error, _Stale):  # closed while it was idle: no fault of anyone's
                    raise

    def _ask(
        self,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        connection: Connection,
        patience: Patience,
    ) -> Response:
        wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        message = _message(wire, method, target, headers, connection)
        patience.when_cancelled(connection.wake)
        patience.asked()
        reused, connection.used = connection.used, True
        begun = time.perf_counter()
        try:
            _send(patience, connection.sock, message)
            while True:
                event = self.next_event(wire, connection, patience)
                if isinstance(event, h11.Response):
                    self.spent(first_byte_s=time.perf_counter() - begun)
                    return Response(self, connection, wire, event, patience)
                if not isinstance(event, h11.InformationalResponse):
                    raise Fault("cut", "the connection ended before any answer")
        except Fault as fault:
            if reused and fault.reason in ("reset", "cut", "tls") and not patience.cancelled:
                raise _Stale from fault
            raise

    def next_event(self, wire: h11.Connection, connection: Connection, patience: Patience) -> Any:
        """The next piece of an answer."""
        while True:
            try:
                event = wire.next_event()
            except h11.RemoteProtocolError as error:
                cut = "closed" in str(error)
                break
            if event is not h11.NEED_DATA:
                return event
            data = _guard(patience, lambda: connection.sock.recv(RECEIVE), connection.sock)
            if not data and wire.their_state is h11.SEND_RESPONSE:
                raise Fault("cut", "the connection ended before any answer")
            patience.moved(len(data))
            wire.receive_data(data)
        # Out here: the error of h11 quotes the answer, and so perhaps an address that is a secret.
        if cut:
            raise Fault("cut", "the connection ended before the answer did")
        raise Fault("protocol", "the answer is no sound HTTP")

    # Connections

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end."""
        connection.idle_since = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                old = self._idle.pop(0) if len(self._idle) > IDLE else None
            else:
                old = connection
        if old is not None:
            old.close()

    def close(self) -> None:
        """Close what is idle, and keep nothing any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self, target: Target, patience: Patience) -> Connection:
        key = (*target.origin, target.redirected, target.private_ok)
        while True:
            with self._lock:
                at = next(
                    (i for i in range(len(self._idle) - 1, -1, -1) if self._idle[i].key == key),
                    None,
                )
                connection = self._idle.pop(at) if at is not None else None
            if connection is None:
                begun = time.perf_counter()
                try:
                    return self._connector.connect(target, key, patience)
                finally:
                    self.spent(connect_s=time.perf_counter() - begun)
            if time.monotonic() - connection.idle_since < IDLE_S and not connection.stale():
                return connection
            connection.close()


def _message(
    wire: h11.Connection,
    method: str,
    target: Target,
    headers: Mapping[str, str],
    connection: Connection,
) -> bytes:
    """A request as it goes over the wire."""
    try:
        given = {
            "Host": target.host,
            "Accept-Encoding": "identity",
            "User-Agent": "penstock",
            **headers,
        }
        asked = connection.before_path + target.path
        request = h11.Request(
            method=method, target=asked, headers=[*given.items(), *connection.headers.items()]
        )
        return (wire.send(request) or b"") + (wire.send(h11.EndOfMessage()) or b"")
    except (h11.LocalProtocolError, UnicodeError):
        pass  # what is raised must not have these as its context: they quote the header, and with it a token
    text = "no request can be made of its address and token: one of them has characters that no header may have"
    raise Fault("request", text, final=RemoteError(text))


def _send(patience: Patience, sock: Any, message: bytes) -> None:
    try:
        sock.settimeout(patience.wait_s())
        sock.sendall(message)
    except TimeoutError:
        raise patience.ran_out() from None
    except OSError as error:
        patience.check()
        raise fault_of(error) from error


class _Stale(Exception):
    """An idle connection was closed by its other end."""


__all__ = ["Connection", "Http", "Refused", "Response", "Target", "version_in"]

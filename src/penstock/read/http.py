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

import errno
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urljoin, urlsplit

import h11

from penstock.config import proxy_for
from penstock.errors import RemoteError
from penstock.read.attempt import Fault, Patience
from penstock.types import KiB, MiB

MAX_HEAD = 64 * KiB
IDLE = 32
"""Connections kept for later."""
RECEIVE = MiB

Resolve = Callable[[str, int, float], Sequence[tuple[Any, ...]]]
"""Addresses of a host, as `getaddrinfo` gives them, within some seconds."""
Dial = Callable[[tuple[Any, ...], float], socket.socket]
"""A connection to one of them, within some seconds."""


def resolve_here(host: str, port: int, timeout: float) -> Sequence[tuple[Any, ...]]:
    """The system's resolver, with the system's own deadline."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def dial_directly(address: tuple[Any, ...], timeout: float) -> socket.socket:
    """A plain connection."""
    family, kind, protocol, _, where = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout)
        sock.connect(where)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(frozen=True, slots=True)
class Target:
    """An address to ask, and how far it is trusted. Its url may be a secret: it is never shown."""

    url: str = field(repr=False)
    redirected: bool = False
    """A server named it, not the user: it must not lead into a network that the user did not name."""
    private_ok: bool = True
    """Whether the server that named it is in a private network itself."""

    @property
    def origin(self) -> tuple[str, str, int]:
        parts = urlsplit(self.url)
        return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def redirect(self, location: str, private: bool) -> Target:
        """Where a redirect leads, or a fault that trying again would not mend."""
        url = urljoin(self.url, location)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise _refused(f"a redirect to {parts.scheme or 'no scheme'}:// was refused")
        if parts.scheme == "http" and self.origin[0] == "https":
            raise _refused(f"a redirect from https to plain http ({parts.hostname}) was refused")
        if not parts.hostname or parts.username is not None or parts.password is not None:
            raise _refused("a redirect to an address without a host, or with a password in it, was refused")
        return Target(url, True, private and (self.private_ok or not self.redirected))

    def check(self, address: str) -> None:
        """Refuse an address that a redirect must not lead to, before anything is sent there."""
        ip = ip_address(address.partition("%")[0])
        if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        odd = ip.is_link_local or ip.is_multicast or ip.is_unspecified
        if self.redirected and (odd or not (ip.is_global or self.private_ok)):
            kind = "link-local" if ip.is_link_local else "private"
            raise _refused(f"a redirect to {self.origin[1]}, which is the {kind} address {ip}, was refused")


def _refused(text: str) -> Fault:
    return Fault("redirect", text, final=RemoteError(text))


def is_private(address: str) -> bool:
    return not ip_address(address.partition("%")[0]).is_global


class Refused(Exception):
    """A server said no: a status that trying again would not change."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.body = body


@dataclass(slots=True)
class Connection:
    """A socket that speaks HTTP, and what is known of its other end."""

    sock: Any
    key: tuple[Any, ...]
    private: bool
    used: bool = False
    """Whether it has served a request before: it may have been closed since."""

    def stale(self) -> bool:
        """Whether the other end has closed it, or sent what nobody asked for."""
        try:
            return bool(select.select([self.sock], [], [], 0)[0])
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        with suppress(OSError):
            self.sock.close()

    def wake(self) -> None:
        """Have whoever waits for this connection go on; it is of no more use."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Response:
    """An answer whose body has not been read yet. A context manager."""

    def __init__(
        self, http: Http, connection: Connection, wire: h11.Connection, head: h11.Response, patience: Patience
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
        self._keep = head.http_version == b"1.1" and "close" not in self.headers.get("connection", "").lower()

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self._patience.when_cancelled(None)
        if self._whole and self._keep and not self._patience.cancelled:
            self._http.give_back(self._connection)
        else:
            self._connection.close()

    def read_into(self, view: memoryview) -> None:
        """A body of just this length, straight into a buffer."""
        early, _ = self._wire.trailing_data
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
    try:
        sock.settimeout(patience.wait_s())
        result = act()
    except TimeoutError:
        raise patience.ran_out() from None
    except OSError as error:
        if patience.cancelled:
            raise Fault("cancelled", "nobody needs it any more") from None
        raise _fault(error) from error
    if patience.cancelled:
        raise Fault("cancelled", "nobody needs it any more")
    return result


def _fault(error: OSError) -> Fault:
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the server's certificate cannot be trusted: {error.verify_message}. Set SSL_CERT_FILE to your own CA."
        return Fault("certificate", text, final=RemoteError(text))
    if isinstance(error, socket.gaierror):
        return Fault("dns", f"the host's name cannot be resolved: {error.strerror}")
    names = {
        errno.ECONNREFUSED: "refused",
        errno.ECONNRESET: "reset",
        errno.EPIPE: "reset",
        errno.EHOSTUNREACH: "unreachable",
        errno.ENETUNREACH: "unreachable",
    }
    reason = names.get(error.errno or 0, "tls" if isinstance(error, ssl.SSLError) else "network")
    return Fault(reason, error.strerror or type(error).__name__)


class Http:
    """The connections of one run. Used by many threads at once."""

    def __init__(self, *, resolve: Resolve = resolve_here, dial: Dial = dial_directly) -> None:
        self._resolve = resolve
        self._dial = dial
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._tls: Any = None

    def open(self, method: str, target: Target, headers: Mapping[str, str], patience: Patience) -> Response:
        """Send a request and read the head of its answer. Nothing is followed."""
        while True:
            connection = self._connection(target, patience)
            try:
                return self._ask(method, target, headers, connection, patience)
            except _Stale:
                connection.close()  # closed by the other end while it was idle: no fault of anyone's
            except BaseException:
                connection.close()
                raise

    def _ask(
        self, method: str, target: Target, headers: Mapping[str, str], connection: Connection, patience: Patience
    ) -> Response:
        parts = urlsplit(target.url)
        host = parts.netloc.rpartition("@")[2]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        given = {"Host": host, "Accept-Encoding": "identity", "User-Agent": "penstock", **headers}
        try:
            request = h11.Request(method=method, target=path, headers=list(given.items()))
        except h11.LocalProtocolError as error:
            raise Fault("request", f"no such request can be made: {error}") from None
        message = (wire.send(request) or b"") + (wire.send(h11.EndOfMessage()) or b"")
        patience.when_cancelled(connection.wake)
        reused, connection.used = connection.used, True
        try:
            _guard(patience, lambda: connection.sock.sendall(message), connection.sock)
            patience.asked()
            while True:
                event = self.next_event(wire, connection, patience)
                if isinstance(event, h11.Response):
                    return Response(self, connection, wire, event, patience)
                if not isinstance(event, h11.InformationalResponse):
                    raise Fault("cut", "the connection ended before any answer")
        except Fault as fault:
            if reused and fault.reason in ("reset", "cut") and not patience.cancelled:
                raise _Stale from fault
            raise

    def next_event(self, wire: h11.Connection, connection: Connection, patience: Patience) -> Any:
        """The next piece of an answer."""
        while True:
            try:
                event = wire.next_event()
                if event is not h11.NEED_DATA:
                    return event
                data = _guard(patience, lambda: connection.sock.recv(RECEIVE), connection.sock)
                if not data and wire.their_state is h11.SEND_RESPONSE:
                    raise Fault("cut", "the connection ended before any answer")
                patience.moved(len(data))
                wire.receive_data(data)
            except h11.RemoteProtocolError as error:
                reason = "cut" if "closed" in str(error) else "protocol"
                raise Fault(reason, f"the answer is no sound HTTP: {error}") from None

    # Connections

    def give_back(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)
            old = self._idle.pop(0) if len(self._idle) > IDLE else None
        if old is not None:
            old.close()

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self, target: Target, patience: Patience) -> Connection:
        key = (*target.origin, target.redirected, target.private_ok)
        while True:
            with self._lock:
                at = next((i for i in range(len(self._idle) - 1, -1, -1) if self._idle[i].key == key), None)
                connection = self._idle.pop(at) if at is not None else None
            if connection is None:
                return self._connect(target, key, patience)
            if not connection.stale():
                return connection
            connection.close()

    def _connect(self, target: Target, key: tuple[Any, ...], patience: Patience) -> Connection:
        scheme, host, _ = target.origin
        proxy = proxy_for(scheme, host)
        via = Target(proxy if "://" in proxy else f"http://{proxy}") if proxy else target
        error: BaseException = Fault("dns", "the host has no address")
        try:
            addresses = self._resolve(*via.origin[1:], patience.connect_s())
        except OSError as failed:
            raise patience.ran_out() if isinstance(failed, TimeoutError) else _fault(failed) from failed
        if proxy:
            with suppress(ValueError):
                target.check(host)  # behind a proxy only a plain number can be judged
        else:
            for address in addresses:
                target.check(address[4][0])
        for address in addresses:
            try:
                sock = self._dial(address, patience.connect_s())
                try:
                    private = not proxy and is_private(address[4][0])
                    return Connection(self._dress(sock, target, via if proxy else None, patience), key, private)
                except BaseException:
                    sock.close()
                    raise
            except TimeoutError:
                error = Fault("connect", f"{host} did not answer a connection")
            except OSError as failed:
                error = _fault(failed)
            except Fault as fault:
                error = fault
        raise error

    def _dress(self, sock: socket.socket, target: Target, proxy: Target | None, patience: Patience) -> Any:
        """Put a proxy's tunnel and TLS over a plain connection, where they are wanted."""
        scheme, host, port = target.origin
        if proxy is not None:
            self._tunnel(sock, host, port, proxy, patience)
        if scheme != "https":
            return sock
        if self._tls is None:
            import ssl

            self._tls = ssl.create_default_context()
        sock.settimeout(patience.connect_s())
        return self._tls.wrap_socket(sock, server_hostname=host)

    def _tunnel(self, sock: socket.socket, host: str, port: int, proxy: Target, patience: Patience) -> None:
        import base64

        parts = urlsplit(proxy.url)
        lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}"]
        if parts.username:
            secret = base64.b64encode(f"{parts.username}:{parts.password or ''}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {secret}")
        sock.settimeout(patience.connect_s())
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        head = b""
        while not head.endswith(b"\r\n\r\n") and len(head) < MAX_HEAD:
            sock.settimeout(patience.connect_s())
            if not (byte := sock.recv(1)):  # one by one: what follows the head belongs to TLS
                break
            head += byte
        if b" 200" not in head.partition(b"\r\n")[0]:
            raise Fault("proxy", f"the proxy {proxy.origin[1]} did not open a way to {host}")


class _Stale(Exception):
    """An idle connection was closed by its other end."""


__all__ = ["Connection", "Http", "Refused", "Response", "Target"]

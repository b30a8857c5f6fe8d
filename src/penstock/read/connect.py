"""How a server is reached: where it may be, by which addresses, through which proxy, under which certificate.

In:    a `Target`, and the `Patience` of the attempt.
Out:   a `Connection`, ready for a request; or a `Fault`.
Where: fetch threads; whichever thread lists files. Every wait ends with the attempt.
State: the TLS settings, and which kind of address worked last.

A redirect is looked at before anything is sent: not into a network that the user did not name, not to
another scheme. What was looked at is what is connected to; no name is resolved a second time.
"""

from __future__ import annotations

import base64
import errno
import os
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from penstock.config import proxy_for
from penstock.errors import AccessDenied, RemoteError
from penstock.read.attempt import Fault, Patience
from penstock.types import KiB

MAX_HEAD = 64 * KiB
VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
"""What may stand in an address as it is; anything else is written as %XX."""
NAT64 = IPv6Network("64:ff9b::/96")

Resolve = Callable[[str, int, Patience], Sequence[tuple[Any, ...]]]
"""Addresses of a host, as `getaddrinfo` gives them, within the time left for a connection."""
Dial = Callable[[tuple[Any, ...], Patience, int], socket.socket]
"""A connection to one of them, within a share of that time."""


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
        port = parts.port
        return (
            parts.scheme,
            parts.hostname or "",
            (443 if parts.scheme == "https" else 80) if port is None else port,
        )

    @property
    def host(self) -> str:
        """Host and port as a request names them."""
        return _ascii(urlsplit(self.url).netloc.rpartition("@")[2])

    @property
    def path(self) -> str:
        """Path and query as a request names them."""
        parts = urlsplit(self.url)
        return quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=VISIBLE)

    def redirect(self, location: str, private: bool) -> Target:
        """Where a redirect leads, or a fault. `location` is a header's value, its bytes as Latin-1."""
        target = None
        try:
            url = urljoin(self.url, quote(location, safe=VISIBLE, encoding="latin-1"))
            parts = urlsplit(url)
            target = Target(url, True, private and (self.private_ok or not self.redirected))
            scheme, host, _ = target.origin
        except ValueError:
            target = None
        if target is None:  # not where it was caught: that exception quotes the address
            raise _refused("a redirect to something that is no address was refused")
        if scheme not in ("http", "https"):
            raise _refused(f"a redirect to {scheme[:20] or 'no scheme'}:// was refused")
        if scheme == "http" and self.origin[0] == "https":
            raise _refused(f"a redirect from https to plain http ({host[:100]}) was refused")
        if not host or parts.username is not None or parts.password is not None:
            raise _refused(
                "a redirect to an address without a host, or with a password in it, was refused"
            )
        return target

    def check(self, address: str) -> None:
        """Refuse an address that a redirect must not lead to, before anything is sent there."""
        ip = plain_ip(address)
        odd = ip.is_link_local or ip.is_multicast or ip.is_unspecified
        if not ip.is_loopback:
            odd = odd or ip.is_reserved or (isinstance(ip, IPv6Address) and ip.is_site_local)
        if self.redirected and (odd or not (ip.is_global or self.private_ok)):
            kind = "link-local" if ip.is_link_local else "private"
            raise _refused(
                f"a redirect to {self.origin[1][:100]}, which is the {kind} address {ip}, was refused"
            )


def plain_ip(address: str) -> IPv4Address | IPv6Address:
    """An address; one that only wraps another of the older kind counts as that."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        within = ip.ipv4_mapped or ip.sixtofour
        return IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else within or ip
    return ip


def is_private(address: str) -> bool:
    return not plain_ip(address).is_global


def _refused(text: str) -> Fault:
    """A redirect that is not followed. It may have been a portal's."""
    return Fault("redirect", text, final=RemoteError(text), doubtful=True)


def resolve_here(host: str, port: int, patience: Patience) -> Sequence[tuple[Any, ...]]:
    """The system's resolver, with the system's own deadline."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def dial_directly(address: tuple[Any, ...], patience: Patience, shares: int) -> socket.socket:
    """A plain connection, whose waiting ends when the attempt is cancelled."""
    family, kind, protocol, _, where = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(where)
        if code == errno.EINPROGRESS:
            patience.when_cancelled(partial(hang_up, sock))
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(1e3 * patience.connect_s(shares)):
                raise TimeoutError
            patience.check()
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        _let_go(sock, patience)
        raise
    return sock


def hang_up(sock: socket.socket) -> None:
    """Have whoever waits for a socket go on; it is of no more use."""
    with suppress(OSError):
        # Not the method of a TLS socket, which would have its reader take what is encrypted for plain.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _let_go(sock: socket.socket, patience: Patience) -> None:
    patience.when_cancelled(None)
    sock.close()


@dataclass(slots=True)
class Connection:
    """A socket that speaks HTTP, and what is known of its other end."""

    sock: Any
    key: tuple[Any, ...]
    private: bool
    before_path: str = ""
    """For a proxy that is asked in plain text: what comes before the path."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What such a proxy wants to be told."""
    used: bool = False
    """Whether it has served a request before: it may have been closed since."""
    idle_since: float = 0.0

    def stale(self) -> bool:
        """Whether the other end has closed it, or sent what nobody asked for."""
        try:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            return bool(poll.poll(0)) or (hasattr(self.sock, "pending") and self.sock.pending() > 0)
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        with suppress(OSError):
            self.sock.close()

    def wake(self) -> None:
        """Have whoever waits for this connection go on."""
        hang_up(self.sock)


def fault_of(error: OSError) -> Fault:
    """What an error of the system means."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the server's certificate cannot be trusted: {error.verify_message}. Set SSL_CERT_FILE to your own CA."
        return Fault("certificate", text, final=RemoteError(text), doubtful=True)
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


class Connector:
    """Makes connections. Used by many threads at once."""

    def __init__(self, resolve: Resolve, dial: Dial) -> None:
        self._resolve = resolve
        self._dial = dial
        self._tls: Any = None
        self._family: Any = None

    def connect(self, target: Target, key: tuple[Any, ...], patience: Patience) -> Connection:
        """A new connection to where a target is, or to the proxy that leads there."""
        patience.connecting()
        scheme, host, _ = target.origin
        proxy = _proxy(scheme, host)
        addresses = self._addresses(proxy or target, patience)
        if proxy is not None:
            with suppress(ValueError):
                target.check(_number(host))  # behind a proxy only a number can be judged
        else:
            for address in addresses:
                target.check(address[4][0])
        fault = Fault("dns", f"{host} has no address")
        for number, address in enumerate(addresses):
            # Each gets its share of the time, or one that is not answered would keep the others from being tried.
            try:
                sock = self._dial(address, patience, len(addresses) - number)
                self._family = address[0]
                private = proxy is None and is_private(address[4][0])
                return self._dress(sock, target, key, private, proxy, patience)
            except TimeoutError:
                fault = Fault("connect", f"{host} did not answer a connection")
            except OSError as failed:
                fault = fault_of(failed)
            except Fault as failed:
                fault = failed
            if patience.cancelled:
                break
        raise fault

    def _addresses(self, server: Target, patience: Patience) -> Sequence[tuple[Any, ...]]:
        _, host, port = server.origin
        try:
            found = self._resolve(host, port, patience)
        except TimeoutError:
            raise Fault(
                "dns",
                f"the host's name was not resolved within {patience.limits.connect_timeout} s",
            ) from None
        except OSError as error:
            raise fault_of(error) from error
        except UnicodeError:
            raise Fault("dns", f"{host[:100]!r} is no name of a host") from None
        return sorted(found, key=lambda address: address[0] != self._family)

    def _dress(
        self, sock: socket.socket, target: Target, key: tuple[Any, ...], private: bool, proxy: Target | None,
        patience: Patience,
    ) -> Connection:  # fmt: skip
        """Put a proxy's tunnel and TLS over a plain connection, where they are wanted."""
        scheme, host, port = target.origin
        dressed = sock
        try:
            if scheme != "https":
                if proxy is None:
                    return Connection(sock, key, private)
                return Connection(sock, key, private, f"http://{target.host}", _proxy_login(proxy))
            patience.when_cancelled(partial(hang_up, sock))
            if proxy is not None:
                _tunnel(
                    sock,
                    f"[{host}]:{port}" if ":" in host else f"{_ascii(host)}:{port}",
                    proxy,
                    patience,
                )
            if self._tls is None:
                import ssl

                self._tls = ssl.create_default_context()
            sock.settimeout(patience.connect_s())
            dressed = self._tls.wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            patience.when_cancelled(partial(hang_up, dressed))
            dressed.do_handshake()
            return Connection(dressed, key, private)
        except BaseException as error:
            _let_go(dressed, patience)
            if isinstance(error, ValueError) and not isinstance(error, OSError):
                raise Fault(
                    "tls", f"{host[:100]!r} is no name that a certificate could have"
                ) from None
            raise


def _number(host: str) -> str:
    """An address that is written as a number in one of the old ways (127.1, 2130706433), in the usual one."""
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return host


def _ascii(host: str) -> str:
    return host if host.isascii() else host.encode("idna").decode("ascii")


def _proxy(scheme: str, host: str) -> Target | None:
    """The proxy on the way to a host, if there is one."""
    url = proxy_for(scheme, host)
    if not url:
        return None
    proxy = Target(url if "://" in url else f"http://{url}")
    try:
        kind, name, _ = proxy.origin
    except ValueError:
        kind = name = ""
    if kind != "http" or not name:
        text = f"{scheme}_proxy in the environment does not have the form http://host:port"
        raise Fault("proxy", text, final=RemoteError(text))
    return proxy


def _proxy_login(proxy: Target) -> dict[str, str]:
    parts = urlsplit(proxy.url)
    if not parts.username:
        return {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(login).decode()}"}


def _tunnel(sock: socket.socket, to: str, proxy: Target, patience: Patience) -> None:
    """Have a proxy pass everything on."""
    lines = [
        f"CONNECT {to} HTTP/1.1",
        f"Host: {to}",
        *(f"{n}: {v}" for n, v in _proxy_login(proxy).items()),
    ]
    sock.settimeout(patience.connect_s())
    sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < MAX_HEAD:
        sock.settimeout(patience.connect_s())
        if not (byte := sock.recv(1)):  # one by one: what follows the head belongs to TLS
            break
        head += byte
    words = head.partition(b"\r\n")[0].split(b" ")
    status = (
        int(words[1])
        if len(words) > 1 and words[0].startswith(b"HTTP/1.") and words[1].isdigit()
        else 0
    )
    if status == 407:
        text = (
            f"the proxy {proxy.origin[1]} wants a login: https_proxy=http://user:password@host:port"
        )
        raise Fault("proxy", text, final=AccessDenied(text))
    if status != 200:
        raise Fault(
            "proxy",
            f"the proxy {proxy.origin[1]} did not open a way to {to} ({status or 'no answer'})",
        )


__all__ = [
    "Connection",
    "Connector",
    "Dial",
    "Resolve",
    "Target",
    "dial_directly",
    "fault_of",
    "resolve_here",
]

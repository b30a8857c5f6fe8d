"""One HTTP exchange over urllib3, within a deadline and a minimum rate.

Redirects are followed here, not by urllib3: never to another scheme, never into a private network
that the user did not name, and without credentials once the origin changes. A deadline bounds
every wait after the connection is made, and cancelling it ends a wait at once. Looking up a name
takes as long as the system's resolver allows.
"""

from __future__ import annotations

import base64
import http.client
import io
import logging
import random
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from penstock.config import proxy_for
from penstock.errors import LoaderClosed, PenstockError, RemoteError, SourceError
from penstock.options import RemoteOptions
from penstock.types import MODIFIED, KiB, MiB
from penstock.watch.loader_stats import NetworkStats

if TYPE_CHECKING:
    from penstock.feed.worker_pool import ThreadPool

log = logging.getLogger("penstock")

T = TypeVar("T")
Headers = Mapping[str, str]
MAX_BODY = 64 * MiB
"""The longest body of a listing, a card or a redirect."""
MAX_PAUSE_S = 10.0
BELIEVED = 3
"""How many times a fatal error must occur before it is believed."""
NO_RANGES = "its server does not answer requests for a range of bytes. Copy the file to disk."
RECEIVE = 256 * KiB
CONNECTIONS = 64
"""Idle connections kept for each host."""
HOPS = 5
"""Redirects followed for one request."""
RETRY = frozenset({408, 425, 429})
"""Statuses below 500 that are retried."""
KEEPALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
]
"""Keep idle connections alive: routers drop them after minutes."""
REASONS: dict[type[Exception], str] = {
    socket.gaierror: "dns",
    http.client.RemoteDisconnected: "cut",
    http.client.IncompleteRead: "cut",
    ssl.SSLError: "tls",
    TimeoutError: "connect",
    ConnectionRefusedError: "refused",
    ConnectionError: "reset",
    OSError: "unreachable",
}
"""The name under which each exception is counted; the first match applies."""


class RequestError(Exception):
    """An attempt failed. `reason` is a short word to count by.

    detail: what happened, without secrets; or the exception to raise, once this was met several
        times: a proxy or a portal may be at fault.
    """

    def __init__(
        self, reason: str, detail: str | PenstockError, *, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.retry_after = reason, str(detail), retry_after
        self.final = detail if isinstance(detail, PenstockError) else None


class Refused(Exception):
    """A server answered with a status that is not retried."""

    def __init__(self, status: int, code: str = "") -> None:
        """`code` is the Hub's error code."""
        super().__init__(f"status {status}")
        self.status, self.code = status, code

    def explained(self, path: str, missing: str) -> SourceError:
        """Return the error for a file that its server refuses."""
        if self.status in (404, 410):
            return SourceError(f"{path} {missing}")
        return SourceError(
            f"{path}: its server refuses access ({self.status}). A signed address may have expired, "
            "or a login is missing: https://user:password@host/…"
        )


class Deadline:
    """The time limit and the minimum rate of one attempt."""

    def __init__(self, limits: RemoteOptions, until: float) -> None:
        self.began = self._window = time.monotonic()
        self.until = min(until, self.began + limits.request_timeout)
        self.limits = limits
        self.cancelled = False
        self._bytes = 0
        self._socket: socket.socket | None = None
        # Reentrant: garbage collection may cancel on a thread that holds the lock.
        self._lock = threading.RLock()

    def timeout_s(self, limit: float | None = None) -> float:
        """Return the timeout for the next bytes, or raise if the deadline has passed."""
        if self.cancelled:
            raise LoaderClosed("the loader was shut down")
        left = self.until - time.monotonic()
        if left <= 0:
            raise self.timed_out()
        return min(left, self.limits.stall_timeout if limit is None else limit)

    def received(self, n: int) -> None:
        """Count bytes, and raise if too few arrived during the last `stall_timeout`."""
        self._bytes += n
        span = time.monotonic() - self._window
        if span >= self.limits.stall_timeout:
            if self._bytes < max(1, self.limits.min_bytes_per_s * span):
                raise RequestError("slow", f"{self._bytes} bytes in {span:.1f} s")
            self.restart_rate()

    def restart_rate(self) -> None:
        """Measure the rate from now on."""
        self._window, self._bytes = time.monotonic(), 0

    def timed_out(self) -> RequestError:
        now = time.monotonic()
        if now >= self.until:
            return RequestError("deadline", f"not done after {now - self.began:.1f} s")
        return RequestError("stall", f"0 bytes in {self.limits.stall_timeout} s")

    def watch(self, sock: socket.socket | None) -> None:
        """Set the socket that a cancellation shuts down."""
        with self._lock:
            self._socket = sock
            if self.cancelled:
                self.cancel()

    def cancel(self) -> None:
        """End the attempt, from any thread."""
        with self._lock, suppress(OSError):
            self.cancelled = True
            if self._socket is not None:
                # Not SSLSocket.shutdown: its reader would take encrypted bytes for plain ones.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Receiver(io.RawIOBase):
    """Reads from a socket within a deadline. Replaces the socket of an HTTPResponse."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)
        deadline.watch(sock)
        deadline.restart_rate()

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self, 64 * KiB)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._deadline.timeout_s())
        try:
            n = self._raw.readinto(buffer) or 0
        except TimeoutError:
            raise self._deadline.timed_out() from None
        if n == 0:
            self._deadline.timeout_s()  # a cancellation looks like the end of the connection
        self._deadline.received(n)
        return n

    def close(self) -> None:
        self._deadline.watch(None)
        self._raw.close()
        super().close()


# Addresses


@dataclass(frozen=True, slots=True)
class Place:
    """An address. It may contain a secret, so it is never shown."""

    url: str = field(repr=False)
    private: bool = True
    """True if it may lead into a private network: the user named it, or a private server did."""

    @property
    def origin(self) -> tuple[str, str, int]:
        parts = urlsplit(self.url)
        port = (443 if parts.scheme == "https" else 80) if parts.port is None else parts.port
        return parts.scheme, parts.hostname or "", port

    def redirected(self, location: str, private: bool) -> Place:
        """Return the target of a redirect, or raise if it must not be followed."""
        try:
            place = Place(urljoin(self.url, location), private and self.private)
            scheme, host, _ = place.origin
        except ValueError:  # it quotes the address, so it must not be the context of what is raised
            scheme = host = ""
        allowed = ("https",) if self.origin[0] == "https" else ("http", "https")
        if not host or scheme not in allowed or "@" in urlsplit(place.url).netloc:
            raise _refused(f"{scheme[:20]}://{host[:100]}")
        with suppress(ValueError):  # a name: its address is checked once it is known
            place.check_address(host)
        return place

    def check_address(self, address: str) -> bool:
        """Return True if a numeric address is private, or raise if it must not be used."""
        found = ip_address(address.partition("%")[0])
        ip = getattr(found, "ipv4_mapped", None) or found
        if ip.is_link_local or not (self.private or ip.is_global):
            raise _refused(f"the private address {ip}")
        return not ip.is_global


def _refused(what: str) -> RequestError:
    return RequestError("redirect", RemoteError(f"a redirect to {what} was refused"))


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return an address without its login, and the login as a header."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    login = base64.b64encode(":".join(map(unquote, user.split(":", 1))).encode()).decode("ascii")
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {login}"}


def address(url: str, token: str | None = None) -> tuple[Place, dict[str, str]]:
    """Return the address to request, and the headers for its login or token."""
    url, headers = split_login(url)
    return Place(url), headers | ({"Authorization": f"Bearer {token}"} if token else {})


# Exchanges


class Response:
    """An answer whose body has not been read yet."""

    def __init__(self, raw: urllib3.BaseHTTPResponse, place: Place) -> None:
        self._raw, self.place = raw, place
        self.status, self.headers = raw.status, raw.headers
        self.private = bool(getattr(raw.connection, "private", False))
        self.length: int | None = getattr(raw, "length_remaining", None)
        self.done = 0
        """Bytes of the body that were read."""
        self.xet_hash = self.headers.get("x-xet-hash", "")
        """The Hub's digest of the content, which a redirect to its storage carries."""

    def parts(self, limit: int) -> Iterator[bytes]:
        """Read the body, which must not be longer than `limit`."""
        while part := explained(partial(self._raw.read1, RECEIVE, decode_content=False)):
            self.done += len(part)
            if self.done > limit:
                raise RequestError("long", f"more than {limit} bytes came")
            yield part

    def body(self) -> bytes:
        """Return a small body."""
        return b"".join(self.parts(MAX_BODY))

    def read_into(self, view: memoryview) -> None:
        """Read a body of just this length."""
        for part in self.parts(len(view)):
            view[self.done - len(part) : self.done] = part
        if self.done < len(view):
            raise RequestError("cut", f"{self.done} of {len(view)} bytes came")

    def version(self) -> str:
        """Return the version of the file: its ETag, or else its date."""
        date = plain_etag(self.headers.get("last-modified", ""))
        return plain_etag(self.headers.get("etag", "")) or (f"{MODIFIED}{date}" if date else "")

    def check(self) -> None:
        """Raise if this is not data: `Refused` for a status that is not retried."""
        if 400 <= self.status < 500 and self.status not in RETRY:
            raise Refused(self.status, self.headers.get("x-error-code", ""))
        if not 200 <= self.status < 300:
            detail, wait_s = f"the server answered {self.status}", retry_after(self.headers)
            detail += f" and asks to wait {wait_s:.0f} s" if wait_s else ""
            raise RequestError(f"status_{self.status}", detail, retry_after=wait_s)
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise RequestError("encoded", f"the answer is {encoding[:20]}-encoded, unasked")
        if self.status == 200 and "html" in self.headers.get("content-type", ""):
            raise RequestError("html", "a web page came, not data: a portal or proxy answered")


def plain_etag(etag: str) -> str:
    """Return an ETag without quotes."""
    return etag.strip().removeprefix("W/").strip('"')


def retry_after(headers: Headers) -> float | None:
    """Return the seconds that a server asks to wait, if it does.

    The Hub says when its limit is renewed: `RateLimit: "api";r=0;t=55`.
    """
    limit = re.search(r";\s*r=0\s*;\s*t=(\d{1,6})\b", headers.get("ratelimit", ""))
    value = headers.get("retry-after") or (limit[1] if limit else "")
    try:
        return urllib3.Retry().parse_retry_after(value)
    except (urllib3.exceptions.InvalidHeader, ValueError):
        return None


class Network:
    """The connections, limits, retries and counts of one run."""

    def __init__(self, limits: RemoteOptions, threads: ThreadPool | None = None) -> None:
        self.limits = limits
        self.threads = threads
        """The threads that run calls in parallel; None to run one after another."""
        self.stats = NetworkStats()
        self._current = threading.local()
        """Holds the `deadline` of this thread's current request."""
        self._managers: dict[tuple[str, bool, str | None], urllib3.PoolManager] = {}
        self._closing = threading.Event()
        self._random = random.Random()
        # Reentrant: garbage collection may close a loader on a thread that holds the lock.
        self._lock = threading.RLock()
        self._deadlines: set[Deadline] = set()

    def retry(
        self,
        what: str,
        attempt: Callable[[Deadline], T],
        setting: str,
        first_s: float | None = None,
    ) -> T:
        """Return the result of the first attempt that succeeds, within the budget.

        what: names it in messages, without secrets. setting: the option with the budget.
        first_s: how long the first attempt may take before it is given up as unusually slow.
        """
        began, budget_s = time.monotonic(), getattr(self.limits, setting)
        pause, tried, met = self.limits.backoff, Counter[str](), Counter[str]()
        last: RequestError | None = None
        while True:
            try:
                limit_s = budget_s if first_s is None else min(budget_s, first_s)
                return self._try(attempt, began + limit_s)
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

    def _try(self, attempt: Callable[[Deadline], T], until: float) -> T:
        """Run an attempt that a shutdown can cancel."""
        deadline = Deadline(self.limits, until)
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
        waits = [*calls[:1], *map(self.begin, calls[1:])]
        return [wait() for wait in waits]

    def begin(self, call: Callable[[], T]) -> Callable[[], T]:
        """Begin a call on a thread, if there are threads, and return a function that waits for it.

        If no thread has begun by then, the call is made by who waits. So threads of the pool may
        wait for each other's calls: only those that run are waited for.
        """
        if self.threads is None:
            return call
        future = self.threads.submit(call, urgent=True)
        return lambda: call() if future.cancel() else future.result()

    def get(
        self,
        url: str,
        what: str,
        read: Callable[[Response], T],
        token: str | None = None,
        **more: str,
    ) -> T:
        """Return `read` of the response, or raise `Refused`. `more` are request headers."""
        place, headers = address(url, token)

        def attempt(deadline: Deadline) -> T:
            with self.request(place, headers | more, deadline) as response:
                response.check()
                return read(response)

        return self.retry(what, attempt, "metadata_budget")

    def probe(self, url: str, path: str) -> tuple[int, str]:
        """Return the size and version of a file. Requests a byte: addresses signed for GET refuse HEAD."""

        def read(response: Response) -> tuple[int, str]:
            total = response.headers.get("content-range", "").rpartition("/")[2]
            if response.status != 206 or not total.isdigit():
                raise RequestError("no_range", RemoteError(f"{path}: {NO_RANGES}"))
            return int(total), response.version()

        try:
            return self.get(url, path, read, Range="bytes=0-0")
        except Refused as refused:
            raise refused.explained(path, f"does not exist ({refused.status}).") from None

    def stop(self) -> None:
        """Cancel all requests and pauses, without waiting."""
        with self._lock:
            self._closing.set()
            for deadline in self._deadlines:
                deadline.cancel()

    def close(self) -> None:
        self.stop()
        logging.getLogger("urllib3.connectionpool").removeFilter(self._hides)
        with self._lock:
            for manager in self._managers.values():
                manager.clear()
            self._managers.clear()

    # Requests

    @contextmanager
    def request(self, place: Place, headers: Headers, deadline: Deadline) -> Iterator[Response]:
        """Send a GET, follow redirects, and return the answer before its body is read.

        Credentials in `headers` go to the place's own origin only.
        """
        origin, xet_hash = place.origin, ""
        for _ in range(HOPS):
            given = {"Accept-Encoding": "identity", "User-Agent": "penstock", **headers}
            if place.origin != origin:
                given.pop("Authorization", None)
            with self._open(place, given, deadline) as response:
                response.xet_hash = xet_hash = response.xet_hash or xet_hash
                location = response.headers.get("location", "")
                if not 300 <= response.status < 400 or not location:
                    yield response
                    return
                place = place.redirected(location, response.private)
                response.body()  # so that the connection can be used again
        raise RequestError("redirect", RemoteError(f"more than {HOPS} redirects"))

    @contextmanager
    def _open(self, place: Place, headers: Headers, deadline: Deadline) -> Iterator[Response]:
        connect_s = deadline.timeout_s(deadline.limits.connect_timeout)
        timeout = urllib3.Timeout(connect=connect_s, read=deadline.timeout_s())
        send = partial(
            self._manager(place).urlopen, "GET", place.url, headers=headers, timeout=timeout,
            retries=False, redirect=False, preload_content=False, decode_content=False,
        )  # fmt: skip
        began = time.perf_counter()
        self.stats.add(requests=1)
        self._current.deadline = deadline
        try:
            raw = explained(send)
            answered = time.perf_counter()
            self.stats.add(first_byte_s=answered - began)
            deadline.restart_rate()
            response = Response(raw, place)
            try:
                yield response
            finally:
                self.stats.add(body_s=time.perf_counter() - answered, bytes=response.done)
                raw.close()  # a connection whose body was read went back to its pool before
        finally:
            self._current.deadline = None

    # Connections

    def _hides(self, record: logging.LogRecord) -> bool:
        """Drop urllib3's own log lines about our requests: they quote signed addresses."""
        return getattr(self._current, "deadline", None) is None

    def _manager(self, place: Place) -> urllib3.PoolManager:
        scheme, host, _ = place.origin
        key = (scheme, place.private, proxy_for(scheme, host))
        with self._lock:
            if key not in self._managers:
                logging.getLogger("urllib3.connectionpool").addFilter(self._hides)
                self._managers[key] = explained(partial(self._new_manager, place, key[2]))
            return self._managers[key]

    def _new_manager(self, place: Place, proxy: str | None) -> urllib3.PoolManager:
        settings: dict[str, Any] = {"maxsize": CONNECTIONS, "socket_options": KEEPALIVE}
        if place.url.startswith("https:"):  # one for all connections: it takes 20 ms to make
            settings["ssl_context"] = ssl.create_default_context()
        if proxy is None:
            manager = urllib3.PoolManager(**settings)
        else:
            url, login = split_login(proxy if "://" in proxy else f"http://{proxy}")
            login = {f"Proxy-{name}": value for name, value in login.items()}
            manager = urllib3.ProxyManager(url, proxy_headers=login, **settings)
        current = self._current

        class Connection(HTTPConnection):
            """Checks the address of its peer, and applies the deadline."""

            private = False

            def connect(self) -> None:
                super().connect()
                current.deadline.timeout_s()  # nothing is sent after a cancellation
                if proxy is None:
                    self.private = place.check_address(self.sock.getpeername()[0])

            def response_class(self, sock: Any, **how: Any) -> http.client.HTTPResponse:  # type: ignore[override]
                received: Any = _Receiver(sock, current.deadline)
                return http.client.HTTPResponse(received, **how)

        class SecureConnection(Connection, HTTPSConnection):
            pass

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = SecureConnection

        manager.pool_classes_by_scheme = {"http": Pool, "https": SecurePool}
        return manager


def explained(call: Callable[[], T]) -> T:
    """Call urllib3, and raise its exceptions as `RequestError`.

    They are not chained: they quote addresses, headers and answers, which may be secrets.
    """
    try:
        return call()
    except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
        failed = _request_error(error)
    raise failed


def _request_error(error: Exception) -> RequestError:
    cause: Any = error
    while isinstance(cause, urllib3.exceptions.HTTPError):  # find what urllib3 wrapped
        inner = [e for e in (cause.__cause__, *cause.args) if isinstance(e, Exception)]
        if not inner:
            break
        cause = inner[0]
    if isinstance(cause, ssl.SSLCertVerificationError):
        text = f"its certificate is not trusted: {cause.verify_message}. Set SSL_CERT_FILE."
        return RequestError("certificate", RemoteError(text))
    if isinstance(error, urllib3.exceptions.ProxyError):
        return RequestError("proxy", f"the proxy did not connect: {str(cause)[:100]}")
    if isinstance(error, ValueError) and not isinstance(cause, OSError):
        text = "its address, its token or the proxy's address cannot be sent"
        return RequestError("request", RemoteError(text))
    reason = next((word for kind, word in REASONS.items() if isinstance(cause, kind)), "protocol")
    return RequestError(reason, getattr(cause, "strerror", None) or type(cause).__name__)

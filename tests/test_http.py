"""One HTTP exchange: deadlines, connections that are used again or must not be, TLS, proxies, redirects that are refused."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock import RemoteOptions
from penstock.errors import RemoteError
from penstock.read.attempt import Fault, Patience
from penstock.read.http import Http, Target
from tests.servers import Fault as Wrong
from tests.servers import FileServer

LIMITS = RemoteOptions(
    connect_timeout=1, request_timeout=5, stall_timeout=0.4, min_bytes_per_s=1000
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
DATA = bytes(range(256)) * 400


@dataclass
class Scripted:
    """A server that answers each request with what a function gives: bytes, or None to end the connection.

    The function gets the head of the request, the connection and its number; it may also write by itself.
    """

    answer: Callable[[str, Any, int], bytes | None]
    tls: ssl.SSLContext | None = None
    heads: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"
        self._socks: list[Any] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock, len(self._socks) - 1))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: Any, number: int) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            if self.tls is not None:
                sock = stack.enter_context(self.tls.wrap_socket(sock, server_side=True))
                self._socks.append(sock)
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    if not (byte := sock.recv(1)):
                        return
                    head += byte
                self.heads.append((number, head.decode("latin-1")))
                reply = self.answer(head.decode("latin-1"), sock, number)
                if reply is None:
                    return
                sock.sendall(reply)

    @property
    def connections(self) -> list[int]:
        """The connection of each request."""
        return [number for number, _ in self.heads]

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._socks]:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            if sock is self._listener:
                sock.close()
        for thread in self._threads:
            thread.join(10.0)


@pytest.fixture
def http() -> Iterator[Http]:
    one = Http()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "no_proxy",
        "NO_PROXY",
        "SSL_CERT_FILE",
    ):
        monkeypatch.delenv(name, raising=False)


def patience(limits: RemoteOptions = LIMITS, seconds: float = 60.0) -> Patience:
    return Patience(limits, time.monotonic() + seconds)


def get(
    http: Http,
    url: str | Target,
    limits: RemoteOptions = LIMITS,
    method: str = "GET",
    **headers: str,
) -> bytes:
    target = url if isinstance(url, Target) else Target(url)
    with http.open(method, target, headers, patience(limits)) as response:
        return response.read(1 << 20)


def fault_of(act: Callable[[], Any], within_s: float = 15.0) -> Fault:
    began = time.monotonic()
    with pytest.raises(Fault) as raised:
        act()
    assert time.monotonic() - began < within_s
    return raised.value


# Connections


def test_one_connection_serves_many_requests(http: Http) -> None:
    with Scripted(lambda head, sock, n: OK) as server:
        assert [get(http, server.url + f"/{i}") for i in range(5)] == [b"hello"] * 5
        assert server.connections == [0] * 5


def test_a_connection_closed_by_the_server_while_idle_is_replaced_without_a_fault(
    http: Http,
) -> None:
    def answer(head: str, sock: Any, number: int) -> bytes | None:
        sock.sendall(OK)
        return None

    with Scripted(answer) as server:
        for i in range(4):
            assert get(http, server.url) == b"hello"
            if i % 2:
                time.sleep(0.05)  # with and without the time to notice
        assert len(set(server.connections)) == 4


def test_five_hundred_requests_with_faults_leave_no_descriptor_and_no_thread(http: Http) -> None:
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    with FileServer({"a": DATA}) as server:
        for kind, after in (
            ("reset", 50),
            ("fin", -1),
            ("garbage", 0),
            ("truncated_chunked", 9),
            ("huge_headers", 0),
        ):
            server.fault(Wrong(kind, skip=20, times=30, after=after))
        got = 0
        before, threads = process.num_fds(), threading.active_count()
        calm = replace(
            LIMITS, stall_timeout=20, request_timeout=30
        )  # a busy machine's pauses are no faults
        for _ in range(500):
            try:
                got += get(http, server.url_of("a"), calm) == DATA
            except Fault:
                assert http._idle == [] or not http._idle[-1].stale()
        assert got == 500 - 150
        http.close()
        server.close()
        assert process.num_fds() <= before
        assert threading.active_count() <= threads


# Deadlines


def chunks(*parts: bytes, pause: float) -> Callable[[str, Any, int], bytes | None]:
    """Sends parts with pauses between them, and then nothing more."""

    def answer(head: str, sock: Any, number: int) -> bytes | None:
        for part in parts:
            sock.sendall(part)
            time.sleep(pause)
        sock.recv(1)  # until the other side leaves
        return None

    return answer


@pytest.mark.parametrize(
    ("parts", "pause", "reasons"),
    [
        ((b"",), 0.0, {"stall"}),
        ((b"HTTP/1.1 200",), 0.0, {"stall"}),
        ((OK[:-1],), 0.0, {"stall"}),
        ((b"HTTP/1.1 200 OK\r\nX: ", *[b"x"] * 1000), 0.03, {"stall", "slow"}),
        (
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", *[b"x"] * 1000),
            0.03,
            {"stall", "slow"},
        ),
    ],
    ids=["silence", "half a head", "half a body", "dripping head", "dripping body"],
)
def test_silence_a_stall_and_a_drip_end_alike(
    http: Http, parts: tuple[bytes, ...], pause: float, reasons: set[str]
) -> None:
    # A drip goes on for half a minute: who waits for its end is too late.
    with Scripted(chunks(*parts, pause=pause)) as server:
        assert (
            fault_of(lambda: get(http, server.url, replace(LIMITS, request_timeout=60))).reason
            in reasons
        )


@contextlib.contextmanager
def unanswered() -> Iterator[int]:
    """A port on which connections are not even accepted."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(8):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield port


def test_a_connection_that_is_not_answered_ends_in_time(http: Http) -> None:
    with unanswered() as port:
        fault = fault_of(
            lambda: get(http, f"http://127.0.0.1:{port}/", replace(LIMITS, connect_timeout=0.3))
        )
        assert fault.reason == "connect"


def address(port: int, host: str = "127.0.0.1") -> tuple[Any, ...]:
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)


# Names


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "cannot be resolved"),
        (TimeoutError(), "not resolved within"),
        (UnicodeError("label too long"), "no name of a host"),
    ],
)
def test_a_name_that_cannot_be_resolved_is_a_fault_of_its_own(error: Exception, word: str) -> None:
    def resolve(host: str, port: int, one: Patience) -> Any:
        raise error

    fault = fault_of(lambda: get(Http(resolve=resolve), "http://nowhere.invalid/"))
    assert (fault.reason, fault.final) == ("dns", None)
    assert word in fault.detail


# Answers


def answers(*parts: bytes) -> Callable[[str, Any, int], bytes | None]:
    def answer(head: str, sock: Any, number: int) -> bytes | None:
        sock.sendall(b"".join(parts))
        return None

    return answer


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "cut"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", "cut"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhel\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nhello", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\nhello", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nhello", "protocol"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2_000_000, "protocol"),
        (b"HTTP/1.1 999999 OK\r\n\r\n", "protocol"),
        (b"ICY 200 OK\r\n\r\n", "protocol"),
        (b"\0" * 100, "protocol"),
    ],
    ids=range(13),
)
def test_an_answer_that_is_no_http_is_a_fault(http: Http, raw: bytes, reason: str) -> None:
    with Scripted(answers(raw)) as server:
        assert fault_of(lambda: get(http, server.url)).reason == reason


@pytest.mark.parametrize("token", ["hf_secret\nX: y", "hf_sécret", "hf_secret\0"])
def test_a_token_that_no_header_may_have_is_refused_without_being_shown(
    http: Http, token: str
) -> None:
    with Scripted(lambda head, sock, n: OK) as server:
        fault = fault_of(lambda: get(http, server.url, Authorization=f"Bearer {token}"))
    assert isinstance(fault.final, RemoteError)
    error: BaseException | None = fault
    while error is not None:
        assert "cret" not in f"{error!r} {error} {vars(error)}"
        error = error.__cause__ or error.__context__
    assert server.heads == []


# Redirects


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("/other?x=1", "https://hub.example/other?x=1"),
        ("//cdn.example/a", "https://cdn.example/a"),
        ("https://cdn.example:8443/a b", "https://cdn.example:8443/a%20b"),
        ("/donn\xc3\xa9es", "https://hub.example/donn%C3%A9es"),
    ],
)
def test_a_redirect_leads_where_it_says(location: str, leads_to: str) -> None:
    found = Target("https://hub.example/a").redirect(location, False)
    assert (found.url, found.redirected, found.private_ok) == (leads_to, True, False)


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd", "ftp://cdn.example/a", "gopher://x/", "javascript:alert(1)", "data:text/plain,x",
        "http://cdn.example/a", "https://user:password@cdn.example/a", "https://[::1/a",
        "https://cdn.example:99999/a", "https://cdn.example:port/a", "https://cdn.example\\@evil.example:x/",
    ],
)  # fmt: skip
def test_a_redirect_that_leads_astray_is_refused_and_shows_no_secret(location: str) -> None:
    fault = fault_of(lambda: Target("https://hub.example/a").redirect(location, False))
    assert isinstance(fault.final, RemoteError)
    assert "password" not in str(fault.final).replace("with a password in it", "")


PRIVATE = [
    "169.254.169.254", "10.0.0.1", "172.16.3.4", "192.168.1.1", "127.0.0.1", "0.0.0.0", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1",
    "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "::169.254.169.254",
]  # fmt: skip


@pytest.mark.parametrize("ip", PRIVATE)
def test_no_redirect_from_a_public_server_leads_into_a_private_network(ip: str) -> None:
    fault = fault_of(lambda: Target("https://x.example/", True, False).check(ip))
    assert isinstance(fault.final, RemoteError)


@pytest.mark.parametrize(
    "ip", ["169.254.169.254", "fe80::1", "0.0.0.0", "224.0.0.1", "::ffff:169.254.169.254"]
)
def test_no_redirect_at_all_leads_to_a_link_local_address(ip: str) -> None:
    fault_of(lambda: Target("https://x.example/", True, True).check(ip))


@pytest.mark.parametrize("ip", ["10.0.0.1", "127.0.0.1", "::1", "fd00::1", "192.168.1.1"])
def test_what_the_user_names_may_be_anywhere_and_a_private_server_may_name_another(ip: str) -> None:
    Target("http://x.example/").check(ip)
    Target("http://x.example/", True, True).check(ip)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost and 127.0.0.1, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


def tls_server(certificates: Path, answer: Callable[[str, Any, int], bytes | None]) -> Scripted:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return Scripted(answer, tls=context)


@pytest.fixture
def trusted(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
    return certificates


def test_a_server_with_a_certificate_of_ones_own_is_trusted_by_ssl_cert_file(
    http: Http, trusted: Path
) -> None:
    with tls_server(trusted, lambda head, sock, n: OK) as server:
        assert [get(http, server.url) for _ in range(3)] == [b"hello"] * 3
        assert server.connections == [0] * 3, "a connection under TLS is used again too"


def test_a_certificate_that_nobody_vouches_for_is_an_error_that_says_what_to_do(
    http: Http, certificates: Path
) -> None:
    with tls_server(certificates, lambda head, sock, n: OK) as server:
        fault = fault_of(lambda: get(http, server.url))
    assert fault.reason == "certificate"
    assert "SSL_CERT_FILE" in str(fault.final)


# Proxies


def test_a_proxy_is_asked_for_plain_addresses_in_full_and_told_its_login(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Scripted(lambda head, sock, n: OK) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:p%40ss@proxy.example:{proxy.port}")
        asked: list[str] = []

        def resolve(host: str, port: int, one: Patience) -> Any:
            asked.append(host)
            return [address(port)]

        http = Http(resolve=resolve)
        assert get(http, "http://data.example:81/a?b=c") == b"hello"
        assert get(http, "http://data.example:81/d") == b"hello"
        http.close()
        login = base64.b64encode(b"user:p@ss").decode()
        first, second = (head for _, head in proxy.heads)
        assert first.startswith(
            "GET http://data.example:81/a?b=c HTTP/1.1\r\nHost: data.example:81\r\n"
        )
        assert f"Proxy-Authorization: Basic {login}" in first
        assert f"Proxy-Authorization: Basic {login}" in second
        assert proxy.connections == [0, 0]
        assert asked == ["proxy.example"], "the name of the data's host is the proxy's business"


def test_a_proxy_opens_a_tunnel_for_tls_and_does_not_see_what_goes_through(
    trusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_server(trusted, lambda head, sock, n: OK) as server:

        def tunnel(head: str, sock: Any, number: int) -> bytes | None:
            with socket.create_connection(("127.0.0.1", server.port)) as onwards:
                sock.sendall(b"HTTP/1.1 200 Connection established\r\nX: y\r\n\r\n")
                back = threading.Thread(target=pour, args=(onwards, sock))
                back.start()
                pour(sock, onwards)
                back.join(5)
            return None

        with Scripted(tunnel) as proxy:
            monkeypatch.setenv("https_proxy", f"proxy.example:{proxy.port}")
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            http = Http(resolve=lambda host, port, _: [address(port)])
            monkeypatch.setattr(
                "penstock.read.connect.proxy_for", lambda *_: f"proxy.example:{proxy.port}"
            )
            assert get(http, "https://localhost/", Authorization="Bearer hf_token") == b"hello"
            http.close()
            assert proxy.heads[0][1].startswith(
                "CONNECT localhost:443 HTTP/1.1\r\nHost: localhost:443\r\n"
            )
            assert "hf_token" not in proxy.heads[0][1]
            assert "hf_token" in server.heads[0][1]


def pour(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

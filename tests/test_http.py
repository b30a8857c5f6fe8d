"""Connections, TLS, proxies, redirects, retries and hedging, below the level of a dataset."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock import RemoteOptions
from penstock.errors import RemoteError
from penstock.read.http import Network, Place, RequestError, Response
from penstock.read.remote_files import RemoteFiles
from penstock.types import FileRef
from tests.servers import Fault, FileServer

LIMITS = RemoteOptions(
    connect_timeout=5, request_timeout=20, stall_timeout=10, retry_budget=20, metadata_budget=20, backoff=0.02
)  # fmt: skip
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
DATA = bytes(range(256)) * 400


@dataclass
class Scripted:
    """A server that answers each request with what a function returns: bytes, or None to hang up."""

    answer: Callable[[str, Any], bytes | None] = lambda head, sock: OK
    tls: ssl.SSLContext | None = None
    heads: list[str] = field(default_factory=list)
    connections: int = 0

    def __enter__(self) -> Scripted:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[Any] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._sockets.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock: Any) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            if self.tls is not None:
                sock = stack.enter_context(self.tls.wrap_socket(sock, server_side=True))
                self._sockets.append(sock)
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    if not (byte := sock.recv(1)):
                        return
                    head += byte
                self.heads.append(head.decode("latin-1"))
                if (reply := self.answer(self.heads[-1], sock)) is None:
                    return
                sock.sendall(reply)

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10.0)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)


@pytest.fixture
def network() -> Iterator[Network]:
    one = Network(LIMITS)
    yield one
    one.close()


def get(network: Network, url: str, token: str | None = None) -> bytes:
    return network.get(url, "the body", Response.body, token)


# Connections, TLS and proxies


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 and data.example, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:data.example,IP:127.0.0.1",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


def tls_server(certificates: Path) -> Scripted:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return Scripted(tls=context)


@pytest.mark.parametrize("tls", [False, True])
def test_one_connection_serves_many_requests(
    network: Network, certificates: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
    with tls_server(certificates) if tls else Scripted() as server:
        url = f"http{'s' if tls else ''}://127.0.0.1:{server.port}/"
        assert [get(network, url) for _ in range(3)] == [b"hello"] * 3
        assert server.connections == 1


def test_an_untrusted_certificate_is_an_error_that_says_what_to_do(
    network: Network, certificates: Path
) -> None:
    with (
        tls_server(certificates) as server,
        pytest.raises(RemoteError, match=r"certificate is not trusted.*SSL_CERT_FILE"),
    ):
        get(network, f"https://127.0.0.1:{server.port}/")


def test_a_proxy_gets_whole_addresses_and_its_login(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scripted() as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
        assert get(network, "http://data.example:81/a?b=c") == b"hello"
    login = base64.b64encode(b"user:p@ss").decode()
    assert proxy.heads[0].startswith("GET http://data.example:81/a?b=c HTTP/1.1\r\n")
    assert f"Proxy-Authorization: Basic {login}".lower() in proxy.heads[0].lower()


def test_a_proxy_tunnels_tls_and_does_not_see_the_token(
    network: Network, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
    with tls_server(certificates) as server:

        def tunnel(head: str, sock: Any) -> None:
            with socket.create_connection(("127.0.0.1", server.port)) as onwards:
                sock.sendall(b"HTTP/1.1 200 Connection established\r\nX: y\r\n\r\n")
                back = threading.Thread(target=pour, args=(onwards, sock))
                back.start()
                pour(sock, onwards)
                back.join(5)

        with Scripted(tunnel) as proxy:
            monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
            assert get(network, "https://data.example/", token="hf_token") == b"hello"
            network.close()
    assert proxy.heads[0].startswith("CONNECT data.example:443 HTTP/1.")
    assert "hf_token" not in proxy.heads[0]
    assert "hf_token" in server.heads[0]


def pour(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(network: Network) -> None:
    with Scripted() as server, pytest.raises(RemoteError, match="cannot be sent") as raised:
        get(network, f"http://127.0.0.1:{server.port}/", token="se\ncret")
    assert server.heads == []
    error: BaseException | None = raised.value
    while error is not None:
        assert "cr" not in f"{error!r} {vars(error)}".replace("secrets", "")
        error = error.__cause__ or error.__context__


# Redirects


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd", "javascript:alert(1)", "http://cdn.example/a", "https://[::1/a",
        "https://user:password@cdn.example/a", "https://cdn.example:99999/a", "https://10.0.0.1/a",
    ],
)  # fmt: skip
def test_a_redirect_that_leads_astray_is_refused(location: str) -> None:
    with pytest.raises(RequestError, match="refused") as raised:
        Place("https://hub.example/a").redirected(location, False)
    assert isinstance(raised.value.final, RemoteError)
    assert ":password" not in str(raised.value)


PRIVATE = ["10.0.0.1", "172.16.3.4", "127.0.0.1", "100.64.0.1", "0.0.0.0", "::1", "fc00::1", "::ffff:10.0.0.1"]  # fmt: skip
LINK_LOCAL = ["169.254.169.254", "fe80::1%eth0", "::ffff:169.254.169.254"]


def test_a_redirect_leads_into_a_private_network_only_from_one_and_never_to_a_link_local() -> None:
    public, private = Place("https://hub.example/", False), Place("https://hub.example/", True)
    for ip in [*PRIVATE, *LINK_LOCAL]:
        with pytest.raises(RequestError, match="private address"):
            public.check_address(ip)
    for ip in PRIVATE:
        assert private.check_address(ip)
    for ip in LINK_LOCAL:
        with pytest.raises(RequestError, match="private address"):
            private.check_address(ip)
    assert not public.check_address("93.184.216.34")


# Reads


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer({"a.txt": DATA}) as one:
        yield one


def file_of(server: FileServer) -> FileRef:
    etag = next(iter(server._files.values())).version
    return FileRef(server.url_of("a.txt"), "a.txt", len(DATA), "text", etag=etag)


def test_a_retry_asks_only_for_the_bytes_that_are_missing(
    server: FileServer, network: Network
) -> None:
    server.fault(Fault("reset", after=60_000))
    assert RemoteFiles(network, {}).read(file_of(server), 10, 90_000) == DATA[10:90_010]
    first, second = (request.range for request in server.log)
    assert first == (10, 90_010)
    assert second is not None
    assert second[0] > 10
    assert network.stats.counts["bytes"] == 90_000


def test_an_unusually_slow_read_is_made_again(server: FileServer, network: Network) -> None:
    files = RemoteFiles(network, {})
    for _ in range(10):
        files.read(file_of(server), 0, 1000)
    server.fault(Fault("silence"))
    assert files.read(file_of(server), 500, 1000) == DATA[500:1500]
    assert network.stats.totals()["hedges"] == 1
    assert network.stats.faults == {}

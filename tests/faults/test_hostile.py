"""Redirects, portals, damaged Parquet files and odd names: nothing is sent where it must not go, nothing wrong is read."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import CorruptFile, NoData, RemoteError, SourceError
from penstock.feed.spare import SpareThreads
from penstock.read.attempt import Patience
from penstock.read.connect import dial_directly
from penstock.read.http import Http
from penstock.read.remote import RemoteFiles
from penstock.read.retry import Client
from penstock.types import FileRef
from tests.faults.serving import (
    CHOSEN,
    DEADLINE_S,
    QUICK,
    content,
    documents,
    hf,
    parquet,
    run,
)
from tests.servers import Fault, FileServer, HubServer

Expected = Callable[..., list[str]]
DATA = bytes(range(256)) * 16


# Redirects from a public server

PUBLIC = "93.184.216.34"
NAMES = {
    "hub.example": PUBLIC, "cdn.example": "93.184.216.35", "sly.example": "10.0.0.7", "meta.example": "169.254.169.254",
    "2130706433": "127.0.0.1", "six.example": "::1", "wrapped.example": "::ffff:192.168.0.1",
}  # fmt: skip


@contextmanager
def public(*servers: FileServer) -> Iterator[tuple[RemoteFiles, list[str]]]:
    """Files of servers that seem to be out there: whatever is dialled in public is found on loopback."""
    dialled: list[str] = []

    def resolve(host: str, port: int, patience: Patience) -> list[tuple[Any, ...]]:
        ip = NAMES.get(host, host)
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (ip, port))]

    def dial(address: tuple[Any, ...], patience: Patience, shares: int) -> socket.socket:
        ip, port = address[4]
        dialled.append(ip)
        assert ip.startswith("93.184.216."), f"{ip} must not be dialled"
        here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        return dial_directly(here, patience, shares)

    with SpareThreads(4) as threads:
        client = Client(QUICK, http=Http(resolve=resolve, dial=dial), side=threads)
        yield RemoteFiles(client, {}), dialled
        client.close()


def port_of(server: FileServer) -> str:
    return server.url.rpartition(":")[2]


@pytest.mark.parametrize(
    "to",
    [
        "file:///etc/passwd", "ftp://cdn.example/a", "http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/a",
        "http://127.0.0.1:{port}/a", "http://[::1]:{port}/a", "http://sly.example:{port}/a", "http://meta.example/",
        "http://six.example:{port}/a", "http://wrapped.example/a", "http://0.0.0.0:{port}/a", "http://[fe80::1]/a",
        "http://user:password@cdn.example:{port}/a", "http://2130706433:{port}/a", "loop",
    ],
)  # fmt: skip
def test_a_redirect_from_a_public_server_never_leads_astray(to: str) -> None:
    with FileServer({"a": DATA}) as server, public(server) as (files, dialled):
        port = port_of(server)
        file = FileRef(f"http://hub.example:{port}/a", "a", len(DATA), "text")
        server.fault(Fault("redirect", to=to.format(port=port), times=5 if to == "loop" else 1))
        assert files.read(file, 100, 50) == DATA[100:150], "a single one may be a portal's"
        server.fault(Fault("redirect", to=to.format(port=port), times=None))
        with pytest.raises(RemoteError, match=r"hub\.example.*redirect") as raised:
            files.read(file, 200, 50)
        assert "password@" not in str(raised.value)
        assert set(dialled) == {PUBLIC}


def test_an_answer_that_sends_elsewhere_in_mid_run_is_asked_for_at_its_origin_again(
    hub: HubServer, expected: Expected
) -> None:
    hub.fault(Fault("redirect", port="cdn", to="http://127.0.0.1:1/nowhere", skip=3, times=4))
    outcome = run(hf(CHOSEN))
    assert outcome.error is None
    assert outcome.ledger == expected(CHOSEN)


# Logins


def test_a_token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/private", {"a.parquet": content()[CHOSEN]}, private=True, tokens=("hf_secret",))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    outcome = run("hf://datasets/org/private", at={2: hub.expire_signatures})
    assert outcome.ledger == expected(CHOSEN)
    assert {r.headers.get("authorization") for r in hub.log if r.port == "hub"} == {
        "Bearer hf_secret"
    }
    assert {r.headers.get("authorization") for r in hub.log if r.port == "cdn"} == {None}


def test_a_password_goes_to_its_own_server_and_nowhere_else(
    outside: Path, expected: Expected
) -> None:
    data = content()[CHOSEN]
    with (
        FileServer({"a.parquet": data, "b.parquet": data}) as first,
        FileServer({"c.parquet": data}) as second,
    ):
        first.fault(
            Fault(
                "redirect", path="/a.parquet", method="*", to=second.url_of("c.parquet"), times=None
            )
        )
        url = first.url_of("a.parquet").replace("//", "//user:pass%20word@")
        assert run(url).ledger == expected(CHOSEN)
        assert {r.headers.get("authorization") for r in first.log} == {"Basic dXNlcjpwYXNzIHdvcmQ="}
        assert {r.headers.get("authorization") for r in second.log} == {None}
        first.clear_log()
        # Within its own server a redirect keeps the login, with every request.
        first.clear_faults()
        first.fault(Fault("redirect", path="/a.parquet", method="*", to="/b.parquet", times=None))
        outcome = run(url)
        assert outcome.ledger == expected(CHOSEN)
        assert outcome.faults == {}
        assert {r.headers.get("authorization") for r in first.log} == {"Basic dXNlcjpwYXNzIHdvcmQ="}


# Odd answers


def odd(**headers: str) -> Fault:
    return Fault("status", code=206, headers=headers, body=DATA[100:150], times=None)


# Parquet: damaged


def test_a_bit_flipped_on_the_way_is_fetched_again(hub: HubServer, expected: Expected) -> None:
    hub.fault(Fault("flip", port="cdn", path="*a.parquet", skip=1, bits=3, seed=1))
    # Its footer comes with it.
    hub.fault(Fault("flip", port="cdn", path="*b.parquet", bits=40, seed=4))
    outcome = run(hf("parquet"))
    assert sum(r.fault == "flip" for r in hub.log) == 2
    assert outcome.error is None
    assert outcome.ledger == expected("parquet")


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    out = bytearray(data)
    out[at] ^= 1 << bit
    return bytes(out)


def text_at(data: bytes, group: int) -> int:
    """A byte in the middle of the text of a row group."""
    column = pq.read_metadata(pa.BufferReader(data)).row_group(group).column(1)
    return column.data_page_offset + column.total_compressed_size // 2


GOOD = parquet(documents()[:20], rows=5)
LENGTH = int.from_bytes(GOOD[-8:-4], "little")
DAMAGED = {
    "half of it": GOOD[: len(GOOD) // 2],
    "all but the last byte": GOOD[:-1],
    "nothing": b"",
    "eleven bytes": GOOD[:11],
    "magic alone": b"PAR1PAR1PAR1",
    "zeros": bytes(len(GOOD)),
    "magic flipped": flipped(GOOD, len(GOOD) - 1),
    "length of 0": GOOD[:-8] + bytes(4) + GOOD[-4:],
    "length beyond the file": GOOD[:-8] + (2**31 - 1).to_bytes(4, "little") + GOOD[-4:],
    "length of 4 GB": GOOD[:-8] + b"\xff" * 4 + GOOD[-4:],
    "length one off": GOOD[:-8] + (LENGTH - 1).to_bytes(4, "little") + GOOD[-4:],
    "footer of zeros": GOOD[: -8 - LENGTH] + bytes(LENGTH) + GOOD[-8:],
    "a web page": b"<!DOCTYPE html><html>" + b"x" * 5000,
    "a page flipped": flipped(GOOD, text_at(GOOD, 1)),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_an_error_that_names_it_or_is_left_out_and_counted(
    hub: HubServer, what: str
) -> None:
    name = f"org/{what.replace(' ', '-')}"
    hub.add(name, {"a.parquet": GOOD, "b.parquet": DAMAGED[what]})
    url = f"hf://datasets/{name}"
    outcome = run(url)
    assert outcome.seconds < DEADLINE_S
    assert isinstance(outcome.error, CorruptFile)
    assert f"{name}@" in str(outcome.error)
    assert "b.parquet" in str(outcome.error)
    outcome = run(url, on_bad_record="skip")
    assert outcome.error is None
    assert outcome.stats is not None
    assert outcome.stats.bad == {"corrupt": 1}
    lost = 5 if what == "a page flipped" else 20
    assert outcome.stats.documents == 40 - lost


def test_a_bomb_is_noticed_before_it_fills_the_memory(hub: HubServer) -> None:
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"text": ["x" * 2_000_000] * 60}), sink, compression="zstd", row_group_size=60
    )
    hub.add("org/bomb", {"bomb.parquet": sink.getvalue()})
    assert len(sink.getvalue()) < 20_000
    outcome = run("hf://datasets/org/bomb", max_ratio=10)
    assert isinstance(outcome.error, CorruptFile)
    for word in ("bomb.parquet", "compression", str(len(sink.getvalue()))):
        assert word in str(outcome.error)
    outcome = run(["hf://datasets/org/bomb", hf(CHOSEN)], max_ratio=10, on_bad_record="skip")
    assert outcome.error is None
    assert outcome.stats is not None
    assert outcome.stats.bad == {"bomb": 1}


# Other formats: damaged


@pytest.mark.parametrize("form", ["docs.jsonl.gz", "docs.jsonl.zst"])
def test_a_compressed_file_cut_short_is_an_error_that_names_it(hub: HubServer, form: str) -> None:
    name = f"org/cut-{form[-3:].strip('.')}"
    data = content()[form]
    hub.add(name, {form: data[: len(data) // 2]})
    outcome = run(f"hf://datasets/{name}")
    assert isinstance(outcome.error, CorruptFile)
    assert form in str(outcome.error)
    outcome = run([f"hf://datasets/{name}", hf("docs.jsonl")], on_bad_record="skip")
    assert outcome.error is None
    assert outcome.stats is not None
    assert outcome.stats.bad == {"corrupt": 1}


# Names


@pytest.mark.parametrize(
    "path",
    ["../../../etc/passwd.jsonl", "/etc/passwd.jsonl", "d/../../x.jsonl", "d//x.jsonl", "d/./x.jsonl", "d/\0x.jsonl",
     "d\\..\\x.jsonl", "d/x\n.jsonl", "other/x.jsonl", ""],
)  # fmt: skip
def test_a_listing_that_leads_elsewhere_is_refused_and_nothing_is_written_outside(
    outside: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    sha = "a" * 40
    revision = json.dumps({"sha": sha}).encode()
    tree = json.dumps([{"type": "file", "path": path, "size": 5, "oid": "b" * 40}]).encode()
    files = {
        "api/datasets/org/name/revision/main": revision,
        f"api/datasets/org/name/tree/{sha}/d": tree,
        f"datasets/org/name/resolve/{sha}/{path}": b"hello",
    }
    before = sorted(p for p in outside.parent.rglob("*") if outside not in p.parents)
    with FileServer(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        outcome = run("hf://datasets/org/name/d")
        assert not any("resolve" in r.path for r in server.log)
    assert isinstance(outcome.error, SourceError)
    assert not isinstance(outcome.error, NoData)
    assert (
        sorted(p for p in outside.parent.rglob("*") if outside not in p.parents and p != outside)
        == before
    )

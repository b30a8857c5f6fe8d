"""Redirects, portals, damaged Parquet files and odd names: nothing is sent where it must not go, nothing wrong is read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import CorruptFile
from tests.faults.serving import CHOSEN, DEADLINE_S, content, documents, hf, parquet, run
from tests.servers import Fault, FileServer, HubServer

Expected = Callable[..., list[str]]
# Redirects from a public server

PUBLIC = "93.184.216.34"
ASTRAY = [
    "file:///etc/passwd", "ftp://cdn.example/a", "http://169.254.169.254/latest/meta-data/", "http://10.0.0.7/a",
    "http://127.0.0.1/a", "http://[::1]/a", "http://sly.example/a", "http://meta.example/", "http://six.example/a",
    "http://0.0.0.0/a", "http://user:password@cdn.example/a", "http://2130706433/a", "/loop",
]  # fmt: skip
HOSTS = f"""
{PUBLIC} hub.example
93.184.216.35 cdn.example
10.0.0.7 sly.example
169.254.169.254 meta.example
::1 six.example
"""

# In a network of its own, where all of these addresses are this machine.
CHILD = """
import http.server, json, socket, subprocess, sys, threading
from tests.faults.serving import IMPATIENT, run

hosts, astray = sys.argv[1], json.loads(sys.argv[2])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
for address in ("93.184.216.34", "93.184.216.35", "10.0.0.7", "169.254.169.254"):
    subprocess.run(["ip", "addr", "add", address + "/32", "dev", "lo"], check=True)

class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True

class Handler(http.server.BaseHTTPRequestHandler):
    to, asked = "", set()

    def do_GET(self):
        Handler.asked.add(self.connection.getsockname()[0].removeprefix("::ffff:"))
        self.send_response(302)
        self.send_header("Location", Handler.to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass

server = Server(("::", 80), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
texts = []
for Handler.to in astray:
    error = run("http://hub.example/a.jsonl", remote=IMPATIENT).error
    texts.append(f"{type(error).__name__}: {error}")
print(json.dumps({"asked": sorted(Handler.asked), "texts": texts}))
"""


def test_a_redirect_from_a_public_server_never_leads_astray(outside: Path, tmp_path: Path) -> None:
    alone = ["unshare", "-rnm"]
    try:
        subprocess.run([*alone, "ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespace can be made here")
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    command = [*alone, sys.executable, "-c", CHILD, str(hosts), json.dumps(ASTRAY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["asked"] == [PUBLIC]
    for text in report["texts"]:
        assert text.startswith("RemoteError: http://hub.example/a.jsonl"), text
        assert "redirect" in text
        assert "password@" not in text


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
        first.fault(Fault("redirect", path="/a.parquet", to=second.url_of("c.parquet"), times=None))
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
    "nothing": b"",
    "zeros": bytes(len(GOOD)),
    "magic flipped": flipped(GOOD, len(GOOD) - 1),
    "length beyond the file": GOOD[:-8] + (2**31 - 1).to_bytes(4, "little") + GOOD[-4:],
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
    assert outcome.stats.bad == {"corrupt": 1}


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

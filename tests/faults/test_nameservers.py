"""Nameservers that say no or nothing, ports that refuse, a link that goes down: in a network of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.serving import DEADLINE_S

ROOT = Path(__file__).parents[2]

# A nameserver of its own, as /etc/resolv.conf of this namespace only names it.
CHILD = """
import json, socket, subprocess, sys, threading
from tests.faults.serving import CHOSEN, IMPATIENT, content, run
from tests.servers import FileServer

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

def answer(sock):
    while True:
        query, sender = sock.recvfrom(512)
        sock.sendto(query[:2] + bytes([0x81, 0x83]) + query[4:6] + bytes(6) + query[12:], sender)

task, url, names = sys.argv[1:]
link("up")
subprocess.run(["mount", "--bind", names, "/etc/resolv.conf"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
if task == "no such name":
    threading.Thread(target=answer, args=(server,), daemon=True).start()
if task == "gone for good":
    with FileServer({"a.parquet": content()[CHOSEN]}) as files:
        how = {"prefetch_size": 1, "n_workers": 1}
        outcome = run(files.url_of("a.parquet"), at={1: lambda: link("down")}, how=how, remote=IMPATIENT)
else:
    outcome = run(url, remote=IMPATIENT)
print(json.dumps({"error": type(outcome.error).__name__, "text": str(outcome.error), "seconds": outcome.seconds}))
"""


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """How to run something in a network of its own, with a /etc/resolv.conf of its own."""
    for name in ("unshare", "ip", "mount"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    if not Path("/etc/resolv.conf").exists():
        pytest.skip("there is no /etc/resolv.conf to put another one over")
    command = ["unshare", "-rnm"]
    if subprocess.run(
        [*command, "mount", "--bind", "/dev/null", "/etc/resolv.conf"], capture_output=True
    ).returncode:
        pytest.skip("no network and mount namespaces may be made here")
    return command


@pytest.mark.parametrize(
    ("task", "url", "reason"),
    [
        ("refused", "http://127.0.0.1:9/a.parquet", "refused"),
        ("refused", "http://[::1]:9/a.parquet", "refused"),
        ("no such name", "http://nowhere.example/a.parquet", "dns"),
        ("no answer", "http://nowhere.example/a.parquet", "dns"),
        ("gone for good", "/a.parquet", "attempt"),
    ],
)
def test_what_cannot_be_reached_is_an_error_in_time(
    alone: list[str], tmp_path: Path, task: str, url: str, reason: str
) -> None:
    names = tmp_path / "resolv.conf"
    names.write_text("nameserver 127.0.0.1\noptions timeout:5 attempts:2\n")
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        [*alone, sys.executable, "-c", CHILD, task, url, str(names)],
        cwd=ROOT, env=clean | {"PENSTOCK_CACHE": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["error"] == "RemoteError", report
    assert report["seconds"] < DEADLINE_S
    for word in (url, reason, "See that the server can be reached"):
        assert word in report["text"], report

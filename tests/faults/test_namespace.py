"""Networks that are not there, names that do not resolve, a link that goes down: in a network of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.serving import CHOSEN, DEADLINE_S

ROOT = Path(__file__).parents[2]

CHILD = """
import json, socket, subprocess, sys, threading
from dataclasses import replace
from tests.faults.serving import CHOSEN, IMPATIENT, QUICK, content, run
from tests.servers import FileServer

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

def answer(sock):
    while True:
        query, sender = sock.recvfrom(512)
        sock.sendto(query[:2] + bytes([0x81, 0x83]) + query[4:6] + bytes(6) + query[12:], sender)

def fall():
    link("down")
    if task == "back":
        threading.Timer(1.2, link, ("up",)).start()

task, url, names = sys.argv[1:]
if task != "no network":
    link("up")
    subprocess.run(["mount", "--bind", names, "/etc/resolv.conf"], check=True)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
if task == "no such name":
    threading.Thread(target=answer, args=(server,), daemon=True).start()
if task in ("back", "gone"):
    with FileServer({"a.parquet": content()[CHOSEN]}) as files:
        how = {"prefetch_size": 1, "n_workers": 1}
        remote = replace(QUICK if task == "back" else IMPATIENT, fetches=1)
        outcome = run(files.url_of("a.parquet"), at={1: fall}, how=how, remote=remote)
else:
    outcome = run(url, remote=IMPATIENT)
print(json.dumps({
    "error": outcome.error and type(outcome.error).__name__, "text": str(outcome.error),
    "ledger": outcome.ledger, "seconds": outcome.seconds,
    "left": [t.name for t in threading.enumerate() if t.name.startswith("penstock-")],
}))
"""


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a task in a network and with a /etc/resolv.conf of its own."""
    unshare = ["unshare", "-rnm"]
    probe = [*unshare, "sh", "-c", "ip link set lo up; mount --bind /dev/null /etc/resolv.conf"]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network and mount namespaces may be made here")
    names = tmp_path / "resolv.conf"
    names.write_text("nameserver 127.0.0.1\noptions timeout:5 attempts:2\n")
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    clean |= {"PENSTOCK_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": "http://hub.invalid"}

    def run(task: str, url: str = "") -> dict[str, Any]:
        command = [*unshare, sys.executable, "-c", CHILD, task, url, str(names)]
        done = subprocess.run(
            command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert report["left"] == []
        assert report["seconds"] < DEADLINE_S
        return report

    return run


@pytest.mark.parametrize(
    ("task", "url", "reason"),
    [
        ("no network", "http://93.184.216.34/a.parquet", "unreachable"),
        ("no network", "hf://datasets/org/name", "dns"),
        ("refused", "http://127.0.0.1:9/a.parquet", "refused"),
        ("no such name", "http://nowhere.example/a.parquet", "dns"),
        ("no answer", "http://nowhere.example/a.parquet", "dns"),
        ("gone", "/a.parquet", "attempt"),
    ],
)
def test_what_cannot_be_reached_is_an_error_in_time(
    alone: Callable[..., dict[str, Any]], task: str, url: str, reason: str
) -> None:
    report = alone(task, url)
    assert report["error"] == "RemoteError", report
    for word in (url, reason, "attempts in", "See that the server can be reached"):
        assert word in report["text"], report


def test_a_network_that_goes_away_and_comes_back_is_waited_for(
    alone: Callable[..., dict[str, Any]], expected: Callable[..., list[str]]
) -> None:
    report = alone("back")
    assert report["error"] is None, report["text"]
    assert report["ledger"] == expected(CHOSEN)

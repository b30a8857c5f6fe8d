"""Names that do not resolve and networks that are not there, in a network namespace of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.serving import CHOSEN, DEADLINE_S

ROOT = Path(__file__).parent.parent.parent

CHILD = """
import json, os, subprocess, sys, threading
from dataclasses import replace
from tests.faults.serving import CHOSEN, IMPATIENT, QUICK, content, run
from tests.servers import FileServer

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

task = sys.argv[1]
if task == "up and down":
    link("up")
    with FileServer({"a.parquet": content()[CHOSEN]}) as server:
        def fall():
            link("down")
            threading.Timer(1.2, link, ("up",)).start()
        one_by_one = replace(QUICK, fetches=1)
        outcome = run(server.url_of("a.parquet"), at={1: fall}, how={"prefetch_size": 1, "n_workers": 1}, remote=one_by_one)
else:
    outcome = run(sys.argv[2], remote=IMPATIENT)
for thread in threading.enumerate():
    if thread.name == "penstock-lookup":
        thread.join(20)  # it cannot be ended, and has its answer: there is no network
report = {
    "error": None if outcome.error is None else type(outcome.error).__name__,
    "text": str(outcome.error),
    "ledger": outcome.ledger,
    "seconds": outcome.seconds,
    "faults": outcome.stats.faults if outcome.stats is not None else {},
    "left": [t.name for t in threading.enumerate() if t.name.startswith("penstock-")],
}
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """How to run something in a network of its own, where there is none."""
    found = shutil.which("unshare")
    if found is None:
        pytest.skip("unshare is not installed")
    for command in ([found, "-n"], [found, "-rn"]):
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no network namespace may be made here")


def run_alone(alone: list[str], cache: Path, *args: str, **environment: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        [*alone, sys.executable, "-c", CHILD, *args],
        cwd=ROOT, env=clean | {"PENSTOCK_CACHE": str(cache)} | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["left"] == []
    assert report["seconds"] < DEADLINE_S
    return report


@pytest.mark.parametrize(
    ("url", "reasons"),
    [
        ("http://93.184.216.34/a.parquet", ("unreachable",)),
        ("http://[2606:2800:220:1::1]/a.parquet", ("unreachable", "network")),
        ("http://nowhere.invalid/a.parquet", ("dns",)),
        ("hf://datasets/org/name", ("dns",)),
    ],
    ids=["no route", "no route for IPv6", "no such name", "no Hub"],
)
def test_a_network_that_is_not_there_is_an_error_that_says_so(
    alone: list[str], tmp_path: Path, url: str, reasons: tuple[str, ...]
) -> None:
    report = run_alone(alone, tmp_path, "read", url, HF_ENDPOINT="http://hub.invalid")
    assert report["error"] == "RemoteError"
    assert any(reason in report["text"] for reason in reasons), report["text"]
    assert "attempts in" in report["text"]
    assert ("org/name" if url.startswith("hf") else url) in report["text"]


def test_a_network_that_goes_away_and_comes_back_is_waited_for(
    alone: list[str], tmp_path: Path, expected: Callable[..., list[str]]
) -> None:
    if shutil.which("ip") is None:
        pytest.skip("the ip command is not installed")
    report = run_alone(alone, tmp_path, "up and down")
    assert report["error"] is None, report["text"]
    assert report["ledger"] == expected(CHOSEN)
    assert sum(report["faults"].values()) > 0

"""Small things on disk: sound or not there at all, made once for all processes of a host, never in the way."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.read.kept import Kept

HOLDER = """
import sys, time
from pathlib import Path
from penstock.read.kept import Kept
def make():
    print("holding", flush=True)
    time.sleep(60)
    return b"late"
Kept(Path(sys.argv[1])).once("things", "key", make, 10.0)
"""

MAKER = """
import os, sys, time
from pathlib import Path
from penstock.read.kept import Kept
def make():
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(0.3)
    return b"thing"
sys.stdin.readline()
assert Kept(Path(sys.argv[1])).once("things", "key", make, 30.0) == b"thing"
"""


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in (folder / kind).rglob("*") if path.is_file())


def never() -> bytes:
    raise AssertionError("it was made again")


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds the lock of "key" until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holding\n"
        yield process
        process.kill()


def test_what_is_put_is_there_for_others(tmp_path: Path) -> None:
    Kept(tmp_path).put("things", "key", b"\x00one\ntwo")
    assert Kept(tmp_path).get("things", "key") == b"\x00one\ntwo"


def test_an_entry_that_was_cut_or_flipped_anywhere_is_dropped(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.put("things", "key", b"some bytes")
    (path,) = files(tmp_path, "things")
    good = path.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    for bad in [good[:n] for n in range(len(good))] + flipped + [good + b"x"]:
        path.write_bytes(bad)
        assert kept.get("things", "key") is None
        assert not path.exists()


def test_what_changes_counts_only_if_it_is_newer(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    before = time.time()
    kept.put("things", "key", b"old")
    assert kept.get("things", "key", since=before) == b"old"
    after = time.time() + 0.001
    assert kept.get("things", "key", since=after) is None
    assert kept.once("things", "key", lambda: b"new", 1.0, since=after) == b"new"
    assert kept.get("things", "key") == b"new"


def test_processes_that_ask_together_have_it_made_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKER, str(tmp_path / "kept"), str(log)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    time.sleep(0.5)  # they are all there, or nearly
    for process in processes:
        process.communicate(b"go\n", timeout=30)
    assert [process.returncode for process in processes] == [0] * 4
    assert log.read_text() == "made\n"


def test_threads_that_ask_together_have_it_made_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.1)
        return b"thing"

    kept = Kept(tmp_path)
    threads = [
        threading.Thread(target=kept.once, args=("things", "key", make, 10.0)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_the_one_who_waits_goes_on_when_the_holder_is_killed(
    tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    timer = threading.Timer(0.3, holder.kill)
    timer.start()
    began = time.monotonic()
    assert Kept(tmp_path).once("things", "key", lambda: b"ours", 60.0) == b"ours"
    assert time.monotonic() - began < 30.0
    timer.join()


def test_a_disk_that_takes_nothing_costs_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = Kept(tmp_path / "file")
    assert [kept.once("things", str(i), lambda: b"made", 60.0) for i in range(3)] == [b"made"] * 3
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2  # one for reading, one for writing
    assert all(str(tmp_path / "file") in text for text in warnings)


def test_a_kind_is_bounded_and_loses_its_oldest_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path, max_bytes=100_000)
    kept.put("others", "key", b"o" * 50_000)
    for i in range(400):
        kept.put("things", str(i), b"x" * 900)
    left = [i for i in range(400) if kept.get("things", str(i)) is not None]
    size = sum(path.stat().st_size for path in files(tmp_path, "things"))
    # It is looked at now and then only, so some more may have come since.
    assert size < 300_000
    assert left == list(range(400 - len(left), 400))
    assert kept.get("others", "key") is not None

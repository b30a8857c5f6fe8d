"""Following files: more ranks than a process may have files open, and files that change while nobody holds them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.watch.heartbeat import Heartbeat
from penstock.watch.heartbeat_reader import Tail
from penstock.watch.line import encode
from tests.recorded import Recording, write_run

COMMAND = (sys.executable, "-m", "penstock.cli.main", "watch")


def line(step: int) -> bytes:
    ts = 1.79e9 + step
    return encode(
        {
            "ts": ts,
            "iso": "",
            "mono": float(step),
            "pid": 1,
            "rank": 0,
            "step": step,
            "msg": "progress",
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat_rank0.jsonl"


@pytest.fixture
def tail(path: Path) -> Tail:
    return Tail(path)


@pytest.fixture
def steps(tail: Tail) -> Callable[[], list[int]]:
    return lambda: [found["step"] for found in tail.poll()]


def append(path: Path, *pieces: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(pieces))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_more_ranks_than_files_may_be_open_are_all_shown(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=3, ranks=300, ended=False))
    done = subprocess.run(
        [*COMMAND, str(tmp_path), "--once"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    shown = [
        row for row in done.stdout.splitlines() if row.startswith("rank ") and "step 3 " in row
    ]
    assert len(shown) == 300


def test_a_tail_follows_through_rotations_without_losing_or_repeating_a_line(
    tmp_path: Path,
) -> None:
    found: list[int] = []
    with Heartbeat(tmp_path, max_bytes=4096, keep=1000) as heart:
        tail = Tail(heart.path)
        for step in range(1, 601):
            heart.progress(step, loss=1.0)
            if step % 7 == 0:
                found += [line["step"] for line in tail.poll() if line["msg"] == "progress"]
    found += [line["step"] for line in tail.poll() if line["msg"] == "progress"]
    assert tail.poll() == []
    assert found == list(range(1, 601))
    assert tail.skipped == 0


def test_a_long_history_comes_in_pieces_and_once(path: Path, tail: Tail) -> None:
    append(path, *map(line, range(100)))
    found = []
    while True:
        lines = tail.poll(max_bytes=1000)
        found += [one["step"] for one in lines]
        if not tail.behind:
            break
    assert found == list(range(100))


def test_a_file_that_was_deleted_is_followed_by_the_next_one(
    path: Path, steps: Callable[[], list[int]]
) -> None:
    append(path, line(1), line(2))
    assert steps() == [1, 2]
    path.unlink()
    assert steps() == []
    append(path, line(3))
    assert steps() == [3]
    for step in range(4, 7):
        path.rename(f"{path}.{7 - step}")
        append(path, line(step))
    assert steps() == [4, 5, 6]

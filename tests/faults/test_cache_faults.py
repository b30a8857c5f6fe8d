"""The token cache on disks that are full, read-only, failing or gone with the power: the run goes on, no entry is torn."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_token_store import REF, age, assert_same, bytes_in, cache_in, key_of, sized

ROOT = Path(__file__).parent.parent.parent
STEP = 10_000
PUTS = 2
LAST = 8

# It reports with `writev`, which nothing else uses, so that faults of other calls spare the report.
# It imports little, because it is started many times.
CHILD = """
import json, logging, os, sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from penstock.read.token_store import Key, TokenStore
from penstock.types import ChunkRef, FileRef, TokenChunk

told = []
class Keep(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())

logging.getLogger("penstock").addHandler(Keep())
folder, task, puts, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ref = ChunkRef(FileRef("/a", "a", 1, "parquet"), 0, 1)
cache = TokenStore(folder / "tokens", 1 << 30, best_effort=True)
keys = [Key("a", i, "r") for i in range(puts)]
docs = [pa.array([bytes([i]) * step], pa.large_binary()) for i in range(puts)]
chunks = [TokenChunk(ref, doc, np.arange(1), False, [], 0, step) for doc in docs]
report = {}
if task == "put":
    report["kept"] = [cache.put(*pair) is not None for pair in zip(keys, chunks)]
elif task == "crash":
    # One start for all: the last of LAST calls is fatal, so as many idle ones come before as puts it at the nth.
    scratch = os.open(folder / "scratch", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    idle = {
        "write": lambda: os.write(scratch, b"x"),
        "fsync": lambda: os.fsync(scratch),
        "rename": lambda: os.rename(folder / "scratch", folder / "scratch"),
        "pwrite64": lambda: os.pwrite(scratch, b"x", 0),
    }[sys.argv[5]]
    report["codes"] = []
    for nth in range(1, LAST + 1):
        child = os.fork()
        if child == 0:
            for _ in range(LAST - nth):
                idle()
            cache = TokenStore(folder / str(nth) / "tokens", 1 << 30, best_effort=True)
            os._exit(0 if all([cache.put(*pair) for pair in zip(keys, chunks)]) else 1)
        report["codes"].append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
found = [cache.get(key, ref) for key in keys]
assert all(one is None or one.docs.equals(doc) for one, doc in zip(found, docs))
report |= {"found": [one is not None for one in found], "told": told, "off": cache.off, "counts": cache.counts()}
os.writev(os.open(folder / "report.json", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), [json.dumps(report).encode()])
""".replace("LAST", str(LAST))


@pytest.fixture(scope="module")
def strace() -> list[str]:
    """How to run something under strace."""
    found = shutil.which("strace")
    if found is None:
        pytest.skip("strace is not installed")
    command = [found, "-f", "-qqq", "-o", "/dev/null"]
    tried = subprocess.run(
        [*command, "--seccomp-bpf", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO", "true"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip(f"strace cannot inject faults here: {tried.stderr.strip()}")
    return command


def run(
    strace: list[str], folder: Path, task: str, calls: str = "fsync", fault: str = "", *only: str
) -> int:
    """Run the child with a fault in some of its system calls; its exit code, negative for a signal."""
    traced = [*strace, "-e", f"trace={calls}", *only]
    if fault:
        traced += ["-e", f"inject={calls}:{fault}"]
    if "signal" not in fault:
        traced.append(
            "--seccomp-bpf"
        )  # starts faster, since no other call is stopped; but then no signal arrives
    arguments = [str(folder), task, str(PUTS), str(STEP), calls.split(",")[0]]
    command = [*traced, sys.executable, "-c", CHILD, *arguments]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=60).returncode


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob("tokens/*/.*"))


@pytest.mark.parametrize(
    ("calls", "nth"),
    [("write", 2), ("write", 4), ("fsync", 2), ("rename,?renameat,?renameat2", 2)],
)
def test_a_failing_disk_turns_the_cache_off_with_one_warning(
    strace: list[str], tmp_path: Path, calls: str, nth: int
) -> None:
    assert run(strace, tmp_path, "put", calls, f"error=EIO:when={nth}+") == 0
    report = report_of(tmp_path)
    assert report["found"] == report["kept"]  # what was kept before is still read
    assert not report["kept"][-1]
    assert report["kept"][0] == ((calls, nth) != ("write", 2))
    assert "Input/output error" in report["off"]
    assert len(report["told"]) == 1
    assert str(tmp_path) in report["told"][0]
    assert "PENSTOCK_CACHE" in report["told"][0]
    assert temporary(tmp_path) == []
    assert cache_in(tmp_path).verify() == []


def test_a_disk_that_fails_when_read_gives_misses_and_no_signal(
    strace: list[str], tmp_path: Path
) -> None:
    assert run(strace, tmp_path, "put") == 0
    second = tmp_path / "tokens" / key_of(1).name
    assert run(strace, tmp_path, "get", "pread64", "error=EIO", "-P", str(second)) == 0
    report = report_of(tmp_path)
    assert report["found"] == [True, False]
    assert len(report["told"]) == 1
    assert "Input/output error" in report["told"][0]
    assert second.exists()  # it may be well once the disk is


@pytest.mark.parametrize("calls", ["write", "fsync", "rename,?renameat,?renameat2", "pwrite64"])
def test_a_crash_at_any_moment_leaves_no_torn_entry(
    strace: list[str], tmp_path: Path, calls: str
) -> None:
    assert run(strace, tmp_path, "crash", calls, f"signal=KILL:when={LAST}") == 0
    codes = report_of(tmp_path)["codes"]
    crashes = codes.count(-signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * crashes + [0] * (LAST - crashes)
    assert PUTS <= crashes < LAST  # at each such call of each put, and then at none
    for nth in range(1, LAST + 1):
        folder = tmp_path / str(nth)
        cache = cache_in(folder)
        assert cache.verify() == []
        found = [cache.get(key_of(i), REF) for i in range(PUTS)]
        assert all(
            one is None or one.docs.to_pylist() == [bytes([i]) * STEP]
            for i, one in enumerate(found)
        )
        assert (None in found) == (nth <= crashes)
        # The next process continues from there. The bytes in use are never counted too low.
        assert all(cache.put(key_of(i), sized(STEP, i)) for i in range(PUTS + 1))
        assert int((folder / "tokens" / ".lock").read_bytes()) >= bytes_in(cache)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_turns_the_cache_off_with_one_warning(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_in(small_disk)
    keys = [key_of(i) for i in range(8)]
    kept = [cache.put(key, sized(4 * STEP, i)) is not None for i, key in enumerate(keys)]
    n = kept.index(False)
    assert n >= 4
    assert not any(kept[n:])
    assert cache.off is not None
    assert "No space left" in cache.off
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert temporary(small_disk) == []
    assert cache.verify() == []
    for i, key in enumerate(keys[:n]):
        assert_same(cache.get(key, REF), sized(4 * STEP, i))
    assert cache.get(keys[n], REF) is None


def test_a_read_only_disk_is_read_and_turns_writing_off_with_one_warning(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, key = cache_in(small_disk), key_of(0)
    assert before.put(key, sized(STEP))
    age(before, key, 90 * 60)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    cache = cache_in(small_disk)
    assert_same(cache.get(key, REF), sized(STEP))
    for i in range(1, 4):
        assert not cache.put(key_of(i), sized(STEP))
    assert_same(cache.get(key, REF), sized(STEP))
    assert cache.off is not None
    assert "Read-only" in cache.off
    assert len(caplog.records) == 1
    assert len(list(cache.list())) == 1

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

import pytest

from tests.test_token_store import REF, age, assert_same, bytes_in, cache_in, key_of, sized

ROOT = Path(__file__).parent.parent.parent
STEP = 10_000
PUTS = 2
LAST = 8

# One start for all: the last of LAST calls is fatal, so as many idle ones come before as put it at the nth.
CHILD = """
import json, os, sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from penstock.read.token_store import Key, TokenStore
from penstock.types import ChunkRef, FileRef, TokenChunk

folder, puts, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ref = ChunkRef(FileRef("/a", "a", 1, "parquet"), 0, 1)
keys = [Key("a", i, "r") for i in range(puts)]
docs = [pa.array([bytes([i]) * step], pa.large_binary()) for i in range(puts)]
chunks = [TokenChunk(ref, doc, np.arange(1), False, [], 0, step) for doc in docs]
scratch = os.open(folder / "scratch", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
idle = {
    "write": lambda: os.write(scratch, b"x"),
    "fsync": lambda: os.fsync(scratch),
    "rename": lambda: os.rename(folder / "scratch", folder / "scratch"),
    "pwrite64": lambda: os.pwrite(scratch, b"x", 0),
}[sys.argv[4]]
codes = []
for nth in range(1, LAST + 1):
    child = os.fork()
    if child == 0:
        for _ in range(LAST - nth):
            idle()
        cache = TokenStore(folder / str(nth) / "tokens", 1 << 30, best_effort=True)
        os._exit(0 if all([cache.put(*pair) for pair in zip(keys, chunks)]) else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
# With `writev`, which nothing else uses, so that the fault spares it.
os.writev(1, [json.dumps(codes).encode()])
""".replace("LAST", str(LAST))


def injecting(calls: str, fault: str) -> list[str]:
    """Return the beginning of a command whose system calls fail."""
    strace = ["strace", "-f", "-qqq", "-o", "/dev/null"]
    probe = [*strace, "--seccomp-bpf", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO", "true"]
    if shutil.which("strace") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("strace cannot inject faults here")
    # Much faster, but no signal arrives with it.
    fast = [] if "signal" in fault else ["--seccomp-bpf"]
    return [*strace, *fast, "-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]


def killed(folder: Path, calls: str) -> list[int]:
    """Return the exit codes of processes that are killed at the first, second … of these calls."""
    traced = injecting(calls, f"signal=KILL:when={LAST}")
    arguments = [str(folder), str(PUTS), str(STEP), calls.split(",")[0]]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [*traced, sys.executable, "-c", CHILD, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=60, capture_output=True, check=True)
    codes: list[int] = json.loads(done.stdout)
    return codes


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob("tokens/*/.*"))


@pytest.mark.parametrize("calls", ["write", "fsync", "rename,?renameat,?renameat2", "pwrite64"])
def test_a_crash_at_any_moment_leaves_no_torn_entry(tmp_path: Path, calls: str) -> None:
    codes = killed(tmp_path, calls)
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


STREAM = """
import json, os, sys
from penstock import AsyncDataLoader, TextDataset
from tests.contracts import take

data = TextDataset(sys.argv[1], tokenizer="byte", seq_len=32, cache=True, chunk_bytes=4096)
with AsyncDataLoader(data, 4, shuffle=True, seed=2, epochs=1) as loader:
    batches = take(loader, 10**6)
    stats = loader.stats()
counts = [stats.cache_hits, stats.cache_written]
os.writev(1, [json.dumps([batches, counts]).encode()])
"""


def stream(data: Path, cache: Path, *strace: str) -> tuple[list[str], list[int], str]:
    """Return the batches of a process, its cache hits and writes, and its stderr."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PENSTOCK_CACHE": str(cache)}
    command = [*strace, sys.executable, "-c", STREAM, str(data)]
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    batches, counts = json.loads(done.stdout)
    return batches, counts, done.stderr


@pytest.mark.parametrize("calls", ["fsync", "rename,?renameat,?renameat2", "pwrite64"])
def test_a_cache_that_cannot_be_written_leaves_the_stream_as_it_is(
    corpus: Path, tmp_path: Path, calls: str
) -> None:
    data = corpus / "docs.jsonl"
    expected = stream(data, tmp_path / "good")[0]
    cache = tmp_path / "bad"
    batches, counts, errors = stream(data, cache, *injecting(calls, "error=EIO"))
    assert batches == expected
    assert counts == [0, 0]
    assert str(cache) in errors
    assert "Input/output error" in errors
    assert list(cache.glob("tokens/??/*")) == []


def test_a_cache_that_cannot_be_read_leaves_the_stream_as_it_is(
    corpus: Path, tmp_path: Path
) -> None:
    data = corpus / "docs.jsonl"
    expected, _, _ = stream(data, tmp_path)
    entries = sorted(tmp_path.glob("tokens/??/*.arrows"))
    assert len(entries) > 1
    only = [word for entry in entries for word in ("-P", str(entry))]
    batches, counts, errors = stream(data, tmp_path, *injecting("pread64", "error=EIO"), *only)
    assert batches == expected
    assert counts[0] == 0
    assert "Input/output error" in errors
    assert sorted(tmp_path.glob("tokens/??/*.arrows")) == entries  # the disk may recover


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

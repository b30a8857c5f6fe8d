"""Memory: bounded by settings, not by the data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.types import MiB

CHILD = """
import json, sys
from penstock import AsyncDataLoader, TextDataset

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

about, how = json.loads(sys.argv[1])
data = TextDataset(tokenizer="byte", **about)
with AsyncDataLoader(data, **how) as loader:
    for batch in loader:
        pass
    print(json.dumps({"peak": status("VmHWM"), "read": loader.stats().text_bytes}))
"""


def measure(about: dict[str, Any], how: dict[str, Any]) -> dict[str, int]:
    command = [sys.executable, "-c", CHILD, json.dumps([about, how])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


def write(path: Path, groups: int, group_bytes: int, doc_bytes: int) -> None:
    """Row groups of documents of one length."""
    per_group, rng = max(1, group_bytes // doc_bytes), np.random.default_rng(0)
    with pq.ParquetWriter(
        path, pa.schema([("text", pa.string())]), compression="lz4", use_dictionary=False
    ) as writer:
        for _ in range(groups):
            letters = rng.integers(97, 123, (per_group, doc_bytes), dtype=np.uint8)
            texts = [row.tobytes().decode() for row in letters]
            writer.write_table(pa.table({"text": texts}), row_group_size=per_group)


@pytest.mark.slow
def test_large_row_groups_and_documents_stay_within_the_stated_bound(tmp_path: Path) -> None:
    """The bound is what a run of little data takes, and four things more.

    A run of little data takes about 300 MiB: the interpreter and its libraries, torch among them,
    whose size changes with their versions. To that come the memory limit (read-ahead and queue);
    two windows of tokens, of 2 bytes each; what each worker has in hand, five times its text if
    every byte is a token; and 64 MiB of freed memory that the allocator keeps for each of the three
    threads, two workers and the producer (`pipeline.keep_freed_memory`).
    """
    group, limit = 24 * MiB, 192 * MiB
    write(tmp_path / "small.parquet", groups=1, group_bytes=MiB, doc_bytes=8000)
    write(tmp_path / "large.parquet", groups=16, group_bytes=group, doc_bytes=8 * MiB)
    how = {"batch_size": 16, "n_workers": 2, "shuffle": True, "memory_limit": limit, "epochs": 1}
    small, large = (
        measure({"urls": str(tmp_path / name), "seq_len": 1024, "shuffle_chunks": 1}, how)
        for name in ("small.parquet", "large.parquet")
    )
    assert large["read"] >= 16 * group
    bound = small["peak"] + limit + 2 * (2 * group) + 2 * 5 * group + 3 * 64 * MiB
    assert large["peak"] < bound, f"{large['peak'] / MiB:.0f} MiB, allowed are {bound / MiB:.0f}"


def test_a_small_limit_still_runs(tmp_path: Path) -> None:
    write(tmp_path / "d.parquet", groups=4, group_bytes=4 * MiB, doc_bytes=2000)
    about = {"urls": str(tmp_path / "d.parquet"), "seq_len": 1024}
    how = {"batch_size": 16, "prefetch_size": 1, "n_workers": 3, "shuffle": True, "epochs": 1}
    how["memory_limit"] = 600_000
    assert measure(about, how)["read"] >= 16 * MiB * 0.99

"""What the benchmarks share: where things are, the shape of a batch, the options that every script has.

In:    the environment: PENSTOCK_BENCH_DIR, a folder for what may be made again at any time (by default below the
       temporary folder), and PENSTOCK_BENCH_DATA, where books.parquet and gpt2-tokenizer.json are taken from.
Out:   constants, folders, a parser.
Where: every script imports this and its neighbours (`corpora`, `hosted`, `rounds`, `record`); nothing of Penstock is
       imported by any of them, so that a script decides what is loaded before its clock starts.
State: none but those folders.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
RESULTS = HERE / "results"
SHARED = Path(os.environ.get("PENSTOCK_BENCH_DATA") or REPO.parent / "shared" / "data")
MB = 1_000_000

BATCH_SIZE, SEQ_LEN = 16, 1024
"""The shape of every batch that is measured."""
COPIES = 8
"""How often the corpus is repeated where a run needs to be long."""

HOSTED = "text.parquet"
REPOSITORY = "bench/books"
"""What the loopback Hub serves: this file, under many names, in this dataset."""

Kind = Literal["parquet", "jsonl"]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script has."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: shows that the script runs, measures nothing",
    )
    made.add_argument(
        "--repeats", type=int, help="rounds; every round measures each contender once"
    )
    made.add_argument("--contender", type=json.loads, help=argparse.SUPPRESS)
    return made


def bench_folder(name: str) -> Path:
    """A folder for files that may be made again at any time."""
    root = os.environ.get("PENSTOCK_BENCH_DIR")
    base = Path(root) if root else Path(tempfile.gettempdir()) / f"penstock-bench-{os.getuid()}"
    folder = base / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder

"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import penstock


def run(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PENSTOCK_CACHE": str(cache), "COLUMNS": "200"}
    command = [sys.executable, "-m", "penstock.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def test_the_demo_makes_what_it_needs_and_proves_its_resume(tmp_path: Path) -> None:
    done = run("demo", "--steps", "30", "--step-ms", "0", "--out", str(tmp_path / "out"), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").stat().st_size > 1_000_000
    assert len((tmp_path / "out" / "heartbeat_rank0.jsonl").read_text().splitlines()) >= 30
    assert "data wait" in done.stdout
    assert "after step 15: the 15 batches that follow are bit for bit the same" in done.stdout
    assert len(list((tmp_path / "stdlib").glob("*.parquet"))) == 1


def test_version_and_help(tmp_path: Path) -> None:
    assert run("--version", cache=tmp_path).stdout.strip() == f"penstock {penstock.__version__}"
    assert "demo" in run("--help", cache=tmp_path).stdout


def test_a_trained_vocabulary_gives_the_reference_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from penstock.encode.tokenize import load_tokenizer
    from penstock.encode.train import train_tokenizer

    text = "def spam(eggs):\n    return 'größer' * 3  # 你好\n" * 50
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(text.encode(), 320))
    import pyarrow as pa

    ids, _ = load_tokenizer(path, engine="gigatoken").engine.encode(pa.array([text], pa.large_string()))
    assert ids.tolist() == Tokenizer.from_file(str(path)).encode(text).ids

"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock


def run(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PENSTOCK_CACHE": str(cache), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "penstock.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)


@pytest.mark.timeout(300)
def test_the_demo_trains_is_killed_resumes_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("demo", "--steps", "20", "--out", str(out), cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "report.html").stat().st_size > 1_000_000
    # Saved at 5, 10 and 15, killed after 17 or a little later.
    assert "[train] resumed from" in done.stdout
    assert re.search(r"resume   steps 16 to 1[789] were run twice.*: bit for bit the same losses", done.stdout), (
        done.stdout
    )
    assert "Metrics:" in done.stdout
    assert (out / "report.html").absolute().as_uri() in done.stdout
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

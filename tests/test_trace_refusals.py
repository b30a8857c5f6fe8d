"""What `penstock trace` refuses, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.watch.trace import merge

SPAN = {"ph": "X", "ts": 5.0, "dur": 1.0, "pid": 1, "tid": 1, "name": "next"}


def penstock(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def recorded(path: Path) -> Path:
    path.write_text(json.dumps({"traceEvents": [SPAN], "otherData": {"recorded": "penstock"}}))
    return path


@pytest.mark.parametrize("given", ["inf", "1e300", "nan", "-1", "60001"])
def test_a_step_that_no_clock_can_wait_for_is_refused_in_a_line(tmp_path: Path, given: str) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    done = penstock(
        "trace", tmp_path / "a.txt", "--step-ms", given, "--steps", 1, "-o", tmp_path / "trace.json"
    )
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "--step-ms" in said
    assert "0 to 60,000" in said
    assert not (tmp_path / "trace.json").exists()


def test_one_step_is_one_step(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    options = (
        "--steps",
        1,
        "--step-ms",
        0,
        "--seq-len",
        16,
        "--batch-size",
        2,
        "-o",
        tmp_path / "trace.json",
    )
    done = penstock("trace", tmp_path / "a.txt", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1 step: one step says nothing"


def test_a_trace_of_ours_is_not_taken_for_the_profilers(tmp_path: Path) -> None:
    ours, both = recorded(tmp_path / "trace.json"), tmp_path / "both.json"
    with pytest.raises(ConfigError, match=r"trace\.json: was written by a Recorder"):
        merge(ours, ours, both)
    assert not both.exists()
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"traceEvents": [SPAN]}))
    merge(ours, profile, both)
    with pytest.raises(
        ConfigError, match=r"both\.json: was written by a Recorder, or has one's trace in it"
    ):
        merge(ours, both, tmp_path / "again.json")

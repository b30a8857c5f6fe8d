"""The demo beside its run: how long it waits for it, and what it takes for two runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from penstock.cli import demo

FIELDS = {"ts": 1.0, "iso": "", "mono": 1.0, "pid": 1, "rank": 0, "step": 0}
WAITS = [sys.executable, "-c", "import time; time.sleep(100)"]


def lines(path: Path, *written: dict[str, Any]) -> None:
    with path.open("a") as file:
        for line in written:
            file.write(json.dumps(FIELDS | line) + "\n")


def steps(first: int, last: int, loss: float = 9.0) -> list[dict[str, Any]]:
    return [{"msg": "progress", "step": n, "loss": loss - n / 10} for n in range(first, last + 1)]


BOOT, AGAIN = {"msg": "boot"}, {"msg": "boot", "rotated": True}


# Which steps were run twice


def test_a_heartbeat_that_was_rotated_is_still_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "heartbeat_rank0.jsonl"
    lines(tmp_path / "heartbeat_rank0.jsonl.2", BOOT, *steps(1, 5))
    lines(tmp_path / "heartbeat_rank0.jsonl.1", AGAIN, *steps(6, 8), BOOT, *steps(6, 9))
    lines(file, AGAIN, *steps(10, 20))
    assert demo._compare(tmp_path) == 0
    assert (
        "steps 6 to 8 were run twice, before the kill and after it: bit for bit the same"
        in capsys.readouterr().out
    )


def test_a_difference_before_a_rotation_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(tmp_path / "heartbeat_rank0.jsonl.1", BOOT, *steps(1, 8), BOOT, *steps(6, 9, loss=8.0))
    lines(tmp_path / "heartbeat_rank0.jsonl", AGAIN, *steps(10, 20))
    assert demo._compare(tmp_path) == 1
    assert "NOT the same losses" in capsys.readouterr().out


def test_a_run_that_was_not_resumed_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its oldest part is gone, too: a file is rotated away in the end."""
    lines(tmp_path / "heartbeat_rank0.jsonl", AGAIN, *steps(6, 20))
    assert demo._compare(tmp_path) == 1
    assert "no step was run twice" in capsys.readouterr().out


# How long it waits


def clock(monkeypatch: pytest.MonkeyPatch, path: Path, *looks: dict[str, Any]) -> None:
    """Between two looks five minutes pass, and the run writes a line."""
    now, left = [0.0], list(looks)

    def sleep(_: float) -> None:
        now[0] += 300.0
        lines(path, *left[:1])
        del left[:1]

    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


def test_a_run_of_many_steps_is_waited_for_as_long_as_it_makes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, tmp_path / "heartbeat_rank0.jsonl", BOOT, *steps(1, 20))
    demo._kill(WAITS, tmp_path, 20)


def test_a_run_that_makes_no_more_steps_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its heart may go on beating."""
    idle = [{"msg": "heartbeat"}] * 20
    clock(monkeypatch, tmp_path / "heartbeat_rank0.jsonl", BOOT, *steps(1, 3), *idle, *steps(4, 20))
    with pytest.raises(typer.Exit) as ended:
        demo._kill(WAITS, tmp_path, 20)
    assert ended.value.exit_code == 1
    assert (
        "no step for 600 s: it came to step 3, and should come to step 20"
        in capsys.readouterr().out
    )

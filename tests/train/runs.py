"""Runs of the trainer for tests: in this process, where torch is imported once, or in one of their own.

Both compute on one thread, so that a run here and a run there give the same numbers bit for bit.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import app
from penstock.train.checkpoint import Saved, newest
from penstock.watch.heartbeat_reader import read_heartbeat

ROOT = Path(__file__).parents[2]
SMALL = ("--seq-len", "32", "--batch", "2", "--log-every", "1")
"""Steps of some ten milliseconds, and a line for each."""
OURS = (
    "PENSTOCK_",
    "NSA_FWE_",
    "HF_",
    "AWS_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
)


def environment(cache: Path, **more: str) -> dict[str, str]:
    """The variables of a run: no settings but these, and a cache of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    return (
        clean
        | {"PENSTOCK_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PATH": path}
        | more
    )


@dataclass
class Run:
    """What a run left behind."""

    out: Path
    code: int
    said: str
    errors: str

    def lines(self, rank: int = 0) -> list[Any]:
        """Of the heartbeat, from the last start on."""
        lines = read_heartbeat(self.out / f"heartbeat_rank{rank}.jsonl")
        boots = [
            n for n, line in enumerate(lines) if line["msg"] == "boot" and not line.get("rotated")
        ]
        return lines[boots[-1] if boots else 0 :]

    def of(self, msg: str, rank: int = 0) -> list[Any]:
        return [line for line in self.lines(rank) if line["msg"] == msg]

    def losses(self, rank: int = 0) -> dict[int, str]:
        """Every digit of each step's loss."""
        return {line["step"]: repr(line["loss"]) for line in self.of("progress", rank)}

    def saved(self) -> Saved:
        found = newest(self.out / "checkpoints")
        assert found is not None
        return found

    def position(self) -> Any:
        """Where the data stood when it was last saved."""
        return self.saved().ranks[0]["data"]["loader"]

    def good(self) -> Run:
        assert self.code == 0, f"{self.said}\n{self.errors}"
        return self


class Heard(io.StringIO):
    """A console that does something when a line is printed, on the thread that prints it."""

    def __init__(self, on: Mapping[str, Callable[[str], Any]]) -> None:
        super().__init__()
        self._on = on

    def write(self, text: str) -> int:
        for part, act in self._on.items():
            if part in text:
                act(text)
        return super().write(text)


@contextmanager
def settings(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name not in variables:
                patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def here(
    command: Callable[[], Any],
    out: Path,
    on: Mapping[str, Callable[[str], Any]] | None = None,
    **more: str,
) -> Run:
    """Run a command in this process."""
    import torch

    said, errors, threads = Heard(on or {}), io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            settings(environment(out.parent / "cache", **more)),
            redirect_stdout(said),
            redirect_stderr(errors),
        ):
            command()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        torch.set_num_threads(threads)
    return Run(out, code, said.getvalue(), errors.getvalue())


def train(
    out: Path, *arguments: Any, on: Mapping[str, Callable[[str], Any]] | None = None, **more: str
) -> Run:
    """`penstock train` in this process."""
    return here(lambda: app(["train", *map(str, arguments), "--out", str(out)]), out, on, **more)


class Child:
    """`penstock train` in a process of its own."""

    def __init__(self, out: Path, *arguments: Any, **more: str) -> None:
        command = [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "train",
            *map(str, arguments),
            "--out",
            str(out),
        ]
        self.out, self._said = out, ""
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(out.parent / "cache", **more),
        )  # fmt: skip

    def until(self, text: str) -> Child:
        """Wait for a line on the console."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said += line
            if text in line:
                return self
        raise AssertionError(f"it ended without {text!r}: {self._said}\n{self.end().errors}")

    def send(self, number: signal.Signals) -> Child:
        self._process.send_signal(number)
        return self

    def end(self, timeout_s: float = 60.0) -> Run:
        """Wait for its end; a run that hangs is killed and is an error."""
        try:
            said, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, errors = self._process.communicate()
            raise AssertionError(
                f"it did not end within {timeout_s} s: {self._said}{said}\n{errors}"
            ) from None
        return Run(self.out, self._process.returncode, self._said + (said or ""), errors)


def write_texts(path: Path, texts: list[str] | tuple[str, ...]) -> Path:
    """A JSONL file of documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path

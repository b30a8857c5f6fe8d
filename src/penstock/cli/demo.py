"""`penstock demo`: train on text that every machine has, kill the run and resume it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from dataclasses import KW_ONLY
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.errors import ConfigError
from penstock.options import option, options

OWN = re.compile(r"checkpoints(\.\d+)?|heartbeat_rank\d+\.jsonl(\.\d+)?|report\.html|\.lock")
"""Names of the files and folders that a run writes."""


@options
class DemoOptions:
    """Options of `penstock demo`.

    steps: Steps to train.
    out: Folder for heartbeat, checkpoints and report.
    """

    _: KW_ONLY
    steps: int = option(default=300, minimum=20)
    out: Path = Path("artifacts/demo")


def demo(given: DemoOptions) -> int:
    """Train a small GPT, kill it, resume it, and show its report.

    The text is Python's standard library. Exit code 0: the loss fell, and the steps that ran twice
    had the same losses. 1: otherwise, or after an error.
    """
    steps, folder = given.steps, given.out
    _clear(folder)
    every = max(5, steps // 6)
    kill_at = min(3 * every + every // 2, steps - 2)  # between two checkpoints, before the end
    report = " --report" if importlib.util.find_spec("plotly") is not None else ""
    words = (
        "-m penstock.cli.main train --dataset stdlib --tokenizer stdlib --seq-len 128 --batch 8 "
        f"--lr 0.003 --steps {steps} --save-every {every} --eval-every {2 * every} "
        f"--set shuffle=on --set warmup_batches=auto{report}"
    )
    command = [sys.executable, *words.split(), "--out", str(folder)]
    command += ["--debug"] * ("--debug" in sys.argv)
    print(f"{steps} steps on Python's own library and manual, with a vocabulary trained on them")
    print(f"a checkpoint every {every} steps, and kill -9 after step {kill_at}\n")
    if code := _run(command, folder, kill_at):
        return code  # which has printed its error
    print(f"killed after step {kill_at}; the same command again, with --resume\n")
    return _run([*command, "--resume"], folder) or _compare(folder)


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    found = list(folder.iterdir()) if folder.is_dir() else []
    foreign = [path.name for path in found if not OWN.fullmatch(path.name)]
    if foreign or (folder.exists() and not folder.is_dir()):
        what = f"has {foreign[0]!r}, which no demo wrote" if foreign else "is a file"
        raise ConfigError(f"--out {folder}: {what}. Choose a new or empty folder.")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def _run(command: list[str], folder: Path, kill_at: int | None = None) -> int:
    """Run a command to its end, or kill it after a step. Return its exit code, 0 if killed."""
    from penstock.watch.heartbeat_reader import Tail

    tail = Tail(folder / "heartbeat_rank0.jsonl")
    with subprocess.Popen(command) as run:
        while kill_at is not None and run.poll() is None:
            steps = [line["step"] for line in tail.poll() if line["msg"] == "progress"]
            if max(steps, default=0) >= kill_at:
                run.kill()
                return 0
            time.sleep(0.1)
    return run.returncode


def _compare(folder: Path) -> int:
    """Compare the losses of steps that ran before the kill and again after it; return the exit code."""
    from penstock.watch.heartbeat_reader import read_heartbeat

    runs: list[dict[int, Any]] = []
    for line in read_heartbeat(folder / "heartbeat_rank0.jsonl"):
        if line["msg"] == "boot":
            runs.append({})
        elif line["msg"] == "progress":
            runs[-1][line["step"]] = line["loss"]
    before, after = runs[0], runs[-1]
    twice = sorted(before.keys() & after.keys()) if len(runs) > 1 else []
    same = bool(twice) and all(before[step] == after[step] for step in twice)
    losses = before | after
    word = "bit for bit the same losses" if same else "NOT the same losses"
    steps = f"steps {twice[0]} to {twice[-1]}" if twice else "no steps"
    print(f"\nresume   {steps} ran before the kill and after it: {word}")
    in_order = [float(losses[step]) for step in sorted(losses)]
    some = max(1, len(in_order) // 10)
    first, last = fmean(in_order[:some]), fmean(in_order[-some:])
    print(f"loss     {first:.2f} over the first {some} steps, {last:.2f} over the last {some}")
    print(f"watch    penstock watch {folder}    (live, during a run)")
    page = folder / "report.html"
    missing = "needs plotly: pip install 'penstock[report]', then penstock report"
    print(f"report   {page.absolute().as_uri() if page.exists() else missing}")
    return 0 if same and last < first else 1

"""`penstock demo`: a real training run on text that is on every machine, killed in the middle and resumed."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError, MissingExtra

OWN = re.compile(r"checkpoints(\.\d+)?|heartbeat_rank\d+\.jsonl(\.\d+)?|report\.html")
"""What a run leaves in its folder."""
LOOK_S, END_S = 0.1, 60.0
SILENT_S = 600.0
"""A run that makes no step for so long is given up. How long all of it takes depends on the steps and the machine."""


def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to train.", min=20)] = 300,
    folder: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="Where heartbeat, checkpoints and report go."),
    ] = Path("artifacts/demo"),
) -> None:
    """Train a small GPT, kill it, resume it, look at its report.

    The text is the standard library's, which is on every machine.
    Exit code 0: the loss fell, and steps that were run twice had the same losses. 1: not so, or an error.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "the demo", "torch")
    _clear(folder)
    every = max(5, steps // 6)
    kill_at = min(3 * every + every // 2, steps - 2)  # between two checkpoints, and before the end
    command = _command(steps, every, folder) + ["--debug"] * (context.obj is True)
    _say(
        f"{steps} steps on the interpreter's own library and manual, with a vocabulary trained on them"
    )
    _say(f"a checkpoint every {every} steps, and kill -9 after step {kill_at}\n")
    _kill(command, folder, kill_at)
    _say(f"killed after step {kill_at}; the same command again, with --resume\n")
    with _running([*command, "--resume"]) as run:
        code = run.wait()
    if code:
        raise typer.Exit(code)
    raise typer.Exit(_compare(folder))


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    found = [path for path in folder.iterdir() if path.name != ".lock"] if folder.is_dir() else []
    foreign = [path.name for path in found if not OWN.fullmatch(path.name)]
    if foreign or (folder.exists() and not folder.is_dir()):
        what = f"has {foreign[0]!r}, which is not an earlier demo's" if foreign else "is a file"
        raise ConfigError(f"--out {folder}: {what}. Choose a folder that is empty or not there.")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that ends with us, also if we are told to."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run = subprocess.Popen(command)
        try:
            yield run
        except BaseException:
            run.terminate()  # it saves, and says so
            raise
        finally:
            try:
                run.wait(END_S)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _command(steps: int, every: int, folder: Path) -> list[str]:
    report = ["--report"] if importlib.util.find_spec("plotly") is not None else []
    return [
        sys.executable, "-m", "penstock.cli.main", "train", "--dataset", "stdlib", "--tokenizer", "stdlib",
        "--seq-len", "128", "--batch", "8", "--lr", "0.003", "--steps", str(steps), "--save-every", str(every),
        "--eval-every", str(2 * every), "--out", str(folder), "--set", "shuffle=on", "--set", "warmup_batches=auto", *report,
    ]  # fmt: skip


def _kill(command: list[str], folder: Path, step: int) -> None:
    """Run until a step is done, then kill -9."""
    from penstock.watch.heartbeat_reader import Tail

    tail, done, since = Tail(folder / "heartbeat_rank0.jsonl"), 0, time.monotonic()
    with _running(command) as run:
        while True:
            made = [line["step"] for line in tail.poll() if line["msg"] == "progress"]
            if made:  # a heart that beats without steps counts for nothing
                done, since = max(made), time.monotonic()
            if done >= step:
                break
            code = run.poll()
            if code is not None:
                raise typer.Exit(code or 1)  # it has said why itself
            if time.monotonic() - since > SILENT_S:
                _say(
                    f"the run has made no step for {SILENT_S:.0f} s: it came to step {done}, and should come to step {step}"
                )
                raise typer.Exit(1)
            time.sleep(LOOK_S)
        run.kill()
    if sys.stdout.isatty():
        print("\x1b[?25h")  # the killed run's progress bar had hidden the cursor


def _compare(folder: Path) -> int:
    """Steps that were run twice, before the kill and after the resume, have the same losses. Gives the exit code."""
    from penstock.watch.heartbeat_reader import read_heartbeat

    runs: list[dict[int, Any]] = []
    for line in read_heartbeat(folder / "heartbeat_rank0.jsonl"):
        # A file that was rotated begins with its run's boot line once more.
        if line["msg"] == "boot" and not (line.get("rotated") and runs):
            runs.append({})
        elif line["msg"] == "progress":
            runs[-1][line["step"]] = line["loss"]
    before, after = runs[0], runs[-1]
    twice = sorted(before.keys() & after.keys()) if len(runs) > 1 else []
    same = bool(twice) and all(before[step] == after[step] for step in twice)
    losses = before | after
    print()
    if twice:
        word = "bit for bit the same losses" if same else "NOT the same losses"
        _say(
            f"resume   steps {twice[0]} to {twice[-1]} were run twice, before the kill and after it: {word}"
        )
    else:
        _say("resume   no step was run twice, so nothing is shown")
    in_order = [
        float(losses[step]) for step in sorted(losses)
    ]  # one that is not finite is written as a word
    some = max(1, len(in_order) // 10)
    first, last = fmean(in_order[:some]), fmean(in_order[-some:])
    fell = math.isfinite(last) and last < first
    _say(f"loss     {first:.2f} over the first {some} steps, {last:.2f} over the last {some}")
    _say(f"watch    penstock watch {folder}    (live, while a run goes on)")
    page = folder / "report.html"
    if page.exists():
        _say(f"report   {page.absolute().as_uri()}")
    else:
        _say("report   needs plotly: pip install 'penstock[report]', then penstock report")
    return 0 if same and fell else 1


def _say(line: str) -> None:
    print(line, flush=True)

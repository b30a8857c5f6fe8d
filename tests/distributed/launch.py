"""Runs of the trainer in real processes: many in one launch, because importing torch takes longer than a small run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.train.checkpoint import Saved, newest
from penstock.watch.heartbeat_reader import read_heartbeat

ROOT = Path(__file__).parents[2]
SHOWCASE = ROOT / "scripts" / "train_showcase.py"
SMALL = ("--seq-len", "64", "--batch", "2", "--log-every", "1")

SESSION = """
import contextlib, json, os, sys, traceback
from pathlib import Path
place = Path(sys.argv[1])
rank = int(os.environ.get("RANK", "0"))
import torch
torch.set_num_threads(1)
import penstock.feed.fallback
import penstock.train.loop
from penstock.cli.main import app

# Retry soon, and do not let a run end before its data is back.
penstock.feed.fallback.RETRY_S = 0.2

def paced(real, lift):
    import time
    from penstock.train.loop import Trainer

    def step(self, batches):
        if batches[0].synthetic:
            paced.count += 1
            if lift and paced.count == lift[0] and rank == 0:
                Path(lift[1]).touch()
            time.sleep(0.1)
        return real(self, batches)

    paced.count = 0
    Trainer.step = step

real, before = penstock.train.loop.Trainer.step, dict(os.environ)
for number, run in enumerate(json.loads((place / "runs.json").read_text())):
    os.environ.clear()
    os.environ.update(before | run["environment"][rank % len(run["environment"])])
    if "RANK" in before:
        # The ranks of each run meet at an address of its own, not at the launcher's.
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(run["port"])}
    paced(real, run["lift"])
    code, error = 0, ""
    with open(place / f"{run['name']}-{rank}.txt", "w", buffering=1) as told:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            try:
                app(["train", *run["arguments"]])
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                code = 99
                traceback.print_exc()
    (place / f"{run['name']}-{rank}.code").write_text(str(code))
    heartbeat = Path(run["arguments"][-1]) / f"heartbeat_rank{rank}.jsonl"
    if heartbeat.exists():  # a later run may write to the same one
        (place / f"{run['name']}-{rank}.jsonl").write_bytes(heartbeat.read_bytes())
"""


@dataclass(frozen=True)
class Run:
    """One run: its folder is its name's."""

    name: str
    arguments: Sequence[str | Path]
    environment: Sequence[Mapping[str, str]] = ({},)
    """For each rank, or for all."""
    lift: tuple[int, Path] | None = None
    """A number of synthetic steps, and the file that is touched after them."""
    out: str = ""
    """The folder of another run, to continue it."""


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    folder: Path
    codes: list[int]
    told: list[str]
    """The output of each rank."""
    lines: list[list[dict[str, Any]]] = field(repr=False)
    """The heartbeat of each rank."""

    def of(self, msg: str, rank: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if line["msg"] == msg]

    def losses(self, rank: int = 0) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.of("progress", rank)}

    def newest(self) -> Saved:
        found = newest(self.folder / "checkpoints")
        assert found is not None, self.folder
        return found

    def positions(self) -> list[Any]:
        """Return the position of each rank's data."""
        return positions(self.newest())


def positions(checkpoint: Saved) -> list[Any]:
    """Return the position of each rank's data in a checkpoint."""
    return [rank["data"]["loader"] for rank in checkpoint.ranks]


def places(states: Sequence[Any]) -> dict[str, Any]:
    """Return the position of each lane of all ranks."""
    return {lane: place for state in states for lane, place in state["at"].items()}


def torchrun(*script: str | Path, ranks: int = 2) -> list[str]:
    """Return a command line."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            f"--nproc_per_node={ranks}", *map(str, script)]  # fmt: skip


def bounded(
    command: Sequence[str], timeout_s: float = 100.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; stop it and all of its processes after the timeout."""
    quiet = {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | quiet | environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # faulthandler prints where the workers hang.
        os.killpg(process.pid, signal.SIGABRT)
        out, err = process.communicate(timeout=20)
        raise AssertionError(
            f"not over after {timeout_s:g} s: {out[-2000:]} {err[-8000:]}"
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def session(
    place: Path, runs: Sequence[Run], ranks: int = 2, timeout_s: float = 200.0
) -> dict[str, Ran]:
    """Make runs one after another in the same processes: under torchrun, or without it if `ranks` is 0."""
    script = prepare(place, runs)
    command = torchrun(*script, ranks=ranks) if ranks else [sys.executable, *map(str, script)]
    done = bounded(command, timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return results(place, runs, max(1, ranks))


def prepare(place: Path, runs: Sequence[Run]) -> list[Path]:
    """Write a script that makes runs one after another; return it and its argument."""
    place.mkdir(parents=True, exist_ok=True)
    script = place / "session.py"
    script.write_text(SESSION)
    described = [
        {
            "name": run.name,
            "arguments": [
                *map(str, run.arguments),
                "--out",
                str(place.parent / (run.out or run.name)),
            ],
            "environment": list(run.environment),
            "lift": [run.lift[0], str(run.lift[1])] if run.lift else None,
            "port": port,
        }
        for run, port in zip(runs, free_ports(len(runs)), strict=True)
    ]
    (place / "runs.json").write_text(json.dumps(described))
    return [script, place]


def results(place: Path, runs: Sequence[Run], ranks: int) -> dict[str, Ran]:
    """Return the results of the runs of a launch."""
    return {
        run.name: _ran(place.parent / (run.out or run.name), run.name, place, ranks) for run in runs
    }


def _ran(folder: Path, name: str, place: Path, ranks: int) -> Ran:
    codes = [int((place / f"{name}-{rank}.code").read_text()) for rank in range(ranks)]
    texts = [(place / f"{name}-{rank}.txt").read_text() for rank in range(ranks)]
    return Ran(
        folder, codes, texts, [last_run(place / f"{name}-{rank}.jsonl") for rank in range(ranks)]
    )


def last_run(heartbeat: Path) -> list[dict[str, Any]]:
    """Return the lines of the last run in a heartbeat file."""
    lines = list(read_heartbeat(heartbeat)) if heartbeat.exists() else []
    boots = [n for n, line in enumerate(lines) if line["msg"] == "boot"]
    return lines[boots[-1] :] if boots else lines


def free_ports(count: int) -> list[int]:
    """Return ports below those that the system gives to connections, which may be taken any time."""
    found: list[int] = []
    for port in random.sample(range(15_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


def run_ranks(worker: str, out: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """Run a script on two ranks, each of which writes `out/RANK.json`, and return these."""
    script = out / "worker.py"
    script.write_text(worker)
    command = torchrun(script, ROOT, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    results = [out / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in results), done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in results]

"""How much slower is the first step than the steady one, and what does a prewarm change about that?

Real runs of `penstock train` (toy size), with and without --prewarm, fresh processes in turn. All times are
from their heartbeats. On a GPU a first step of 7.3 times the steady one has been seen.

first over steady: the first step against the median of those after the tenth, each without its wait
                   for data. This is what a watchdog at step 1 sees, and all that a prewarm improves by itself.
done after:        from the start of the process to the end of step 1, and of the last step. A prewarm moves
                   the cost of the first step to before it, and adds a pass that is thrown away.
                   So these say whether it paid.
data on disk:      it is there before torch is imported: a prewarm hides behind nothing.
data far away:     a Hub that takes a second for each answer, nothing on disk: a prewarm runs while the first
                   batch is still on its way.

With --full also with --compile, and an empty cache of compiled code for each run: minutes more.
The losses of a run with prewarm have to be those of the run without, to the last digit, or it stops.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPOSITORY, bench_folder, parser
from corpora import load_corpus
from hosted import Hub
from record import Goal, Report
from rounds import interleave, ratios

SEQ_LEN, BATCH = 256, 8
"""What `penstock train` takes by itself."""
DOCUMENTS, FILES = 250, 20
DEADLINE_S = 900.0
GOAL = Goal("<=", 1.5)
"""First over steady, prewarmed. On a GPU 7.3 has been seen without."""


# A run of the trainer


@dataclass(frozen=True)
class Trained:
    """One run of `penstock train`, as its heartbeat tells it."""

    begun: float
    """When the process was created, by the monotonic clock, which all processes share."""
    steps: list[dict[str, Any]]
    """The lines of the steps, in order."""
    events: dict[str, dict[str, Any]]
    """The first line of each other kind."""

    def computed(self, line: Mapping[str, Any]) -> float:
        """Seconds of a step without its wait for data."""
        return float(line["dt_step_s"] - line["dt_fetch_s"])

    def first(self) -> float:
        return self.computed(self.steps[0])

    def steady(self, after: int) -> float:
        return statistics.median(self.computed(line) for line in self.steps[after:])

    def done_after(self, step: int) -> float:
        """Seconds from the creation of the process to the end of a step."""
        return float(self.steps[step - 1]["mono"]) - self.begun

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]


def trained(
    *options: str,
    steps: int,
    kept: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Trained:
    """Run it, in an empty folder of its own. `kept`: a cache that earlier runs have filled; else an empty one."""
    named = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "PENSTOCK_", "NSA_"))
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        fresh = Path(name)
        cache = str(kept or fresh / "cache")
        places = {
            "PENSTOCK_CACHE": cache,
            "HF_HOME": cache,
            "TORCHINDUCTOR_CACHE_DIR": str(fresh / "inductor"),
        }
        command = [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "train",
            "--out",
            "run",
            "--save-last",
            "0",
        ]
        command += [
            "--seq-len",
            str(SEQ_LEN),
            "--batch",
            str(BATCH),
            "--steps",
            str(steps),
            *options,
        ]
        begun = time.monotonic()
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, cwd=fresh,
            env=named | places | dict(environment or {}),
        )  # fmt: skip
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)}: ended with code {process.returncode}:\n{process.stdout[-4000:]}"
            )
        lines = [
            json.loads(line)
            for line in (fresh / "run" / "heartbeat_rank0.jsonl").read_text().splitlines()
        ]
    events: dict[str, dict[str, Any]] = {}
    for line in lines:
        events.setdefault(line["msg"], line)
    taken = [line for line in lines if line["msg"] == "progress"]
    if [line["step"] for line in taken] != list(range(1, steps + 1)):
        raise RuntimeError(
            f"{' '.join(command)}: its heartbeat has {len(taken)} steps instead of {steps}"
        )
    if any(line.get("synthetic") for line in taken):
        raise RuntimeError(f"{' '.join(command)}: went on without its data")
    return Trained(begun, taken, events)


def same_work(case: str, runs: Mapping[str, Sequence[Trained]]) -> None:
    """All runs of a case have computed the same numbers."""
    (known, first), *others = [
        (name, run.losses()) for name, several in runs.items() for run in several
    ]
    for name, losses in others:
        if losses != first:
            at = next(i for i, (a, b) in enumerate(zip(first, losses, strict=True), 1) if a != b)
            raise RuntimeError(
                f"{case}: the loss of step {at} is {losses[at - 1]!r} ({name}) and {first[at - 1]!r} ({known}): "
                "not the same work"
            )


# What is compared


def cases(endpoint: str, full: bool) -> dict[str, Callable[..., Trained]]:
    """Each takes further options of the trainer."""
    far = functools.partial(
        trained, "--dataset", f"hf://datasets/{REPOSITORY}", environment={"HF_ENDPOINT": endpoint}
    )
    disk = functools.partial(trained, "--dataset", "stdlib", kept=bench_folder("train-cache"))
    made: dict[str, Callable[..., Trained]] = {
        "eager, data on disk": disk,
        "eager, data far away": far,
    }
    if full:
        made |= {
            "compiled, data on disk": functools.partial(disk, "--compile"),
            "compiled, data far away": functools.partial(far, "--compile"),
        }
    return made


def account(report: Report, case: str, runs: Mapping[str, Sequence[Trained]], after: int) -> None:
    """What was seen of one case."""
    steps = len(runs["plain"][0].steps)
    for name, several in runs.items():
        firsts, steadies = [run.first() for run in several], [run.steady(after) for run in several]
        title = f"{case}, {name}"
        report.add(title, "first step, its wait for data left out", firsts, "s")
        report.add(title, f"steady step, median after step {after}", steadies, "s")
        goal = GOAL if name == "prewarm" else None
        report.add(title, "first over steady", ratios(firsts, steadies), "x", goal)
        if name == "prewarm":
            report.add(
                title,
                "the prewarm itself",
                [run.events["prewarm"]["seconds"] for run in several],
                "s",
            )
        report.add(
            title, "wait for the first batch", [run.steps[0]["dt_fetch_s"] for run in several], "s"
        )
        for step in (1, steps):
            report.add(
                title, f"step {step} done after", [run.done_after(step) for run in several], "s"
            )
    for step in (1, steps):
        saved = [
            plain.done_after(step) - warmed.done_after(step)
            for plain, warmed in zip(runs["plain"], runs["prewarm"], strict=True)
        ]
        report.add(
            f"{case}, prewarm against plain", f"step {step} sooner by (below 0: later)", saved, "s"
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--full", action="store_true", help="with --compile too")
    options.add_argument("--steps", type=int, help="of each run (40)")
    options.add_argument("--latency-ms", type=float, help="before each answer of the Hub (1000)")
    options.add_argument("--threads", type=int, help="of torch's own (as torch chooses)")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 5)
    steps = args.steps or (6 if args.quick else 40)
    latency_ms = args.latency_ms or (100.0 if args.quick else 1000.0)
    after = min(10, steps // 2)
    corpus = load_corpus(args.quick)
    settings = {
        "size": "toy", "batch": [BATCH, SEQ_LEN], "tokenizer": "byte", "steps": steps, "steady_after": after,
        "latency_ms": latency_ms, "far": corpus.name, "threads": args.threads or "torch's default", "repeats": repeats,
    }  # fmt: skip
    report = Report("first_step", args.quick, settings)
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    seen: dict[str, dict[str, list[Trained]]] = {}
    with ExitStack() as stack:
        network = ["--latency-ms", str(latency_ms), "--bandwidth-mb", "100"]
        hub = stack.enter_context(Hub(corpus.hosted("zstd", DOCUMENTS), FILES, *network))
        contenders = {}
        for case, run in cases(hub.endpoint, args.full).items():
            seen[case] = {"plain": [], "prewarm": []}
            for name, given in (("plain", ()), ("prewarm", ("--prewarm",))):
                contenders[f"{case}, {name}"] = measuring(run, given, steps, seen[case][name])
        trained(
            "--dataset", "stdlib", steps=1, kept=bench_folder("train-cache")
        )  # writes the text, compiles byte code
        interleave(repeats, contenders)
    for case, runs in seen.items():
        same_work(case, runs)
        account(report, case, runs, after)
    report.close()


def measuring(
    run: Callable[..., Trained], given: Sequence[str], steps: int, into: list[Trained]
) -> Callable[[], float]:
    """A contender."""

    def measure() -> float:
        into.append(run(*given, steps=steps))
        return into[-1].done_after(steps)

    return measure


if __name__ == "__main__":
    main()

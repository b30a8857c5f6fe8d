"""What does it cost a run to be measured?

Flat out:  batches of 512 tokens, taken as fast as they come: next to nothing is done for each, so
           what telemetry adds weighs most.
In step:   5 ms of Python a step, then a batch of the usual size; without telemetry, with it, and
           with a heartbeat that is told of every step and writes it to disk.

One process, all in turn, the same amount of work in each turn. Loaders that are not being asked stand
still: their queues are full. A heartbeat beats only while it is its turn. Beside the wall time stands
the CPU time of the whole process, of which other processes take nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, COPIES, SEQ_LEN, bench_folder, parser
from corpora import Corpus, load_corpus
from record import Goal, Report
from rounds import calibrate, count, interleave, ratios, wait_until_quiet

STEP_S = 0.005
SMALL = (4, 128)
WARMUP_STEPS = 50
GOAL = Goal("<=", 0.5)
"""Percent."""


class Turns:
    """Contenders that do the same steps, and what each took, turn by turn."""

    def __init__(self, steps: int, work: int) -> None:
        self._steps, self._work = steps, work
        self.cpu_s: dict[str, list[float]] = {}

    def of(self, name: str, loader: Any, heartbeat: Path | None = None) -> Callable[[], float]:
        """Wall seconds of a turn."""

        def measure() -> float:
            wait_until_quiet()
            with ExitStack() as stack:
                tell = None
                if heartbeat is not None:
                    from penstock import Heartbeat

                    tell = stack.enter_context(
                        Heartbeat(heartbeat, observed=loader.telemetry)
                    ).progress
                cpu, begun = time.process_time(), time.perf_counter()
                self._run(loader, tell)
                wall = time.perf_counter() - begun
                self.cpu_s.setdefault(name, []).append(time.process_time() - cpu)
            return wall

        return measure

    def _run(self, loader: Any, tell: Callable[..., None] | None) -> None:
        work = self._work
        for step in range(1, self._steps + 1):
            next(loader)
            loss = count(work) if work else 0
            if tell is not None:
                tell(step, loss=loss)

    def report(
        self,
        report: Report,
        case: str,
        name: str,
        wall_s: dict[str, list[float]],
        goal: Goal | None,
    ) -> None:
        """One contender against the one that measures nothing."""
        for metric, seconds, bound in (
            ("wall time", wall_s, goal),
            ("CPU time of the process", self.cpu_s, None),
        ):
            more = [100 * (ratio - 1) for ratio in ratios(seconds[name], seconds["off"])]
            report.add(case, f"{metric}, added", more, "%", bound)
        added = [
            1e6 * (a - b) / self._steps for a, b in zip(wall_s[name], wall_s["off"], strict=True)
        ]
        report.add(case, "added to a step", added, "us")


def make(corpus: Corpus, shape: tuple[int, int], telemetry: bool) -> Any:
    from penstock import AsyncDataLoader, Telemetry, TextDataset

    data = TextDataset(corpus.copies(COPIES), tokenizer="byte", seq_len=shape[1])
    loader = AsyncDataLoader(data, shape[0])
    loader.observe(Telemetry(on=telemetry))
    return loader


def flat_out(report: Report, corpus: Corpus, repeats: int, steps: int) -> None:
    turns = Turns(steps, 0)
    with ExitStack() as stack:
        loaders = {
            name: stack.enter_context(make(corpus, SMALL, name == "on")) for name in ("off", "on")
        }
        for loader in loaders.values():
            turns._run(loader, None)
        wall_s = interleave(
            repeats, {name: turns.of(name, loader) for name, loader in loaders.items()}
        )
    report.add("flat out", "a batch, not measured", [1e6 * s / steps for s in wall_s["off"]], "us")
    turns.report(report, "flat out", "on", wall_s, None)
    tokens = steps * SMALL[0] * SMALL[1]
    report.add("flat out", "rate, measured", [tokens / s / 1e6 for s in wall_s["on"]], "M tokens/s")


def in_step(report: Report, corpus: Corpus, repeats: int, steps: int) -> None:
    turns = Turns(steps, calibrate(STEP_S))
    folder = bench_folder("overhead-heartbeat")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        names = ("off", "on", "heartbeat")
        loaders = {
            n: stack.enter_context(make(corpus, (BATCH_SIZE, SEQ_LEN), n != "off")) for n in names
        }
        for loader in loaders.values():
            for _ in range(min(steps, WARMUP_STEPS)):
                next(loader)
        wall_s = interleave(
            repeats,
            {n: turns.of(n, loaders[n], folder if n == "heartbeat" else None) for n in names},
        )
    report.add("in step", "a step, not measured", [1e6 * s / steps for s in wall_s["off"]], "us")
    turns.report(report, "in step", "on", wall_s, GOAL)
    turns.report(report, "in step, with a heartbeat", "heartbeat", wall_s, None)


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--steps", type=int, help="steps of 5 ms a turn; flat out, a hundred times as many batches"
    )
    args = options.parse_args()
    repeats = args.repeats or (2 if args.quick else 40)
    steps = args.steps or (10 if args.quick else 100)
    corpus = load_corpus(args.quick)
    settings = {
        "corpus": corpus.name, "batch": [BATCH_SIZE, SEQ_LEN], "small": list(SMALL), "tokenizer": "byte", "steps": steps,
        "step_ms": 1e3 * STEP_S, "repeats": repeats,
    }  # fmt: skip
    report = Report("overhead", args.quick, settings)
    flat_out(report, corpus, max(2, repeats // 2), 100 * steps)
    in_step(report, corpus, repeats, steps)
    report.close()


if __name__ == "__main__":
    main()

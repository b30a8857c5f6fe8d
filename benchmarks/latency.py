"""How long does next() take when the consumer is the slower side?

The consumer waits 5 ms a step, as one does for an accelerator, and takes a batch. Beside the
loader stands a list of ready batches, taken by the same loop: what the clock and the sleep cost
by themselves. Every contender has a process of its own; all are measured in turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from common import BATCH_SIZE, COPIES, SEQ_LEN, parser
from corpora import load_corpus
from record import Goal, Report
from rounds import Contender, interleave, percentile, serve

STEP_S = 0.005
WARMUP_STEPS = 50


def step(source: Iterator[Any], steps: int) -> dict[str, Any]:
    """Take batches with a pause before each; microseconds in each next(), and the share of the wall time."""
    waits = []
    begun = time.perf_counter_ns()
    for _ in range(steps):
        time.sleep(STEP_S)
        asked = time.perf_counter_ns()
        next(source)
        waits.append(time.perf_counter_ns() - asked)
    wall = time.perf_counter_ns() - begun
    return {
        "waits_us": [wait / 1e3 for wait in waits],
        "data_wait_percent": 100 * sum(waits) / wall,
    }


def contend(case: dict[str, Any], quick: bool) -> None:
    """Be one contender: a loader, or a list."""
    from penstock import AsyncDataLoader, TextDataset

    corpus = load_corpus(quick)
    data = TextDataset(corpus.copies(COPIES), tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
    loader = AsyncDataLoader(data, BATCH_SIZE, shuffle=case["shuffle"])
    with loader:
        source: Iterator[Any] = iter(loader)
        if case["what"] == "list":
            source = itertools.cycle([next(loader) for _ in range(8)])
            loader.shutdown()
        step(source, 2 if quick else WARMUP_STEPS)
        serve(lambda: step(source, case["steps"]))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="steps a round")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender, args.quick)
        return
    repeats = args.repeats or (2 if args.quick else 3)
    steps = args.steps or (40 if args.quick else 1000)
    corpus = load_corpus(args.quick)
    corpus.copies(COPIES)
    settings = {
        "corpus": corpus.name,
        "batch": [BATCH_SIZE, SEQ_LEN],
        "steps": steps,
        "repeats": repeats,
    }
    report = Report("latency", args.quick, settings | {"step_ms": 1e3 * STEP_S})
    cases: dict[str, dict[str, Any]] = {
        "a list of batches": {"what": "list", "shuffle": False, "steps": steps}
    }
    cases |= {
        f"loader, shuffle {'on' if shuffle else 'off'}": {
            "what": "loader", "shuffle": shuffle, "steps": steps
        }
        for shuffle in (False, True)
    }  # fmt: skip
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with ExitStack() as stack:
        processes = {
            n: stack.enter_context(Contender(__file__, case, args.quick))
            for n, case in cases.items()
        }

        def asking(name: str) -> Callable[[], float]:
            def measure() -> float:
                answers[name].append(processes[name].measure())
                return float(answers[name][-1]["data_wait_percent"])

            return measure

        for process in processes.values():
            process.ready()
        waited = interleave(repeats, {name: asking(name) for name in cases})
    for name, rounds in answers.items():
        goals = name.startswith("loader")
        for metric, share, bound in (("p50", 0.5, 50.0), ("p99", 0.99, 1000.0), ("max", 1.0, None)):
            values = [percentile(answer["waits_us"], share) for answer in rounds]
            goal = Goal("<=", bound) if goals and bound is not None else None
            report.add(name, f"next(), {metric}", values, "us", goal)
        report.add(name, "data wait", waited[name], "%", Goal("<", 0.1) if goals else None)
    report.close()


if __name__ == "__main__":
    main()

"""How long does a training loop wait for data, and how much does the loader slow it down?

Waits:   the loop sleeps 20 ms a step, which stands in for an accelerator and releases the GIL, and
         takes a batch. Text from disk, in order and shuffled, beside a list of ready batches.
Python:  the loop runs Python for 50 ms a step, which holds the GIL, and takes a batch. Its rate is
         compared with taking batches from a list.

Every contender has its own process; all are measured in turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import common
from common import BATCH_SIZE, SEQ_LEN, Answer
from corpora import load_corpus
from report import Goal, Report

STEPS_S = {"waits": 0.02, "python": 0.05}
SOURCES = {"a list of batches": None, "in order": False, "shuffled": True}
P50_GOAL = Goal("<=", 300)


def contend(case: Answer, quick: bool) -> None:
    """Be one contender."""
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    from penstock import AsyncDataLoader, TextDataset

    corpus = load_corpus(quick)
    data = TextDataset(corpus.copies(common.COPIES), tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
    with AsyncDataLoader(data, BATCH_SIZE, shuffle=bool(case["shuffle"])) as loader:
        source: Iterator[Any] = iter(loader)
        if case["shuffle"] is None:
            source = itertools.cycle([next(loader) for _ in range(8)])
            loader.shutdown()

        def step() -> None:
            if case["loops"]:
                common.count(case["loops"])
            else:
                time.sleep(STEPS_S["waits"])

        def measure() -> Answer:
            common.wait_until_quiet()
            return common.take_steps(source, case["steps"], step)

        common.take_steps(source, 5 if quick else 50, step)
        common.serve(measure)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--steps", type=int, help="steps a round (250)")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender, args.quick)
        return
    repeats = args.repeats or (1 if args.quick else 5)
    steps = args.steps or (10 if args.quick else 250)
    corpus = load_corpus(args.quick)
    corpus.copies(common.COPIES)
    settings = {"corpus": corpus.name, "steps": steps, "repeats": repeats, "steps_s": STEPS_S}
    report = Report("data_wait", args.quick, settings)
    for kind, step_s in STEPS_S.items():
        loops = int(step_s * common.loops_per_s()) if kind == "python" else 0
        cases = {
            name: {"shuffle": shuffle, "loops": loops, "steps": steps}
            for name, shuffle in SOURCES.items()
        }
        answers = common.measure_all(__file__, cases, repeats, quick=args.quick)
        worked = {
            name: [answer["wall"] - sum(answer["fetches"]) for answer in given]
            for name, given in answers.items()
        }
        for name, given in answers.items():
            title = f"steps of {1e3 * step_s:.0f} ms, {kind}: {name}"
            for metric, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                values = [1e6 * common.percentile(answer["fetches"], share) for answer in given]
                goal = P50_GOAL if kind == "waits" and metric == "p50" else None
                report.add(title, f"next() {metric}", values, "µs", goal)
            waits = [100 * sum(answer["fetches"]) / answer["wall"] for answer in given]
            report.add(title, "data wait", waits, "%")
            slower = common.ratios(worked[name], worked["a list of batches"])
            report.add(title, "the step itself, longer by", [100 * (r - 1) for r in slower], "%")
    report.close()


if __name__ == "__main__":
    main()

"""What does a training run gain from a loader that works ahead, and where does it gain nothing?

Sync is prefetch off: the same batches, made in the step, without threads. Everything is compared in one run, in turn.

runs:        real runs of `penstock train` (toy size) on the CPU, fresh processes, from their heartbeats; losses have
             to be the same to the last digit. A guide to an earlier loader had a data wait of 30 to 40 % down to 0.2 %, with batches that took
             long to make. No tokenizer takes that long beside a model on a CPU, so what takes long here is the
             way: text on a Hub with a document in each row group, and so much latency that sync waits
             for about 35 % of its time. Text on disk, and ids that need no reading at all, are the null
             case of its author: nothing to gain, and nothing to lose.
accelerator: another guide's table, batches of 4, 16 and 64 rows. THERE IS NO ACCELERATOR: a timed wait stands in for
             it, which takes no CPU, as a step on a GPU takes next to none. The load is real: text tokenized by
             `tokenizers` on one core. The wait is chosen from the load that was measured before, so that the
             accelerator of sync is busy for 62, 66 and 71 % of the time: what its +50, +40 and +30 % mean if its
             async was at 92.5 %. Ideal is max(step, load / workers).
steady:      a p95 of a fetch that was known, over 1,000 steps of 20 ms (a wait again), from a Hub of 50 ms.
warmup:      what waiting for 8, 16 and 32 batches after the first one costs, and what it saves in
             the first 50 steps (the same waits), from a cold start each time. What is saved was waited for
             before, unless the loader catches up meanwhile; so the time to the end of step 50 stands beside it.

mapstyle.py has the same questions for samples that wait or hold the GIL, latency.py those for text on disk.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from first_step import BATCH, Trained, measuring, same_work, trained
from first_step import SEQ_LEN as RUN_SEQ_LEN
from hosted import Hub
from record import Goal, Report
from rounds import Contender, interleave, percentile, ratios, serve, wait_until_quiet

from common import BATCH_SIZE, REPOSITORY, SEQ_LEN, bench_folder, parser
from corpora import Corpus, load_corpus

PARTS = ("runs", "accelerator", "steady", "warmup")
MODES = ("sync", "async")

SYNC_WAIT = 0.35
"""Share of its time that sync shall wait in the run from far away: the middle of 30 to 40 %."""
SHAPES = {4: 0.925 / 1.5, 16: 0.925 / 1.4, 64: 0.925 / 1.3}
"""Rows of a batch, and how busy sync shall keep the accelerator."""
GAINS = {4: 50.0, 16: 40.0, 64: 30.0}
"""The guide's own, in percent."""
SMALL_GROUP, LARGE_GROUP = 25, 250
"""Documents in a row group: 150 kB for a tokenizer of 2 MB/s, 1.5 MB for the network."""
FILES = 50
STEP_S = 0.02
WARMED = (0, 8, 16, 32)
FIRST_STEPS = 50

WAIT_GOAL, NULL_GOAL, IDEAL_GOAL = Goal("<", 0.2), Goal(">=", 0.97), Goal(">=", 0.97)
P95_GOAL, WARMUP_GOAL = Goal("<", 80.0), Goal("<=", 78.0)


# Real runs


class Runs:
    """Sync and async runs of the trainer."""

    def __init__(self, report: Report, steps: int, repeats: int) -> None:
        self._report, self._steps, self._repeats = report, steps, repeats
        self._after = min(10, steps // 2)

    def measure(self, corpus: Corpus) -> None:
        disk = functools.partial(
            trained, "--dataset", str(corpus.parquet), kept=bench_folder("train-cache")
        )
        memory = functools.partial(trained, "--dataset", "synthetic")
        hosted = corpus.hosted("zstd", 1)
        latency_ms = 1e3 * self._latency_s(
            corpus, disk("--set", "prefetch=false", steps=self._steps)
        )
        with Hub(hosted, FILES, "--latency-ms", f"{latency_ms:.1f}") as hub:
            address = f"hf://datasets/{REPOSITORY}"
            far = functools.partial(
                trained, "--dataset", address, environment={"HF_ENDPOINT": hub.endpoint}
            )
            cases: dict[str, Callable[..., Trained]] = {
                f"runs, text on a Hub of {latency_ms:.0f} ms": far,
                "runs, text on disk": disk,
                "runs, made-up ids": memory,
            }
            seen: dict[str, dict[str, list[Trained]]] = {
                case: {mode: [] for mode in MODES} for case in cases
            }
            contenders = {
                f"{case}, {mode}": measuring(
                    run,
                    ("--set", f"prefetch={'true' if mode == 'async' else 'false'}"),
                    self._steps,
                    seen[case][mode],
                )
                for case, run in cases.items()
                for mode in MODES
            }
            interleave(self._repeats, contenders)
        for (case, runs), null in zip(seen.items(), (False, True, True), strict=True):
            same_work(case, runs)
            self._account(case, runs, null)

    def _latency_s(self, corpus: Corpus, run: Trained) -> float:
        """A document is one request, and lasts for so many steps, of which the fastest is the least disturbed."""
        texts = corpus.texts()
        tokens = statistics.fmean(len(text.encode()) + 1 for text in texts.to_pylist())
        steps = tokens / (BATCH * RUN_SEQ_LEN)
        fastest = min(run.computed(line) for line in run.steps[self._after :])
        return steps * fastest * SYNC_WAIT / (1 - SYNC_WAIT)

    def _account(self, case: str, runs: Mapping[str, Sequence[Trained]], null: bool) -> None:
        add = self._report.add
        rates, waits = {}, {}
        for mode, several in runs.items():
            rates[mode] = [self._rate(run) for run in several]
            waits[mode] = [self._wait(run) for run in several]
            add(case, f"{mode}, rate", rates[mode], "tokens/s")
        for mode in MODES:
            add(
                case, f"{mode}, data wait", waits[mode], "%", WAIT_GOAL if mode == "async" else None
            )
        faster = ratios(rates["async"], rates["sync"])
        add(case, "async over sync", faster, "x", NULL_GOAL if null else None)
        ideal = [1 / (1 - wait / 100) for wait in waits["sync"]]
        add(case, "ideal: sync without its waits", ideal, "x")
        if not null:
            add(case, "achieved of ideal", ratios(faster, ideal), "x")

    def _wall(self, run: Trained) -> float:
        return float(run.steps[-1]["mono"] - run.steps[self._after - 1]["mono"])

    def _rate(self, run: Trained) -> float:
        return float(sum(line["tokens"] for line in run.steps[self._after :])) / self._wall(run)

    def _wait(self, run: Trained) -> float:
        return (
            100
            * float(sum(line["dt_fetch_s"] for line in run.steps[self._after :]))
            / self._wall(run)
        )


# A loop with a stand-in for the accelerator, in a process of its own


def make(case: Mapping[str, Any]) -> Any:
    """A loader of text."""
    from penstock import AsyncDataLoader, TextDataset

    data = TextDataset(
        case["urls"],
        tokenizer=case["tokenizer"],
        engine=case["engine"],
        seq_len=SEQ_LEN,
        cache=False,
    )
    workers: dict[str, Any] = {} if case["mode"] == "async" else {"n_workers": 0}
    return AsyncDataLoader(
        data, case["batch"], shuffle=False, output="numpy", report_docs=0, **workers
    )


def step(batches: Iterator[Any], steps: int, wait_s: float) -> dict[str, Any]:
    """Wall seconds, the seconds of each fetch, and tokens, over so many steps; and a sum of some ids."""
    fetches, tokens, some = [], 0, 0
    begun = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        fetches.append(time.perf_counter() - asked)
        tokens += batch.tokens
        some += int(batch.inputs[0].sum())
        if wait_s:
            time.sleep(wait_s)  # the accelerator
    return {"wall": time.perf_counter() - begun, "fetches": fetches, "tokens": tokens, "some": some}


def contend(case: dict[str, Any]) -> None:
    """Be one contender."""
    logging.getLogger("penstock").setLevel(logging.ERROR)  # that sync does not keep up is the point
    with ExitStack() as stack:
        kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        os.environ.update({"PENSTOCK_CACHE": kept, "HF_HOME": kept})
        if "endpoint" in case:
            os.environ["HF_ENDPOINT"] = case["endpoint"]
        import penstock  # noqa: F401 (the environment is read by then)

        if "warmup" in case:
            serve(functools.partial(start, case))
            return
        loader = stack.enter_context(make(case))
        step(iter(loader), case["before"], case["wait_s"])

        def measure() -> dict[str, Any]:
            done = step(iter(loader), case["steps"], case["wait_s"])
            wait_until_quiet()
            return done

        serve(measure)


def start(case: Mapping[str, Any]) -> dict[str, Any]:
    """From nothing to the end of the first steps, with a warmup after the first batch."""
    begun = time.perf_counter()
    with make(case) as loader:
        loader.warmup(1, 60)
        first = time.perf_counter() - begun
        warmed = loader.warmup(case["warmup"], 60) if case["warmup"] else None
        done = step(iter(loader), case["steps"], case["wait_s"])
        return done | {
            "first": first,
            "warmup_ms": 0.0 if warmed is None else warmed.wait_ms,
            "filled": 0 if warmed is None else warmed.filled,
            "total": time.perf_counter() - begun,
        }


def against(
    repeats: int, quick: bool, cases: Mapping[str, Mapping[str, Any]], fresh: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """The answers of each contender; with `fresh`, from a new process for each."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with ExitStack() as stack:
        opened = (
            {}
            if fresh
            else {n: stack.enter_context(Contender(__file__, c, quick)) for n, c in cases.items()}
        )

        def asking(name: str) -> Callable[[], float]:
            def measure() -> float:
                if fresh:
                    with Contender(__file__, cases[name], quick) as process:
                        answers[name].append(process.ready().measure())
                else:
                    answers[name].append(opened[name].measure())
                return float(answers[name][-1]["wall"])

            return measure

        for process in opened.values():
            process.ready()
        interleave(repeats, {name: asking(name) for name in cases})
    for turn in zip(*answers.values(), strict=True):
        if len({(each["tokens"], each["some"]) for each in turn}) > 1:
            raise RuntimeError(f"{' and '.join(answers)} were given other ids: not the same work")
    return answers


def accelerator(report: Report, corpus: Corpus, quick: bool, repeats: int, seconds: float) -> None:
    """Batches of three sizes before a stand-in."""
    given = {
        "urls": str(corpus.hosted("zstd", SMALL_GROUP)), "tokenizer": str(corpus.tokenizer), "engine": "tokenizers",
    }  # fmt: skip
    workers = len(os.sched_getaffinity(0))
    for batch, busy in SHAPES.items():
        case = given | {"batch": batch, "before": 4}
        # Whole row groups, several of them: their tokens come all at once.
        some = max(4, 400 // batch) if quick else max(20, 4000 // batch)
        flat = against(
            1 if quick else 3,
            quick,
            {"sync": case | {"mode": "sync", "steps": some, "wait_s": 0.0}},
        )["sync"]
        load = statistics.median(each["wall"] for each in flat) / some
        wait_s = load * busy / (1 - busy)
        steps = max(some, round(seconds / (wait_s + load)))
        answers = against(
            repeats,
            quick,
            {mode: case | {"mode": mode, "steps": steps, "wait_s": wait_s} for mode in MODES},
        )
        title = f"stand-in of {1e3 * wait_s:.0f} ms, batch {batch}"
        rates = {
            mode: [each["tokens"] / each["wall"] for each in several]
            for mode, several in answers.items()
        }
        for mode, several in answers.items():
            report.add(title, f"{mode}, rate", rates[mode], "tokens/s", steps=steps, load_s=load)
            used = [100 * wait_s * steps / each["wall"] for each in several]
            report.add(title, f"{mode}, utilisation", used, "%")
            waits = [100 * sum(each["fetches"]) / each["wall"] for each in several]
            report.add(
                title, f"{mode}, data wait", waits, "%", WAIT_GOAL if mode == "async" else None
            )
        gain = [100 * (ratio - 1) for ratio in ratios(rates["async"], rates["sync"])]
        report.add(title, "improvement", gain, "%", Goal(">=", GAINS[batch]))
        ideal = steps * max(wait_s, load / workers)
        report.add(
            title,
            "achieved of ideal",
            [ideal / each["wall"] for each in answers["async"]],
            "x",
            IDEAL_GOAL,
        )


def steady(
    report: Report, corpus: Corpus, endpoint: str, quick: bool, repeats: int, steps: int
) -> None:
    """A fetch, over many steps."""
    case = remote(corpus, endpoint) | {
        "before": 5 if quick else 50,
        "steps": steps,
        "wait_s": STEP_S,
    }
    for mode, several in against(
        repeats, quick, {mode: case | {"mode": mode} for mode in MODES}
    ).items():
        for metric, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("longest", 1.0)):
            values = [1e3 * percentile(each["fetches"], share) for each in several]
            goal = P95_GOAL if (mode, metric) == ("async", "p95") else None
            report.add(f"steady, {mode}", f"fetch over {steps} steps, {metric}", values, "ms", goal)
        waits = [100 * sum(each["fetches"]) / each["wall"] for each in several]
        report.add(f"steady, {mode}", "data wait", waits, "%")


def warmup(report: Report, corpus: Corpus, endpoint: str, quick: bool, repeats: int) -> None:
    """What a warmup costs and saves."""
    case = remote(corpus, endpoint) | {"mode": "async", "steps": FIRST_STEPS, "wait_s": STEP_S}
    answers = against(repeats, quick, {str(n): case | {"warmup": n} for n in WARMED}, fresh=True)
    waited = {
        name: [1e3 * sum(each["fetches"]) for each in several] for name, several in answers.items()
    }
    for name, several in answers.items():
        title = f"warmup of {name}" if name != "0" else "no warmup"
        report.add(title, "first batch", [each["first"] for each in several], "s")
        if name != "0":
            cost = [each["warmup_ms"] for each in several]
            report.add(
                title,
                "warmup costs",
                cost,
                "ms",
                WARMUP_GOAL,
                filled=[each["filled"] for each in several],
            )
        report.add(title, f"waited in the first {FIRST_STEPS} steps", waited[name], "ms")
        if name != "0":
            saved = [none - own for none, own in zip(waited["0"], waited[name], strict=True)]
            report.add(title, "warmup saves there", saved, "ms")
        report.add(
            title, f"step {FIRST_STEPS} done after", [each["total"] for each in several], "s"
        )


def remote(corpus: Corpus, endpoint: str) -> dict[str, Any]:
    return {
        "urls": f"hf://datasets/{REPOSITORY}", "tokenizer": str(corpus.tokenizer), "engine": "auto",
        "batch": BATCH_SIZE, "endpoint": endpoint,
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--steps", type=int, help="of a real run (60)")
    options.add_argument(
        "--seconds", type=float, help="of a turn with the stand-in, at least about (10)"
    )
    options.add_argument(
        "--latency-ms", type=float, default=50.0, help="of the Hub, in steady and warmup"
    )
    options.add_argument(
        "--bandwidth-mb", type=float, default=100.0, help="the same, of all connections together"
    )
    options.add_argument(
        "--threads", type=int, help="of torch's own, in real runs (as torch chooses)"
    )
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (1 if args.quick else 5)
    steps = args.steps or (6 if args.quick else 60)
    seconds = args.seconds or (0.5 if args.quick else 10.0)
    corpus = load_corpus(args.quick)
    settings = {
        "corpus": corpus.name, "runs": {"size": "toy", "batch": [BATCH, RUN_SEQ_LEN], "tokenizer": "byte", "steps": steps},
        "seq_len": SEQ_LEN, "seconds": seconds, "latency_ms": args.latency_ms, "bandwidth_mb": args.bandwidth_mb,
        "threads": args.threads or "torch's default", "repeats": repeats,
    }  # fmt: skip
    report = Report("train", args.quick, settings)
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if "runs" in args.only:
        Runs(report, steps, repeats).measure(
            load_corpus(quick=True)
        )  # a thousand documents: more than a run reads
    if "accelerator" in args.only:
        accelerator(report, corpus, args.quick, repeats, seconds)
    if {"steady", "warmup"} & set(args.only):
        network = ["--latency-ms", str(args.latency_ms), "--bandwidth-mb", str(args.bandwidth_mb)]
        with Hub(corpus.hosted("zstd", LARGE_GROUP), FILES, *network) as hub:
            if "steady" in args.only:
                steady(
                    report,
                    corpus,
                    hub.endpoint,
                    args.quick,
                    max(1, repeats // 2),
                    50 if args.quick else 1000,
                )
            if "warmup" in args.only:
                warmup(report, corpus, hub.endpoint, args.quick, repeats)
    report.close()
    print(
        "# stand-in, steady and warmup: a timed wait stands in for the accelerator, of which there is none here\n"
    )


if __name__ == "__main__":
    main()

"""Measure the gain of a training run from prefetch, prewarm and warmup.

runs:     real runs of `penstock train` (toy size, CPU), prefetch off and on, fresh processes. Text on
          a Hub with 200 ms latency and one document per request; text on disk and synthetic ids,
          without a possible gain.
prewarm:  the first step against a steady one, with and without --prewarm, and the time from the
          start of the process to the end of the first and last step. Data on disk, and on a Hub
          that takes a second per response, so that the prewarm runs while the first batch is
          fetched.
steady:   next() over 1,000 steps of 20 ms (a timed wait) from a Hub with 50 ms latency.
warmup:   the cost of waiting for 8, 16 and 32 batches, and the savings in the first 50 such steps.

Runs that are compared must have identical losses.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, HUB_URL, SEQ_LEN, Answer
from corpora import Corpus, load_corpus
from report import Report

PARTS = ("runs", "prewarm", "steady", "warmup")
RUN_SHAPE = 8, 256
"""Rows and bytes per step of `penstock train`."""
SLOW_HUB_MS = "200"
"""With one document per request, a run without prefetch waits about a third of its time."""
FILES = 50
STEP_S = 0.02
FIRST_STEPS = 50
DEADLINE_S = 900.0


# Runs of the trainer


@dataclass(frozen=True)
class Trained:
    """One run of `penstock train`, from its heartbeat."""

    begun: float
    """The time of the process's creation on the monotonic clock that all processes share."""
    steps: list[dict[str, Any]]
    prewarm_s: float

    def computed(self, step: int) -> float:
        """Return the seconds of a step without its wait for data."""
        line = self.steps[step]
        return float(line["dt_step_s"] - line["dt_fetch_s"])

    def done_after(self, step: int) -> float:
        """Return the seconds from the creation of the process to the end of a step."""
        return float(self.steps[step]["mono"]) - self.begun

    def over(self, name: str, after: int) -> float:
        """Return the sum of a field per second of wall time, without the first steps."""
        wall = self.steps[-1]["mono"] - self.steps[after - 1]["mono"]
        return float(sum(line[name] for line in self.steps[after:]) / wall)


def trained(*options: str, steps: int, kept: Path | None = None, endpoint: str = "") -> Trained:
    """Run the trainer in an empty folder. `kept`: a cache filled by earlier runs."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        cache = str(kept or Path(folder) / "cache")
        environment = common.clean_environment(PENSTOCK_CACHE=cache, HF_HOME=cache)
        if endpoint:
            environment["HF_ENDPOINT"] = endpoint
        batch, seq_len = map(str, RUN_SHAPE)
        command = [sys.executable, "-m", "penstock.cli.main", "train", "--out", "run"]
        command += ["--save-last", "0", "--seq-len", seq_len, "--batch", batch]
        command += ["--steps", str(steps), *options]
        begun = time.monotonic()
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            cwd=folder,
            env=environment,
        )
        if done.returncode:
            raise RuntimeError(f"{command} exited with {done.returncode}:\n{done.stdout[-4000:]}")
        heartbeat = Path(folder) / "run" / "heartbeat_rank0.jsonl"
        lines = [json.loads(line) for line in heartbeat.read_text().splitlines()]
    taken = [line for line in lines if line["msg"] == "progress"]
    if len(taken) != steps or any(line.get("synthetic") for line in taken):
        raise RuntimeError(f"{command}: {len(taken)} steps with data instead of {steps}")
    prewarm_s = sum(line["seconds"] for line in lines if line["msg"] == "prewarm")
    return Trained(begun, taken, prewarm_s)


def run_all(
    cases: Mapping[str, Callable[..., Trained]],
    ways: Mapping[str, Sequence[str]],
    steps: int,
    repeats: int,
) -> dict[str, dict[str, list[Trained]]]:
    """Run all variants of each case in turn, and check that they compute the same losses."""
    seen: dict[str, dict[str, list[Trained]]] = {c: {way: [] for way in ways} for c in cases}

    def measure(case: str, way: str) -> float:
        seen[case][way].append(cases[case](*ways[way], steps=steps))
        return 0.0

    contenders = {f"{c}, {way}": partial(measure, c, way) for c in cases for way in ways}
    common.interleave(repeats, contenders)
    for case, runs in seen.items():
        losses = [[line["loss"] for line in run.steps] for each in runs.values() for run in each]
        if any(other != losses[0] for other in losses):
            raise RuntimeError(f"{case}: runs have different losses: not the same work")
    return seen


def measure_runs(report: Report, corpus: Corpus, steps: int, repeats: int) -> None:
    after = min(10, steps // 2)
    kept = common.bench_folder("train-cache")
    disk = partial(trained, "--dataset", str(corpus.parquet), kept=kept)
    with common.Hub(corpus.hosted("zstd", 1), FILES, "--latency-ms", SLOW_HUB_MS) as hub:
        far = partial(trained, "--dataset", HUB_URL, endpoint=hub.endpoint)
        cases: dict[str, Callable[..., Trained]] = {
            f"text on a Hub of {SLOW_HUB_MS} ms": far,
            "text on disk": disk,
            "made-up ids": partial(trained, "--dataset", "synthetic"),
        }
        ways = {"sync": ("--set", "prefetch=false"), "async": ("--set", "prefetch=true")}
        seen = run_all(cases, ways, steps, repeats)
    for case, runs in seen.items():
        rates = {way: [run.over("tokens", after) for run in each] for way, each in runs.items()}
        for way, each in runs.items():
            report.add(f"runs, {case}", f"{way}, rate", rates[way], "tokens/s")
            waits = [100 * run.over("dt_fetch_s", after) for run in each]
            report.add(f"runs, {case}", f"{way}, data wait", waits, "%")
        report.add(
            f"runs, {case}", "async / sync", common.ratios(rates["async"], rates["sync"]), "x"
        )


def measure_prewarm(
    report: Report, corpus: Corpus, steps: int, repeats: int, latency_ms: float
) -> None:
    after = min(10, steps // 2)
    disk = partial(trained, "--dataset", "stdlib", kept=common.bench_folder("train-cache"))
    disk(steps=1)  # writes the text, compiles byte code
    network = ("--latency-ms", str(latency_ms), "--bandwidth-mb", "100")
    with common.Hub(corpus.hosted("zstd", 250), FILES, *network) as hub:
        far = partial(trained, "--dataset", HUB_URL, endpoint=hub.endpoint)
        cases: dict[str, Callable[..., Trained]] = {"data on disk": disk, "data on a Hub": far}
        seen = run_all(cases, {"plain": (), "prewarm": ("--prewarm",)}, steps, repeats)
    for case, runs in seen.items():
        for way, each in runs.items():
            title = f"{case}, {way}"
            firsts = [run.computed(0) for run in each]
            steady = [statistics.median(map(run.computed, range(after, steps))) for run in each]
            report.add(title, "first step, without its wait for data", firsts, "s")
            report.add(title, f"steady step, median after step {after}", steady, "s")
            report.add(title, "first / steady", common.ratios(firsts, steady), "x")
            report.add(title, "the prewarm itself", [run.prewarm_s for run in each], "s")
            for step in (0, steps - 1):
                done = [run.done_after(step) for run in each]
                report.add(title, f"step {step + 1} done after", done, "s")


# A loop with a timed wait for the accelerator, from a Hub


def contend(case: Answer) -> None:
    """Run as a contender: from a cold start to the end of the steps."""
    common.silence_warnings()
    with common.fresh_cache(case["endpoint"]):
        import torch  # noqa: F401 (as in a training script: batches are tensors)

        from penstock import AsyncDataLoader, TextDataset

        def measure() -> Answer:
            begun = time.perf_counter()
            data = TextDataset(HUB_URL, tokenizer=case["tokenizer"], seq_len=SEQ_LEN, cache=False)
            n = None if case["mode"] == "async" else 0
            with AsyncDataLoader(data, BATCH_SIZE, shuffle=False, n_workers=n) as loader:
                next(loader)
                first = time.perf_counter() - begun
                warmup_ms = loader.warmup(case["warmup"], 60).wait_ms if case["warmup"] else 0.0
                told = common.take_steps(loader, case["steps"], lambda: time.sleep(STEP_S))
            total = time.perf_counter() - begun
            return told | {"first": first, "warmup_ms": warmup_ms, "total": total}

        common.serve(measure)


def measure_steady(report: Report, base: Answer, repeats: int, steps: int) -> None:
    cases = {mode: base | {"mode": mode, "warmup": 0, "steps": steps} for mode in ("sync", "async")}
    for mode, given in common.measure_all(__file__, cases, repeats, fresh=True).items():
        for metric, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("longest", 1.0)):
            values = [1e3 * common.percentile(each["fetches"], share) for each in given]
            report.add(f"steady, {mode}", f"next() over {steps} steps, {metric}", values, "ms")
        waits = [100 * sum(each["fetches"]) / each["wall"] for each in given]
        report.add(f"steady, {mode}", "data wait", waits, "%")


def measure_warmup(report: Report, base: Answer, repeats: int) -> None:
    base = base | {"mode": "async", "steps": FIRST_STEPS}
    cases = {f"warmup of {n}": base | {"warmup": n} for n in (0, 8, 16, 32)}
    for case, given in common.measure_all(__file__, cases, repeats, fresh=True).items():
        waited = [1e3 * sum(each["fetches"]) for each in given]
        report.add(case, "first batch", [each["first"] for each in given], "s")
        report.add(case, "warmup takes", [each["warmup_ms"] for each in given], "ms")
        report.add(case, f"waited in the first {FIRST_STEPS} steps", waited, "ms")
        report.add(case, f"step {FIRST_STEPS} done", [each["total"] for each in given], "s")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--steps", type=int, help="of a real run (60)")
    options.add_argument("--latency-ms", type=float, default=50.0, help="in steady and warmup")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (1 if args.quick else 5)
    steps = args.steps or (6 if args.quick else 60)
    corpus, few = load_corpus(args.quick), load_corpus(quick=True)
    settings = {"corpus": corpus.name, "steps": steps, "latency_ms": args.latency_ms}
    report = Report("train", args.quick, settings | {"repeats": repeats})
    if "runs" in args.only:
        measure_runs(report, few, steps, repeats)
    if "prewarm" in args.only:
        latency_ms = 100.0 if args.quick else 1000.0
        measure_prewarm(report, few, steps, repeats, latency_ms)
    network = ("--latency-ms", str(args.latency_ms), "--bandwidth-mb", "100")
    with common.Hub(corpus.hosted("zstd", 250), FILES, *network) as hub:
        base = {"endpoint": hub.endpoint, "tokenizer": str(corpus.tokenizer)}
        if "steady" in args.only:
            measure_steady(report, base, repeats, 50 if args.quick else 1000)
        if "warmup" in args.only:
            measure_warmup(report, base, repeats)
    report.close()


if __name__ == "__main__":
    main()

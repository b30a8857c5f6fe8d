"""From bad settings to good ones by itself: how far within a minute?

Three runs that are held back by different things begin with settings that do not suit them, and `prefetch_size="auto"`:

slow remote:      a loopback Hub with 100 ms before each answer; one request in flight, one worker, two batches ready.
heavy tokenizing: the `tokenizers` engine on local files; one worker.
slow consumer:    a pause of 20 ms stands in for a step, which needs far less than the loader gives; one worker, one
                  batch ready. There is nothing to gain, and nothing may be lost.

Beside each, in the same run: the best of a few fixed settings without autotune, each measured before and after the
run that tunes itself. The first two are taken from as fast as they come. A rate is the tokens handed out over wall
time: at the start, while nothing has been changed yet; and over the last sixth of each third of the run, trials
included. Every decision is in the results, as the loader tells it.

A chunk is some hundreds of kilobytes of text, so that a rate over two seconds means something. `tokenizers` has
threads of its own, which are off here: one worker would keep all cores busy.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from common import BATCH_SIZE, REPOSITORY, SEQ_LEN, parser
from corpora import Corpus, load_corpus
from hosted import Hub
from record import Goal, Report
from rounds import Contender, interleave, serve

LATENCY_MS, BANDWIDTH_MB = 100.0, 500.0
FETCHES = (1, 4, 16, 32)
DOCUMENTS = 50
"""In a row group: 0.3 MB of text."""
FILES = 32
STEP_S = 0.02

UNCHANGED_S = 3.0
"""The loader waits for longer than this before it tries anything."""
SETTLE_S = 2.0
"""Of a fixed run, before its rate counts."""
ENOUGH = 0.9
LOOK_S = 5.0
"""Rates over so long tell when `ENOUGH` of the best was reached."""

REMOTE, TOKENIZE, CONSUMER = "slow remote", "heavy tokenizing", "slow consumer"
GOALS = {REMOTE: Goal(">=", ENOUGH), TOKENIZE: Goal(">=", ENOUGH), CONSUMER: Goal(">=", 0.98)}


# The contenders


@dataclass(slots=True)
class Taken:
    """When each batch was handed out, and how many tokens there were by then."""

    begun: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: [0])

    def add(self, now: float, tokens: int) -> None:
        self.times.append(now)
        self.tokens.append(self.tokens[-1] + tokens)

    def rate(self, since: float, until: float) -> float:
        """Tokens a second between two moments, in seconds after the first batch."""
        first, last = (
            self.tokens[bisect_right(self.times, self.begun + at)] for at in (since, until)
        )
        return (last - first) / (until - since)


class Loader:
    """One run at a time, each with a loader of its own."""

    def __init__(
        self,
        data: dict[str, Any],
        loader: dict[str, Any],
        seconds: float,
        step_s: float,
        autotune: bool,
    ) -> None:
        # Before anything is imported: where listings and footers are kept.
        self._kept = tempfile.mkdtemp(prefix="penstock-bench-")
        os.environ["PENSTOCK_CACHE"] = self._kept
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from penstock.encode.tokenize import load_tokenizer

        from penstock import AsyncDataLoader, TextDataset

        self._new = AsyncDataLoader
        urls, engine = data.pop("urls"), data.pop("engine", "auto")
        tokenizer = load_tokenizer(data.pop("tokenizer"), engine=engine)
        self._data = TextDataset(urls, tokenizer=tokenizer, seq_len=SEQ_LEN, cache=False, **data)
        self._settings = loader | ({"prefetch_size": "auto"} if autotune else {})
        self._seconds, self._step_s, self._tunes = seconds, step_s, autotune
        with self._loader() as first:  # all imports are made, and the vocabulary is loaded
            next(first)

    def _loader(self) -> Any:
        return self._new(self._data, BATCH_SIZE, **self._settings)

    def measure(self) -> dict[str, Any]:
        with self._loader() as loader:
            next(loader)
            taken = self._take(loader)
            events = loader.telemetry.take_events()
            stats = loader.stats()
        lasted = self._seconds
        if not self._tunes:
            return {"rate": taken.rate(min(SETTLE_S, lasted / 3), lasted), "verdict": stats.verdict}
        looks = [float(at) for at in range(int(LOOK_S), int(lasted) + 1)]
        return {
            "start": taken.rate(0.0, min(UNCHANGED_S, lasted / 3)),
            "rates": [taken.rate(end - lasted / 6, end) for end in (lasted / 3, 2 * lasted / 3, lasted)],
            "looks": {at: taken.rate(at - LOOK_S, at) for at in looks},
            "decisions": [fields | {"at_s": round(mono - taken.begun, 1)} for _, mono, msg, fields in events
                          if msg == "tune"],
            "verdict": stats.verdict,
        }  # fmt: skip

    def _take(self, loader: Any) -> Taken:
        taken = Taken(time.monotonic())
        end = taken.begun + self._seconds
        now = taken.begun
        while now < end:
            if self._step_s:
                time.sleep(self._step_s)
            tokens = next(loader).tokens
            now = time.monotonic()
            taken.add(now, tokens)
        return taken

    def close(self) -> None:
        shutil.rmtree(self._kept, ignore_errors=True)


def contend(case: dict[str, Any]) -> None:
    """Be one contender."""
    logging.getLogger("penstock").setLevel(logging.ERROR)  # that it waits is the point
    endpoint = case.pop("endpoint", None)
    if endpoint:
        os.environ["HF_ENDPOINT"] = endpoint
    contender = Loader(**case)
    try:
        serve(contender.measure)
    finally:
        contender.close()


# Running


@dataclass(frozen=True)
class Trial:
    """Something that holds a run back, the settings to begin with, and fixed ones to compare with."""

    name: str
    bad: Mapping[str, Any]
    """What is given to a contender: see `Loader`."""
    fixed: Mapping[str, Mapping[str, Any]]


def remote(endpoint: str) -> Trial:
    def case(fetches: int, **loader: Any) -> dict[str, Any]:
        data = {
            "urls": f"hf://datasets/{REPOSITORY}",
            "tokenizer": "byte",
            "remote": {"fetches": fetches},
        }
        return {"endpoint": endpoint, "data": data, "loader": loader, "step_s": 0.0}

    fixed = {f"fetches={n}": case(n) for n in FETCHES}
    return Trial(REMOTE, case(1, n_workers=1, prefetch_size=2), fixed)


def tokenize(corpus: Corpus, folder: str) -> Trial:
    data = {"urls": folder, "tokenizer": str(corpus.tokenizer), "engine": "tokenizers"}
    cores = len(os.sched_getaffinity(0))
    several = sorted({n for n in (1, 2, 4, 8, 16, cores) if n <= cores})

    def case(n_workers: int) -> dict[str, Any]:
        return {"data": data, "loader": {"n_workers": n_workers}, "step_s": 0.0}

    return Trial(TOKENIZE, case(1), {f"n_workers={n}": case(n) for n in several})


def consumer(corpus: Corpus, folder: str) -> Trial:
    data = {"urls": folder, "tokenizer": str(corpus.tokenizer)}

    def case(**loader: Any) -> dict[str, Any]:
        return {"data": data, "loader": loader, "step_s": STEP_S}

    bad = case(n_workers=1, prefetch_size=1)
    return Trial(CONSUMER, bad, {"the same, fixed": bad, "defaults": case()})


class Bench:
    """One trial: fixed settings, the run that tunes itself, fixed settings again."""

    def __init__(self, report: Report, seconds: float, fixed_s: float, quick: bool) -> None:
        self._report = report
        self._seconds, self._fixed_s, self._quick = seconds, fixed_s, quick

    def run(self, trial: Trial) -> None:
        with ExitStack() as stack:

            def start(case: Mapping[str, Any], seconds: float, autotune: bool) -> Contender:
                told = dict(case) | {"seconds": seconds, "autotune": autotune}
                return stack.enter_context(Contender(__file__, told, self._quick)).ready()

            tuned = start(trial.bad, self._seconds, True)
            fixed = {name: start(case, self._fixed_s, False) for name, case in trial.fixed.items()}
            asking: dict[str, Callable[[], float]] = {
                name: _rate(process) for name, process in fixed.items()
            }
            before = interleave(1, asking)
            answer = tuned.measure()
            after = interleave(1, asking)
        self._tell(trial.name, answer, {name: before[name] + after[name] for name in fixed})

    def _tell(self, case: str, answer: dict[str, Any], fixed: dict[str, list[float]]) -> None:
        add, scale = self._report.add, 1e-6
        for name, rates in fixed.items():
            add(case, f"fixed: {name}", [scale * rate for rate in rates], "M tokens/s")
        name = max(fixed, key=lambda name: statistics.median(fixed[name]))
        best = statistics.median(fixed[name])
        add(case, f"best fixed ({name})", scale * best, "M tokens/s")
        add(case, "tuned: at the start", scale * answer["start"], "M tokens/s")
        for n, rate in enumerate(answer["rates"], 1):
            add(case, f"tuned: after {n * self._seconds / 3:.0f} s", scale * rate, "M tokens/s")
        add(case, "tuned at the start, of the best fixed", answer["start"] / best, "x")
        decisions, verdict = answer["decisions"], answer["verdict"]
        add(
            case, f"tuned after {self._seconds:.0f} s, of the best fixed", answer["rates"][-1] / best, "x", GOALS[case],
            decisions=decisions, verdict=verdict, looks=answer["looks"],
        )  # fmt: skip
        reached = [float(at) for at, rate in answer["looks"].items() if rate >= ENOUGH * best]
        if reached:
            add(case, f"{ENOUGH:g} of the best fixed first reached", min(reached), "s")
        for word, kept in (("tried", None), ("kept", True), ("undone", False)):
            add(case, f"changes {word}", sum(d["kept"] is kept for d in decisions), "")
        for decision in decisions:
            word = {None: "tried", True: "kept", False: "undone"}[decision["kept"]]
            change = f"{decision['what']} {decision['from']} → {decision['to']}"
            print(
                f"# {case}, {decision['at_s']:5.1f} s: {change} {word}: {decision['why']}",
                flush=True,
            )
        print(f"# {case}, at the end: {verdict}", flush=True)


def _rate(process: Contender) -> Callable[[], float]:
    return lambda: float(process.measure()["rate"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, help="of a run that tunes itself (60)")
    options.add_argument("--fixed-seconds", type=float, help="of a run with fixed settings (10)")
    options.add_argument(
        "--only", nargs="+", choices=(REMOTE, TOKENIZE, CONSUMER), help="not all three"
    )
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    seconds = args.seconds or (9.0 if args.quick else 60.0)
    fixed_s = args.fixed_seconds or (2.0 if args.quick else 10.0)
    corpus = load_corpus(args.quick)
    folder = corpus.hosted("zstd", DOCUMENTS)
    settings = {
        "corpus": corpus.name, "batch": [BATCH_SIZE, SEQ_LEN], "documents": DOCUMENTS, "latency_ms": LATENCY_MS,
        "bandwidth_mb": BANDWIDTH_MB, "step_ms": 1e3 * STEP_S, "seconds": seconds, "fixed_seconds": fixed_s,
    }  # fmt: skip
    report = Report("autotune", args.quick, settings)
    bench = Bench(report, seconds, fixed_s, args.quick)
    wanted = args.only or (REMOTE, TOKENIZE, CONSUMER)
    if REMOTE in wanted:
        with Hub(
            folder, FILES, "--latency-ms", str(LATENCY_MS), "--bandwidth-mb", str(BANDWIDTH_MB)
        ) as hub:
            bench.run(remote(hub.endpoint))
    if TOKENIZE in wanted:
        bench.run(tokenize(corpus, str(folder)))
    if CONSUMER in wanted:
        bench.run(consumer(corpus, str(folder)))
    report.close()


if __name__ == "__main__":
    main()

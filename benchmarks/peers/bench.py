"""The measurements of all entrants. Each is a fresh process in the entrant's own environment.

Prepared formats are kept in the benchmarks' folder, with the time that they took.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import environments
from case import TOKENS, Case
from common import HUB_URL, Hub, bench_folder, percentile
from corpora import Corpus
from report import Report
from roster import PENSTOCK_TOKENS, Entrant
from watched import Outcome, run

PAUSE_S = 0.02
RESUME_AT = 0.8
"""Share of the corpus before the first interruption."""
AFTER = 20
"""Batches that are compared after each resume."""

Measure = Callable[[Entrant], None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    copies: int = 16
    token_copies: int = 4
    passes: int = 8
    slow_batches: int = 300
    settled: int = 1000
    """Batches before the rate is measured: some load a second tokenizer or start processes."""
    slow_settled: int = 30
    more: int = 4
    """Further rounds of contenders that take seconds: a shared machine changes by the second."""
    paced: int = 80
    deadline_s: float = 180.0
    files: int = 100
    latency_ms: float = 50.0
    bandwidth_mb: float = 100.0


QUICK = Sizes(
    copies=1,
    token_copies=1,
    passes=1,
    slow_batches=20,
    settled=5,
    slow_settled=2,
    more=0,
    paced=12,
    files=10,
    latency_ms=5.0,
)


class NotPrepared(Exception):
    """A contender's own format could not be made; the message says why."""


@dataclass
class Seen:
    """What was seen of one entrant: numbers round by round, and words."""

    numbers: dict[str, list[float]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def median(self, metric: str) -> float | None:
        values = self.numbers.get(metric)
        return statistics.median(values) if values else None


class Bench:
    """One run of the benchmark."""

    def __init__(
        self, report: Report, corpus: Corpus, entrants: Sequence[Entrant], sizes: Sizes
    ) -> None:
        self._report, self._corpus, self._sizes = report, corpus, sizes
        self.entrants = [entrant for entrant in entrants if _installed(entrant)]
        self.seen: dict[str, Seen] = {entrant.name: Seen() for entrant in entrants}
        self._scratch = {
            each.name: Path(tempfile.mkdtemp(prefix="penstock-peers-")) for each in self.entrants
        }

    def _case(self, entrant: Entrant, copies: int, **more: Any) -> Case:
        given: dict[str, Any] = {
            "contender": entrant.module,
            "variant": entrant.variant,
            "tokenizer": entrant.tokenizer,
            "source": str(self._corpus.copies(copies)),
            "vocabulary": str(self._corpus.tokenizer),
            "shuffle": entrant.shuffle,
        }
        case = Case(**(given | more))
        return self._prepared(entrant, case, copies) if entrant.prepares else case

    def _prepared(self, entrant: Entrant, case: Case, copies: int) -> Case:
        """Return the case with its format made, now or in an earlier run."""
        name = f"peers-{self._corpus.name}-{copies}-{entrant.module}-{entrant.variant}"
        folder = bench_folder(name.replace(" ", "_").replace(",", ""))
        took = folder / "seconds.json"
        case = replace(case, prepared=str(folder / "data"))
        if not took.exists():
            (folder / "data").mkdir(exist_ok=True)
            python = environments.python(entrant.environment)
            made = run(python, "prepare", case, deadline_s=900.0)
            if made.what != "done":
                raise NotPrepared(f"its format was not made: {made.why}\n{made.last_words}")
            took.write_text(json.dumps(made.told["seconds"]))
        self._add(entrant, "preparation", json.loads(took.read_text()), "s")
        return case

    def _run(self, entrant: Entrant, what: str, case: Case, *options: Any, **more: Any) -> Outcome:
        python = environments.python(entrant.environment)
        given: dict[str, Any] = {"scratch": self._scratch[entrant.name], **more}
        limit_s = self._sizes.deadline_s
        outcome = run(python, what, case, *map(str, options), deadline_s=limit_s, **given)
        if outcome.what in ("error", "silence"):
            words = outcome.last_words[-800:]
            print(f"# {entrant.name}, {what}: {outcome.why}\n{words}", flush=True)
        return outcome

    def _add(self, entrant: Entrant, metric: str, value: float, unit: str) -> None:
        self.seen[entrant.name].numbers.setdefault(f"{metric}|{unit}", []).append(value)

    def _say(self, entrant: Entrant, metric: str, words: str) -> None:
        self.seen[entrant.name].words[metric] = words

    def _rounds(
        self, part: str, repeats: int, entrants: Sequence[Entrant], measure: Measure
    ) -> None:
        """Measure each entrant once a round; every round begins with another one."""
        for number in range(repeats):
            turn = number % max(1, len(entrants))
            begun = time.monotonic()
            for entrant in [*entrants[turn:], *entrants[:turn]]:
                try:
                    measure(entrant)
                except NotPrepared as error:
                    print(f"# {entrant.name}: {error}", flush=True)
                    self._say(entrant, part, str(error).partition("\n")[0])
            took = time.monotonic() - begun
            print(f"# {part}, round {number + 1} of {repeats}: {took:.0f} s", flush=True)

    # The parts

    def drain(self, repeats: int) -> None:
        """First batch, rate, CPU time, memory, exit. The first round fills caches."""
        sizes, counted = self._sizes, False

        def measure(entrant: Entrant) -> None:
            tokens = entrant.group == "tokens"
            copies = 1 if entrant.slow else sizes.token_copies if tokens else sizes.copies
            case = self._case(entrant, copies, passes=sizes.passes if tokens else 1)
            options: list[Any] = ["--after", sizes.settled]
            if entrant.slow:
                options = ["--after", sizes.slow_settled, "--batches", sizes.slow_batches]
            outcome = self._run(entrant, "drain", case, *options)
            if outcome.what != "done" or outcome.first_s is None or not outcome.told["tokens"]:
                self._say(entrant, "drain", outcome.why)
            elif counted:
                millions = outcome.told["tokens"] / 1e6
                self._add(entrant, "first batch, local", outcome.first_s, "s")
                self._add(entrant, "rate", millions / outcome.told["seconds"], "M tokens/s")
                self._add(entrant, "CPU", outcome.cpu_s / millions, "s/M tokens")
                self._add(entrant, "peak RSS", outcome.peak_bytes / 1e6, "MB")
                if outcome.exit_s is not None:
                    self._add(entrant, "exit", outcome.exit_s, "s")

        if sizes.more:
            self._rounds("drain", 1, self.entrants, measure)
        counted = True
        self._rounds("drain", repeats, self.entrants, measure)
        fast = [entrant for entrant in self.entrants if not entrant.slow]
        self._rounds("drain", sizes.more, fast, measure)

    def pace(self, repeats: int) -> None:
        """Measure `next()` and data wait beside a consumer that waits 20 ms after each batch."""
        sizes = self._sizes

        def measure(entrant: Entrant) -> None:
            passes = sizes.passes if entrant.group == "tokens" else 1
            case = self._case(entrant, 1 if entrant.slow else sizes.token_copies, passes=passes)
            options = ("--batches", sizes.paced, "--pause-s", PAUSE_S)
            outcome = self._run(entrant, "pace", case, *options)
            if outcome.what != "done":
                self._say(entrant, "pace", outcome.why)
                return
            fetches = outcome.told["fetches"]
            self._add(entrant, "data wait", 100 * sum(fetches) / outcome.told["seconds"], "%")
            self._add(entrant, "next() p50", 1e3 * percentile(fetches, 0.5), "ms")
            self._add(entrant, "next() p99", 1e3 * percentile(fetches, 0.99), "ms")

        entrants = [each for each in self.entrants if each.group != "limit"]
        self._rounds("pace", 1, entrants, measure)
        self._rounds("pace", repeats - 1, [each for each in entrants if not each.slow], measure)

    def resume(self, repeats: int) -> None:
        """Resume at 80 % of the corpus, twice in a row, and with one worker instead of two."""
        tokens = next(each for each in self.entrants if each.name == PENSTOCK_TOKENS)
        file = Path(self._case(tokens, 1).prepared) / "tokens.bin"
        at = int(RESUME_AT * ((file.stat().st_size // 2 - 1) // TOKENS - 1))

        def measure(entrant: Entrant) -> None:
            with tempfile.TemporaryDirectory(prefix="penstock-peers-") as kept:
                first, second = f"{kept}/first", f"{kept}/second"
                save = ("--batches", at + 2 * AFTER, "--save-at", at, "--save-to", first)
                for shuffle in (True, False):  # in order if the contender does not shuffle
                    case = self._case(entrant, 1, shuffle=shuffle)
                    through = self._run(entrant, "follow", case, *save)
                    if through.what != "not offered" or "shuffle" not in through.why:
                        break
                if through.what != "done":
                    self._say(entrant, "resume", through.why)
                    return
                expected = through.told["digests"][at:]
                after = len(expected) // 2

                def resumed(state: str, *options: Any, workers: int = 2) -> Outcome:
                    case = self._case(entrant, 1, shuffle=shuffle, state=state, workers=workers)
                    return self._run(entrant, "follow", case, "--batches", after, *options)

                once = resumed(first, "--save-at", after, "--save-to", second)
                self._say(entrant, "resume, once", same(expected[:after], once))
                if once.what != "done" or once.first_s is None:
                    return
                self._add(entrant, "first batch of a resume", once.first_s, "s")
                self._say(
                    entrant, "resume, twice", same(expected[after : 2 * after], resumed(second))
                )
                if entrant.workers:
                    fewer = same(expected[:after], resumed(first, workers=1))
                    self._say(entrant, "resume, one worker", fewer)

        entrants = [each for each in self.entrants if each.group != "limit"]
        self._rounds("resume", 1, entrants, measure)

    def hub(self, repeats: int) -> None:
        """Measure the first batch from a Hub, nothing cached."""
        sizes = self._sizes
        network = ("--latency-ms", str(sizes.latency_ms), "--bandwidth-mb", str(sizes.bandwidth_mb))
        with Hub(self._corpus.hosted("zstd", 250), sizes.files, *network) as server:

            def measure(entrant: Entrant) -> None:
                case = self._case(entrant, 1, source=HUB_URL)
                cold: Mapping[str, Any] = {"environment": {"HF_ENDPOINT": server.endpoint}}
                outcome = self._run(entrant, "drain", case, "--batches", 2, scratch=None, **cold)
                if outcome.first_s is None:
                    self._say(entrant, "first batch, Hub", outcome.why)
                else:
                    self._add(entrant, "first batch, Hub", outcome.first_s, "s")

            self._rounds("hub", repeats, [each for each in self.entrants if each.remote], measure)

    def close(self) -> None:
        """Write everything down."""
        for entrant in self.entrants:
            seen = self.seen[entrant.name]
            for key, values in seen.numbers.items():
                metric, _, unit = key.partition("|")
                self._report.add(entrant.name, metric, values, unit, group=entrant.group)
            if seen.words:
                self._report.note(entrant.name, seen.words, group=entrant.group)
        for folder in self._scratch.values():
            shutil.rmtree(folder, ignore_errors=True)


def _installed(entrant: Entrant) -> bool:
    try:
        environments.python(entrant.environment)
    except environments.NotInstalled as error:
        print(f"# {entrant.name} is left out: {error}", flush=True)
        return False
    return True


def same(expected: Sequence[str], outcome: Outcome) -> str:
    """Say whether a process gave the expected batches; one that is missing is a difference."""
    if outcome.what != "done":
        return outcome.why
    given = [*outcome.told["digests"], *[""] * len(expected)]
    differs = next(
        (n for n, (a, b) in enumerate(zip(expected, given, strict=False), 1) if a != b), None
    )
    return "identical" if differs is None else f"differs from batch {differs} on"

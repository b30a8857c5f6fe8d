"""The measurements: who does what, in which order, and what is written down of it.

In:    the entrants, a corpus, how often.
Out:   a `Seen` for each entrant, and JSON lines through `Report`.
Where: the driver's process; every measurement is a fresh process of the entrant's own environment.
State: prepared formats in the benchmarks' folder, kept from run to run with the time that they took.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hosted import Hub
from record import Report
from rounds import percentile

import environments
from case import BATCH_SIZE, SEQ_LEN, Case
from common import REPOSITORY, bench_folder
from corpora import Corpus
from roster import DOCUMENTED, LIMIT, PREPARED, Entrant
from watched import Outcome, run

TOKENS = BATCH_SIZE * SEQ_LEN
MILLION = 1e6
PAUSES_S = (0.005, 0.02, 0.1)
SHARE = 0.8
"""Of the corpus, before the first interruption."""
AFTER = 20
"""Batches that are followed after each resume."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything."""

    copies: int = 16
    token_copies: int = 4
    passes: int = 8
    slow_batches: int = 300
    settled: int = 1000
    """Batches that come before the rate is measured: a second tokenizer is loaded meanwhile, or further processes started."""
    slow_settled: int = 30
    more: int = 4
    """Rounds beyond those of all, for contenders that take seconds: a machine that others use is not the same from one second
    to the next."""
    paced: Mapping[float, int] = field(default_factory=lambda: {0.005: 200, 0.02: 80, 0.1: 30})
    followed: int = 120
    deadline_s: float = 180.0
    stall_s: float = 240.0
    files: int = 100
    latency_ms: float = 50.0
    bandwidth_mb: float = 100.0


QUICK = Sizes(
    copies=1, token_copies=1, passes=1, slow_batches=20, settled=5, slow_settled=2, more=0, paced=dict.fromkeys(PAUSES_S, 12),
    followed=20, deadline_s=120.0, stall_s=10.0, files=10, latency_ms=5.0,
)  # fmt: skip


class NotPrepared(Exception):
    """A contender's own format could not be made; the message says why."""


@dataclass
class Seen:
    """What was seen of one entrant; numbers round by round."""

    numbers: dict[str, list[float]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def median(self, metric: str) -> float | None:
        """Of the rounds; None where it was not measured."""
        values = self.numbers.get(metric)
        return statistics.median(values) if values else None


class Bench:
    """One run of the benchmark."""

    def __init__(
        self, report: Report, corpus: Corpus, entrants: Sequence[Entrant], sizes: Sizes
    ) -> None:
        self._report, self._corpus, self._sizes = report, corpus, sizes
        self.entrants = [entrant for entrant in entrants if self._installed(entrant)]
        self.seen: dict[str, Seen] = {entrant.name: Seen() for entrant in entrants}
        self._scratch = {
            entrant.name: Path(tempfile.mkdtemp(prefix="penstock-peers-"))
            for entrant in self.entrants
        }

    def _installed(self, entrant: Entrant) -> bool:
        try:
            environments.python(entrant.environment)
        except environments.NotInstalled as error:
            print(f"# {entrant.name} is left out: {error}", flush=True)
            return False
        return True

    # The cases

    def _case(self, entrant: Entrant, copies: int, **more: Any) -> Case:
        source = str(self._corpus.copies(copies))
        given: dict[str, Any] = {
            "contender": entrant.module, "variant": entrant.variant, "tokenizer": entrant.tokenizer,
            "source": source, "vocabulary": str(self._corpus.tokenizer), "shuffle": entrant.shuffle,
        }  # fmt: skip
        case = Case(**(given | more))
        if entrant.prepares or "copy" in entrant.variant:
            case = self._prepared(entrant, case, copies)
        return case

    def _prepared(self, entrant: Entrant, case: Case, copies: int) -> Case:
        """The case with its format made, now or in an earlier run."""
        module = "ours" if entrant.group == LIMIT else entrant.module
        name = f"peers-{self._corpus.name}-{copies}-{module}-{entrant.variant if module != 'ours' else ''}".replace(
            " ", "_"
        )
        folder = bench_folder(name.replace(",", ""))
        took = folder / "seconds.json"
        case = replace(case, prepared=str(folder / "data"))
        if not took.exists():
            (folder / "data").mkdir(exist_ok=True)
            made = run(
                environments.python(entrant.environment),
                "prepare",
                replace(case, contender=module),
                deadline_s=900.0,
            )
            if made.what != "done":
                raise NotPrepared(
                    f"its format could not be prepared: {made.why}\n{made.last_words}"
                )
            took.write_text(json.dumps(made.told["seconds"]))
        if entrant.group != LIMIT:
            self._add(entrant, "preparation", json.loads(took.read_text()), "s")
        return case

    def _run(self, entrant: Entrant, what: str, case: Case, *options: str, **more: Any) -> Outcome:
        given: dict[str, Any] = {
            "deadline_s": self._sizes.deadline_s,
            "scratch": self._scratch[entrant.name],
        } | more
        outcome = run(environments.python(entrant.environment), what, case, *options, **given)
        if outcome.what in ("error", "silence"):
            print(
                f"# {entrant.name}, {what}: {outcome.why}\n{outcome.last_words[-800:]}", flush=True
            )
        return outcome

    def _add(self, entrant: Entrant, metric: str, value: float, unit: str) -> None:
        self.seen[entrant.name].numbers.setdefault(f"{metric}|{unit}", []).append(value)

    def _say(self, entrant: Entrant, metric: str, words: str) -> None:
        self.seen[entrant.name].words[metric] = words

    def _rounds(
        self,
        repeats: int,
        measure: Callable[[Entrant], None],
        entrants: Sequence[Entrant],
        part: str,
    ) -> None:
        """Each once a round, each first in its turn."""
        for number in range(repeats):
            turn = number % len(entrants) if entrants else 0
            begun = time.monotonic()
            for entrant in [*entrants[turn:], *entrants[:turn]]:
                try:
                    measure(entrant)
                except NotPrepared as error:
                    print(f"# {entrant.name}: {error}", flush=True)
                    self._say(entrant, part, str(error).partition("\n")[0])
            print(
                f"# {part}, round {number + 1} of {repeats}: {time.monotonic() - begun:.0f} s",
                flush=True,
            )

    # The parts

    def drain(self, repeats: int) -> None:
        """First batch, rate, CPU time, memory, exit. What comes first, with nothing cached, is a number of its own."""
        cold = bool(self._sizes.more)

        def measure(entrant: Entrant) -> None:
            tokens = entrant.group == PREPARED or "copy" in entrant.variant
            copies = (
                1 if entrant.slow else self._sizes.token_copies if tokens else self._sizes.copies
            )
            case = self._case(entrant, copies, passes=self._sizes.passes if tokens else 1)
            options = [
                "--after",
                str(self._sizes.slow_settled if entrant.slow else self._sizes.settled),
            ]
            options += ["--batches", str(self._sizes.slow_batches)] if entrant.slow else []
            outcome = self._run(entrant, "drain", case, *options)
            if outcome.what != "done" or outcome.first_s is None or not outcome.told["tokens"]:
                self._say(entrant, "drain", outcome.why)
                return
            if cold:
                self._add(entrant, "first batch, local, nothing cached", outcome.first_s, "s")
                return
            self._add(entrant, "first batch, local", outcome.first_s, "s")
            millions = outcome.told["tokens"] / MILLION
            self._add(entrant, "rate", millions / outcome.told["seconds"], "M tokens/s")
            self._add(entrant, "CPU", outcome.cpu_s / millions, "s/M tokens")
            self._add(entrant, "peak RSS", outcome.peak_bytes / MILLION, "MB")
            if outcome.exit_s is None:
                self._say(entrant, "exit", "had to be killed")
            else:
                self._add(entrant, "exit", outcome.exit_s, "s")

        entrants = [each for each in self.entrants if not each.paced]
        if cold:
            self._rounds(1, measure, entrants, "drain")
            cold = False
        self._rounds(repeats, measure, entrants, "drain")
        self._rounds(
            self._sizes.more, measure, [each for each in entrants if not each.slow], "drain"
        )

    def pace(self, repeats: int) -> None:
        """`next()` and data wait beside a consumer that waits. Those that take seconds for a batch are asked once."""

        def measure(entrant: Entrant) -> None:
            for pause_s, steps in self._sizes.paced.items():
                tokens = entrant.group == PREPARED
                case = self._case(
                    entrant,
                    1 if entrant.slow else self._sizes.token_copies,
                    passes=self._sizes.passes if tokens else 1,
                )
                outcome = self._run(
                    entrant, "pace", case, "--batches", str(steps), "--pause-s", str(pause_s)
                )
                if outcome.what != "done":
                    self._say(entrant, "pace", outcome.why)
                    continue
                fetches = outcome.told["fetches"]
                name = f"{1e3 * pause_s:.0f} ms steps"
                self._add(
                    entrant, f"{name}, data wait", 100 * sum(fetches) / outcome.told["seconds"], "%"
                )
                for share in (0.5, 0.99):
                    self._add(
                        entrant,
                        f"{name}, next() p{100 * share:.0f}",
                        1e3 * percentile(fetches, share),
                        "ms",
                    )

        entrants = [each for each in self.entrants if each.group != LIMIT or each.paced]
        self._rounds(1, measure, entrants, "pace")
        self._rounds(repeats - 1, measure, [each for each in entrants if not each.slow], "pace")

    def resume(self, repeats: int) -> None:
        """At 80 % of the corpus, twice in a row."""
        whole = self._whole()

        def measure(entrant: Entrant) -> None:
            at = int(SHARE * whole)
            with tempfile.TemporaryDirectory(prefix="penstock-peers-") as kept:
                first, second = f"{kept}/first", f"{kept}/second"
                case = self._case(entrant, 1, shuffle=True)
                steps = ("--batches", str(at + 2 * AFTER), "--save-at", str(at), "--save-to", first)
                through = self._run(entrant, "follow", case, *steps)
                if through.what == "not offered" and "shuffle" in through.why:
                    case = self._case(entrant, 1, shuffle=False)
                    through = self._run(entrant, "follow", case, *steps)
                if through.what != "done":
                    self._say(entrant, "resume", through.why)
                    return
                expected = through.told["digests"][at:]
                case = self._case(entrant, 1, shuffle=case.shuffle, state=first)
                once = self._run(
                    entrant,
                    "follow",
                    case,
                    "--batches",
                    str(AFTER),
                    "--save-at",
                    str(AFTER),
                    "--save-to",
                    second,
                )
                if once.what != "done" or once.first_s is None:
                    self._say(entrant, "resume", once.why or "no batch")
                    return
                self._add(entrant, "first batch of a resume at 80 %", once.first_s, "s")
                self._say(entrant, "resume, once", same(expected[:AFTER], once.told["digests"]))
                case = self._case(entrant, 1, shuffle=case.shuffle, state=second)
                twice = self._run(entrant, "follow", case, "--batches", str(AFTER))
                told = (
                    same(expected[AFTER : 2 * AFTER], twice.told["digests"])
                    if twice.what == "done"
                    else twice.why
                )
                self._say(entrant, "resume, twice", told)
                if not entrant.workers:
                    return
                case = self._case(entrant, 1, shuffle=case.shuffle, state=first, workers=1)
                fewer = self._run(entrant, "follow", case, "--batches", str(AFTER))
                told = (
                    same(expected[:AFTER], fewer.told["digests"])
                    if fewer.what == "done"
                    else fewer.why
                )
                self._say(entrant, "resume, one worker instead of two", told)

        self._rounds(
            repeats, measure, [each for each in self.entrants if each.group != LIMIT], "resume"
        )

    def _whole(self) -> int:
        """Batches of one copy of the corpus, by the file of ids."""
        ours = next(each for each in self.entrants if each.module == "ours" and each.prepares)
        file = Path(self._case(ours, 1).prepared) / "tokens.bin"
        return (file.stat().st_size // 2 - 1) // TOKENS - 1

    def workers(self) -> None:
        """Is the stream the same for one worker and two?"""

        def measure(entrant: Entrant) -> None:
            digests: list[list[str]] = []
            for workers in (1, 2):
                for shuffle in (True, False):
                    case = self._case(entrant, 1, workers=workers, shuffle=shuffle)
                    outcome = self._run(
                        entrant, "follow", case, "--batches", str(self._sizes.followed)
                    )
                    if outcome.what != "not offered":
                        break
                if outcome.what != "done":
                    self._say(entrant, "one worker, two", outcome.why)
                    return
                digests.append(outcome.told["digests"])
            self._say(entrant, "one worker, two", same(*digests))

        self._rounds(
            1,
            measure,
            [each for each in self.entrants if each.workers and each.group != LIMIT],
            "workers",
        )

    def far(self, repeats: int) -> None:
        """First batch from a Hub, nothing cached."""
        entrants = [entrant for entrant in self.entrants if entrant.far]
        with self._hub() as environment:

            def measure(entrant: Entrant) -> None:
                case = self._case(entrant, 1, source=f"hf://datasets/{REPOSITORY}")
                outcome = self._run(
                    entrant, "drain", case, "--batches", "2", environment=environment, scratch=None
                )
                if outcome.first_s is None:
                    self._say(entrant, "first batch, Hub", outcome.why)
                else:
                    self._add(entrant, "first batch, Hub", outcome.first_s, "s")

            self._rounds(repeats, measure, entrants, "far")

    def stall(self) -> None:
        """A Hub whose bodies stop half-way: one of them, or from then on all. What is said, and when?"""
        from penstock.testing import Fault, HubServer

        entrants = [
            each
            for each in self.entrants
            if each.far and each.group == DOCUMENTED and not each.variant
        ]
        file = next(self._corpus.hosted("zstd", 250).iterdir())
        with HubServer(latency_s=self._sizes.latency_ms / 1e3) as hub:
            hub.add(REPOSITORY, {f"data/{number:03}.parquet": file for number in range(3)})

            def measure(entrant: Entrant) -> None:
                for name, times in (("one answer stalls", 1), ("all answers stall", None)):
                    hub.clear_faults()
                    hub.fault(
                        Fault("stall", path="*.parquet", port="cdn", times=times, after=50_000)
                    )
                    case = self._case(entrant, 1, source=f"hf://datasets/{REPOSITORY}")
                    outcome = self._run(
                        entrant, "drain", case, "--batches", "100", environment={"HF_ENDPOINT": hub.endpoint},
                        scratch=None, deadline_s=self._sizes.stall_s,
                    )  # fmt: skip
                    told = "it went on" if outcome.what == "done" else outcome.why
                    after = "" if outcome.what == "silence" else f" after {outcome.after_s:.0f} s"
                    self._say(entrant, name, told + after)

            self._rounds(1, measure, entrants, "stall")

    @contextlib.contextmanager
    def _hub(self) -> Iterator[dict[str, str]]:
        network = (
            "--latency-ms",
            str(self._sizes.latency_ms),
            "--bandwidth-mb",
            str(self._sizes.bandwidth_mb),
        )
        with Hub(self._corpus.hosted("zstd", 250), self._sizes.files, *network) as hub:
            yield {"HF_ENDPOINT": hub.endpoint}

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


def same(expected: Sequence[str], given: Sequence[str]) -> str:
    """In words."""
    if list(expected) == list(given):
        return "identical"
    agree = next(
        (i for i, (a, b) in enumerate(zip(expected, given, strict=False)) if a != b),
        min(len(expected), len(given)),
    )
    return f"differs from batch {agree + 1} on" if agree < len(expected) else "identical"

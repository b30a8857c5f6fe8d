"""Charge a wait to the stages that caused it, and give one-line advice.

Trace a wait backwards: from `next()` to the producer, from the producer to the task it waited for,
and from a queued task to whatever kept its worker busy. Time in which a thread had no core is
charged to the stages that used the cores. The charges add up to the wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.watch import percent
from penstock.watch.stage_timer import (
    CHARGED,
    COMPUTED,
    IDLE,
    IMPORT,
    OUT,
    RANKS,
    STAGES,
    WAIT,
    Segment,
    TaskTimeline,
    ThreadTimeline,
)

Owner = ThreadTimeline | None
STARVED_S = 100e-6
"""A shorter wait for a core is charged to the stage that waited."""


def band(data_wait: float) -> str:
    """Return the name of the band for data wait as a share of wall time."""
    limits = ((0.01, "excellent"), (0.05, "good"), (0.2, "fair"))
    return next((name for limit, name in limits if data_wait < limit), "poor")


class Charges:
    """Seconds by stage, with the slowest file or chunk of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._longest: dict[str, tuple[float, Any]] = {}

    def add(self, stage: str, seconds: float, what: Any = None) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        if what is not None and seconds > self._longest.get(stage, (0.0, None))[0]:
            self._longest[stage] = (seconds, what)

    def worst(self) -> tuple[str, str]:
        """Return the stage with the largest charge, and its slowest file or chunk."""
        stage = max(self.seconds, key=self.seconds.__getitem__, default="batch")
        what = self._longest.get(stage, (0.0, ""))[1]
        return stage, str(what)[:500]


def charge(
    timeline: ThreadTimeline,
    begin: float,
    end: float,
    *,
    default: str = "batch",
    timelines: Sequence[ThreadTimeline] = (),
    cores: int = 1,
) -> Charges:
    """Charge the time from `begin` to `end` to stages, from the timeline of a thread.

    timelines: those of all threads that share `cores`. default: the stage for unrecorded time.
    """
    charger = _Charger(begin, timelines, cores)
    charger.follow(timeline.since(begin), timeline, begin, end, default)
    return charger.charges


class _Charger:
    """Charges one wait."""

    def __init__(self, begin: float, timelines: Sequence[ThreadTimeline], cores: int) -> None:
        self.charges = Charges()
        self._begin, self._cores = begin, cores
        self._timelines = timelines if cores < len(timelines) else ()
        self._all: list[tuple[ThreadTimeline, list[Segment]]] | None = None

    def follow(self, done: Iterable[Segment], own: Owner, lo: float, hi: float, last: str) -> None:
        """Charge the segments of a thread. Time between stages counts as the stage `last`."""
        for segment in done:
            stage, what = segment.stage, segment.what
            if segment.end <= lo:
                last = stage if stage in STAGES else last
                continue
            if segment.begin >= hi:
                break
            begin, end = max(segment.begin, lo), min(segment.end, hi)
            if stage in STAGES:
                last, begin = stage, lo  # waking up counts as the stage that follows
            elif begin > lo:
                self._add(last, own, lo, begin)
            if stage == WAIT and isinstance(what, TaskTimeline):
                self._task(what, begin, end, last)
            elif stage == WAIT and isinstance(what, ThreadTimeline):
                self.follow(what.since(begin), what, begin, end, last)
            elif stage in COMPUTED:
                self._add(stage, own, begin, end, _cpu_within(segment, begin, end), what)
            elif stage in CHARGED:
                self.charges.add(stage, end - begin, what)
            else:  # no room or no task while the consumer waits: a batch is being handed over
                self._add("batch" if stage == OUT else last, own, begin, end)
            lo = end
        if lo < hi:
            self._add(last, own, lo, hi)

    def _task(self, task: TaskTimeline, lo: float, hi: float, last: str) -> None:
        """Charge a wait for a task."""
        done = [s for s in task.segments() if s.stage not in (IDLE, OUT)]
        own = next((s.stage for s in done if s.stage in STAGES), last)
        begun = hi if task.begun is None else min(task.begun, hi)
        if task.after is not None and lo < begun:  # it needs the result of another task
            ended = hi if task.after.ended is None else task.after.ended
            middle = max(lo, min(ended, begun))
            self._task(task.after, lo, middle, last)
            lo = middle
        if lo < begun:  # its worker was busy with other tasks
            before = [s for s in _before(task) if s.stage != IDLE]
            first = next((s.stage for s in before if s.stage in STAGES), own)
            self.follow(before, task.thread, lo, begun, first)
            lo = begun
        if lo < hi:
            self.follow(done, task.thread, lo, hi, own)

    def _add(
        self, stage: str, own: Owner, lo: float, hi: float, used: float = 0.0, what: Any = None
    ) -> None:
        """Charge time in which a thread was runnable and used `used` seconds of CPU."""
        starved = hi - lo - used
        had = self._cpu_of_others(own, lo, hi) if starved >= STARVED_S and self._timelines else {}
        total = sum(had.values())
        starved = min(starved, total - (self._cores - 1) * (hi - lo))
        if total and starved > 0:  # no core was free
            for other, seconds in had.items():
                self.charges.add(other, starved * seconds / total)
        else:
            starved = 0.0
        self.charges.add(stage, hi - lo - starved, what)

    def _cpu_of_others(self, own: Owner, lo: float, hi: float) -> dict[str, float]:
        """Return the CPU seconds of other threads, by stage."""
        if self._all is None:
            self._all = [(timeline, timeline.since(self._begin)) for timeline in self._timelines]
        had: dict[str, float] = {}
        for timeline, segments in self._all:
            for s in segments if timeline is not own else ():
                if s.begin < hi and s.end > lo and s.stage in COMPUTED:
                    used = _cpu_within(s, max(s.begin, lo), min(s.end, hi))
                    had[s.stage] = had.get(s.stage, 0.0) + used
        return had


def _cpu_within(segment: Segment, lo: float, hi: float) -> float:
    length = segment.end - segment.begin
    return segment.cpu * (hi - lo) / length if length > 0 else 0.0


def _before(task: TaskTimeline) -> list[Segment]:
    """Return the segments of the worker before a task."""
    if task.thread is None or task.begun is None:
        return []
    return [s for s in list(task.thread.recent) if s.end <= task.begun]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The facts that a verdict depends on, apart from the waits."""

    n_workers: int = 0
    cores: int = 1
    workers: str = "thread"
    remote: bool = False
    fetches: int = 0
    fetch_p95_ms: float = 0.0
    retries: int = 0
    link_bound: bool = False
    """True if the network link is full, so that more parallel fetches would not be faster."""
    tight: bool = False
    """True if `memory_limit` bounds read-ahead."""
    cached: bool = False
    device: bool = False
    device_wait: float | None = None
    """The share of time that the device itself waited, if measured."""
    text: bool = True
    """True for text, whose tokens can be cached."""
    python: bool = False
    """True if workers run Python code of the user."""


class Verdict(NamedTuple):
    """The cause of a run's waits, in one line."""

    data_wait: float
    """The share of wall time spent in `next`."""
    shares: Mapping[str, float]
    """The same by stage, adding up to `data_wait`."""
    line: str
    advice: str


def judge(wait_s: float, wall_s: float, by_stage: Mapping[str, float], known: Known) -> Verdict:
    """Return the verdict on a number of steps."""
    data_wait = wait_s / wall_s if wall_s > 0 else 0.0
    total = sum(by_stage.values())
    shares = {stage: s * data_wait / total for stage, s in by_stage.items() if total > 0}
    bound = " (upper bound)" if known.device else ""
    if known.device_wait is not None:
        bound = f" (the device itself waited {percent(100 * known.device_wait)})"
    if data_wait < 0.05 or not shares:
        line = f"data wait {100 * data_wait:.2g} %: {band(data_wait)}{bound}"
        return Verdict(data_wait, shares, line, "")
    ranked = sorted(shares, key=shares.__getitem__, reverse=True)
    named = [s for s in ranked if s == ranked[0] or shares[s] >= 0.1 * data_wait]
    parts = ", ".join(f"{s} {100 * shares[s]:.0f} %{_detail(s, known)}" for s in named)
    advice = advise(ranked[0], known)
    line = f"input-bound {100 * data_wait:.0f} %{bound}: {parts}: {advice}"
    return Verdict(data_wait, shares, line, advice)


def _detail(stage: str, known: Known) -> str:
    if stage != "fetch" or not known.remote:
        return ""
    retries = f", {known.retries} retries" if known.retries else ""
    return f" (p95 {known.fetch_p95_ms:.0f} ms{retries})"


def advise(stage: str, known: Known) -> str:
    """Return advice for a run that waits for a stage."""
    if stage == RANKS:
        return "another rank is late: see its own verdict"
    if stage == IMPORT:
        return "import torch before the first batch"
    if stage == "copy":
        return "use a faster device_preprocess"
    if known.n_workers == 0:
        return "prepare batches in the background: n_workers 0 → 1, or leave it out"
    if stage in ("pack", "batch"):
        return "one thread packs and batches: larger batches make it cheaper"
    if known.tight:
        return "raise memory_limit, which holds read-ahead back"
    if stage == "fetch" and not known.python:
        if known.link_bound:
            return "the link is full: prepare the corpus beforehand (`penstock prepare`), or read from nearer by"
        if known.remote:
            more = f"raise RemoteOptions(fetches={known.fetches} → {2 * max(1, known.fetches)})"
            return f"{more}, or prepare the corpus (`penstock prepare`)"
        keep = ", or keep tokens: cache=True" if known.text and not known.cached else ""
        return f"read from a faster disk{keep}"
    if known.n_workers < known.cores:
        return f"raise n_workers {known.n_workers} → {known.n_workers + 1}"
    if known.python and known.workers == "thread":
        return 'your Python code holds the GIL: workers="process"'
    busy = "the one core is busy" if known.cores == 1 else f"all {known.cores} cores are busy"
    if known.cached or known.python or not known.text:
        return f"{busy}: give this rank more"
    return f"{busy}: keep tokens (cache=True, `penstock prepare`), or give this rank more"

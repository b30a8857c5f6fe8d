"""Whose fault a wait was, and what to do about it.

In:    the segments of the threads (see `stage_timer`), and what is known of fetches and settings.
Out:   the seconds of a wait by stage, which add up to it; a verdict in one line.
Where: the trainer's thread, after a batch that was waited for.
State: none.

A wait is followed backwards: the trainer waits for the producer; what the producer did meanwhile is to blame,
and where that waited for a chunk, what was done for that chunk is; while the chunk waited for a worker, what
that worker did instead is. A thread that could have gone on and had no core is charged to those who had them.
So a stage is charged only for time in which it was busy and somebody waited for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.watch.stage_timer import (
    COMPUTED,
    IDLE,
    OUT,
    RANKS,
    STAGES,
    WAIT,
    Segment,
    TaskTimeline,
    ThreadTimeline,
)

BANDS = ((0.01, "excellent"), (0.05, "good"), (0.2, "fair"), (float("inf"), "poor"))
"""Below which share of the time spent waiting for data a run is called what."""
STARVED_S = 100e-6
"""A thread that waited for a core for less than that is not worth the question who had it."""
DEEPEST = 16
"""Waits for waits that are followed. There are four in the longest chain that a loader makes."""


def band(data_wait: float) -> str:
    """Data wait, as a share of wall time, in a word."""
    return next(name for limit, name in BANDS if data_wait < limit or limit == BANDS[-1][0])


class Charges:
    """Seconds by stage, and for each stage what it was busy with for the longest time."""

    __slots__ = ("_longest", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._longest: dict[str, tuple[float, Any]] = {}

    def add(self, stage: str, seconds: float, what: Any = None) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        if what is not None and seconds > self._longest.get(stage, (0.0, None))[0]:
            self._longest[stage] = (seconds, what)

    def worst(self) -> tuple[str, Any]:
        """The stage that took longest, and with what."""
        stage = max(self.seconds, key=lambda name: self.seconds[name], default="batch")
        return stage, self._longest.get(stage, (0.0, None))[1]


def charge(
    track: ThreadTimeline,
    begin: float,
    end: float,
    *,
    default: str = "batch",
    timelines: Sequence[ThreadTimeline] = (),
    cores: int = 1,
) -> Charges:
    """Charge the time from `begin` to `end` to stages, by what a thread did then. All of it is charged.

    `timelines` are those of all threads, which share so many `cores`: a thread that waits for one of these is
    waiting for whoever has them.
    """
    scene = _Scene(begin, timelines, cores)
    _charge(track.since(begin), track, begin, end, default, scene, 0)
    return scene.charges


class _Scene:
    """What is looked at while one wait is charged."""

    def __init__(self, begin: float, timelines: Sequence[ThreadTimeline], cores: int) -> None:
        self.charges = Charges()
        self._cores = cores
        self._timelines = timelines if cores < len(timelines) else ()
        self._begin = begin
        self._busy: list[tuple[ThreadTimeline, list[Segment]]] | None = None

    def starved(self, own: ThreadTimeline | None, lo: float, hi: float, cpu: float) -> float:
        """Charge what of this time a thread waited for a core to those who had them. Gives how much that was."""
        idle = hi - lo - cpu
        if idle < STARVED_S or not self._timelines:
            return 0.0
        had: dict[str, float] = {}
        for track, segments in self._others():
            if track is own:
                continue
            for s in segments:
                length = s.end - s.begin
                if s.begin < hi and s.end > lo and length > 0 and s.stage in STAGES:
                    used = s.cpu * (min(s.end, hi) - max(s.begin, lo)) / length
                    had[s.stage] = had.get(s.stage, 0.0) + used
        total = sum(had.values())
        missing = min(idle, total - (self._cores - 1) * (hi - lo))
        if missing <= 0:
            return 0.0  # there was a core to be had: it waited for something else
        for stage, used in had.items():
            self.charges.add(stage, missing * used / total)
        return missing

    def _others(self) -> list[tuple[ThreadTimeline, list[Segment]]]:
        if self._busy is None:
            self._busy = [(track, track.since(self._begin)) for track in self._timelines]
        return self._busy


def _charge(
    segments: Iterable[Segment],
    own: ThreadTimeline | None,
    begin: float,
    end: float,
    default: str,
    scene: _Scene,
    depth: int,
) -> None:
    at, last = begin, default
    for segment in segments:
        if segment.end <= at:
            if segment.stage in STAGES:
                last = segment.stage
            continue
        if segment.begin >= end:
            break
        lo, hi = max(segment.begin, at), min(segment.end, end)
        # What happened in between, a thread waking up for instance, belongs to what came of it.
        lo = at if segment.stage in STAGES else lo
        if lo > at:
            _hand_over(own, at, lo, last, scene)
        last = _one(segment, own, lo, hi, last, scene, depth)
        at = hi
    if at < end:
        _hand_over(own, at, end, last, scene)


def _hand_over(own: ThreadTimeline | None, lo: float, hi: float, stage: str, scene: _Scene) -> None:
    """Time in which a thread had nothing to wait for, and did not say that it did anything: it had to wake up."""
    scene.charges.add(stage, hi - lo - scene.starved(own, lo, hi, 0.0))


def _one(
    segment: Segment,
    own: ThreadTimeline | None,
    lo: float,
    hi: float,
    last: str,
    scene: _Scene,
    depth: int,
) -> str:
    """Charge one segment. Gives the stage to which what follows it belongs, unless it says otherwise."""
    stage, what = segment.stage, segment.what
    if stage == WAIT and depth < DEEPEST:
        if isinstance(what, TaskTimeline):
            _follow(what, lo, hi, last, scene, depth + 1)
            return last
        if isinstance(what, ThreadTimeline):
            _charge(what.since(lo), what, lo, hi, last, scene, depth + 1)
            return last
    if stage in COMPUTED:
        length = segment.end - segment.begin
        cpu = segment.cpu * (hi - lo) / length if length > 0 else 0.0
        scene.charges.add(stage, hi - lo - scene.starved(own, lo, hi, cpu), what)
        return stage
    if stage in STAGES or stage == RANKS:
        scene.charges.add(stage, hi - lo, what)
        return stage if stage in STAGES else last
    # No room, or nothing to do, while somebody waits: what was made is there, and whoever waits is waking up.
    _hand_over(own, lo, hi, "batch" if stage == OUT else last, scene)
    return last


def _follow(
    trail: TaskTimeline, lo: float, hi: float, last: str, scene: _Scene, depth: int
) -> None:
    """Charge a wait for a piece of work."""
    done = trail.segments()
    own = next((s.stage for s in done if s.stage in STAGES), last)
    begun = trail.begun if trail.begun is not None else hi
    if trail.after is not None and lo < begun:  # it waited for the task before it
        ended = trail.after.ended if trail.after.ended is not None else hi
        middle = max(lo, min(ended, begun, hi))
        _follow(trail.after, lo, middle, last, scene, depth + 1)
        lo = middle
    if lo < min(begun, hi):  # it waited for a worker, which was busy with something else
        middle = min(begun, hi)
        before = [s for s in trail.before or _busy(trail) if s.stage != IDLE]
        first = next((s.stage for s in before if s.stage in STAGES), own)
        _charge(before, trail.thread, lo, middle, first, scene, depth)
        lo = middle
    if lo < hi:
        _charge(
            [s for s in done if s.stage not in (IDLE, OUT)], trail.thread, lo, hi, own, scene, depth
        )


def _busy(trail: TaskTimeline) -> Sequence[Segment]:
    """What the worker that took a piece of work did before, once that is no longer kept with it."""
    track, begun = trail.thread, trail.begun
    if track is None or begun is None:
        return ()
    return [s for s in list(track.recent) if s.end <= begun]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a verdict takes into account besides the waits."""

    n_workers: int = 0
    cores: int = 1
    workers: str = "thread"
    remote: bool = False
    fetches: int = 0
    fetch_p95_ms: float = 0.0
    retries: int = 0
    link_bound: bool = False
    """Whether more fetches at once would not bring more: they share a link that is full."""
    tight: bool = False
    """Whether read-ahead is held back by `memory_limit`."""
    cached: bool = False
    device: bool = False
    device_wait: float | None = None
    """The share of time that the device itself waited, where that could be measured."""
    text: bool = True
    """Whether it is text that is read, whose tokens could be kept."""
    python: bool = False
    """Whether workers run Python of the user's own."""


class Verdict(NamedTuple):
    """Why a run waits, in one line."""

    data_wait: float
    """The share of the wall time that was spent in `next`."""
    shares: Mapping[str, float]
    """By stage, of the wall time; they add up to `data_wait`."""
    line: str
    advice: str

    @property
    def band(self) -> str:
        return band(self.data_wait)

    def __str__(self) -> str:
        return self.line


def judge(wait_s: float, wall_s: float, by_stage: Mapping[str, float], known: Known) -> Verdict:
    """A verdict on some steps: what of their wall time was wait, and whose."""
    data_wait = wait_s / wall_s if wall_s > 0 else 0.0
    total = sum(by_stage.values())
    scale = data_wait / total if total > 0 else 0.0
    shares = {stage: seconds * scale for stage, seconds in by_stage.items()}
    name = band(data_wait)
    bound = "upper bound" if known.device and known.device_wait is None else ""
    if known.device_wait is not None:
        bound = f"the device itself waited {100 * known.device_wait:.1f} %"
    if name in ("excellent", "good"):
        line = f"data wait {100 * data_wait:.2g} %: {name}" + (f" ({bound})" if bound else "")
        return Verdict(data_wait, shares, line, "")
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    told = [(stage, share) for stage, share in ranked if share >= 0.1 * data_wait] or ranked[:1]
    parts = ", ".join(
        f"{stage} {100 * share:.0f} %{_detail(stage, known)}" for stage, share in told
    )
    advice = advise(told[0][0], known) if told else ""
    head = f"input-bound {100 * data_wait:.0f} %" + (f" ({bound})" if bound else "")
    return Verdict(data_wait, shares, f"{head}: {parts}: {advice}", advice)


def _detail(stage: str, known: Known) -> str:
    if stage != "fetch" or not known.remote:
        return ""
    retries = f", {known.retries} retries" if known.retries else ""
    return f" (p95 {known.fetch_p95_ms:.0f} ms{retries})"


def advise(stage: str, known: Known) -> str:
    """What to change when a stage holds a run back."""
    if known.tight and stage in ("fetch", "decode", "tokenize"):
        return "raise memory_limit, which holds read-ahead back"
    if known.n_workers == 0 and stage in ("fetch", "decode", "tokenize", "pack", "batch"):
        return "let it be done ahead: n_workers 0 → 1, or leave it out"
    if stage == "fetch" and known.python:
        stage = "decode"  # it is the user's own code that gets samples
    if stage == "fetch":
        if not known.remote:
            keep = ", or keep tokens: cache=True" if known.text and not known.cached else ""
            return f"read from a faster disk{keep}"
        if known.link_bound:
            return "the link is full: fill the cache beforehand (`penstock stage`), or read from nearer by"
        return f"raise RemoteOptions(fetches={known.fetches} → {2 * max(1, known.fetches)}), or fill the cache (`penstock stage`)"
    if stage in ("decode", "tokenize"):
        if known.n_workers < known.cores:
            return f"raise n_workers {known.n_workers} → {known.n_workers + 1}"
        if known.python and known.workers == "thread":
            return 'Python of your own holds the GIL: workers="process"'
        busy = "the one core is busy" if known.cores == 1 else f"all {known.cores} cores are busy"
        if known.cached or known.python or not known.text:
            return f"{busy}: give this rank more"
        return f"{busy}: keep tokens (cache=True, `penstock stage`), or give this rank more"
    if stage == "copy":
        return "use a faster device_preprocess"
    if stage == RANKS:
        return "another rank is late: see its own verdict"
    return "one thread packs and batches: larger batches make it cheaper"

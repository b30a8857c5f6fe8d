"""Whose fault a wait was, and what to do about it.

In:    the segments of the threads (see `spans`), and what is known of fetches and settings.
Out:   the seconds of a wait by stage, which add up to it; a verdict in one line.
Where: the trainer's thread, after a batch that was waited for.
State: none.

A wait is followed backwards: the trainer waits for the producer; what the producer did meanwhile is to blame,
and where that waited for a chunk, what was done for that chunk is; while the chunk waited for a worker, what
that worker did instead is. So a stage is charged only for time in which it was busy and somebody waited for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.watch.spans import IDLE, OUT, RANKS, STAGES, WAIT, Segment, Track, Trail

BANDS = ((0.01, "excellent"), (0.05, "good"), (0.2, "fair"), (float("inf"), "poor"))
"""Below which share of the time spent waiting for data a run is called what."""
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


def charge(segments: Sequence[Segment], begin: float, end: float, default: str = "batch") -> Charges:
    """Charge the time from `begin` to `end` to stages, by what a thread did then. All of it is charged."""
    charges = Charges()
    _charge(segments, begin, end, default, charges, 0)
    return charges


def _charge(segments: Iterable[Segment], begin: float, end: float, default: str, charges: Charges, depth: int) -> None:
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
            charges.add(last, lo - at)
        last = _one(segment, lo, hi, last, charges, depth)
        at = hi
    if at < end:
        charges.add(last, end - at)


def _one(segment: Segment, lo: float, hi: float, last: str, charges: Charges, depth: int) -> str:
    """Charge one segment. Gives the stage to which what follows it belongs, unless it says otherwise."""
    stage, what = segment.stage, segment.what
    if stage == WAIT and depth < DEEPEST:
        if isinstance(what, Trail):
            _follow(what, lo, hi, last, charges, depth + 1)
            return last
        if isinstance(what, Track):
            _charge(what.segments(), lo, hi, last, charges, depth + 1)
            return last
    if stage in STAGES or stage == RANKS:
        charges.add(stage, hi - lo, what)
        return stage if stage in STAGES else last
    charges.add(last, hi - lo)  # no room, or nothing to do: for a moment only, or nobody would wait
    return last


def _follow(trail: Trail, lo: float, hi: float, last: str, charges: Charges, depth: int) -> None:
    """Charge a wait for a piece of work."""
    done = trail.segments()
    own = next((s.stage for s in done if s.stage in STAGES), last)
    begun = trail.begun if trail.begun is not None else hi
    if lo < begun:  # it waited for a worker, which was busy with something else
        middle = min(begun, hi)
        before = [s for s in trail.before or _busy(trail) if s.stage != IDLE]
        _charge(before, lo, middle, next((s.stage for s in before if s.stage in STAGES), own), charges, depth)
        lo = middle
    if lo < hi:
        _charge([s for s in done if s.stage not in (IDLE, OUT)], lo, hi, own, charges, depth)


def _busy(trail: Trail) -> Sequence[Segment]:
    """What the worker that took a piece of work did before, once that is no longer kept with it."""
    track, begun = trail.track, trail.begun
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
    python: bool = False
    """Whether workers run Python of the user's own."""


@dataclass(frozen=True, slots=True)
class Verdict:
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
    parts = ", ".join(f"{stage} {100 * share:.0f} %{_detail(stage, known)}" for stage, share in told)
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
    if stage == "fetch":
        if not known.remote:
            return "read from a faster disk, or keep tokens: cache=True"
        if known.link_bound:
            return "the link is full: fill the cache beforehand (`penstock stage`), or read from nearer by"
        return (
            f"raise Remote(fetches={known.fetches} → {2 * max(1, known.fetches)}), or fill the cache (`penstock stage`)"
        )
    if stage in ("decode", "tokenize"):
        if known.n_workers < known.cores:
            return f"raise n_workers {known.n_workers} → {known.n_workers + 1}"
        if known.python and known.workers == "thread":
            return 'Python of your own holds the GIL: workers="process"'
        if known.cached or known.python:
            return f"all {known.cores} cores are busy: give this rank more"
        return f"all {known.cores} cores are busy: keep tokens (cache=True, `penstock stage`), or give this rank more"
    if stage == "copy":
        return "raise device_prefetch"
    if stage == RANKS:
        return "another rank is late: see its own verdict"
    return "one thread packs and batches: larger batches make it cheaper"

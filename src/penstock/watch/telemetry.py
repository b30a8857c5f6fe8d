"""Measure a loader while it feeds a run.

The trainer's thread records every call of `next` and every pause; the pipeline's threads record
their stages (see `stage_timer`). From these, telemetry derives the share of time spent waiting, by
the stage that caused it; rolling rates and percentiles; a one-line verdict; and events for a
heartbeat. A step costs a few microseconds, one that waits some tens more. Any thread may read.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, takewhile
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.config import available_cores
from penstock.errors import ConfigError, LoaderTimeout
from penstock.watch.attribution import Charges, Known, Verdict, band, charge, judge
from penstock.watch.heartbeat_reader import Event
from penstock.watch.stage_timer import IDLE, OUT, STAGES, WAIT, Clock, Segment, ThreadTimeline

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

log = logging.getLogger("penstock")

SHORT_S, SAMPLED = 1e-3, 16
"""Attribute only every 16th of consecutive short waits, because attribution costs as much as the
wait. The others are charged to the same stages."""
WINDOW = 512
"""The number of steps in rolling statistics."""
BAND_EVERY_S, BAND_STEPS = 5.0, 20
"""The interval of checks of the data-wait band, and the minimum number of steps."""
STALL_S, FIRST_STALL_S = 5.0, 30.0
"""A longer wait is a stall. The first batch has a higher limit."""
MAX_EVENTS = 256


@dataclass(slots=True)
class StageTimes:
    """The totals of a stage over all its threads."""

    busy_s: float = 0.0
    blocked_in_s: float = 0.0
    blocked_out_s: float = 0.0
    items: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Step:
    """A step: from the call of `next` for a batch to the call for the next batch.

    Also used for sums over steps.
    """

    begin: float = 0.0
    wait: float = 0.0
    wall: float = 0.0
    paused: float = 0.0
    """Seconds of pauses, excluded from `wall`."""
    tokens: int = 0
    done: bool = False
    """True once the batch was returned."""
    charges: dict[str, float] = field(default_factory=dict)
    """The wait by stage."""

    def add_call(self, wait: float, tokens: int, charges: Mapping[str, float]) -> None:
        """Add a call of `next`."""
        self.wait += wait
        self.tokens += tokens
        own = self.charges
        for stage, seconds in charges.items():
            own[stage] = own.get(stage, 0.0) + seconds

    def wall_at(self, now: float) -> float:
        """Return the duration of the step until `now`, without pauses."""
        return max(self.wait, now - self.begin - self.paused)


NO_STEP = Step()


class StepTimer:
    """Accumulates steps and pauses. Written by the trainer's thread only."""

    def __init__(self) -> None:
        self.tokens_total = 0
        """Tokens of all streams of the loader so far."""
        self.reset()

    def reset(self) -> None:
        """Start another stream."""
        self.window: deque[Step] = deque(maxlen=WINDOW)
        """The last finished steps, excluding the first step of the stream."""
        self.total, self.rolling, self._reported = Step(), Step(), Step()
        """Sums over all steps, over the window (without charges), and at the last report."""
        self.paused_s: dict[str, float] = {}
        self._unreported_pauses: dict[str, float] = {}
        self.steps = 0
        self.current: Step | None = None
        self.last_pause_s = 0.0

    def begin(self, now: float) -> Step | None:
        """Begin a call of `next`. Return the step that this ends, if any."""
        ended = self.current
        if ended is None:
            self._reported.begin = now
        elif not ended.done:
            return None  # the last call returned no batch, so this one continues its step
        else:
            ended.wall = ended.wall_at(now)
            self.total.wall += ended.wall
            self.last_pause_s = ended.paused
            if self.steps > 1:
                gone = self.window[0] if len(self.window) == WINDOW else NO_STEP
                self.rolling.wait += ended.wait - gone.wait
                self.rolling.wall += ended.wall - gone.wall
                self.rolling.tokens += ended.tokens - gone.tokens
                self.window.append(ended)
        self.current = Step(now)
        return ended

    def end(self, wait: float, charges: Mapping[str, float], tokens: int | None) -> None:
        """End a call of `next`, with a batch unless `tokens` is None."""
        assert self.current is not None
        self.current.add_call(wait, tokens or 0, charges)
        self.total.add_call(wait, tokens or 0, charges)
        if tokens is not None:
            self.current.done = True
            self.steps += 1
            self.tokens_total += tokens

    def pause(self, name: str, seconds: float) -> None:
        """Exclude a pause from the current step."""
        for pauses in (self.paused_s, self._unreported_pauses):
            pauses[name] = pauses.get(name, 0.0) + seconds
        self.total.paused += seconds
        if self.current is not None:
            self.current.paused += seconds

    def charges(self) -> dict[str, float]:
        """Return the wait in the window, by stage."""
        sums = Step()
        for step in list(self.window):
            sums.add_call(step.wait, step.tokens, step.charges)
        return sums.charges

    def percentiles_ms(self) -> dict[str, float]:
        """Return percentiles of the time in `next` over the window."""
        waits = sorted([step.wait for step in list(self.window)]) or [0.0]
        return {f"p{p}": 1e3 * waits[p * len(waits) // 100] for p in (50, 95, 99)}

    def report(self, now: float) -> dict[str, Any]:
        """Return the fields of the time since the last report, and rolling statistics."""
        fields: dict[str, Any] = {"tokens_total": self.tokens_total}
        rolling, current, total, last = self.rolling, self.current, self.total, self._reported
        if current is None:
            return fields
        self._reported = replace(total, begin=now, charges=dict(total.charges))
        since = Step(last.begin, total.wait - last.wait, paused=total.paused - last.paused)
        charges = {s: t - last.charges.get(s, 0.0) for s, t in total.charges.items()}
        fields["tokens"] = total.tokens - last.tokens
        fields["dt_fetch_s"] = fields["dt_fetch_last"] = round(since.wait, 6)
        fields["dt_step_s"] = round(since.wall_at(now), 6)
        fields["wait_by_stage"] = {stage: round(s, 6) for stage, s in charges.items() if s}
        if self._unreported_pauses:
            fields["paused"], self._unreported_pauses = self._unreported_pauses, {}
        if self.window:
            for name, value in self.percentiles_ms().items():
                fields[f"fetch_{name}_ms"] = round(value, 4)
        wall = rolling.wall + current.wall_at(now)
        fields["toks_per_s"] = round((rolling.tokens + current.tokens) / wall, 3)
        fields["data_wait_pct"] = round(100 * (rolling.wait + current.wait) / wall, 4)
        return fields


class StartupTiming:
    """Records the milestones between the start of the process and the first batch."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.parts: dict[str, float] = {}
        """Seconds by activity."""
        self._opened: tuple[float, float] | None = None

    def spent(self, name: str, begin: float, end: float) -> None:
        """Record an activity before the pipeline starts. Ignored after the first start."""
        if self._opened is None:
            self.marks[name] = end
            self.parts[name] = self.parts.get(name, 0.0) + end - begin
            if name == "open":
                self._opened = (begin, end)

    def ready(self, timelines: Iterable[ThreadTimeline], now: float) -> dict[str, Any]:
        """Return the fields of `loader_ready` when the first batch is ready."""
        first: dict[str, float] = {}
        for timeline in timelines:
            for s in list(timeline.recent):
                first[s.stage] = min(s.end, first.get(s.stage, s.end))
        ready = first.get("batch", now)
        begun, opened = self._opened or (ready, ready)
        dt = ready - begun + self.parts.get("list", 0.0)
        # The producer thread makes batches; without workers, the trainer's thread does.
        maker = min(timelines, key=lambda t: not t.name.startswith("penstock-producer"))
        self.parts |= charge(maker, opened, max(opened, ready), default="pack").seconds
        for stage in first.keys() & STAGES[:-1]:  # a stage may finish before anything waits for it
            self.parts.setdefault(stage, 0.0)
        marks = {"first_bytes": "fetch", "first_tokens": "tokenize"}
        self.marks |= {mark: first[stage] for mark, stage in marks.items() if stage in first}
        self.marks["first_batch"] = ready
        began = process_began() or min(self.marks.values())
        since = accumulate((round(at - began, 6) for at in self.marks.values()), max)
        return {
            "dt": round(dt, 6),
            "parts": {name: round(s, 6) for name, s in self.parts.items()},
            "reached": dict(zip(self.marks, since, strict=True)),
        }


class Telemetry:
    """Measures one loader. Every loader has one: `loader.telemetry`."""

    def __init__(self) -> None:
        self.stall_s = STALL_S
        """Report a wait of this many seconds as a stall."""
        self.clock = Clock()
        self.timer = StepTimer()
        self.startup = StartupTiming()
        self.first: dict[str, Any] = {}
        """The timing of the first batch, once it is ready."""
        self.known: Callable[[], Known] = Known
        self.gauges: Callable[[], dict[str, Any]] = dict
        """Returns queue depths and fetch times."""
        self.queue: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the depth and capacity of the queue."""
        self.device: Callable[[], float | None] | None = None
        """Returns the time that the device itself waited, or None if unknown."""
        self.owner: weakref.ref[Any] | None = None
        self._cores = 1
        self._past = {stage: StageTimes() for stage in STAGES}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._pauses = 0
        self._waiting: tuple[float, ThreadTimeline] | None = None
        self._short_waits = 0
        self._shares: dict[str, float] = {}
        """The stage shares of the last wait that was attributed."""
        self._stalled_at: float | None = None
        self.reset()

    def reset(self) -> None:
        """Reset the steps for another stream."""
        self.timer.reset()
        self._band, self._band_at = "", perf_counter()

    # From the loader, on the trainer's thread

    def next_begins(self, now: float) -> None:
        """Record that a call of `next` begins, and with it a step."""
        ended = self.timer.begin(now)
        timeline = self.clock.timeline()
        self._waiting = (now, timeline)
        if ended is not None:
            if timeline.log is not None:
                timeline.log.append((timeline.name, ended))
                timeline.log.append(("", Segment(now, now, "queue", self.queue()[0])))
            if now - self._band_at >= BAND_EVERY_S and len(self.timer.window) >= BAND_STEPS:
                self._band_at = now
                self._check_band()

    def next_ended(self, begun: float, now: float, tokens: int | None) -> None:
        """Record that a call of `next` ended, with a batch of `tokens` or None at the end."""
        self._waiting = None
        timeline, wait = self.clock.timeline(), now - begun
        charges = {"batch": wait}  # for a buffered batch, only the handover
        if timeline.recent and timeline.recent[-1].end > begun:
            self._short_waits = self._short_waits + 1 if wait < SHORT_S and self._shares else 0
            if self._short_waits % SAMPLED:
                charges = {stage: wait * share for stage, share in self._shares.items()}
            else:
                timelines = self.clock.timelines
                found = charge(timeline, begun, now, timelines=timelines, cores=self._cores)
                charges = found.seconds
                self._shares = {stage: s / wait for stage, s in charges.items()}
                self._check_stall(found, begun, wait)
        self.timer.end(wait, charges, tokens)
        if tokens is not None and not self.first:
            self.first = self.startup.ready(self.clock.timelines, now)
            self.event("loader_ready", **self.first)

    def next_failed(self, begun: float, now: float, error: BaseException) -> None:
        """Record that a call of `next` raised. A failure of the stream is an event."""
        self.next_ended(begun, now, None)
        if isinstance(error, LoaderTimeout) or not isinstance(error, Exception):
            return  # the caller can retry, or Ctrl-C
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in stage ")]
        # Such as "in stage fetch, decode, reading a.parquet".
        words = notes[0].removeprefix("in stage ").split(", ") if notes else []
        stages = list(takewhile(STAGES.__contains__, words))
        where = ", ".join(words[len(stages) :])[:500]
        fields = {"error": f"{type(error).__name__}: {error}"[:1000], "where": where}
        self.event("loader_error", **fields, stage=stages[-1] if stages else "")

    def opened(self, pipeline: Pipeline, begun: float) -> None:
        """Start measuring a pipeline, which was opened between `begun` and now."""
        self.startup.spent("open", begun, perf_counter())
        self.known, self.gauges, self.queue = pipeline.known, pipeline.gauges, pipeline.queue
        self._cores = available_cores()

    def closed(self) -> None:
        """Release a closed pipeline, keeping its measurements."""
        known = self.known()
        self.known, self.gauges, self.queue, self.device = lambda: known, dict, lambda: (0, 0), None
        _add_times(self._past, self.clock.remove_ended())

    def warmed(self, requested: int, filled: int, wait_ms: float) -> None:
        """Record a finished warmup."""
        fields = {"requested": requested, "filled": filled, "wait_ms": round(wait_ms, 3)}
        fields |= {"fetch_warmup_batches": filled, "fetch_warmup_wait_ms": round(wait_ms, 3)}
        self.event("loader_warmup", **fields)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Exclude a block, such as evaluation or a checkpoint, from step times."""
        self._pauses += 1
        begun = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - begun
            self._pauses -= 1
            if self._pauses == 0:  # nested pauses count once
                self.timer.pause(name, seconds)
                self.event("pause", name=name, seconds=round(seconds, 6))

    def _check_band(self) -> None:
        """Log the verdict if the band of data wait changed."""
        verdict, before = self.verdict(), self._band
        self._band = band(verdict.data_wait)
        if self._band != before and (verdict.advice or before):
            # A consumer without training waits all the time.
            warn = bool(verdict.advice) and verdict.data_wait < 0.95
            log.log(logging.WARNING if warn else logging.INFO, "%s", verdict.line)

    def _check_stall(self, found: Charges, begun: float, wait: float) -> None:
        """Report a long wait, once."""
        limit = self.stall_s if self.timer.steps else max(self.stall_s, FIRST_STALL_S)
        if wait < limit or self._stalled_at == begun:
            return
        self._stalled_at = begun
        stage, where = found.worst()
        text = f"waited {wait:.1f} s for data: {stage}" + (f", {where}" if where else "")
        log.warning("%s", text)
        self.event("stall", stage=stage, where=where, wait_s=round(wait, 3), verdict=text)

    # For any thread

    def event(self, msg: str, **fields: Any) -> None:
        """Record an event for the heartbeat. Keeps the latest events until `take_events`."""
        self._events.append((time.time(), time.monotonic(), msg, fields))
        if self.clock.log is not None:
            now = perf_counter()
            self.clock.log.append((threading.current_thread().name, Segment(now, now, msg, fields)))

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def verdict(self) -> Verdict:
        """Return the verdict on the waits of the last steps."""
        if not self.timer.window:
            return Verdict(0.0, {}, "not enough steps to say", "")
        known, rolling = self.known(), self.timer.rolling
        if self.device is not None:
            waited, all_s = self.device(), self.timer.total.wall
            share = waited / all_s if waited is not None and all_s > 0 else None
            known = replace(known, device=True, device_wait=share)
        return judge(rolling.wait, rolling.wall, self.timer.charges(), known)

    def data_wait(self) -> float:
        """Return the share of time spent in `next`, since the first call."""
        total, current = self.timer.total, self.timer.current
        return total.wait / (total.wall + current.wall_at(perf_counter())) if current else 0.0

    def stages(self) -> dict[str, StageTimes]:
        """Return the totals of each stage so far."""
        times = {stage: replace(past) for stage, past in self._past.items()}
        _add_times(times, list(self.clock.timelines))
        return times

    def waiting(self) -> dict[str, Any] | None:
        """Return the cause of the current wait of `next`, or None."""
        waiting, now = self._waiting, perf_counter()
        if waiting is None or now - waiting[0] < 0.1:
            return None
        begun, timeline = waiting
        # Only the last half second, because the cause may have changed.
        found = charge(timeline, max(begun, now - 0.5), now)
        self._check_stall(found, begun, now - begun)
        stage, where = found.worst()
        return {"stage": stage, "where": where, "for_s": round(now - begun, 3)}

    def blame(self, seconds: float) -> str:
        """Return the cause of the calling thread's wait in the last `seconds`."""
        now = perf_counter()
        stage, where = charge(self.clock.timeline(), now - seconds, now).worst()
        return f"waiting for {stage}" + (f", {where}" if where else "")

    def step_fields(self) -> dict[str, Any]:
        """Return the fields of a heartbeat's `progress` line, since the last call."""
        fields = self.timer.report(perf_counter())
        fields["queue_depth"], fields["queue_capacity"] = self.queue()
        if self.device is not None and (waited := self.device()) is not None:
            fields["device_wait_s"] = round(waited, 6)
        return fields

    def beat_fields(self) -> dict[str, Any]:
        """Return the fields of a heartbeat's `beat` line."""
        gauges = {name: value for name, value in self.gauges().items() if value is not None}
        fields = {
            "stages": {
                stage: {name: round(value, 6) for name, value in asdict(times).items()}
                for stage, times in self.stages().items()
            },
            "verdict": self.verdict().line,
            "queue_depth": self.queue()[0],
        }
        return fields | gauges | ({"waiting": waiting} if (waiting := self.waiting()) else {})

    def bind(self, owner: Any, listings: Iterable[tuple[float, float]]) -> None:
        """Attach to the loader `owner`. `listings`: the times of its file listings."""
        if self.owner is not None and self.owner() is not None:
            raise ConfigError("this telemetry belongs to another loader. Use one for each loader.")
        self.owner = weakref.ref(owner)
        began, imported = process_began(), vars(sys.modules["penstock"]).get("_imported")
        if imported is not None and began is not None:
            self.startup.spent("import", began, imported)
        for listed in listings:
            self.startup.spent("list", *listed)


_BLOCKED = {
    "penstock-fetch": ("fetch", "fetch"),
    "penstock-worker": ("decode", "tokenize"),
    "penstock-producer": ("pack", "batch"),
}
"""The stages to which a thread's waits for input and for output count, by thread name."""


def _add_times(times: dict[str, StageTimes], timelines: Iterable[ThreadTimeline]) -> None:
    """Add the times and counts of threads."""
    for timeline in timelines:
        seconds, (now, since, _) = dict(timeline.seconds), timeline.now
        if now:
            seconds[now] = seconds.get(now, 0.0) + max(0.0, perf_counter() - since)
        for stage, of in times.items():
            of.busy_s += seconds.get(stage, 0.0)
            of.items += timeline.items.get(stage, 0)
            of.bytes += timeline.bytes.get(stage, 0)
        first, last = _BLOCKED.get(timeline.name.rstrip("-0123456789"), ("copy", "copy"))
        times[first].blocked_in_s += seconds.get(WAIT, 0.0)
        times[last].blocked_out_s += seconds.get(OUT, 0.0) + seconds.get(IDLE, 0.0)


def process_began() -> float | None:
    """Return the start of this process on the clock of `perf_counter`, or None if unknown."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None  # not Linux
    return perf_counter() - age

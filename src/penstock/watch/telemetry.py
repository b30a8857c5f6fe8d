"""Telemetry: what a loader measures of itself while it feeds a run.

In:    every call of `next`, pauses that the user names, the tracks of all threads (see `stage_timer`).
Out:   time by stage, rolling percentiles and rates, a verdict in one line, events for a heartbeat.
Where: written by the trainer's thread, but for the tracks; read by any.
State: the last few hundred steps, sums since the beginning, events that nobody took yet.
Cost:  a few microseconds a step, some tens more for a step that waited.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

from penstock.config import available_cores
from penstock.errors import ConfigError, LoaderTimeout
from penstock.watch.attribution import Known, Verdict, band, charge, judge
from penstock.watch.consumer import Consumer
from penstock.watch.ledger import Ledger, process_began
from penstock.watch.memory import resident_bytes
from penstock.watch.stage_timer import (
    IDLE,
    OUT,
    STAGES,
    WAIT,
    Clock,
    NullClock,
    ThreadTimeline,
    role,
    stage_of,
)
from penstock.watch.window import StageTimes, Window

log = logging.getLogger("penstock")

LOOK_S = 5.0
"""How often the band is looked at."""
LOOK_STEPS = 20
"""Steps without which a band says nothing."""
BRIEF_S = 20e-6
"""A call of `next` that took less found its batch ready: it is not worth following."""
SHORT_S = 1e-3
SAMPLED = 8
"""Of waits shorter than that, one in so many is followed."""
STALL_S = 5.0
FIRST_STALL_S = 30.0
"""A first batch may take longer than later ones before it is called a stall."""
EVENTS = 256
STEP_S = 1e-3
"""A step that trains anything takes longer than this beside its wait."""

Event = tuple[float, float, str, dict[str, Any]]


class Observed(Protocol):
    """What is running, as far as it is measured from outside."""

    def known(self) -> Known: ...
    def gauges(self) -> dict[str, Any]: ...
    def queue(self) -> tuple[int, int]: ...


class Telemetry:
    """Measures one loader. Every loader has one: `loader.telemetry`."""

    def __init__(self, *, stall_s: float = STALL_S, on: bool = True) -> None:
        """`stall_s`: a wait of so long is an event of its own. `on=False` measures nothing but time in `next`."""
        if not isinstance(stall_s, int | float) or isinstance(stall_s, bool) or not stall_s > 0:
            raise ConfigError(f"stall_s={stall_s!r}: needs seconds, more than 0")
        self.on = on
        self.stall_s = float(stall_s)
        self.clock: Clock = Clock() if on else NullClock()
        self.known: Callable[[], Known] = Known
        self.gauges: Callable[[], dict[str, Any]] = dict
        """Queue depths, fetch times and device waits of whoever runs now."""
        self.queue: Callable[[], tuple[int, int]] = _no_queue
        """Batches that stand ready, and how many may."""
        self.device: Callable[[], float | None] | None = None
        """How long the device itself has waited, where there is one: None if it cannot tell."""
        self.ledger = Ledger()
        self.first: dict[str, Any] = {}
        """What the ledger says of the first batch, once it is there."""
        self.owner: weakref.ref[Any] | None = None
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._lost = 0
        self._lock = threading.Lock()
        self._waiting: tuple[float, ThreadTimeline] | None = None
        self._stalled: float | None = None
        self._rss: tuple[float, int] = (0.0, 0)
        self._pauses = self._short = 0
        self._shares: dict[str, float] = {}
        self.trainer = ""
        """The thread that last asked for a batch."""
        self.consumer = Consumer()
        """What the trainer did."""
        self.prefix = "loader_"
        self.cores = 1
        self.reset()

    def reset(self) -> None:
        """Forget what was measured: another stream begins."""
        self.consumer.reset()
        self._band = ""
        self._looked = perf_counter()

    @property
    def window(self) -> Window:
        """The last steps."""
        return self.consumer.window

    # From the loader, on the trainer's thread

    def entering(self, now: float) -> None:
        """A call of `next` begins, and with it a step."""
        counted = self.consumer.entering(now)
        if counted and now - self._looked >= LOOK_S and len(self.window) >= LOOK_STEPS:
            self._looked = now
            self._look()
        if self.on:
            track = self.clock.timeline()
            self._waiting, self.trainer = (now, track), track.name

    def took(self, begun: float, now: float, tokens: int | None, depth: int = 0) -> None:
        """It has ended, with so many tokens or None at the end of the stream."""
        self._spent(begun, now)
        if tokens is None:
            return
        self.consumer.took(tokens, depth)
        if self.on and self.ledger.parts is None:
            self._ready(now)

    def _spent(self, begun: float, now: float) -> None:
        """Charge the time of a call of `next`."""
        self._waiting = None
        wait, track = now - begun, self.clock.timeline()
        if (
            not self.on
            or wait < BRIEF_S
            or (not track.now[0] and (not track.recent or track.recent[-1].end <= begun))
        ):
            self.consumer.waited(
                wait, {"batch": wait}
            )  # it stood ready: what is left is the handing over
            return
        if wait < SHORT_S:
            # To follow each of many short waits would cost more than the waits: the others are like the one before.
            self._short += 1
            if self._short % SAMPLED and self._shares:
                self.consumer.waited(
                    wait, {stage: wait * share for stage, share in self._shares.items()}
                )
                return
        found = charge(track, begun, now, timelines=self.clock.timelines, cores=self.cores)
        self.consumer.waited(wait, found.seconds)
        if wait < SHORT_S:
            self._shares = {stage: seconds / wait for stage, seconds in found.seconds.items()}
        if wait >= self._stall_limit() and self._stalled != begun:
            self._stall(*found.worst(), wait)

    def follow(self, pipeline: Observed, begun: float) -> None:
        """A pipeline was opened, from `begun` until now: it is what is measured from here on."""
        self.ledger.spent("open", begun, perf_counter())
        self.known, self.gauges, self.queue = pipeline.known, pipeline.gauges, pipeline.queue
        self.cores = available_cores()

    def warmed(self, requested: int, filled: int, wait_ms: float) -> None:
        """A warmup has ended."""
        wait = round(wait_ms, 3)
        self.event(
            f"{self.prefix}warmup", requested=requested, filled=filled, wait_ms=wait,
            fetch_warmup_batches=filled, fetch_warmup_wait_ms=wait,
        )  # fmt: skip

    def left(self) -> None:
        """The pipeline was closed: what was known of it stays known, and nothing of it is kept alive."""
        known = self.known()
        self.known, self.gauges, self.device, self.queue = lambda: known, dict, None, _no_queue
        self.clock.fold()

    def failed(self, begun: float, now: float, error: BaseException) -> None:
        """A call of `next` ended without a batch. If the stream failed, everybody who watches should know."""
        self._spent(begun, now)
        if isinstance(error, LoaderTimeout) or not isinstance(error, Exception):
            return  # it will be asked again, or somebody pressed Ctrl-C
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in stage ")]
        stage, where = stage_of(notes[0].removeprefix("in stage ")) if notes else ("", "")
        text = f"{type(error).__name__}: {error}"
        self.event(f"{self.prefix}error", error=text[:1000], stage=stage, where=where[:500])

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Evaluation, a checkpoint: time that is kept apart from the run's."""
        self._pauses += 1
        begun = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - begun
            self._pauses -= 1
            if self._pauses == 0:  # one within another is counted once
                self.consumer.pause(name, seconds)
                self.event("pause", name=name, seconds=round(seconds, 6))

    def _look(self) -> None:
        verdict = self.verdict()
        if verdict.band != self._band:
            before, self._band = self._band, verdict.band
            worse = verdict.band in ("fair", "poor")
            # Whoever only reads, and trains nothing in between, waits all the time and knows it.
            own_s = (self.window.wall - self.window.wait) / max(1, len(self.window))
            trains = verdict.data_wait < 0.95 and own_s > STEP_S
            if worse or before:
                log.log(logging.WARNING if worse and trains else logging.INFO, "%s", verdict.line)

    def _stall_limit(self) -> float:
        return self.stall_s if self.consumer.steps else max(self.stall_s, FIRST_STALL_S)

    def _stall(self, stage: str, what: Any, wait: float) -> None:
        where = str(what)[:500] if what is not None else ""
        told = f"waited {wait:.1f} s for data: {stage}" + (f", {where}" if where else "")
        log.warning("%s", told)
        self.event("stall", stage=stage, where=where, wait_s=round(wait, 3), verdict=told)

    def _ready(self, now: float) -> None:
        self.first = self.ledger.close(self.clock.timelines, now)
        self.event(f"{self.prefix}ready", **self.first)

    # For everybody

    def event(self, msg: str, **fields: Any) -> None:
        """Something that a heartbeat should tell. Kept until somebody takes it, the latest of them at least."""
        with self._lock:
            if len(self._events) == EVENTS:
                self._lost += 1
            self._events.append((time.time(), time.monotonic(), msg, fields))

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            if self._lost:
                events[0][3]["events_lost"] = self._lost
                self._lost = 0
        return events

    def verdict(self) -> Verdict:
        """Why the last steps waited, in one line."""
        window, known = self.window, self.known()
        if not len(window):
            return Verdict(0.0, {}, "not enough steps to say", "")
        if not self.on:
            share = window.wait / window.wall if window.wall > 0 else 0.0
            return Verdict(
                share, {}, f"data wait {100 * share:.2g} %: {band(share)} (telemetry is off)", ""
            )
        if self.device is not None:
            waited, wall = self.device(), self.consumer.wall_s
            known = replace(
                known,
                device=True,
                device_wait=waited / wall if waited is not None and wall > 0 else None,
            )
        return judge(window.wait, window.wall, dict(window.by_stage), known)

    def stages(self) -> dict[str, StageTimes]:
        """What each stage did so far."""
        times = {stage: StageTimes() for stage in STAGES}
        for track in list(self.clock.timelines):
            seconds = dict(track.seconds)
            now, since, _ = track.now
            if now:
                seconds[now] = seconds.get(now, 0.0) + max(0.0, perf_counter() - since)
            for stage in STAGES:
                times[stage].busy_s += seconds.get(stage, 0.0)
                times[stage].items += track.items.get(stage, 0)
                times[stage].bytes += track.bytes.get(stage, 0)
            first, last = role(track)
            times[first].blocked_in_s += seconds.get(WAIT, 0.0)
            times[last].blocked_out_s += seconds.get(OUT, 0.0) + seconds.get(IDLE, 0.0)
        return times

    def waiting(self) -> dict[str, Any] | None:
        """What `next` waits for at this moment, if it does. For any thread."""
        waiting = self._waiting
        if waiting is None:
            return None
        begun, track = waiting
        now = perf_counter()
        if now - begun < 0.1:
            return None
        # The last moments say what it is now; what it was at first may be over.
        stage, what = charge(track, max(begun, now - 0.5), now).worst()
        where = str(what)[:500] if what is not None else ""
        if now - begun >= self._stall_limit() and self._stalled != begun:
            self._stalled = begun  # said while it lasts, and not again when it is over
            self._stall(stage, what, now - begun)
        return {"stage": stage, "where": where, "for_s": round(now - begun, 3)}

    def blame(self, seconds: float) -> str:
        """What this thread waited for in the last so many seconds: the stage, and the file where one is known."""
        now = perf_counter()
        stage, what = charge(self.clock.timeline(), now - seconds, now).worst()
        return f"waiting for {stage}" + (f", {str(what)[:500]}" if what is not None else "")

    # For a heartbeat

    def step_fields(self) -> dict[str, Any]:
        """What happened since it was last asked for: a step, of however many batches. Cheap: it is asked for at each."""
        fields = self.consumer.report(perf_counter())
        fields["queue_depth"], fields["queue_capacity"] = self.queue()
        if self.device is not None and (waited := self.device()) is not None:
            fields["device_wait_s"] = round(waited, 6)
        fields["rss_bytes"] = self._memory()
        return fields

    def beat_fields(self) -> dict[str, Any]:
        """What is known between steps, from any thread."""
        gauges = self.gauges()
        fields: dict[str, Any] = {
            "stages": {stage: times.as_dict() for stage, times in self.stages().items()},
            "verdict": self.verdict().line,
            "rss_bytes": self._memory(),
            **{name: value for name, value in gauges.items() if value is not None},
        }
        queues = gauges.get("queues", {})
        fields["queue_depth"] = queues.get("batches", {}).get("depth", 0)
        for name, queue in queues.items():
            share = queue["depth"] / max(1, queue["capacity"])
            queue["occupancy"] = round(
                self.consumer.occupancy(queue["capacity"]) if name == "batches" else share, 4
            )
        waiting = self.waiting()
        if waiting is not None:
            fields["waiting"] = waiting
        return fields

    def _memory(self) -> int:
        now = perf_counter()
        if now - self._rss[0] > 1.0:
            self._rss = (now, resident_bytes())
        return self._rss[1]


def attach(
    telemetry: Telemetry | bool | None, owner: Any, listings: Iterable[tuple[float, float]] = ()
) -> Telemetry:
    """The telemetry of a loader: the one that was given, or a new one. `listings`: when files were listed for it."""
    if telemetry is None or isinstance(telemetry, bool):
        telemetry = Telemetry(on=telemetry is not False)
    if not isinstance(telemetry, Telemetry):
        raise ConfigError(f"telemetry={telemetry!r}: must be a Telemetry(…)")
    if telemetry.owner is not None and telemetry.owner() is not None:
        raise ConfigError("this telemetry belongs to another loader. Give each loader its own.")
    telemetry.owner = weakref.ref(owner)
    began, imported = process_began(), vars(sys.modules["penstock"]).get("_imported")
    if imported is not None and began is not None:
        telemetry.ledger.spent("import", began, imported)
    for listed in listings:
        telemetry.ledger.spent("list", *listed)
    return telemetry


def _no_queue() -> tuple[int, int]:
    return 0, 0

"""Record what every thread does, as a trace that Perfetto and chrome://tracing open.

In:    the segments of all threads (see `stage_timer`), the steps, queues and events of a loader's telemetry.
Out:   Chrome trace JSON, on the axis of Unix time; merged with torch.profiler's where there is one.
Where: each thread appends its own segments. What else is recorded is looked up by whoever appends, so there is
       no thread for it, and nothing of the loader is wrapped.
State: the last `max_segments` segments, and as many steps, events and samples of the queues.
Cost:  none while nothing is recorded; else a microsecond or two a segment, and a look at the queues now and then.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.config import whole_number
from penstock.errors import ConfigError
from penstock.watch.stage_timer import IDLE, Segment
from penstock.watch.telemetry import Event, Telemetry
from penstock.watch.trace_draw import Drawing
from penstock.watch.trace_merge import merge, write
from penstock.watch.window import Step

T = TypeVar("T")

log = logging.getLogger("penstock")

MAX_SEGMENTS = 200_000
SAMPLE_S = 0.002
"""How often the queues are looked at, at the most."""
ONE_CLOCK = (
    time.get_clock_info("monotonic").implementation
    == time.get_clock_info("perf_counter").implementation
)

__all__ = ["Recorder", "merge"]


class Recorder:
    """`with Recorder(loader) as recorder:` records what a loader does, for `recorder.save("trace.json")`."""

    def __init__(self, of: Any, max_segments: int = MAX_SEGMENTS) -> None:
        """`of`: a loader, or its telemetry. `max_segments`: what is kept, the latest; 200 bytes of memory each, and 100 or more on disk."""
        telemetry = getattr(of, "telemetry", of)
        if not isinstance(telemetry, Telemetry):
            raise ConfigError(f"Recorder({type(of).__name__}): needs a loader, or its telemetry")
        if not telemetry.on:
            raise ConfigError(
                "this loader measures nothing, so there is nothing to record: its telemetry is off"
            )
        self._telemetry = telemetry
        self._most = whole_number("max_segments", max_segments, 1)
        self._log: Log | None = None
        self._axis = Axis()
        self._here = ""
        self._end: float | None = None

    def __enter__(self) -> Self:
        clock = self._telemetry.clock
        if clock.timeline().log is not None:
            raise ConfigError("this loader is being recorded already: end the other Recorder first")
        self._axis = Axis()
        self._log, self._end = Log(self._telemetry, self._most, self._axis.began), None
        self._here = self._log.label(threading.current_thread().name)
        self._log.look()
        clock.record(self._log)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._telemetry.clock.record(None)
        if self._log is not None:
            self._log.look(wait=True)
            self._end = perf_counter()
            self._log.finish(self._end)

    def sample(self) -> None:
        """Look at queues and steps now. Called once a step, it misses nothing.

        Without it whoever changes its stage looks, every few milliseconds: queue depths are fewer, and a first step
        whose batch stood ready may be missing.
        """
        if self._log is not None and self._end is None:
            self._log.look()

    @property
    def lost(self) -> int:
        """Segments, steps, events and samples that are no longer kept, because there were too many."""
        return self._log.lost if self._log is not None else 0

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write what was recorded so far, as Chrome trace JSON."""
        kept = self._log
        if kept is None:
            raise ConfigError(
                "nothing was recorded: `with Recorder(loader) as recorder:` around what is to be seen"
            )
        if kept.lost:
            log.warning(
                "the trace leaves out the first %d of %d things that were recorded: raise max_segments, now %d, "
                "or record for less long", kept.lost, kept.lost + kept.size, self._most,
            )  # fmt: skip
        written = Path(path).expanduser()
        write(
            written,
            Drawing(
                kept, self._axis, self._telemetry.trainer or self._here, self._end or perf_counter()
            ).trace(),
        )
        return written


class Axis:
    """Unix time for the performance counter, which has a zero of its own."""

    def __init__(self) -> None:
        # The pair between whose readings the least time has passed is the one that nobody interrupted.
        pairs = [(perf_counter(), time.time_ns(), perf_counter()) for _ in range(20)]
        before, unix_ns, after = min(pairs, key=lambda pair: pair[2] - pair[0])
        self.began = perf_counter()
        self.base_ns = unix_ns // 1_000_000_000 * 1_000_000_000
        """Whole seconds, taken off all times: microseconds since 1970 have no room for nanoseconds in a double."""
        self._zero = (before + after) / 2 - (unix_ns - self.base_ns) / 1e9

    def us(self, at: float) -> float:
        return round(1e6 * (at - self._zero), 3)

    def of_event(self, event: Event) -> float:
        """When an event happened, on the performance counter."""
        return event[1] if ONE_CLOCK else self._zero + event[0] - self.base_ns / 1e9


class _Counted(deque[T]):
    """Keeps the last ones, and counts those before."""

    lost = 0

    def append(self, item: T) -> None:
        self.lost += len(self) == self.maxlen
        super().append(item)


class Log(deque[tuple[str, Segment]]):
    """Gets every segment, and looks up the rest while it is at it. Appended to by all threads."""

    def __init__(self, telemetry: Telemetry, most: int, began: float) -> None:
        super().__init__(maxlen=most)
        self._telemetry = telemetry
        self._newest = began
        self._labels: dict[tuple[int, str], str] = {}
        self._appended: dict[str, int] = {}  # by thread: each writes its own, so none is miscounted
        self._looked = 0.0
        self._looking = threading.Lock()
        # Reentrant, because a garbage collection may end a pipeline, and with it a stage, on a thread that is in here.
        self._naming = threading.RLock()
        self._event: Event | None = None
        self._running: Step | None = None
        """The step that was under way at the last look."""
        self.steps: _Counted[Step] = _Counted(maxlen=most)
        self.events: _Counted[Event] = _Counted(maxlen=most)
        self.depths: _Counted[tuple[float, str, int]] = _Counted(maxlen=most)
        self._depth: dict[str, int] = {}
        self.unread = 0
        """Looks that failed."""
        self._steps_before = telemetry.consumer.steps
        self._steps_after: int | None = None

    def append(self, item: tuple[str, Segment]) -> None:
        name, segment = item
        if segment.stage != IDLE:  # a gap says the same
            self._keep(self.label(name), segment)
        if (
            segment.end - self._looked >= SAMPLE_S
            or self._telemetry.consumer.last is not self._running
        ):
            self.look()

    def _keep(self, label: str, segment: Segment) -> None:
        super().append((label, segment))
        self._appended[label] = self._appended.get(label, 0) + 1

    def label(self, name: str) -> str:
        """A name for this thread that no other has."""
        key = (threading.get_ident(), name)
        label = self._labels.get(key)
        if label is None:
            with self._naming:
                same = sum(other == name for _, other in self._labels)
                label = self._labels[key] = f"{name} ({same + 1})" if same else name
        return label

    def look(self, wait: bool = False) -> None:
        """Take over new steps, events and queue depths, unless another thread is at it, which may be waited for."""
        if not self._looking.acquire(blocking=wait):
            return
        try:
            self._looked = perf_counter()
            self._look()
        except Exception as error:  # the pipeline is not to fail because it is being watched
            self.unread += 1
            if self.unread == 1:
                log.warning(
                    "a trace lacks a sample of steps, events and queues: %s: %s",
                    type(error).__name__,
                    error,
                )
        finally:
            self._looking.release()

    def _look(self) -> None:
        telemetry = self._telemetry
        running = telemetry.consumer.last
        # A first step is in no window: it is the last one for a while, and may have been seen while it ran.
        seen = [self._running, telemetry.consumer.finished, *telemetry.window.steps]
        for step in sorted(
            {s.begin: s for s in seen if s is not None and s.begin > self._newest}.values()
        ):
            if step.wall or (running is not None and step.begin < running.begin):
                self.steps.append(step)
                self._newest = step.begin
        self._running = running
        events = list(telemetry._events)[::-1]  # not taken: they are the heartbeat's
        for event in itertools.takewhile(lambda event: event is not self._event, events):
            self.events.append(event)
        self._event = events[0] if events else self._event
        for name, queue in telemetry.gauges().get("queues", {}).items():
            if self._depth.get(name) != queue["depth"]:
                self._depth[name] = queue["depth"]
                self.depths.append((self._looked, name, queue["depth"]))

    def finish(self, now: float) -> None:
        """Take over what is still under way."""
        self._steps_after = self._telemetry.consumer.steps
        if self._running is not None and self._running.begin > self._newest:
            self.steps.append(self._running)
        for track in list(self._telemetry.clock.timelines):
            stage, since, what = track.now
            if stage not in ("", IDLE) and since < now:
                labels = [
                    label for (_, name), label in list(self._labels.items()) if name == track.name
                ]
                self._keep(labels[-1] if labels else track.name, Segment(since, now, stage, what))

    @property
    def missed(self) -> int:
        """Steps that nobody looked at in time."""
        after = self._telemetry.consumer.steps if self._steps_after is None else self._steps_after
        return max(0, after - self._steps_before - len(self.steps) - self.steps.lost)

    @property
    def size(self) -> int:
        return len(self) + len(self.steps) + len(self.events) + len(self.depths)

    @property
    def lost(self) -> int:
        return (
            sum(list(self._appended.values()))
            - len(self)
            + self.steps.lost
            + self.events.lost
            + self.depths.lost
        )

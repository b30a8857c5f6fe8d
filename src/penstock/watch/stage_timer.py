"""Record the stages of every thread as segments of time, the input of telemetry.

Each thread writes its own `ThreadTimeline` without a lock; other threads may read slightly old
data. Each task has a `TaskTimeline` of the work done for it, so that a wait for the task can be
charged to the stage that caused it. A change of stage costs one or two microseconds.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any, NamedTuple

STAGES = ("fetch", "decode", "tokenize", "pack", "batch", "copy")
"""The stages of a pipeline, in order. All output uses these names."""
COMPUTED = frozenset({"decode", "tokenize", "pack", "batch"})
"""Stages that use a core. A fetch waits for a server or disk, and a copy for a device."""
RANKS = "ranks"
"""Waiting for other ranks."""
IMPORT = "import"
"""Importing torch."""
CHARGED = (*STAGES, RANKS, IMPORT)
"""The stages that time in `next` is charged to."""
WAIT = "wait"
"""Blocked on input: on a task (`TaskTimeline`) or on another thread (`ThreadTimeline`)."""
OUT = "out"
"""Blocked on output: the next queue is full."""
IDLE = "idle"
"""Waiting for a task."""

RECENT = 512
"""Segments kept per thread. A wait with more segments is charged by its latest ones."""


class Segment(NamedTuple):
    """A period that a thread spent in one stage."""

    begin: float
    end: float
    stage: str
    what: Any = None
    """The address of the data; for a wait, the timeline of its target."""
    cpu: float = 0.0
    """CPU seconds of the thread. The rest is waiting for data or for a core."""


TraceLog = deque[tuple[str, Any]]
"""The log of a trace: segments and steps, with the name of their thread."""


class ThreadTimeline:
    """The activity of one thread. Written by that thread only."""

    __slots__ = ("_cpu", "_task", "bytes", "items", "log", "name", "now", "recent", "seconds")

    def __init__(self, name: str = "", log: TraceLog | None = None) -> None:
        self.name, self.log = name, log
        self.now: tuple[str, float, Any] = ("", perf_counter(), None)
        """Stage, begin and data. One tuple, so that readers see consistent values."""
        self.recent: deque[Segment] = deque(maxlen=RECENT)
        self.seconds: dict[str, float] = {}
        self.items: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self._task: list[Segment] | None = None
        self._cpu = 0.0

    def switch(self, stage: str, what: Any = None) -> tuple[str, Any]:
        """Enter another stage ("" for none). Return the previous one, to switch back to."""
        now = perf_counter()
        before, since, of = self.now
        # Reading CPU time costs ten times as much as reading the clock.
        cpu = thread_time() if stage in COMPUTED or before in COMPUTED else 0.0
        if before:
            used = cpu - self._cpu if before in COMPUTED else 0.0
            self._keep(Segment(since, now, before, of, used))
        self.now, self._cpu = (stage, now, what), cpu
        return before, of

    def _keep(self, segment: Segment) -> None:
        stage = segment.stage
        self.seconds[stage] = self.seconds.get(stage, 0.0) + segment.end - segment.begin
        self.recent.append(segment)
        if self.log is not None:
            self.log.append((self.name, segment))
        if self._task is not None:
            self._task.append(segment)

    def count(self, stage: str, items: int, nbytes: int = 0) -> None:
        """Count finished items of a stage."""
        self.items[stage] = self.items.get(stage, 0) + items
        self.bytes[stage] = self.bytes.get(stage, 0) + nbytes

    def since(self, begin: float, before: int = 4) -> list[Segment]:
        """Return the segments that ended after `begin`, and a few before them. For any thread."""
        now, segments = self.now, list(self.recent)
        first = bisect_right(segments, begin, key=lambda segment: segment.end)
        return _with_current(segments[max(0, first - before) :], now)

    # Tasks

    def begin(self, task: TaskTimeline) -> None:
        """Begin a task."""
        self.switch("")
        task.thread = self
        self._task = task.done = []
        task.begun = perf_counter()

    def end(self, task: TaskTimeline) -> None:
        self.switch(IDLE)
        task.ended = perf_counter()
        if task.after is not None:
            task.after.after = None  # otherwise a chain of tasks would stay in memory

    def absorb(self, report: Report, what: Any) -> None:
        """Add the report of a worker process that works for this thread."""
        for begin, end, stage, cpu in report.segments:
            self._keep(Segment(begin, end, stage, what, cpu))
        for stage, (items, nbytes) in report.counts.items():
            self.count(stage, items, nbytes)

    def report(self) -> Report:
        """Return the activity since the last report, to send to another process."""
        self.switch("")
        report = Report(
            [(s.begin, s.end, s.stage, s.cpu) for s in self.recent],
            {stage: (n, self.bytes[stage]) for stage, n in self.items.items()},
        )
        self.recent.clear()
        self.items.clear()
        self.bytes.clear()
        return report


class Report(NamedTuple):
    """The activity of a worker process for one task."""

    segments: list[tuple[float, float, str, float]]
    counts: dict[str, tuple[int, int]]


class TaskTimeline:
    """The work done for one task. Does not keep its result alive."""

    __slots__ = ("after", "begun", "done", "ended", "thread")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.ended: float | None = None
        self.thread: ThreadTimeline | None = None
        self.done: list[Segment] = []
        self.after: TaskTimeline | None = None
        """The task whose result this one needs."""

    def segments(self) -> list[Segment]:
        """Return the task's segments, including the current stage. For any thread."""
        if self.ended is None and self.thread is not None:
            return _with_current(list(self.done), self.thread.now)
        return self.done


def _with_current(done: list[Segment], now: tuple[str, float, Any]) -> list[Segment]:
    """Add the current stage as if it ended now, assuming that all its time was CPU time."""
    stage, since, what = now
    if stage and (not done or done[-1].end <= since):
        end = max(since, perf_counter())
        done.append(Segment(since, end, stage, what, end - since))
    return done


class Clock:
    """Holds the timelines of all threads. Unpickles as a new clock."""

    on = True

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self.log: TraceLog | None = None
        self.timelines: list[ThreadTimeline] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def timeline(self) -> ThreadTimeline:
        """Return the calling thread's timeline."""
        try:
            timeline: ThreadTimeline = self._local.timeline
        except AttributeError:
            timeline = self._local.timeline = self.new_timeline(threading.current_thread().name)
        return timeline

    def new_timeline(self, name: str) -> ThreadTimeline:
        """Return a timeline for a thread that has not started yet; see `adopt`."""
        with self._lock:
            timeline = ThreadTimeline(name, self.log)
            self.timelines.append(timeline)
        return timeline

    def adopt(self, timeline: ThreadTimeline) -> None:
        """Use this timeline for the calling thread."""
        self._local.timeline = timeline

    @contextmanager
    def stage(self, name: str, what: Any = None) -> Iterator[ThreadTimeline]:
        """Time a `with` block as a stage, excluding stages nested in it.

        Yields the timeline, to count items.
        """
        timeline = self.timeline()
        before = timeline.switch(name, what)
        try:
            yield timeline
        finally:
            timeline.switch(*before)

    def task_timeline(self) -> TaskTimeline | None:
        """Return a timeline for a new task, or None if the clock is off."""
        return TaskTimeline()

    def record(self, log: TraceLog | None) -> None:
        """Append all segments of all threads to `log`, with thread names. None stops recording."""
        with self._lock:
            self.log = log
            for timeline in self.timelines:
                timeline.log = log

    def remove_ended(self) -> list[ThreadTimeline]:
        """Remove and return the timelines of the pipeline's threads, which have exited."""
        with self._lock:
            ended = [t for t in self.timelines if t.name.startswith("penstock-")]
            self.timelines[:] = [t for t in self.timelines if t not in ended]
            for timeline in self.timelines:
                timeline.recent.clear()  # may reference the removed timelines
        return ended


class NullClock(Clock):
    """A clock that is off: its timelines are not kept."""

    on = False

    def new_timeline(self, name: str) -> ThreadTimeline:
        return ThreadTimeline(name)

    def task_timeline(self) -> TaskTimeline | None:
        return None

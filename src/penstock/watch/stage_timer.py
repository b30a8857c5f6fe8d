"""Record what every thread does, as segments of time: the raw material of telemetry.

Each thread writes its own `ThreadTimeline`, so nothing is locked; other threads may read it, a
moment late. Each task keeps a `TaskTimeline` of what was done for it, so that a wait for the task
can be charged to the stage that caused it. A change of stage costs one or two microseconds.
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
"""The stages of a pipeline, in order; the same names everywhere."""
COMPUTED = frozenset({"decode", "tokenize", "pack", "batch"})
"""Stages that need a core while they last. A fetch waits for others, and a copy for a device."""
RANKS = "ranks"
"""Waiting for other ranks."""
IMPORT = "import"
"""Importing torch."""
CHARGED = (*STAGES, RANKS, IMPORT)
"""What time in `next` is charged to."""
WAIT = "wait"
"""Blocked on input: on a task (`TaskTimeline`) or on another thread (`ThreadTimeline`)."""
OUT = "out"
"""Blocked on output: the next queue is full."""
IDLE = "idle"
"""No task was queued."""

RECENT = 512
"""Segments kept for each thread. A longer wait is charged by its latest segments."""


class Segment(NamedTuple):
    """A period that a thread spent in one stage."""

    begin: float
    end: float
    stage: str
    what: Any = None
    """The address of the data; for a wait, the timeline that was waited for."""
    cpu: float = 0.0
    """CPU seconds that the thread used. The rest is waiting, for data or for a core."""


TraceLog = deque[tuple[str, Any]]
"""Receives segments and steps, with the name of their thread, while a trace is recorded."""


class ThreadTimeline:
    """What one thread does. Written by that thread only."""

    __slots__ = ("_cpu", "_task", "bytes", "items", "log", "name", "now", "recent", "seconds")

    def __init__(self, name: str = "", log: TraceLog | None = None) -> None:
        self.name, self.log = name, log
        self.now: tuple[str, float, Any] = ("", perf_counter(), None)
        """Stage, begin and data. One tuple, so that readers never see half of a change."""
        self.recent: deque[Segment] = deque(maxlen=RECENT)
        self.seconds: dict[str, float] = {}
        self.items: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self._task: list[Segment] | None = None
        self._cpu = 0.0

    def switch(self, stage: str, what: Any = None) -> tuple[str, Any]:
        """Enter another stage ("" for none) and return the one before, to return to."""
        now = perf_counter()
        before, since, of = self.now
        # CPU time costs ten times as much to read as the clock.
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
            task.after.after = None  # else a chain of tasks would keep all of them

    def absorb(self, report: Report, what: Any) -> None:
        """Add what a worker process did for this thread."""
        for begin, end, stage, cpu in report.segments:
            self._keep(Segment(begin, end, stage, what, cpu))
        for stage, (items, nbytes) in report.counts.items():
            self.count(stage, items, nbytes)

    def report(self) -> Report:
        """Return what was done since the last report, to be sent to another process."""
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
    """What a worker process did for one task."""

    segments: list[tuple[float, float, str, float]]
    counts: dict[str, tuple[int, int]]


class TaskTimeline:
    """What was done for one task. It does not keep the result alive."""

    __slots__ = ("after", "begun", "done", "ended", "thread")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.ended: float | None = None
        self.thread: ThreadTimeline | None = None
        self.done: list[Segment] = []
        self.after: TaskTimeline | None = None
        """The task whose result this one needs."""

    def segments(self) -> list[Segment]:
        """Return what was done for it, including the current stage. For any thread."""
        if self.ended is None and self.thread is not None:
            return _with_current(list(self.done), self.thread.now)
        return self.done


def _with_current(done: list[Segment], now: tuple[str, float, Any]) -> list[Segment]:
    """Add the current stage as if it ended now. Its CPU time is not known yet: assume all of it."""
    stage, since, what = now
    if stage and (not done or done[-1].end <= since):
        end = max(since, perf_counter())
        done.append(Segment(since, end, stage, what, end - since))
    return done


class Clock:
    """Gives every thread its timeline. Unpickled in another process, it is a new clock."""

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
        """Return a timeline for a thread that has not started yet: see `adopt`."""
        with self._lock:
            timeline = ThreadTimeline(name, self.log)
            self.timelines.append(timeline)
        return timeline

    def adopt(self, timeline: ThreadTimeline) -> None:
        """Use this timeline for the calling thread."""
        self._local.timeline = timeline

    @contextmanager
    def stage(self, name: str, what: Any = None) -> Iterator[ThreadTimeline]:
        """Time a `with` block as a stage. A stage entered within it is not counted twice.

        The block gets the timeline, to count items on.
        """
        timeline = self.timeline()
        before = timeline.switch(name, what)
        try:
            yield timeline
        finally:
            timeline.switch(*before)

    def task_timeline(self) -> TaskTimeline | None:
        """Return a timeline for a new task, or None if nothing is measured."""
        return TaskTimeline()

    def record(self, log: TraceLog | None) -> None:
        """Append every segment of every thread to `log`, with the thread's name; None stops it."""
        with self._lock:
            self.log = log
            for timeline in self.timelines:
                timeline.log = log

    def remove_ended(self) -> list[ThreadTimeline]:
        """Forget the pipeline's threads, which have ended, and return their timelines."""
        with self._lock:
            ended = [t for t in self.timelines if t.name.startswith("penstock-")]
            self.timelines[:] = [t for t in self.timelines if t not in ended]
            for timeline in self.timelines:
                timeline.recent.clear()  # it may refer to theirs
        return ended


class NullClock(Clock):
    """A clock whose timelines are not read."""

    on = False

    def new_timeline(self, name: str) -> ThreadTimeline:
        return ThreadTimeline(name)

    def task_timeline(self) -> TaskTimeline | None:
        return None

"""What every thread does, as stretches of time: the raw material of telemetry.

Each thread writes its own `ThreadTimeline`, so nothing is locked; other threads may read it, a
moment late. Each task keeps a `TaskTimeline` of what was done for it, so that a wait for the task
can be charged to the stage that caused it. A change of stage costs one or two microseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter, thread_time
from types import TracebackType
from typing import Any, NamedTuple

STAGES = ("fetch", "decode", "tokenize", "pack", "batch", "copy")
"""The stages of a pipeline, in order; the same names everywhere."""
COMPUTED = frozenset({"decode", "tokenize", "pack", "batch"})
"""Stages that need a core for as long as they last. A fetch waits for others, and a copy for a device."""
WAIT = "wait"
"""Blocked on input: on a task (`TaskTimeline`) or on another thread (`ThreadTimeline`)."""
OUT = "out"
"""Blocked on output: the next queue is full."""
IDLE = "idle"
"""No task was queued."""
RANKS = "ranks"
"""Waiting for other ranks, which is not a stage of the pipeline."""

RECENT = 512
"""Segments kept for each thread. A longer wait is charged by its latest segments."""


class Segment(NamedTuple):
    """A stretch of time that a thread spent in one stage."""

    begin: float
    end: float
    stage: str
    what: Any = None
    """The address of the data; for a wait, the timeline that was waited for."""
    cpu: float = 0.0
    """CPU seconds that the thread used. The rest is waiting, for data or for a core."""


class ThreadTimeline:
    """What one thread does. Written by that thread only."""

    __slots__ = ("_cpu", "_job", "bytes", "items", "log", "name", "now", "recent", "seconds")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.now: tuple[str, float, Any] = ("", perf_counter(), None)
        """Stage, begin and data. One tuple, so that readers never see half of a change."""
        self.recent: deque[Segment] = deque(maxlen=RECENT)
        self.seconds: dict[str, float] = {}
        self.items: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.log: deque[tuple[str, Segment]] | None = None
        """Receives every segment while a trace is recorded."""
        self._job: list[Segment] | None = None
        self._cpu = 0.0

    def switch(self, stage: str, what: Any = None) -> tuple[str, Any]:
        """Enter another stage ("" for none) and return the one before, to return to."""
        now = perf_counter()
        before, since, of = self.now
        # CPU time costs ten times as much to read as the clock.
        cpu = thread_time() if stage in COMPUTED or before in COMPUTED else 0.0
        if before:
            self._keep(
                Segment(since, now, before, of, cpu - self._cpu if before in COMPUTED else 0.0)
            )
        self.now, self._cpu = (stage, now, what), cpu
        return before, of

    def _keep(self, segment: Segment) -> None:
        stage = segment.stage
        self.seconds[stage] = self.seconds.get(stage, 0.0) + segment.end - segment.begin
        self.recent.append(segment)
        if self.log is not None:
            self.log.append((self.name, segment))
        if self._job is not None:
            self._job.append(segment)

    def count(self, stage: str, items: int, nbytes: int = 0) -> None:
        """Count finished items of a stage."""
        self.items[stage] = self.items.get(stage, 0) + items
        self.bytes[stage] = self.bytes.get(stage, 0) + nbytes

    def segments(self) -> list[Segment]:
        """Return the recent segments, and the current one as if it ended now. For any thread."""
        stage, since, what = self.now
        done = list(self.recent)
        if stage and (not done or done[-1].end <= since):
            done.append(_under_way(stage, since, what))
        return done

    def since(self, begin: float, before: int = 4) -> list[Segment]:
        """Return the segments that ended after `begin`, and a few before them. For any thread."""
        recent, found, last = self.recent, [], float("inf")
        stage, under_way, what = self.now
        for i in range(1, len(recent) + 1):
            segment = recent[-i]
            if segment.begin >= last:
                continue  # the thread has appended a segment meanwhile
            found.append(segment)
            last = segment.begin
            before -= segment.end <= begin
            if before == 0:
                break
        found.reverse()
        if stage and (not found or found[-1].end <= under_way):
            found.append(_under_way(stage, under_way, what))
        return found

    # Tasks

    def begin(self, task: TaskTimeline) -> None:
        """Begin a task."""
        self.switch("")
        task.thread, task.before = self, self._job or ()
        self._job = task.done = []
        task.begun = perf_counter()

    def end(self, task: TaskTimeline) -> None:
        self.switch(IDLE)
        task.ended = perf_counter()
        task.before = ()
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
            {stage: (n, self.bytes.get(stage, 0)) for stage, n in self.items.items()},
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

    __slots__ = ("after", "before", "begun", "done", "ended", "thread")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.ended: float | None = None
        self.thread: ThreadTimeline | None = None
        self.done: list[Segment] = []
        self.before: Sequence[Segment] = ()
        """What its worker did just before: the cause of waiting for a free worker."""
        self.after: TaskTimeline | None = None
        """The task whose result this one needs."""

    def segments(self) -> list[Segment]:
        """Return what was done for it, including the current stage. For any thread."""
        done = list(self.done)
        thread = self.thread
        if self.ended is None and thread is not None:
            stage, since, what = thread.now
            if stage and (not done or done[-1].end <= since):
                done.append(_under_way(stage, since, what))
        return done


def _under_way(stage: str, since: float, what: Any) -> Segment:
    """Return the current stage as if it ended now. Its CPU time is not known yet: assume all of it."""
    now = max(since, perf_counter())
    return Segment(since, now, stage, what, now - since)


def role(timeline: ThreadTimeline) -> tuple[str, str]:
    """Return the stages that a thread's waits for input and for output belong to."""
    name = timeline.name
    if name.startswith("penstock-fetch"):
        return "fetch", "fetch"
    if name.startswith("penstock-worker"):
        return "decode", "tokenize"
    if name.startswith("penstock-producer"):
        return "pack", "batch"
    return "copy", "copy"


def stage_of(note: str) -> tuple[str, str]:
    """Split a note such as "fetch, decode, reading …" into its last stage and the rest."""
    stage, where = "", note
    while (words := where.partition(", "))[0] in STAGES:
        stage, where = words[0], words[2]
    return stage, where


class _Stage:
    """A stage, while a `with` block lasts."""

    __slots__ = ("_before", "_name", "_timeline", "_what")

    def __init__(self, timeline: ThreadTimeline, name: str, what: Any) -> None:
        self._timeline = timeline
        self._name = name
        self._what = what

    def __enter__(self) -> ThreadTimeline:
        self._before = self._timeline.switch(self._name, self._what)
        return self._timeline

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timeline.switch(*self._before)


class Clock:
    """Gives every thread its timeline. Unpickled in another process, it is a new clock."""

    on = True

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._log: deque[tuple[str, Segment]] | None = None
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
        timeline = ThreadTimeline(name)
        with self._lock:
            timeline.log = self._log
            self.timelines.append(timeline)
        return timeline

    def fold(self) -> None:
        """Keep only the sums of the pipeline's threads, which have ended."""
        with self._lock:
            ours = [
                timeline for timeline in self.timelines if timeline.name.startswith("penstock-")
            ]
            kept = [
                timeline for timeline in self.timelines if not timeline.name.startswith("penstock-")
            ]
            sums: dict[str, ThreadTimeline] = {}
            for timeline in ours:
                role = timeline.name.rstrip("-0123456789")
                into = sums.setdefault(role, ThreadTimeline(role))
                for stage, seconds in timeline.seconds.items():
                    into.seconds[stage] = into.seconds.get(stage, 0.0) + seconds
                for stage, items in timeline.items.items():
                    into.count(stage, items, timeline.bytes.get(stage, 0))
            for timeline in kept:
                timeline.recent.clear()  # it may hold on to theirs
            self.timelines[:] = [*kept, *sums.values()]

    def record(self, log: deque[tuple[str, Segment]] | None) -> None:
        """Append every segment of every thread to `log`, with the thread's name; None stops it."""
        with self._lock:
            self._log = log
            for timeline in self.timelines:
                timeline.log = log

    def adopt(self, timeline: ThreadTimeline) -> None:
        """Use this timeline for the calling thread."""
        self._local.timeline = timeline

    def stage(self, name: str, what: Any = None) -> Any:
        """Time a `with` block as a stage. A stage entered within it is not counted twice.

        The block gets the timeline, to count items on.
        """
        return _Stage(self.timeline(), name, what)

    def task_timeline(self) -> TaskTimeline | None:
        """Return a timeline for a new task, or None if nothing is measured."""
        return TaskTimeline()


class _Nothing(ThreadTimeline):
    """A timeline that records nothing."""

    __slots__ = ()

    def __enter__(self) -> ThreadTimeline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def switch(self, stage: str, what: Any = None) -> tuple[str, Any]:
        return "", None

    def count(self, stage: str, items: int, nbytes: int = 0) -> None: ...

    def begin(self, task: TaskTimeline) -> None: ...

    def end(self, task: TaskTimeline) -> None: ...

    def absorb(self, report: Report, what: Any) -> None: ...


class NullClock(Clock):
    """Measures nothing."""

    on = False

    def __init__(self) -> None:
        super().__init__()
        self._nothing = _Nothing()

    def timeline(self) -> ThreadTimeline:
        return self._nothing

    def new_timeline(self, name: str) -> ThreadTimeline:
        return self._nothing

    def adopt(self, timeline: ThreadTimeline) -> None: ...

    def stage(self, name: str, what: Any = None) -> Any:
        return self._nothing

    def task_timeline(self) -> TaskTimeline | None:
        return None

"""What every thread does, as stretches of time: the raw material of telemetry.

In:    threads that say which stage they go over to, and for what they wait.
Out:   segments, one after the other for each thread, and their sums by stage.
Where: every thread writes a track of its own, so nothing is locked. Others may read it, a moment old.
State: the last segments of a thread, and the segments of each piece of work, kept for whoever waits for it.
Cost:  one or two microseconds for each change of stage; there are some ten of them in a chunk and four in a batch.
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
"""Blocked on input: what a thread waits for is a `Trail` or another thread's `Track`."""
OUT = "out"
"""Blocked on output: what comes after has no room."""
IDLE = "idle"
"""Nothing was asked for: whoever comes after has enough."""
RANKS = "ranks"
"""Waiting for other ranks, which is no stage of ours."""

RECENT = 512
"""Segments kept of a thread. A wait that spans more of them is charged by its latest ones."""


class Segment(NamedTuple):
    """A stretch of time that a thread spent in one stage."""

    begin: float
    end: float
    stage: str
    what: Any = None
    """The address of what was worked on; for a wait, what was waited for."""
    cpu: float = 0.0
    """Seconds of a core that the thread had of it: the rest it waited, for something or for a core."""


class Track:
    """What one thread does. Written by that thread only."""

    __slots__ = ("_cpu", "_job", "bytes", "items", "log", "name", "now", "recent", "seconds")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.now: tuple[str, float, Any] = ("", perf_counter(), None)
        """The stage, since when, and with what. One object, so that others never see half of a change."""
        self.recent: deque[Segment] = deque(maxlen=RECENT)
        self.seconds: dict[str, float] = {}
        self.items: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.log: deque[tuple[str, Segment]] | None = None
        """Gets every segment, while somebody records them."""
        self._job: list[Segment] | None = None
        self._cpu = 0.0

    def switch(self, stage: str, what: Any = None) -> tuple[str, Any]:
        """Go over to another stage; "" is none. Gives the one before, to return to."""
        now = perf_counter()
        before, since, of = self.now
        # The time of a core costs ten times as much to ask for as the time of day.
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
        """Something was finished in a stage."""
        self.items[stage] = self.items.get(stage, 0) + items
        self.bytes[stage] = self.bytes.get(stage, 0) + nbytes

    def segments(self) -> list[Segment]:
        """The last ones, and the one under way as if it ended now. For any thread."""
        stage, since, what = self.now
        done = list(self.recent)
        if stage and (not done or done[-1].end <= since):
            done.append(_under_way(stage, since, what))
        return done

    def since(self, begin: float, before: int = 4) -> list[Segment]:
        """Those that had not ended by then, and a few before them. For any thread, and cheaper than all of them."""
        recent, found, last = self.recent, [], float("inf")
        stage, under_way, what = self.now
        for i in range(1, len(recent) + 1):
            segment = recent[-i]
            if segment.begin >= last:
                continue  # its thread has appended another one meanwhile
            found.append(segment)
            last = segment.begin
            before -= segment.end <= begin
            if before == 0:
                break
        found.reverse()
        if stage and (not found or found[-1].end <= under_way):
            found.append(_under_way(stage, under_way, what))
        return found

    # Pieces of work

    def begin(self, trail: Trail) -> None:
        """Begin a piece of work, which somebody may wait for."""
        self.switch("")
        trail.track, trail.before = self, self._job or ()
        self._job = trail.done = []
        trail.begun = perf_counter()

    def end(self, trail: Trail) -> None:
        self.switch(IDLE)
        trail.ended = perf_counter()
        trail.before = ()

    def absorb(self, report: Report, what: Any) -> None:
        """Take over what a worker process did for this thread."""
        for begin, end, stage, cpu in report.segments:
            self._keep(Segment(begin, end, stage, what, cpu))
        for stage, (items, nbytes) in report.counts.items():
            self.count(stage, items, nbytes)

    def report(self) -> Report:
        """What was done since the last report, to be sent to another process."""
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
    """What a worker process did for one call."""

    segments: list[tuple[float, float, str, float]]
    counts: dict[str, tuple[int, int]]


class Trail:
    """What happened to one piece of work. Small: it does not keep the result alive."""

    __slots__ = ("before", "begun", "done", "ended", "track")

    def __init__(self) -> None:
        self.begun: float | None = None
        self.ended: float | None = None
        self.track: Track | None = None
        self.done: list[Segment] = []
        self.before: Sequence[Segment] = ()
        """What its worker did just before: while this waited for a worker, that was what it waited for."""

    def segments(self) -> list[Segment]:
        """What was done for it, with what is being done now. For any thread."""
        done = list(self.done)
        track = self.track
        if self.ended is None and track is not None:
            stage, since, what = track.now
            if stage and (not done or done[-1].end <= since):
                done.append(_under_way(stage, since, what))
        return done


def _under_way(stage: str, since: float, what: Any) -> Segment:
    """What a thread is doing, as if it ended now. How much of a core it had is not known yet: all of it."""
    now = max(since, perf_counter())
    return Segment(since, now, stage, what, now - since)


def role(track: Track) -> tuple[str, str]:
    """The first and the last stage of a thread: those that its waits for input and for room belong to."""
    name = track.name
    if name.startswith("penstock-fetch"):
        return "fetch", "fetch"
    if name.startswith("penstock-worker"):
        return "decode", "tokenize"
    if name.startswith("penstock-producer"):
        return "pack", "batch"
    return "copy", "copy"


def stage_of(note: str) -> tuple[str, str]:
    """The stage of "fetch, decode, reading …", where it is the later one that failed, and the rest of it."""
    stage, where = "", note
    while (words := where.partition(", "))[0] in STAGES:
        stage, where = words[0], words[2]
    return stage, where


class _Stage:
    """A stage, while a `with` block lasts."""

    __slots__ = ("_before", "_name", "_track", "_what")

    def __init__(self, track: Track, name: str, what: Any) -> None:
        self._track = track
        self._name = name
        self._what = what

    def __enter__(self) -> Track:
        self._before = self._track.switch(self._name, self._what)
        return self._track

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._track.switch(*self._before)


class Clock:
    """Gives every thread its track. Sent to another process, it is a new one."""

    on = True

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._log: deque[tuple[str, Segment]] | None = None
        self.tracks: list[Track] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def track(self) -> Track:
        """This thread's own."""
        try:
            track: Track = self._local.track
        except AttributeError:
            track = self._local.track = self.new_track(threading.current_thread().name)
        return track

    def new_track(self, name: str) -> Track:
        """For a thread that does not run yet."""
        track = Track(name)
        with self._lock:
            track.log = self._log
            self.tracks.append(track)
        return track

    def fold(self) -> None:
        """The threads of a pipeline have ended: their sums are kept, and nothing else of them."""
        with self._lock:
            ours = [track for track in self.tracks if track.name.startswith("penstock-")]
            kept = [track for track in self.tracks if not track.name.startswith("penstock-")]
            sums: dict[str, Track] = {}
            for track in ours:
                role = track.name.rstrip("-0123456789")
                into = sums.setdefault(role, Track(role))
                for stage, seconds in track.seconds.items():
                    into.seconds[stage] = into.seconds.get(stage, 0.0) + seconds
                for stage, items in track.items.items():
                    into.count(stage, items, track.bytes.get(stage, 0))
            for track in kept:
                track.recent.clear()  # it may hold on to theirs
            self.tracks[:] = [*kept, *sums.values()]

    def record(self, log: deque[tuple[str, Segment]] | None) -> None:
        """Have every segment of every thread appended, with the thread's name; None ends it."""
        with self._lock:
            self._log = log
            for track in self.tracks:
                track.log = log

    def adopt(self, track: Track) -> None:
        """This thread is the one that a track was made for."""
        self._local.track = track

    def stage(self, name: str, what: Any = None) -> Any:
        """`with clock.stage("decode", ref):` says where the time goes; what is entered within is not counted twice.

        Gives the track, on which to count what was done.
        """
        return _Stage(self.track(), name, what)

    def trail(self) -> Trail | None:
        """For a piece of work that is asked for now."""
        return Trail()


class _Nothing(Track):
    """A track that nothing is written on."""

    __slots__ = ()

    def __enter__(self) -> Track:
        return self

    def __exit__(self, *_: object) -> None: ...

    def switch(self, stage: str, what: Any = None) -> tuple[str, Any]:
        return "", None

    def count(self, stage: str, items: int, nbytes: int = 0) -> None: ...

    def begin(self, trail: Trail) -> None: ...

    def end(self, trail: Trail) -> None: ...

    def absorb(self, report: Report, what: Any) -> None: ...


class Quiet(Clock):
    """Measures nothing."""

    on = False

    def __init__(self) -> None:
        super().__init__()
        self._nothing = _Nothing()

    def track(self) -> Track:
        return self._nothing

    def new_track(self, name: str) -> Track:
        return self._nothing

    def adopt(self, track: Track) -> None: ...

    def stage(self, name: str, what: Any = None) -> Any:
        return self._nothing

    def trail(self) -> Trail | None:
        return None

"""What a report is made of: a run's heartbeats, as columns.

In:    heartbeat files of one run, one for each rank.
Out:   for each rank its steps as columns, its sessions (from a boot to the next) and its events.
Where: the thread that makes a report.
State: none. A line is forgotten as soon as its numbers are in the columns.

Whatever a line lacks is NaN, so nothing here depends on more than the fields that every line has.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, NoData
from penstock.watch import stage_timer
from penstock.watch.heartbeat_reader import expand, read_heartbeat
from penstock.watch.view.fields import LONGEST_STEP_S
from penstock.watch.view.fields import number as loss_number
from penstock.watch.world import world_size

Column = npt.NDArray[np.float64]

STAGES = (*stage_timer.STAGES, stage_timer.RANKS)
"""Whose fault a wait may be."""
NUMBERS = (
    "dt_step_s", "dt_fetch_s", "tokens", "tokens_total", "toks_per_s", "loss", "fetch_p50_ms", "fetch_p95_ms",
    "fetch_p99_ms", "data_wait_pct", "queue_depth", "queue_capacity", "rss_bytes", "device_bytes", "compiles",
)  # fmt: skip
EVENTS = frozenset(
    (
        "boot", "ready", "warmup", "error", "stall", "pause", "tune", "fallback", "steady_state", "health", "shutdown",
        "start", "prewarm", "eval", "eval_skipped", "saved", "save_failed",
    )
)  # fmt: skip
PREFIXES = ("fineweb_loader_", "loader_")
MOST_EVENTS = 200
"""Events of one kind that a rank keeps from its beginning, and as many from its end; the others are counted."""
ENOUGH_STEPS = 30
"""A session shorter than this is not what a run is judged by, if there is a longer one."""
SHORTEST_STEP_S = 1e-9
"""No step is shorter; a rate over less would be no number."""
FAR = 1e18
"""A number beyond this is not a measurement; a loss that runs away may be."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    ts: float
    rank: int
    step: int
    msg: str
    """Without the loader's prefix: `ready`, `warmup`, `error`, and the others as they are."""
    fields: Mapping[str, Any]


@dataclass(slots=True)
class Session:
    """One process of a run: its steps are `begin` to `end` of the columns."""

    begin: int
    end: int
    boot: Mapping[str, Any] = field(default_factory=dict)
    ready: Mapping[str, Any] = field(default_factory=dict)
    warmup: Mapping[str, Any] = field(default_factory=dict)
    stages: Mapping[str, Any] = field(default_factory=dict)
    fetch: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""
    """The loader's own verdict, the last one."""
    ended: str | None = None
    """Why it ended, if it said so."""

    @property
    def steps(self) -> int:
        return self.end - self.begin


@dataclass(slots=True)
class RankRun:
    """What one rank recorded."""

    rank: int
    path: Path
    step: npt.NDArray[np.int64]
    columns: dict[str, Column]
    waits: dict[str, Column]
    """Seconds of each step's wait, by stage; only stages that occur."""
    sessions: list[Session]
    events: list[Event]
    counts: dict[str, int]
    """All events, by kind, those that were not kept included."""
    beats: list[tuple[int, dict[str, float]]]
    """Occupancy of each queue, with the number of the step that was done."""
    first_ts: float
    last_ts: float
    lines: int
    skipped: int
    """Lines that were torn or not ours."""
    dropped: int
    """Lines that the run could not write."""
    not_finite: npt.NDArray[np.int64]
    """Where in the columns a loss is not a finite number."""
    earlier: int = 0
    """Runs that wrote to the same file before, and are left out."""

    def judged(self) -> Session:
        """The session that speaks for the run: the last that is long enough, else the longest."""
        enough = [session for session in self.sessions if session.steps >= ENOUGH_STEPS]
        return enough[-1] if enough else max(self.sessions, key=lambda session: session.steps)


@dataclass(frozen=True, slots=True)
class Run:
    """All ranks, the lowest first."""

    ranks: tuple[RankRun, ...]

    @property
    def first(self) -> RankRun:
        return self.ranks[0]

    @property
    def expected(self) -> int | None:
        """Ranks that it has by its own account: by its newest boot, for it may have gone on with fewer or more."""
        boots = [
            session.boot
            for rank in self.ranks
            for session in rank.sessions
            if world_size(session.boot)
        ]
        return (
            world_size(max(boots, key=lambda boot: nan_to(number(boot.get("ts")), 0.0)))
            if boots
            else None
        )


def read_run(patterns: Sequence[str | Path]) -> Run:
    """The run whose heartbeats are in these files, globs or folders."""
    paths = expand(patterns)
    for pattern in patterns:
        if not expand([pattern]):
            raise NoData(
                f"{pattern}: there is no heartbeat there. Has the run started, and does it write there?"
            )
    by_rank: dict[int, RankRun] = {}
    for path in paths:
        one = read_rank(path)
        if one is None:
            continue
        if one.rank in by_rank:
            raise ConfigError(
                f"{by_rank[one.rank].path} and {path} are both of rank {one.rank}: a report is of one run. "
                "Two runs side by side: penstock report --compare A B"
            )
        by_rank[one.rank] = one
    if not by_rank:
        raise NoData(
            f"no heartbeat line in {', '.join(map(str, paths))}: has the run started, and written there?"
        )
    return Run(tuple(by_rank[rank] for rank in sorted(by_rank)))


def read_rank(path: Path) -> RankRun | None:
    """One file with its rotated parts; None if there is no line in it that is ours."""
    beats = read_heartbeat(path)
    taken = _Taken()
    taken.take(beats)
    if not taken.lines:
        return None
    return taken.done(path, beats.skipped + taken.odd)


class _Taken:
    """Lines on their way into columns."""

    def __init__(self) -> None:
        self.lines = 0
        self.earlier = 0
        """Runs that wrote to the same file before."""
        self._held: list[Mapping[str, Any]] = []
        self.odd = 0
        """Lines whose time or step no run can have."""
        self._rank = 0
        self._steps = array("q")
        self._columns = {name: array("d") for name in (*NUMBERS, "mono", "paused_s")}
        self._waits: dict[str, array[float]] = {}
        self._sessions: list[Session] = []
        self._events: dict[str, tuple[list[Event], list[Event]]] = {}
        self._counts: dict[str, int] = {}
        self._beats: list[tuple[int, dict[str, float]]] = []
        self._beat_every = 1
        self._beats_seen = 0
        self._first = self._last = math.nan
        self._dropped = 0
        self._health = ""
        self._not_finite = array("q")

    def take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            if self._held or self._may_begin_anew(line):
                self._held.append(line)
                if line["msg"] == "progress":
                    self._decide(number(line["step"]))
            else:
                self._take([line])
        self._take(self._held)

    def _may_begin_anew(self, line: Mapping[str, Any]) -> bool:
        """Whether a line may be the first one of another run that writes to the same file."""
        again = line.get("rotated") is True or line.get("resumed") is True
        return line["msg"] == "boot" and not again and self.lines > 0

    def _decide(self, step: float) -> None:
        """The first step after a boot: it tells a run that goes on from one that begins, of which a report is."""
        held, self._held = self._held, []
        if step <= 1:
            # Some of those may have ended before their first step: what they met is not this one's either.
            starts = [at for at, line in enumerate(held) if self._may_begin_anew(line)]
            earlier = self.earlier + len(starts)
            self.__init__()  # type: ignore[misc]
            self.earlier = earlier
            held = held[starts[-1] :]
        self._take(held)

    def _take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            ts, step, msg = number(line["ts"]), number(line["step"]), line["msg"]
            if math.isnan(ts) or math.isnan(step):
                self.odd += 1
                continue
            if not self.lines:
                self._first = ts
                self._rank = line["rank"]
            self.lines += 1
            self._last = ts
            if msg == "progress":
                self._progress(line, int(step))
            elif msg == "beat":
                self._beat(line, int(step))
            else:
                self._event(line, ts, int(step), _bare(msg))

    def _session(self) -> Session:
        if not self._sessions:
            self._sessions.append(Session(0, 0))  # the beginning of the file is gone
        return self._sessions[-1]

    def _progress(self, line: Mapping[str, Any], step: int) -> None:
        session = self._session()
        for name in NUMBERS:
            self._columns[name].append(
                number(line.get(name)) if name != "loss" else self._loss(line)
            )
        self._columns["mono"].append(number(line.get("mono")))
        self._columns["paused_s"].append(
            sum(v for v in numbers(line.get("paused")).values() if v > 0)
        )
        waits = numbers(line.get("wait_by_stage"))
        for name in waits.keys() - self._waits.keys():
            if name in STAGES:
                self._waits[name] = array("d", bytes(8 * len(self._steps)))
        for name, column in self._waits.items():
            column.append(max(0.0, waits.get(name, 0.0)))
        self._steps.append(step)
        session.end = len(self._steps)

    def _loss(self, line: Mapping[str, Any]) -> float:
        loss = loss_number(line.get("loss"))
        if loss is not None and not math.isfinite(loss):
            self._not_finite.append(len(self._steps))
            return math.nan
        return math.nan if loss is None else loss

    def _beat(self, line: Mapping[str, Any], step: int) -> None:
        session = self._session()
        self._overall(session, line)
        session.fetch = _mapping(line.get("fetch")) or session.fetch
        self._dropped = max(self._dropped, int(max(0.0, nan_to(number(line.get("dropped")), 0.0))))
        self._beats_seen += 1
        if self._beats_seen % self._beat_every:
            return
        occupancy = {
            name: number(_mapping(queue).get("occupancy"))
            for name, queue in _mapping(line.get("queues")).items()
        }
        self._beats.append(
            (step, {name: value for name, value in occupancy.items() if not math.isnan(value)})
        )
        if len(self._beats) > 4000:
            # Weeks of a beat a second: every second one is let go, and from then on half as many are kept.
            self._beats = self._beats[1::2]
            self._beat_every *= 2

    @staticmethod
    def _overall(session: Session, line: Mapping[str, Any]) -> None:
        session.stages = _mapping(line.get("stages")) or session.stages
        if isinstance(words := line.get("verdict"), str) and words:
            session.words = words

    def _event(self, line: Mapping[str, Any], ts: float, step: int, msg: str) -> None:
        if msg not in EVENTS:
            return
        if msg == "boot":
            if line.get("rotated") is True and self._sessions:
                return
            at = len(self._steps)
            self._sessions.append(Session(at, at, boot=dict(line)))
            self._health = ""
        session = self._session()
        if msg == "ready":
            session.ready = dict(line)
        elif msg == "warmup" and not line.get(
            "of"
        ):  # of the data that is trained on, not of validation
            session.warmup = dict(line)
        elif msg == "shutdown":
            session.ended = str(line.get("reason") or "no reason given")
            self._overall(session, line)
        elif msg == "health":
            status = f"{line.get('status')} {line.get('reasons')}"
            if status == self._health:
                return  # a gate that says the same every minute says it once
            self._health = status
        self._counts[msg] = self._counts.get(msg, 0) + 1
        begin, end = self._events.setdefault(msg, ([], []))
        (begin if len(begin) < MOST_EVENTS else end).append(
            Event(ts, self._rank, step, msg, dict(line))
        )
        if len(end) > 2 * MOST_EVENTS:
            del end[:MOST_EVENTS]

    def done(self, path: Path, skipped: int) -> RankRun:
        columns: dict[str, Column] = {
            name: np.asarray(column) for name, column in self._columns.items()
        }
        self._session()
        _fill_times(columns, self._sessions)
        kept = [
            event for begin, end in self._events.values() for event in (*begin, *end[-MOST_EVENTS:])
        ]
        return RankRun(
            rank=self._rank,
            path=path,
            step=np.asarray(self._steps, dtype=np.int64),
            columns=columns,
            waits={name: np.asarray(self._waits[name]) for name in STAGES if name in self._waits},
            sessions=self._sessions,
            events=sorted(kept, key=lambda event: event.ts),
            counts=self._counts,
            beats=self._beats,
            first_ts=self._first,
            last_ts=self._last,
            lines=self.lines,
            skipped=skipped,
            dropped=self._dropped,
            not_finite=np.asarray(self._not_finite, dtype=np.int64),
            earlier=self.earlier,
        )


def _fill_times(columns: dict[str, Column], sessions: Sequence[Session]) -> None:
    """A step without its time gets the time between the lines, its pauses taken out."""
    times = columns["dt_step_s"]
    times[~((times >= SHORTEST_STEP_S) & (times <= LONGEST_STEP_S))] = np.nan
    for session in sessions:
        part = slice(session.begin, session.end)
        if session.steps < 2 or not np.isnan(times[part]).any():
            continue
        between = np.diff(columns["mono"][part], prepend=np.nan) - columns["paused_s"][part]
        between[~((between >= SHORTEST_STEP_S) & (between <= LONGEST_STEP_S))] = np.nan
        times[part] = np.where(np.isnan(times[part]), between, times[part])


def number(value: Any) -> float:
    """A finite number, or NaN for whatever else stands there."""
    if type(value) is float or type(value) is int:
        return float(value) if -FAR < value < FAR else math.nan  # NaN compares as false
    return math.nan


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a mapping."""
    found = (
        {str(name): number(one) for name, one in value.items()} if isinstance(value, dict) else {}
    )
    return {name: one for name, one in found.items() if not math.isnan(one)}


def nan_to(value: float, instead: float) -> float:
    return instead if math.isnan(value) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _bare(msg: str) -> str:
    for prefix in PREFIXES:
        if msg.startswith(prefix):
            return msg.removeprefix(prefix)
    return msg

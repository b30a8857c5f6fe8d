"""A recorded or running run: the heartbeat lines of its ranks, as columns, events and beats.

The report reads a whole run with `read_run`; `LiveView` shows a run while lines are added. Both use
the same data, and `Run.analysis` determines the steady state for both.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.errors import ConfigError, SourceError
from penstock.watch import clean, count, percent, rate, seconds
from penstock.watch.attribution import band
from penstock.watch.heartbeat_reader import (
    HINT,
    Line,
    Tail,
    expand,
    kind,
    missing_ranks,
    number,
    numbers,
    step_seconds,
)
from penstock.watch.stage_timer import CHARGED, RANKS
from penstock.watch.steady_state import Floats, StepAnalysis, analyze_steps

HIDDEN = frozenset(("ts", "iso", "mono", "pid", "rank", "step", "msg", "verdict", "data_wait_pct"))
"""Fields of an event that are not part of its description."""


def describe(event: Line) -> str:
    """Return the fields of an event in one line."""
    shown = {n: v for n, v in event.items() if n not in HIDDEN and not isinstance(v, dict)}
    return clean(", ".join(f"{n} {v}" for n, v in shown.items() if v not in ("", None, [])))


@dataclass(slots=True)
class Attempt:
    """One process of a rank. A resumed run has several."""

    boot: Line = field(default_factory=dict)
    """The boot line; empty if the file begins after it."""
    start: int = 0
    """The row of the first step in the columns."""
    first_event: int = 0


@dataclass(slots=True)
class RankRun:
    """The record of one rank. A later attempt replaces the steps that it repeats."""

    rank: int
    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    events: list[Line] = field(default_factory=list)
    """All lines except `progress` and `beat`."""
    beat: Line = field(default_factory=dict)
    """The last beat of the last attempt; empty if there is none."""
    last: Line = field(default_factory=dict)
    """The last line of any kind."""
    _steps: array[int] = field(default_factory=lambda: array("q"))
    _columns: dict[str, array[float]] = field(default_factory=dict)
    _mono: float | None = None
    _analysis: StepAnalysis | None = None

    def __len__(self) -> int:
        """Return the number of recorded steps."""
        return len(self._steps)

    @property
    def attempt(self) -> Attempt:
        """The last attempt."""
        return self.attempts[-1]

    @property
    def boot(self) -> Line:
        """The boot line of the last attempt."""
        return self.attempt.boot

    @property
    def steps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of each recorded step, ascending."""
        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str, start: int = 0) -> Floats:
        """Return a field of each step from a row on; NaN where it is missing.

        Nested fields are named like `wait_by_stage/fetch`. A non-finite loss is inf. Missing values
        of `dt_step_s` are taken from the clock.
        """
        rows = range(len(self))[start:]
        values = self._columns.get(name, array("d"))[rows.start :]
        found = np.full(len(rows), np.nan)
        found[: len(values)] = values
        return found

    def waits_pct(self, start: int) -> tuple[float | None, dict[str, float]]:
        """Return the data wait from a row on in per cent of wall time, and its parts by stage."""
        waits, times = self.column("dt_fetch_s", start), self.column("dt_step_s", start)
        both = np.isfinite(waits) & np.isfinite(times)
        wall = float(times[both].sum())
        if wall <= 0:
            return None, {}
        pct = min(100.0, 100 * float(waits[both].sum()) / wall)
        sums = {s: float(np.nansum(self.column(f"wait_by_stage/{s}", start))) for s in CHARGED}
        total = sum(sums.values())
        return pct, {stage: pct * waited / total for stage, waited in sums.items() if waited}

    def latest(self, name: str) -> float | None:
        """Return the last known value of a column."""
        values = self._columns.get(name, ())
        return next((value for value in reversed(values) if not math.isnan(value)), None)

    def last_event(self, *kinds: str) -> Line:
        """Return the newest event of these kinds in the last attempt, or an empty line."""
        recent = reversed(self.events[self.attempt.first_event :])
        return next((line for line in recent if kind(line) in kinds), {})

    @property
    def ended(self) -> str | None:
        """The reason of the last attempt's shutdown; None without a shutdown line."""
        line = self.last_event("shutdown")
        return str(line.get("reason") or "no reason given") if line else None

    def add(self, line: Line) -> None:
        """Add the next line of this rank."""
        self.last = line
        if line["msg"] == "progress":
            self._progress(line)
        elif line["msg"] == "beat":
            self.beat = line
        elif line["msg"] != "boot":
            self.events.append(line)
        elif not line.get("rotated") or not (self.events or len(self)):
            self._begin(line)
            self.events.append(line)

    def analysis(self, ranks: int = 1) -> StepAnalysis:
        """Analyze the steps of the last attempt, with the tokens of `ranks` equal ranks."""
        start, found = self.attempt.start, self._analysis
        # A live view calls this twice a second, so repeat it only after one per cent more steps.
        if found is None or len(self) - start > found.steps * (1.0 if self.ended else 1.01):
            names = ("dt_step_s", "tokens", "dt_fetch_s", "compiles")
            columns = np.stack([self.column(name, start) for name in names])
            timed = columns[0] >= 0
            if not timed.any():
                return StepAnalysis(kind="not enough steps", steps=0, total_s=0.0)
            valid = np.where((columns >= 0) & (columns < 1e15), columns, np.nan)[:, timed]
            first = int(self.steps[start:][timed][0])
            found = self._analysis = analyze_steps(*valid, first_step=first)
        return found.scaled(ranks)

    def _begin(self, boot: Line) -> None:
        attempt = Attempt(boot, len(self), len(self.events))
        if not len(self) and not self.events:
            self.attempts.clear()  # remove the empty initial attempt
        self.attempts.append(attempt)
        self.beat = {}
        self._mono = self._analysis = None

    def _progress(self, line: Line) -> None:
        step = line["step"]
        if len(self) > self.attempt.start and step <= self._steps[-1]:
            self._begin({})
        if len(self) and step <= self._steps[-1]:
            self._replace_from(bisect_left(self._steps, step))
        row = len(self)
        dt = step_seconds(line, self._mono)
        values = numbers(line) | {"ts": line["ts"], "mono": line["mono"]}
        values["dt_step_s"] = math.nan if dt is None else dt
        if not math.isfinite(values.get("loss", 0.0)):
            values["loss"] = math.inf
        self._mono = line["mono"]
        for name, value in values.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (row - len(column)))
            column.append(value)
        self._steps.append(step)

    def _replace_from(self, row: int) -> None:
        """Drop the steps from a row on, which the new attempt repeats."""
        del self._steps[row:]
        for column in self._columns.values():
            del column[row:]
        for attempt in self.attempts:
            attempt.start = min(attempt.start, row)
        if row == 0:  # a new run in the file of an old one
            del self.events[: self.attempt.first_event]
            self.attempts = [Attempt(self.boot)]


@dataclass(slots=True)
class Run:
    """All ranks of a run."""

    ranks: dict[int, RankRun] = field(default_factory=dict)
    skipped: int = 0
    """Truncated or invalid lines."""

    def add(self, line: Line) -> None:
        """Add the next line of a rank."""
        rank = line["rank"]
        if rank not in self.ranks:
            self.ranks = dict(sorted({**self.ranks, rank: RankRun(rank)}.items()))
        self.ranks[rank].add(line)

    @property
    def first(self) -> RankRun:
        """The lowest rank."""
        return next(iter(self.ranks.values()))

    @property
    def world_size(self) -> int:
        """The world size in the newest boot line, at least 1."""
        newest = max(self.ranks.values(), key=lambda rank: float(rank.boot.get("ts", 0.0)))
        size = newest.boot.get("world_size")
        return size if type(size) is int and 1 <= size < 10**7 else max(1, len(self.ranks))

    def analysis(self) -> StepAnalysis:
        """Analyze the steps of the lowest rank, with the tokens of all ranks."""
        return self.first.analysis(self.world_size)

    def missing(self) -> str:
        """Describe which ranks left no heartbeat; empty if none is missing."""
        return missing_ranks(self.world_size, self.ranks)


def read_run(patterns: Sequence[str | os.PathLike[str]]) -> Run:
    """Read the run whose heartbeats are in these files, globs or folders."""
    run = Run()
    files: dict[int, Path] = {}
    if absent := [pattern for pattern in patterns if not expand([pattern])]:
        raise SourceError(f"{absent[0]}: no heartbeat there. {HINT}")
    for path in expand(patterns):
        tail = Tail(path)
        for line in tail.poll(end=True):
            rank = line["rank"]
            if files.setdefault(rank, path) != path:
                raise ConfigError(f"{files[rank]} and {path} are both of rank {rank}: name one run")
            run.add(line)
        run.skipped += tail.skipped
    if not run.ranks:
        raise SourceError(f"no heartbeat line in {', '.join(map(str, patterns))}")
    return run


# The live view

STALE_S = 10.0
"""A rank without a line for this long is stale: a living process writes one every second."""
LOST_S = 300.0
"""A rank that is stale for this long counts as lost."""
LONG_S = 5.0
"""Show a wait or a step in progress after this time."""
EVENTS_SHOWN = 12
COLUMNS = ("rank", "step", "loss", "tokens/s", "data wait", "queue", "last line", "state")
COLORS = {"excellent": "green", "good": "green", "fair": "yellow", "poor": "red"}
BAD = frozenset(("loader_error", "stall", "fallback", "save_failed", "eval_skipped"))


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at a point in time."""

    run: RankRun
    now: float
    steady: bool

    @property
    def age_s(self) -> float:
        return max(0.0, self.now - float(self.run.last["ts"]))

    @property
    def stale(self) -> bool:
        return self.run.ended is None and self.age_s > STALE_S

    @property
    def beat(self) -> Line:
        """The last beat; empty if a step has finished since."""
        beat = self.run.beat
        return beat if beat and beat["step"] >= self.run.last["step"] else {}

    @property
    def waiting(self) -> tuple[float, str]:
        """The duration and the cause of the current wait in `next()`."""
        found = self.beat.get("waiting") or {"for_s": 0.0, "stage": "", "where": ""}
        return found["for_s"], clean(f"{found['stage']} {found['where']}")

    @property
    def trouble(self) -> tuple[bool, bool, float, float]:
        """The sort key that puts ranks that delay others first."""
        pct, by_stage = self.run.waits_pct(-20)
        own = round((pct or 0.0) - by_stage.get(RANKS, 0.0))
        return self.run.ended is not None, not self.stale, -self.waiting[0], -own

    def state(self) -> str:
        """Return the state of the rank in a few words."""
        fallback, health = self.run.last_event("fallback"), self.run.last_event("health")
        since = number(self.beat.get("since_step_s")) or 0.0
        if self.run.ended is not None:
            return clean(f"ended: {self.run.ended}")
        if self.stale:
            return "stale"
        if self.waiting[0] >= 1.0:
            return f"waiting for {self.waiting[1]}"
        if fallback.get("to") == "synthetic":
            return "synthetic data"
        if health.get("status") in ("warn", "fail"):
            return f"health: {health['status']}"
        if since >= LONG_S:
            return f"no step for {seconds(since)}"
        return "steady" if self.steady else "warming up"

    def verdict(self) -> str:
        """Return one line on the cause of the rank's waits."""
        if self.stale:
            return f"rank {self.run.rank} has written nothing for {seconds(self.age_s)}"
        waited, what = self.waiting
        if waited > 0:
            return f"waiting for {what} for {seconds(waited)}"
        recent = self.run.beat | self.run.last
        pct = self.run.latest("data_wait_pct")
        known = "no step yet" if pct is None else f"data wait {percent(pct)} ({band(pct / 100)})"
        return clean(recent.get("verdict", known))

    def cells(self) -> tuple[str, ...]:
        """Return the rank's row of the table: one cell for each of COLUMNS."""
        names = ("loss", "data_wait_pct", "queue_depth", "queue_capacity")
        loss, wait, depth, capacity = map(self.run.latest, names)
        room = "" if capacity is None else f"/{capacity:.0f}"
        return (
            str(self.run.rank),
            str(self.run.last["step"]),
            "?" if loss is None else f"{loss:.4f}" if loss < float("inf") else "not finite",
            count(self.run.latest("toks_per_s")),
            "?" if wait is None else f"{percent(wait)} {band(wait / 100)}",
            "?" if depth is None else f"{depth:.0f}{room}",
            "ended" if self.run.ended is not None else f"{seconds(round(self.age_s, 1))} ago",
            self.state(),
        )


@dataclass(slots=True)
class LiveView:
    """Shows a run on a terminal or in a log."""

    run: Run
    total_tokens: float | None = None
    """The tokens at which the run ends, if not in its settings."""
    rank: int | None = None
    """The rank whose verdict is shown; None for the slowest."""
    notes: list[str] = field(default_factory=list)
    _logged: set[tuple[Any, ...]] = field(default_factory=set)

    def ranks(self, now: float) -> list[RankView]:
        """Return the ranks, those that delay others first."""
        steady = bool(self.run.ranks) and self.run.analysis().onset is not None
        views = [RankView(rank, now, steady) for rank in self.run.ranks.values()]
        return sorted(views, key=lambda view: view.trouble)

    def over(self, now: float) -> bool:
        """Return True if every rank has ended or is lost."""
        going = [v for v in self.ranks(now) if v.run.ended is None and v.age_s <= LOST_S]
        return bool(self.run.ranks) and not going

    def chosen(self, now: float) -> RankView:
        """Return the chosen rank, or the slowest."""
        views = self.ranks(now)
        return next((view for view in views if view.run.rank == self.rank), views[0])

    def progress(self) -> tuple[float | None, str]:
        """Return the finished share, and a text with steps, time left, tokens and rate."""
        first, world = self.run.first, self.run.world_size
        step = int(first.steps[-1]) if len(first) else 0
        per_step = world * (first.latest("tokens") or 0.0)
        last_step = number(first.boot.get("settings", {}).get("max_steps"))
        if self.total_tokens and per_step:
            last_step = self.total_tokens / per_step
        times = first.column("dt_step_s", -50)
        times = times[np.isfinite(times)]
        words = [f"step {step:,}" + (f" of {last_step:,.0f}" if last_step else "")]
        if last_step and len(times) and first.ended is None:
            words.append(f"{seconds(max(0.0, last_step - step) * float(times.mean()))} left")
        if per_step:
            words.append(f"{count(step * per_step)} tokens")
        if speed := sum(rank.latest("toks_per_s") or 0.0 for rank in self.run.ranks.values()):
            words.append(rate(speed))
        return min(1.0, step / last_step) if last_step else None, ", ".join(words)

    def events(self) -> list[tuple[float, str, bool]]:
        """Return events as (time, text, bad), oldest first, merging those that ranks share."""
        same: dict[tuple[int, str], list[Line]] = {}
        for rank in self.run.ranks.values():
            for line in rank.events[-100:]:
                text = f"{clean(kind(line))}: {describe(line)}"
                same.setdefault((int(line["ts"] / 10), text), []).append(line)
        found = []
        for (_, text), (line, *more) in same.items():
            bad = kind(line) in BAD or line.get("status") in ("warn", "fail")
            who = f"{len(more) + 1} ranks" if more else f"rank {line['rank']}"
            found.append((float(line["ts"]), f"{who}  {text}", bad))
        return sorted(found)

    def title(self) -> str:
        """Return a title: ranks, hosts and the steady state."""
        here, world = len(self.run.ranks), self.run.world_size
        hosts = sorted({clean(rank.boot.get("host") or "?") for rank in self.run.ranks.values()})
        ranks = f"{here} of {world} ranks" if here < world else f"{here} rank{'s' * (here != 1)}"
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        return f"{ranks} on {where} · {self.run.analysis().headline()}"

    def plain(self, now: float) -> list[str]:
        """Return lines for a log: new events, each rank, the progress and the verdict."""
        if not self.run.ranks:
            return []
        new = [event for event in self.events() if event[:2] not in self._logged]
        recent = new if self._logged else new[-5:]
        self._logged |= {event[:2] for event in new}
        lines = [f"{_clock(ts)}  {text}" for ts, text, _ in recent]
        for view in sorted(self.ranks(now), key=lambda view: view.run.rank):
            cells = zip(COLUMNS, view.cells(), strict=True)
            lines.append("  ".join(f"{name} {cell}" for name, cell in cells))
        missing = [self.run.missing()] if self.run.missing() else []
        verdict = f"verdict: {self.chosen(now).verdict()}"
        return [*lines, *missing, f"run: {self.title()}; {self.progress()[1]}", verdict]

    def screen(self, now: float, width: int, height: int) -> Group:
        """Return the screen for rich. A small terminal cuts off the oldest events, at the end."""
        head = _text("penstock", "bold")
        notes = (_text(clean(note), "yellow") for note in self.notes[:3])
        if not self.run.ranks:
            return Group(head, *notes)
        head.append(f" · {self.title()} · {_clock(now)}")
        share, words = self.progress()
        bar = "" if share is None else f"{'█' * round(20 * share):░<20} "
        views, chosen = self.ranks(now), self.chosen(now)
        parts = [head, *notes, _text(f"{bar}{words}", "cyan"), _text(chosen.verdict(), "bold")]
        shown = views[: max(1, height // 2 - len(parts))]
        rows = [view.cells() for view in sorted(shown, key=lambda view: view.run.rank)]
        keep = range(len(COLUMNS)) if width >= 76 else (0, 1, 3, 4, 7)
        ranks = _table([COLUMNS[i] for i in keep], [[row[i] for i in keep] for row in rows])
        events = [_text(f"{_clock(ts)}  {text}", "red" * bad) for ts, text, bad in self.events()]
        rest = len(views) - len(shown)
        more = [_text(f"and {rest} more ranks", "dim")] if rest else []
        return Group(*parts, "", ranks, *more, "", *events[: -EVENTS_SHOWN - 1 : -1])


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        bad = row[-1].startswith(("stale", "waiting", "synthetic", "health"))
        styles = (COLORS.get(cell.split()[-1], "") for cell in row[:-1])
        table.add_row(*map(Text, row, (*styles, "red" if bad else "")))
    return table


def _text(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _clock(ts: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(ts))

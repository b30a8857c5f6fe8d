"""A recorded or running run: the heartbeat lines of its ranks, as columns, events and beats.

The report reads a whole run with `read_run`; the live view adds lines as they are written. Both then
have the same data, and `Run.analysis` is the one answer to where the steady state begins.
"""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError, SourceError
from penstock.watch.heartbeat_reader import HINT, expand, missing_ranks, read_heartbeat
from penstock.watch.line import Line, kind, numbers, step_seconds
from penstock.watch.stage_timer import CHARGED
from penstock.watch.steady_state import Floats, StepAnalysis, analyze_steps
from penstock.watch.units import clean

MAX_BEATS = 1000
"""Beats kept; beyond that every second one of the older ones is dropped."""
HIDDEN = frozenset(("ts", "iso", "mono", "pid", "rank", "step", "msg", "verdict", "data_wait_pct"))
"""Fields of an event that are shown elsewhere."""


def describe(event: Line) -> str:
    """Return the fields of an event in one line."""
    shown = {n: v for n, v in event.items() if n not in HIDDEN and not isinstance(v, dict)}
    return clean(", ".join(f"{n} {v}" for n, v in shown.items() if v not in ("", None, [])))


@dataclass(slots=True)
class Attempt:
    """One process of a run. A resumed run has several."""

    boot: Line = field(default_factory=dict)
    """Its boot line; empty if the file begins later."""
    start: int = 0
    """The row of its first step in the columns."""
    first_event: int = 0


@dataclass(slots=True)
class RankRun:
    """What one rank recorded. Steps that a later attempt repeated are replaced by it."""

    rank: int
    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    events: list[Line] = field(default_factory=list)
    """All lines but `progress` and `beat`, as written."""
    beats: list[Line] = field(default_factory=list)
    """Beats of the last attempt, thinned where there are many."""
    last: Line = field(default_factory=dict)
    """The last line of any kind."""
    earlier_runs: int = 0
    """Runs that were written to the same file before, and are left out."""
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
        """Return a number of each step from a row on, NaN where it is missing.

        Nested fields are named like `wait_by_stage/fetch`. A loss that is not finite is inf.
        `dt_step_s` is completed from the clock where it is missing.
        """
        rows = range(len(self))[start:]
        values = self._columns.get(name, array("d"))[rows.start :]
        found = np.full(len(rows), np.nan)
        found[: len(values)] = values
        return found

    def waits_pct(self, start: int) -> tuple[float | None, dict[str, float]]:
        """Return data wait from a row on, in per cent of wall time, and its parts by stage."""
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
        """Why the last attempt ended, if it said so."""
        line = self.last_event("shutdown")
        return str(line.get("reason") or "no reason given") if line else None

    def add(self, line: Line) -> None:
        """Add the next line of this rank."""
        self.last = line
        if line["msg"] == "progress":
            self._progress(line)
        elif line["msg"] == "beat":
            self.beats.append(line)
            if len(self.beats) > MAX_BEATS:
                del self.beats[: -MAX_BEATS // 10 : 2]
        elif line["msg"] != "boot":
            self.events.append(line)
        elif not line.get("rotated") or not (self.events or len(self)):
            self._begin(line)
            self.events.append(line)

    def analysis(self, ranks: int = 1) -> StepAnalysis:
        """Analyze the steps of the last attempt; `ranks` of the same rate run beside each other."""
        start, found = self.attempt.start, self._analysis
        # A live view asks twice a second: of a long run only after one per cent more steps.
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
            self.attempts.clear()  # the one that has no line
        self.attempts.append(attempt)
        self.beats.clear()
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
        """Drop the steps from a row on: the new attempt repeats them."""
        del self._steps[row:]
        for column in self._columns.values():
            del column[row:]
        for attempt in self.attempts:
            attempt.start = min(attempt.start, row)
        if row == 0:  # a new run, in the file of an old one
            self.earlier_runs += len(self.attempts) - 1
            del self.events[: self.attempt.first_event]
            self.attempts = [Attempt(self.boot)]


@dataclass(slots=True)
class Run:
    """All ranks of a run."""

    ranks: dict[int, RankRun] = field(default_factory=dict)
    skipped: int = 0
    """Lines that were cut off or not a heartbeat's."""

    def add(self, line: Line) -> None:
        """Add a line, after the earlier ones of its rank."""
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
        """The number of ranks by the newest boot line, at least 1."""
        newest = max(self.ranks.values(), key=lambda rank: float(rank.boot.get("ts", 0.0)))
        size = newest.boot.get("world_size")
        return size if type(size) is int and 1 <= size < 10**7 else max(1, len(self.ranks))

    def analysis(self) -> StepAnalysis:
        """Analyze the run's steps: those of the lowest rank, tokens of all ranks."""
        return self.first.analysis(self.world_size)

    def missing(self) -> str:
        """Say which ranks left no heartbeat; empty if none is missing."""
        return missing_ranks(self.world_size, self.ranks)


def read_run(patterns: Sequence[str | os.PathLike[str]]) -> Run:
    """Read the run whose heartbeats are in these files, globs or folders."""
    run = Run()
    files: dict[int, Path] = {}
    if absent := [pattern for pattern in patterns if not expand([pattern])]:
        raise SourceError(f"{absent[0]}: no heartbeat there. {HINT}")
    for path in expand(patterns):
        lines = read_heartbeat(path)
        run.skipped += lines.skipped
        for line in lines:
            rank = line["rank"]
            if files.setdefault(rank, path) != path:
                raise ConfigError(f"{files[rank]} and {path} are both of rank {rank}: read one run")
            run.add(line)
    if not run.ranks:
        raise SourceError(f"no heartbeat line in {', '.join(map(str, patterns))}")
    return run

"""Which part of a mixture each row comes from.

In:    weights, and from which global row on they hold.
Out:   for each global row the number of a part; how many rows each part has had.
Where: the producer thread.
State: the counts since the weights last changed, an integer for each part; a resume goes on with them.
Cost:  about a microsecond a row of Python, over all ranks' rows.

The rule is Tijdeman's for the chairman assignment problem (Discrete Mathematics 32, 1980): among the
parts that are owed a row, the one whose debt falls due first. It keeps every part within one row of
its share, at every moment, however many parts there are; always taking the largest debt does not.
A round of lanes, one row of each, shares out that many choices: see `turn`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError

I64 = np.ndarray[Any, np.dtype[np.int64]]

UNIT = 1 << 40
"""Weights are counted in parts of this, so that shares hold to a row over any run."""
BLOCK = 256

Schedule = tuple[tuple[int, tuple[int, ...]], ...]
"""From which global row on which weights hold, in ascending order, beginning with row 0. Where there are
several lanes, weights change between two rounds of them."""


def whole_weights(weights: Mapping[str, float], names: Sequence[str]) -> tuple[int, ...]:
    """Weights as integers that add up to `UNIT`, in the order of the names."""
    unknown, missing = (
        [n for n in weights if n not in names],
        [n for n in names if n not in weights],
    )
    if unknown or missing:
        raise ConfigError(
            f"weights name {', '.join(map(repr, weights)) or 'nothing'}, and the mixture has {', '.join(map(repr, names))}: "
            "give each part its weight, 0 to leave it out"
        )
    for name, weight in weights.items():
        fits = isinstance(weight, int | float | np.integer | np.floating) and not isinstance(
            weight, bool
        )
        if not fits or not 0 <= weight < float("inf"):
            raise ConfigError(f"the weight of {name!r} is {weight!r}: needs a number, at least 0")
    total = float(sum(float(weight) for weight in weights.values()))
    if not 0 < total < float("inf"):
        raise ConfigError(
            f"the weights add up to {total}: one part at least needs some, and none too much"
        )
    whole = [round(UNIT * (float(weights[name]) / total)) for name in names]
    largest = max(range(len(whole)), key=whole.__getitem__)
    whole[largest] += UNIT - sum(whole)
    return tuple(whole)


def turn(row: int | I64, lane: int, lanes: int) -> Any:
    """Which choice the `row`-th row of a lane gets, of all that are made for the lanes' `row`-th rows.

    It moves on by the golden section, so that no pattern of choices falls in step with it: each lane
    gets its share of every part, and so all of a part's data is read.
    """
    with np.errstate(over="ignore"):
        step = (np.asarray(row).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        moved = (step * np.uint64(lanes)) >> np.uint64(32)
    return row * lanes + (lane + moved.astype(np.int64)) % lanes


def restarted(schedule: Schedule, row: int, lanes: int) -> Schedule:
    """The weights of a pass that begins after `row` rows of the one before. Planned changes stay as far away as they were, or
    wait for the next round of lanes."""
    held = [(0, weights) for begin, weights in schedule if begin <= row][-1:]
    later = {
        -(-(begin - row) // lanes) * lanes: weights for begin, weights in schedule if begin > row
    }
    return (*held, *later.items())


class Choices(NamedTuple):
    """The parts of some global rows, and what each part had had before."""

    start: int
    counts: tuple[int, ...]
    parts: np.ndarray[Any, np.dtype[np.int16]]

    def counts_at(self, row: int) -> tuple[int, ...]:
        """Rows of each part since the weights last changed, before a row of these."""
        so_far = np.bincount(self.parts[: row - self.start], minlength=len(self.counts))
        return tuple((np.array(self.counts) + so_far).tolist())


class Told(NamedTuple):
    """What has been chosen, for whoever wants to know the counts later."""

    schedule: Schedule
    blocks: tuple[Choices, ...]

    def counts(self, row: int) -> tuple[int, ...]:
        """Rows of each part since the weights last changed, before a row."""
        block = self.blocks[bisect_right([block.start for block in self.blocks], row) - 1]
        # Where the weights change with this very row, what came before counts no more.
        changed = any(begin == row for begin, _ in self.schedule)
        return (0,) * len(block.counts) if changed else block.counts_at(row)


class Chooser:
    """Chooses parts for global rows, from one row on."""

    def __init__(self, schedule: Schedule, row: int, counts: Sequence[int]) -> None:
        self._schedule = schedule
        self._rows = [begin for begin, _ in schedule]
        self._row = row
        self._counts = list(counts)
        self._blocks: list[Choices] = []
        self._needed: dict[int, int] = {}

    def at(
        self, rows: I64, who: int, first: int | None = None
    ) -> np.ndarray[Any, np.dtype[np.int16]]:
        """The parts of some rows, in ascending order. `who` will not ask for rows before the first of them again."""
        self._extend(int(rows[-1]) + 1)
        self._needed[who] = int(rows[0]) if first is None else first
        begin = self._blocks[0].start
        if len(self._blocks) > 1:
            parts = np.concatenate([block.parts for block in self._blocks])
        else:
            parts = self._blocks[0].parts
        return parts[rows - begin]

    def told(self, last: int) -> Told:
        """What can later tell the counts at any row up to `last` that was not forgotten."""
        self._extend(last + 1)
        return Told(self._schedule, tuple(self._blocks))

    def forget(self, everybody: int) -> None:
        """Let go of rows that none of so many lanes will ask for again."""
        if len(self._needed) == everybody:
            least = min(self._needed.values())
            while len(self._blocks) > 1 and self._blocks[1].start <= least:
                self._blocks.pop(0)

    def _extend(self, until: int) -> None:
        while self._row < until:
            number = bisect_right(self._rows, self._row) - 1
            begin, weights = self._schedule[number]
            if self._row == begin:
                self._counts = [0] * len(weights)
            end = self._rows[number + 1] if number + 1 < len(self._rows) else self._row + BLOCK
            self._choose(begin, weights, min(end, self._row + BLOCK))

    def _choose(self, begin: int, weights: tuple[int, ...], end: int) -> None:
        """Choose for the rows up to `end`, within which the weights do not change."""
        counts = self._counts
        block = Choices(self._row, tuple(counts), np.empty(end - self._row, np.int16))
        active = [i for i, weight in enumerate(weights) if weight]
        slack = UNIT // max(1, 2 * len(active) - 2)
        # What each part is owed, in units: its share of the rows so far less what it has had.
        owed = [
            weight * (self._row - begin) - UNIT * count
            for weight, count in zip(weights, counts, strict=True)
        ]
        parts = []
        for _ in range(self._row, end):
            best, due = -1, 0.0
            for i in active:
                owed[i] += weights[i]
                if owed[i] >= slack:
                    left = (UNIT - slack - owed[i]) / weights[i]
                    if best < 0 or left < due:
                        best, due = i, left
            if best < 0:  # rounding of the slack: the largest debt is within a hair of it
                best = max(active, key=owed.__getitem__)
            owed[best] -= UNIT
            counts[best] += 1
            parts.append(best)
        block.parts[:] = parts
        self._blocks.append(block)
        self._row = end

"""Choose the part of a mixture that each row comes from.

Uses Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32, 1980): among the
parts that are owed a row, choose the one with the earliest deadline. This keeps every part within
one row of its share at all times, for any number of parts; choosing the largest debt does not.
Costs about a microsecond of Python per global row. The only state is the number of rows of each
part since the weights changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.shuffle import I64

UNIT = 1 << 40
"""The sum of the integer weights, which keep shares exact over any run."""
BLOCK = 256
"""Rows to choose at once."""

Schedule = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs of a global row and the weights from that row on, ascending. Weights change only between
two rounds of lanes."""
Parts = np.ndarray[Any, np.dtype[np.int16]]


def whole_weights(weights: Mapping[str, float], names: Sequence[str]) -> tuple[int, ...]:
    """Return weights as integers that add up to `UNIT`, in the order of the names."""
    if set(weights) != set(names):
        raise ConfigError(
            f"weights name {', '.join(map(repr, weights)) or 'nothing'}, but the mixture has "
            f"{', '.join(map(repr, names))}: give each part a weight, 0 to leave it out"
        )
    for name, weight in weights.items():
        number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
        if not number or not 0 <= weight < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a number ≥ 0, not {weight!r}")
    total = float(sum(float(weight) for weight in weights.values()))
    if not 0 < total < float("inf"):
        raise ConfigError(
            f"the weights add up to {total}: at least one part needs a weight above 0"
        )
    whole = [round(UNIT * (float(weights[name]) / total)) for name in names]
    largest = max(range(len(whole)), key=whole.__getitem__)
    whole[largest] += UNIT - sum(whole)
    return tuple(whole)


def choice_of(rows: I64, lane: int, lanes: int) -> I64:
    """Map a lane's row numbers to indices of global choices within their rounds.

    A round is one row of each lane. The assignment rotates by the golden section, so that it does
    not align with a periodic pattern of choices, and each lane gets its share of every part.
    """
    with np.errstate(over="ignore"):
        step = (rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        rotation = ((step * np.uint64(lanes)) >> np.uint64(32)).astype(np.int64)
    return rows * lanes + (lane + rotation) % lanes


def next_pass(schedule: Schedule, row: int, lanes: int) -> Schedule:
    """Return the weights of a pass that begins after `row` rows, with planned changes shifted."""
    held = [(0, weights) for begin, weights in schedule if begin <= row][-1:]
    later = {
        -(-(begin - row) // lanes) * lanes: weights for begin, weights in schedule if begin > row
    }
    return (*held, *later.items())


class Block(NamedTuple):
    """The parts of consecutive global rows, and the counts before them."""

    start: int
    counts: tuple[int, ...]
    parts: Parts


class Chooser:
    """Chooses parts for global rows, starting at one row. Shared by the lanes of a rank."""

    def __init__(self, schedule: Schedule, row: int, counts: Sequence[int]) -> None:
        self._schedule = schedule
        self._changes = [begin for begin, _ in schedule]
        self._row, self._counts = row, list(counts)
        self._blocks: list[Block] = []

    def parts(self, rows: I64) -> Parts:
        """Return the parts of global rows."""
        self._extend(int(rows.max()) + 1)
        every = np.concatenate([block.parts for block in self._blocks])
        return every[rows - self._blocks[0].start]

    def counts(self, row: int) -> tuple[int, ...]:
        """Return the rows of each part since the weights changed, before a global row."""
        if row in self._changes:
            return (0,) * len(self._counts)
        self._extend(row + 1)
        number = bisect_right([block.start for block in self._blocks], row) - 1
        start, counts, parts = self._blocks[number]
        so_far = np.bincount(parts[: row - start], minlength=len(counts))
        return tuple((np.array(counts) + so_far).tolist())

    def forget(self, row: int) -> None:
        """Drop the choices before a row, which no lane needs any more."""
        while len(self._blocks) > 1 and self._blocks[1].start <= row:
            self._blocks.pop(0)

    def _extend(self, until: int) -> None:
        while self._row < until:
            number = bisect_right(self._changes, self._row) - 1
            begin, weights = self._schedule[number]
            if self._row == begin:
                self._counts = [0] * len(weights)
            later = self._changes[number + 1 : number + 2]
            self._choose(begin, weights, min([*later, self._row + BLOCK]))

    def _choose(self, begin: int, weights: tuple[int, ...], end: int) -> None:
        """Choose parts for the rows up to `end`, between which the weights do not change."""
        counts, first = self._counts, self._row
        before = tuple(counts)
        active = [i for i, weight in enumerate(weights) if weight]
        slack = UNIT // max(1, 2 * len(active) - 2)
        # The debt to each part: its share of the rows so far minus its rows, in units.
        owed = [w * (first - begin) - UNIT * n for w, n in zip(weights, counts, strict=True)]
        parts = []
        for _ in range(first, end):
            best, due = -1, 0.0
            for i in active:
                owed[i] += weights[i]
                if owed[i] >= slack:
                    left = (UNIT - slack - owed[i]) / weights[i]
                    if best < 0 or left < due:
                        best, due = i, left
            if best < 0:  # the slack was rounded, so the largest debt is just below it
                best = max(active, key=owed.__getitem__)
            owed[best] -= UNIT
            counts[best] += 1
            parts.append(best)
        self._blocks.append(Block(first, before, np.array(parts, np.int16)))
        self._row = end

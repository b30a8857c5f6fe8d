"""Single slow steps, and whether they come at regular intervals.

In:    each step's time over the level around it.
Out:   groups of steps: one for each regular interval (checkpoint, evaluation, garbage collection), one for the rest.
Where: the caller's thread.
State: none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.watch.steps.input import Floats

LEAST_SPIKE = 0.3
"""A spike takes at least 30 % longer than the steps around it."""
SPIKE_SPREADS = 6.0
"""And stands out by so many times the distance from the median to the 85th percentile. The 85th, because a fifth of
slow steps is a second mode of the run and not an exception."""
COMMON = 0.125
"""Where more than one step in eight stands out, none does."""
COVERAGE = 0.8
"""Share of the expected places that a regular interval must hit between its first and last spike,"""
SURE = 6
"""and all of them while there are fewer than so many spikes: four can look regular by chance."""
MOST_TRAINS = 3


@dataclass(frozen=True, slots=True)
class SpikeGroup:
    """Slow steps that belong together."""

    steps: tuple[int, ...]
    period: int | None
    """Steps from one to the next, or None where they come irregularly."""
    cost_s: float
    """What they took more than ordinary steps, together."""

    def as_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "period": self.period, "cost_s": self.cost_s}


def slow_steps(ratio: Floats) -> NDArray[np.intp]:
    """The steps that stand out, given each step's time over the level around it."""
    middle, upper = np.quantile(ratio, (0.5, 0.85))
    found = np.flatnonzero(
        ratio > middle + max(LEAST_SPIKE * middle, SPIKE_SPREADS * (upper - middle))
    )
    return found if len(found) <= COMMON * len(ratio) else found[:0]


def trains(steps: NDArray[np.intp]) -> list[tuple[float, float, NDArray[np.intp]]]:
    """Regular intervals among the steps: (first place, period, the steps that keep it), the longest first."""
    found: list[tuple[float, float, NDArray[np.intp]]] = []
    rest = steps
    while len(found) < MOST_TRAINS:
        # A spike of several steps in a row begins once.
        begins = rest[np.diff(rest, prepend=-2) > 1]
        train = _train(begins)
        if train is None:
            break
        first, period, kept = train
        # The steps that continue a spike go with it.
        with_next = rest[np.isin(rest, kept) | (_distance(rest, first, period) <= _slack(period))]
        found.append((first, period, with_next))
        rest = rest[~np.isin(rest, with_next)]
    return found


def at_places(steps: NDArray[np.intp], regular: list[tuple[float, float]]) -> NDArray[np.bool_]:
    """Which of the steps are at a place of one of the trains (first place, period), also before its first spike."""
    found = np.zeros(len(steps), dtype=bool)
    for first, period in regular:
        found |= _distance(steps, first, period) <= _slack(period)
    return found


def _slack(period: float) -> float:
    """By the clock, or after a step that was skipped, it is not always the same number of steps."""
    return max(1.0, 0.01 * period)


def _distance(steps: NDArray[np.intp], first: float, period: float) -> Floats:
    away: Floats = np.abs(steps - first - period * np.round((steps - first) / period))
    return away


def _train(begins: NDArray[np.intp]) -> tuple[float, float, NDArray[np.intp]] | None:
    if len(begins) < 3:
        return None
    gaps = Counter(np.diff(begins).tolist())
    gaps.update((begins[2:] - begins[:-2]).tolist())
    best: tuple[float, float, NDArray[np.intp]] | None = None
    for gap, _ in gaps.most_common(8):
        if gap < 3:
            continue
        train = _fit(begins, gap)
        if train is not None and (best is None or len(train[2]) > len(best[2])):
            best = train
    return best


def _fit(begins: NDArray[np.intp], gap: int) -> tuple[float, float, NDArray[np.intp]] | None:
    """The train of about this period that most of the spikes keep."""
    # Start from the phase that most share, then follow what may shift by a fraction of a step each time.
    phase = Counter((begins % gap).tolist()).most_common(1)[0][0]
    first, period = float(phase), float(gap)
    kept = begins
    for _ in range(3):
        kept = begins[_distance(begins, first, period) <= _slack(period)]
        if len(kept) < 3:
            return None
        turns = np.round((kept - first) / period)
        if np.ptp(turns) < 2:
            return None
        period, first = np.polyfit(turns, kept, 1)
    turns = np.unique(np.round((kept - first) / period))
    exact = np.all(np.diff(kept) == gap)
    enough = len(turns) >= 4 or (len(turns) == 3 and exact)
    needed = (COVERAGE if len(turns) >= SURE else 1.0) * (np.ptp(turns) + 1)
    return (first, float(period), kept) if enough and len(turns) >= needed else None


def groups(steps: NDArray[np.intp], excess_s: Floats) -> tuple[SpikeGroup, ...]:
    """The steps by regular interval, and the rest. `excess_s` is by step, for all steps."""
    made = []
    rest = steps
    for _, period, kept in trains(steps):
        made.append(SpikeGroup(tuple(kept.tolist()), round(period), float(excess_s[kept].sum())))
        rest = rest[~np.isin(rest, kept)]
    if len(rest):
        made.append(SpikeGroup(tuple(rest.tolist()), None, float(excess_s[rest].sum())))
    return tuple(made)

"""Long columns made short enough for a page, without losing what stands out.

In:    a column with its steps, and the sessions it is made of.
Out:   at most so many points: the smallest and the largest of each stretch, so that a single slow step among
       200,000 is still drawn; or sums over stretches, for shares that must add up.
Where: the thread that makes a report.
State: none.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.watch.page.run import Column, RankRun, Session

POINTS = 1600
"""Of one line. More than a screen has pixels costs bytes and shows nothing."""
STRETCHES = 160
"""Into which a run is divided for bars and running medians."""


def thinned(
    steps: npt.NDArray[np.int64], values: Column, most: int = POINTS
) -> tuple[Column, Column]:
    """The smallest and the largest of each stretch, in the order in which they came."""
    n = len(values)
    if n <= most or most < 2:
        return steps.astype(np.float64), values
    size = -(-n // (most // 2))
    padded = np.full(-(-n // size) * size, np.nan)
    padded[:n] = values
    grid = padded.reshape(-1, size)
    missing = np.isnan(grid)
    starts = np.arange(len(grid)) * size
    low = starts + np.argmin(np.where(missing, np.inf, grid), axis=1)
    high = starts + np.argmax(np.where(missing, -np.inf, grid), axis=1)
    at = np.unique(
        np.concatenate([low, high])
    )  # a stretch without a value gives its first, which is missing
    return steps[at].astype(np.float64), values[at]


def drawn(rank: RankRun, values: Column, most: int = POINTS) -> tuple[Column, Column]:
    """A column for a line: thinned, with a gap where one session ends and the next begins."""
    total = max(1, len(values))
    xs: list[Column] = []
    ys: list[Column] = []
    for session in rank.sessions:
        if not session.steps:
            continue
        part = slice(session.begin, session.end)
        x, y = thinned(rank.step[part], values[part], max(64, most * session.steps // total))
        if xs:
            xs.append(x[:1])
            ys.append(np.array([np.nan]))
        xs.append(x)
        ys.append(y)
    empty: Column = np.empty(0)
    return (np.concatenate(xs), np.concatenate(ys)) if xs else (empty, empty)


def stretches(rank: RankRun, most: int = STRETCHES) -> list[tuple[slice, float, float]]:
    """Pieces of a run, each with its first and last step. Steps that were done again after a resume count once."""
    total = max(1, len(rank.step))
    found = []
    for session in rank.sessions:
        end = superseded(rank, session)
        n = end - session.begin
        if n <= 0:
            continue
        parts = min(n, max(1, most * n // total))
        edges = session.begin + np.linspace(0, n, parts + 1).astype(int)
        for lo, hi in pairwise(edges.tolist()):
            found.append((slice(lo, hi), float(rank.step[lo]), float(rank.step[hi - 1])))
    return found


def superseded(rank: RankRun, session: Session) -> int:
    """Where the steps of a session end that no later session did again."""
    later = [
        rank.step[other.begin]
        for other in rank.sessions
        if other.begin >= session.end and other.steps
    ]
    if not later or not session.steps:
        return session.end
    steps = rank.step[session.begin : session.end]
    again = np.flatnonzero(steps >= min(later))
    return session.begin + int(again[0]) if len(again) else session.end


def medians(
    rank: RankRun, values: Column, most: int = STRETCHES
) -> tuple[list[float], list[float]]:
    """The median of each stretch, at its middle."""
    x, y = [], []
    for part, first, last in stretches(rank, most):
        known = values[part][~np.isnan(values[part])]
        if len(known):
            x.append((first + last) / 2)
            y.append(float(np.median(known)))
    return x, y


def packed(values: Column | Sequence[float], kind: str = "f4") -> dict[str, Any]:
    """Numbers as a plot's JSON may carry them: a third of the bytes, and nothing to parse."""
    array = np.ascontiguousarray(values, dtype=np.dtype(f"<{kind}"))
    return {"dtype": kind, "bdata": base64.b64encode(array.tobytes()).decode("ascii")}

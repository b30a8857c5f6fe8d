"""The last steps of a run, and what is added up over all of them.

In:    one step after the other.
Out:   sums and percentiles over the last few hundred, kept up to date at each.
Where: the trainer's thread; others may read, a moment old.
State: the steps.
Cost:  a microsecond or two a step; a few tenths where many came together, each with its batch ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

WINDOW = 512
"""Steps over which rolling numbers are taken."""
STALE = 16
"""Percentiles are worked out anew after so many steps."""


class Step(NamedTuple):
    """One step: a call of `next`, and what the trainer did until the next one."""

    begin: float
    wait: float
    wall: float
    tokens: int
    charges: Mapping[str, float]


Kept = tuple[float, float, float, int, Mapping[str, float] | None]
"""A step as it is kept: without charges where its batch stood ready, since all of its wait is then the handing over."""


@dataclass(slots=True)
class StageTimes:
    """What a stage did, over all its threads."""

    busy_s: float = 0.0
    blocked_in_s: float = 0.0
    blocked_out_s: float = 0.0
    items: int = 0
    bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "busy_s": round(self.busy_s, 6),
            "blocked_in_s": round(self.blocked_in_s, 6),
            "blocked_out_s": round(self.blocked_out_s, 6),
            "items": self.items,
            "bytes": self.bytes,
        }


class Window:
    """The last steps, with sums that are kept and other numbers that are worked out when they are asked for."""

    def __init__(self, size: int = WINDOW) -> None:
        self._kept: deque[Kept] = deque(maxlen=size)
        self.wait = self.wall = 0.0
        self.tokens = 0
        self._added = 0
        self._sorted: tuple[int, list[float]] = (-STALE, [])
        self._by_stage: tuple[int, dict[str, float]] = (-1, {})

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def steps(self) -> list[Step]:
        """All of them, the latest last."""
        return [
            Step(begin, wait, wall, tokens, {"batch": wait} if charges is None else charges)
            for begin, wait, wall, tokens, charges in list(self._kept)
        ]

    def add(self, *steps: Kept) -> None:
        """The steps that followed."""
        kept, size = self._kept, self._kept.maxlen
        assert size is not None
        steps = steps[-size:]
        old = list(islice(kept, max(0, len(kept) + len(steps) - size)))
        kept.extend(steps)
        for those, sign in ((steps, 1), (old, -1)):
            if those:
                _, waits, walls, tokens, _ = zip(*those, strict=True)
                self.wait += sign * sum(waits)
                self.wall += sign * sum(walls)
                self.tokens += sign * sum(tokens)
        self._added += len(steps)

    @property
    def by_stage(self) -> dict[str, float]:
        """Seconds in `next`, by the stage that they are charged to."""
        if self._by_stage[0] != self._added:
            sums: dict[str, float] = {}
            added = self._added
            for step in self.steps:
                for stage, seconds in step.charges.items():
                    sums[stage] = sums.get(stage, 0.0) + seconds
            self._by_stage = (added, sums)
        return self._by_stage[1]

    def percentile(self, share: float) -> float:
        """Of the time in `next`, in seconds; of many steps it may be a few steps old."""
        added, waits = self._sorted
        if self._added - added >= (STALE if len(self) > 4 * STALE else 1):
            waits = sorted([step[1] for step in list(self._kept)])
            self._sorted = (self._added, waits)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

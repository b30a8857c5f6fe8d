"""The last steps of a run, with sums and percentiles over them.

Written by the trainer's thread; other threads may read, a moment late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

WINDOW = 512
"""Steps over which rolling numbers are taken."""
STALE = 16
"""Percentiles are computed again after this many steps."""


class Step(NamedTuple):
    """One step: a call of `next`, and what the trainer did until the next one."""

    begin: float
    wait: float
    wall: float
    tokens: int
    charges: Mapping[str, float]


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
    """The last steps, with running sums."""

    def __init__(self, size: int = WINDOW) -> None:
        self._steps: deque[Step] = deque(maxlen=size)
        self.wait = self.wall = 0.0
        self.tokens = 0
        self._added = 0
        self._sorted: tuple[int, list[float]] = (-STALE, [])
        self._by_stage: tuple[int, dict[str, float]] = (-1, {})

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> list[Step]:
        """All of them, the latest last."""
        return list(self._steps)

    def add(self, step: Step) -> None:
        """Add a step that has ended."""
        if len(self._steps) == self._steps.maxlen:
            old = self._steps[0]
            self.wait -= old.wait
            self.wall -= old.wall
            self.tokens -= old.tokens
        self._steps.append(step)
        self.wait += step.wait
        self.wall += step.wall
        self.tokens += step.tokens
        self._added += 1

    @property
    def by_stage(self) -> dict[str, float]:
        """Seconds in `next` by the stage that they are charged to."""
        if self._by_stage[0] != self._added:
            sums: dict[str, float] = {}
            added = self._added
            for step in self.steps:
                for stage, seconds in step.charges.items():
                    sums[stage] = sums.get(stage, 0.0) + seconds
            self._by_stage = (added, sums)
        return self._by_stage[1]

    def percentile(self, share: float) -> float:
        """Return a percentile of the time in `next`, in seconds. It may be a few steps old."""
        added, waits = self._sorted
        if self._added - added >= (STALE if len(self) > 4 * STALE else 1):
            waits = sorted([step.wait for step in list(self._steps)])
            self._sorted = (self._added, waits)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

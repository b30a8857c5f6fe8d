"""The last steps of a run, and what is added up over all of them.

In:    one step after the other.
Out:   sums and percentiles over the last few hundred, kept up to date at each.
Where: the trainer's thread; others may read, a moment old.
State: the steps.
Cost:  a microsecond or two a step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

WINDOW = 512
"""Steps over which rolling numbers are taken."""


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
    """The last steps, with sums and percentiles that cost little to keep."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self.steps: deque[Step] = deque()
        self._waits: list[float] = []
        self.wait = self.wall = 0.0
        self.tokens = 0
        self.by_stage: dict[str, float] = {}

    def add(self, step: Step) -> None:
        if len(self.steps) == self._size:
            old = self.steps.popleft()
            del self._waits[bisect_left(self._waits, old.wait)]
            self._change(old, -1)
        self.steps.append(step)
        insort(self._waits, step.wait)
        self._change(step, 1)

    def _change(self, step: Step, sign: int) -> None:
        self.wait += sign * step.wait
        self.wall += sign * step.wall
        self.tokens += sign * step.tokens
        for stage, seconds in step.charges.items():
            self.by_stage[stage] = max(0.0, self.by_stage.get(stage, 0.0) + sign * seconds)

    def percentile(self, share: float) -> float:
        """Of the time in `next`, in seconds."""
        waits = self._waits
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

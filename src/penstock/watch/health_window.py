"""The last steps of a run, averaged.

In:    for each step its seconds, tokens and seconds waited for data, as far as they are known.
Out:   tokens/s, data wait and the 95th percentile of a wait over the last `for_s` seconds and at least `for_steps` steps.
Where: the health gate's thread.
State: those steps, and one more: the worst of them does not count.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class Window:
    """The steps that limits are judged on."""

    def __init__(self, for_s: float, for_steps: int) -> None:
        self._for_s = for_s
        self._for_steps = for_steps
        self._steps: deque[tuple[float, float | None, float | None]] = deque()
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, dt: float, tokens: float | None, wait: float | None) -> None:
        self._steps.append((dt, tokens, wait))
        self.seconds += dt
        while (
            len(self._steps) > self._for_steps + 1
            and self.seconds - self._steps[0][0] >= self._for_s
        ):
            self.seconds -= self._steps.popleft()[0]

    def full(self) -> bool:
        return len(self._steps) > self._for_steps and self.seconds >= self._for_s

    def averages(self) -> tuple[float | None, float | None]:
        """Tokens/s and data wait in per cent, each without its worst step."""
        if not self._steps:
            return None, None
        lengths, tokens, waits = zip(*self._steps, strict=True)
        rate = share = None
        if None not in tokens:
            worst = max(range(len(lengths)), key=lengths.__getitem__) if len(lengths) > 1 else None
            rate = _ratio(tokens, lengths, worst)
        if None not in waits:
            worst = max(range(len(waits)), key=waits.__getitem__) if len(waits) > 1 else None
            share = _ratio(waits, lengths, worst)
        return rate, None if share is None else 100 * share

    def fetch_p95_ms(self) -> float | None:
        """Of the waits, without the longest."""
        waits = sorted(wait for _, _, wait in self._steps if wait is not None)
        if len(waits) > 1:
            waits.pop()
        return 1000 * waits[math.ceil(0.95 * len(waits)) - 1] if waits else None


def _ratio(above: tuple[Any, ...], below: tuple[float, ...], without: int | None) -> float | None:
    over, under = sum(above), sum(below)
    if without is not None:
        over, under = over - above[without], under - below[without]
    return over / under if under > 0 else None

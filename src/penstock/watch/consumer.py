"""What the trainer did with a loader: its calls of `next`, its steps, its pauses.

In:    when each call began and ended, and to whom its time is charged; pauses by name.
Out:   the last steps, sums since the beginning, and what has happened since the last report.
Where: the trainer's thread; others may read, a moment old.
State: those numbers. A step lasts from the call that asks for its batch to the call that asks for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.watch.window import Step, Window


@dataclass(slots=True)
class Paused:
    """Time that is not the run's, by its name."""

    total: dict[str, float] = field(default_factory=dict)
    unreported: dict[str, float] = field(default_factory=dict)
    in_step: float = 0.0
    """Since the last call of `next`."""
    last_s: float = 0.0
    """Of the last step that has ended."""
    within_s: float = 0.0
    """Between the first call and the last one."""


@dataclass(slots=True)
class Since:
    """What happened since a moment."""

    at: float
    tokens: int = 0
    wait: float = 0.0
    paused: float = 0.0
    charges: dict[str, float] = field(default_factory=dict)


def _add(into: dict[str, float], charges: Mapping[str, float]) -> dict[str, float]:
    for stage, seconds in charges.items():
        into[stage] = into.get(stage, 0.0) + seconds
    return into


def _lasted(step: Step, wall: float) -> Step:
    return Step(
        step.begin, step.wait, wall, step.tokens, step.charges
    )  # _replace takes five times as long


class Consumer:
    """Counts what one trainer takes."""

    def __init__(self) -> None:
        self.tokens_total = 0
        """Of all streams, one after the other."""
        self._since: Since | None = None
        self.reset()

    def reset(self) -> None:
        """Another stream begins."""
        self.window = Window()
        self.wait_s: dict[str, float] = {}
        """By stage, since the beginning."""
        self.steps = 0
        self.wall_s = 0.0
        self.paused = Paused()
        self.last: Step | None = None
        """The step that runs now."""
        self.finished: Step | None = None
        """The one before it."""
        self._called = False
        self._depths = 0
        # Of the calls for the batch that is being asked for: more than one if some gave up on it.
        self._tried_at: float | None = None
        self._tried_s = 0.0
        self._tried_by: Mapping[str, float] | None = None
        self._tried_paused = 0.0
        self._paused_before = 0.0
        """Pauses within the step that runs now, from before its batch was there."""

    # On the trainer's thread

    def entering(self, now: float) -> bool:
        """A call of `next` begins. Whether a step that counts among the last ones has ended with it."""
        counted = False
        if self.last is not None:
            counted = self._close_step(self.last, now)
        elif self._called:
            self.paused.within_s += self.paused.in_step
            self._tried_paused += self.paused.in_step
        self.paused.in_step = 0.0
        self._called = True
        if self._since is None:
            self._since = Since(now)
        if self._tried_at is None:
            self._tried_at, self._tried_s, self._tried_by, self._tried_paused = now, 0.0, None, 0.0
        return counted

    def _close_step(self, last: Step, now: float) -> bool:
        paused = self.paused
        wall = self._running_s(last, now)
        paused.within_s += paused.in_step
        paused.last_s = paused.in_step
        self.wall_s += wall
        first, self.finished = self.finished is None, _lasted(last, wall)
        self.last = None
        if not first:  # the time to the first batch is a number of its own
            self.window.add(self.finished)
        return not first

    def waited(self, wait: float, charges: Mapping[str, float]) -> None:
        """Some time was spent in `next`, whether it gave a batch or not."""
        _add(self.wait_s, charges)
        if self._since is not None:
            self._since.wait += wait
            _add(self._since.charges, charges)
        self._tried_s += wait
        self._tried_by = charges if self._tried_by is None else _add(dict(self._tried_by), charges)

    def took(self, tokens: int, depth: int) -> None:
        """A batch was handed out, perhaps after calls that gave up on it."""
        assert self._tried_at is not None
        self.last = Step(self._tried_at, self._tried_s, 0.0, tokens, self._tried_by or {})
        self._tried_at, self._paused_before = None, self._tried_paused
        self.steps += 1
        self.tokens_total += tokens
        self._depths += depth
        if self._since is not None:
            self._since.tokens += tokens

    def pause(self, name: str, seconds: float) -> None:
        """A pause has ended."""
        paused = self.paused
        paused.in_step += seconds
        for into in (paused.total, paused.unreported):
            into[name] = into.get(name, 0.0) + seconds
        if self._since is not None:
            self._since.paused += seconds

    def report(self, now: float) -> dict[str, Any]:
        """What happened since the last report, and over the last steps."""
        fields: dict[str, Any] = {"tokens_total": self.tokens_total}
        since = self._since
        if since is not None:
            self._since = Since(now)
            fields["tokens"] = since.tokens
            fields["dt_fetch_s"] = fields["dt_fetch_last"] = round(since.wait, 6)
            fields["dt_step_s"] = round(max(0.0, now - since.at - since.paused), 6)
            fields["wait_by_stage"] = {stage: round(s, 6) for stage, s in since.charges.items()}
        fields |= self.rolling(now)
        if self.paused.unreported:
            fields["paused"], self.paused.unreported = self.paused.unreported, {}
        return fields

    # On any thread

    def rolling(self, now: float) -> dict[str, float]:
        """Over the last steps, with the one that runs now."""
        window, last = self.window, self.last
        fields: dict[str, float] = {}
        if len(window):
            for p in (50, 95, 99):
                fields[f"fetch_p{p}_ms"] = round(1e3 * window.percentile(p / 100), 4)
        wall, wait, tokens = window.wall, window.wait, window.tokens
        if last is not None:
            wall, wait, tokens = (
                wall + self._running_s(last, now),
                wait + last.wait,
                tokens + last.tokens,
            )
        if wall > 0:
            fields["toks_per_s"] = round(tokens / wall, 3)
            fields["data_wait_pct"] = round(100 * wait / wall, 4)
        return fields

    def data_wait(self, now: float) -> float:
        """The share of the time since the beginning that was spent in `next`, with the step that runs now."""
        wall = self.wall_s + (self._running_s(self.last, now) if self.last is not None else 0.0)
        return sum(self.wait_s.values()) / wall if wall > 0 else 0.0

    def _running_s(self, last: Step, now: float) -> float:
        """How long the step that runs now has lasted."""
        return max(last.wait, now - last.begin - self.paused.in_step - self._paused_before)

    def occupancy(self, capacity: int) -> float:
        """How full the queue was on average when a batch was taken from it."""
        return self._depths / self.steps / capacity if self.steps and capacity else 0.0

    def last_s(self) -> tuple[float, float]:
        """Of the last step that has ended: what the trainer computed, and what it paused."""
        return (
            self.finished.wall - self.finished.wait if self.finished is not None else 0.0,
            self.paused.last_s,
        )

"""Where warmup ends: what the step times of a run say, afterwards and while it goes on.

In:    seconds per step, tokens per step, and what else is known of the steps.
Out:   `analyze_steps`: kind, onset, overhead, steady rate, drift, changes, spikes, causes. `SteadyWatch`: the moment when
       the steady state is reached.
Where: the caller's thread.
State: `SteadyWatch` keeps the steps since it was opened, at most MOST_KEPT of them, until the state is reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.watch.steps.analysis import BURST_GAP, LEAST_STEPS, analyze_steps
from penstock.watch.steps.input import BEFORE, COUNTERS, StepEvent, evidence_of_step, from_progress
from penstock.watch.steps.result import Cause, Change, StepAnalysis
from penstock.watch.steps.spikes import SpikeGroup
from penstock.watch.view.fields import LONGEST_STEP_S

__all__ = [
    "Cause",
    "Change",
    "SpikeGroup",
    "SteadyState",
    "SteadyWatch",
    "StepAnalysis",
    "StepEvent",
    "analyze_steps",
    "from_progress",
]

CONFIRM = 20
"""Steady steps that must have been seen. More would only delay the news, fewer take the pause between two compilations
for the steady state."""
LONGEST_CONFIRM = 45
"""Enough of them even if a burst of slow steps was among the last: a run with heavy tails always has one."""
BURST = 3.0
"""A step that takes three times as long as steady ones may be a compilation, with more to come."""
STILL_SETTLING = 0.02
"""While the later half of the steps since the supposed onset is faster by this much, a slow start is not over,"""
SETTLING_NOISE = 2.5
"""unless that is less than so many times what noise makes of two medians."""
EARLY = 128
"""Up to so many steps they are looked at often,"""
CHECK_SHARE = 8
"""later only once there are an eighth more, so that a long search costs little per step."""
MOST_KEPT = 512
"""Steps kept while searching. When it is full, the older half is dropped."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """That a run has reached its steady state, and since when."""

    onset: int
    """The step at which it began, counted from the watch's first step."""
    found_at: int
    """The number of steps after which it was found."""
    reason: str
    """Why the watch was open: "start", or what `reopen` was told."""
    analysis: StepAnalysis
    """Of the steps since then; its own steps count from there."""

    def as_event(self) -> dict[str, Any]:
        """The fields of the heartbeat's `steady_state` line; those that are not known are left out."""
        fields = {
            "at_step": self.onset,
            "overhead_s": self.analysis.overhead_s,
            "tokens_per_s": self.analysis.tokens_per_s,
            "low": self.analysis.low,
            "high": self.analysis.high,
            "kind": self.analysis.kind,
            "reason": self.reason,
        }
        return {name: value for name, value in fields.items() if value is not None}


class SteadyWatch:
    """Notices when a run that goes on has become steady. Not for several threads at once."""

    def __init__(self, *, first_step: int = 0) -> None:
        """`first_step`: what the first step is called, for a run that was resumed."""
        self._steps = first_step
        self._counters: dict[str, float] = {}
        self._reached: SteadyState | None = None
        self._open("start")

    @property
    def reached(self) -> SteadyState | None:
        """The steady state, once it is reached; None while the watch is open."""
        return self._reached

    @property
    def steps(self) -> int:
        """The number of the step that comes next."""
        return self._steps

    def step(self, dt: float, tokens: int | None = None, **evidence: Any) -> SteadyState | None:
        """Take in a step of `dt` seconds. Returns the steady state at the step that confirms it, else None.

        `evidence` is what is known of the step: `optimizer_state`, `compiles`, `alloc_retries`, `data_wait_s`, `pause`
        (seconds, or a mapping of names to seconds), `resume` (True).
        """
        seconds = self._seconds(dt)
        told = evidence_of_step(len(self._times), evidence) if evidence else []
        self._steps += 1
        self._counters.update({event.kind: event.value for event in told if event.kind in COUNTERS})
        if self._reached is not None:
            return None
        self._times.append(seconds)
        self._tokens.append(tokens)
        self._events += told
        if len(self._times) < self._next_look:
            return None
        self._reached = self._look()
        if self._reached is not None:
            self._forget()
        return self._reached

    def reopen(self, reason: str) -> None:
        """Begin anew with the next step: after a resume or a recompilation, what was steady need not be so again."""
        self._reached = None
        self._open(reason)

    def _seconds(self, dt: Any) -> float:
        try:
            seconds = float(dt)
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 <= seconds <= LONGEST_STEP_S:
            raise ConfigError(
                f"dt = {dt!r} of step {self._steps}: needs seconds, from 0 to {LONGEST_STEP_S:.0e}"
            )
        return seconds

    def _open(self, reason: str) -> None:
        self._reason = reason
        self._opened = self._steps
        self._forget()
        # What the counters are now is where growth is counted from.
        self._events += [StepEvent(BEFORE, kind, value) for kind, value in self._counters.items()]

    def _forget(self) -> None:
        self._times: list[float] = []
        self._tokens: list[int | None] = []
        self._events: list[StepEvent] = []
        self._next_look = LEAST_STEPS

    def _look(self) -> SteadyState | None:
        found = analyze_steps(self._times, self._known_tokens(), self._events)
        if found.onset is not None and self._confirmed(found):
            return SteadyState(self._opened + found.onset, self._steps, self._reason, found)
        if len(self._times) >= MOST_KEPT:
            self._drop(MOST_KEPT // 2)
        kept = len(self._times)
        self._next_look = kept + (
            max(1, kept // (4 * CHECK_SHARE)) if kept < EARLY else kept // CHECK_SHARE
        )
        return None

    def _confirmed(self, found: StepAnalysis) -> bool:
        """Whether there are enough steady steps, the last of them neither still getting faster nor broken by a burst."""
        after = np.array(self._times[found.onset :])
        if len(after) < CONFIRM or found.p50_s is None:
            return False
        early, late = np.median(after[: len(after) // 2]), np.median(after[len(after) // 2 :])
        noise = (
            float(np.median(np.abs(after - np.median(after)))) * 1.86 / math.sqrt(len(after) / 2)
        )
        if early - late > max(STILL_SETTLING * late, SETTLING_NOISE * noise):
            return False
        recent = len(self._times) - BURST_GAP
        single = [step for group in found.spikes if group.period is None for step in group.steps]
        # A first step like this is taken for ordinary only because of a later one, which may be the end of the start.
        burst = any(
            self._times[step] > BURST * found.p50_s
            for step in single
            if step >= recent or step == 0
        )
        return not burst or len(after) >= LONGEST_CONFIRM

    def _known_tokens(self) -> list[int] | None:
        known = [count for count in self._tokens if count is not None]
        return known if len(known) == len(self._times) else None

    def _drop(self, count: int) -> None:
        """Forget the oldest steps, but not what the counters were after them."""
        before = {
            event.kind: event.value
            for event in self._events
            if event.kind in COUNTERS and event.step < count
        }
        self._events = [
            *(StepEvent(BEFORE, kind, value) for kind, value in before.items()),
            *(
                StepEvent(e.step - count, e.kind, e.value, e.name)
                for e in self._events
                if e.step >= count
            ),
        ]
        del self._times[:count], self._tokens[:count]
        self._opened += count

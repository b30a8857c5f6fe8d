"""Settings that follow what is measured, while a run goes on.

In:    the knobs of a pipeline, and how many tokens the trainer got in how long.
Out:   other values of the knobs, one at a time, each kept only if the trainer got more by it.
Where: the trainer's thread, between two batches; nothing waits for it.
State: the trial under way, and the knobs that did not help.
Cost:  a comparison of two times a step; a decision every few seconds.

Nothing here can change the stream: the knobs decide when things are made, and never what.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.watch.attribution import Verdict

log = logging.getLogger("penstock")

PERIOD_S = 2.0
"""Long enough for a rate that means something, short enough to get somewhere within a minute."""
PERIOD_STEPS = 10
SETTLE_S = 1.0
"""After a change, what was made under the old settings is used up first."""
BETTER = 1.03
"""A change is kept if the trainer got so much more by it: less is noise."""
ENOUGH = 0.01
"""With less data wait than this there is nothing to gain."""
WARM_STEPS = 20
WARM_S = 2.0
WARM_CAP_S = 20.0
"""By then a run counts as warm, whatever its steps look like."""
AGAIN_S = 60.0
"""After so long a knob that did not help may be tried again: the link or the machine may have changed."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that can be changed while a run goes on."""

    name: str
    get: Callable[[], int]
    set: Callable[[int], None]
    most: Callable[[], int]
    """What memory and cores allow."""
    stages: frozenset[str]
    """The stages that it may help."""
    factor: int = 2
    """How much more is tried at once; 1 for one more."""
    wanted: Callable[[], int | None] = lambda: None
    """What the measured rate and latency ask for, where they can say."""

    def more(self) -> int:
        """The next value to try: the present one if there is no more."""
        now = self.get()
        step = now + 1 if self.factor == 1 else self.factor * max(1, now)
        return max(now, min(max(step, self.wanted() or 0), self.most()))


class Watched(Protocol):
    """Who measures. See `Telemetry`."""

    def verdict(self) -> Verdict: ...
    def event(self, msg: str, **fields: Any) -> None: ...


@dataclass(slots=True)
class _Trial:
    """A change that has to prove itself."""

    knob: Knob
    before: int
    after: int
    rate: float
    """Tokens a second before it."""


@dataclass(slots=True)
class _Measure:
    """What the trainer got since some moment."""

    begun: float
    tokens: int = 0
    steps: int = 0
    paused: float = 0.0

    def rate(self, now: float) -> float:
        return self.tokens / max(1e-9, now - self.begun - self.paused)


@dataclass(slots=True)
class Autotune:
    """Tunes one pipeline."""

    knobs: Sequence[Knob]
    watched: Watched
    _began: float | None = None
    _warm: bool = False
    _compute: deque[float] = field(default_factory=lambda: deque(maxlen=2 * PERIOD_STEPS))
    _measure: _Measure | None = None
    _settle_until: float = 0.0
    _trial: _Trial | None = None
    _failed: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, int]:
        """How the knobs stand, a trial that is not decided left out."""
        values = {knob.name: knob.get() for knob in self.knobs}
        if self._trial is not None:
            values[self._trial.knob.name] = self._trial.before
        return values

    def adopt(self, values: dict[str, int]) -> None:
        """Begin where an earlier run of the same loader ended."""
        for knob in self.knobs:
            if knob.name in values and values[knob.name] != knob.get():
                knob.set(min(values[knob.name], max(knob.get(), knob.most())))

    def step(self, now: float, tokens: int, compute_s: float, paused_s: float = 0.0) -> None:
        """A batch was handed out. `compute_s` is what the trainer did between the last two, waits left out."""
        if self._began is None:
            self._began = now
        if not self._warm:
            self._compute.append(compute_s)
            self._warm = self._is_warm(now)
            self._measure = _Measure(now) if self._warm else None
            return
        measure = self._measure
        if now < self._settle_until or measure is None:
            self._measure = _Measure(now)
            return
        measure.tokens += tokens
        measure.steps += 1
        measure.paused += paused_s
        if measure.steps >= PERIOD_STEPS and now - measure.begun - measure.paused >= PERIOD_S:
            self._decide(now, measure.rate(now))
            self._measure = _Measure(now)

    def _is_warm(self, now: float) -> bool:
        """Whether the trainer's own steps have settled: while it compiles, nothing can be learnt about data."""
        assert self._began is not None
        if now - self._began >= WARM_CAP_S:
            return True
        if now - self._began < WARM_S or len(self._compute) < WARM_STEPS:
            return False
        half = len(self._compute) // 2
        recent = list(self._compute)
        early, late = sorted(recent[:half])[half // 2], sorted(recent[half:])[half // 2]
        return max(early, late) <= 1.5 * min(early, late) + 1e-3

    def _decide(self, now: float, rate: float) -> None:
        if self._trial is not None:
            self._judge(now, rate)
            return
        verdict = self.watched.verdict()
        if verdict.data_wait < ENOUGH:
            return
        # The stage that is most to blame first; what helps none of those that matter is left alone.
        ranked = sorted(verdict.shares, key=lambda stage: -verdict.shares[stage])
        for stage in ranked:
            if verdict.shares[stage] < ENOUGH:
                break
            for knob in self.knobs:
                value = knob.more()
                if (
                    stage not in knob.stages
                    or value == knob.get()
                    or now < self._failed.get(knob.name, 0.0)
                ):
                    continue
                why = f"data wait {100 * verdict.data_wait:.0f} %, {stage} {100 * verdict.shares[stage]:.0f} %"
                self._try(knob, value, rate, why, now)
                return

    def _try(self, knob: Knob, value: int, rate: float, why: str, now: float) -> None:
        before = knob.get()
        knob.set(value)
        self._trial = _Trial(knob, before, value, rate)
        self._settle_until = now + SETTLE_S
        self._tell(knob.name, before, value, why, None)

    def _judge(self, now: float, rate: float) -> None:
        trial = self._trial
        assert trial is not None
        self._trial = None
        gain = rate / trial.rate if trial.rate > 0 else float("inf")
        why = f"{trial.rate:.0f} → {rate:.0f} tokens/s"
        if gain >= BETTER:
            self._failed.clear()  # what did not help before may help now
            self._tell(trial.knob.name, trial.before, trial.after, why, True)
            self._decide(now, rate)
            return
        trial.knob.set(trial.before)
        self._failed[trial.knob.name] = now + AGAIN_S
        self._settle_until = now + SETTLE_S
        self._tell(trial.knob.name, trial.after, trial.before, why, False)

    def _tell(self, what: str, before: int, after: int, why: str, kept: bool | None) -> None:
        word = {None: "tried", True: "kept", False: "undone"}[kept]
        log.info("autotune: %s %d → %d %s: %s", what, before, after, word, why)
        self.watched.event(
            "tune", **{"what": what, "from": before, "to": after, "why": why, "kept": kept}
        )

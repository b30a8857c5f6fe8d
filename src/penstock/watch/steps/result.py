"""What an analysis of step times says, for people and for programs.

In:    the numbers, from `analysis`.
Out:   a few plain lines, or JSON.
Where: the caller's thread.
State: frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.watch.steps.spikes import SpikeGroup

Kind = Literal["flat", "warmup", "slowdown", "no steady state", "not enough steps"]
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Change:
    """A later step from which on steps take longer, or less long, than before."""

    step: int
    before_s: float
    after_s: float

    @property
    def ratio(self) -> float:
        return self.after_s / self.before_s if self.before_s > 0 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "before_s": self.before_s, "after_s": self.after_s}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the steps from `start` up to, not including, `stop` were slow, as far as evidence shows."""

    start: int
    stop: int
    cause: str
    """`compile`, `optimizer state`, `allocator retries`, `data wait`, `pause`, `resume` or `unexplained`."""
    evidence: str
    """What supports it; empty where nothing does."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "stop": self.stop,
            "cause": self.cause,
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnalysis:
    """How the step times of a run behave. Steps are 0-based indices; numbers are None where there is no steady state."""

    kind: Kind
    steps: int
    total_s: float
    onset: int | None = None
    """The first step of the steady state, so also the number of warmup steps. 0: steady from the start."""
    steady_stop: int | None = None
    """The step before which that state ends: that of the first later change, or the number of steps."""
    overhead_s: float | None = None
    """What the steps before the onset took more than as many steady ones. Spikes that come regularly are left out."""
    overhead_pct: float | None = None
    """The same, of all of the run's time."""
    first_step_ratio: float | None = None
    """The first step over the median steady one."""
    tokens_per_s: float | None = None
    """Of the steady steps, spikes included. None also without token counts."""
    low: float | None = None
    """Its 95 % interval."""
    high: float | None = None
    p50_s: float | None = None
    """Step time of the steady steps."""
    p95_s: float | None = None
    p99_s: float | None = None
    drift_per_1000: float | None = None
    """Per cent by which steady steps get slower in 1,000 steps; None where it is no more than chance."""
    rhythm: int | None = None
    """Length of a pattern that step times repeat, such as that of gradient accumulation."""
    changes: tuple[Change, ...] = ()
    spikes: tuple[SpikeGroup, ...] = ()
    causes: tuple[Cause, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("changes", "spikes", "causes")
        }
        return plain | {
            "changes": [change.as_dict() for change in self.changes],
            "spikes": [group.as_dict() for group in self.spikes],
            "causes": [cause.as_dict() for cause in self.causes],
        }

    def summary(self, first: int = 0) -> str:
        """The same in a few lines. `first`: the number that the run itself gives to the first of these steps."""
        return "\n".join(self._lines(first))

    def __str__(self) -> str:
        return self.summary()

    def _lines(self, first: int) -> list[str]:
        if self.onset is None:
            why = (
                "too few to tell"
                if self.kind == "not enough steps"
                else "no stretch of them is stable"
            )
            return [f"{self.kind}: {self.steps} steps in {seconds(self.total_s)}, {why}"]
        lines = [self._verdict(first)]
        rate = ""
        if self.tokens_per_s is not None and self.low is not None and self.high is not None:
            rate = (
                f"{self.tokens_per_s:,.0f} tokens/s (95 %: {self.low:,.0f} to {self.high:,.0f}); "
            )
        if self.p50_s is not None and self.p95_s is not None and self.p99_s is not None:
            times = (
                f"p50 {seconds(self.p50_s)}, p95 {seconds(self.p95_s)}, p99 {seconds(self.p99_s)}"
            )
            repeats = f", in a rhythm of {self.rhythm}" if self.rhythm else ""
            lines.append(f"steady: {rate}step time {times}{repeats}")
        if self.drift_per_1000 is not None:
            way = "slower" if self.drift_per_1000 > 0 else "faster"
            lines.append(f"drift: {abs(self.drift_per_1000):.2g} % {way} per 1,000 steps")
        lines += [
            f"change: from step {first + c.step} on {seconds(c.after_s)} a step, before {seconds(c.before_s)}"
            for c in self.changes
        ]
        for group in self.spikes:
            when = f"every {group.period} steps" if group.period else "irregular"
            lines.append(f"spikes: {len(group.steps)}, {when}, {seconds(group.cost_s)} in all")
        for cause in self.causes:
            start, last = first + cause.start, first + cause.stop - 1
            which = f"step {start}" if start == last else f"steps {start}-{last}"
            lines.append(f"why {which}: {cause.cause}{cause.evidence and f' ({cause.evidence})'}")
        return lines

    def _verdict(self, first: int) -> str:
        if not self.onset:
            return f"{self.kind}: {self.steps} steps, steady from the start"
        cost = ""
        if (
            self.overhead_s is not None
            and self.overhead_pct is not None
            and self.first_step_ratio is not None
        ):
            cost = (
                f"; the {self.onset} before cost {seconds(self.overhead_s)} more than steady ones "
                f"({self.overhead_pct:.1f} % of the run), the first took {self.first_step_ratio:.1f} times as long"
            )
        return f"{self.kind}: {self.steps} steps, steady from step {first + self.onset} on{cost}"


def seconds(value: float) -> str:
    """A duration, to three digits."""
    if abs(value) >= 1:
        return f"{value:.1f} s" if abs(value) < 100 else f"{value:,.0f} s"
    return f"{value * 1000:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"

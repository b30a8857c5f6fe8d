"""Find where the steady state of a run begins, and say what came before and after it.

In:    seconds per step, tokens per step, and what else is known of the steps.
Out:   a StepAnalysis.
Where: the caller's thread.
State: none.

The steady level is that of the tail: of the first stretch without a change of level. A running median over the head
says from which step on the run keeps to it; single steps at the start that are far above anything later count as
warmup too. Changes, drift and spikes are looked for after that. Thresholds are relative, so the unit does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.watch.steps import causes
from penstock.watch.steps.input import Evidence, Floats, StepEvent, gather, step_times, step_tokens
from penstock.watch.steps.levels import (
    LEAST_CHANGE,
    above_all,
    changes,
    larger,
    level,
    rate_interval,
    rhythm,
    running_median,
    trend,
)
from penstock.watch.steps.result import Cause, Change, Kind, StepAnalysis
from penstock.watch.steps.spikes import SpikeGroup, at_places, groups, slow_steps, trains

LEAST_STEPS = 30
"""With fewer, head and tail cannot be told apart: the honest answer is that there are not enough."""
LEAST_STEADY = 15
"""Steps after the onset without which nothing is said about a steady state."""
SETTLED = 0.05
"""A step is settled when the median around it is within 5 % of the steady level, or within its own noise."""
HOLD = 20
"""For so many steps it must stay there,"""
STRAYS = 0.2
"""of which this share may stray: noise crosses any line now and then."""
HEAD_STEP = 0.3
"""A single first step counts as warmup if it takes at least 30 % longer than steady ones,"""
HEAD_OUTSIDE = 2.0
"""and lies this many times as far out as their 99th percentile."""
KNOWN = 0.95
"""Where a compilation or new optimizer state says why, it need only be slower than this share of steady steps,
spikes left aside."""
HEAD_Z = 2.6
"""Several first steps that are only a little slow count if their ranks among steady ones say so, p < 0.01, and if hardly
ever as many steps in a row are as slow later: the level of a shared machine wanders."""
BURST_GAP = 25
"""A burst of slow steps (a second compilation) within so many steps of the onset moves it,"""
BURST_OUTSIDE = 3.0
"""if it lies this many times as far out as steady steps ever do, and takes twice as long as a usual one. Strict, because
a heavy-tailed run has single slow steps anywhere."""
NEAR = 100
"""Steps after the onset that define the level it is measured against; farther ones may have drifted away."""
WARMUP_SHARE = 0.5
"""A slower first stretch is warmup if it ends in the first half of the run; later, it is a change for the better."""
STILL_FALLING = 0.20
"""A run that gets faster by more than a fifth over its supposed steady state has not reached it. By a tenth, the clock of
a machine that others use makes it faster."""
SOON = 1 / 10
"""Where the supposed onset is later than a tenth of the run, half of that is enough,"""
LATE_ONSET = 1 / 3
"""and a quarter after a third: a start that is not over always seems to settle near the end, for that is where the tail
is."""
UNSTABLE = 0.20
"""Nor has one whose level, averaged over an eighth of it, strays by more than a fifth. Neighbours on a shared machine
make it stray by a tenth."""
LONGEST_SHARE = 1 / 3
"""Nor one that changes up and down and never stays for a third of the run."""


@dataclass(frozen=True, slots=True)
class _Regimes:
    """The stretches between changes of level."""

    edges: list[int]
    levels: list[float]
    first: int
    """The first that is not warmup."""

    @property
    def start(self) -> int:
        return self.edges[self.first]

    @property
    def stop(self) -> int:
        return self.edges[self.first + 1]

    @property
    def wander(self) -> bool:
        """Whether they go up and down without staying anywhere, or down again and again."""
        rest = np.diff(self.levels[self.first :])
        longest = float(np.diff(self.edges).max())
        up, down = bool((rest > 0).any()), bool((rest < 0).any())
        return (up and down and longest < LONGEST_SHARE * self.edges[-1]) or (
            len(rest) > 1 and not up
        )


def analyze_steps(
    times: Any, tokens: Any = None, events: Iterable[StepEvent | Mapping[str, Any]] | None = None
) -> StepAnalysis:
    """Say how the step times of a run behave: see StepAnalysis.

    `times` are seconds per step, `tokens` a count per step or one for all, `events` what else is known of the steps
    (StepEvent, or mappings with the same names), used to say why steps were slow.
    """
    t = step_times(times)
    amounts, evidence = step_tokens(tokens, len(t)), gather(events, len(t))
    if len(t) < LEAST_STEPS:
        return _nothing("not enough steps", t)
    period, phases = rhythm(t)
    x = t / np.resize(phases, len(t))
    if level(x) <= 0:
        return _nothing("no steady state", t)
    regimes = _regimes(x)
    around = np.repeat(regimes.levels, np.diff(regimes.edges))
    ratio = np.divide(x, around, out=np.ones_like(x), where=around > 0)
    start = regimes.start
    regular = [(first + start, every) for first, every, _ in trains(slow_steps(ratio[start:]))]
    grown = [
        growth.step for kind in ("compiles", "optimizer_state") for growth in evidence.growths[kind]
    ]
    onset = _onset(x, regimes, regular, grown)
    if onset is None or regimes.stop - onset < LEAST_STEADY:
        return _nothing("not enough steps" if len(t) < 2 * LEAST_STEPS else "no steady state", t)
    spikes = slow_steps(ratio[onset:]) + onset
    calm = x.copy()
    calm[spikes] = around[spikes]
    slope, real = trend(calm[onset : regimes.stop])
    base = level(calm[onset : regimes.stop])
    drift = slope / base if real and base > 0 else 0.0
    if base <= 0 or regimes.wander:
        return _nothing("no steady state", t)
    rise = regimes.levels[-1] / base - 1 if regimes.first + 1 < len(regimes.levels) else 0.0
    stretches = [*pairwise([onset, *regimes.edges[regimes.first + 1 :]])]
    straying = [(a, b) for a, b in stretches if _strays(calm[a:b], onset / len(t)) > 1]
    if (onset, regimes.stop) in straying or sum(b - a for a, b in straying) > (len(t) - onset) / 2:
        return _nothing("no steady state", t)
    kind: Kind = "warmup" if onset else "flat"
    if max(rise, drift * (regimes.stop - onset)) > LEAST_CHANGE:
        kind = "slowdown"
    found = _Found(t, x, onset, regimes, spikes, regular, drift, period)
    return found.analysis(kind, amounts, evidence)


def _nothing(kind: Kind, t: Floats) -> StepAnalysis:
    return StepAnalysis(kind=kind, steps=len(t), total_s=float(t.sum()))


def _regimes(x: Floats) -> _Regimes:
    edges = [0, *changes(x), len(x)]
    levels = [level(x[a:b]) for a, b in pairwise(edges)]
    first = 0
    while (
        first + 1 < len(levels)
        and levels[first] > (1 + LEAST_CHANGE) * levels[first + 1]
        and edges[first + 1] <= WARMUP_SHARE * len(x)
    ):
        first += 1
    return _Regimes(edges, levels, first)


def _onset(
    x: Floats, regimes: _Regimes, regular: list[tuple[float, float]], grown: list[int]
) -> int | None:
    """The first step of the steady state, found against its tail and then against what is near."""
    start, stop = regimes.start, regimes.stop
    reference = np.arange((start + stop) // 2, stop)
    onset = _settled(x[:stop], reference, start, regular, grown)
    if onset is None:
        return None
    # As many steps again, for a slow start is still a little above the level when it counts as settled.
    begin = min(2 * onset + 5, (onset + stop) // 2)
    reference = np.arange(max(begin, start), min(stop, begin + NEAR))
    return (
        onset
        if len(reference) < LEAST_STEADY
        else _settled(x[:stop], reference, start, regular, grown)
    )


def _settled(
    x: Floats,
    reference: NDArray[np.intp],
    edge: int,
    regular: list[tuple[float, float]],
    grown: list[int],
) -> int | None:
    """The first step from which on the series keeps to the level of the reference steps. `edge`: where that changed."""
    told = x[reference]
    base = level(told)
    if base <= 0:
        return None  # steps without a time have no level that others could be measured by
    low, high = np.quantile(told, (0.15, 0.85))
    width = 9 if high - low < 0.16 * base else 15
    limit = max((1 + SETTLED) * base, float(np.quantile(running_median(told, width), 0.97)))
    rest = np.arange(reference[0], len(x))
    usual = np.sort(x[rest[~at_places(rest, regular)]])
    top = float(np.quantile(usual, 0.99)) if len(usual) else base
    # Among many, the largest may be an accident of its own, such as one evaluation.
    most = float(usual[-1 if len(usual) < 2 * NEAR else -2]) if len(usual) else base
    plain = np.delete(usual, slow_steps(usual / base)) if len(usual) else usual
    known_limit = max(
        (1 + HEAD_STEP) * base, float(np.quantile(plain, KNOWN)) if len(plain) else base
    )
    step_limit = base + max(HEAD_STEP * base, HEAD_OUTSIDE * (top - base))
    burst_limit = base + max(base, BURST_OUTSIDE * (most - base))
    # Steps that are plainly part of the start are no neighbours for the median of those after them.
    known = [
        step
        for step in grown
        if 0 <= step < min(BURST_GAP, int(reference[0])) and x[step] > known_limit
    ]
    begin = max([_after_leading(x > burst_limit), *(step + 1 for step in known)])
    slow = running_median(x[begin:], width) > limit
    so_far = np.concatenate(([0], np.cumsum(slow)))
    here = np.arange(len(slow))
    ahead = np.minimum(here + HOLD, len(slow))
    settled = ~slow & (so_far[ahead] - so_far[here] <= STRAYS * (ahead - here))
    if not settled.any():
        return None
    onset = begin + int(np.argmax(settled))
    head, after = x[begin:onset], x[max(onset, int(reference[0])) :]
    if larger(head, told) < HEAD_Z or not above_all(head, after):
        onset = begin
    # A median looks back over the edge of a level. What comes after it says whether it is settled there.
    if begin < edge < onset and np.median(x[edge : edge + width // 2]) <= limit:
        onset = edge
    while True:
        steps = np.arange(onset, min(onset + BURST_GAP, len(x)))
        limits = np.where(steps <= onset + 1, step_limit, burst_limit)
        limits[np.isin(steps, grown)] = known_limit
        late = steps[(x[steps] > limits) & ((steps == 0) | ~at_places(steps, regular))]
        if not len(late) or late[-1] >= reference[0]:
            return onset
        onset = int(late[-1]) + 1


def _after_leading(far: NDArray[np.bool_]) -> int:
    """The end of the far-out steps at the very start, an ordinary one or two between them allowed."""
    end = 0
    while (more := np.flatnonzero(far[end : end + 3])).size:
        end += int(more[-1]) + 1
    return end


def _strays(y: Floats, waited: float) -> float:
    """How far what should be steady after this share of the run gets faster or has no level; 1 is too far."""
    base = level(y)
    if base <= 0:
        return np.inf
    n, late = len(y), waited >= LATE_ONSET
    slope, real = trend(y)
    low, high = np.quantile(y, (0.15, 0.85))
    # With few steps left, a start that is not over may not be significant yet, but is more than noise would make it.
    real = real or (late and -slope * n > 0.75 * (high - low) * np.sqrt(12 / n))
    drift = slope / base if real else 0.0
    falls = -drift * n / (STILL_FALLING * (0.25 if late else 0.5 if waited > SOON else 1))
    flat = y / base - drift * (np.arange(n) - n / 2)
    # Hiccups of a machine come in clusters and are not its level; medians would jump where there are two of them.
    parts = np.array(
        [level(part) for part in np.array_split(flat, 8 if n >= 80 else max(3, n // 10))]
    )
    away = np.sort(np.abs(parts - np.median(parts)))
    # One of eight is an episode, not a run without a level.
    return max(falls, float(away[-2 if len(away) >= 8 else -1]) / UNSTABLE)


@dataclass(frozen=True, slots=True)
class _Found:
    """What was found in a series that has a steady state, to be put into numbers."""

    t: Floats
    x: Floats
    onset: int
    regimes: _Regimes
    spikes: NDArray[np.intp]
    regular: list[tuple[float, float]]
    drift: float
    rhythm: int | None

    def analysis(self, kind: Kind, tokens: Floats | None, evidence: Evidence) -> StepAnalysis:
        t, onset, stop = self.t, self.onset, self.regimes.stop
        steady = t[onset:stop]
        p50, p95, p99 = np.quantile(steady, (0.5, 0.95, 0.99)).tolist()
        ordinary = np.setdiff1d(np.arange(onset, stop), self.spikes)
        mean = float(t[ordinary].mean()) if len(ordinary) else p50
        # A checkpoint in the head is no warmup: it would have come anyway.
        steps = np.arange(onset)
        head = t[steps[(steps == 0) | ~at_places(steps, self.regular)]]
        overhead = float(head.sum()) - len(head) * mean
        total = float(t.sum())
        rate = None if tokens is None else rate_interval(tokens[onset:stop], steady)
        usual = np.concatenate(
            [np.full(b - a, np.median(self.x[a:b])) for a, b in pairwise(self.regimes.edges)]
        )
        spikes = groups(self.spikes, self.x - usual)
        later = self._changes()
        return StepAnalysis(
            kind=kind,
            steps=len(t),
            total_s=total,
            onset=onset,
            steady_stop=stop,
            overhead_s=overhead,
            overhead_pct=100 * overhead / total if total > 0 else 0.0,
            first_step_ratio=float(t[0]) / p50 if p50 > 0 else None,
            tokens_per_s=rate[0] if rate else None,
            low=rate[1] if rate else None,
            high=rate[2] if rate else None,
            p50_s=p50,
            p95_s=p95,
            p99_s=p99,
            drift_per_1000=1e5 * self.drift if self.drift else None,
            rhythm=self.rhythm,
            changes=later,
            spikes=spikes,
            causes=tuple(self._causes(mean, spikes, later, evidence)),
        )

    def _changes(self) -> tuple[Change, ...]:
        edges, levels, first = self.regimes.edges, self.regimes.levels, self.regimes.first
        return tuple(
            Change(edges[i + 1], levels[i], levels[i + 1]) for i in range(first, len(levels) - 1)
        )

    def _causes(
        self,
        mean: float,
        spikes: tuple[SpikeGroup, ...],
        later: tuple[Change, ...],
        evidence: Evidence,
    ) -> Iterable[Cause]:
        wait = causes.usual_wait(evidence, slice(self.onset, self.regimes.stop))
        if self.onset:
            slow = np.flatnonzero(self.x[: self.onset] > (1 + SETTLED) * mean).tolist()
            yield from causes.of_warmup(
                slow, self.onset, self.t[: self.onset] - mean, evidence, wait
            )
        stretch = self.regimes.stop - self.onset
        if self.drift * stretch > LEAST_CHANGE:
            more = (
                self.drift * stretch * mean * 2 / 3
            )  # between the middles of the first and the last third
            yield from causes.of_drift(self.onset, self.regimes.stop, more, evidence)
        for number, change in enumerate(later):
            stop = later[number + 1].step if number + 1 < len(later) else len(self.t)
            start = later[number - 1].step if number else self.onset
            more = change.after_s - change.before_s
            yield from causes.of_change(
                change.step, stop, slice(start, change.step), more, evidence
            )
        for group in spikes:
            yield from causes.of_spikes(group, evidence, wait)

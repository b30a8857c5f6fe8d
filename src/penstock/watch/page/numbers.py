"""What a report says, in numbers.

In:    a run's columns (see `run`).
Out:   for each rank and for the run: data wait and whose it is, steady state, rates, percentiles.
Where: the thread that makes a report.
State: none.

A run waits as long as the rank that waits most, because the others wait for that one. So the run's data wait is
that rank's. Numbers are of the steady part where there is one, because a warmup says nothing about the hours to come.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.watch.attribution import band
from penstock.watch.page.run import Column, RankRun, Run, Session, nan_to, number
from penstock.watch.page.series import superseded
from penstock.watch.page.units import when
from penstock.watch.steady import StepAnalysis, StepEvent, analyze_steps
from penstock.watch.view.fields import MOST_TOKENS

VERSION = 1
"""Of the JSON."""

_PLACE = re.compile(r" (?:at step \d+|at \d+ steps from \d+ on|from step \d+ on)$")
"""Where an analysis found its evidence: counted from the session's first step, while a report has the run's numbers."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Where steps are slow and where they are steady, in step numbers as the run counts them."""

    kind: str
    from_step: int | None = None
    """The first steady step."""
    overhead_s: float | None = None
    overhead_pct: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    tokens_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    """The 95 % interval."""
    drift_per_1000_pct: float | None = None
    changes: list[dict[str, float]] = field(default_factory=list)
    """Later changes of speed: at which step, seconds before and after."""
    spikes: list[int] = field(default_factory=list)
    spike_period: int | None = None
    causes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RankNumbers:
    """One rank."""

    rank: int
    host: str
    steps: int
    first_step: int | None
    last_step: int | None
    sessions: int
    ended: str | None
    shape: Shape
    data_wait_pct: float | None
    """Of the steady part, or of the session if none was found."""
    data_wait_all_pct: float | None
    """Of the whole session."""
    waits_pct: dict[str, float]
    """By stage, of the same wall time as `data_wait_pct`."""
    next_p50_ms: float | None
    next_p95_ms: float | None
    next_p99_ms: float | None
    """Time in `next()`, of the same steps."""
    tokens_per_s: float | None
    """Over all steps of the session, warmup included."""
    tokens: int | None
    wall_s: float
    first_batch_s: float | None
    warmup_wait_s: float | None
    last_loss: float | None
    loss_not_finite: int | None
    """The first step whose loss was not a finite number; steps that were done again after a resume do not count."""
    loss_not_finite_steps: int
    """How many there are."""
    loss_not_finite_from: int | None
    """The step from which on none was finite any more; None if the last one is."""
    fell_back: bool
    """Whether it went over to synthetic data; `events` counts the ways back too."""
    events: dict[str, int]
    skipped_lines: int
    earlier_runs: int
    dropped_lines: int
    words: str

    @property
    def own_wait_pct(self) -> float:
        """Waiting that is not waiting for other ranks."""
        return nan_to(_or_nan(self.data_wait_pct), 0.0) - self.waits_pct.get("ranks", 0.0)


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """The run."""

    ranks: list[RankNumbers]
    ranks_expected: int | None
    """As many as the run has, by its newest boot."""
    band: str | None
    data_wait_pct: float | None
    worst_rank: int
    tokens_per_s: float | None
    low: float | None
    high: float | None
    steady_from: int | None
    """When the last rank became steady; None unless all did."""
    overhead_s: float | None
    overhead_pct: float | None
    begun: str
    last_line: str
    ended: str | None

    @property
    def worst(self) -> RankNumbers:
        return next(one for one in self.ranks if one.rank == self.worst_rank)

    def as_dict(self) -> dict[str, Any]:
        """For scripts. What is not known is null."""
        return {"version": VERSION} | asdict(self)


def run_numbers(run: Run) -> RunNumbers:
    ranks = [rank_numbers(rank) for rank in run.ranks]
    worst = max(ranks, key=lambda one: (one.own_wait_pct, one.data_wait_pct or 0.0, -one.rank))
    steady = [one.shape for one in ranks]
    whole = all(shape.tokens_per_s is not None for shape in steady)
    starts = [shape.from_step for shape in steady if shape.from_step is not None]
    wait = worst.data_wait_pct
    ended = [one.ended for one in ranks]
    longest = max(steady, key=lambda shape: shape.overhead_s or 0.0)
    known: dict[str, Any] = {
        "ranks": ranks,
        "ranks_expected": run.expected,
        "band": None if wait is None else band(wait / 100),
        "data_wait_pct": wait,
        "worst_rank": worst.rank,
        # Ranks step together, so their rates rise and fall together: the ends of their intervals add up as well.
        "tokens_per_s": _sum(shape.tokens_per_s for shape in steady) if whole else None,
        "low": _sum(shape.low for shape in steady) if whole else None,
        "high": _sum(shape.high for shape in steady) if whole else None,
        "steady_from": max(starts) if len(starts) == len(steady) else None,
        "overhead_s": longest.overhead_s,
        "overhead_pct": longest.overhead_pct,
        "begun": when(min(rank.first_ts for rank in run.ranks)),
        "last_line": when(max(rank.last_ts for rank in run.ranks)),
        "ended": next((why for why in ended if why), None) if all(ended) else None,
    }
    return RunNumbers(**known)


def rank_numbers(rank: RankRun) -> RankNumbers:
    session = rank.judged()
    part = slice(session.begin, session.end)
    steps, times = rank.step[part], rank.columns["dt_step_s"][part]
    shape, onset = step_shape(rank, session)
    steady = slice(session.begin + onset, session.end)
    fetch = rank.columns["dt_fetch_s"]
    tokens = rank.columns["tokens"][part]
    wall = float(np.nansum(times))
    quantiles = _quantiles(1000 * fetch[steady])
    losses = rank.columns["loss"][~np.isnan(rank.columns["loss"])]
    ready, warmup = session.ready, session.warmup
    wait = _wait_pct(rank, steady)
    first, bad, since = _not_finite(rank)
    return RankNumbers(
        rank=rank.rank,
        host=str(session.boot.get("host") or ""),
        steps=session.steps,
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
        sessions=len(rank.sessions),
        ended=rank.sessions[-1].ended,
        shape=shape,
        data_wait_pct=wait,
        data_wait_all_pct=_wait_pct(rank, part),
        waits_pct=_waits_pct(rank, steady, wait),
        next_p50_ms=quantiles[0],
        next_p95_ms=quantiles[1],
        next_p99_ms=quantiles[2],
        tokens_per_s=float(np.nansum(tokens)) / wall
        if wall > 0 and not np.isnan(tokens).all()
        else None,
        tokens=int(np.nansum(tokens)) if len(tokens) and not np.isnan(tokens).all() else None,
        wall_s=wall,
        first_batch_s=_known(number(ready.get("dt"))),
        warmup_wait_s=_known(number(warmup.get("wait_ms")) / 1000),
        last_loss=float(losses[-1]) if len(losses) else None,
        loss_not_finite=first,
        loss_not_finite_steps=bad,
        loss_not_finite_from=since,
        fell_back=any(
            event.msg == "fallback" and event.fields.get("to") != "data" for event in rank.events
        ),
        events=dict(sorted(rank.counts.items())),
        skipped_lines=rank.skipped,
        earlier_runs=rank.earlier,
        dropped_lines=rank.dropped,
        words=session.words,
    )


def _not_finite(rank: RankRun) -> tuple[int | None, int, int | None]:
    """The first step whose loss was not finite, how many there are, and from which on all of them are."""
    counts = np.zeros(len(rank.step), bool)
    for session in rank.sessions:
        counts[session.begin : superseded(rank, session)] = True
    at = rank.not_finite[counts[rank.not_finite]]
    if not len(at):
        return None, 0, None
    finite = np.flatnonzero(counts & ~np.isnan(rank.columns["loss"]))
    last = at[at > finite[-1]] if len(finite) else at
    return int(rank.step[at[0]]), len(at), int(rank.step[last[0]]) if len(last) else None


def step_shape(rank: RankRun, session: Session) -> tuple[Shape, int]:
    """Where a session becomes steady, and the index of that within the session (0 if it does not)."""
    part = slice(session.begin, session.end)
    times = rank.columns["dt_step_s"][part]
    at = np.flatnonzero(times > 0)
    if not len(at):
        return Shape(kind="not enough steps"), 0
    steps = rank.step[part][at]
    tokens = rank.columns["tokens"][part][at]
    counted = tokens.astype(np.int64) if ((tokens >= 0) & (tokens < MOST_TOKENS)).all() else None
    found = analyze_steps(times[at], counted, _evidence(rank, session, at))
    return _shape(found, steps), int(at[found.onset]) if found.onset is not None else 0


def _evidence(rank: RankRun, session: Session, at: Any) -> list[StepEvent]:
    """What the heartbeat knows of each step that could explain it."""
    part = slice(session.begin, session.end)
    wait, compiles = (rank.columns[name][part][at] for name in ("dt_fetch_s", "compiles"))
    # Pauses are no evidence: their time is not in that of the steps.
    events = [
        StepEvent(i, "data_wait_s", float(wait[i])) for i in np.flatnonzero(wait >= 0).tolist()
    ]
    counted = np.flatnonzero(compiles >= 0)
    if len(counted) and (
        not session.boot or session.boot.get("rotated") is True
    ):  # the file does not begin with the run: what it shows at first is no growth
        events.append(StepEvent(-1, "compiles", float(compiles[counted[0]])))
    grown = counted[np.diff(compiles[counted], prepend=-1.0) != 0]
    return events + [StepEvent(i, "compiles", float(compiles[i])) for i in grown.tolist()]


def _shape(found: StepAnalysis, steps: Any) -> Shape:
    """The same, with the run's own step numbers."""

    def step(index: int) -> int:
        return int(steps[min(index, len(steps) - 1)])

    periods = [group.period for group in found.spikes if group.period]
    causes = []
    scattered = {
        (one.steps[0], one.steps[-1] + 1): len(one.steps) for one in found.spikes if one.steps
    }
    for cause in found.causes:
        n = scattered.get((cause.start, cause.stop), cause.stop - cause.start)
        span = f"step {step(cause.start):,}"
        if 1 < n < cause.stop - cause.start:
            span = f"{n:,} slow steps between {step(cause.start):,} and {step(cause.stop - 1):,}"
        elif cause.stop > cause.start + 1:
            span = f"steps {step(cause.start):,} to {step(cause.stop - 1):,}"
        evidence = _PLACE.sub("", cause.evidence)
        causes.append(f"{span}: {cause.cause}{f' ({evidence})' if evidence else ''}")
    return Shape(
        kind=found.kind,
        from_step=None if found.onset is None else step(found.onset),
        overhead_s=found.overhead_s,
        overhead_pct=found.overhead_pct,
        p50_s=found.p50_s,
        p95_s=found.p95_s,
        p99_s=found.p99_s,
        tokens_per_s=found.tokens_per_s,
        low=found.low,
        high=found.high,
        drift_per_1000_pct=found.drift_per_1000,
        changes=[
            {
                "step": step(one.step),
                "before_s": one.before_s,
                "after_s": one.after_s,
                "pct": 100 * (one.ratio - 1),
            }
            for one in found.changes
            if one.before_s > 0
        ],
        spikes=sorted({step(index) for group in found.spikes for index in group.steps}),
        spike_period=min(periods, default=None),
        causes=causes,
    )


def _wait_pct(rank: RankRun, part: slice) -> float | None:
    """Time in `next()` over wall time; where steps do not say it, the mean of what the run said of itself."""
    fetch, times = rank.columns["dt_fetch_s"][part], rank.columns["dt_step_s"][part]
    both = ~np.isnan(fetch) & ~np.isnan(times)
    wall = float(times[both].sum())
    if wall > 0:
        return min(100.0, max(0.0, 100 * float(fetch[both].sum()) / wall))
    said = rank.columns["data_wait_pct"][part]
    said = said[~np.isnan(said)]
    return min(100.0, max(0.0, float(said.mean()))) if len(said) else None


def _waits_pct(rank: RankRun, part: slice, wait: float | None) -> dict[str, float]:
    """Data wait by stage. The shares are the heartbeat's; they are made to add up to the whole."""
    if wait is None:
        return {}
    seconds = {name: float(column[part].sum()) for name, column in rank.waits.items()}
    total = sum(seconds.values())
    return {name: wait * one / total for name, one in seconds.items()} if total > 0 else {}


def _quantiles(values: Column) -> tuple[float | None, float | None, float | None]:
    known = values[~np.isnan(values)]
    if not len(known):
        return None, None, None
    low, middle, high = np.quantile(known, (0.5, 0.95, 0.99))
    return float(low), float(middle), float(high)


def _sum(values: Any) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else float(sum(known))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

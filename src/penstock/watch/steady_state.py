"""Find the end of warmup in a run's step times, and later changes.

The steady level is that of the tail. The onset is the step after which a running median stays at
that level, within the noise of the tail. Changes of level, drift and spikes are searched after the
onset. All limits are relative, so the unit of time does not matter. The trainer, the live view, the
report and the health gate all call `analyze_steps`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.watch import count, percent, rate, seconds

Floats = NDArray[np.float64]
Kind = Literal["flat", "warmup", "slowdown", "no steady state", "not enough steps"]

MIN_STEPS = 30
"""With fewer steps, warmup and steady state cannot be distinguished."""
LEVEL_STEPS = 20
"""The shortest level, and the number of steady steps that confirm an onset."""
WINDOW = 8
"""Width of the running median. Even, so that two alternating values give their mean."""
TOLERANCE = 0.05
"""Levels that differ by less count as equal: clock scaling and other processes cause such
differences."""
OUTLIER = 0.3
"""A spike takes at least this share longer than the steps around it."""
UNSTABLE = 0.2
"""A run whose level falls or varies by this share has no steady state."""
DEVIATIONS = 4.0
"""Standard deviations of a rank statistic beyond which a change or a trend is significant."""
TREND_POINTS = 300
"""Points of the all-pairs slope; longer series are thinned to medians of blocks."""


@dataclass(frozen=True, slots=True)
class Change:
    """A lasting change of step time, from a step on."""

    step: int
    before_s: float
    after_s: float
    pct: float
    """The change of step time in per cent."""
    cause: str = ""
    """The recorded cause: a change of data wait, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnalysis:
    """The analysis of a run's step times. Values are None if there is no steady state.

    `first_step`, `steady_step`, `changes` and `spikes` have the run's own step numbers. `onset` and
    `steady_stop` count steps from the first one.
    """

    kind: Kind
    steps: int
    total_s: float
    first_step: int = 0
    onset: int | None = None
    """The number of warmup steps."""
    steady_stop: int | None = None
    """The number of steps before the first later change, or of all steps."""
    overhead_s: float | None = None
    """Time of the warmup steps beyond that of as many steady steps."""
    overhead_pct: float | None = None
    """The same, in per cent of the run's time."""
    first_step_ratio: float | None = None
    """The time of the first step over the median steady step."""
    warmup_cause: str = ""
    """The recorded causes of the warmup: compilations, data wait."""
    tokens_per_s: float | None = None
    """The rate of the steady steps, spikes included. Also None without token counts."""
    low: float | None = None
    """The 95 % interval of the rate."""
    high: float | None = None
    p50_s: float | None = None
    """Percentiles of the steady step times."""
    p95_s: float | None = None
    p99_s: float | None = None
    drift_per_1000: float | None = None
    """Slowdown of steady steps in per cent per 1,000 steps. None if not significant."""
    changes: tuple[Change, ...] = ()
    """Changes of level after the onset."""
    spikes: tuple[int, ...] = ()
    """Single slow steps after the onset."""
    spike_period: int | None = None
    """The interval of the spikes if they are regular, such as that of checkpoints."""
    spikes_s: float = 0.0
    """Time of the spikes beyond that of ordinary steps."""

    @property
    def steady_step(self) -> int | None:
        """The step number of the first steady step."""
        return None if self.onset is None else self.first_step + self.onset

    def scaled(self, ranks: int) -> StepAnalysis:
        """Return the analysis with the tokens of several ranks that step together."""
        rates = {name: getattr(self, name) for name in ("tokens_per_s", "low", "high")}
        return replace(self, **{name: rate and ranks * rate for name, rate in rates.items()})

    def as_event(self, reason: str) -> dict[str, Any]:
        """Return the known fields of the heartbeat's `steady_state` line."""
        names = ("overhead_s", "tokens_per_s", "low", "high", "kind")
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"at_step": self.steady_step, "reason": reason} | fields

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self) | {"steady_step": self.steady_step}

    def headline(self) -> str:
        """Return one line: if the run is steady, and since which step."""
        if self.onset is None:
            short = "too short to find a steady state"
            why = short if self.kind == "not enough steps" else self.kind
            return f"{why}: {count(self.steps)} steps"
        found = f"steady since step {self.steady_step:,}" if self.onset else "steady from the start"
        slower = [c.step for c in self.changes if c.pct > 0]
        if self.kind == "slowdown":
            found += f", but slower since step {slower[0]:,}" if slower else ", but getting slower"
        return found

    def summary(self) -> str:
        """Describe the steps in a few lines."""
        lines = [self.headline()]
        if self.onset:
            cause = f" ({self.warmup_cause})" if self.warmup_cause else ""
            lines.append(
                f"warmup: {seconds(self.overhead_s)} more than steady steps would take{cause}, "
                f"{percent(self.overhead_pct)} of the run; the first step took "
                f"{self.first_step_ratio:.3g} times a steady one"
            )
        if self.onset is not None:
            speed = f"{rate(self.tokens_per_s)} (95 %: {count(self.low)} to {count(self.high)}); "
            times = (f"p{q} {seconds(getattr(self, f'p{q}_s'))}" for q in (50, 95, 99))
            lines.append(f"steady: {speed if self.low else ''}step time {', '.join(times)}")
        if self.drift_per_1000 is not None:
            way = "slower" if self.drift_per_1000 > 0 else "faster"
            lines.append(f"drift: {abs(self.drift_per_1000):.2g} % {way} per 1,000 steps")
        for change in self.changes:
            both = f"{seconds(change.before_s)} before, {seconds(change.after_s)} after"
            cause = change.cause and f" ({change.cause})"
            lines.append(f"change at step {change.step:,}: {both}{cause}")
        if self.spikes:
            when = f"every {self.spike_period} steps" if self.spike_period else "irregular"
            lines.append(f"spikes: {len(self.spikes)}, {when}, {seconds(self.spikes_s)} in all")
        return "\n".join(lines)

    __str__ = summary


def analyze_steps(
    times: Any, tokens: Any = None, waits: Any = None, compiles: Any = None, *, first_step: int = 0
) -> StepAnalysis:
    """Analyze seconds per step: find the onset of the steady state, and later changes.

    `tokens` (a count per step, or one for all) gives the rate. `waits` (seconds per step) and
    `compiles` (compilations so far, at each step) identify causes; NaN means unknown. `first_step`
    is the number of the first step.
    """
    t = _column("times", times)
    n = len(t)
    given = {"tokens": tokens, "waits": waits, "compiles": compiles}
    amounts, waited, compiled = (
        _column(name, math.nan if values is None else values, n) for name, values in given.items()
    )
    total_s = float(t.sum())
    result = StepAnalysis(kind="no steady state", steps=n, total_s=total_s, first_step=first_step)
    short = replace(result, kind="not enough steps")
    if n < MIN_STEPS or not total_s:
        return short if n < MIN_STEPS else result
    x = np.maximum(t, 1e-9 * t.max())  # a step of zero time would make ratios infinite
    edges = [0, *_changes(x), n]
    levels = [_level(x[a:b]) for a, b in pairwise(edges)]
    # A slower level is warmup if it ends in the first half; otherwise it is an improvement.
    while len(levels) > 1 and levels[0] > levels[1] and edges[1] <= n / 2:
        del levels[0], edges[0]
    stop = edges[1]
    onset = _onset(x[:stop], edges[0])
    unsettled = short if n < 2 * MIN_STEPS else result
    if onset is None or stop - onset < LEVEL_STEPS:
        return unsettled
    edges[0] = onset
    around = np.repeat([np.median(x[a:b]) for a, b in pairwise(edges)], np.diff(edges))
    spikes = _spikes(x[onset:] / around)
    # A recent burst may be a compilation that is followed by more.
    bursts = spikes[x[onset + spikes] > 2 * levels[0]]
    if n - onset < 2 * LEVEL_STEPS and (bursts >= n - onset - LEVEL_STEPS).any():
        return unsettled
    spikes_s = float((t[onset:] - around)[spikes].sum())
    calm = x.copy()
    calm[onset + spikes] = around[spikes]
    if _wanders(calm, edges, levels):
        return result
    slope = _trend(calm[onset:stop]) / levels[0]
    rise = max(levels[-1] / levels[0] - 1, slope * (stop - onset))
    p50, p95, p99 = np.quantile(t[onset:stop], (0.5, 0.95, 0.99)).tolist()
    overhead = float(t[:onset].sum()) - onset * float(calm[onset:stop].mean())
    speed, error = _rate(amounts[onset:stop], t[onset:stop])
    return replace(
        result,
        kind="slowdown" if rise > TOLERANCE else "warmup" if onset else "flat",
        onset=onset,
        steady_stop=stop,
        overhead_s=overhead,
        overhead_pct=100 * overhead / total_s,
        first_step_ratio=float(t[0]) / p50 if p50 > 0 else None,
        warmup_cause=_warmup_cause(waited, compiled, onset, stop, overhead),
        tokens_per_s=speed,
        low=None if speed is None else max(0.0, speed - error),
        high=None if speed is None else speed + error,
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        drift_per_1000=1e5 * slope if slope else None,
        changes=tuple(
            Change(first_step + at, a, b, 100 * (b / a - 1), _change_cause(waited, at, b - a))
            for at, (a, b) in zip(edges[1:], pairwise(levels), strict=False)
        ),
        spikes=tuple((first_step + onset + spikes).tolist()),
        spike_period=_period(spikes),
        spikes_s=spikes_s,
    )


def _column(name: str, values: Any, n: int | None = None) -> Floats:
    """Return a float array. Raise ConfigError that names the first invalid value."""
    try:
        found = np.asarray(values, dtype=np.float64)
        found = found if n is None else np.broadcast_to(found, n)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: needs one number per step: {error}") from None
    if found.ndim != 1 or not found.size:
        raise ConfigError(f"{name}: needs one number per step, got shape {found.shape}")
    # 1e15 keeps sums finite. Only times are required for every step.
    fits = ((found >= 0) & (found < 1e15)) | (np.isnan(found) & (n is not None))
    if not fits.all():
        at = int(np.argmin(fits))
        raise ConfigError(f"{name}[{at}] = {found[at]}: needs a number, at least 0")
    return found


def _level(x: Floats) -> float:
    """Return the mean of values clipped to the 10th and 90th percentile.

    Ignores spikes like a median, but does not jump between the values of an alternating series.
    """
    low, high = np.quantile(x, (0.1, 0.9))
    return float(np.clip(x, low, high).mean())


def _running_median(x: Floats) -> Floats:
    padded = np.pad(x, (WINDOW // 2, (WINDOW - 1) // 2), mode="reflect")
    found: Floats = np.median(sliding_window_view(padded, WINDOW), axis=1)
    return found


def _ranks(x: Floats) -> Floats:
    """Return the centered ranks of the values; equal values have equal ranks."""
    ranks = np.unique(x, return_inverse=True)[1]
    centered: Floats = ranks - ranks.mean()
    return centered


def _inflation(x: Floats) -> float:
    """Return the factor by which autocorrelation inflates the variance of a sum of the series."""
    ranks = _ranks(x)
    lag1 = float(ranks[1:] @ ranks[:-1]) / max(float(ranks @ ranks), 1.0)
    return (1 + min(0.9, max(0.0, lag1))) / (1 - min(0.9, max(0.0, lag1)))


def _changes(x: Floats) -> list[int]:
    """Return the steps at which the level changes permanently."""
    smooth = _running_median(x)
    # The running median correlates neighbours: about WINDOW / 2 steps count as one.
    inflation = _inflation(x - smooth) * WINDOW / 2
    found: list[int] = []
    todo = [(0, len(x))]
    while todo:
        a, b = todo.pop()
        if b - a < 2 * LEVEL_STEPS:
            continue
        at = _split(smooth[a:b], inflation)
        if at is None:
            # Ups and downs can cancel over a long range, so examine its halves.
            if b - a >= max(10 * LEVEL_STEPS, len(x) / 8):
                todo += [(a, (a + b) // 2), ((a + b) // 2, b)]
            continue
        todo += [(a, a + at), (a + at, b)]
        found.append(a + at)
    found.sort()
    while found:  # drop changes between similar levels, the smallest first
        levels = [_level(x[a:b]) for a, b in pairwise([0, *found, len(x)])]
        sizes = [max(a, b) / min(a, b) - 1 for a, b in pairwise(levels)]
        smallest = int(np.argmin(sizes))
        if sizes[smallest] > TOLERANCE:
            break
        del found[smallest]
    return found


def _split(smooth: Floats, inflation: float) -> int | None:
    """Return the index at which the ranks of a series change most, or None if insignificant."""
    n = len(smooth)
    ranks = _ranks(smooth)
    k = np.arange(1, n)
    variance = max(ranks.var(), 1e-9) * k * (n - k) / n * inflation
    z = np.abs(np.cumsum(ranks)[:-1]) / np.sqrt(variance)
    inner = slice(LEVEL_STEPS - 1, n - LEVEL_STEPS)
    best = LEVEL_STEPS + int(np.argmax(z[inner]))
    if z[best - 1] <= DEVIATIONS:
        return None
    # Refine the position: where the series moves from one median to the other.
    a, b = max(0, best - 50), min(n, best + 50)
    low, high = np.median(smooth[a:best]), np.median(smooth[best:b])
    cost = np.cumsum(np.abs(smooth - low) - np.abs(smooth - high))
    inside = slice(max(LEVEL_STEPS - 1, a), min(n - LEVEL_STEPS, b))
    return inside.start + 1 + int(np.argmin(cost[inside]))


def _onset(x: Floats, edge: int) -> int | None:
    """Return the first step after which a series stays at the level of its tail.

    `edge` is the start of that level according to the detected changes.
    """
    tail = x[(edge + len(x)) // 2 :]
    base = _level(tail)
    limit = max((1 + TOLERANCE) * base, float(np.quantile(_running_median(tail), 0.97)))
    begin = 0
    # Skip slow first steps, which would raise the running median of the steps after them.
    while (more := np.flatnonzero(x[begin : begin + 3] > 2 * base)).size:
        begin += int(more[-1]) + 1
    if len(x) - begin < LEVEL_STEPS // 2:
        return None
    smooth = _running_median(x[begin:])
    settled = smooth <= limit
    if not settled.any():
        return None
    onset = begin + int(np.argmax(settled))
    if not begin and not (smooth[:onset] > limit + TOLERANCE * base).any():
        onset = 0  # never clearly above the level
    while onset > begin and x[onset - 1] <= limit:
        onset -= 1  # the median includes steps before the edge
    # A burst soon after the onset, such as a second compilation, belongs to the warmup. The limit
    # is lower for the first steps, because no checkpoint comes that early.
    plain = np.delete(tail, _spikes(tail))
    first = max((1 + OUTLIER) * base, float(np.quantile(plain, 0.99)))
    burst = base + max(base, 3 * (float(np.partition(tail, -2)[-2]) - base))
    limits = np.where(np.arange(len(x)) < 2, first, burst)
    while (late := np.flatnonzero((x > limits)[onset : onset + LEVEL_STEPS])).size:
        onset += int(late[-1]) + 1
    return onset


def _spikes(ratio: Floats) -> NDArray[np.intp]:
    """Return the outliers among step times relative to the level around them."""
    middle, upper = np.quantile(ratio, (0.5, 0.85))
    found = np.flatnonzero(ratio > middle + max(OUTLIER * middle, 6 * (upper - middle)))
    # Many outliers are not spikes, but a second mode of the run.
    return found if len(found) <= len(ratio) / WINDOW else found[:0]


def _period(spikes: NDArray[np.intp]) -> int | None:
    """Return the interval of regular spikes, within one step. Other spikes may lie between them."""
    gaps = np.diff(spikes)
    if not (gaps > 2).any():
        return None
    period = int(np.bincount(gaps[gaps > 2]).argmax())
    phase = int(np.bincount(spikes % period).argmax())
    turns = np.unique((spikes - phase + 1)[(spikes - phase + 1) % period <= 2] // period)
    return period if len(turns) >= 3 and len(turns) >= 0.8 * (np.ptp(turns) + 1) else None


def _trend(x: Floats) -> float:
    """Return the slope per step (Theil-Sen), or 0 if it is not significant (Mann-Kendall)."""
    block = -(-len(x) // TREND_POINTS)
    y = np.median(x[: len(x) // block * block].reshape(-1, block), axis=1)
    n = len(y)
    i, j = np.triu_indices(n, 1)
    rises = y[j] - y[i]
    slope = float(np.median(rises / (j - i)))
    inflation = _inflation(y - slope * np.arange(n))
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18 * inflation)
    return slope / block if abs(np.sign(rises).sum()) > DEVIATIONS * deviation else 0.0


def _wanders(calm: Floats, edges: list[int], levels: list[float]) -> bool:
    """Return True if a run never stays at a level, or is still getting faster."""
    n, onset = len(calm), edges[0]
    up, down = bool((np.diff(levels) > 0).any()), bool((np.diff(levels) < 0).any())
    if (up and down and np.diff(edges).max() < n / 3) or (len(levels) > 2 and not up):
        return True
    # An unfinished warmup seems to settle near the end, so a late onset has a stricter limit.
    allowed = UNSTABLE * (1 - onset / n) ** 2
    straying = 0
    for a, b in pairwise(edges):
        y = calm[a:b] / _level(calm[a:b])
        slope = _trend(y)
        flat = y - slope * np.arange(b - a)
        parts = np.array([_level(part) for part in np.array_split(flat, 8)])
        # One deviating part of eight is only an episode.
        away = np.sort(np.abs(parts - np.median(parts)))[-2]
        if max(-slope * (b - a), away) > allowed:
            straying += n if a == onset else b - a
    return straying > (n - onset) / 2


def _rate(tokens: Floats, t: Floats) -> tuple[float | None, float]:
    """Return tokens per second, and half the width of the 95 % interval, from ten blocks."""
    if np.isnan(tokens).any() or not t.sum() > 0:
        return None, 0.0
    found = float(tokens.sum() / t.sum())
    blocks = zip(np.array_split(tokens, 10), np.array_split(t, 10), strict=True)
    rates = [part.sum() / taken.sum() if taken.sum() > 0 else found for part, taken in blocks]
    return found, 2.26 * float(np.std(rates, ddof=1)) / math.sqrt(10)  # Student's t


def _warmup_cause(waits: Floats, compiles: Floats, onset: int, stop: int, overhead_s: float) -> str:
    causes = []
    if onset and compiles[onset - 1] > 0:
        causes.append(f"{compiles[onset - 1]:.0f} compilations")
    waited = float((waits[:onset] - np.median(waits[onset:stop])).sum())
    if waited >= overhead_s / 2 > 0:
        causes.append(f"{seconds(waited)} of it data wait")
    return ", ".join(causes)


def _change_cause(waits: Floats, at: int, more_s: float) -> str:
    before, after = np.median(waits[at - LEVEL_STEPS : at]), np.median(waits[at : at + LEVEL_STEPS])
    half = (after - before) / more_s >= 0.5  # at least half of the change
    return f"data wait {seconds(before)} before, {seconds(after)} after" if half else ""

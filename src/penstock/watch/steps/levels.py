"""Levels, rhythms, regimes and trends of a series of step times: plain robust statistics.

In:    seconds per step.
Out:   numbers; nothing here knows what a warmup is.
Where: the caller's thread.
State: none.
Cost:  sorting, a few dozen times at most: 100,000 steps take about a second.
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.watch.steps.input import Floats

LONGEST_RHYTHM = 8
"""A pattern of at most so many steps is how the run works (gradient accumulation), not an exception to it."""
RHYTHM_GAIN = 0.7
"""A rhythm must leave at most this share of the spread between steps unexplained. Noise fitted with phases leaves 0.9."""
RHYTHM_CYCLES = 6
"""Seen at least so often: fewer repeats fit a pattern to noise."""
LOCAL = 32
"""Steps over which a local level is taken; even, so that with two alternating values it lies between them."""

LEAST_CHANGE = 0.05
"""A level that moves by less than 5 % is not called a change: clocks and neighbours on a machine do as much."""
LEAST_REGIME = 20
"""Steps that a level must hold to be a regime and not a long spike."""
CHANGE_Z = 4.5
"""Rank statistic above which a change is taken for real, the best of all places having been picked. In a series without
any change it is passed about once in a thousand runs."""
SHARPNESS = 0.6
"""Share of a change that must happen within a few steps; a slope shows a quarter there and is left to the trend."""
HIDING = 100
"""Ups and downs can balance over a stretch, so one that shows no change is looked at by halves down to this length."""
MOST_SPLITS = 64
"""Stretches tried at most. A run with more changes than this has no steady state however many are found."""

TREND_POINTS = 300
"""Points of the all-pairs slope. Longer stretches are first thinned to the medians of blocks."""
TREND_Z = 3.0
"""Mann-Kendall z above which a trend is reported, p < 0.003: a report that cries at chance is not read."""

RESAMPLES = 1000
BOOTSTRAP_SEED = 20_011
"""Fixed, so that a report made twice shows the same interval."""


def level(x: Floats) -> float:
    """The typical value: the mean of all, those outside the 10th and 90th percentile moved there.

    Unlike the median it does not jump between the two values of a series that alternates; unlike the mean it
    ignores spikes.
    """
    low, high = np.quantile(x, (0.1, 0.9))
    return float(np.clip(x, low, high).mean())


def running_median(x: Floats, width: int) -> Floats:
    """The median around each step; at the ends, of what there is."""
    n = len(x)
    back, ahead = width // 2, (width - 1) // 2
    out = np.empty(n)
    whole = range(back, max(back, n - ahead))
    if whole:
        out[whole.start : whole.stop] = np.median(sliding_window_view(x, width), axis=1)
    ends = (*range(whole.start), *range(whole.stop, n)) if whole else range(n)
    for i in ends:
        out[i] = statistics.median(x[max(0, i - back) : i + ahead + 1].tolist())
    return out


def rhythm(x: Floats) -> tuple[int | None, Floats]:
    """The length of a repeating pattern of step times, if there is one, and each phase's share of the mean step."""
    begin = max(len(x) // 4, len(x) - 2048)
    tail = x[begin:]
    around = running_median(tail, LOCAL)
    ratio = np.divide(tail, around, out=np.ones_like(tail), where=around > 0)
    # Rare spikes would hide the pattern from a mean; a pattern of 8 has an eighth of its steps up there.
    ratio = np.minimum(ratio, np.quantile(ratio, 0.95))
    spread = float(np.abs(ratio - np.median(ratio)).mean())
    best: tuple[float, int, Floats] | None = None
    for period in range(2, LONGEST_RHYTHM + 1):
        if len(tail) < period * RHYTHM_CYCLES:
            break
        phases = np.array([np.median(ratio[i::period]) for i in range(period)])
        rest = float(np.abs(ratio - phases[np.arange(len(ratio)) % period]).mean())
        explains = (
            rest <= RHYTHM_GAIN * spread and np.ptp(phases) > LEAST_CHANGE and phases.min() > 0
        )
        # A multiple of the true period fits as well; only a clearly better one is worth more phases.
        if explains and (best is None or rest < 0.8 * best[0]):
            best = rest, period, phases
    if best is None:
        return None, np.ones(1)
    _, period, phases = best
    return period, np.roll(phases / phases.mean(), begin % period)


def persistence(x: Floats) -> float:
    """How much a step resembles the one before: the lag-1 correlation of ranks, from 0 to 0.95."""
    if len(x) < 8:
        return 0.0
    ranks = _ranks(x)
    ranks -= ranks.mean()
    power = float(ranks @ ranks)
    return min(0.95, max(0.0, float(ranks[1:] @ ranks[:-1]) / power)) if power > 0 else 0.0


def changes(x: Floats) -> list[int]:
    """The steps at which the level of a series jumps and stays."""
    found: list[int] = []
    todo = [(0, len(x))]
    # Against the level around it, or what is a change would count as steps that resemble each other.
    rest = x - running_median(x, LOCAL)
    for _ in range(MOST_SPLITS):
        if not todo:
            break
        todo.sort(key=lambda span: span[0] - span[1])
        start, stop = todo.pop(0)
        at = _split(x[start:stop], rest[start:stop])
        if at is None:
            if stop - start >= 2 * HIDING:
                todo += [(start, (start + stop) // 2), ((start + stop) // 2, stop)]
            continue
        if _sharp(x[start:stop], at):
            found.append(start + at)
        todo += [(start, start + at), (start + at, stop)]
    return _merged(x, _placed(x, sorted(found)))


def larger(few: Floats, many: Floats) -> float:
    """By how many deviations the ranks of a few values among many are higher than chance would have it."""
    m, n = len(few), len(many)
    if not m:
        return 0.0
    ranks = _ranks(np.concatenate((few, many)))[:m]
    return float(ranks.sum() - m * (m + n + 1) / 2) / math.sqrt(m * n * (m + n + 1) / 12)


def above_all(few: Floats, many: Floats) -> bool:
    """Whether neighbouring values lie higher than as many neighbours among the others do, but for two in a hundred."""
    m = min(len(few), len(many))
    if not m:
        return False
    top = np.quantile(many, 0.98)
    sums = np.concatenate(([0.0], np.cumsum(np.minimum(many, top))))
    return bool(np.minimum(few, top).mean() > np.quantile((sums[m:] - sums[:-m]) / m, 0.98))


def _ranks(x: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: Floats = ends - (counts - 1) / 2
    return mean[inverse]


def _split(x: Floats, rest: Floats) -> int | None:
    """Where the two sides differ most by rank, if that is neither chance nor too little to matter."""
    n = len(x)
    if n < 2 * LEAST_REGIME:
        return None
    k = np.arange(1, n)
    centred = np.cumsum(_ranks(x) - (n + 1) / 2)[:-1]
    z = np.abs(centred) / np.sqrt(k * (n - k) * (n + 1) / 12)
    at = int(np.argmax(z[LEAST_REGIME - 1 : n - LEAST_REGIME])) + LEAST_REGIME
    before, after = level(x[:at]), level(x[at:])
    if abs(after - before) <= LEAST_CHANGE * min(before, after):
        return None
    # Steps that resemble their neighbours are worth fewer than they are.
    alike = persistence(rest)
    return at if z[at - 1] * math.sqrt((1 - alike) / (1 + alike)) > CHANGE_Z else None


def _sharp(x: Floats, at: int) -> bool:
    near = min(50, max(10, len(x) // 8))
    jump = level(x[at : at + near]) - level(x[max(0, at - near) : at])
    return jump / (level(x[at:]) - level(x[:at])) >= SHARPNESS


def _placed(x: Floats, found: list[int]) -> list[int]:
    """Each change moved to where the two levels beside it fit best."""
    edges = [0, *found, len(x)]
    placed = []
    for before, at, after in zip(edges, edges[1:], edges[2:], strict=False):
        start, stop = max(before, at - 50), min(after, at + 50)
        low, high = np.median(x[start:at]), np.median(x[at:stop])
        piece = x[start:stop]
        # The cost of putting the change after the first k steps of the piece, for all k at once.
        cost = np.concatenate(([0.0], np.cumsum(np.abs(piece - low) - np.abs(piece - high))))
        margin = min(5, (stop - start) // 4)
        placed.append(start + margin + int(np.argmin(cost[margin : len(cost) - margin])))
    return placed


def _merged(x: Floats, found: list[int]) -> list[int]:
    """Without those between levels that are too much alike, the least first."""
    found = sorted(set(found))
    while found:
        edges = [0, *found, len(x)]
        levels = [level(x[a:b]) for a, b in pairwise(edges)]
        sizes = [abs(b - a) / max(min(a, b), 1e-300) for a, b in pairwise(levels)]
        least = int(np.argmin(sizes))
        if sizes[least] > LEAST_CHANGE:
            break
        del found[least]
    return found


def trend(x: Floats) -> tuple[float, bool]:
    """The slope per step (Theil-Sen), and whether it is more than chance (Mann-Kendall)."""
    block = -(-len(x) // TREND_POINTS)
    y = x if block == 1 else np.median(x[: len(x) // block * block].reshape(-1, block), axis=1)
    n = len(y)
    if n < 10:
        return 0.0, False
    i, j = np.triu_indices(n, 1)
    rises = y[j] - y[i]
    slope = float(np.median(rises / (j - i)))
    score = float(np.sign(rises).sum())
    alike = persistence(y - slope * np.arange(n))
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18 * (1 + alike) / (1 - alike))
    return slope / block, abs(score) > TREND_Z * deviation and slope != 0


def rate_interval(amounts: Floats, seconds: Floats) -> tuple[float, float, float] | None:
    """Amount per second, with its 95 % interval by a block bootstrap: steps resemble their neighbours."""
    n, total = len(seconds), float(seconds.sum())
    if total <= 0 or not math.isfinite(rate := float(amounts.sum()) / total):
        return None
    alike = persistence(seconds)
    length = min(max(1, n // 4), math.ceil((1 + 4 * alike / (1 - alike)) ** (1 / 3) * n ** (1 / 3)))
    starts = np.random.default_rng(BOOTSTRAP_SEED).integers(0, n, size=(RESAMPLES, -(-n // length)))
    done, spent = (_block_sums(values, length)[starts].sum(axis=1) for values in (amounts, seconds))
    rates = np.divide(done, spent, out=np.full(RESAMPLES, rate), where=spent > 0)
    low, high = np.quantile(rates, (0.025, 0.975))
    return (rate, float(low), float(high)) if np.isfinite(rates).all() else None


def _block_sums(values: Floats, length: int) -> Floats:
    """The sum of the `length` values from each place on, around the end."""
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: length - 1])))))
    return sums[length:] - sums[:-length]

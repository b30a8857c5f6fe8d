"""Steps that took no time, or next to none: they are said to be what they are, and no warning of numpy's is raised."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.watch.steady import analyze_steps

RNG = np.random.default_rng(7)
SERIES = {
    "none takes any": np.zeros(100),
    "next to none": np.full(100, 1e-320),
    "the second half takes none": np.where(np.arange(179) < 90, 1.0, 0.0),
    "one in three takes none": np.tile([1.0, 0.0, 5.0], 60),
    "a few take any": RNG.choice([0.0, 0.0, 0.0, 1e9, 1e-320], 281),
    "of every size": 10 ** RNG.uniform(-300, 9, 200),
    "from one to next to none": np.where(np.arange(120) < 60, 1.0, 1e-310),
}


@pytest.mark.parametrize("name", SERIES)
def test_times_of_nothing_are_analysed_without_a_warning(name: str) -> None:
    times = SERIES[name]
    kept = times.copy()
    found = analyze_steps(times, 100)
    assert found.steps == len(times)
    assert found.total_s == pytest.approx(float(times.sum()), abs=1e-99)
    numbers = (found.tokens_per_s, found.low, found.high, found.p50_s, found.overhead_s)
    assert all(number is None or np.isfinite(number) for number in numbers)
    assert (times == kept).all(), "they are the caller's"


def test_many_drawn_at_random_too() -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(30, 400))
        pool = rng.choice([0.0, 1e-320, 1e-300, 1e-12, 1.0, 2.0, 1e9], int(rng.integers(1, 5)))
        blocks = np.repeat(rng.choice(pool, -(-n // 7)), 7)[:n]
        for times in (rng.choice(pool, n), blocks):
            assert analyze_steps(times, 100).steps == n

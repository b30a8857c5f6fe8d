"""Permutations that are computed, not stored."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.permute import permute

BILLION = 1_000_000_000


def whole(n: int, key: int) -> list[int]:
    return permute(n, key, np.arange(n)).tolist()


@given(n=st.integers(1, 5000), key=st.integers(-(1 << 70), 1 << 70))
def test_every_number_comes_exactly_once(n: int, key: int) -> None:
    assert sorted(whole(n, key)) == list(range(n))


@given(n=st.integers(1, 1 << 62), key=st.integers(0, 1 << 64), data=st.data())
def test_a_place_holds_the_same_number_whatever_is_asked_for_with_it(
    n: int, key: int, data: Any
) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permute(n, key, np.array(places, np.int64))
    assert together.tolist() == [int(permute(n, key, np.array([place]))[0]) for place in places]
    assert 0 <= together.min() <= together.max() < n
    assert len(set(together.tolist())) == len(set(places))


def chi_square(seen: Any, expected: float) -> float:
    """Return how many standard deviations the squared distance from uniform is off its mean."""
    seen = np.asarray(seen, float).reshape(-1)
    freedom = seen.size - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    keys = 5000
    seen = Counter(tuple(whole(n, key)) for key in range(keys))
    orders = [*itertools.permutations(range(n))]
    assert chi_square([seen[order] for order in orders], keys / len(orders)) < 5


@pytest.mark.parametrize("n", [10**6, BILLION, 1 << 62])
def test_neighbours_of_a_long_range_land_anywhere(n: int) -> None:
    order = permute(n, 11, np.arange(200_000)) / n
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert chi_square(np.bincount((order * 100).astype(int), minlength=100), 2000) < 5
    assert (order == permute(n, 12, np.arange(200_000)) / n).mean() < 0.01


def test_a_billion_rows_need_no_memory_and_no_number_comes_twice() -> None:
    # Places from all over the range: a function that is not one to one would repeat some numbers.
    places = np.add.outer(np.arange(64) * (BILLION // 64), np.arange(20_000)).reshape(-1)
    tracemalloc.start()
    try:
        numbers = permute(BILLION, 1, places)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.unique(numbers).size == places.size
    assert peak < numbers.nbytes * 2 + (3 << 20)

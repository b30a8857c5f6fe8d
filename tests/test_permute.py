"""Permutations that are computed, not stored."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
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
def test_places_asked_for_together_or_apart_hold_the_same_numbers(
    n: int, key: int, data: Any
) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permute(n, key, np.array(places, np.int64))
    assert together.dtype == np.int64
    assert together.tolist() == [int(permute(n, key, np.array([place]))[0]) for place in places]
    assert 0 <= together.min() <= together.max() < n
    assert len(set(together.tolist())) == len(set(places))


def test_the_order_is_the_same_in_another_process() -> None:
    code = "import numpy as np; from penstock.order.permute import permute; print(permute(12345, 6, np.arange(50)).tolist())"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert out.strip() == str(permute(12345, 6, np.arange(50)).tolist())


def chi_square(seen: Any, expected: float) -> float:
    """How many standard deviations the squared distance from uniform is away from its mean."""
    seen = np.asarray(seen, float).reshape(-1)
    freedom = seen.size - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    keys = 5000
    seen = Counter(tuple(whole(n, key)) for key in range(keys))
    orders = [*itertools.permutations(range(n))]
    assert chi_square([seen[order] for order in orders], keys / len(orders)) < 5


@pytest.mark.parametrize("n", [10**6, BILLION, 10**15, 1 << 62])
def test_neighbours_of_a_long_range_land_anywhere(n: int) -> None:
    order = permute(n, 11, np.arange(200_000)) / n
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert chi_square(np.bincount((order * 100).astype(int), minlength=100), 2000) < 5
    assert 0.49 < (order[1:] > order[:-1]).mean() < 0.51


def test_other_keys_and_lengths_give_other_orders() -> None:
    places = np.arange(1000)
    orders = [
        permute(BILLION, 1, places),
        permute(BILLION, 2, places),
        permute(BILLION + 1, 1, places),
    ]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).mean() < 0.01


def test_a_billion_rows_take_no_memory_and_no_number_twice() -> None:
    # Places from all over the range: of so many numbers, a function that is not one to one repeats some.
    places = (np.arange(64) * (BILLION // 64))[:, None] + np.arange(20_000)
    permute(BILLION, 1, places[0])
    tracemalloc.start()
    try:
        first = permute(BILLION, 1, places[0])
        small = tracemalloc.get_traced_memory()[1]
        numbers = permute(BILLION, 1, places)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(first, numbers[0])
    assert np.unique(numbers).size == places.size
    assert small < 3 << 20
    assert peak < numbers.nbytes * 2 + (3 << 20)


@pytest.mark.parametrize("n", [5, 1000, BILLION])
@pytest.mark.parametrize("wrong", [-1, "n"])
def test_a_place_outside_of_the_range_is_an_index_error(n: int, wrong: Any) -> None:
    place = n if wrong == "n" else wrong
    with pytest.raises(IndexError, match=rf"place {place} is outside of range\({n}\)"):
        permute(n, 1, np.array([0, place]))

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

from penstock.errors import ConfigError
from penstock.order.permute import permute

BILLION = 1_000_000_000


def whole(n: int, key: int) -> list[int]:
    return permute(n, key, np.arange(n)).tolist()


@given(n=st.integers(1, 5000), key=st.integers(-(1 << 70), 1 << 70))
def test_every_number_comes_exactly_once(n: int, key: int) -> None:
    assert sorted(whole(n, key)) == list(range(n))


@pytest.mark.parametrize(
    "n", [255, 256, 257, 2**10 - 1, 2**10, 2**10 + 1, 961, 962, 992, 993, 2**16 + 1, 300_007]
)
def test_every_number_comes_exactly_once_at_the_edges_of_the_table(n: int) -> None:
    assert np.array_equal(np.sort(permute(n, 5, np.arange(n))), np.arange(n))


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


def test_the_shape_asked_for_is_the_shape_given() -> None:
    places = np.arange(12).reshape(3, 4)
    assert (
        permute(1000, 1, places).tolist()
        == permute(1000, 1, places.reshape(-1)).reshape(3, 4).tolist()
    )
    assert permute(1000, 1, places[:, ::2]).tolist() == permute(1000, 1, places)[:, ::2].tolist()
    assert permute(1000, 1, np.empty(0, np.int64)).shape == (0,)
    assert permute(9, 1, np.arange(3, dtype=np.uint32)).tolist() == whole(9, 1)[:3]


def test_a_block_of_places_is_the_same_as_its_parts() -> None:
    places = np.arange(100_000)
    parts = [permute(BILLION, 3, places[at : at + 7001]) for at in range(0, 100_000, 7001)]
    assert np.array_equal(permute(BILLION, 3, places), np.concatenate(parts))


def test_the_order_never_changes_between_releases() -> None:
    """These numbers are part of every stream that was ever shuffled with them: they must stay."""
    assert whole(1, 0) == [0]
    assert whole(2, 42) == [0, 1]
    assert whole(10, 42) == [7, 0, 8, 2, 4, 5, 3, 9, 1, 6]
    assert permute(256, 7, np.arange(8)).tolist() == [121, 13, 170, 215, 211, 167, 75, 140]
    assert permute(257, 7, np.arange(8)).tolist() == [0, 123, 99, 244, 117, 105, 26, 82]
    assert permute(100_000, 42, np.arange(8)).tolist() == [
        19904,
        54519,
        88580,
        11801,
        82788,
        25861,
        71202,
        22142,
    ]
    assert permute(BILLION, 42, np.array([0, 1, 2, BILLION - 1])).tolist() == [
        927174116,
        930381377,
        694094071,
        944715631,
    ]
    assert permute(1 << 62, -1, np.array([0, 1, (1 << 62) - 1])).tolist() == [
        767406202135248788,
        901830007472469720,
        2568408631345414865,
    ]


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


@pytest.mark.parametrize("n", [100, 257, 1000])
def test_any_number_is_equally_likely_at_any_place(n: int) -> None:
    keys = 2000
    places = np.array([0, 1, n // 2, n - 1])
    seen = np.zeros((4, n))
    for key in range(keys):
        seen[np.arange(4), permute(n, key, places)] += 1
    assert chi_square(seen, keys / n) < 5


@pytest.mark.parametrize("n", [257, 1000])
def test_what_follows_a_number_does_not_depend_on_it(n: int) -> None:
    steps = np.zeros(n)
    for key in range(500):
        order = permute(n, key, np.arange(n))
        steps += np.bincount((order[1:] - order[:-1]) % n, minlength=n)
    assert steps[0] == 0
    assert chi_square(steps[1:], steps.sum() / (n - 1)) < 5


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_billion_rows_come_exactly_once() -> None:
    seen = np.zeros(BILLION // 8, np.uint8)
    block = 2_000_000
    for at in range(0, BILLION, block):
        numbers = permute(BILLION, 9, np.arange(at, at + block))
        assert 0 <= numbers.min() <= numbers.max() < BILLION
        np.bitwise_or.at(seen, numbers >> 3, np.left_shift(1, numbers & 7).astype(np.uint8))
    # A billion numbers within the range that together set every bit: none came twice.
    assert (seen == 255).all()


@pytest.mark.parametrize("n", [5, 1000, BILLION])
@pytest.mark.parametrize("wrong", [-1, "n"])
def test_a_place_outside_of_the_range_is_an_index_error(n: int, wrong: Any) -> None:
    place = n if wrong == "n" else wrong
    with pytest.raises(IndexError, match=rf"place {place} is outside of range\({n}\)"):
        permute(n, 1, np.array([0, place]))


@pytest.mark.parametrize("n", [0, -1, (1 << 62) + 1, 2.5])
def test_a_range_that_cannot_be_is_refused(n: Any) -> None:
    with pytest.raises(ConfigError, match=f"n={n}"):
        permute(n, 1, np.array([0]))


def test_places_that_are_no_whole_numbers_are_refused() -> None:
    wrong: Any = np.array([0.5])
    with pytest.raises(ConfigError, match="float64"):
        permute(10, 1, wrong)

"""Rows of random ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, SyntheticDataset


@given(
    seed=st.integers(0, 1 << 70),
    vocab=st.integers(1, 1 << 32),
    seq_len=st.integers(1, 50),
    asked=st.lists(st.integers(0, 99), min_size=1, max_size=8),
)
def test_a_row_depends_on_seed_and_number_only(
    seed: int, vocab: int, seq_len: int, asked: list[int]
) -> None:
    data = SyntheticDataset(vocab, seq_len, 100, seed)
    rows = data.__getitems__(np.array(asked))
    assert rows.max() < vocab
    assert rows.tolist() == [data[i].tolist() for i in asked]
    more = SyntheticDataset(vocab, seq_len + 9, 1000, seed)
    assert more.__getitems__(asked)[:, : seq_len + 1].tolist() == rows.tolist()


@pytest.mark.parametrize("vocab", [2, 100, 50257])
def test_all_ids_are_equally_likely(vocab: int) -> None:
    ids = SyntheticDataset(vocab, 999, 1000).__getitems__(np.arange(1000)).reshape(-1).astype(int)
    bins = min(vocab, 100)
    found = np.bincount(ids * bins // vocab, minlength=bins)
    expected = np.bincount(np.arange(vocab) * bins // vocab) / vocab * ids.size
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert (chi_square - (bins - 1)) / np.sqrt(2 * (bins - 1)) < 5


@pytest.mark.parametrize("wrong", [10, -11])
def test_a_row_out_of_range_is_an_index_error(wrong: int) -> None:
    data = SyntheticDataset(100, 8, 10)
    assert data[-1].tolist() == data[9].tolist()
    with pytest.raises(IndexError, match="has rows 0 to 9"):
        data[wrong]


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 0), ("vocab_size", (1 << 32) + 1), ("num_samples", 0), ("seed", 0.5)],
)
def test_an_invalid_argument_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        SyntheticDataset(**{name: value})  # type: ignore[arg-type]

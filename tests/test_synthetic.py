"""Rows of random ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.read.token_files import SyntheticDataset


@given(
    seed=st.integers(0, 1 << 70),
    vocab=st.integers(1, 1 << 32),
    seq_len=st.integers(1, 50),
    asked=st.lists(st.integers(0, 99), min_size=1, max_size=8),
)
def test_a_row_is_the_same_however_it_is_asked_for(
    seed: int, vocab: int, seq_len: int, asked: list[int]
) -> None:
    data = SyntheticDataset(vocab, seq_len, 100, seed)
    rows = data.__getitems__(np.array(asked))
    assert rows.max() < vocab
    assert rows.dtype == data.dtype == (np.uint16 if vocab <= 1 << 16 else np.uint32)
    assert rows.tolist() == [data[i].tolist() for i in asked]
    more = SyntheticDataset(vocab, seq_len + 9, 1000, seed)
    assert more.__getitems__(asked)[:, : seq_len + 1].tolist() == rows.tolist()


@pytest.mark.parametrize("vocab", [2, 100, 50257])
def test_all_ids_are_equally_likely(vocab: int) -> None:
    rows = SyntheticDataset(vocab, 999, 1000).__getitems__(np.arange(1000))
    buckets = np.bincount(
        rows.reshape(-1).astype(int) * min(vocab, 100) // vocab, minlength=min(vocab, 100)
    )
    width = np.bincount(np.arange(vocab) * min(vocab, 100) // vocab) / vocab * rows.size
    freedom = buckets.size - 1
    assert (((buckets - width) ** 2 / width).sum() - freedom) / np.sqrt(2 * freedom) < 5


def test_rows_have_no_documents_and_say_their_number() -> None:
    data = SyntheticDataset(100, 8, 10)
    rows, columns = data.boundaries([1, 2])
    assert rows.size == columns.size == 0
    (span,) = data.spans(7)
    assert (span.file, span.row, span.tokens, span.at) == ("synthetic", 7, (0, 9), (0, 9))


@pytest.mark.parametrize("wrong", [10, -11])
def test_a_row_that_is_not_there_is_an_index_error(wrong: int) -> None:
    data = SyntheticDataset(100, 8, 10)
    assert data[-1].tolist() == data[9].tolist()
    for ask in (
        lambda: data[wrong],
        lambda: data.__getitems__([0, wrong]),
        lambda: data.spans(wrong),
    ):
        with pytest.raises(IndexError, match="has rows 0 to 9"):
            ask()


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 0},
        {"vocab_size": (1 << 32) + 1},
        {"seq_len": 0},
        {"num_samples": 0},
        {"seed": -1},
        {"seed": 0.5},
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        SyntheticDataset(**settings)

"""Rows of random ids that need no file: to try a model, or to measure what a loader can do at most.

A row is hashed from the seed and its number (about 5 ns an id), so it is the same in any order, on any
machine and for any number of rows; a shorter row is the beginning of a longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.config import whole_number
from penstock.errors import ConfigError
from penstock.order.shuffle import I64, mix, mix_array
from penstock.read.token_files import Ids, RowDataset
from penstock.types import Span

GOLDEN, HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


class SyntheticDataset(RowDataset):
    """A map-style dataset of `num_samples` rows of `seq_len + 1` random ids below `vocab_size`."""

    def __init__(
        self, vocab_size: int = 50257, seq_len: int = 1024, num_samples: int = 10000, seed: int = 42
    ) -> None:
        """Describe the rows; a row is made when it is asked for."""
        self.vocab_size = whole_number("vocab_size", vocab_size, 1)
        self.seq_len = whole_number("seq_len", seq_len, 1)
        self.num_samples = whole_number("num_samples", num_samples, 1)
        self.seed = whole_number("seed", seed, 0)
        if self.vocab_size > 1 << 32:
            raise ConfigError(f"vocab_size={vocab_size}: ids have 32 bits, so at most {1 << 32}")
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def __repr__(self) -> str:
        return (
            f"SyntheticDataset(vocab_size={self.vocab_size}, seq_len={self.seq_len}, "
            f"num_samples={self.num_samples}, seed={self.seed})"
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        keys = mix_array(mix(self.seed), self._checked(indices))
        # splitmix64, each row a stream of it; then the upper 32 bits, scaled to the vocabulary.
        x = keys[:, None] + np.arange(1, self.seq_len + 2, dtype=np.uint64) * GOLDEN
        for shift, factor in STEPS:
            x ^= x >> shift
            x *= factor
        x >>= HALF
        x *= np.uint64(self.vocab_size)
        x >>= HALF
        return x.astype(self.dtype)

    def spans(self, index: int) -> list[Span]:
        """Return where a row comes from: its number."""
        row, length = int(self._checked([index])[0]), self.seq_len + 1
        return [Span("synthetic", None, None, row, (0, length), (0, length))]

    def data_id(self) -> dict[str, Any]:
        """Return what identifies the data in a state."""
        sizes = {"vocab_size": self.vocab_size, "num_samples": self.num_samples}
        return {"kind": "synthetic", "seed": self.seed, **sizes}

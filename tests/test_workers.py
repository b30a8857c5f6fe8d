"""Worker processes under a whole loader: the same stream, also when they are killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, SyntheticDataset, TextDataset


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pinning needs Linux")
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_workers_keep_to_their_cores(workers: Any) -> None:
    core = min(os.sched_getaffinity(0))
    with AsyncDataLoader(Cores(), 2, n_workers=2, workers=workers, cpus=[core], epochs=1) as loader:
        assert all((np.asarray(batch.inputs) == core).all() for batch in loader)
    assert core in os.sched_getaffinity(0)


class Cores:
    """Which core the worker may use; -1 if there are more."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        allowed = os.sched_getaffinity(0)
        return np.array([[min(allowed) if len(allowed) == 1 else -1]])


@pytest.mark.parametrize("n_workers", [1, 2, 5, 12])
@pytest.mark.parametrize("prefetch_size", [1, 4, 8])
def test_every_combination_of_workers_and_prefetch_runs(
    corpus: Path, n_workers: int, prefetch_size: int
) -> None:
    how: dict[str, Any] = {"n_workers": n_workers, "prefetch_size": prefetch_size, "epochs": 1}
    rows = SyntheticDataset(vocab_size=100, seq_len=8, num_samples=64)
    with AsyncDataLoader(rows, 4, **how) as loader:
        assert sum(1 for _ in loader) == 16
    text = TextDataset(corpus / "many", tokenizer="byte", seq_len=64, shuffle_chunks=4)
    with AsyncDataLoader(text, 4, shuffle=True, **how) as loader:
        assert sum(1 for _ in loader) > 50

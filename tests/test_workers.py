"""Worker processes under a whole loader: the same stream, also when they are killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import AsyncDataLoader, SyntheticDataset, TextDataset
from penstock.errors import WorkerDied
from tests import contracts


class Slow:
    """Samples that take a moment, in Python."""

    def __init__(self, length: int = 400, seconds: float = 0.002) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return np.arange(index, index + 33)


class Deadly(Slow):
    """One of its samples ends whoever asks for it."""

    def __getitem__(self, index: int) -> Any:
        if index == 37:
            os._exit(3)
        return super().__getitem__(index)


def worker_processes() -> list[psutil.Process]:
    """The processes that a fork server has started for this one."""
    servers = psutil.Process().children()
    return [process for server in servers for process in server.children()]


def test_processes_that_are_killed_lose_and_repeat_nothing() -> None:
    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(Slow(), 8, seed=3, prefetch_size=4, **how)

    expected = contracts.ledger(make, 40, n_workers=2)
    with make(n_workers=2, workers="process") as loader:
        got = contracts.take(loader, 10)
        for _ in range(2):
            worker_processes()[0].kill()
            got += contracts.take(loader, 15)
        assert loader.stats().worker_restarts == 2
    assert got == expected


def test_a_sample_that_kills_its_workers_ends_in_an_error_that_names_it() -> None:
    with AsyncDataLoader(Deadly(), 4, shuffle=False, n_workers=2, workers="process") as loader:
        with pytest.raises(WorkerDied, match=r"two worker processes died.*36"):
            contracts.take(loader, 50)
        assert loader.stats().batches == 9  # everything before it


def test_an_error_in_a_process_arrives_with_its_type_and_notes() -> None:
    with AsyncDataLoader(Slow(), 4, n_workers=1, workers="process", preprocess=fails) as loader:
        with pytest.raises(ZeroDivisionError) as caught:
            next(loader)
        assert any("in preprocess, sample" in note for note in caught.value.__notes__)


def fails(sample: Any) -> Any:
    return sample / 0 if isinstance(sample, int) else 1 // 0


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

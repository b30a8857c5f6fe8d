"""Worker processes under a whole loader: the same stream, also when they are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import AsyncDataLoader, SyntheticDataset
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


def large(sample: Any) -> Any:
    """Enough to go through shared memory."""
    return np.tile(sample, 2000)


def pids(loader: AsyncDataLoader) -> list[int]:
    assert loader._pipeline is not None
    pool: Any = loader._pipeline._pool
    return [
        worker.pid
        for worker in list(pool._workers)
        if worker is not None and worker.pid is not None
    ]


def running(pid: int) -> bool:
    """Whether a process is there to be killed: one that was may not have been missed yet."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("most", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments_lose_and_repeat_nothing(most: int) -> None:
    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(Slow(), 8, seed=3, preprocess=large, prefetch_size=4, **how)

    batches = 6 * most
    expected = contracts.ledger(make, batches, n_workers=2)
    chance = random.Random(5)
    got: list[str] = []
    kills = 0
    with make(n_workers=2, workers="process") as loader:
        while len(got) < batches:
            got += contracts.take(loader, 1)
            # A moment between two batches, and some time into the work on later ones.
            if kills < most and len(got) % 5 == 0:
                time.sleep(chance.random() * 0.02)
                alive = [pid for pid in pids(loader) if running(pid)]
                if alive:
                    os.kill(chance.choice(alive), signal.SIGKILL)
                    kills += 1
        restarts = loader.stats().worker_restarts
    assert kills == most
    assert restarts >= 0.8 * most  # one that was killed while it was being replaced counts once
    assert got == expected


def test_a_sample_that_kills_its_workers_ends_in_an_error_that_names_it() -> None:
    with AsyncDataLoader(Deadly(), 4, shuffle=False, n_workers=2, workers="process") as loader:
        with pytest.raises(WorkerDied, match=r"exit code 3.*36"):
            contracts.take(loader, 50)
        assert loader.stats().batches == 9  # everything before it


def test_an_error_in_a_process_arrives_with_its_type_and_notes() -> None:
    with AsyncDataLoader(Slow(), 4, n_workers=1, workers="process", preprocess=fails) as loader:
        with pytest.raises(ZeroDivisionError) as caught:
            next(loader)
        assert any("in preprocess, sample" in note for note in caught.value.__notes__)


def fails(sample: Any) -> Any:
    return sample / 0 if isinstance(sample, int) else 1 // 0


def test_shutdown_does_not_wait_for_a_process_that_is_busy() -> None:
    loader = AsyncDataLoader(Slow(seconds=60.0), 4, n_workers=2, workers="process").start()
    running = threading.Event()
    running.wait(3.0)  # long enough for them to be at it
    begun = time.monotonic()
    loader.shutdown()
    assert time.monotonic() - begun < 30.0


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


@pytest.mark.parametrize("workers", [1, 2, 4, 5, 12])
@pytest.mark.parametrize("prefetch", [1, 2, 3, 4, 8, 16])
def test_every_combination_of_workers_and_prefetch_runs(workers: int, prefetch: int) -> None:
    data = SyntheticDataset(vocab_size=100, seq_len=8, num_samples=64)
    with AsyncDataLoader(data, 4, n_workers=workers, prefetch_size=prefetch, epochs=1) as loader:
        assert sum(1 for _ in loader) == 16

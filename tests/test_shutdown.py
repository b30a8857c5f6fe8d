"""Shutdowns and interrupts at random moments: nothing is left behind, and no batch is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import penstock
from penstock.pipeline import Pipeline
from tests import contracts
from tests.kinds import KINDS

NAMES = (
    "parquet concat shuffled", "gz concat", "iterable concat", "samples shuffled",
    "iterated samples", "tokens", "mixture restart shuffled",
)  # fmt: skip


@pytest.mark.parametrize("rounds", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_shutdowns_at_random_moments_leave_no_thread_and_no_descriptor(
    corpus: Path, rounds: int
) -> None:
    rng = random.Random(rounds)
    moment = threading.Event()
    streams: dict[str, list[str]] = {}
    before = contracts.open_descriptors()
    for turn in range(rounds):
        name = NAMES[turn % len(NAMES)]
        make = KINDS[name].maker(corpus)
        expected = streams.setdefault(name, contracts.ledger(make, 12))
        loader = make(n_workers=rng.choice([1, 2, 5]), prefetch_size=rng.choice([1, 2, 8]))
        loader.start()
        moment.wait(rng.choice([0.0, rng.random() * 0.003, rng.random() * 0.03]))
        got = contracts.take(loader, rng.choice([0, 0, 1, 5]))
        if rng.random() < 0.3:
            loader.warmup(rng.randrange(1, 12), timeout=rng.random() * 0.01)
        moment.wait(rng.choice([0.0, rng.random() * 0.003]))
        loader.shutdown()
        assert not contracts.own_threads(), name
        if rng.random() < 0.3:  # it continues after the last batch that was handed out
            got += contracts.take(loader, 3)
            loader.shutdown()
        assert got == expected[: len(got)], name
    del loader
    assert len(contracts.open_descriptors()) <= len(before)


# Ctrl-C


def interrupt_within_next(_: int, frame: FrameType | None) -> None:
    """Raise as Ctrl-C does, in the loader's own code that takes a batch.

    Not while threads are started or stopped, and not inside of the standard library, whose locks and
    callbacks do not survive an exception everywhere: then a moment later.
    """
    own = frame is not None and frame.f_code.co_filename.startswith(
        str(Path(penstock.__file__).parent)
    )
    while frame is not None:
        frame = frame.f_back
        if frame is not None and frame.f_code is Pipeline.next.__code__:
            if own:
                raise KeyboardInterrupt
            signal.setitimer(signal.ITIMER_REAL, 2e-5)
            return


@pytest.mark.parametrize("name", ["parquet concat shuffled", "samples shuffled", "iterable concat"])
@pytest.mark.parametrize("n_workers", [0, 2])
# An interrupt between open() and its `with` leaves the file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_within_next_lose_and_repeat_no_batch(
    corpus: Path, name: str, n_workers: int
) -> None:
    make = KINDS[name].maker(corpus, n_workers=n_workers, prefetch_size=2)
    expected = contracts.ledger(make, 300)
    rng = random.Random(1)
    got: list[str] = []
    interrupted = 0
    usual = signal.signal(signal.SIGALRM, interrupt_within_next)
    try:
        with make() as loader:
            while len(got) < len(expected) and interrupted < 8:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.random() ** 3 * 0.002)
                try:
                    got += contracts.take(loader, 1)
                except KeyboardInterrupt:
                    interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert got == expected[: len(got)]
    assert interrupted


SCRIPT = """
import itertools, os, signal, threading
import numpy as np
from penstock import AsyncDataLoader

released = threading.Event()

def samples():
    for row in itertools.count():
        if row == 20 and not released.is_set():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            assert released.wait(60)
        yield np.full(4, row)

with AsyncDataLoader(samples, 2, n_workers=2, prefetch_size=4) as loader:
    rows = []
    try:
        while True:
            rows.append(int(next(loader).inputs[0, 0]))
    except KeyboardInterrupt:
        released.set()
    print(rows)
    print([int(next(loader).inputs[0, 0]) for _ in range(5)])
"""


def test_ctrl_c_while_a_batch_is_waited_for_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines() == [
        str(list(range(0, 20, 2))),
        str(list(range(20, 30, 2))),
    ], done.stderr

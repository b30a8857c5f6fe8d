"""Warmup of any loader: the same items, and no thread left behind."""

from __future__ import annotations

import gc
import multiprocessing
import random
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AsyncDataLoader,
    ConfigError,
    SyntheticDataset,
    warmup_loader,
    warmup_loader_with_first_batch,
)
from penstock.feed import warmup
from tests import contracts

ROOT = Path(__file__).parent.parent
DEADLINE_S = 60.0

# torchdata 0.11 warns of itself, and DataLoader forks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Counting:
    """Counts up. Waits before the item `hold`, and raises in the place of the items in `faults`."""

    def __init__(self, end: int = 1000, hold: int | None = None, faults: Sequence[int] = ()):
        self.end, self.hold, self.faults = end, hold, faults
        self.pulled = 0
        self.held, self.release = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = self.pulled
        self.pulled += 1
        if number == self.hold:
            self.held.set()
            assert self.release.wait(DEADLINE_S)
        if number in self.faults:
            raise ValueError(f"at {number}")
        if number >= self.end:
            raise StopIteration
        return number


class Events:
    """Stands in for a heartbeat."""

    def __init__(self, prefix: str | None = None):
        self.events: list[tuple[str, dict[str, Any]]] = []
        if prefix is not None:
            self.prefix = prefix

    def event(self, msg: str, **fields: Any) -> None:
        self.events.append((msg, fields))


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "penstock-warmup"]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def timed_out_in_an_item() -> tuple[Counting, Any]:
    """Return a warmup of 5 whose timeout passed during the third item, however busy the machine."""
    for timeout in (0.1, 2.0, 30.0):
        source = Counting(6, hold=2)
        warmed = warmup_loader(source, 5, timeout)
        if source.held.is_set() and warmed.result.filled == 2:
            return source, warmed
        source.release.set()
        warmed.close()
    raise AssertionError("the thread never got as far")


# The same items


def test_any_size_fault_and_timeout_gives_what_the_bare_iterator_gives() -> None:
    def drain(items: Iterator[int]) -> list[Any]:
        out: list[Any] = []
        while not out or out[-1] != "end":
            try:
                out.append(next(items))
            except StopIteration:
                out.append("end")
            except ValueError as error:
                out.append(str(error))
        return out

    for seed in range(60):
        rng = random.Random(seed)
        end = rng.randrange(12)
        faults = rng.sample(range(12), rng.randrange(3))
        plain = drain(Counting(end, faults=faults))
        source = Counting(end, faults=faults)
        with warmup_loader(
            source, rng.choice([1, 5, 20, "auto"]), rng.choice([1e-6, 30])
        ) as warmed:
            assert drain(warmed) == plain, f"seed {seed}"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataloader_gives_the_same_batches_for_the_same_seed(num_workers: int) -> None:
    import torch
    from torch.utils.data import DataLoader

    def loader() -> DataLoader[int]:
        torch.manual_seed(7)
        return DataLoader(list(range(24)), batch_size=3, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]

    plain = [batch.tolist() for batch in loader()]
    before = set(multiprocessing.active_children())
    with warmup_loader(loader(), 4, timeout=DEADLINE_S) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (4, 4)
        assert [batch.tolist() for batch in warmed] == plain
    gc.collect()
    until(lambda: not set(multiprocessing.active_children()) - before)


def test_a_validation_iterator_is_warmed_up_beside_the_training_one() -> None:
    with warmup_loader(Counting(), 4) as train, warmup_loader(Counting(3), 4) as validation:
        assert [next(train) for _ in range(3)] == [0, 1, 2]
        assert list(validation) == [0, 1, 2]
        assert [next(train) for _ in range(3)] == [3, 4, 5]


# How far ahead


def test_the_thread_ends_with_the_warmup_and_nothing_more_is_pulled() -> None:
    source = Counting()
    warmed = warmup_loader(source, 5, timeout=DEADLINE_S)
    assert (source.pulled, threads()) == (5, [])
    assert [next(warmed) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    assert source.pulled == 6


def test_an_item_that_is_being_fetched_at_the_timeout_comes_next() -> None:
    source, warmed = timed_out_in_an_item()
    with warmed:
        assert (warmed.result.requested, warmed.result.filled) == (5, 2)
        assert [next(warmed), next(warmed)] == [0, 1]
        source.release.set()
        until(lambda: not threads())
        assert source.pulled == 3
        assert list(warmed) == [2, 3, 4, 5]


@pytest.mark.parametrize("off", [{"batches": 0}, {"timeout": 0}], ids=["batches", "timeout"])
def test_off_means_no_thread_and_nothing_pulled(off: dict[str, Any]) -> None:
    source, heard = Counting(4), Events()
    warmed = warmup_loader(source, heartbeat=heard, **off)
    assert (source.pulled, threads(), heard.events) == (0, [], [])
    assert warmed.result == (0, 0, 0.0)
    assert list(warmed) == [0, 1, 2, 3]


@pytest.mark.parametrize(("quick_s", "wanted"), [(DEADLINE_S, 1), (0.0, 8)])
def test_auto_fetches_more_only_after_a_slow_first_item(
    quick_s: float, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "QUICK_S", quick_s)
    with warmup_loader(Counting(12), "auto", DEADLINE_S) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (wanted, wanted)
        assert list(warmed) == list(range(12))


def test_a_process_ends_in_the_middle_of_a_warmup_and_needs_no_torch() -> None:
    code = (
        "import sys, time; from penstock.feed.warmup import warmup_loader\n"
        "def items():\n    yield 0\n    time.sleep(1000)\n"
        "warmed = warmup_loader(items(), 4, 0.5)\n"
        "print(next(warmed), [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "0 []")


# The first batch


def test_a_first_item_fetched_by_the_caller_comes_first() -> None:
    source = Counting(6)
    first = next(source)
    with warmup_loader_with_first_batch(source, first, 3, DEADLINE_S) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (3, 3)
        assert list(warmed) == [0, 1, 2, 3, 4, 5]


# State


@pytest.mark.parametrize(("num_workers", "steps"), [(0, range(9)), (1, (0, 2, 7))])
def test_a_stateful_dataloader_resumes_after_the_last_batch_handed_out(
    num_workers: int, steps: Any
) -> None:
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(seed: int) -> Any:
        torch.manual_seed(seed)
        return StatefulDataLoader(
            list(range(16)), batch_size=2, shuffle=True, num_workers=num_workers
        )

    plain = [batch.tolist() for batch in loader(1)]
    states, got = [], []
    with warmup_loader(loader(1), 4, DEADLINE_S) as warmed:
        for _ in range(8):
            states.append(warmed.state_dict())
            got.append(next(warmed).tolist())
        states.append(warmed.state_dict())
    assert got == plain
    for step in steps:
        resumed = loader(2)
        resumed.load_state_dict(states[step])
        assert [batch.tolist() for batch in resumed] == plain[step:], f"after {step} batches"


# Our own loader


def own(**options: Any) -> AsyncDataLoader:
    data = SyntheticDataset(vocab_size=100, seq_len=8, num_samples=40, seed=3)
    return AsyncDataLoader(data, 4, seed=5, epochs=1, n_workers=2, **options)


def test_our_own_loader_fills_its_own_queue_with_the_same_batches() -> None:
    plain = contracts.ledger(own, 100)
    with warmup_loader(own(prefetch_size=2), 6, DEADLINE_S) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (6, 6)
        assert threads() == []
        assert [contracts.digest(batch) for batch in warmed] == plain


# Events and arguments


@pytest.mark.parametrize(
    ("make", "prefix", "msg"),
    [
        (lambda: Counting(6), None, "loader_warmup"),
        (own, "fineweb_loader_", "fineweb_loader_warmup"),
    ],
)
def test_a_heartbeat_receives_the_result(
    make: Callable[[], Any], prefix: str | None, msg: str
) -> None:
    heard = Events(prefix)
    with warmup_loader(make(), 3, DEADLINE_S, heartbeat=heard) as warmed:
        wait_ms = warmed.result.wait_ms
    assert wait_ms > 0
    fields = {"requested": 3, "filled": 3, "wait_ms": wait_ms}
    again = {"fetch_warmup_batches": 3, "fetch_warmup_wait_ms": wait_ms}
    assert heard.events == [(msg, fields | again)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": -1}, "batches=-1: must be an integer ≥ 0"),
        ({"batches": "all"}, "batches='all': must be an integer"),
        ({"timeout": float("nan")}, "timeout=nan: must be a number ≥ 0"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_fetched(
    options: dict[str, Any], message: str
) -> None:
    source = Counting(3)
    with pytest.raises(ConfigError, match=message):
        warmup_loader(source, **options)
    assert source.pulled == 0


def test_the_script_gives_the_same_functions() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "warmup_helper.py"))
    for function in (warmup_loader, warmup_loader_with_first_batch):
        assert script[function.__name__] is function

"""Warmup of loaders that are not ours: the same items, ready sooner; nothing lost, repeated or left behind."""

from __future__ import annotations

import gc
import importlib.util
import logging
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, SyntheticDataset, pipeline
from penstock.errors import ConfigError, LoaderClosed, StateError
from penstock.feed import warmup
from penstock.feed.warmup import Warmed, warmup_loader, warmup_loader_with_first_batch

ROOT = Path(__file__).parent.parent
DEADLINE_S = 60.0

with_torch = [
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning"
    ),  # torchdata 0.11 of itself
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded:DeprecationWarning"
    ),  # DataLoader forks
]


def marked(test: Any) -> Any:
    for mark in with_torch:
        test = mark(test)
    return test


class Counting:
    """Counts up. Can be held before some items, raises in the place of others, and knows what was pulled."""

    def __init__(
        self,
        end: int | None = None,
        hold: int | None = None,
        faults: dict[int, Exception] | None = None,
    ):
        self.end, self.hold, self.faults = end, hold, faults or {}
        self.pulled = self.taken = self.most = 0
        self.held, self.let_go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = self.pulled
        self.pulled += 1
        self.most = max(self.most, self.pulled - self.taken)
        if number == self.hold:
            self.held.set()
            assert self.let_go.wait(DEADLINE_S)
        if number in self.faults:
            raise self.faults[number]
        if self.end is not None and number >= self.end:
            raise StopIteration
        return number


class Heard:
    """Stands where a heartbeat would."""

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
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.005)


def timed_out_in_an_item(
    prefetch: int | None = None, end: int = 6, hold: int = 2
) -> tuple[Counting, Warmed[int]]:
    """A warmup that ended while an item was under way, however busy the machine is."""
    for timeout in (0.1, 2.0, 30.0):
        source = Counting(end, hold=hold)
        warmed = warmup_loader(source, 5, timeout, prefetch=prefetch)
        if source.held.is_set() and warmed.result.filled == hold:
            return source, warmed
        source.let_go.set()
        warmed.close()
    raise AssertionError("the thread never got as far")


# The same items


@pytest.mark.parametrize("prefetch", [None, 0, 1, 3, 50])
@pytest.mark.parametrize("batches", [0, 1, 4, 100, "auto"])
def test_a_generator_gives_the_same_items_in_the_same_order(
    batches: Any, prefetch: int | None
) -> None:
    with warmup_loader((n * n for n in range(20)), batches, prefetch=prefetch) as warmed:
        assert list(warmed) == [n * n for n in range(20)]
        assert list(warmed) == []  # the end stays the end


def test_any_mixture_of_sizes_faults_and_pace_gives_what_the_bare_iterator_gives() -> None:
    def drain(items: Iterator[int], pauses: random.Random | None) -> list[Any]:
        out: list[Any] = []
        while not out or out[-1] != "end":
            try:
                out.append(next(items))
            except StopIteration:
                out.append("end")
            except ValueError as error:
                out.append(str(error))
            if pauses is not None and pauses.random() < 0.2:
                threading.Event().wait(0.001)
        return out

    for seed in range(60):
        rng = random.Random(seed)
        end = rng.randrange(12)
        faults = rng.sample(range(12), rng.randrange(3))
        plain = drain(Counting(end, faults={n: ValueError(f"at {n}") for n in faults}), None)
        source = Counting(end, faults={n: ValueError(f"at {n}") for n in faults})
        batches, prefetch = rng.choice([1, 2, 5, 20, "auto"]), rng.choice([None, 1, 2, 5])
        with warmup_loader(source, batches, rng.choice([1e-6, 30.0]), prefetch=prefetch) as warmed:
            assert drain(warmed, rng) == plain, f"seed {seed}"


@marked
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataloader_gives_the_same_batches_for_the_same_seed(
    num_workers: int, prefetch: int | None
) -> None:
    import torch
    from torch.utils.data import DataLoader

    def loader() -> DataLoader[int]:
        torch.manual_seed(7)
        return DataLoader(list(range(24)), batch_size=3, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]

    plain = [batch.tolist() for batch in loader()]
    with warmup_loader(loader(), 4, timeout=DEADLINE_S, prefetch=prefetch) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (4, 4)
        assert len(warmed) == 8
        assert [batch.tolist() for batch in warmed] == plain


def test_a_stream_of_datasets_gives_the_same_rows_and_the_state_of_the_last_one() -> None:
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        return datasets.Dataset.from_dict(
            {"text": [f"row {n}" for n in range(12)]}
        ).to_iterable_dataset(num_shards=3)

    plain = list(stream())
    with warmup_loader(stream(), 5, timeout=DEADLINE_S, prefetch=2) as warmed:
        assert warmed.result.filled == 5
        for n in range(12):
            resumed = stream()
            if n:
                resumed.load_state_dict(warmed.state_dict())
            assert list(resumed) == plain[n:]
            assert next(warmed) == plain[n]


def test_an_empty_iterator_is_warmed_up_at_once() -> None:
    with warmup_loader([], 8, timeout=1e300) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (8, 0)
        assert list(warmed) == []


def test_a_stream_shorter_than_the_warmup_is_ready_as_a_whole() -> None:
    with warmup_loader(range(3), 8, timeout=DEADLINE_S) as warmed:
        assert (warmed.result.filled, warmed.queue_depth()) == (3, 3)
        assert list(warmed) == [0, 1, 2]


def test_a_validation_iterator_is_warmed_up_beside_the_training_one() -> None:
    with (
        warmup_loader(Counting(), 4, prefetch=2) as train,
        warmup_loader(Counting(3), 4, prefetch=1) as validation,
    ):
        assert [next(train) for _ in range(3)] == [0, 1, 2]
        assert list(validation) == [0, 1, 2]
        with warmup_loader(Counting(2), 4) as again:
            assert list(again) == [0, 1]
        assert [next(train) for _ in range(3)] == [3, 4, 5]


# How far ahead


@pytest.mark.parametrize("prefetch", [1, 3, 8])
def test_never_more_is_pulled_than_the_buffer_holds(prefetch: int) -> None:
    source = Counting()
    with warmup_loader(source, 5, timeout=DEADLINE_S, prefetch=prefetch) as warmed:
        for n in range(30):
            assert next(warmed) == n
            source.taken += 1
            if n == 10:  # what the warmup had more than prefetch is used up
                assert source.most <= max(prefetch, 5) + 1
                source.most = 0
        assert source.most <= prefetch + 1
        until(lambda: warmed.queue_depth() == prefetch)
        assert source.pulled == 30 + prefetch


def test_without_prefetch_the_thread_ends_with_the_warmup_and_nothing_more_is_pulled() -> None:
    source = Counting()
    warmed = warmup_loader(source, 5, timeout=DEADLINE_S)
    until(lambda: not threads())
    assert source.pulled == 5
    assert [next(warmed) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert source.pulled == 5
    assert next(warmed) == 5
    assert source.pulled == 6


@pytest.mark.parametrize("prefetch", [None, 3])
def test_an_item_under_way_at_the_timeout_comes_next(prefetch: int | None) -> None:
    source, warmed = timed_out_in_an_item(prefetch)
    with warmed:
        assert (warmed.result.requested, warmed.result.filled) == (5, 2)
        assert [next(warmed), next(warmed)] == [0, 1]
        assert source.pulled == 3
        source.let_go.set()
        assert list(warmed) == [2, 3, 4, 5]


def test_nothing_is_pulled_after_the_timeout_but_the_item_under_way() -> None:
    source, warmed = timed_out_in_an_item()
    source.let_go.set()
    until(lambda: not threads())
    assert (source.pulled, warmed.queue_depth()) == (3, 3)
    assert list(warmed) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("off", [{"batches": 0}, {"timeout": 0}], ids=["batches", "timeout"])
def test_off_means_no_thread_and_nothing_pulled(off: dict[str, Any]) -> None:
    source, heard = Counting(4), Heard()
    warmed = warmup_loader(source, prefetch=3, heartbeat=heard, **off)
    assert (source.pulled, threads(), heard.events) == (0, [], [])
    assert (warmed.result.requested, warmed.result.filled, warmed.result.wait_ms) == (0, 0, 0.0)
    assert next(warmed) == 0
    assert (source.pulled, threads()) == (1, [])
    assert list(warmed) == [1, 2, 3]


@pytest.mark.parametrize("prefetch", [None, 3])
def test_auto_waits_for_no_more_than_a_quick_first_item(
    prefetch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "QUICK_S", DEADLINE_S)
    source = Counting(12, hold=3)
    with warmup_loader(source, "auto", DEADLINE_S, prefetch=prefetch) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (1, 1)
        source.let_go.set()
        assert list(warmed) == list(range(12))


@pytest.mark.parametrize(("prefetch", "wanted"), [(None, 8), (3, 3)])
def test_auto_waits_for_a_full_queue_after_a_slow_first_item(
    prefetch: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "QUICK_S", 0.0)
    with warmup_loader(Counting(12), "auto", DEADLINE_S, prefetch=prefetch) as warmed:
        assert (warmed.result.requested, warmed.result.filled) == (wanted, wanted)
        assert list(warmed) == list(range(12))


# Faults


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(("batches", "filled"), [(2, 2), (8, 3)])
def test_an_exception_comes_at_its_item_with_its_type_and_traceback(
    batches: int, filled: int, prefetch: int | None
) -> None:
    fault = KeyError("damaged")
    with warmup_loader(
        Counting(6, faults={3: fault}), batches, DEADLINE_S, prefetch=prefetch
    ) as warmed:
        assert warmed.result.filled == filled
        assert [next(warmed) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError) as caught:
            next(warmed)
        assert caught.value is fault
        where = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (Path(where.filename).name, where.name) == ("test_warmup.py", "__next__")
        # The bare iterator would go on after it, and so does this one.
        assert list(warmed) == [4, 5]


def test_reading_ahead_goes_on_after_an_exception_once_somebody_asks_again() -> None:
    source = Counting(faults={1: ValueError("damaged")})
    with warmup_loader(source, 4, DEADLINE_S, prefetch=3) as warmed:
        assert next(warmed) == 0
        with pytest.raises(ValueError, match="damaged"):
            next(warmed)
        until(lambda: not threads())
        assert source.pulled == 2  # nobody knows yet whether there is a use for the rest
        assert next(warmed) == 2
        until(lambda: warmed.queue_depth() == 3)


def test_an_interrupt_during_the_warmup_leaves_no_thread() -> None:
    class Interrupted(Heard):
        def event(self, msg: str, **fields: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup_loader(Counting(), 4, prefetch=3, heartbeat=Interrupted())
    until(lambda: not threads())


@marked
def test_an_exception_in_a_worker_of_a_dataloader_reaches_next() -> None:
    from torch.utils.data import DataLoader

    with warmup_loader(DataLoader(Torn(), num_workers=1), 6, timeout=DEADLINE_S) as warmed:  # type: ignore[arg-type]
        assert warmed.result.filled == 2
        assert [int(next(warmed)), int(next(warmed))] == [0, 1]
        with pytest.raises(ZeroDivisionError, match="DataLoader worker"):
            next(warmed)
        assert [int(item) for item in warmed] == [3]


class Torn:
    """Map-style data with a hole."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index if index != 2 else index // 0


# The end of it


def test_an_object_that_nobody_holds_leaves_no_thread_and_no_items() -> None:
    source = Counting()
    gone = weakref.ref(source)
    warmed = warmup_loader(source, 4, prefetch=4)
    next(warmed)
    assert threads()
    del source, warmed
    assert threads() == []
    assert gone() is None


def test_close_ends_the_thread_and_lets_go_of_the_iterator() -> None:
    def numbers() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            ended.set()

    ended = threading.Event()
    warmed = warmup_loader(numbers(), 4, prefetch=4)
    assert warmed.close()
    assert warmed.close()
    assert threads() == []
    with pytest.raises(LoaderClosed, match="closed"):
        next(warmed)
    assert ended.is_set()


@marked
def test_close_ends_the_workers_of_a_dataloader() -> None:
    import multiprocessing

    from torch.utils.data import DataLoader

    before = set(multiprocessing.active_children())
    loader = DataLoader(list(range(1000)), num_workers=1)  # type: ignore[arg-type]
    with warmup_loader(loader, 2, timeout=DEADLINE_S, prefetch=2) as warmed:
        next(warmed)
        assert set(multiprocessing.active_children()) - before
    gc.collect()
    until(lambda: not set(multiprocessing.active_children()) - before)


def test_close_of_a_stuck_iterator_returns_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source, warmed = timed_out_in_an_item()
    with caplog.at_level(logging.WARNING, "penstock"):
        assert not warmed.close(timeout=0.01)
    assert "Counting was still busy" in caplog.text
    source.let_go.set()
    until(lambda: not threads())
    assert source.pulled == 3


def test_close_wakes_whoever_waits_for_an_item() -> None:
    source, warmed = timed_out_in_an_item(hold=0)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            next(warmed)
        except BaseException as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    warmed.close(timeout=0.0)
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert [type(error) for error in caught] == [LoaderClosed]
    source.let_go.set()
    until(lambda: not threads())


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_process_ends_quietly_in_the_middle_of_it_and_needs_no_torch() -> None:
    out = run(
        "import itertools, sys; from penstock.feed.warmup import warmup_loader\n"
        "warmed = warmup_loader(itertools.count(), 4, prefetch=4)\n"
        "print(next(warmed), [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert out.strip() == "0 []"


def test_a_forked_child_is_told_that_it_has_no_thread() -> None:
    out = run(
        "import itertools, os, warnings; warnings.simplefilter('ignore')\n"
        "from penstock.feed.warmup import warmup_loader; from penstock.errors import LoaderClosed\n"
        "warmed = warmup_loader(itertools.count(), 4, prefetch=4); pid = os.fork()\n"
        "if pid: print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), next(warmed)); raise SystemExit\n"
        "try: next(warmed)\n"
        "except LoaderClosed as error: os._exit(7 if 'fork' in str(error) and warmed.close() else 1)\n"
        "os._exit(2)\n"
    )
    assert out.strip() == "7 0"


# The first batch


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_first_item_fetched_by_the_caller_comes_first(prefetch: int | None) -> None:
    source = Counting(6)
    first = next(source)
    with warmup_loader_with_first_batch(source, first, 3, DEADLINE_S, prefetch=prefetch) as warmed:
        assert (warmed.result.requested, warmed.result.filled, warmed.queue_depth()) == (3, 3, 3)
        assert list(warmed) == [0, 1, 2, 3, 4, 5]


def test_a_first_item_is_any_object() -> None:
    with warmup_loader_with_first_batch(iter([1]), None, 1) as warmed:
        assert list(warmed) == [None, 1]


def test_a_first_item_before_a_new_pass_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "penstock"),
        warmup_loader_with_first_batch([0, 1], 0, 2) as warmed,
    ):
        assert list(warmed) == [0, 0, 1]
    assert "a list starts a new pass" in caplog.text


# State


@marked
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize(("num_workers", "steps"), [(0, range(9)), (1, (0, 2, 7))])
def test_a_stateful_dataloader_resumes_after_the_last_batch_handed_out(
    num_workers: int, steps: Any, prefetch: int | None
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
    with warmup_loader(loader(1), 4, DEADLINE_S, prefetch=prefetch) as warmed:
        assert warmed.result.filled == 4
        for _ in range(8):
            states.append(warmed.state_dict())
            got.append(next(warmed).tolist())
        states.append(warmed.state_dict())
    assert got == plain
    for step in steps:
        resumed = loader(2)
        resumed.load_state_dict(states[step])
        assert [batch.tolist() for batch in resumed] == plain[step:], f"after {step} batches"


@marked
@pytest.mark.parametrize("prefetch", [None, 3])
def test_the_state_after_the_end_starts_the_next_pass(prefetch: int | None) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warmup_loader(
        StatefulDataLoader(list(range(4))), 8, DEADLINE_S, prefetch=prefetch
    ) as warmed:
        assert len(list(warmed)) == 4
        state = warmed.state_dict()
    resumed = StatefulDataLoader(list(range(4)))
    resumed.load_state_dict(state)
    assert [int(item) for item in resumed] == [0, 1, 2, 3]


class Stateful(Counting):
    """Hands out a state that it goes on changing."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.state: dict[str, Any] = {"nested": []}

    def __next__(self) -> int:
        item = super().__next__()
        self.state["nested"].append(item)
        return item

    def state_dict(self) -> dict[str, Any]:
        return self.state


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_state_is_kept_as_it_was_even_if_the_loader_goes_on_changing_it(
    prefetch: int | None,
) -> None:
    with warmup_loader(Stateful(end=8), 4, DEADLINE_S, prefetch=prefetch) as warmed:
        assert warmed.state_dict() == {"nested": []}
        for n in range(8):
            next(warmed)
            assert warmed.state_dict() == {"nested": list(range(n + 1))}


def test_the_state_before_a_first_item_that_came_from_outside_is_refused() -> None:
    source = Stateful(end=4)
    with warmup_loader_with_first_batch(source, next(source), 2, DEADLINE_S) as warmed:
        with pytest.raises(StateError, match="before the first batch"):
            warmed.state_dict()
        next(warmed)
        assert warmed.state_dict() == {"nested": [0]}


@pytest.mark.parametrize("batches", [0, 2])
def test_a_loader_without_a_state_says_so(batches: int) -> None:
    with (
        warmup_loader(Counting(4), batches) as warmed,
        pytest.raises(StateError, match="Counting has no state_dict"),
    ):
        warmed.state_dict()


def test_a_state_that_cannot_be_taken_harms_no_item(caplog: pytest.LogCaptureFixture) -> None:
    class Secretive(Counting):
        def state_dict(self) -> Any:
            raise RuntimeError("not now")

    with (
        caplog.at_level(logging.WARNING, "penstock"),
        warmup_loader(Secretive(5), 3, DEADLINE_S) as warmed,
    ):
        next(warmed)
        with pytest.raises(StateError, match="not now") as caught:
            warmed.state_dict()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert [next(warmed), next(warmed)] == [1, 2]
        assert list(warmed) == [3, 4]
        with pytest.raises(
            RuntimeError, match="not now"
        ):  # nothing is ahead any more: it is the loader's answer
            warmed.state_dict()
    assert caplog.text.count("not now") == 1


# Our own loader


def own(**options: Any) -> AsyncDataLoader:
    data = SyntheticDataset(vocab_size=100, seq_len=8, num_samples=40, seed=3)
    return AsyncDataLoader(data, 4, seed=5, epochs=1, n_workers=2, **options)


def rows(batches: Any) -> list[bytes]:
    return [batch.inputs.numpy().tobytes() for batch in batches]


def test_our_own_loader_is_handed_through_bit_for_bit() -> None:
    with own() as loader:
        plain = rows(loader)
    with warmup_loader(own(prefetch_size=2), 6, DEADLINE_S) as warmed:
        assert (warmed.result.requested, warmed.result.filled, warmed.queue_depth()) == (6, 6, 6)
        assert threads() == []  # no second thread, and so no second buffer
        assert len(warmed) == len(plain) == 10
        assert rows(warmed) == plain


def test_the_first_batch_of_our_own_loader_comes_first_and_its_state_is_its_own() -> None:
    with own() as loader:
        plain = rows(loader)
    loader = own()
    first = loader.next_batch()
    with warmup_loader_with_first_batch(loader, first, 3, DEADLINE_S) as warmed:
        begun = rows([next(warmed) for _ in range(4)])
        state = warmed.state_dict()
        assert begun + rows(warmed) == plain
    with own() as resumed:
        resumed.load_state_dict(state)
        assert rows(resumed) == plain[4:]


def test_our_own_loader_is_not_started_by_a_warmup_that_is_off() -> None:
    before = threading.active_count()
    with warmup_loader(own(), timeout=0) as warmed:
        assert threading.active_count() == before
        assert len(rows(warmed)) == 10


def test_our_own_loader_takes_no_prefetch() -> None:
    with pytest.raises(ConfigError, match="prefetch=2: a AsyncDataLoader has its own queue"):
        warmup_loader(own(), prefetch=2)


class Held:
    """Rows of which the one with a number is held back for some seconds, or until it is let go."""

    def __init__(self, number: int, seconds: float = DEADLINE_S):
        self.number, self.seconds = number, seconds
        self.let_go = threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[int]:
        if index == self.number:
            self.let_go.wait(self.seconds)
        return [index] * 4


def in_order(data: Held) -> AsyncDataLoader:
    return AsyncDataLoader(data, 1, shuffle=False, epochs=1, n_workers=1, prefetch_size=5)


def test_auto_waits_for_a_full_queue_of_our_own_loader_after_a_slow_first_batch() -> None:
    with in_order(Held(0, 3 * pipeline.QUICK_S)) as loader:
        done = loader.warmup("auto", DEADLINE_S)
        assert (done.requested, done.filled, loader.queue_depth()) == (5, 5, 5)
        assert [int(batch.inputs[0, 0]) for batch in loader] == list(range(40))


def test_auto_waits_for_no_more_than_a_quick_first_batch_of_our_own_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "QUICK_S", DEADLINE_S)
    data = Held(3)  # a full queue would have to wait for it
    with in_order(data) as loader:
        done = loader.warmup("auto", DEADLINE_S)
        assert (done.requested, done.filled) == (1, 1)
        data.let_go.set()
        assert [int(batch.inputs[0, 0]) for batch in loader] == list(range(40))


# What is said


@pytest.mark.parametrize(
    ("prefix", "msg"), [(None, "loader_warmup"), ("fineweb_loader_", "fineweb_loader_warmup")]
)
@pytest.mark.parametrize("make", [lambda: Counting(6), own], ids=["foreign", "own"])
def test_a_heartbeat_hears_of_it(make: Callable[[], Any], prefix: str | None, msg: str) -> None:
    heard = Heard(prefix)
    with warmup_loader(make(), 3, DEADLINE_S, heartbeat=heard) as warmed:
        result = warmed.result
    assert result.wait_ms > 0
    assert heard.events == [
        (
            msg,
            {
                "requested": 3,
                "filled": 3,
                "wait_ms": result.wait_ms,
                "fetch_warmup_batches": 3,
                "fetch_warmup_wait_ms": result.wait_ms,
            },
        )
    ]


def test_a_heartbeat_that_fails_leaves_no_thread() -> None:
    class Broken:
        def event(self, msg: str, **fields: Any) -> None:
            raise OSError("no pulse")

    with pytest.raises(OSError, match="no pulse"):
        warmup_loader(Counting(), 3, prefetch=3, heartbeat=Broken())
    assert threads() == []


def test_without_a_length_there_is_none_and_it_is_true_all_the_same() -> None:
    with warmup_loader(Counting(2), 1) as warmed:
        with pytest.raises(TypeError, match="len"):
            len(warmed)
        assert warmed
    assert warmup_loader([], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": -1}, "batches=-1: must be an integer ≥ 0"),
        ({"batches": 1.5}, "batches=1.5: must be an integer"),
        ({"batches": "all"}, "batches='all': must be an integer"),
        ({"timeout": -1}, "timeout=-1: must be a number of seconds"),
        ({"timeout": float("nan")}, "timeout=nan: must be a number of seconds"),
        ({"prefetch": -1}, "prefetch=-1: must be an integer ≥ 0"),
        ({"iterable": 5}, "a int cannot be iterated over"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_does_not_fit_is_refused_before_anything_is_fetched(
    options: dict[str, Any], message: str
) -> None:
    source = Counting(3)
    with pytest.raises(ConfigError, match=message):
        warmup_loader(**({"iterable": source} | options))
    assert source.pulled == 0


def test_the_script_gives_the_same_functions() -> None:
    spec = importlib.util.spec_from_file_location(
        "warmup_helper", ROOT / "scripts" / "warmup_helper.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.warmup_loader is warmup_loader
    assert script.warmup_loader_with_first_batch is warmup_loader_with_first_batch

"""The loader's life: threads, queue, deadlines, exceptions, the end."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, ConfigError, TextDataset
from penstock.errors import LoaderClosed, LoaderTimeout, SourceError
from tests import contracts


def dataset(corpus: Path, **about: Any) -> TextDataset:
    about = {"tokenizer": "byte", "seq_len": 64, "chunk_bytes": 4096} | about
    return TextDataset(corpus / "parquet", **about)


class Gate:
    """A transform that waits until it is opened, so that a test decides when a worker is slow."""

    def __init__(self, free: int = 0) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls, self.free = 0, free

    def __call__(self, table: Any) -> Any:
        self.calls += 1
        self.entered.release()
        if self.calls > self.free:
            self.opened.wait(60)
        return table["text"]

    def loader(self, corpus: Path, **how: Any) -> AsyncDataLoader:
        data = dataset(corpus, transform=("gate", self))
        return AsyncDataLoader(data, 4, **{"n_workers": 1, **how})


# Running


def test_batches_are_int64_tensors_that_share_no_memory(corpus: Path) -> None:
    import torch

    with AsyncDataLoader(dataset(corpus), 4) as loader:
        batch, other = next(loader), next(loader)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()
    kept, following = batch.inputs.clone(), other.inputs.clone()
    batch.targets[:] = -1
    assert torch.equal(batch.inputs, kept)
    assert torch.equal(other.inputs, following)


@pytest.mark.parametrize("kind", ["text", "samples"])
def test_each_for_over_a_finite_loader_is_a_pass(corpus: Path, kind: str) -> None:
    data = dataset(corpus) if kind == "text" else [np.arange(i, i + 65) for i in range(40)]

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(data, 4, epochs=1, n_workers=1, **{"shuffle": False, **how})

    def rows(stream: Any, n: int = 1000) -> list[Any]:
        return [batch.inputs.tolist() for batch, _ in zip(stream, range(n), strict=False)]

    with make() as loader:
        whole = rows(loader)
        # Three evaluations of five batches each see the same rows.
        assert [rows(loader, 5) for _ in range(3)] == [whole[:5]] * 3
        # The iterator of a `for` continues, and so does `next`.
        batches = iter(loader)
        assert [next(batches).inputs.tolist(), *rows(batches)] == whole
        iter(loader)
        assert [next(loader).inputs.tolist() for _ in range(2)] == whole[:2]
    with make(shuffle=True) as loader:
        assert rows(loader, 3) != rows(loader, 3)


def test_the_first_for_after_a_state_was_loaded_is_the_rest_of_its_pass(corpus: Path) -> None:
    def make() -> AsyncDataLoader:
        return AsyncDataLoader(dataset(corpus), 4, epochs=1, n_workers=1, shuffle=True)

    with make() as loader:
        passes = [list(loader), list(loader), list(loader)]
    digests = [[contracts.digest(batch) for batch in each] for each in passes]
    for at in (0, 7, len(digests[1]) - 1):
        with make() as loader:
            loader.load_state_dict(passes[1][at].state_dict())
            iter(loader)  # nothing was taken, so this starts nothing
            rest = [contracts.digest(batch) for batch in loader]
            # Nothing is left of a pass that was finished: the next one follows.
            assert rest == (digests[1][at + 1 :] or digests[2])


def test_the_last_batch_is_short_or_dropped_and_then_there_is_none(corpus: Path) -> None:
    def sizes(drop_last: bool) -> list[int]:
        with AsyncDataLoader(dataset(corpus), 7, epochs=1, drop_last=drop_last) as loader:
            found = [len(batch.inputs) for batch in loader]
            assert loader.next_batch() is loader.next_batch(timeout=0) is None
            return found

    kept, dropped = sizes(False), sizes(True)
    assert dropped == [7] * len(dropped)
    assert kept[: len(dropped)] == dropped
    assert len(kept) == len(dropped) or 0 < kept[-1] < 7


# Waiting


def test_a_next_or_warmup_that_times_out_loses_nothing(corpus: Path) -> None:
    whole = contracts.ledger(lambda: AsyncDataLoader(dataset(corpus), 4), 40)
    gate = Gate()
    with gate.loader(corpus, prefetch_size=2) as loader:
        for _ in range(3):
            with pytest.raises(LoaderTimeout, match="Nothing is lost"):
                loader.next_batch(timeout=0.01)
        assert loader.warmup(batches=500, timeout=0.2).filled < 500
        gate.opened.set()
        assert contracts.take(loader, 40) == whole


def test_the_queue_never_holds_more_than_prefetch_size(corpus: Path) -> None:
    with AsyncDataLoader(dataset(corpus), 2, prefetch_size=5) as loader:
        loader.warmup(timeout=60)
        for _ in range(300):
            assert loader.queue_depth() <= 5
            next(loader)


# Exceptions


def test_an_exception_in_a_worker_reaches_next_with_its_stage_and_file(corpus: Path) -> None:
    def fail(table: Any) -> Any:
        if 14 in table["id"].to_pylist():
            raise ZeroDivisionError("mine")
        return table["text"]

    data = dataset(corpus, transform=("fail", fail))
    with (
        AsyncDataLoader(data, 4, n_workers=1) as loader,
        pytest.raises(ZeroDivisionError, match="mine") as caught,
    ):
        list(loader)
    assert any("decode" in n and "a.parquet, row group 2" in n for n in caught.value.__notes__)


def test_data_without_text_is_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n' * 10)
    data = TextDataset(tmp_path / "d.jsonl", tokenizer="byte", seq_len=8)
    for epochs, n_workers in ((None, 0), (2, 2)):
        with (
            AsyncDataLoader(data, 1, epochs=epochs, n_workers=n_workers) as loader,
            pytest.raises(SourceError, match="no text"),
        ):
            next(loader)


# Stopping


def test_shutdown_returns_while_every_worker_is_in_the_middle_of_its_work(corpus: Path) -> None:
    gate = Gate(free=1)  # the first chunk is read alone
    loader = gate.loader(corpus, n_workers=3).start()
    for _ in range(4):
        assert gate.entered.acquire(timeout=30)
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(loader.shutdown)
        gate.opened.set()
        closing.result(30)


def test_a_shutdown_wakes_a_consumer_that_waits(corpus: Path) -> None:
    gate = Gate()
    loader = gate.loader(corpus).start()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(loader.next_batch)
        assert gate.entered.acquire(timeout=30)
        closing = threads.submit(loader.shutdown)
        gate.opened.set()
        assert isinstance(waiting.exception(30), LoaderClosed)
        closing.result(30)


def test_a_loader_without_references_ends_its_threads(corpus: Path) -> None:
    loader = AsyncDataLoader(dataset(corpus), 4)
    next(loader)
    del loader
    gc.collect()
    assert not contracts.own_threads()


def test_a_loader_that_is_collected_on_its_own_thread_does_not_wait_for_itself() -> None:
    entered, dropped = threading.Event(), threading.Event()

    def samples() -> Iterator[Any]:
        entered.set()
        dropped.wait(30)
        gc.collect()
        yield np.arange(3)

    loader = AsyncDataLoader(samples, 1, n_workers=1).start()
    loader.cycle = loader  # type: ignore[attr-defined]
    threads = [t for t in threading.enumerate() if t.name in contracts.own_threads()]
    assert entered.wait(30)
    del loader
    dropped.set()
    for thread in threads:
        thread.join(30)
    assert threads
    assert not contracts.own_threads()


def test_a_forked_child_gets_an_error_that_names_the_fork(corpus: Path) -> None:
    body = (
        "next(loader); import os, warnings; warnings.simplefilter('ignore'); pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: next(loader)\n"
        "    except Exception as error: print(type(error).__name__, 'a fork' in str(error), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0); next(loader); loader.shutdown()"
    )
    done = run(corpus, body)
    assert (done.returncode, done.stdout.strip()) == (0, "LoaderClosed True"), done.stderr


def test_a_stuck_worker_does_not_make_shutdown_hang(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    loader = gate.loader(corpus).start()
    assert gate.entered.acquire(timeout=30)
    assert loader._pipeline is not None
    assert not loader._pipeline.close(0.05)
    assert "still busy" in caplog.text
    gate.opened.set()
    loader.shutdown()


SCRIPT = """
    import faulthandler, signal, sys, threading
    from penstock import AsyncDataLoader, TextDataset
    data = TextDataset({path!r}, tokenizer="byte", seq_len=64)
    loader = AsyncDataLoader(data, 4, n_workers=3)
    {body}
"""


def run(corpus: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT).format(path=str(corpus / "parquet"), body=body)
    return subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    "body",
    [
        "next(loader)",
        "loader.start(); sys.exit(0)",
        "it = iter(loader); next(it); del loader",
    ],
)
def test_the_interpreter_ends_without_output(corpus: Path, body: str) -> None:
    done = run(corpus, body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# What it reports


def test_the_memory_estimate_counts_inputs_and_targets_of_eight_bytes(corpus: Path) -> None:
    loader = AsyncDataLoader(dataset(corpus), 4, prefetch_size=8)
    assert loader.stats().memory_estimate == (8 + 1) * 4 * 64 * 8 * 2
    with pytest.raises(ConfigError, match="memory_limit=1000: the 9 batches"):
        AsyncDataLoader(dataset(corpus), 4, memory_limit=1000)


def slowly(sample: Any) -> Any:
    time.sleep(0.004)
    return sample


def test_a_queue_that_stays_low_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = [np.arange(9)] * 1000
    with AsyncDataLoader(samples, 1, n_workers=1, preprocess=slowly) as loader:
        contracts.take(loader, 250)
    (text,) = (r.getMessage() for r in caplog.records if "less than half full" in r.getMessage())
    assert "n_workers" in text


def test_documents_are_reported_every_report_docs(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    with AsyncDataLoader(dataset(corpus, remote={"report_docs": 50}), 4, epochs=1) as loader:
        contracts.take(loader, 10_000)
        documents = loader.stats().documents
    lines = [r.getMessage() for r in caplog.records if "documents" in r.getMessage()]
    counts = [int(line.split()[0]) for line in lines]
    assert counts == sorted(counts) != []
    assert counts[-1] <= documents

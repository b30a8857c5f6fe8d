"""The loader's life: threads, queue, deadlines, exceptions, the end."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, ConfigError, TextDataset
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import LoaderClosed, LoaderTimeout, SourceError
from tests import contracts


def dataset(corpus: Path, **about: Any) -> TextDataset:
    about = {"tokenizer": "byte", "seq_len": 64, "chunk_bytes": 4096} | about
    return TextDataset(corpus / "parquet", **about)


class Gate:
    """Holds tokenizing back until it is opened, so that a test decides when a worker is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 0) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls = 0
        real = Tokenizer.encode

        def encode(tokenizer: Tokenizer, *args: Any) -> Any:
            self.calls += 1
            self.entered.release()
            if self.calls > free:
                self.opened.wait(60)
            return real(tokenizer, *args)

        monkeypatch.setattr(Tokenizer, "encode", encode)


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


def test_a_next_or_warmup_that_times_out_loses_nothing(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contracts.ledger(lambda: AsyncDataLoader(dataset(corpus), 4), 40)
    gate = Gate(monkeypatch)
    with AsyncDataLoader(dataset(corpus), 4, prefetch_size=2, n_workers=1) as loader:
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


@pytest.mark.parametrize("n_workers", [0, 1, 3])
def test_an_exception_in_a_worker_reaches_next_with_its_type_stage_and_file(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, n_workers: int
) -> None:
    real = Tokenizer.encode

    def encode(tokenizer: Tokenizer, ref: Any, *args: Any) -> Any:
        if ref.file.name == "a.parquet" and ref.index == 2:
            raise ZeroDivisionError("mine")
        return real(tokenizer, ref, *args)

    whole = contracts.ledger(lambda: AsyncDataLoader(dataset(corpus), 1), 500)
    monkeypatch.setattr(Tokenizer, "encode", encode)
    with AsyncDataLoader(dataset(corpus), 1, n_workers=n_workers) as loader:
        got: list[str] = []
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            got.extend(contracts.digest(batch) for batch in loader)
        assert any(
            "tokenize" in note and "a.parquet, row group 2" in note
            for note in caught.value.__notes__
        )
        # Everything before the fault was handed out, and it is raised again on every further try.
        assert got
        assert got == whole[: len(got)]
        with pytest.raises(ZeroDivisionError):
            loader.next_batch()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_data_without_text_is_an_error_and_not_an_endless_search(
    tmp_path: Path, n_workers: int
) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n' * 10)
    data = TextDataset(tmp_path / "d.jsonl", tokenizer="byte", seq_len=8)
    for epochs in (None, 2):
        with (
            AsyncDataLoader(data, 1, epochs=epochs, n_workers=n_workers) as loader,
            pytest.raises(SourceError, match="no text"),
        ):
            next(loader)


# Stopping


def test_shutdown_returns_while_every_worker_is_in_the_middle_of_its_work(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, free=1)  # the first chunk is read alone
    loader = AsyncDataLoader(dataset(corpus), 4, n_workers=3).start()
    for _ in range(4):
        assert gate.entered.acquire(timeout=30)
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(loader.shutdown)
        gate.opened.set()
        closing.result(30)


def test_a_consumer_that_waits_is_woken_by_a_shutdown(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    loader = AsyncDataLoader(dataset(corpus), 4, n_workers=1).start()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(loader.next_batch)
        assert gate.entered.acquire(timeout=30)
        closing = threads.submit(loader.shutdown)
        gate.opened.set()
        assert isinstance(waiting.exception(30), LoaderClosed)
        closing.result(30)


def test_a_loader_that_nobody_holds_ends_its_threads(corpus: Path) -> None:
    loader = AsyncDataLoader(dataset(corpus), 4)
    next(loader)
    del loader
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-")]


def test_a_forked_child_is_told_that_it_has_no_threads(corpus: Path) -> None:
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
    corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    loader = AsyncDataLoader(dataset(corpus), 4, n_workers=1).start()
    assert gate.entered.acquire(timeout=30)
    assert loader._pipeline is not None
    pipeline = loader._pipeline
    assert not pipeline.close(0.05)
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
        "[next(loader) for _ in range(50)]; loader.shutdown()",
        "it = iter(loader); next(it); del loader",
    ],
)
def test_the_interpreter_ends_without_a_word(corpus: Path, body: str) -> None:
    done = run(corpus, body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_while_waiting_for_a_batch_ends_cleanly(corpus: Path) -> None:
    body = (
        "from penstock.encode.tokenizer import Tokenizer; gone = threading.Event(); "
        "Tokenizer.encode = lambda *a: gone.wait(2); "
        "threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start(); next(loader)"
    )
    done = run(corpus, body)
    assert done.returncode in (1, 130, -2)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


# Arguments


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "batch_size=0: must be an integer ≥ 1"),
        ({"n_workers": -1}, "n_workers=-1"),
        ({"prefetch_size": 0}, "prefetch_size=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"workers": "fiber"}, "workers='fiber': must be one of 'thread', 'process'"),
        ({"memory_limit": 1000}, "memory_limit=1000: the 9 batches"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(
    corpus: Path, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncDataLoader(dataset(corpus), **({"batch_size": 4} | wrong))
    assert says in str(caught.value)


def test_the_estimate_of_memory_is_of_inputs_and_targets_of_eight_bytes(corpus: Path) -> None:
    loader = AsyncDataLoader(dataset(corpus, seq_len=64), 4, prefetch_size=8)
    assert loader.stats().memory_estimate == (8 + 1) * 4 * 64 * 8 * 2


def slowly(sample: Any) -> Any:
    time.sleep(0.004)
    return sample


def test_a_queue_that_stays_low_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = [np.arange(9)] * 1000
    with AsyncDataLoader(samples, 1, n_workers=1, preprocess=slowly) as loader:
        contracts.take(loader, 250)
    (told,) = (r.getMessage() for r in caplog.records if "less than half full" in r.getMessage())
    assert "n_workers" in told


def test_documents_are_reported_every_so_often(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    with AsyncDataLoader(dataset(corpus, remote={"report_docs": 50}), 4, epochs=1) as loader:
        contracts.take(loader, 10_000)
        documents = loader.stats().documents
    told = [int(r.getMessage().split()[0]) for r in caplog.records if "documents" in r.getMessage()]
    assert told == sorted(told) != []
    assert told[-1] <= documents

"""Worker processes: real ones, and really killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import AsyncDataLoader, Batch
from penstock.errors import ConfigError, WorkerDied
from tests.working import Cores, Doubles, Rows


def loader(dataset: Any, **how: Any) -> AsyncDataLoader:
    usual = {"batch_size": 4, "n_workers": 2, "workers": "process", "epochs": 1, "shuffle": False}
    return AsyncDataLoader(dataset, **usual | how)


def values(batches: list[Batch]) -> list[int]:
    return [int(x) for batch in batches for x in batch["x"]]


# The stream


def test_samples_come_in_order_from_processes_that_end_with_a_shutdown_at_any_moment() -> None:
    running = loader(Rows(80))
    first = [next(running) for _ in range(3)]
    running.shutdown()
    rest = list(iter(running.next_batch, None))
    running.shutdown()
    assert values(first + rest) == list(range(80))
    pids = {int(pid) for batch in first + rest for pid in batch["pid"]}
    assert os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids)), "shutdown leaves no process"


# Deaths


def test_a_worker_that_dies_is_replaced_and_the_stream_is_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loader(Rows(80, deadly=33, marker=str(tmp_path / "died"))) as running:
        assert values(list(running)) == list(range(80))
        assert running.stats().worker_restarts == 1
    assert "a worker process died: exit code -9 during" in caplog.text


def test_a_call_that_kills_two_workers_fails() -> None:
    with loader(Rows(80, deadly=33)) as running:
        with pytest.raises(WorkerDied, match="exit code -9"):
            list(running)
        assert running.stats().worker_restarts == 2


def test_workers_may_be_killed_at_any_moment() -> None:
    """Also while a large result is on its way."""
    chance = random.Random(1)
    batches: list[Batch] = []
    with loader(Rows(400, width=50_000), prefetch_size=4) as running:
        while (batch := running.next_batch()) is not None:
            batches.append(batch)
            if len(batches) % 10 == 0:  # a call that was interrupted has been repeated by then
                time.sleep(chance.random() * 0.05)
                workers = {int(pid) for batch in batches[-8:] for pid in batch["pid"]}
                alive = [p for p in psutil.Process().children(recursive=True) if p.pid in workers]
                if alive:
                    chance.choice(alive).kill()
        assert running.stats().worker_restarts > 0
    assert values(batches) == list(range(400))
    assert all((batch["wide"] == batch["x"][:, None]).all() for batch in batches)


# Cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pinning needs Linux")
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("option", ["cpus", "numa_node"])
def test_workers_keep_to_their_cores(
    workers: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    for node, cores in enumerate((core, 10_000)):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr("penstock.feed.affinity.NODES", tmp_path)
    right, wrong = {"cpus": ([core], [10_000]), "numa_node": (0, 1)}[option]
    with loader(Cores(16), workers=workers, **{option: right}) as running:
        assert {int(x) for batch in running for x in np.ravel(batch.inputs)} == {core}
    assert os.sched_getaffinity(0) == allowed
    with pytest.raises(ConfigError, match=option):
        loader(Cores(16), **{option: wrong})


# Errors


@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        ("os", FileNotFoundError, "No such file: 'a.txt'"),
        ("extra", ConfigError, "reading .zst needs `zstandard`"),
        ("doubles", Doubles, "^no x"),
        ("local", RuntimeError, "Local: of a local class"),
    ],
)
def test_an_exception_keeps_its_type_and_brings_its_traceback(
    kind: str, expected: type[BaseException], message: str
) -> None:
    with loader(Rows(80, error=kind)) as running:
        with pytest.raises(expected, match=message) as caught:
            list(running)
        assert type(caught.value) is expected
        notes = getattr(caught.value, "__notes__", [])
        assert "working.py" in "\n".join([str(caught.value), *notes])
        assert running.stats().worker_restarts == 0


def test_a_dataset_that_cannot_be_pickled_is_refused() -> None:
    rows = Rows(80)
    rows.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process: .*lock.*thread"):
        loader(rows).start()
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process: .*lambda"):
        loader(Rows(80), preprocess=lambda sample: sample).start()


# Whole programs

HEAD = """
import os, sys, time
from penstock import AsyncDataLoader

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, index):
        if os.path.exists("slow"):
            time.sleep(float(sys.argv[1]))
        return {"pid": os.getpid()}

def run():
    loader = AsyncDataLoader(Slow(), 1, workers="process", n_workers=2)
    pids = {int(next(loader)["pid"][0]) for _ in range(4)}
    loader.warmup(8)
    open("slow", "w").close()
    for _ in range(4):
        next(loader)  # the workers are busy from now on
    print("ready", *pids, flush=True)
    return loader
"""


def start(tmp_path: Path, body: str, nap_s: float = 0) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script), str(nap_s)],
        cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("then", "nap_s", "number", "code", "says"),
    [
        ("while True: next(loader)", 60, signal.SIGKILL, -signal.SIGKILL, ""),
        ("while True: next(loader)", 0.2, signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        ("pass", 0.2, None, 0, ""),
        ("raise ValueError('oh')", 0.2, None, 1, "ValueError: oh"),
        ("os._exit(6)", 60, None, 6, ""),
    ],
)
def test_a_program_leaves_no_process_however_it_ends(
    tmp_path: Path, then: str, nap_s: float, number: int | None, code: int, says: str
) -> None:
    process = start(
        tmp_path,
        f"""
        if __name__ == "__main__":
            loader = run()
            sys.stdin.readline()  # until its family has been counted
            {then}
        """,
        nap_s,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready ")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        print(file=process.stdin, flush=True)
        if number is not None:
            time.sleep(0.5)
            os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        _, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == code
    assert stderr.strip().endswith(says)
    assert stderr.count("Traceback") == bool(says)
    assert "died" not in stderr
    assert not psutil.wait_procs(family, timeout=60)[1]


def test_a_script_without_a_main_guard_ends_with_a_clear_error(tmp_path: Path) -> None:
    process = start(tmp_path, "run()")
    stdout, stderr = process.communicate(timeout=100)
    assert (process.returncode, stdout) == (1, "")
    assert any("ConfigError" in line and '"__main__"' in line for line in stderr.splitlines())

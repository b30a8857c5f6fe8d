"""Worker processes: real ones, and really killed."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from penstock.feed.pool import make_pool
from penstock.feed.process import ProcessPool, describe

from penstock.errors import ConfigError, LoaderClosed, MissingExtra, WorkerDied
from penstock.feed import channel, worker
from penstock.types import ChunkRef, FileRef
from tests.working import Doubles, FailsToLoad, KeepsTime, Unloadable, Unportable, Work


@contextmanager
def processes(n: int = 1, work: Any = None, **more: Any) -> Iterator[ProcessPool]:
    """A pool of which nothing is left afterwards."""
    pool = ProcessPool(n, work or Work(), **more)
    try:
        yield pool
        pids = pids_of(pool)
    finally:
        pool.stop()
        assert pool.join(60)
    assert not any(alive(pid) for pid in pids)


def pids_of(pool: ProcessPool) -> list[int]:
    return [worker.pid for worker in pool._workers if worker is not None and worker.pid is not None]


def alive(pid: int) -> bool:
    """Whether there is such a process, even as a zombie."""
    return psutil.pid_exists(pid)


def eventually(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_maps() -> list[str]:
    """Results in memory that processes share, by its name. Folders on the way to a library may be called the same."""
    named = re.compile(r"/(memfd:penstock|penstock-\w+) \(deleted\)$")
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if named.search(line)]


def is_shared(address: int) -> bool:
    ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in shared_maps()]
    return any(low <= address < high for low, high in ranges)


# What goes to and fro


def test_work_runs_in_processes_of_its_own() -> None:
    with processes(2) as pool:
        pids = {pool.submit("who", to=k).result() for k in range(4)}
        assert len(pids) == 2
        assert os.getpid() not in pids


def test_tasks_with_the_same_key_go_to_the_same_process() -> None:
    with processes(2) as pool:
        tasks = [(k, pool.submit("who", to=k)) for k in range(6) for _ in range(5)]
        seen: dict[int, set[int]] = {}
        for k, task in tasks:
            seen.setdefault(k % 2, set()).add(task.result())
        assert [len(pids) for pids in seen.values()] == [1, 1]
        assert seen[0] != seen[1]


def test_a_large_numpy_result_is_shared_and_not_copied() -> None:
    names = set(os.listdir("/dev/shm"))
    with processes() as pool:
        array = pool.submit("numbers", 5, 1 << 20).result()
        assert is_shared(array.ctypes.data)
        assert set(os.listdir("/dev/shm")) == names
        assert (array == np.arange(5, 5 + (1 << 20))).all()
        array[0] = 99  # it is ours
        part = array[1000:2000]
        del array
        gc.collect()
        assert part[0] == 1005
    assert part.sum() == np.arange(1005, 2005).sum(), "it outlives its process"
    del part
    gc.collect()
    assert shared_maps() == []


def test_a_large_arrow_result_is_shared_and_stays_valid() -> None:
    with processes() as pool:
        array = pool.submit("texts", 20_000).result()
    assert isinstance(array, pa.Array)
    array.validate(full=True)
    offsets, data = array.buffers()[1:]
    assert is_shared(offsets.address)
    assert is_shared(data.address)
    assert array.equals(Work().texts(20_000))
    tail = array[-5:]
    del array, offsets, data
    gc.collect()
    assert tail.to_pylist() == Work().texts(20_000).to_pylist()[-5:]
    del tail
    gc.collect()
    assert shared_maps() == []


def test_small_and_large_buffers_travel_together() -> None:
    with processes() as pool:
        result = pool.submit("many", 50_001).result()
        assert not is_shared(result["small"].ctypes.data)
        for i, array in enumerate(result["large"]):
            assert is_shared(array.ctypes.data)
            assert array.ctypes.data % 64 == 0
            assert (array == i).all()
            array += 1  # neighbours do not overlap
        assert [array[-1] for array in result["large"]] == [1, 2, 3, 4, 5]


def test_large_arguments_arrive() -> None:
    given = np.random.default_rng(0).integers(0, 100, 3_000_000)
    with processes() as pool:
        got = pool.submit("echo", given, b"x" * 5_000_000).result()
        assert (got[0] == given).all()
        assert got[1] == b"x" * 5_000_000


def test_a_torch_tensor_is_shared() -> None:
    torch = pytest.importorskip("torch")
    with processes() as pool:
        for dtype in (torch.int64, torch.bfloat16):
            given = torch.arange(100_000).to(dtype)
            got = pool.submit(
                "echo", {"x": given, "leaf": torch.ones(2, requires_grad=True)}
            ).result()
            assert is_shared(got["x"].data_ptr())
            assert got["x"].dtype == dtype
            assert torch.equal(got["x"], given)
            assert got["leaf"].requires_grad
            del got
    gc.collect()


def test_a_result_that_is_alive_keeps_no_descriptor() -> None:
    with processes() as pool:
        pool.submit("square", 1).result()
        before = fds()
        kept = [pool.submit("numbers", i, 20_000).result() for i in range(100)]
        assert fds() == before
        assert [int(array[0]) for array in kept] == list(range(100))


def test_everything_is_sent_where_memory_cannot_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CAN_SHARE", False)
    with processes(2) as pool:
        array = pool.submit("numbers", 0, 1 << 20).result()
        assert not is_shared(array.ctypes.data)
        assert (array == np.arange(1 << 20)).all()
        with pytest.raises(ValueError, match="no"):
            pool.submit("fail", "no").result()
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        assert [task.result() for task in [pool.submit("square", i, to=i) for i in range(4)]] == [
            0,
            1,
            4,
            9,
        ]
        assert pool.restarts == 1
        pool.submit("nap", 1, 60)


def test_without_memfd_an_unlinked_file_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuses)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other = channel.make_ends()
    thread = threading.Thread(target=one.send, args=(np.arange(100_000),))
    thread.start()
    got = other.receive()
    thread.join()
    assert (got == np.arange(100_000)).all()
    assert is_shared(got.ctypes.data)
    assert list(tmp_path.iterdir()) == []
    one.close()
    other.close()


def test_without_any_memory_to_share_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(channel, "share", refuses)
    one, other = channel.make_ends()
    thread = threading.Thread(target=one.send, args=(np.arange(100_000),))
    thread.start()
    got = other.receive()
    thread.join()
    assert (got == np.arange(100_000)).all()
    one.close()
    other.close()


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 20, 100])
def test_a_message_that_is_cut_off_is_an_end(cut: int) -> None:
    left, right = socket.socketpair()
    pickled, _ = channel.dump("x" * 1000, None)
    whole = channel.HEADER.pack(channel.MAGIC, 0, pickled.nbytes) + bytes(pickled)
    left.sendall(whole[:cut])
    left.close()
    end = channel.SharedEnd(right)
    with pytest.raises(channel.Broken):
        end.receive()
    end.close()


# Errors


def test_an_exception_brings_its_traceback() -> None:
    with processes() as pool:
        with pytest.raises(ValueError, match=r"^bad row") as caught:
            pool.submit("fail", "bad row").result()
        first, second = caught.value.__notes__
        assert first == "in stage decode"
        assert "in worker process penstock-worker-0 (pid" in second
        assert "working.py" in second
        assert "raise error" in second


@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        ("extra", MissingExtra, "reading .zst needs `zstandard`"),
        ("doubles", Doubles, "^no x\n"),
        ("unportable", Unportable, "held"),
        ("local", RuntimeError, "Local: of a local class"),
        ("unloadable", Unloadable, "^gone"),
        ("os", FileNotFoundError, "No such file: 'a.txt'"),
    ],
)
def test_every_exception_arrives_somehow(
    kind: str, expected: type[BaseException], message: str
) -> None:
    with processes() as pool:
        with pytest.raises(expected, match=message) as caught:
            pool.submit("raise_", kind).result()
        assert type(caught.value) is expected
        assert "working.py" in caught.value.__notes__[-1]
        if isinstance(caught.value, Doubles):
            assert caught.value.name == "x"
        assert pool.submit("square", 2).result() == 4
        assert pool.restarts == 0


def test_an_exception_with_keywords_of_its_own_keeps_its_attributes() -> None:
    with processes() as pool:
        with pytest.raises(Exception, match=r"^1 of 2\n") as caught:
            pool.submit("raise_", "chained").result()
        assert (caught.value.number, caught.value.key) == (1, 2)  # type: ignore[attr-defined]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_task() -> None:
    with processes() as pool:
        with pytest.raises(Exception, match="lambda") as caught:
            pool.submit("unpicklable").result()
        assert any(
            "what unpicklable gave, a function, cannot be sent" in note
            for note in caught.value.__notes__
        )
        with pytest.raises(LookupError, match="made elsewhere") as other:
            pool.submit("unloadable").result()
        assert any("cannot be loaded" in note for note in other.value.__notes__)
        with pytest.raises(Exception, match="lambda") as third:
            pool.submit("echo", lambda: 1).result()
        assert any("the arguments of echo cannot be sent" in note for note in third.value.__notes__)
        assert pool.submit("square", 3).result() == 9
        assert pool.restarts == 0


def test_work_that_cannot_be_pickled_is_refused_and_named() -> None:
    class Reader:
        def __init__(self) -> None:
            self.options = {"lock": threading.Lock()}

    def local(x: int) -> int:
        return x

    work = Work()
    work.reader = Reader()  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"^reader\.options\['lock'\], <unl.*module level.*workers=\"thread\""
    ):
        make_pool(2, work, kind="process")
    work.reader = [1, {"preprocess": local}]  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"^reader\[1\]\['preprocess'\], <function .*local object"
    ):
        make_pool(2, work, kind="process")
    with pytest.raises(ConfigError, match=r"the work, .*lambda"):
        make_pool(2, lambda: 1, kind="process")


def test_work_that_cannot_be_loaded_in_the_child_is_an_error_of_every_task() -> None:
    pool = make_pool(2, FailsToLoad(), kind="process")
    for _ in range(3):
        with pytest.raises(ConfigError, match="LookupError: there is no such table") as caught:
            pool.submit("square", 1).result()
        assert "working.py" in caught.value.__cause__.__notes__[-1]  # type: ignore[union-attr]
    pool.stop()
    assert pool.join(60)


def test_work_is_closed_where_it_was_used(tmp_path: Path) -> None:
    with processes(2, KeepsTime(str(tmp_path / "log"))) as pool:
        assert [pool.submit("ping", to=i).result() for i in range(2)] == [1, 1]
    assert (tmp_path / "log").read_text() == "closed\n" * 2


# Deaths


def test_a_process_that_is_killed_while_idle_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with processes(2) as pool:
        for _ in range(3):
            pids = [pool.submit("who", to=k).result() for k in range(2)]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            after = [pool.submit("who", to=k).result() for k in range(2)]
            assert not set(pids) & set(after)
        assert pool.restarts == 6
    assert "SIGKILL" in caplog.text


def test_a_process_that_is_killed_while_busy_is_replaced_and_its_work_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = tmp_path / "begun"
    with processes() as pool:
        pid = pool.submit("who").result()
        task = pool.submit("sleep_once", str(begun), "done")
        assert eventually(begun.exists)
        os.kill(pid, signal.SIGKILL)
        assert task.result() == "done"
        assert pool.restarts == 1
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert f"(pid {pid}) died of SIGKILL" in record.getMessage()
    assert describe("sleep_once", (str(begun), "done")) in record.getMessage()


def test_a_task_that_kills_its_process_once_is_done_by_the_next(tmp_path: Path) -> None:
    with processes() as pool:
        assert pool.submit("die_once", str(tmp_path / "marker"), 7).result() == 7
        assert pool.restarts == 1


def test_before_is_not_asked_again_when_the_process_dies(tmp_path: Path) -> None:
    asked: list[int] = []
    with processes() as pool:
        task = pool.submit(
            "die_once", before=lambda: (asked.append(1), (str(tmp_path / "marker"), 7))[1]
        )
        assert task.result() == 7
    assert asked == [1]


@pytest.mark.parametrize(
    ("method", "args", "cause"),
    [("exit", (3,), "exit code 3"), ("segfault", (), "SIGSEGV"), ("exit", (0,), "exit code 0")],
)
def test_a_task_that_kills_two_processes_fails(
    method: str, args: tuple[Any, ...], cause: str
) -> None:
    with processes() as pool:
        with pytest.raises(WorkerDied, match=cause) as caught:
            pool.submit(method, *args).result()
        assert describe(method, args) in str(caught.value)
        assert pool.submit("square", 4).result() == 16, "the pool goes on"
        assert pool.restarts == 2


def test_without_restart_the_first_death_is_the_end() -> None:
    with processes(1, restart=False) as pool:
        with pytest.raises(WorkerDied, match="exit code 3 while it ran exit"):
            pool.submit("exit", 3).result()
        with pytest.raises(WorkerDied, match="exit code 3"):
            pool.submit("square", 3).result()
        assert pool.restarts == 0


def test_without_restart_a_death_while_idle_is_told_to_the_next_task() -> None:
    with processes(1, restart=False) as pool:
        pid = pool.submit("who").result()
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not alive(pid))
        with pytest.raises(WorkerDied, match=r"SIGKILL.* while it had nothing to do"):
            pool.submit("square", 3).result()


def test_nonsense_from_a_process_is_its_end() -> None:
    with processes() as pool:
        with pytest.raises(WorkerDied):
            pool.submit("garble").result()
        assert pool.submit("square", 4).result() == 16


def test_a_process_that_closes_its_descriptors_is_replaced() -> None:
    with processes() as pool:
        with pytest.raises(WorkerDied):
            pool.submit("close_all").result()
        assert pool.submit("square", 4).result() == 16


def test_a_death_is_noticed_although_another_process_holds_the_channel(tmp_path: Path) -> None:
    with processes() as pool:
        marker, over = tmp_path / "marker", tmp_path / "over"
        assert pool.submit("hold_on", str(marker), str(over)).result() is None
        assert alive(int(marker.read_text())), "it holds the channel still"
        over.touch()
        assert pool.restarts == 1


def test_the_pool_survives_the_server_that_starts_its_processes() -> None:
    with processes(2) as pool:
        pids = {pool.submit("who", to=k).result() for k in range(2)}
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        tasks = [pool.submit("nap", i, 0.05) for i in range(8)]
        assert [task.result() for task in tasks] == list(range(8))
        assert eventually(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("method", ["numbers", "raw"])
def test_no_result_is_lost_or_wrong_whenever_a_process_is_killed(method: str) -> None:
    """Shared results, and ones that are sent through the pipe piece by piece."""
    chance = random.Random(1)
    with processes(2) as pool:
        for round_ in range(25):
            pids = [pool.submit("who", to=k).result() for k in range(2)]
            if method == "numbers":
                tasks = [pool.submit("numbers", 1000 * round_ + i, 200_000) for i in range(6)]
            else:
                tasks = [pool.submit("raw", 4_000_000, i) for i in range(6)]
            time.sleep(chance.random() * 0.02)
            os.kill(chance.choice(pids), signal.SIGKILL)
            for i, task in enumerate(tasks):
                result = task.result()
                if method == "numbers":
                    assert (
                        result == np.arange(1000 * round_ + i, 1000 * round_ + i + 200_000)
                    ).all()
                else:
                    assert result == bytes([i]) * 4_000_000
            del task, result, tasks
        assert (
            pool.submit("square", 3, to=0).result() == pool.submit("square", 3, to=1).result() == 9
        )
        assert pool.restarts == 25
    gc.collect()
    assert shared_maps() == []


# The end


@pytest.mark.parametrize("n", [1, 3])
def test_stop_ends_processes_that_are_busy(n: int) -> None:
    pool = ProcessPool(n, Work())
    pids = [pool.submit("who", to=k).result() for k in range(n)]
    tasks = [pool.submit("nap", 1, 60.0) for _ in range(n + 2)]
    time.sleep(0.2)
    began = time.monotonic()
    pool.stop()
    assert pool.join(60)
    assert time.monotonic() - began < 30
    assert not any(alive(pid) for pid in pids)
    for task in tasks:
        with pytest.raises(LoaderClosed):
            task.result()


def test_a_process_that_does_not_follow_is_killed(tmp_path: Path) -> None:
    pool = ProcessPool(1, Work())
    pid = pool.submit("who").result()
    task = pool.submit("stubborn", str(tmp_path / "deaf"), 60.0)
    assert eventually((tmp_path / "deaf").exists)
    pool.stop()
    assert not pool.join(0.5), "it is given some time"
    assert pool.join(60)
    assert not alive(pid)
    with pytest.raises(LoaderClosed):
        task.result()


def test_stop_reaches_a_process_that_was_halted_while_it_was_sent_something() -> None:
    pool = ProcessPool(1, Work())
    pid = pool.submit("who").result()
    os.kill(pid, signal.SIGSTOP)
    task = pool.submit("echo", b"x" * 50_000_000)
    time.sleep(0.2)
    pool.stop()
    assert pool.join(60)
    assert not alive(pid)
    with pytest.raises(LoaderClosed):
        task.result()


def test_stop_after_the_last_worker_has_gone() -> None:
    with processes(2) as pool:
        assert pool.submit("square", 3).result() == 9
        pool._jobs.stop()  # the first half of a stop: the threads end before the second
        assert pool.join(60)
        pool.stop()


def test_stop_right_after_the_start() -> None:
    for pause in (0.0, 0.01, 0.05, 0.1, 0.3):
        pool = ProcessPool(3, Work())
        task = pool.submit("square", 3)
        time.sleep(pause)
        pids = pids_of(pool)
        pool.stop()
        assert pool.join(60)
        assert not any(alive(pid) for pid in pids)
        with suppress(LoaderClosed):
            assert task.result() == 9


def test_descriptors_threads_and_processes_are_given_back() -> None:
    with processes(2) as pool:
        pool.submit("square", 1).result()
    gc.collect()
    before, family = fds(), len(psutil.Process().children(recursive=True))
    with processes(2) as pool:
        pool.submit("square", 1, to=0).result()
        pool.submit("square", 1, to=1).result()
        during = fds()
        for i in range(200):
            pool.submit("numbers", i, 10 + 100 * i).result()
        assert fds() == during
    assert fds() == before
    for i in range(20):
        with processes(2) as pool:
            pool.submit("exit", 1)
            pool.submit("square", i).result()
    gc.collect()
    assert fds() == before
    assert eventually(lambda: len(psutil.Process().children(recursive=True)) == family)


# Whole programs

HEAD = """
import os, signal, sys, time
from penstock.feed.pool import make_pool

class Work:
    def who(self): return os.getpid()
    def nap(self, s): time.sleep(s); return s
"""


def start(tmp_path: Path, body: str, **more: Any) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        **more,
    )  # fmt: skip


def family_of(process: subprocess.Popen[str]) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


BUSY = """
    if __name__ == "__main__":
        import faulthandler
        faulthandler.dump_traceback_later(40)  # where it is, should it not end
        pool = make_pool(2, Work(), kind="process")
        pids = [pool.submit("who", to=k).result() for k in range(2)]
        tasks = [pool.submit("nap", 60.0) for _ in range(4)]
        print("ready", flush=True)
        {then}
"""


def run_busy(
    tmp_path: Path, then: str, act: Callable[[subprocess.Popen[str]], None] | None
) -> tuple[int, str]:
    """Exit code and stderr of a program that does something while its workers are busy. Nothing is left of it."""
    process = start(tmp_path, BUSY.format(then=then))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        family = family_of(process)
        if act is not None:
            act(process)
        try:
            _, stderr = process.communicate(timeout=60)
        except subprocess.TimeoutExpired as late:
            states = {
                pid: psutil.Process(pid).status()
                for pid in (process.pid, *family)
                if psutil.pid_exists(pid)
            }
            pytest.fail(f"it does not end: {states}\n{(late.stderr or b'').decode()}")
        assert len(family) >= 2
        assert eventually(lambda: not any(alive(pid) for pid in family)), (
            "a process was left behind"
        )
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, stderr


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    code, stderr = run_busy(
        tmp_path, "tasks[0].result()", lambda p: os.killpg(p.pid, signal.SIGINT)
    )
    assert code == -signal.SIGINT
    assert stderr.count("Traceback") == 1
    assert stderr.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("then", "code", "says"),
    [
        ("pass", 0, ""),
        ("sys.exit(5)", 5, ""),
        ("raise ValueError('oh')", 1, "ValueError: oh"),
        ("os._exit(6)", 6, ""),
    ],
)
def test_a_program_that_ends_without_shutdown_leaves_nothing(
    tmp_path: Path, then: str, code: int, says: str
) -> None:
    # It goes on once nobody can say anything to it, which is when its family has been counted.
    process_code, stderr = run_busy(tmp_path, f"sys.stdin.read(); time.sleep(0.5); {then}", None)
    assert process_code == code
    assert says in stderr
    assert "WARNING" not in stderr
    assert "died" not in stderr
    if not says:
        assert stderr == ""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_ranks_that_multiprocessing_started_end_without_shutdown(
    tmp_path: Path, method: str
) -> None:
    body = f"""
    import multiprocessing

    def rank(k):
        pool = make_pool(2, Work(), kind="process")
        [pool.submit("who", to=worker).result() for worker in range(2)]
        tasks = [pool.submit("nap", 60.0) for _ in range(4)]
        time.sleep(0.3)
        if k == 1:
            raise ValueError("oh")

    if __name__ == "__main__":
        context = multiprocessing.get_context({method!r})
        ranks = [context.Process(target=rank, args=(k,)) for k in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        print([each.exitcode for each in ranks])
        for each in ranks:
            each.kill()
    """
    process = start(tmp_path, body)
    stdout, stderr = process.communicate(timeout=100)
    assert (stdout, process.returncode) == ("[0, 1]\n", 0)
    assert "ValueError: oh" in stderr
    assert stderr.count("Traceback") == 1
    assert "died" not in stderr


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    code, _ = run_busy(tmp_path, "tasks[0].result()", lambda p: p.kill())
    assert code == -signal.SIGKILL


def test_a_script_without_a_main_guard_ends_with_a_clear_error(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        'pool = make_pool(2, Work(), kind="process")\nprint(pool.submit("who").result())\n',
    )
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stdout == ""
    # Its own last words; those of its workers may come before or after them.
    (last,) = [line for line in stderr.splitlines() if "WorkerDied" in line]
    assert 'if __name__ == "__main__"' in last
    assert "each would start more of them" in stderr


def test_a_main_module_that_cannot_be_imported_again_is_an_error(tmp_path: Path) -> None:
    body = """
    if __name__ != "__main__":
        raise LookupError("not without a GPU")
    pool = make_pool(1, Work(), kind="process")
    pool.submit("who").result()
    """
    process = start(tmp_path, body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "LookupError: not without a GPU" in stderr
    assert "WorkerDied" in stderr.strip().splitlines()[-1]


def test_a_class_of_the_script_itself_works(tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        pool = make_pool(2, Work(), kind="process")
        print(pool.submit("nap", 0.5).result())
        pool.stop()
        print(pool.join(60))
    """
    process = start(tmp_path, body)
    stdout, stderr = process.communicate(timeout=60)
    assert (stdout, stderr, process.returncode) == ("0.5\nTrue\n", "", 0)


def test_a_class_that_no_file_defines_is_refused_with_advice() -> None:
    code = HEAD + "pool = make_pool(1, Work(), kind='process')\npool.submit('who').result()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ConfigError" in done.stderr.strip().splitlines()[-1] or "script file" in done.stderr


def test_a_worker_process_does_not_start_others() -> None:
    with (
        processes(1, Nested()) as pool,
        pytest.raises(ConfigError, match="a worker process itself"),
    ):
        pool.submit("start").result()


class Nested:
    def start(self) -> None:
        make_pool(1, Work(), kind="process")


def test_a_call_is_described_by_what_it_was_asked_for() -> None:
    ref = ChunkRef(FileRef("data/a.parquet", "a.parquet", 10, "parquet"), 3, 100)
    assert describe("make", (ref, 1)) == "make(data/a.parquet, row group 3, 1)"
    assert len(describe("make", ("x" * 10_000, np.arange(10**6), b"y" * 10_000))) < 600


BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_what_is_being_started_takes_no_notice_of_ctrl_c_until_it_leaves_it_to_the_parent() -> None:
    """The server of worker processes would print a traceback while it imports."""
    command = [sys.executable, "-c", BLOCKED]
    with worker._undisturbed():
        assert subprocess.check_output(command, text=True, timeout=60).strip() == "True"
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "False"
    with processes() as pool:
        assert pool.submit("heeds_ctrl_c").result() == (False, True)

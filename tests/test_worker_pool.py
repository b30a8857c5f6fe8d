"""The thread pool: oldest first, urgent before all, follow-ups, another size, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import LoaderClosed
from penstock.feed.worker_pool import InlinePool, ThreadPool

WAIT_S = 30.0


class Work:
    """Records the order of its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.begun, self.gate = threading.Semaphore(0), threading.Event()

    def echo(self, *args: Any) -> Any:
        self.calls.append(args)
        return args

    def hold(self) -> str:
        self.begun.release()
        assert self.gate.wait(WAIT_S)
        return threading.current_thread().name

    def fail(self) -> None:
        raise KeyError("it failed")


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def pool(work: Work) -> Iterator[ThreadPool]:
    pool = ThreadPool(1, work)
    yield pool
    work.gate.set()
    pool.stop()
    assert pool.join(WAIT_S)


def test_tasks_run_oldest_first_and_urgent_ones_before_all_that_wait(
    pool: ThreadPool, work: Work
) -> None:
    held = pool.submit("hold")
    assert work.begun.acquire(timeout=WAIT_S)
    tasks = [pool.submit("echo", n) for n in range(3)]
    tasks.append(pool.submit("echo", "urgent", urgent=True))
    work.gate.set()
    assert held.result(WAIT_S) == "penstock-worker-0"
    assert [task.result(WAIT_S) for task in tasks] == [(0,), (1,), (2,), ("urgent",)]
    assert work.calls == [("urgent",), (0,), (1,), (2,)]


def test_a_task_after_another_gets_its_result_or_its_failure(pool: ThreadPool, work: Work) -> None:
    first = pool.submit("hold")
    second = pool.submit("echo", "got", after=first)
    other = pool.submit("echo", "other")
    work.gate.set()
    assert second.result(WAIT_S) == ("got", "penstock-worker-0")
    assert other.result(WAIT_S) == ("other",)
    failed = pool.submit("echo", after=pool.submit("fail"))
    with pytest.raises(KeyError, match="it failed"):
        failed.result(WAIT_S)
    inline = InlinePool(work)
    assert inline.submit("echo", 1, after=inline.submit("echo", 2)).result() == (1, (2,))


def test_a_pool_that_changes_size_loses_no_task(pool: ThreadPool, work: Work) -> None:
    pool.resize(4)
    held = [pool.submit("hold") for _ in range(4)]
    for _ in held:
        assert work.begun.acquire(timeout=WAIT_S)
    waiting = [pool.submit("echo", n) for n in range(50)]
    pool.resize(1)
    work.gate.set()
    assert len({task.result(WAIT_S) for task in held}) == 4
    assert [task.result(WAIT_S) for task in waiting] == [(n,) for n in range(50)]
    for size in (3, 1, 5, 2):
        tasks = [pool.submit("echo", n) for n in range(20)]
        pool.resize(size)
        assert [task.result(WAIT_S) for task in tasks] == [(n,) for n in range(20)]


def test_stop_fails_what_waits_and_lets_what_runs_finish(pool: ThreadPool, work: Work) -> None:
    held = pool.submit("hold")
    assert work.begun.acquire(timeout=WAIT_S)
    waiting = pool.submit("echo", 1)
    follow_up = pool.submit("echo", after=held)
    pool.stop()
    with pytest.raises(LoaderClosed):
        waiting.result(WAIT_S)
    with pytest.raises(LoaderClosed):
        pool.submit("echo", 2)
    assert not pool.join(0.0)
    work.gate.set()
    assert held.result(WAIT_S)
    with pytest.raises(LoaderClosed):
        follow_up.result(WAIT_S)
    assert pool.join(WAIT_S)
    assert work.calls == []

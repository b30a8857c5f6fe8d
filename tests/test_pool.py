"""Pools: what holds for threads, for processes and for the caller's own thread."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, LoaderClosed
from penstock.feed import pin
from penstock.feed.pool import Pool, Scoped, ThreadPool, Works, make_pool
from tests.working import Work

KINDS = [("inline", 0), ("thread", 1), ("thread", 3), ("process", 1), ("process", 2)]


def made(kind: str, n: int, work: Any, **more: Any) -> Pool:
    return make_pool(n, work, kind="process" if kind == "process" else "thread", **more)


@pytest.fixture(params=KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = made(*request.param, Work())
    yield pool
    pool.stop()
    assert pool.join(60)


class Gate:
    """Work that waits until it is let go."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def wait(self) -> bool:
        self.entered.set()
        return self.open.wait(60)


def test_each_task_gets_its_own_result(pool: Pool) -> None:
    tasks = [pool.submit("square", i) for i in range(50)]
    assert [task.result() for task in tasks] == [i * i for i in range(50)]
    assert pool.restarts == 0


def test_before_gives_the_arguments_in_this_process(pool: Pool) -> None:
    task = pool.submit("echo", before=lambda: (os.getpid(), 7))
    assert task.result() == (os.getpid(), 7)


def test_an_exception_of_before_is_the_tasks(pool: Pool) -> None:
    def before() -> tuple[Any, ...]:
        raise KeyError("nothing to give")

    with pytest.raises(KeyError, match="nothing to give"):
        pool.submit("echo", before=before).result()
    assert pool.submit("square", 3).result() == 9


def test_an_exception_keeps_its_type_and_notes(pool: Pool) -> None:
    with pytest.raises(ValueError, match="bad row") as caught:
        pool.submit("fail", "bad row").result()
    assert "in stage decode" in caught.value.__notes__


def test_a_method_that_is_not_there_is_an_error_of_the_task(pool: Pool) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        pool.submit("nonsense").result()


def test_a_base_exception_belongs_to_whoever_waits(pool: Pool) -> None:
    with pytest.raises(SystemExit) as caught:
        pool.submit("raise_", "exit").result()
    assert caught.value.code == 4
    assert pool.submit("square", 3).result() == 9


def test_stopping_twice_is_stopping(pool: Pool) -> None:
    pool.submit("square", 1).result()
    pool.stop()
    pool.stop()
    assert pool.join(60)
    assert pool.join(60)


@pytest.mark.parametrize("kind", ["thread"])
def test_first_goes_before_all_that_wait(kind: str) -> None:
    seen: list[int] = []

    def noted(x: int) -> Any:
        return lambda: (seen.append(x), (x,))[1]

    pool = made(kind, 1, Work())
    entered, gate = threading.Event(), threading.Event()
    held = pool.submit("echo", before=lambda: (entered.set(), (gate.wait(60),))[1])
    assert entered.wait(60)
    tasks = [pool.submit("echo", before=noted(i), to=0 if i % 2 else None) for i in range(4)]
    tasks.append(pool.submit("echo", before=noted(10), first=True))
    tasks.append(pool.submit("echo", before=noted(11), first=True, to=0))
    gate.set()
    assert [task.result() for task in [held, *tasks]] == [True, 0, 1, 2, 3, 10, 11]
    assert seen == [11, 10, 0, 1, 2, 3]
    pool.stop()
    assert pool.join(60)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_stop_fails_what_waits_and_takes_no_more(kind: str) -> None:
    pool = made(kind, 1, Work())
    entered, gate = threading.Event(), threading.Event()
    running = pool.submit("echo", before=lambda: (entered.set(), (gate.wait(60),))[1])
    assert entered.wait(60)
    waiting = [pool.submit("square", i) for i in range(5)]
    pool.stop()
    gate.set()
    assert pool.join(60)
    for task in waiting:
        with pytest.raises(LoaderClosed):
            task.result()
    with pytest.raises(LoaderClosed):
        pool.submit("square", 1)
    with suppress(LoaderClosed):  # a process may be ended before it answers
        assert running.result() is True


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_cancelled_task_is_not_run(kind: str) -> None:
    pool = made(kind, 1, Work())
    entered, gate = threading.Event(), threading.Event()
    held = pool.submit("echo", before=lambda: (entered.set(), (gate.wait(60),))[1])
    assert entered.wait(60)
    dropped = pool.submit("count")
    assert dropped.cancel()
    gate.set()
    held.result()
    task = pool.submit("count")
    assert task.result() == 1
    assert task.ready()
    assert not dropped.ready()
    pool.stop()
    assert pool.join(60)


def test_tasks_of_threads_run_on_threads_of_ours() -> None:
    pool = make_pool(2, Work())
    assert pool.submit("thread").result().startswith("penstock-worker-")
    pool.stop()
    assert pool.join(60)


def test_join_says_that_a_thread_is_still_busy() -> None:
    gate = Gate()
    pool = make_pool(1, gate)
    task = pool.submit("wait")
    assert gate.entered.wait(60)
    pool.stop()
    assert not pool.join(0.05)
    gate.open.set()
    assert pool.join(60)
    assert task.result() is True


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_idle_worker_keeps_nothing_of_its_last_task(kind: str) -> None:
    import numpy as np

    pool = made(kind, 1, Work())
    given = np.arange(100_000)
    result = pool.submit("echo", given).result()
    assert (result == given).all()
    pool.submit("square", 1).result()
    kept = [weakref.ref(given), weakref.ref(result)]
    del given, result
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    pool.stop()
    assert pool.join(60)


def test_a_task_for_one_worker_does_not_keep_others_from_theirs() -> None:
    """Every wake-up reaches somebody who can use it, whatever the mix of tasks."""
    pool = make_pool(3, Work(), kind="process")
    tasks = [
        pool.submit("square", i, to=None if i % 3 else i, first=i % 5 == 0)
        for i in range(600)
        if i % 50 or time.sleep(0.002) is None
    ]
    assert [task.result() for task in tasks] == [i * i for i in range(600)]
    pool.stop()
    assert pool.join(60)


# Several works in one pool


@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_several_works_share_a_pool(kind: str, n: int) -> None:
    pool = made(kind, n, Works({"web": Work(), "code": Tripled()}))
    web, code = Scoped(pool, "web"), Scoped(pool, "code")
    assert web.n_workers == n
    assert web.restarts == 0
    assert web.submit("echo", 2).result() == 2
    assert code.submit("echo", 2).result() == 6
    assert code.submit("echo", before=lambda: (5,), to=3, first=True).result() == 15
    code.stop()
    assert code.join(60)


class Tripled:
    closed = stopped = 0

    def echo(self, x: int) -> int:
        return 3 * x

    def stop(self) -> None:
        self.stopped += 1

    def close(self) -> None:
        self.closed += 1


def test_works_are_stopped_and_closed_where_they_can_be() -> None:
    tripled = Tripled()
    works = Works({"web": Work(), "code": tripled})
    works.stop()
    works.close()
    assert (tripled.stopped, tripled.closed) == (1, 1)


# Cores


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_keep_to_their_cores(kind: str) -> None:
    one = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    pool = made(kind, 2, Work(), cpus=pin.resolve([one], None))
    assert {pool.submit("cores").result() for _ in range(8)} == {frozenset([one])}
    pool.stop()
    assert pool.join(60)
    assert os.sched_getaffinity(0) == before
    pool = made(kind, 1, Work())
    assert pool.submit("cores").result() == before
    pool.stop()
    assert pool.join(60)


def test_a_thread_that_cannot_be_pinned_fails_its_tasks() -> None:
    pool = make_pool(1, Work(), cpus=frozenset([100_000]))
    with pytest.raises(OSError, match="Invalid argument"):
        pool.submit("square", 1).result()
    pool.stop()
    assert pool.join(60)


def test_cores_that_are_not_there_are_named() -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert pin.resolve(None, None) is None
    assert pin.resolve(usable, None) == frozenset(usable)
    with pytest.raises(
        ConfigError, match=r"4000-4001 cannot be used .* it may use .*" + str(usable[-1])
    ):
        pin.resolve([usable[0], 4000, 4001], None)
    for wrong in ([], "0-3", 3, [1.5], [-1], [True]):
        with pytest.raises(ConfigError, match="cpus"):
            pin.resolve(wrong, None)  # type: ignore[arg-type]


def test_a_numa_node_gives_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = sorted(os.sched_getaffinity(0))
    for node, cores in enumerate([f"{usable[0]}", "900-903,910"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(pin, "NODES", tmp_path)
    assert pin.resolve(None, 0) == {usable[0]}
    assert pin.resolve(usable, 0) == {usable[0]}
    with pytest.raises(ConfigError, match="900-903,910, of which this process may use none"):
        pin.resolve(None, 1)
    with pytest.raises(ConfigError, match="numa_node=7: this system has the nodes 0, 1"):
        pin.resolve(None, 7)
    if len(usable) > 1:
        with pytest.raises(ConfigError, match="no core in common"):
            pin.resolve(usable[1:], 0)
    monkeypatch.setattr(pin, "NODES", tmp_path / "none")
    with pytest.raises(ConfigError, match="shows no NUMA nodes"):
        pin.resolve(None, 0)


def test_pinning_where_it_is_not_possible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="need Linux"):
        pin.resolve([0], None)


def test_a_worker_that_was_woken_while_ctrl_c_came_still_ends() -> None:
    """The interrupt comes in `Condition.notify`, when the worker is awake and still in the list of those that sleep."""
    pool = ThreadPool(1, object())
    condition: Any = pool._jobs._wanted[0]
    deadline = time.monotonic() + 30
    while not condition._waiters and time.monotonic() < deadline:
        time.sleep(0.01)

    def interrupted(n: int = 1) -> None:
        del condition.notify
        condition._waiters[0].release()
        raise KeyboardInterrupt

    condition.notify = interrupted
    with pytest.raises(KeyboardInterrupt):
        pool.submit("anything")
    while len(condition._waiters) < 2 and time.monotonic() < deadline:
        time.sleep(
            0.01
        )  # it has nothing to do, and sleeps again: behind its own old place in the list
    pool.stop()
    assert pool.join(30)

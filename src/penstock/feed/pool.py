"""Workers that call the methods of one object, in the order in which they were asked to.

In:    the name of a method and its arguments. The methods are pure functions of them.
Out:   futures.
Where: `submit` on the producer thread, the calls on worker threads, or in the processes they own
       (see `process`). With 0 workers a call is made when its result is asked for.
State: the calls that wait (see `jobs`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

from penstock.feed.jobs import Before, Job, Jobs, Result, closed
from penstock.feed.pin import pin
from penstock.watch.spans import Clock, Quiet

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """What `submit` gives back."""

    def result(self) -> T_co: ...
    def ready(self) -> bool: ...
    def cancel(self) -> bool: ...


class Pool(Protocol):
    """Somebody who calls the methods of a work object."""

    @property
    def n_workers(self) -> int: ...
    @property
    def restarts(self) -> int:
        """Worker processes that died and were replaced."""

    def submit(
        self,
        method: str,
        *args: Any,
        before: Before | None = None,
        first: bool = False,
        to: int | None = None,
    ) -> Task[Any]:
        """Have `method` called with `args`, or with what `before` gives.

        `before` runs in this process, on the worker's thread, just before the call; it may block.
        `first` is for a small task that others depend on: it goes before all that wait.
        Tasks with the same `to` go to the same worker process, which may keep something for them.
        """

    def stop(self) -> None: ...
    def join(self, timeout: float) -> bool: ...


class ThreadPool:
    """Threads of one process. `resize` makes them more or fewer."""

    restarts = 0

    def __init__(
        self,
        n_workers: int,
        work: Any,
        *,
        cpus: frozenset[int] | None = None,
        name: str = "worker",
        clock: Clock | None = None,
    ) -> None:
        self.n_workers = n_workers
        self._work = work
        self._cpus = cpus
        self._clock = clock or Quiet()
        self._jobs = Jobs(n_workers)
        self._name = name
        self._threads = [self._thread(i) for i in range(n_workers)]
        for thread in self._threads:
            thread.start()

    def _thread(self, worker: int) -> threading.Thread:
        name = f"penstock-{self._name}-{worker}"
        return threading.Thread(target=self._serve, args=(worker,), name=name, daemon=True)

    def resize(self, n_workers: int) -> None:
        """Have more or fewer threads. One that is to go ends with its piece of work. On one thread at a time."""
        self.n_workers = n_workers
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for worker in sorted(self._jobs.resize(n_workers)):
            thread = self._thread(worker)
            thread.start()
            self._threads.append(thread)

    def submit(
        self,
        method: str,
        *args: Any,
        before: Before | None = None,
        first: bool = False,
        to: int | None = None,
    ) -> Task[Any]:
        return self._jobs.add(
            self._job(method, args, before), first, None
        )  # threads share whatever is kept

    def _job(self, method: str, args: tuple[Any, ...], before: Before | None) -> Job:
        return Job(method, args, before, Result(self._clock))

    def stop(self) -> None:
        """Take no more tasks, drop those that wait, let the running ones end."""
        self._jobs.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end. False if one is still busy after the timeout."""
        return join_all(self._threads, timeout)

    def _begin(self, worker: int) -> None:
        if self._cpus is not None:
            pin(self._cpus)

    def _call(self, worker: int, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._work, method)(*args)

    def _serve(self, worker: int) -> None:
        try:
            self._begin(worker)
        except BaseException as error:  # whoever waits for a result learns why there is none
            self._jobs.fail(error)
        track = self._clock.track()
        while (job := self._jobs.take(worker)) is not None:
            if job.future.set_running_or_notify_cancel():
                trail = job.future.trail
                if trail is not None:
                    track.begin(trail)
                try:
                    args = job.args if job.before is None else job.before()
                    result = self._call(worker, job.method, args)
                except (
                    BaseException
                ) as error:  # every failure belongs to whoever waits for the result
                    if trail is not None:
                        track.end(trail)
                    job.future.set_exception(error)
                else:
                    if trail is not None:
                        track.end(trail)
                    job.future.set_result(result)
            args, result = (), None
            del job  # an idle worker must not keep the last chunk alive


class Lazy(Generic[T]):
    """A task that runs in the thread that asks for its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._value: T

    def result(self) -> T:
        if self._function is not None:
            self._value = self._function()
            self._function = None
        return self._value

    def ready(self) -> bool:
        return False

    def cancel(self) -> bool:
        self._function = None
        return True


class InlinePool:
    """No threads at all."""

    n_workers = 0
    restarts = 0

    def __init__(self, work: Any) -> None:
        self._work = work

    def submit(
        self,
        method: str,
        *args: Any,
        before: Before | None = None,
        first: bool = False,
        to: int | None = None,
    ) -> Task[Any]:
        return Lazy(lambda: getattr(self._work, method)(*(args if before is None else before())))

    def stop(self) -> None: ...

    def join(self, timeout: float) -> bool:
        return True


def make_pool(
    n_workers: int,
    work: Any,
    *,
    kind: Literal["thread", "process"] = "thread",
    cpus: frozenset[int] | None = None,
    restart: bool = True,
    clock: Clock | None = None,
) -> Pool:
    """Workers for `work`: threads, processes, or for 0 of them the caller's own thread.

    Each worker keeps to `cpus`. With `restart`, a process that dies is replaced and gets its piece
    of work again; a piece that kills two of them fails.
    """
    if n_workers == 0:
        return InlinePool(work)
    if kind == "thread":
        return ThreadPool(n_workers, work, cpus=cpus, clock=clock)
    from penstock.feed.process_pool import ProcessPool

    return _LocalReaders(ProcessPool(n_workers, work, cpus=cpus, clock=clock), work)


class _LocalReaders:
    """A pool of processes; calls with `to` run in this one, where their result is asked for."""

    def __init__(self, pool: ThreadPool, work: Any) -> None:
        self.n_workers = pool.n_workers
        self._pool = pool
        self._inline = InlinePool(work)
        self.stop, self.join = pool.stop, pool.join

    @property
    def restarts(self) -> int:
        return self._pool.restarts

    def submit(
        self,
        method: str,
        *args: Any,
        before: Before | None = None,
        first: bool = False,
        to: int | None = None,
    ) -> Task[Any]:
        pool = self._pool if to is None else self._inline
        return pool.submit(method, *args, before=before, first=first)


class Works:
    """Several work objects that share a pool, each under its name."""

    def __init__(self, works: Mapping[str, Any]) -> None:
        self._works = dict(works)

    @property
    def clock(self) -> Any:
        """What they all measure their time with."""
        return next((work.clock for work in self._works.values() if hasattr(work, "clock")), None)

    def named(self, name: str) -> Any:
        """One of them."""
        return self._works[name]

    def call(self, name: str, method: str, *args: Any) -> Any:
        return getattr(self._works[name], method)(*args)

    def stop(self) -> None:
        """Stop every one that can be stopped."""
        self._each("stop")

    def close(self) -> None:
        """Close every one that can be closed."""
        self._each("close")

    def _each(self, method: str) -> None:
        for work in self._works.values():
            if hasattr(work, method):
                getattr(work, method)()


class Scoped:
    """A pool over `Works`, for the one that goes by `name`."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool = pool
        self._name = name

    @property
    def n_workers(self) -> int:
        return self._pool.n_workers

    @property
    def restarts(self) -> int:
        return self._pool.restarts

    def submit(
        self,
        method: str,
        *args: Any,
        before: Before | None = None,
        first: bool = False,
        to: int | None = None,
    ) -> Task[Any]:
        name = self._name
        if before is None:
            return self._pool.submit("call", name, method, *args, first=first, to=to)
        given = before
        return self._pool.submit(
            "call", before=lambda: (name, method, *given()), first=first, to=to
        )

    def stop(self) -> None:
        self._pool.stop()

    def join(self, timeout: float) -> bool:
        return self._pool.join(timeout)


def join_all(threads: list[threading.Thread], timeout: float) -> bool:
    """Join threads within one deadline; never the current one, which a finalizer may run on."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(t.is_alive() for t in threads if t is not threading.current_thread())


__all__ = [
    "Before", "InlinePool", "Lazy", "Pool", "Result", "Scoped", "Task", "ThreadPool", "Works", "closed", "join_all",
    "make_pool",
]  # fmt: skip

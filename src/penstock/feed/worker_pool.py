"""Run tasks on worker threads, oldest first, and return futures.

A task calls a method of the pool's `work` object. It is a pure function of its arguments, so that a
process pool can also run it. A task may depend on another one (`after=`): it is queued when that
one has its result, so that no worker blocks on a fetch.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.errors import LoaderClosed
from penstock.feed.affinity import pin
from penstock.watch.stage_timer import WAIT, Clock, NullClock, ThreadTimeline

T = TypeVar("T")
Call = str | Callable[..., Any]
"""The name of a method of the work object, or a function, which runs in this process."""


def method(work: Any, call: Call) -> Callable[..., Any]:
    """Return the function that a call names."""
    return getattr(work, call) if isinstance(call, str) else call


def closed() -> LoaderClosed:
    """Return the error for callers that wait on a loader during its shutdown."""
    return LoaderClosed("the loader was shut down")


class Task(Future[T]):
    """A future that records the stages of its work, so that a wait can be attributed."""

    def __init__(self, clock: Clock, after: Task[Any] | None = None) -> None:
        super().__init__()
        self._clock = clock
        self.timeline = clock.task_timeline()
        if after is not None and self.timeline is not None:
            self.timeline.after = after.timeline

    def result(self, timeout: float | None = None) -> T:
        if self.timeline is None or self.done():
            return super().result(timeout)
        with self._clock.stage(WAIT, self.timeline):
            return super().result(timeout)

    def run(self, function: Callable[..., T], *args: Any, on: ThreadTimeline | None = None) -> None:
        """Call the function and store its result or exception; `on` records the time."""
        if not self.set_running_or_notify_cancel():
            return
        result: Any = None
        error: BaseException | None = None
        if on is not None and self.timeline is not None:
            on.begin(self.timeline)
        try:
            result = function(*args)
        except StopIteration as raised:  # the caller would take it for the end of the data
            error = RuntimeError("a StopIteration came out of the dataset, preprocess or collate")
            error.__notes__ = getattr(raised, "__notes__", [])
        except BaseException as raised:
            # Store every exception in the future; the waiting thread raises it.
            error = raised
        if on is not None and self.timeline is not None:
            on.end(self.timeline)
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)

    def ready(self) -> bool:
        """Return True if there is a result: not if the task is pending, failed or cancelled."""
        return self.done() and not self.cancelled() and self.exception() is None


class Pool(Protocol):
    """Runs the methods of a work object."""

    @property
    def n_workers(self) -> int: ...

    def submit(
        self, call: Call, *args: Any, after: Task[Any] | None = None, urgent: bool = False
    ) -> Task[Any]:
        """Queue a call. With `after`, the result of that task becomes the last argument; its
        failure becomes this task's failure. An urgent task runs before all queued ones."""


@dataclass(slots=True, eq=False)
class Job:
    """A queued call."""

    order: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    task: Task[Any]

    def __lt__(self, other: Job) -> bool:
        return self.order < other.order

    def fail(self, error: BaseException) -> None:
        if self.task.set_running_or_notify_cancel():
            self.task.set_exception(error)


class ThreadPool:
    """Worker threads. `resize` changes their number while they run."""

    restarts = 0

    def __init__(
        self,
        n_workers: int,
        work: Any,
        *,
        name: str = "worker",
        cpus: frozenset[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.n_workers = 0
        self._work, self._name, self._cpus = work, name, cpus
        self._clock = clock or NullClock()
        # Reentrant: garbage collection may close a loader on a thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._jobs: list[Job] = []
        self._last = 0
        self._stopped = False
        self._threads: dict[int, threading.Thread] = {}
        self.resize(n_workers)

    def resize(self, n_workers: int) -> None:
        """Set the number of threads. Surplus threads exit after their current task."""
        with self._changed:
            self.n_workers = n_workers
            self._changed.notify_all()
            for number in set(range(n_workers)) - set(self._threads):
                name = f"penstock-{self._name}-{number}"
                thread = threading.Thread(
                    target=self._serve, args=(number,), name=name, daemon=True
                )
                self._threads[number] = thread
                thread.start()

    def submit(
        self, call: Call, *args: Any, after: Task[Any] | None = None, urgent: bool = False
    ) -> Task[Any]:
        with self._changed:
            if self._stopped:
                raise closed()
            self._last += 1
            order = -self._last if urgent else self._last
        job = Job(order, method(self._work, call), args, Task(self._clock, after))
        if after is None:
            self._push(job)
        else:
            after.add_done_callback(lambda done: self._follow(job, done))
        return job.task

    def _follow(self, job: Job, done: Future[Any]) -> None:
        error = closed() if done.cancelled() else done.exception()
        if error is not None:
            job.fail(error)
        else:
            job.args = (*job.args, done.result())
            self._push(job)

    def _push(self, job: Job) -> None:
        with self._changed:
            if not self._stopped:
                heapq.heappush(self._jobs, job)
                self._changed.notify()
                return
        job.fail(closed())

    def stop(self) -> None:
        """Accept no more tasks, and fail queued ones. Running tasks finish."""
        with self._changed:
            self._stopped = True
            waiting, self._jobs = self._jobs, []
            self._changed.notify_all()
        for job in waiting:
            job.fail(closed())

    def join(self, timeout_s: float) -> bool:
        """Wait for the workers to exit. Return False if one is still busy."""
        return join_all(list(self._threads.values()), timeout_s)

    def _take(self, number: int) -> Job | None:
        with self._changed:
            while not self._jobs and not self._stopped and number < self.n_workers:
                self._changed.wait()
            if self._stopped:
                return None
            if number >= self.n_workers:
                del self._threads[number]
                self._changed.notify()  # pass on a wake-up for a job that this thread does not take
                return None
            return heapq.heappop(self._jobs)

    def _serve(self, number: int) -> None:
        pin(self._cpus)
        timeline = self._clock.timeline()
        while (job := self._take(number)) is not None:
            job.task.run(job.function, *job.args, on=timeline)
            del job  # an idle thread must not keep the last result alive


class LazyTask(Task[T]):
    """A task that runs on the thread that requests its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(NullClock())
        self._function: Callable[[], T] | None = function

    def result(self, timeout: float | None = None) -> T:
        function, self._function = self._function, None
        if function is not None:
            self.run(function)
        return super().result(timeout)


class InlinePool:
    """A pool without workers: a task runs when its result is requested."""

    n_workers = 0
    restarts = 0

    def __init__(self, work: Any) -> None:
        self._work = work

    def submit(self, call: Call, *args: Any, after: Task[Any] | None = None, **_: Any) -> Task[Any]:
        function = method(self._work, call)
        if after is None:
            return LazyTask(lambda: function(*args))
        return LazyTask(lambda: function(*args, after.result()))

    def stop(self) -> None: ...

    def join(self, timeout_s: float) -> bool:
        return True


def make_pool(
    n_workers: int, work: Any, *, workers: str, cpus: frozenset[int] | None, clock: Clock
) -> ThreadPool | InlinePool:
    """Return a pool of threads or processes; for 0 workers, one that runs tasks in the caller."""
    if n_workers == 0:
        return InlinePool(work)
    if workers == "thread":
        return ThreadPool(n_workers, work, cpus=cpus, clock=clock)
    from penstock.feed.process_pool import ProcessPool

    return ProcessPool(n_workers, work, cpus=cpus, clock=clock)


class PartWorks:
    """The work objects of a mixture's parts, which share one pool."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.clock = next((w.clock for w in self.parts.values() if hasattr(w, "clock")), None)

    def call(self, part: str, method: str, *args: Any) -> Any:
        return getattr(self.parts[part], method)(*args)

    def stop(self) -> None:
        for work in self.parts.values():
            work.stop()

    def close(self) -> None:
        for work in self.parts.values():
            work.close()


class PartPool:
    """The view that one part has of a pool over `PartWorks`."""

    def __init__(self, pool: Pool, part: str) -> None:
        self.pool, self._part = pool, part

    @property
    def n_workers(self) -> int:
        return self.pool.n_workers

    def submit(self, call: Call, *args: Any, **how: Any) -> Task[Any]:
        if isinstance(call, str):
            call, args = "call", (self._part, call, *args)
        return self.pool.submit(call, *args, **how)


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Join threads within one deadline. Return False if one still runs."""
    deadline = time.monotonic() + timeout_s
    # A finalizer may run on one of these threads, which cannot join itself.
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)

"""The calls that wait for a worker, and the futures of those who wait for them.

In:    a call, for any worker or for a certain one.
Out:   the oldest call, to a worker that asks for one.
Where: `add` on the producer thread, `take` on worker threads.
State: the calls that wait, and which workers are idle, behind a lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import LoaderClosed
from penstock.watch.spans import WAIT, Clock, Trail

T = TypeVar("T")
Before = Callable[[], tuple[Any, ...]]


class Result(Future[T]):
    """A future that says whether it has a result, rather than whether it is over, and who waited for it."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._good = False
        self.trail: Trail | None = None if clock is None else clock.trail()

    def result(self, timeout: float | None = None) -> T:
        if self._clock is None or self.trail is None or self.done():
            return super().result(timeout)
        with self._clock.stage(WAIT, self.trail):
            return super().result(timeout)

    def set_result(self, result: T) -> None:
        self._good = True  # first: whoever has the result finds it ready
        super().set_result(result)

    def ready(self) -> bool:
        return self._good  # asked for each chunk under way whenever one is used: no locks


def closed() -> LoaderClosed:
    """What those get who wait for something when the loader is shut down."""
    return LoaderClosed("the loader was shut down")


@dataclass(slots=True)
class Job:
    """A call that waits, and who waits for it."""

    method: str
    args: tuple[Any, ...]
    before: Before | None
    future: Result[Any] = field(default_factory=Result)
    order: int = 0


class Jobs:
    """The calls that wait: for any worker, or for a certain one. The oldest goes first."""

    def __init__(self, n_workers: int) -> None:
        # A garbage collection may end the pool on a thread that is in here.
        self._lock = threading.RLock()
        # One waits for each. All are woken nevertheless: where Ctrl-C came while one was, it is still listed, and to wake
        # one would be to wake nobody.
        self._wanted = [threading.Condition(self._lock) for _ in range(n_workers)]
        self._idle: list[int] = []
        self._any: deque[Job] = deque()
        self._own: list[deque[Job]] = [deque() for _ in range(n_workers)]
        self._last, self._foremost = 0, 0
        self._limit = n_workers
        self._left: set[int] = set()
        self._stopped = False
        self._error: BaseException | None = None

    def add(self, job: Job, first: bool, to: int | None) -> Result[Any]:
        with self._lock:
            if self._stopped:
                raise closed()
            if self._error is not None:
                job.future.set_exception(self._error)
                return job.future
            jobs = self._any if to is None else self._own[to % len(self._own)]
            if first:
                job.order = self._foremost = self._foremost - 1
                jobs.appendleft(job)
            else:
                job.order = self._last = self._last + 1
                jobs.append(job)
            if to is not None:
                self._wanted[to % len(self._own)].notify_all()
            elif self._idle:
                self._wanted[self._idle.pop()].notify_all()
        return job.future

    def resize(self, n_workers: int) -> set[int]:
        """Serve more or fewer workers from now on. Gives those that are needed and not there."""
        with self._lock:
            self._limit = n_workers
            while len(self._own) < n_workers:
                self._left.add(len(self._own))
                self._own.append(deque())
                self._wanted.append(threading.Condition(self._lock))
            for condition in self._wanted[n_workers:]:
                condition.notify_all()
            needed = {worker for worker in self._left if worker < n_workers}
            self._left -= needed
            return needed

    def take(self, worker: int) -> Job | None:
        """The oldest call for this worker, or None once it is to end."""
        own = self._own[worker]
        with self._lock:
            while not self._stopped and worker < self._limit and not own and not self._any:
                self._idle.append(worker)
                self._wanted[worker].wait()
                if worker in self._idle:
                    self._idle.remove(worker)
            if self._stopped or worker >= self._limit:
                self._left.add(worker)
                if (
                    self._any and self._idle
                ):  # this worker may have been woken for what it does not take
                    self._wanted[self._idle.pop()].notify_all()
                return None
            jobs = (
                own if own and (not self._any or own[0].order < self._any[0].order) else self._any
            )
            job = jobs.popleft()
            if self._any and self._idle:  # this worker may have been woken for what it did not take
                self._wanted[self._idle.pop()].notify_all()
            return job

    def stop(self) -> None:
        """Take no more, and drop those that wait."""
        self._end(closed(), stopped=True)

    def fail(self, error: BaseException) -> None:
        """Nobody can do any work: what waits and what will be asked for fails with this error."""
        self._end(error, stopped=False)

    def _end(self, error: BaseException, stopped: bool) -> None:
        with self._lock:
            self._stopped = self._stopped or stopped
            self._error = error
            waiting = [job.future for jobs in (self._any, *self._own) for job in jobs]
            for jobs in (self._any, *self._own):
                jobs.clear()
            for condition in self._wanted:
                condition.notify_all()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

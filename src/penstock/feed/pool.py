"""Worker threads that run tasks in the order in which they were given.

In:    functions and their arguments.
Out:   futures.
Where: `submit` on the producer thread, the functions on the workers.
State: the tasks that wait. With 0 workers a task runs when its result is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from penstock.errors import LoaderClosed

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """What `submit` gives back."""

    def result(self) -> T_co: ...
    def ready(self) -> bool: ...
    def cancel(self) -> bool: ...


class Result(Future[T]):
    """A future that says whether it has a result, rather than whether it is over."""

    def ready(self) -> bool:
        return self.done() and not self.cancelled() and self.exception() is None


class Pool(Protocol):
    """Somebody who runs tasks."""

    n_workers: int

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]: ...
    def submit_first(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]: ...
    def stop(self) -> None: ...
    def join(self, timeout: float) -> bool: ...


_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ThreadPool:
    """A fixed number of threads."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self._tasks: deque[_Work] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-worker-{i}", daemon=True) for i in range(n_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        future: Result[T] = Result()
        self._add(self._tasks.append, (future, function, args, kwargs))
        return future

    def submit_first(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        """A small task that others depend on: it is run before all that wait."""
        future: Result[T] = Result()
        self._add(self._tasks.appendleft, (future, function, args, kwargs))
        return future

    def _add(self, put: Callable[[_Work], None], work: _Work) -> None:
        with self._changed:
            if self._stopped:
                raise LoaderClosed("the loader was shut down")
            put(work)
            self._changed.notify()

    def stop(self) -> None:
        """Take no more tasks, drop those that wait, let the running ones end."""
        with self._changed:
            self._stopped = True
            waiting = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
        for future, *_ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(LoaderClosed("the loader was shut down"))

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end. False if one is still busy after the timeout."""
        return join_all(self._threads, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                future, function, args, kwargs = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # every failure belongs to whoever waits for the result
                future.set_exception(error)
            del future, function, args, kwargs  # an idle worker must not keep the last chunk alive


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

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        return Lazy(lambda: function(*args, **kwargs))

    submit_first = submit

    def stop(self) -> None: ...

    def join(self, timeout: float) -> bool:
        return True


def make_pool(n_workers: int) -> Pool:
    """A pool of threads, or for 0 the caller's own."""
    return ThreadPool(n_workers) if n_workers > 0 else InlinePool()


def join_all(threads: list[threading.Thread], timeout: float) -> bool:
    """Join threads within one deadline; never the current one, which a finalizer may run on."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(t.is_alive() for t in threads if t is not threading.current_thread())

"""Call the methods of one object in worker processes.

Each thread of a thread pool passes its calls on to a `ProcessPoolExecutor` and waits for the result,
so order, dependencies and shutdown are those of the thread pool. The work is pure: calls that were
running when a process died are repeated in a new executor. Results are pickled.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from penstock.errors import ConfigError, WorkerDied
from penstock.feed.affinity import pin
from penstock.feed.worker_pool import ThreadPool
from penstock.watch.stage_timer import Clock, NullClock, Report

log = logging.getLogger("penstock")


class ProcessPool(ThreadPool):
    """A fixed number of processes, each with its own copy of `work`."""

    def __init__(
        self,
        n_workers: int,
        work: Any,
        *,
        cpus: frozenset[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._processes = _Processes(n_workers, work, cpus, clock or NullClock())
        super().__init__(n_workers, self._processes, clock=clock)

    @property
    def restarts(self) -> int:  # type: ignore[override]
        """How often processes died and were replaced."""
        return self._processes.restarts

    def join(self, timeout_s: float) -> bool:
        """Wait for the running calls, then for the processes. Return False after the timeout."""
        ended = super().join(timeout_s)
        if ended:
            self._processes.close()
        return ended


class _Processes:
    """Stands in for the work object on the pool's threads: its methods run in a process."""

    def __init__(
        self, n_workers: int, work: Any, cpus: frozenset[int] | None, clock: Clock
    ) -> None:
        try:
            pickled = pickle.dumps(work)
        except Exception as error:
            raise ConfigError(
                f"the dataset or one of its functions cannot be sent to a worker process: {error}. "
                "Lambdas, closures, local classes, locks and open files cannot be pickled: define "
                'them at module level, leave them out in __getstate__, or use workers="thread".'
            ) from error
        self.restarts = 0
        self._clock = clock
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        # What the fork server imports, the processes need not import again, each for itself.
        context.set_forkserver_preload([*({"numpy", "pyarrow", "torch"} & sys.modules.keys())])
        self._new_executor = partial(
            ProcessPoolExecutor, n_workers, context, _start, (pickled, cpus)
        )
        self._executor = self._new_executor()
        self._replacing = threading.Lock()
        self._repeating = threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def close(self) -> None:
        self._executor.shutdown()

    def _call(self, method: str, *args: Any) -> Any:
        about = f"{method} {str(args[0])[:200] if args else ''}"
        executor = self._executor
        try:
            return self._run(executor, method, args)
        except BrokenProcessPool:
            self._replace(executor, about)
        # Repeated calls run one at a time, so that one which kills its process again does not take
        # the others with it.
        with self._repeating:
            executor = self._executor
            try:
                return self._run(executor, method, args)
            except BrokenProcessPool:
                self._replace(executor, about)
        raise WorkerDied(
            f"two worker processes died, one after the other, during {about}. See stderr for a "
            "reason. If your script starts again there, put what is not for the workers under "
            'if __name__ == "__main__".'
        )

    def _run(self, executor: ProcessPoolExecutor, method: str, args: tuple[Any, ...]) -> Any:
        good, pickled, report = executor.submit(_call, method, args).result()
        if report is not None:
            self._clock.timeline().absorb(report, args[0] if args else None)
        value = pickle.loads(pickled)
        if good:
            return value
        raise value

    def _replace(self, broken: ProcessPoolExecutor, about: str) -> None:
        """Replace an executor that broke, unless another thread has done so."""
        log.warning("a worker process died during %s", about)
        with self._replacing:
            if self._executor is broken:
                broken.shutdown()  # waits until its other processes are gone too
                self._executor = self._new_executor()
                self.restarts += 1


# In the worker process

_WORK: list[Any] = []
"""The work object, in a worker process only: an initializer has no other way to pass it on."""


def _start(pickled: bytes, cpus: frozenset[int] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which decides
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if cpus is not None:
        pin(cpus)
    _WORK.append(pickle.loads(pickled))


def _exit_with_parent() -> None:
    """End this process when the parent is gone: otherwise it would wait for calls forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _call(method: str, args: tuple[Any, ...]) -> tuple[bool, bytes, Report | None]:
    """Return True and the pickled result, or False and the pickled exception; and stage times."""
    try:
        good, pickled = True, pickle.dumps(getattr(_WORK[0], method)(*args))
    except BaseException as error:
        good, pickled = False, portable(error)
    clock: Clock | None = getattr(_WORK[0], "clock", None)
    report = clock.timeline().report() if clock is not None and clock.on else None
    return good, pickled, report


def portable(error: BaseException) -> bytes:
    """Pickle an exception with its traceback as a note; as a RuntimeError if it cannot be loaded."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in worker process {os.getpid()}:\n{text}")
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        if str(pickle.loads(pickled)) == str(error):
            return pickled
    return pickle.dumps(RuntimeError(text))

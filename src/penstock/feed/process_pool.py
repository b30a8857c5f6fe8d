"""Call the methods of one object in worker processes.

Each thread of a thread pool sends its call to an idle process through a pipe and waits for the
result, so order, dependencies and shutdown are those of the thread pool. Because the work is pure,
a call whose process died is repeated once, in a new process. Results are pickled.

`ProcessPoolExecutor` is not used, because its children share one pipe for results, and the parent
hangs if one of them is killed while it writes a large result (CPython 3.11).
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
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NamedTuple

from penstock.errors import ConfigError, LoaderClosed, WorkerDied
from penstock.feed.affinity import pin
from penstock.feed.worker_pool import ThreadPool
from penstock.watch.stage_timer import Clock, NullClock

log = logging.getLogger("penstock")

EXIT_S = 5.0
"""How long an idle process may take to exit before it is killed."""


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
        """The number of processes that died and were replaced."""
        return len(self._processes.deaths)

    def join(self, timeout_s: float) -> bool:
        """Wait for running calls, then stop the processes. Return False after the timeout."""
        ended = super().join(timeout_s)
        if ended:
            self._processes.close()
        return ended


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection

    def close(self) -> int | None:
        """Stop the process, which exits when its pipe is closed. Return its exit code."""
        self.pipe.close()
        self.process.join(EXIT_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


class _Processes:
    """Proxy for the work object: a method call on a pool thread runs in a worker process."""

    def __init__(self, n_workers: int, work: Any, cpus: Any, clock: Clock) -> None:
        try:
            self._pickled = pickle.dumps(work)
        except Exception as error:
            raise ConfigError(
                f"the dataset or one of its functions cannot be sent to a worker process: {error}. "
                "Lambdas, closures, local classes, locks and open files cannot be pickled: define "
                'them at module level, leave them out in __getstate__, or use workers="thread".'
            ) from error
        self.deaths: list[str] = []
        self._cpus = cpus
        self._clock = clock
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        # Forked processes inherit these imports from the fork server.
        context.set_forkserver_preload([*({"numpy", "pyarrow", "torch"} & sys.modules.keys())])
        self._context: Any = context
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()  # None: not started
        for _ in range(n_workers):
            self._idle.put(None)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def close(self) -> None:
        """Stop the idle processes: all of them, once the pool's threads have exited."""
        while not self._idle.empty():
            if (worker := self._idle.get()) is not None:
                worker.close()

    def _call(self, method: str, *args: Any) -> Any:
        message = pickle.dumps((method, args))
        worker, reply = self._idle.get(), None
        try:
            for _ in range(2):
                worker = worker or self._start()
                try:
                    worker.pipe.send_bytes(message)
                    reply = worker.pipe.recv_bytes()
                    break
                except (EOFError, OSError):
                    code, worker = worker.close(), None
                    if not threading.main_thread().is_alive():
                        raise LoaderClosed("the interpreter exits") from None
                    died = " ".join([f"exit code {code} during", method, *map(str, args[:1])])[:300]
                    self.deaths.append(died)
                    log.warning("a worker process died: %s", died)
        finally:
            self._idle.put(worker)
        if reply is None:
            raise WorkerDied(f"two worker processes died in a row: {died}")
        good, value, report = pickle.loads(reply)
        if report is not None:
            self._clock.timeline().absorb(report, args[0] if args else None)
        if good:
            return value
        raise value

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        args = (theirs, self._pickled, self._cpus)
        process = self._context.Process(target=_serve, args=args, daemon=True)
        process.start()
        theirs.close()  # the child has the only copy, so `recv_bytes` raises if it dies
        worker = _Worker(process, ours)
        try:
            error = pickle.loads(ours.recv_bytes())
        except (EOFError, OSError):
            raise ConfigError(
                f"a worker process could not start (exit code {worker.close()}): see stderr. It "
                "imports your main module first, so put code that workers must not run under "
                'if __name__ == "__main__". Or use workers="thread".'
            ) from None
        if error is not None:
            worker.close()
            raise error
        return worker


# In the worker process


def _serve(pipe: Connection, pickled: bytes, cpus: frozenset[int] | None) -> None:
    """Answer calls until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        pin(cpus)
        work = pickle.loads(pickled)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(portable(error)))
        return
    pipe.send_bytes(pickle.dumps(None))
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(work, pipe.recv_bytes()))


def _exit_with_parent() -> None:
    """Exit when the parent process exits, even during a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _answer(work: Any, message: bytes) -> bytes:
    """Make a call. Return a pickled (success, result or exception, stage times)."""
    try:
        method, args = pickle.loads(message)
        good, value = True, getattr(work, method)(*args)
    except BaseException as error:
        good, value = False, portable(error)
    clock: Clock | None = getattr(work, "clock", None)
    report = clock.timeline().report() if clock is not None and clock.on else None
    try:
        return pickle.dumps((good, value, report))
    except Exception as error:  # the result cannot be pickled
        return pickle.dumps((False, portable(error), report))


def portable(error: BaseException) -> Any:
    """Return an object that unpickles to this exception, or a RuntimeError if that is not possible.

    Adds the traceback as a note.
    """
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in worker process {os.getpid()}:\n{text}")
    for form in (error, _Portable(error)):
        with contextlib.suppress(Exception):  # try the next form
            if str(pickle.loads(pickle.dumps(form))) == str(error):
                return form
    return RuntimeError(text)


class _Portable:
    """Pickles an exception so that loading it skips `__init__`, which may take other arguments."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self._error), self._error.args, vars(self._error))


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error

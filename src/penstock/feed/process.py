"""Worker processes: a pool whose every thread owns one, and hands its calls on to it.

In:    a work object that can be pickled, and the calls of `pool`.
Out:   futures. An exception of the child arrives with its type, its notes and its traceback.
Where: a thread for each process waits for its answer, its death or the pool's end, whichever is first.
State: the processes. The work is pure, so what a dead one had in hand is given to its successor.
Cost:  see `channel` for the data; a call there and back is a fraction of a millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import reprlib
import sys
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

from penstock.errors import ConfigError, WorkerDied
from penstock.feed.channel import Broken, dump
from penstock.feed.pool import Before, Task, ThreadPool, closed
from penstock.feed.worker import EXIT_S, TERMINATE_S, Context, StartFailed, Worker
from penstock.watch.stage_timer import Clock

log = logging.getLogger("penstock")

HEAVY = ("numpy", "pyarrow", "torch")
"""Modules that take long to import, and that can be imported before a fork."""


class ProcessPool(ThreadPool):
    """A fixed number of processes, each with a thread that speaks for it."""

    def __init__(
        self,
        n_workers: int,
        work: Any,
        *,
        cpus: frozenset[int] | None = None,
        restart: bool = True,
        clock: Clock | None = None,
    ) -> None:
        _check_main()
        self._pickled = _pickled(work)
        self.restarts = 0
        self._restart = restart
        methods = multiprocessing.get_all_start_methods()
        self._context: Context
        if "forkserver" in methods:
            self._context = multiprocessing.get_context("forkserver")
            # What is imported here, every child would import again: its server does it once for all.
            self._context.set_forkserver_preload(
                ["__main__", *(name for name in HEAVY if name in sys.modules)]
            )
        else:
            self._context = multiprocessing.get_context("spawn")
        # Said in any case: the server that starts the children may have been started with other cores.
        self._child_cpus = cpus or (
            frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        )
        self._workers: list[Worker | None] = [None] * n_workers
        self._counting = threading.RLock()  # a garbage collection may call `stop` on any thread
        self._serving = n_workers
        self._stopping, self._stop = multiprocessing.Pipe(duplex=False)
        # Not by `atexit`, which does not run in a process that `multiprocessing` started, as ranks may be.
        self._at_exit = Finalize(None, _end, (weakref.ref(self),), exitpriority=100)
        super().__init__(n_workers, None, cpus=cpus, clock=clock)

    def submit(
        self,
        method: str,
        *args: Any,
        before: Before | None = None,
        first: bool = False,
        to: int | None = None,
    ) -> Task[Any]:
        return self._jobs.add(self._job(method, args, before), first, to)

    def stop(self) -> None:
        """Take no more tasks, drop those that wait; processes that are busy are ended."""
        self._jobs.stop()
        with self._counting:
            if not self._stop.closed:
                if not self._stopping.closed:  # the last thread may be gone already
                    self._stop.send_bytes(
                        b"stop"
                    )  # nobody reads it, so every thread that waits for a process sees it
                self._stop.close()

    def _begin(self, worker: int) -> None:
        # The process comes first: the server that starts it must not inherit this thread's cores.
        try:
            self._start(worker)
        finally:
            super()._begin(worker)

    def _start(self, worker: int) -> Worker:
        """A new process. If it is killed while it starts, or the server that starts it is, it is tried again."""
        name = f"penstock-worker-{worker}"
        for pause_s in (0.1, 0.5, None):
            if self._stop.closed:
                raise closed()
            try:
                process = Worker(
                    name, self._pickled, self._child_cpus, self._context, self._stopping
                )
            except StartFailed as failed:
                if pause_s is None or not self._restart or not failed.again:
                    died = WorkerDied(str(failed))
                    self._jobs.fail(died)
                    raise died from failed.__cause__
                if self._stop.closed:
                    raise closed() from failed
                log.warning(
                    "worker process %s could not start (%s). It is tried again", name, failed.how
                )
                self._count()
                self._stopping.poll(pause_s)
            except ConfigError as error:
                self._jobs.fail(error)
                raise
            else:
                self._workers[worker] = process
                return process
        raise AssertionError("not reached")

    def _count(self) -> None:
        with self._counting:
            self.restarts += 1

    def _serve(self, worker: int) -> None:
        try:
            super()._serve(worker)
        finally:
            process = self._workers[worker]
            if process is not None:
                process.end(0.0 if process.busy else EXIT_S)
                self._workers[worker] = None
            with self._counting:
                self._serving -= 1
                if self._serving == 0:
                    self._stopping.close()
                    self._at_exit.cancel()

    def _call(self, worker: int, method: str, args: tuple[Any, ...]) -> Any:
        """Have a call made, by as many processes as may die of it: two."""
        for last in (False, True):
            process = self._alive(worker)
            try:
                value = process.call(method, args)
            except Broken:
                pass
            else:
                if process.report is not None:
                    self._clock.timeline().absorb(
                        process.report, next((a for a in args if hasattr(a, "file")), None)
                    )
                return value
            how = process.end()
            self._workers[worker] = None
            what = describe(method, args)
            if not self._restart:
                raise self._broken(
                    f"worker process {process.name} (pid {process.pid}) died of {how} while it ran {what}"
                )
            if last:
                raise WorkerDied(
                    f"worker process {process.name} (pid {process.pid}) died of {how} while it ran {what}. The process "
                    "that tried it before died too, so it is not tried again."
                )
            log.warning(
                "worker process %s (pid %s) died of %s while it ran %s. It is replaced, and its work is done again",
                process.name, process.pid, how, what,
            )  # fmt: skip
        raise AssertionError("not reached")

    def _alive(self, worker: int) -> Worker:
        """This worker's process, or its successor."""
        process = self._workers[worker]
        if process is not None and process.gone():
            how = process.end()
            self._workers[worker] = process = None
            if not self._restart:
                raise self._broken(
                    f"worker process penstock-worker-{worker} died of {how} while it had nothing to do"
                )
            log.warning(
                "worker process %d died of %s while it had nothing to do. It is replaced",
                worker,
                how,
            )
        if process is None:
            process = self._start(worker)
            self._count()
        return process

    def _broken(self, what: str) -> WorkerDied:
        error = WorkerDied(f"{what}, and may not be replaced")
        self._jobs.fail(error)
        return error


def _end(pool: weakref.ref[ProcessPool]) -> None:
    """End a pool that nobody shut down before the process ends."""
    left = pool()
    if left is not None:
        left.stop()
        left.join(EXIT_S + 2 * TERMINATE_S)


def describe(method: str, args: tuple[Any, ...]) -> str:
    """A call in words, shortened."""
    return f"{method}({', '.join(map(_shown, args))})"


def _shown(value: Any) -> str:
    try:
        own = any("__str__" in vars(kind) for kind in type(value).__mro__[:-1])
        text = str(value) if own and not isinstance(value, str | bytes) else reprlib.repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 160 else f"{text[:100]} … {text[-50:]}"


def _check_main() -> None:
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise ConfigError(
            "a loader with worker processes was started while the main module was being imported by a worker process: "
            'each would start more of them. Put the code that runs the training under if __name__ == "__main__", '
            'or use workers="thread".'
        )
    if process.daemon:
        raise ConfigError(
            f'this is {process.name}, a worker process itself, which may not start others: use workers="thread" here.'
        )


def _pickled(work: Any) -> bytes:
    try:
        return bytes(dump(work, None)[0])
    except Exception as error:
        path, value, cause = _culprit("", work, error)
        raise ConfigError(
            f"{path.lstrip('.') or 'the work'}, {reprlib.repr(value)}, cannot be sent to a worker process: {cause}. "
            "Lambdas, closures, local classes, locks and open files cannot: define it at module level, "
            'leave it out in __getstate__, or use workers="thread".'
        ) from error


def _culprit(path: str, value: Any, error: Exception, depth: int = 8) -> tuple[str, Any, Exception]:
    """The innermost part that cannot be pickled, and how to get there."""
    if depth:
        for step, part in _parts(value):
            try:
                dump(part, None)
            except Exception as inner:
                return _culprit(path + step, part, inner, depth - 1)
    return path, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    state: Any = value
    if not isinstance(value, dict | list | tuple):
        state = None
        with contextlib.suppress(Exception):
            state = value.__getstate__()
        if (
            isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
        ):  # with __slots__
            state = {**(state[0] or {}), **state[1]}
        if isinstance(state, dict):
            yield from ((f".{name}", part) for name, part in state.items())
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    else:
        yield from ((f"[{i}]", part) for i, part in enumerate(value))

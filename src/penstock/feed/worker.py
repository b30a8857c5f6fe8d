"""One worker process, as the thread that owns it sees it.

In:    a pickled work object, then calls.
Out:   what they give; `Broken` once the process is gone, however that came about.
Where: the worker's thread in the parent.
State: the process, and whether it has something to do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.errors import ConfigError, LoaderClosed
from penstock.feed import child
from penstock.feed.channel import Broken, PlainEnd, loads, make_ends
from penstock.feed.pool import closed
from penstock.watch.stage_timer import Report

Context = SpawnContext | ForkServerContext

START_S = 300.0
"""A child imports the user's main module, which may import much from a slow disk."""
GRACE_S = 0.2
"""After the pool was stopped, a call that is nearly done may still end by itself."""
EXIT_S = 1.0
"""How long a process that was told to end, or has closed its end, has for it."""
TERMINATE_S = 2.0
"""How long a process has to follow SIGTERM, before it is killed."""

LOST = 255
"""What `multiprocessing` gives as exit code if it cannot learn it."""

_STARTING = threading.Lock()
"""`multiprocessing` polls all children that it knows of whenever it starts one, and who reads the exit code of a child
takes it from others: so it is made to forget each of ours before the next one is started."""


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """What is started meanwhile takes no notice of Ctrl-C, which reaches the whole group, until it can leave it to us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StartFailed(Exception):
    """A process could not begin. `again` says whether another one may."""

    def __init__(self, name: str, how: str, *, again: bool) -> None:
        super().__init__(
            f"worker process {name} could not start ({how}); its own words are on stderr. It imports the main module "
            "first, so that has to work in a process of its own: code that is not for the workers belongs under "
            'if __name__ == "__main__". Or use workers="thread".'
        )
        self.how = how
        self.again = again


class Late(Exception):
    """A deadline has passed."""


class Worker:
    """A child process that was started, and has its work."""

    def __init__(
        self,
        name: str,
        work: bytes,
        cpus: frozenset[int] | None,
        context: Context,
        stopping: Connection,
    ) -> None:
        self.name = name
        self.busy = True
        self.report: Report | None = None
        """What the last call spent its time on, where that is measured."""
        self._deadline: float | None = time.monotonic() + START_S
        self._end, theirs = make_ends()
        self._end.set_blocking(False)
        self._process = context.Process(
            target=child.main, args=(theirs, cpus), name=name, daemon=True
        )
        try:
            with _STARTING, _undisturbed():
                self._process.start()
                _forget(self._process)
        except BaseException as error:
            self._end.close()
            if isinstance(error, OSError | EOFError):  # the server that starts them is gone
                raise StartFailed(name, f"{type(error).__name__}: {error}", again=True) from error
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._sentinel = self._process.sentinel
        self._stopping: Connection | None = stopping
        self._waiting = self._make_waiting(writing=False)
        try:
            self._begin(work)
        except Broken:
            how = self.end()
            raise StartFailed(name, how, again=not how.startswith("exit code")) from None
        except BaseException:
            self.end(0.0)
            raise

    def _begin(self, work: bytes) -> None:
        try:
            self._end.send(work, self._ready)
            reply: child.Reply = self._end.receive(self._ready)
        except Late:
            raise StartFailed(
                self.name, f"no sign of life within {START_S:.0f} s", again=False
            ) from None
        self._deadline = None
        self.busy = False
        if reply.error is not None:
            error = _loaded(reply.error, reply.traceback, self)
            raise ConfigError(
                f"the work cannot be set up in a worker process: {type(error).__name__}: {error}. What it is made of "
                'has to be importable there: define it in a module or a script file, or use workers="thread".'
            ) from error

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Have a method called. `Broken` if the process is gone, `LoaderClosed` if the pool was stopped."""
        self.busy = True
        doing = f"the arguments of {method} cannot be sent to a worker process"
        try:
            self._end.send((method, args), self._ready)
            doing = f"the result of {method} cannot be loaded from its worker process"
            reply: child.Reply = self._end.receive(self._ready)
        except Late:
            raise closed() from None
        except (Broken, LoaderClosed):
            raise
        except Exception as error:  # in pickling: whole messages were read and written, or none
            self.busy = False
            error.add_note(doing)
            raise
        self.busy = False
        self.report = reply.report
        if reply.error is not None:
            raise _loaded(reply.error, reply.traceback, self)
        return reply.value

    def gone(self) -> bool:
        """Whether it died while it had nothing to do: it says nothing unasked, so anything is its end."""
        return not {self._end, self._sentinel}.isdisjoint(self._waiting(0))

    def _ready(self, writing: bool) -> None:
        """Wait for the child to take or to say something; its death and the pool's end come in between."""
        waiting = self._make_waiting(writing=True) if writing else self._waiting
        while True:
            ready = waiting(
                None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            )
            if self._end in ready:
                return
            if self._sentinel in ready:
                raise Broken("the process is gone")
            if not ready:
                raise Late
            if self._deadline is not None:
                raise closed()  # it was only starting
            self._stopping, self._deadline = None, time.monotonic() + GRACE_S
            waiting = self._make_waiting(writing)
            self._waiting = self._make_waiting(writing=False)

    def _make_waiting(self, writing: bool) -> Callable[[float | None], list[Any]]:
        """What waits for the end, the process and the pool, and gives those that have something to say."""
        others: list[Any] = (
            [self._sentinel] if self._stopping is None else [self._sentinel, self._stopping]
        )
        if isinstance(self._end, PlainEnd):
            end, pipe = self._end, self._end.pipe
            return lambda timeout: [
                end if ready is pipe else ready
                for ready in multiprocessing.connection.wait([pipe, *others], timeout)
            ]
        poll = select.poll()
        poll.register(self._end, select.POLLOUT if writing else select.POLLIN)
        things = {self._end.fileno(): self._end}
        for other in others:
            poll.register(other, select.POLLIN)
            things[other if isinstance(other, int) else other.fileno()] = other
        return lambda timeout: [
            things[fd] for fd, _ in poll.poll(None if timeout is None else timeout * 1000)
        ]

    def end(self, leave: float = EXIT_S) -> str:
        """See to it that the process ends, and say how it did. Nothing of it is left."""
        self._end.hang_up()
        process = self._process
        for wait, then in (
            (leave, process.terminate),
            (TERMINATE_S, process.kill),
            (TERMINATE_S, None),
        ):
            if multiprocessing.connection.wait([self._sentinel], wait):
                break
            if then is not None:
                then()
        code = process.exitcode
        if code is not None:
            process.close()
        return _how(code)


def _forget(process: BaseProcess) -> None:
    """A worker is ended by its pool, or ends with its parent. When the interpreter ends, `multiprocessing` would wait
    for it besides, and without end."""
    getattr(multiprocessing.process, "_children", set()).discard(process)


def _how(code: int | None) -> str:
    if code == LOST:
        return "an unknown cause (the server that started it is gone)"
    if code is None:
        return "an unknown cause (it does not follow SIGKILL)"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name} (often the system is out of memory)" if name == "SIGKILL" else name


def _loaded(pickled: bytes, traceback: str, worker: Worker) -> BaseException:
    try:
        error = loads(pickled)
    except Exception:
        error = RuntimeError(
            "an exception of a worker process cannot be loaded here; its traceback is below"
        )
    assert isinstance(error, BaseException)
    error.add_note(f"in worker process {worker.name} (pid {worker.pid}):\n{traceback}")
    return error

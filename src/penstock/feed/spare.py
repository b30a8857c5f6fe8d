"""Threads to spare: for attempts that run side by side, and for names that are looked up.

In:    a call.
Out:   its future.
Where: `submit` on any thread, the call on a thread of its own, made when there is none idle.
State: the idle threads. They end with `stop`, and on their own after a while without work.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from penstock.feed.worker_pool import closed, join_all
from penstock.read.attempt import Fault, Patience

T = TypeVar("T")

IDLE_S = 30.0


class SpareThreads:
    """As many threads as there are calls at once, up to a limit."""

    def __init__(self, limit: int, name: str = "spare") -> None:
        self._limit = limit
        self._name = name
        # Reentrant, because a garbage collection may end the run on a thread that is in here.
        self._lock = threading.RLock()
        self._wanted = threading.Condition(self._lock)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._serving = self._idle = 0
        self._stopped = False

    def allow(self, limit: int) -> None:
        """Allow more threads than before."""
        self._limit = max(self._limit, limit)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have something called as soon as there is a thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                raise closed()
            self._calls.append((call, future))
            if self._idle >= len(self._calls):
                self._wanted.notify()
                return future
            if self._serving >= self._limit:
                return future
            # Not by who is alive: a thread may be so for a moment after it has seen that nothing is to be done.
            self._serving += 1
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=self._serve, name=f"penstock-{self._name}", daemon=True
            )
            # Started under the lock: a thread that has not begun would not count as alive.
            thread.start()
            self._threads.append(thread)
        return future

    def stop(self) -> None:
        """Take no more calls, and drop those that wait."""
        with self._lock:
            self._stopped = True
            waiting, self._calls = list(self._calls), deque()
            self._wanted.notify_all()
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(closed())

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end. False if one is still busy after the timeout."""
        return join_all(self._threads, timeout)

    def __enter__(self) -> SpareThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join(10.0)

    def _serve(self) -> None:
        while True:
            with self._lock:
                until = time.monotonic() + IDLE_S
                while not self._calls:
                    left = until - time.monotonic()
                    if self._stopped or left <= 0:
                        self._serving -= 1
                        return
                    self._idle += 1
                    self._wanted.wait(left)
                    self._idle -= 1
                call, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except (
                    BaseException
                ) as error:  # every failure belongs to whoever waits for the result
                    future.set_exception(error)
            del call, future  # an idle thread must not keep the last result alive


def resolve_in_time(host: str, port: int, patience: Patience) -> Sequence[tuple[Any, ...]]:
    """The addresses of a host, within a deadline, which the system's own resolver does not know.

    A lookup that takes longer cannot be ended: its thread goes on until the resolver gives up.
    """
    if host.replace(".", "").isdigit() or ":" in host:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # a number needs no server
    answer: Future[Sequence[tuple[Any, ...]]] = Future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except BaseException as error:  # belongs to whoever asked
            _settle(answer, error)
        else:
            with suppress(InvalidStateError):
                answer.set_result(found)

    threading.Thread(target=look_up, name="penstock-lookup", daemon=True).start()
    patience.when_cancelled(lambda: _settle(answer, Fault("cancelled", "nobody needs it any more")))
    try:
        return answer.result(patience.connect_s())
    finally:
        patience.when_cancelled(None)


def _settle(answer: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # the other of the two was faster
        answer.set_exception(error)

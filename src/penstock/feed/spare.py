"""Threads for attempts that run side by side, and for looking up names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Self

from penstock.feed.worker_pool import Call, Task, ThreadPool
from penstock.read.attempt import Fault, Patience


class SpareThreads(ThreadPool):
    """Starts a thread when all others are busy, up to a limit."""

    def __init__(self, limit: int, name: str = "spare") -> None:
        super().__init__(0, None, name=name)
        self._limit = limit
        self._unfinished = 0

    def allow(self, limit: int) -> None:
        """Allow more threads than before."""
        self._limit = max(self._limit, limit)

    def submit(self, call: Call, *args: Any, **how: Any) -> Task[Any]:
        with self._changed:
            task = super().submit(call, *args, **how)
            self._unfinished += 1
            if self.n_workers < min(self._unfinished, self._limit):
                self.resize(self.n_workers + 1)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: Future[Any]) -> None:
        with self._changed:
            self._unfinished -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join(10.0)


def resolve_in_time(host: str, port: int, patience: Patience) -> Sequence[tuple[Any, ...]]:
    """Return the addresses of a host within a deadline, which the system's resolver does not take.

    A lookup that takes longer cannot be ended: its thread runs until the resolver gives up.
    """
    if host.replace(".", "").isdigit() or ":" in host:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # a number needs no server
    answer: Future[Sequence[tuple[Any, ...]]] = Future()

    def look_up() -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as error:
                answer.set_exception(error)

    def cancel() -> None:
        with suppress(InvalidStateError):  # found meanwhile
            answer.set_exception(Fault("cancelled", "the request was cancelled"))

    threading.Thread(target=look_up, name="penstock-lookup", daemon=True).start()
    patience.when_cancelled(cancel)
    try:
        return answer.result(patience.connect_s())
    finally:
        patience.when_cancelled(None)

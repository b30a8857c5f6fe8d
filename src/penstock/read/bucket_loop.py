"""An event loop for one read from a bucket, which ends only when nobody else has anything to do with it any more.

In:    a coroutine that awaits obstore.
Out:   what it gives.
Where: a fetch thread; obstore answers on threads of its own.
State: the answers that are still to come.

What was cancelled is still answered, or looked at whether it wants an answer, by a thread of obstore's. One that does so
when the interpreter ends takes the process down with it, so a loop waits for them before it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

LET_GO_S = 2.0
"""Within which obstore's threads let go of what was cancelled."""


class BucketLoop(asyncio.SelectorEventLoop):
    """Futures that it makes are obstore's to answer."""

    def __init__(self) -> None:
        super().__init__()
        self._home = threading.get_ident()
        self._answered = threading.Condition()
        self._awaited = 0

    def create_future(self) -> asyncio.Future[Any]:
        with self._answered:
            self._awaited += 1
        return _Awaited(self)

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]
        """For obstore: an answer. `wake` is for everybody else."""
        try:
            return super().call_soon_threadsafe(*args, **kwargs)
        finally:
            self.let_go()

    def wake(self, callback: Callable[[], Any]) -> None:
        """Have something called by the loop, from another thread."""
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            super().call_soon_threadsafe(callback)

    def let_go(self) -> None:
        """Another thread, if this is one, has no more to do with one of the futures."""
        if threading.get_ident() != self._home:
            with self._answered:
                self._awaited -= 1
                self._answered.notify_all()

    def run(
        self, reading: Coroutine[Any, Any, Any], begun: Callable[[Callable[[], Any]], None]
    ) -> Any:
        """What a coroutine gives. `begun` is told how to cancel it, from any thread."""
        try:
            task = self.create_task(reading)
            begun(lambda: self.wake(task.cancel))
            return self.run_until_complete(task)
        finally:
            with self._answered:
                self._answered.wait_for(lambda: self._awaited <= 0, LET_GO_S)
            self.close()


class _Awaited(asyncio.Future[Any]):
    """One that tells when the thread that was to answer it has seen that nobody wants an answer."""

    def __init__(self, loop: BucketLoop) -> None:
        super().__init__(loop=loop)
        self._of = loop

    def cancelled(self) -> bool:
        cancelled = super().cancelled()
        if cancelled:
            self._of.let_go()
        return cancelled

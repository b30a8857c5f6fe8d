"""Open something on a thread of its own, so that its opener can do something else, and wait no longer than it wants.

In:    a function that makes a loader: it lists files and loads a vocabulary, which takes as long as a server takes.
Out:   what it made, what it raised, or `LoaderTimeout`.
Where: the function on a thread of its own, everything else on the caller's.
State: what came of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import LoaderClosed, LoaderTimeout

T = TypeVar("T")

OPENER = "penstock-opening"
"""What the thread is called."""


class Opening(Generic[T]):
    """What is being opened, from the moment this is made."""

    def __init__(self, make: Callable[[], T], dispose: Callable[[T], None] | None = None) -> None:
        """`dispose` closes what came too late: after `close` was called."""
        self._make, self._dispose = make, dispose
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._made: T | None = None
        self._error: BaseException | None = None
        self._closed = False
        # A daemon: what it waits for has a deadline of its own, and the end of the program need not wait for that.
        self._thread = threading.Thread(target=self._run, name=OPENER, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._open()
        finally:
            self._done.set()  # also where what came too late cannot be closed

    def _open(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            self._error = error
            return
        with self._lock:
            late = self._closed
            if not late:
                self._made = made
        if late and self._dispose is not None:
            self._dispose(made)

    @property
    def done(self) -> bool:
        """Whether it was made, or failed."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> T:
        """What was made. Raises what its making raised, or `LoaderTimeout`: then ask again."""
        if not self._done.wait(timeout_s):
            raise LoaderTimeout(
                f"the data was not opened within {timeout_s:.3g} s: its files are still being listed, or its vocabulary "
                "is being loaded. See that the server can be reached, or allow more time."
            )
        if self._error is not None:
            raise self._error
        if self._made is None:
            raise LoaderClosed("it was closed before it was open")
        return self._made

    def close(self, timeout_s: float = 1.0) -> None:
        """Close what was made, now or when it comes. Waits no longer than `timeout_s` for the thread."""
        with self._lock:
            self._closed, made, self._made = True, self._made, None
        if made is not None and self._dispose is not None:
            self._dispose(made)
        self._thread.join(timeout_s)

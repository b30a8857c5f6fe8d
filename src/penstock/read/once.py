"""Where a file's bytes are, asked for once: whoever comes meanwhile waits a moment for the answer.

In:    the files that are asked for, and when an answer has come.
Out:   what became known meanwhile, or that it is for the caller to ask.
Where: fetch threads, many of which begin with the same file at once.
State: the files that somebody asks for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 0.5
"""Whoever has waited so long asks for himself: the one who was first may be stuck."""


class Once:
    """Lets one ask at a time, for each file."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: set[str] = set()

    def wait(self, path: str, known: Callable[[], T | None]) -> T | None:
        """What is known of a file, now or once whoever asks has an answer; None if the caller is to ask, and to
        call `done`."""
        end = time.monotonic() + WAIT_S
        with self._changed:
            while (
                (found := known()) is None
                and path in self._asked
                and (left := end - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            if found is None:
                self._asked.add(path)
            return found

    def done(self, path: str) -> None:
        """The answer has come, or will not."""
        with self._changed:
            self._asked.discard(path)
            self._changed.notify_all()

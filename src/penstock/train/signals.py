"""Told to stop: a run that is pre-empted saves and ends.

In:    SIGTERM, SIGINT.
Out:   a wish that the ranks agree on at their next step; a wait for data ends at once.
Where: handlers run on the trainer's thread.
State: which signal came. After the grace time the process ends with its threads' stacks on stderr, whatever it is at.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """A context manager that listens. The second Ctrl-C ends the run at once."""

    def __init__(self, grace_s: float, wakes: list[Callable[[], None]]) -> None:
        """`wakes` are called from the handler, and may raise to end a wait."""
        self._grace_s, self.wakes = grace_s, wakes
        self._before: dict[signal.Signals, Any] = {}
        self.came: signal.Signals | None = None
        self.training = False
        """Before the first step there is nothing to save, and whoever is told to stop just does."""

    @property
    def exit_code(self) -> int:
        return 130 if self.came == signal.SIGINT else 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
        if self.came is not None:
            faulthandler.cancel_dump_traceback_later()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.came == signal.SIGINT
        self.came = signal.Signals(number)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._grace_s > 0:
            faulthandler.dump_traceback_later(self._grace_s, exit=True, file=sys.__stderr__ or sys.stderr)
        if not self.training:
            raise SystemExit(self.exit_code)
        for wake in self.wakes:
            wake()

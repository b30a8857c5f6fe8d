"""Told to stop: a run that is pre-empted saves and ends.

In:    SIGTERM, SIGINT, and SIGHUP of a terminal that is gone.
Out:   a wish that the ranks agree on at their next step; a wait for data ends at once.
Where: handlers run on the trainer's thread.
State: which signal came. After the grace time the process ends with its threads' stacks on stderr, whatever it is at.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from penstock.feed.fallback import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AGAIN_S = 0.01
"""After so long an exit that was swallowed is tried again."""


class Signals:
    """A context manager that listens. The second Ctrl-C ends the run at once."""

    def __init__(self, grace_s: float, *, alone: bool) -> None:
        """`alone`: whether there are no other ranks, who would wait for one that just leaves."""
        self._grace_s, self._alone = grace_s, alone
        self._before: dict[signal.Signals, Any] = {}
        self._shown = sys.unraisablehook
        self.wakes: list[Callable[[], None]] = []
        """Called from the handler; they may raise to end a wait."""
        self.came: signal.Signals | None = None
        self._waiting = False
        self.training = False
        """Before the first step there is nothing to save, and whoever is alone and told to stop just does."""

    @property
    def exit_code(self) -> int:
        return 130 if self.came == signal.SIGINT else 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays so: that is what nohup is for.
            heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._handle) for each in heard}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._leave)
            self._shown, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = self.came is not None
        if self._before:
            sys.unraisablehook = self._shown
            signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in self._before.items():
            # Whoever says it again while the process is ending should not spoil its exit code.
            # And what another language has set, Python cannot set again: it is None here.
            signal.signal(
                each, signal.SIG_IGN if stopped else signal.SIG_DFL if handler is None else handler
            )
        self._before = {}
        if stopped:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait that is not worth going on with once somebody wants the run to stop: it ends with `Interrupted`."""
        self._waiting = True
        try:
            if self.came is not None:
                raise Interrupted
            yield
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.came is not None
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.came = self.came or signal.Signals(number)
        if again:
            return
        if self._grace_s > 0:
            faulthandler.dump_traceback_later(
                self._grace_s, exit=True, file=sys.__stderr__ or sys.stderr
            )
        if not self.training and self._alone:
            self._leave()
        if self._waiting:
            raise Interrupted
        for wake in self.wakes:
            wake()

    def _leave(self, number: int = 0, frame: FrameType | None = None) -> None:
        raise SystemExit(self.exit_code)

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """A handler runs wherever the interpreter is. In a finalizer, what it raises goes no further: so once more."""
        if what.exc_type is SystemExit and self.came is not None:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            self._shown(what)

"""Call the functions of `on_metrics` with the numbers of each step.

In:    progress lines.
Out:   calls of the user's functions, one after the other.
Where: the heartbeat's thread.
State: the steps that wait for a slow function, bounded; how often each has failed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from penstock.feed.beat_values import numbers

log = logging.getLogger("penstock")

Hook = Callable[[int, dict[str, float]], None]
"""Called with a step and its numbers; the names are those of the fields, nested ones with a slash."""
MOST_HOOK_ERRORS = 10
"""A hook that fails so often in a row is not called again."""


class Hooks:
    """The functions of `on_metrics`. One that is slow is left out of some steps; one that fails for good is dropped."""

    def __init__(self, hooks: list[Hook], most: int) -> None:
        self.errors = 0
        self.dropped = 0
        self._hooks = hooks
        self._most = most
        self._in_a_row = dict.fromkeys(map(id, hooks), 0)
        self._said: set[int] = set()
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        if self._hooks:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append((step, numbers(line)))

    def run(self, until: float) -> None:
        """Call them for the steps that wait, until it is time for something else. One call at least."""
        while self._waiting:
            step, values = self._waiting.popleft()
            for hook in list(self._hooks):
                self._call(hook, step, values)
            if time.monotonic() >= until:
                break

    def _call(self, hook: Hook, step: int, values: dict[str, float]) -> None:
        try:
            hook(step, dict(values))
        except Exception as error:
            self.errors += 1
            self._in_a_row[id(hook)] += 1
            if id(hook) not in self._said:
                self._said.add(id(hook))
                log.warning(
                    "heartbeat: the hook %r failed at step %d; said once",
                    hook,
                    step,
                    exc_info=error,
                )
            if self._in_a_row[id(hook)] >= MOST_HOOK_ERRORS:
                self._hooks.remove(hook)
                log.warning(
                    "heartbeat: the hook %r failed %d times in a row and is dropped",
                    hook,
                    MOST_HOOK_ERRORS,
                )
        else:
            self._in_a_row[id(hook)] = 0

"""Read an iterable in order, epoch after epoch, from any position.

The source is a function that returns an iterable, a collection, a `datasets` stream, or an iterator.
A position is the epoch and the number of items taken. If the source has `state_dict` and
`load_state_dict`, and its state is JSON, a resume uses them; otherwise, and for `datasets` streams,
it reads the epoch again up to the position, and logs the time that took. Not thread-safe.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.errors import ConfigError, SourceError

log = logging.getLogger("penstock")

END: Any = object()
"""Returned by `take` at the end of an epoch."""


class SharedPosition:
    """The initial state of a stateful source, shared by all readers of a dataset."""

    def __init__(self, source: Any) -> None:
        self.beginning = source.state_dict() if _is_stateful(source) else None
        """The source's state before the first item was read."""
        self.begun = False


def only_one(source: Any) -> bool:
    """Return True if only one reader can use the source: an iterator or a stateful object."""
    return not _is_function(source) and (hasattr(source, "__next__") or _is_stateful(source))


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "__iter__")


def _is_stateful(source: Any) -> bool:
    """Return True if a resume can use the source's own state.

    False for streams of `datasets`: their state omits the content of a shuffle buffer, and they do
    not show if they have one.
    """
    known = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    return known and type(source).__module__.partition(".")[0] != "datasets"


class ResumableIterator:
    """An iterable, open at one position."""

    def __init__(self, source: Any, name: str, shared: SharedPosition) -> None:
        self._source, self._name, self._shared = source, name, shared
        self._made: Any = None
        self._items: Iterator[Any] = iter(())
        self._opened_with: Any = None
        self.epoch = self.taken = self._first = 0

    def open(self, epoch: int, taken: int, state: Any = None) -> None:
        """Open an epoch before item number `taken`; `state` is the source's own state there."""
        if hasattr(self._source, "__next__") and self._shared.begun and state is None:
            raise ConfigError(
                f"{self._name} is an iterator, which can be read once, by one reader. Pass a function "
                "that returns a new one, or a collection; or read it once, with epochs=1."
            )
        made = self._source() if _is_function(self._source) else self._source
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        if state is not None:
            made.load_state_dict(state)
        elif self._made is None and self._shared.begun and self._shared.beginning is not None:
            made.load_state_dict(self._shared.beginning)  # an earlier run moved it
        self._shared.begun = True
        self._made, self._items, self._opened_with = made, iter(made), state
        self.epoch, self.taken, self._first = epoch, taken, taken
        if state is not None or not taken:
            return
        begun = time.perf_counter()
        for number in range(taken):
            if next(self._items, END) is END:
                raise SourceError(
                    f"{self._name} has only {number} items in epoch {epoch}, but the state is "
                    f"{taken} items in: it was saved with another iterable"
                )
        why = "%s has no usable state_dict: resumed by reading its first %d items again, in %.2f s"
        log.warning(why, self._name, taken, time.perf_counter() - begun)

    def take(self) -> Any:
        """Return the next item, or `END` at the end of the epoch."""
        item = next(self._items, END)
        if item is not END:
            self.taken += 1
        elif not self.taken:
            raise SourceError(f"{self._name} returned no items in epoch {self.epoch}")
        return item

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.open(self.epoch + 1, 0)

    def state(self) -> Any:
        """Return the source's own state as JSON, or None if it has none."""
        if self.taken == self._first:
            return self._opened_with  # most sources have a state only after the first item
        if _is_stateful(self._made):
            with suppress(TypeError, ValueError):  # not JSON: a resume reads the items again
                return json.loads(json.dumps(self._made.state_dict()))
        return None


def name_of(source: Any) -> str:
    """Return the name of a source for messages and states."""
    return str(getattr(source, "__qualname__", None) or type(source).__name__)

"""Read an iterable in order, epoch after epoch, from any position.

The source is a function that returns an iterable, a collection, a `datasets` stream, or an iterator.
A position is the epoch and the number of items taken. If the source has `state_dict` and
`load_state_dict`, a resume uses them; otherwise it reads the epoch again up to the position, and logs
what that cost. Not thread-safe: reads are tasks that follow each other.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from penstock.errors import ConfigError, NoData, SourceError

log = logging.getLogger("penstock")


class End:
    """Returned by `take` at the end of an epoch."""


END = End()


@dataclass(slots=True)
class SharedPosition:
    """What all readers of an object that keeps its own position know of it."""

    begun: bool = False
    beginning: Any = None
    """Its state before the first item was read."""


_SHARED: WeakKeyDictionary[Any, SharedPosition] = WeakKeyDictionary()
# By object and not by loader: all loaders that read an object share its position.


def shared_position(source: Any) -> SharedPosition:
    """Return what is known of a source. Functions and collections have no position of their own."""
    found = SharedPosition()
    if not only_one(source):
        return found
    with suppress(TypeError):  # some objects cannot be referred to weakly
        found = _SHARED.setdefault(source, found)
    if not found.begun and _is_stateful(source):
        found.beginning = source.state_dict()
    return found


def only_one(source: Any) -> bool:
    """Return True if only one reader can use it: an iterator, or an object with its own position."""
    function = callable(source) and not hasattr(source, "__iter__")
    return not function and (hasattr(source, "__next__") or _is_stateful(source))


def _is_stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class ResumableIterator:
    """An iterable, open at one position."""

    def __init__(self, source: Any, name: str, shared: SharedPosition) -> None:
        self._source = source
        self._name = name
        self._made: Any = None
        self._items: Iterator[Any] | None = None
        self._shared = shared
        self._stateful = True
        self._fresh = True
        self._opened_with: Any = None
        self.epoch = 0
        self.taken = 0

    def open(self, epoch: int, taken: int, state: Any = None) -> None:
        """Open an epoch before item number `taken`; `state` is the source's own state there."""
        if hasattr(self._source, "__next__") and self._shared.begun and state is None:
            raise ConfigError(
                f"{self._name} is an iterator, which can be read once, and another epoch, a restart or "
                "a second reader was asked for. Pass a function that returns a new one, or a "
                "collection; or read it once, with epochs=1."
            )
        begun, self._shared.begun = self._shared.begun, True
        source = self._source
        made = source() if callable(source) and not hasattr(source, "__iter__") else source
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        if state is not None:
            if not hasattr(made, "load_state_dict"):
                raise SourceError(
                    f"the state has a state of {self._name}, which has no load_state_dict now"
                )
            made.load_state_dict(state)
        elif begun and self._items is None and self._shared.beginning is not None:
            made.load_state_dict(self._shared.beginning)  # another run left it elsewhere
        self._opened_with, self._fresh = state, True
        self._made, self._items = made, iter(made)
        self.epoch, self.taken = epoch, taken
        if state is None and taken:
            self._replay(taken)
            self._fresh = False

    def _replay(self, taken: int) -> None:
        begun = time.perf_counter()
        assert self._items is not None
        for number in range(taken):
            if next(self._items, END) is END:
                raise SourceError(
                    f"{self._name} has only {number} items in epoch {self.epoch}, and the state is {taken} "
                    "items in: it was saved with another iterable"
                )
        log.warning(
            "%s has no state_dict: its first %d items were read again to resume, which took %.2f s", self._name, taken, time.perf_counter() - begun,
        )  # fmt: skip

    def take(self) -> Any:
        """Return the next item, or `END` at the end of the epoch."""
        assert self._items is not None
        item = next(self._items, END)
        self._fresh = False
        if item is END:
            if not self.taken:
                raise NoData(f"{self._name} gave nothing in epoch {self.epoch}")
            return END
        self.taken += 1
        return item

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.open(self.epoch + 1, 0)

    def state(self) -> Any:
        """Return the source's own state as JSON, or None if it has none."""
        if self._fresh:
            return self._opened_with  # most sources know their state only after the first item
        if not self._stateful or not _is_stateful(self._made):
            return None
        if _has_shuffle_buffer(self._made):
            return None  # its state leaves out the samples in its buffer: they would be lost
        said = self._made.state_dict()
        try:
            return json.loads(json.dumps(said))
        except (TypeError, ValueError) as error:
            log.warning(
                "the state of %s cannot be saved as JSON (%s): a resume will read it again",
                self._name,
                error,
            )
            self._stateful = False
            return None


def _has_shuffle_buffer(made: Any) -> bool:
    """Return True for a `datasets` stream that is shuffled through a buffer."""
    part = getattr(made, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def name_of(source: Any) -> str:
    """Return a name for messages and states."""
    return str(
        getattr(source, "__qualname__", None)
        or getattr(source, "__name__", None)
        or type(source).__name__
    )

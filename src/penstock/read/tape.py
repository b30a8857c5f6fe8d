"""An iterable, read forwards: epoch after epoch, from wherever a state says.

In:    a function that gives an iterable, a collection, a `datasets` stream, or an iterator.
Out:   its items, one by one.
Where: whoever holds the lock of the reader that owns it.
State: the epoch, and how many of its items were taken. Where the source has `state_dict` and
       `load_state_dict`, what it says of itself; where it has not, a resume replays the epoch up to
       where it was, says so once, and says what that cost.
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
    """What `take` gives at the end of an epoch."""


END = End()


@dataclass(slots=True)
class Known:
    """What is known of an object that keeps its own place, whoever reads it."""

    begun: bool = False
    beginning: Any = None
    """What it said of itself before anybody read it."""


_KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
# By object and not by loader: a place that an object keeps is the same for all loaders that read it.


def known(source: Any) -> Known:
    """What is known of a source; of functions and collections there is nothing to know."""
    found = Known()
    if not only_one(source):
        return found
    with suppress(TypeError):  # some objects cannot be referred to weakly
        found = _KNOWN.setdefault(source, found)
    if not found.begun and _is_stateful(source):
        found.beginning = source.state_dict()
    return found


def only_one(source: Any) -> bool:
    """Whether two cannot read it at once: an iterator, or an object that keeps its own place."""
    function = callable(source) and not hasattr(source, "__iter__")
    return not function and (hasattr(source, "__next__") or _is_stateful(source))


def _is_stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class Tape:
    """An iterable that is open at one place."""

    def __init__(self, source: Any, name: str, known: Known) -> None:
        self._source = source
        self._name = name
        self._made: Any = None
        self._items: Iterator[Any] | None = None
        self._known = known
        self._stateful = True
        self._fresh = True
        self._opened_with: Any = None
        self.epoch = 0
        self.taken = 0

    def open(self, epoch: int, taken: int, state: Any = None) -> None:
        """Stand in an epoch before the item number `taken`; `state` is what the source said there."""
        if hasattr(self._source, "__next__") and self._known.begun and state is None:
            raise ConfigError(
                f"{self._name} is an iterator, which can be read once, and another epoch, a restart or a second reader was asked for. "
                "Pass a function that makes it anew, or a collection; or read it once, with epochs=1."
            )
        begun, self._known.begun = self._known.begun, True
        source = self._source
        made = source() if callable(source) and not hasattr(source, "__iter__") else source
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        if state is not None:
            if not hasattr(made, "load_state_dict"):
                raise SourceError(
                    f"the state has what {self._name} said of itself, and now it has no load_state_dict"
                )
            made.load_state_dict(state)
        elif begun and self._items is None and self._known.beginning is not None:
            made.load_state_dict(self._known.beginning)  # another run has left it somewhere else
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
                    f"{self._name} has only {number} items in epoch {self.epoch}, and the state is {taken} items in: "
                    "it is not the iterable that the state was made with"
                )
        log.warning(
            "%s has no state_dict: to get back to where the state was made, its first %d items were read again and "
            "dropped, which took %.2f s", self._name, taken, time.perf_counter() - begun,
        )  # fmt: skip

    def take(self) -> Any:
        """The next item, or `END` once the epoch is over."""
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
        """What the source says of where it is; None where it says nothing that can be saved."""
        if self._fresh:
            return (
                self._opened_with
            )  # most sources know their place only once they have been asked for an item
        if not self._stateful or not _is_stateful(self._made):
            return None
        if _has_shuffle_buffer(self._made):
            return None  # what it says leaves out the samples in its buffer, and they would be lost
        said = self._made.state_dict()
        try:
            return json.loads(json.dumps(said))
        except (TypeError, ValueError) as error:
            log.warning(
                "what %s says of its state cannot be saved as JSON (%s): a resume will replay it",
                self._name,
                error,
            )
            self._stateful = False
            return None


def _has_shuffle_buffer(made: Any) -> bool:
    """Whether this is a stream of `datasets` that is shuffled through a buffer."""
    part = getattr(made, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def name_of(source: Any) -> str:
    """What to call an iterable in messages and states."""
    return str(
        getattr(source, "__qualname__", None)
        or getattr(source, "__name__", None)
        or type(source).__name__
    )

"""An iterable, read forwards: epoch after epoch, from wherever a state says.

In:    a function that gives an iterable, a collection, a `datasets` stream, or an iterator.
Out:   its items, one by one.
Where: whoever holds the lock of the reader that owns it.
State: the epoch, and how many of its items were taken. Where the source has `state_dict` and
       `load_state_dict`, what it says of itself; where it has not, a resume replays the epoch up to
       where it was, says so once, and says what that cost.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError, NoData, SourceError

log = logging.getLogger("penstock")


class End:
    """What `take` gives at the end of an epoch."""


END = End()


class Once:
    """What all readers of one source have to know: how it began, and whether somebody has begun it.

    An iterator can be read once, so whoever else wants to read it comes too late. A source that keeps
    its own place is copied for each reader, or else put back to its beginning before it is read anew.
    """

    def __init__(self, source: Any) -> None:
        self.begun = False
        self.stateful = _is_stateful(source) and not isinstance(source, type)
        self.beginning = source.state_dict() if self.stateful else None

    def copy(self, source: Any) -> Any:
        """The source, or a copy of it: nobody else has to notice that it is read."""
        if self.stateful and not hasattr(source, "__next__"):
            try:
                return copy.deepcopy(source)
            except Exception as error:  # of any type: it has something that cannot be copied
                log.debug("%s cannot be copied (%s), so it is read itself", name_of(source), error)
        return source


def _is_stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class Tape:
    """An iterable that is open at one place."""

    def __init__(self, source: Any, name: str, once: Once) -> None:
        self._source = source
        self._name = name
        self._made: Any = None
        self._items: Iterator[Any] | None = None
        self._one_shot = hasattr(source, "__next__")
        self._once = once
        self._stateful = True
        self._fresh = True
        self._opened_with: Any = None
        self.epoch = 0
        self.taken = 0

    def open(self, epoch: int, taken: int, state: Any = None) -> None:
        """Stand in an epoch before the item number `taken`; `state` is what the source said there."""
        if self._one_shot and self._once.begun:
            raise ConfigError(
                f"{self._name} is an iterator, which can be read once, and another epoch, a restart or a second reader was asked for. "
                "Pass a function that makes it anew, or a collection; or read it once, with epochs=1."
            )
        self._once.begun = True
        source = self._source
        made = source() if callable(source) and not hasattr(source, "__iter__") else self._once.copy(source)
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        if state is not None:
            if not hasattr(made, "load_state_dict"):
                raise SourceError(f"the state has what {self._name} said of itself, and now it has no load_state_dict")
            made.load_state_dict(state)
        elif made is source and self._once.beginning is not None:
            made.load_state_dict(self._once.beginning)
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
            return self._opened_with  # most sources know their place only once they have been asked for an item
        if not self._stateful or not _is_stateful(self._made):
            return None
        if _has_shuffle_buffer(self._made):
            return None  # what it says leaves out the samples in its buffer, and they would be lost
        said = self._made.state_dict()
        try:
            return json.loads(json.dumps(said))
        except (TypeError, ValueError) as error:
            log.warning(
                "what %s says of its state cannot be saved as JSON (%s): a resume will replay it", self._name, error
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
    return str(getattr(source, "__qualname__", None) or getattr(source, "__name__", None) or type(source).__name__)

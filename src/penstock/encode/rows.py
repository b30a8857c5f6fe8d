"""Rows, and those who give them out: what the packers have in common.

A row is `seq_len + 1` ids; it gives inputs and, shifted by one, targets. Rows know where they begin
and what they are made of without holding on to any ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.encode.window import I64, Ids, Place, Window, WindowMap
from penstock.types import Span


class Marked(Protocol):
    """A place, or something that can work it out."""

    def place(self) -> Any: ...


class Mark(NamedTuple):
    """A place that is worked out only when somebody asks for it."""

    map: WindowMap
    token: int
    row: int = 0

    def place(self) -> Place:
        return self.map.place(self.token, self.row)


def mark_at(windows: Sequence[tuple[int, WindowMap]], token: int) -> Mark:
    """The place of a token of the stream, given where in it each window begins."""
    for begin, window in reversed(windows):
        if begin <= token:
            return Mark(window, token - begin)
    raise AssertionError(f"token {token} lies before the windows at hand")


@dataclass(slots=True)
class PackCounts:
    """What packing added and left out."""

    cropped_tokens: int = 0
    padded_tokens: int = 0
    dropped_tokens: int = 0
    """The end of a finite stream that filled no row."""


class Rows(Protocol):
    """Some consecutive rows of a lane."""

    ids: Ids

    @property
    def valid(self) -> I64 | None:
        """How many ids of each row are real; None where all are."""

    def mark(self, row: int) -> Marked:
        """The place at which a row begins."""

    def epoch(self, row: int) -> int:
        """The epoch in which a row begins."""

    def boundaries(self) -> tuple[I64, I64]:
        """Row and column wherever a new document begins, column 0 left out."""

    def spans(self, row: int) -> list[Span]:
        """Where a row's ids come from."""


class Packer(Protocol):
    """Gives out the rows of one lane."""

    failed: Exception | None
    """Why there are no more rows, if that is not the end of the data."""

    @property
    def counts(self) -> PackCounts:
        """What packing added and left out so far."""

    def rows(self, n: int) -> list[Rows]:
        """The next `n` rows; fewer only at the end of a finite stream, or before a failure."""

    def holds(self, n: int) -> bool:
        """Whether the next `n` rows can be given without waiting for anybody."""

    def at_hand(self) -> int:
        """How many rows would come as one stretch of ids that is there already, none of them padded."""

    def mark(self) -> Marked:
        """Where the next row begins."""


NextWindow = Callable[[], Window | None]

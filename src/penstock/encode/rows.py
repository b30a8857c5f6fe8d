"""What packers have in common: rows of `seq_len + 1` ids, and where they come from.

A row gives the inputs and, shifted by one, the targets. Rows know their documents without holding
on to any ids, so batches can keep them for `provenance()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.encode.window import I64, Ids, Window
from penstock.types import LanePosition, Span

NextWindow = Callable[[], Window | None]
"""Return the lane's next window, or None at the end of a finite stream."""


@dataclass(slots=True)
class PackCounts:
    """What packing added and left out."""

    cropped_tokens: int = 0
    padded_tokens: int = 0
    dropped_tokens: int = 0
    """The end of a finite stream that filled no row."""


def add_counts(into: PackCounts, more: PackCounts) -> None:
    for name in PackCounts.__slots__:
        setattr(into, name, getattr(into, name) + getattr(more, name))


class Rows(Protocol):
    """Some consecutive rows of a lane."""

    ids: Ids

    @property
    def valid(self) -> I64 | None:
        """How many ids of each row are real; None if all are."""

    @property
    def epoch(self) -> int:
        """The epoch in which the first row begins."""

    def boundaries(self) -> tuple[I64, I64]:
        """Return row and column wherever a new document begins, except at column 0."""

    def spans(self, row: int) -> list[Span]:
        """Return where a row's ids come from."""


class Mark(Protocol):
    """A position that is computed on demand."""

    def position(self) -> LanePosition: ...


class Packer(Protocol):
    """Gives out the rows of one lane, on the producer thread."""

    @property
    def failed(self) -> Exception | None:
        """Why there are no more rows, if that is not the end of the data."""

    @property
    def counts(self) -> PackCounts: ...

    def rows(self, n: int) -> list[Rows]:
        """Return the next `n` rows; fewer only at the end of a finite stream or before a failure."""

    def mark(self) -> Mark:
        """Return where the next row begins."""


@dataclass(frozen=True, slots=True)
class FixedMark:
    """A position that is known."""

    at: LanePosition

    def position(self) -> LanePosition:
        return self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """How chunks of documents become rows."""

    chunk_bytes: int
    window_chunks: int
    expansion: int
    """Memory that a chunk takes while it is worked on, in multiples of its text."""
    packing: str
    seq_len: int
    pad_id: int
    dtype: Any
    positions: bool
    """Whether document boundaries are needed."""
    keep_tail: bool = False
    """Whether the unfinished row at the end of a finite stream is given out, padded."""


def make_packer(options: LaneOptions, next_window: NextWindow, start: LanePosition) -> Packer:
    """Return the packer for a lane that continues at `start`."""
    if options.packing == "best_fit":
        from penstock.encode.best_fit import BestFitPacker

        return BestFitPacker(options, next_window, start)
    from penstock.encode.concat import ConcatPacker

    return ConcatPacker(options, next_window, start)

"""The interface of packers: rows of `seq_len + 1` ids, and where they come from.

A row gives the inputs and, shifted by one, the targets. Rows know their documents without holding
on to any ids, so batches can keep them for `provenance()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.encode.window import I64, Ids, Window
from penstock.types import LanePosition, Span

if TYPE_CHECKING:
    from penstock.sources.chunk_lanes import ChunkSource

NextWindow = Callable[[], Window | None]
"""Returns the lane's next window, or None at the end of a finite stream."""
Mark = Callable[[], LanePosition]
"""Returns a position, computed on demand."""


def fixed(position: LanePosition) -> Mark:
    """Return a mark for a known position."""
    return lambda: position


class Rows(Protocol):
    """Consecutive rows of a lane."""

    ids: Ids

    @property
    def valid(self) -> I64 | None:
        """The number of ids before the padding in each row; None without padding."""

    def epochs(self) -> I64:
        """Return the epoch of the first id of each row."""

    def position(self, row: int) -> LanePosition:
        """Return the position at which a row begins; also valid for one past the last row."""

    def boundaries(self) -> tuple[I64, I64]:
        """Return the row and column at which each document begins, except at column 0."""

    def spans(self, row: int) -> list[Span]:
        """Return the documents that a row's ids come from."""


class Packer(Protocol):
    """Returns the rows of one lane, on the producer thread."""

    @property
    def failed(self) -> Exception | None:
        """The exception that ended the lane, or None."""

    @property
    def counts(self) -> Counter[str]:
        """Tokens that packing added or dropped, by field of `Stats`."""

    def fill(self, n: int) -> int:
        """Buffer up to `n` rows. Return the number that `rows` can return without waiting."""

    def rows(self, n: int) -> list[Rows]:
        """Return the next `n` rows; fewer only at the end of a finite stream or before a failure."""

    def mark(self) -> Mark:
        """Return the position at which the next row begins."""


class WindowPacker:
    """Base class of packers of text, which open the windows of a lane in order."""

    def __init__(
        self, source: ChunkSource, next_window: NextWindow, start: LanePosition, keep_tail: bool
    ) -> None:
        """`keep_tail`: pad the unfinished last row of a finite stream instead of dropping it."""
        self._source, self._next_window, self._start = source, next_window, start
        self._seq_len, self._keep_tail = source.seq_len, keep_tail
        self._window: Window | None = None
        self._ended = False
        self.counts: Counter[str] = Counter()
        self.failed: Exception | None = None

    def _next(self) -> Window | None:
        """Return the next window, or None at the end of the stream and after a failure."""
        window = None
        try:
            window = None if self._ended else self._next_window()
        except Exception as error:  # the batcher raises it after the rows before it
            self.failed = error
        self._ended = window is None
        return window

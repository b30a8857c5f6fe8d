"""What packers have in common: rows of `seq_len + 1` ids, and where they come from.

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
"""Returns a position, which is computed only if it is asked for."""


def fixed(position: LanePosition) -> Mark:
    """Return the mark of a position that is known."""
    return lambda: position


class Rows(Protocol):
    """Some consecutive rows of a lane."""

    ids: Ids

    @property
    def valid(self) -> I64 | None:
        """How many ids of each row are real; None if all are."""

    def epochs(self) -> I64:
        """Return the epoch in which each row begins."""

    def position(self, row: int) -> LanePosition:
        """Return where a row begins; also for the row after the last one."""

    def boundaries(self) -> tuple[I64, I64]:
        """Return row and column wherever a new document begins, except at column 0."""

    def spans(self, row: int) -> list[Span]:
        """Return where a row's ids come from."""


class Packer(Protocol):
    """Gives out the rows of one lane, on the producer thread."""

    @property
    def failed(self) -> Exception | None:
        """Why there are no more rows, if that is not the end of the data."""

    @property
    def counts(self) -> Counter[str]:
        """Tokens that packing added or left out, by their names in `Stats`."""

    def fill(self, n: int) -> int:
        """Buffer `n` rows, if there are as many. Return how many can be given out without waiting."""

    def rows(self, n: int) -> list[Rows]:
        """Return the next `n` rows; fewer only at the end of a finite stream or before a failure."""

    def mark(self) -> Mark:
        """Return where the next row begins."""


class WindowPacker:
    """What packers of text have in common: they open the windows of a lane one after the other."""

    def __init__(
        self, source: ChunkSource, next_window: NextWindow, start: LanePosition, keep_tail: bool
    ) -> None:
        """`keep_tail`: a finite stream ends with its unfinished row, padded."""
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
        except Exception as error:  # raised by the batcher, after the rows that came before it
            self.failed = error
        self._ended = window is None
        return window

"""`concat` and `bos`: rows are stretches of one stream of tokens.

In:    the windows of one lane, in order.
Out:   rows. `concat`: no token lost, the last id of a row opens the next. `bos`: each row begins
       with a document, and what does not fit is cropped.
Where: the producer thread.
State: the place of the next row. What was read but not yet given out is read again after a resume.
Cost:  what it takes to bring shuffled documents into order; rows of `concat` are views of that. No Python per
       document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.encode.rows import Mark, NextWindow, PackCounts, Rows, mark_at
from penstock.encode.window import I64, Ids, Place, Window, WindowMap
from penstock.types import Span

GATHER_TOKENS = 1 << 20
"""Tokens brought into order at once: enough to make the calls cheap, little enough for the cache."""


@dataclass(slots=True)
class StreamRows:
    """Rows cut from the stream of a lane's tokens."""

    ids: Ids
    valid: I64 | None
    width: int
    starts: I64
    """The stream's token at which each row begins."""
    windows: tuple[tuple[int, WindowMap], ...]
    doc_starts: I64

    def mark(self, row: int) -> Mark:
        return mark_at(self.windows, int(self.starts[row]))

    def epoch(self, row: int) -> int:
        return self.mark(row).map.start.epoch

    def boundaries(self) -> tuple[I64, I64]:
        first = np.searchsorted(self.doc_starts, self.starts, side="right")
        last = np.searchsorted(self.doc_starts, self.starts + self.width - 1, side="left")
        counts = last - first
        rows = np.repeat(np.arange(len(self.starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = self.doc_starts[first[rows] + within] - self.starts[rows]
        return rows, columns

    def spans(self, row: int) -> list[Span]:
        token = int(self.starts[row])
        left = int(self.valid[row]) if self.valid is not None else self.width
        at = 0
        spans: list[Span] = []
        for begin, window in self.windows:
            n = min(left, begin + window.tokens - token)
            if n > 0:
                spans += window.spans(token - begin, n, at)
                token, at, left = token + n, at + n, left - n
        return spans


class StreamPacker:
    """`concat` and `bos`: rows are stretches of one stream of tokens."""

    def __init__(
        self,
        next_window: NextWindow,
        start: Place,
        seq_len: int,
        pad_id: int,
        dtype: np.dtype[Any],
        *,
        aligned: bool,
        keep_tail: bool,
        track: bool,
    ) -> None:
        self._next_window = next_window
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._aligned = aligned
        self._keep_tail = keep_tail
        self._track = track or aligned
        self._start = start
        self._started = False
        self._ended = False
        # The stream is numbered from the beginning of the first window. The buffer holds
        # [_base, _end); the piece, where there is one, reaches from within it to _gathered.
        self._flat: Ids = np.empty(0, dtype)
        self._piece: Ids | None = None
        self._base = self._end = self._gathered = self._at = 0
        self._windows: list[tuple[int, WindowMap]] = []
        self._doc_starts: I64 = np.empty(0, np.int64)
        self._steps: I64 = np.empty(0, np.int64)
        self._window: Window | None = None
        self._doc = 0
        self.counts = PackCounts()
        self.failed: Exception | None = None

    def rows(self, n: int) -> list[Rows]:
        if not self._started:
            self._enter()
        starts = self._starts_aligned(n) if self._aligned else self._starts_concat(n)
        out: list[Rows] = []
        if len(starts):
            out.append(self._make(self._cut(starts), None, starts))
            self._pass(starts)
        if len(starts) < n and self._ended and self.failed is None:
            out += self._tail()
        return out

    def holds(self, n: int) -> bool:
        if self._aligned or self._window is None:
            return False  # how many tokens it takes until documents have begun so many rows is not known
        return self._windows[-1][0] + self._window.map.tokens - self._at > n * self._seq_len

    def at_hand(self) -> int:
        in_piece = self._piece is not None and self._at >= self._gathered - len(self._piece)
        end = self._gathered if in_piece else self._end
        return 0 if self._aligned else max(0, (end - self._at - 1) // self._seq_len)

    def mark(self) -> Mark | Place:
        return mark_at(self._windows, self._at) if self._windows else self._start

    def _starts_concat(self, n: int) -> I64:
        self._fill(self._at + n * self._seq_len + 1)
        n = max(0, min(n, (self._end - self._at - 1) // self._seq_len))
        if len(self._steps) < n:
            self._steps = self._seq_len * np.arange(n, dtype=np.int64)
        return self._at + self._steps[:n]

    def _starts_aligned(self, n: int) -> I64:
        starts: list[int] = []
        at = self._at
        while len(starts) < n:
            self._fill(at + self._seq_len + 1)
            if self._end < at + self._seq_len + 1:
                break
            starts.append(at)
            at = self._after(at)
        return np.array(starts, np.int64)

    def _cut(self, starts: I64) -> Ids:
        """The rows at these places."""
        flat, width = self._flat, self._seq_len + 1
        if self._aligned:
            return sliding_window_view(flat, width)[starts - self._base]
        # Rows follow each other and overlap by one id: a view, no copy.
        size = flat.itemsize
        shape, strides = (len(starts), width), (self._seq_len * size, size)
        return np.ndarray(shape, flat.dtype, flat, (int(starts[0]) - self._base) * size, strides)

    def _after(self, start: int) -> int:
        """Where the row after the one at `start` begins."""
        if not self._aligned:
            return start + self._seq_len
        # The buffer ends with a document, so its end is where the next one begins.
        i = int(np.searchsorted(self._doc_starts, start + self._seq_len))
        return int(self._doc_starts[i]) if i < len(self._doc_starts) else self._end

    def _pass(self, starts: I64) -> None:
        if self._aligned:
            last = np.append(starts[1:], self._after(int(starts[-1])))
            self.counts.cropped_tokens += int(
                np.maximum(last - starts - self._seq_len - 1, 0).sum()
            )
        self._at = self._after(int(starts[-1]))

    def _tail(self) -> list[Rows]:
        """The last, unfinished row of a finite stream."""
        left = self._end - self._at
        if left < 2 or not self._keep_tail:  # a single id has been a target already
            self.counts.dropped_tokens += max(0, left - 1)
            self._at = max(self._at, self._end - 1)
            return []
        width = self._seq_len + 1
        ids = np.full((1, width), self._pad_id, self._flat.dtype)
        ids[0, :left] = self._flat[self._at - self._base :]
        rows = self._make(ids, np.array([left]), np.array([self._at]))
        self.counts.padded_tokens += width - left
        self._at = self._end - 1
        return [rows]

    def _make(self, ids: Ids, valid: I64 | None, starts: I64) -> StreamRows:
        return StreamRows(
            ids, valid, self._seq_len + 1, starts, tuple(self._windows), self._doc_starts
        )

    def _fill(self, until: int) -> None:
        """Have the stream in the buffer up to `until`, or to its end."""
        if self._piece is not None and self._at >= self._gathered - len(self._piece):
            # The rows have left what was carried over: go on in the piece itself.
            self._flat, self._base, self._end = (
                self._piece,
                self._gathered - len(self._piece),
                self._gathered,
            )
            self._piece = None
        if self._end >= until or (self._ended and self._piece is None):
            return
        parts = [self._flat[self._at - self._base :]]
        if self._piece is not None:
            parts.append(self._piece[len(self._piece) - (self._gathered - self._end) :])
            self._piece = None
        begins = [self._doc_starts]
        while self._gathered < until:
            if self._window is None or self._doc == len(self._window.map.ends):
                if not self._open_next():
                    break
                continue
            begins.append(self._gather(self._window, until, parts))
        surplus = self._gathered - until
        if surplus > 0 and not self._aligned:
            # Copy no more of a long piece than is needed to cross over into it.
            self._piece = parts[-1]
            parts[-1] = self._piece[: len(self._piece) - surplus]
        self._flat = np.concatenate(parts)
        self._base, self._end = (
            self._at,
            min(self._gathered, until) if self._piece is not None else self._gathered,
        )
        while len(self._windows) > 1 and self._windows[1][0] <= self._at:
            self._windows.pop(0)
        if self._track:
            starts = np.concatenate(begins)
            self._doc_starts = starts[np.searchsorted(starts, self._at) :]

    def _gather(self, window: Window, until: int, parts: list[Ids]) -> I64:
        """Take documents of the window up to `until` or some further. Gives where they begin."""
        ends, origin = window.map.ends, self._windows[-1][0]
        first, last = window.map.begin(self._doc), len(ends)
        if window.map.order is not None:  # else it is no work: they lie there in order
            wanted = first + max(until - self._gathered, GATHER_TOKENS)
            last = min(int(np.searchsorted(ends, wanted)) + 1, last)
        parts.append(window.gather(self._doc, last))
        begins = self._doc_starts[:0]
        if self._track:
            stops = ends[self._doc : last]
            starts = np.concatenate([np.array([first]), stops[:-1]])
            begins = origin + starts[stops > starts]
        self._doc = last
        self._gathered = origin + window.map.begin(last)
        return begins

    def _open_next(self) -> bool:
        window = None
        try:
            window = None if self._ended else self._next_window()
        except (
            Exception
        ) as error:  # raised by whoever deals the rows, after those that came before it
            self.failed = error
        self._window = window
        self._doc = 0
        if window is None:
            self._ended = True
            return False
        self._windows.append((self._gathered, window.map))
        return True

    def _enter(self) -> None:
        """Open the first window where the state says, in the middle of a document maybe."""
        self._started = True
        if not self._open_next():
            return
        assert self._window is not None
        window = self._window.map
        token = window.token_of(self._start)
        self._base = self._at = self._end = self._gathered = token
        self._doc = window.doc_at(token)
        inside = token - window.begin(self._doc)
        if inside:
            self._flat = self._window.gather(self._doc, self._doc + 1)[inside:]
            self._doc += 1
            self._end = self._gathered = token + len(self._flat)

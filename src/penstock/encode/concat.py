"""Cut rows of seq_len + 1 ids from a lane's stream of tokens: the packings "concat" and "bos".

"concat" loses no token: the last id of a row is the first id of the next one. "bos" begins each row
with a document and crops the rest. Runs on the producer thread. Its only state is the position of
the next row; a resume rebuilds the rest from it. Copies each token once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.encode.rows import Mark, Rows, WindowPacker, fixed
from penstock.encode.window import I64, Ids, Window, WindowMap
from penstock.types import LanePosition, Span

GATHER_TOKENS = 1 << 19
"""Shuffled tokens to gather at once: enough to amortize the calls, few enough to stay in the
processor's caches."""

Windows = tuple[tuple[int, WindowMap], ...]
"""Pairs of the first token of a window in the stream, and the window."""


def position_of(windows: Windows, token: int) -> LanePosition:
    """Return the position of a token of the stream."""
    begin, window = windows[bisect_right(windows, token, key=itemgetter(0)) - 1]
    return window.position(token - begin)


@dataclass(slots=True)
class ConcatRows:
    """Rows cut from the stream of a lane's tokens."""

    ids: Ids
    valid: I64 | None
    width: int
    starts: I64
    """The first token of each row in the stream, and of the row after the last one."""
    windows: Windows
    doc_starts: I64

    def epochs(self) -> I64:
        begins, windows = zip(*self.windows, strict=True)
        if len(windows) == 1:
            return np.full(len(self.starts) - 1, windows[0].start.epoch)
        window = np.searchsorted(begins, self.starts[:-1], side="right") - 1
        return np.array([each.start.epoch for each in windows])[window]

    def position(self, row: int) -> LanePosition:
        return position_of(self.windows, int(self.starts[row]))

    def boundaries(self) -> tuple[I64, I64]:
        starts = self.starts[:-1]
        first = np.searchsorted(self.doc_starts, starts, side="right")
        last = np.searchsorted(self.doc_starts, starts + self.width - 1, side="left")
        counts = last - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self.doc_starts[first[rows] + within] - starts[rows]

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


class ConcatPacker(WindowPacker):
    """Cuts rows from one stream of tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._aligned = self._source.packing == "bos"
        # Tokens are numbered from the start of the first window. The buffer holds the tokens from
        # `_base` to `_end`; the next row begins at `_at`.
        self._buffer: Ids = np.empty(0, self._source.dtype)
        self._base = self._end = self._at = 0
        self._windows: Windows = ()
        self._doc_starts: I64 = np.empty(0, np.int64)
        self._doc = 0
        """The next document of the window to gather."""

    def fill(self, n: int) -> int:
        if not self._windows and not self._ended:
            self._open_window()
        if self._aligned:
            return 0  # the number of rows is unknown until they are cut
        self._fill(self._at + n * self._seq_len + 1)
        return max(0, self._end - self._at - 1) // self._seq_len

    def rows(self, n: int) -> list[Rows]:
        buffered = self.fill(n)
        if self._aligned:
            starts = self._starts_aligned(n)
        else:
            starts = self._at + self._seq_len * np.arange(min(n, buffered) + 1)
        out: list[Rows] = []
        if len(starts) > 1:
            out.append(self._rows(self._cut(starts[:-1]), None, starts))
            self._at = int(starts[-1])
            if self._aligned:
                skipped = np.diff(starts) - self._seq_len - 1
                self.counts["cropped_tokens"] += int(np.maximum(skipped, 0).sum())
        if len(starts) <= n and self._ended and self.failed is None:
            out += self._tail()
        return out

    def mark(self) -> Mark:
        if not self._windows:
            return fixed(self._start)
        return partial(position_of, self._windows, self._at)

    def _starts_aligned(self, n: int) -> I64:
        starts = [self._at]
        while len(starts) <= n:
            self._fill(starts[-1] + self._seq_len + 1)
            if self._end < starts[-1] + self._seq_len + 1:
                break
            starts.append(self._after(starts[-1]))
        return np.array(starts, np.int64)

    def _cut(self, starts: I64) -> Ids:
        buffer, width = self._buffer, self._seq_len + 1
        if self._aligned:
            return sliding_window_view(buffer, width)[starts - self._base]
        # A view without a copy, because rows overlap by one id.
        offset, size = int(starts[0]) - self._base, buffer.itemsize
        strides = (self._seq_len * size, size)
        return np.ndarray((len(starts), width), buffer.dtype, buffer, offset * size, strides)

    def _after(self, start: int) -> int:
        """Return the start of the row after `start`, for rows that begin with a document."""
        # The buffer ends at the end of a document, where the next one begins.
        i = int(np.searchsorted(self._doc_starts, start + self._seq_len))
        return int(self._doc_starts[i]) if i < len(self._doc_starts) else self._end

    def _tail(self) -> list[Rows]:
        """Return the last, unfinished row of a finite stream, padded."""
        left = self._end - self._at
        if left < 2 or not self._keep_tail:  # a single id was already a target
            self.counts["dropped_tokens"] += max(0, left - 1)
            self._at = max(self._at, self._end - 1)
            return []
        width = self._seq_len + 1
        ids = np.full((1, width), self._source.pad_id, self._buffer.dtype)
        ids[0, :left] = self._buffer[self._at - self._base :]
        starts = np.array([self._at, self._end - 1])
        self.counts["padded_tokens"] += width - left
        self._at = self._end - 1
        return [self._rows(ids, np.array([left]), starts)]

    def _rows(self, ids: Ids, valid: I64 | None, starts: I64) -> ConcatRows:
        return ConcatRows(ids, valid, self._seq_len + 1, starts, self._windows, self._doc_starts)

    def _fill(self, until: int) -> None:
        """Extend the buffer to the token `until`, or to the end of the stream."""
        if self._end >= until or self._ended:
            return
        pieces = [self._buffer[self._at - self._base :]]
        starts = [self._doc_starts]
        while self._end < until:
            if self._window is None or self._doc == len(self._window.map.ends):
                if not self._open_window():
                    break
                continue
            starts.append(self._gather(self._window, until, pieces))
        # Unlike numpy, `join` does not release the GIL for each piece, which would wake threads in
        # vain.
        joined = b"".join(pieces)  # type: ignore[arg-type]  # arrays are buffers
        self._buffer = np.frombuffer(joined, self._buffer.dtype)
        self._base = self._at
        while len(self._windows) > 1 and self._windows[1][0] <= self._at:
            self._windows = self._windows[1:]
        if self._aligned or self._source.positions:
            every = np.concatenate(starts)
            self._doc_starts = every[np.searchsorted(every, self._at) :]

    def _gather(self, window: Window, until: int, pieces: list[Ids]) -> I64:
        """Append documents of the window up to at least `until`. Return their first tokens."""
        ends, origin = window.map.ends, self._windows[-1][0]
        first, last = window.map.begin(self._doc), len(ends)
        wanted = first + max(until - self._end, GATHER_TOKENS)
        # Unlike numpy, `bisect` does not release the GIL, so it need not wait for it.
        last = min(bisect_left(ends, wanted) + 1, last)
        pieces += window.gather(self._doc, last)
        stops = ends[self._doc : last]
        begins = np.concatenate([np.array([first]), stops[:-1]])
        self._doc = last
        self._end = origin + window.map.begin(last)
        return origin + begins[stops > begins]

    def _open_window(self) -> bool:
        window, self._doc = self._next(), 0
        self._window = window
        if window is None:
            return False
        if self._windows:
            self._windows = (*self._windows, (self._end, window.map))
        else:  # start at the position in the first window, which may be inside a document
            self._windows = ((0, window.map),)
            token = window.map.token_of(self._start)
            self._base = self._at = self._end = token
            self._doc = window.map.doc_at(token)
            inside = token - window.map.begin(self._doc)
            if inside:
                self._buffer = window.gather(self._doc, self._doc + 1)[0][inside:]
                self._doc += 1
                self._end = token + len(self._buffer)
        return True

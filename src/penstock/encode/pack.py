"""Pack documents into rows of seq_len + 1 ids.

In:    the windows of one lane, in order.
Out:   rows. `concat`: no token lost, the last id of a row opens the next. `bos`: each row begins
       with a document, what does not fit is cropped. `best_fit`: documents are cut only where
       they are longer than a row, and rows are padded.
Where: the producer thread.
State: integers, see `Place`. What was read but not yet given out is read again after a resume.
Cost:  concat and bos copy each token once or twice, with no Python per document; best_fit runs
       some Python for each document, about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.encode.window import I64, Ids, Place, Window, WindowMap
from penstock.types import Packing, Span

GATHER_TOKENS = 1 << 18
"""Tokens brought into order at once: enough to make the calls cheap, little enough for the cache."""
GROUP_ROWS = 512
"""Rows that best_fit packs together. More leave less padding; a resume packs one group again."""


class Mark(NamedTuple):
    """A place that is worked out only when somebody asks for it."""

    map: WindowMap
    token: int
    row: int = 0

    def place(self) -> Place:
        return self.map.place(self.token)._replace(row=self.row)


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

    def mark(self, row: int) -> Mark:
        """The place at which a row begins."""

    def epoch(self, row: int) -> int:
        """The epoch in which a row begins."""

    def boundaries(self) -> tuple[I64, I64]:
        """Row and column wherever a new document begins, column 0 left out."""

    def spans(self, row: int) -> list[Span]:
        """Where a row's ids come from."""


class Packer(Protocol):
    """Gives out the rows of one lane."""

    counts: PackCounts

    def rows(self, n: int) -> list[Rows]:
        """The next `n` rows; fewer only at the end of a finite stream."""

    def mark(self) -> Mark | Place:
        """Where the next row begins."""


NextWindow = Callable[[], Window | None]


def make_packer(
    packing: Packing,
    next_window: NextWindow,
    start: Place,
    seq_len: int,
    pad_id: int,
    dtype: np.dtype[Any],
    *,
    keep_tail: bool,
    track: bool,
) -> Packer:
    """The packer for a lane that stands at `start`.

    `keep_tail`: give out the unfinished row at the end of a finite stream. `track`: keep where
    documents begin, for `boundaries`.
    """
    if packing == "best_fit":
        return BestFitPacker(next_window, start, seq_len, pad_id, dtype)
    aligned = packing == "bos"
    return StreamPacker(next_window, start, seq_len, pad_id, dtype, aligned=aligned, keep_tail=keep_tail, track=track)


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
        self._window: Window | None = None
        self._doc = 0
        self.counts = PackCounts()

    def rows(self, n: int) -> list[Rows]:
        if not self._started:
            self._enter()
        starts = self._starts_aligned(n) if self._aligned else self._starts_concat(n)
        out: list[Rows] = []
        if len(starts):
            out.append(self._make(self._cut(starts), None, starts))
            self._pass(starts)
        if len(starts) < n and self._ended:
            out += self._tail()
        return out

    def mark(self) -> Mark | Place:
        return mark_at(self._windows, self._at) if self._windows else self._start

    def _starts_concat(self, n: int) -> I64:
        self._fill(self._at + n * self._seq_len + 1)
        n = max(0, min(n, (self._end - self._at - 1) // self._seq_len))
        return self._at + self._seq_len * np.arange(n, dtype=np.int64)

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
            self.counts.cropped_tokens += int(np.maximum(last - starts - self._seq_len - 1, 0).sum())
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
        return StreamRows(ids, valid, self._seq_len + 1, starts, tuple(self._windows), self._doc_starts)

    def _fill(self, until: int) -> None:
        """Have the stream in the buffer up to `until`, or to its end."""
        if self._piece is not None and self._at >= self._gathered - len(self._piece):
            # The rows have left what was carried over: go on in the piece itself.
            self._flat, self._base, self._end = self._piece, self._gathered - len(self._piece), self._gathered
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
        self._base, self._end = self._at, min(self._gathered, until) if self._piece is not None else self._gathered
        while len(self._windows) > 1 and self._windows[1][0] <= self._at:
            self._windows.pop(0)
        if self._track:
            starts = np.concatenate(begins)
            self._doc_starts = starts[np.searchsorted(starts, self._at) :]

    def _gather(self, window: Window, until: int, parts: list[Ids]) -> I64:
        """Take documents of the window up to `until` or some further. Gives where they begin."""
        ends, origin = window.map.ends, self._windows[-1][0]
        first = window.map.begin(self._doc)
        wanted = first + max(until - self._gathered, GATHER_TOKENS)
        last = min(int(np.searchsorted(ends, wanted)) + 1, len(ends))
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
        window = self._next_window()
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


class BestFitPacker:
    """`best_fit`: whole documents into rows, the longest first, each where it leaves least room."""

    def __init__(self, next_window: NextWindow, start: Place, seq_len: int, pad_id: int, dtype: np.dtype[Any]) -> None:
        self._next_window = next_window
        self._start = start
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._dtype = dtype
        self._window: Window | None = None
        self._group: PackedRows | None = None
        self._doc = self._last = self._row = 0
        self._ended = False
        self.counts = PackCounts()

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        while n > 0 and self._open_group():
            assert self._group is not None
            taken = self._group.take(self._row, self._row + n)
            self.counts.padded_tokens += int((self._seq_len + 1 - taken.valid).sum())
            self._row += len(taken.ids)
            n -= len(taken.ids)
            out.append(taken)
        return out

    def mark(self) -> Mark | Place:
        if self._window is None:
            return self._start
        doc, row = self._doc, self._row
        if self._group is not None and row >= len(self._group.ids):
            doc, row = self._last, 0
        return Mark(self._window.map, self._window.map.begin(doc), row)

    def _open_group(self) -> bool:
        """Have a group of packed rows with some left, or be at the end."""
        while self._group is None or self._row >= len(self._group.ids):
            if self._group is not None:
                self._doc, self._row, self._group = self._last, 0, None
            if self._window is None or self._doc >= len(self._window.map.ends):
                if not self._open_window():
                    return False
                continue
            window = self._window.map
            wanted = window.begin(self._doc) + GROUP_ROWS * (self._seq_len + 1)
            self._last = min(int(np.searchsorted(window.ends, wanted)) + 1, len(window.ends))
            self._group = pack_group(self._window, self._doc, self._last, self._seq_len, self._pad_id, self._dtype)
        return True

    def _open_window(self) -> bool:
        first = self._window is None
        window = None if self._ended else self._next_window()
        if window is None:
            self._ended = True
            return False
        self._window = window
        self._doc, self._row = (self._start.doc, self._start.row) if first else (0, 0)
        return True


@dataclass(slots=True)
class PackedRows:
    """Rows into which whole documents were fitted."""

    ids: Ids
    valid: I64
    width: int
    window: WindowMap
    pieces: I64
    """One line a piece: row, column, the window's token at which it begins, length. Ordered by row."""
    begin: int
    """The window's token at which the group of documents begins."""
    first: int = 0
    """The number of the first of these rows in its group."""

    def mark(self, row: int) -> Mark:
        return Mark(self.window, self.begin, self.first + row)

    def epoch(self, row: int) -> int:
        return self.window.start.epoch

    def take(self, first: int, last: int) -> PackedRows:
        lo, hi = np.searchsorted(self.pieces[:, 0], [first, last])
        pieces = self.pieces[lo:hi].copy()
        pieces[:, 0] -= first
        return PackedRows(
            self.ids[first:last], self.valid[first:last], self.width, self.window, pieces, self.begin, first
        )

    def boundaries(self) -> tuple[I64, I64]:
        inner = self.pieces[(self.pieces[:, 1] > 0) & (self.pieces[:, 1] < self.width - 1)]
        return inner[:, 0], inner[:, 1]

    def spans(self, row: int) -> list[Span]:
        lo, hi = np.searchsorted(self.pieces[:, 0], [row, row + 1])
        spans: list[Span] = []
        for _, column, token, length in self.pieces[lo:hi].tolist():
            spans += self.window.spans(token, length, column)
        return spans


def pack_group(window: Window, first: int, last: int, seq_len: int, pad_id: int, dtype: np.dtype[Any]) -> PackedRows:
    """Fit the documents [first, last) of a window into rows."""
    width = seq_len + 1
    flat = window.gather(first, last)
    origin = window.map.begin(first)
    ends = window.map.ends[first:last] - origin
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    lengths = ends - begins
    # A document longer than a row fills whole rows that overlap by one id, as in `concat`, so
    # that each of its tokens is a target once; only its remainder has to be fitted.
    full = np.maximum(lengths - 1, 0) // seq_len
    rest = lengths - full * seq_len
    fits = (rest > 1) | ((full == 0) & (rest == 1))
    docs = np.flatnonzero(fits)
    rows, columns = best_fit(rest[docs], width)
    inside = np.arange(int(full.sum())) - np.repeat(np.cumsum(full) - full, full)
    whole = np.repeat(begins, full) + inside * seq_len
    bins = int(rows.max()) + 1 if len(rows) else 0
    pieces = np.empty((len(whole) + len(docs), 4), np.int64)
    pieces[: len(whole)] = np.stack(
        [bins + np.arange(len(whole)), np.zeros_like(whole), whole, np.full_like(whole, width)], axis=1
    )
    tails = begins[docs] + full[docs] * seq_len
    pieces[len(whole) :] = np.stack([rows, columns, tails, rest[docs]], axis=1)
    # Rows in the order of the first document in each: neighbours stay neighbours.
    count = bins + len(whole)
    earliest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(earliest, pieces[:, 0], pieces[:, 2])
    rank = np.empty(count, np.int64)
    rank[np.argsort(earliest, kind="stable")] = np.arange(count)
    pieces[:, 0] = rank[pieces[:, 0]]
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    ids = np.full((count, width), pad_id, dtype)
    for row, column, token, length in pieces.tolist():
        ids[row, column : column + length] = flat[token : token + length]
    valid = np.zeros(count, np.int64)
    np.add.at(valid, pieces[:, 0], pieces[:, 3])
    pieces[:, 2] += origin
    return PackedRows(ids, valid, width, window.map, pieces, origin)


def best_fit(lengths: I64, capacity: int) -> tuple[I64, I64]:
    """Assign each length a row and a column: longest first, into the fullest row that has room."""
    rows = np.empty(len(lengths), np.int64)
    columns = np.empty(len(lengths), np.int64)
    # Rows by the room they have left; the bits of `rooms` say which rooms there are.
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = count = 0
    order = np.argsort(-lengths, kind="stable")
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, count
            count += 1
        rows[i], columns[i] = row, capacity - room
        left = room - length
        if left:
            by_room[left].append(row)
            rooms |= 1 << left
    return rows, columns

"""Pack whole documents into rows: longest first, each into the fullest row with enough room.

The packing "best_fit": only documents longer than a row are cut, and rows are padded. Runs on the
producer thread. The position is the first document of the current group and the rows taken from it,
so a resume packs one group again. Costs about a microsecond of Python per document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.encode.rows import Mark, Rows, WindowPacker, fixed
from penstock.encode.window import I64, Ids, Window, WindowMap
from penstock.types import LanePosition, Span

GROUP_ROWS = 512
"""Rows that are packed together. More rows need less padding and make a resume slower."""


class BestFitPacker(WindowPacker):
    """Rows of whole documents."""

    _group: PackedRows | None = None
    _doc = _last = _row = 0
    """The group is the documents [doc, last) of the window; `row` of its rows were taken."""

    def fill(self, n: int) -> int:
        group = self._current_group()
        return 0 if group is None else len(group.ids) - self._row

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        while n > 0 and (group := self._current_group()) is not None:
            taken = group.part(self._row, self._row + n)
            self.counts["padded_tokens"] += int((self._seq_len + 1 - taken.valid).sum())
            self._row += len(taken.ids)
            n -= len(taken.ids)
            out.append(taken)
        return out

    def mark(self) -> Mark:
        if self._window is None:
            return fixed(self._start)
        window, doc, row = self._window.map, self._doc, self._row
        if self._group is not None and row >= len(self._group.ids):
            doc, row = self._last, 0
        return lambda: window.position(window.begin(doc), row)

    def _current_group(self) -> PackedRows | None:
        """Return a group with rows left, or None at the end of the stream."""
        while self._group is None or self._row >= len(self._group.ids):
            if self._group is not None:
                self._doc, self._row, self._group = self._last, 0, None
            if self._window is None or self._doc >= len(self._window.map.ends):
                first, window = self._window is None, self._next()
                if window is None:
                    return None
                self._window = window
                self._doc, self._row = (self._start.doc, self._start.row) if first else (0, 0)
                continue
            window = self._window
            wanted = window.map.begin(self._doc) + GROUP_ROWS * (self._seq_len + 1)
            ends = window.map.ends
            self._last = min(int(np.searchsorted(ends, wanted)) + 1, len(ends))
            self._group = self._pack(window, self._doc, self._last)
        return self._group

    def _pack(self, window: Window, first: int, last: int) -> PackedRows:
        """Fit the documents [first, last) of a window into rows."""
        seq_len, width = self._seq_len, self._seq_len + 1
        flat = np.concatenate(window.gather(first, last))
        origin = window.map.begin(first)
        ends = window.map.ends[first:last] - origin
        lengths = np.diff(ends, prepend=0)
        begins = ends - lengths
        # A document longer than a row fills whole rows that overlap by one id, as in `concat`, so
        # that each of its tokens is a target once; only its remainder needs fitting.
        full = np.maximum(lengths - 1, 0) // seq_len
        rest = lengths - full * seq_len
        docs = np.flatnonzero((rest > 1) | ((full == 0) & (rest == 1)))
        rows, columns = best_fit(rest[docs], width)
        inside = np.arange(int(full.sum())) - np.repeat(np.cumsum(full) - full, full)
        whole = np.repeat(begins, full) + inside * seq_len
        bins = int(rows.max(initial=-1)) + 1
        count = bins + len(whole)
        starts = [np.arange(bins, count), np.zeros_like(whole), whole, np.full_like(whole, width)]
        tails = [rows, columns, begins[docs] + full[docs] * seq_len, rest[docs]]
        pieces = np.concatenate([np.stack(starts, axis=1), np.stack(tails, axis=1)])
        # Order rows by their first document, so that neighbours stay neighbours.
        earliest = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(earliest, pieces[:, 0], pieces[:, 2])
        rank = np.argsort(np.argsort(earliest, kind="stable"))
        pieces[:, 0] = rank[pieces[:, 0]]
        pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
        ids = np.full((count, width), self._source.pad_id, self._source.dtype)
        for row, column, token, length in pieces.tolist():
            ids[row, column : column + length] = flat[token : token + length]
        valid = np.zeros(count, np.int64)
        np.add.at(valid, pieces[:, 0], pieces[:, 3])
        pieces[:, 2] += origin
        return PackedRows(ids, valid, window.map, pieces, (first, last), count)


@dataclass(slots=True)
class PackedRows:
    """Rows packed by best fit."""

    ids: Ids
    valid: I64
    window: WindowMap
    pieces: I64
    """Sorted by row, one piece each: row, column, first token in the window, length."""
    docs: tuple[int, int]
    """The range of the window's documents that were packed together."""
    rows: int
    """The number of rows of that group."""
    row: int = 0
    """The number of the first row here in that group."""

    def epochs(self) -> I64:
        return np.full(len(self.valid), self.window.start.epoch)

    def position(self, row: int) -> LanePosition:
        (first, last), row = self.docs, self.row + row
        if row == self.rows:
            return self.window.position(self.window.begin(last))
        return self.window.position(self.window.begin(first), row)

    def part(self, first: int, last: int) -> PackedRows:
        """Return the rows [first, last)."""
        lo, hi = np.searchsorted(self.pieces[:, 0], [first, last])
        pieces = self.pieces[lo:hi].copy()
        pieces[:, 0] -= first
        ids, valid = self.ids[first:last], self.valid[first:last]
        return replace(self, ids=ids, valid=valid, pieces=pieces, row=self.row + first)

    def boundaries(self) -> tuple[I64, I64]:
        inner = self.pieces[(self.pieces[:, 1] > 0) & (self.pieces[:, 1] < self.ids.shape[1] - 1)]
        return inner[:, 0], inner[:, 1]

    def spans(self, row: int) -> list[Span]:
        lo, hi = np.searchsorted(self.pieces[:, 0], [row, row + 1])
        spans: list[Span] = []
        for _, column, token, length in self.pieces[lo:hi].tolist():
            spans += self.window.spans(token, length, column)
        return spans


def best_fit(lengths: I64, capacity: int) -> tuple[I64, I64]:
    """Assign a row and a column to each length: longest first, into the fullest row with room."""
    rows = np.empty(len(lengths), np.int64)
    columns = np.empty(len(lengths), np.int64)
    # Rows by the room left in them. Bit n of `rooms` is set if a row has room n.
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

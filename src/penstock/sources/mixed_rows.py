"""Rows of a mixture's lane, put together from the rows of its parts.

In:    a packer for each part, and the choice of a part for each row.
Out:   rows in their order, each of which knows the place of every part before it.
Where: the producer thread.
State: the number of the lane's next row; which parts have left; rows of a part that were fetched
       when another one ended, and are given out next.

That a part has ended is found when a row is wanted of it, and belongs to that row: the place before
the row knows nothing of it yet. So a place is the same however far has been read ahead, and weights
that change with the row are those under which the end is found again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.encode.rows import Marked, PackCounts, Packer, Rows
from penstock.errors import NoData
from penstock.order.mix import Chooser, Schedule, Told, turn
from penstock.types import Span

I64 = np.ndarray[Any, np.dtype[np.int64]]
Ids = np.ndarray[Any, np.dtype[Any]]
Parts = np.ndarray[Any, np.dtype[np.int16]]


class Taken(NamedTuple):
    """A stretch of the rows of a part, with their ids apart: the rows themselves need not keep them."""

    rows: Rows
    first: int
    ids: Ids


class Part:
    """The packer of one part, and its rows that wait."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer
        self._waiting: deque[Taken] = deque()

    def have(self, n: int) -> int:
        """Fetch rows until `n` wait. Gives how many do."""
        waiting = sum(len(taken.ids) for taken in self._waiting)
        if waiting < n and self.packer.failed is None:
            for rows in self.packer.rows(n - waiting):
                taken = Taken(rows, 0, rows.ids)
                rows.ids = rows.ids[:0].copy()
                self._waiting.append(taken)
                waiting += len(taken.ids)
        return waiting

    def take(self, n: int) -> list[Taken]:
        """`n` of the rows that wait."""
        out = []
        while n > 0:
            taken = self._waiting.popleft()
            if len(taken.ids) > n:
                self._waiting.appendleft(Taken(taken.rows, taken.first + n, taken.ids[n:]))
                taken = taken._replace(ids=taken.ids[:n])
            out.append(taken)
            n -= len(taken.ids)
        return out

    def mark(self) -> Marked:
        """Where its next row begins."""
        if self._waiting:
            return self._waiting[0].rows.mark(self._waiting[0].first)
        return self.packer.mark()


@dataclass(slots=True)
class Stretch:
    """Rows of one part among those of a mixture."""

    at: I64
    """Which of the mixture's rows they are."""
    taken: list[tuple[Rows, int, int]]
    """Rows, the first of them, and how many."""
    end: Marked

    def mark(self, row: int) -> Marked:
        """Where the part stands before a row of the mixture."""
        number = int(np.searchsorted(self.at, row))
        for rows, first, count in self.taken:
            if number < count:
                return rows.mark(first + number)
            number -= count
        return self.end

    def find(self, row: int) -> tuple[Rows, int]:
        number = int(np.searchsorted(self.at, row))
        for rows, first, count in self.taken:
            if number < count:
                return rows, first + number
            number -= count
        raise AssertionError(f"row {row} is not of this part")


class MixMark(NamedTuple):
    """A place that is worked out only when somebody asks for it."""

    epoch: int
    row: int
    round: int
    """The first global row of the lanes' rows of this number."""
    told: Told
    credits: tuple[int, ...]
    left: tuple[int, ...]
    parts: tuple[Marked, ...]

    def place(self) -> Any:
        from penstock.sources.mixture import MixPlace

        places = tuple(part.place() for part in self.parts)
        return MixPlace(
            self.epoch, self.row, self.told.counts(self.round), self.credits, self.left, places
        )


@dataclass(slots=True)
class MixRows:
    """Some consecutive rows of a mixture's lane, between two of which no part left."""

    ids: Ids
    valid: I64 | None
    epoch_: int
    first: int
    lanes: int
    stretches: list[Stretch]
    parts: Parts
    told: Told
    credits: list[tuple[int, ...]] | None
    """What is owed before each row, where a part has left."""
    left: tuple[int, ...]
    begin: Marked | None
    """Where the first row begins, if a part was found to end there: what is above holds after that."""

    def mark(self, row: int) -> Marked:
        row = row % len(self.parts)
        if row == 0 and self.begin is not None:
            return self.begin
        number = self.first + row
        marks = tuple(stretch.mark(row) for stretch in self.stretches)
        credits = self.credits[row] if self.credits is not None else (0,) * len(marks)
        return MixMark(
            self.epoch_, number, number * self.lanes, self.told, credits, self.left, marks
        )

    def epoch(self, row: int) -> int:
        return self.epoch_

    def boundaries(self) -> tuple[I64, I64]:
        rows: list[I64] = []
        columns: list[I64] = []
        for stretch in self.stretches:
            begin = 0
            for taken, first, count in stretch.taken:
                row, column = taken.boundaries()
                ours = (row >= first) & (row < first + count)
                rows.append(stretch.at[begin + row[ours] - first])
                columns.append(column[ours])
                begin += count
        empty = [np.empty(0, np.int64)]
        return np.concatenate(rows or empty), np.concatenate(columns or empty)

    def spans(self, row: int) -> list[Span]:
        rows, number = self.stretches[int(self.parts[row])].find(row)
        return rows.spans(number)


class MixPacker:
    """Gives out the rows of one lane."""

    def __init__(
        self,
        *,
        lane: int,
        lanes: int,
        own: int,
        start: Any,
        chooser: Chooser,
        schedule: Schedule,
        on_end: str,
        end_epoch: int | None,
        first_places: Sequence[Callable[[int], Any]],
        open_part: Callable[[int, int, Any], Packer],
        width: int,
        dtype: np.dtype[Any],
    ) -> None:
        self._lane, self._lanes, self._own = lane, lanes, own
        self._chooser = chooser
        self._schedule = schedule
        self._on_end = on_end
        self._end_epoch = end_epoch
        self._first_places = first_places
        self._open_part = open_part
        self._width = width
        self._dtype = dtype
        self._epoch, self._row = start.epoch, start.row
        self._credits, self._left = list(start.credits), list(start.left)
        self._ended = end_epoch is not None and start.epoch >= end_epoch
        self._given_in_pass = 1 if start.row else 0
        self._start = start
        self._before_end: Marked | None = None
        """Where the next row begins, if a part was found to end there."""
        self._parts: list[Part] = []
        self._packed = PackCounts()
        self.given = [0] * len(first_places)
        """Rows of each part, for whoever wants to know."""
        self.failed: Exception | None = None

    @property
    def counts(self) -> PackCounts:
        """What packing added and left out, in this pass and those before."""
        total = PackCounts(*(getattr(self._packed, name) for name in PackCounts.__slots__))
        for part in self._parts:
            _add(total, part.packer.counts)
        return total

    def rows(self, n: int) -> list[Rows]:
        if not self._parts and not self._ended:
            self._open(self._start.places)
        out: list[Rows] = []
        while n > 0 and not self._ended and self.failed is None:
            rows = self._some(n)
            if rows is not None:
                out.append(rows)
                n -= len(rows.ids)
        return out

    def holds(self, n: int) -> bool:
        return bool(self._parts) and all(part.packer.holds(n) for part in self._parts)

    def at_hand(self) -> int:
        return 0  # they come in pieces

    def mark(self) -> Marked:
        if self._before_end is not None:
            return self._before_end
        if not self._parts:
            at_start: Marked = self._start
            return at_start
        number = self._row * self._lanes
        return MixMark(
            self._epoch, self._row, number, self._chooser.told(number), tuple(self._credits), tuple(self._left),
            tuple(part.mark() for part in self._parts),
        )  # fmt: skip

    def _open(self, places: Sequence[Any]) -> None:
        for part in self._parts:
            _add(self._packed, part.packer.counts)
        self._parts = [
            Part(self._open_part(i, self._epoch, place)) for i, place in enumerate(places)
        ]

    def _some(self, n: int) -> MixRows | None:
        """Up to `n` rows; fewer where a part ends. None if it ends before the first."""
        numbers: I64 = turn(self._row + np.arange(n, dtype=np.int64), self._lane, self._lanes)
        chosen = self._chooser.at(numbers, self._lane, first=self._row * self._lanes)
        credits: list[tuple[int, ...]] | None = None
        if any(self._left):
            chosen, credits = self._substitute(chosen, numbers)
        at = [np.flatnonzero(chosen == p) for p in range(len(self._parts))]
        have = [part.have(len(rows)) for part, rows in zip(self._parts, at, strict=True)]
        # The first row for which its part has none: up to it everything is as chosen.
        cut, ending = min(
            (
                (int(rows[n_have]), p)
                for p, (rows, n_have) in enumerate(zip(at, have, strict=True))
                if n_have < len(rows)
            ),
            default=(n, -1),
        )
        made = self._build(cut, numbers, chosen, at, credits) if cut else None
        if cut:
            self._row += cut
            self._given_in_pass += cut
            self._before_end = None
            if credits is not None:
                self._credits = list(credits[cut])
        if ending >= 0:
            # Worked out now, as it should not keep the pass in memory that it may be the end of. Of several
            # ends before one row, the first counts.
            self._before_end = self.mark().place()
            self._end_of(ending)
        self._chooser.forget(self._own)
        return made

    def _build(
        self,
        n: int,
        numbers: I64,
        chosen: Parts,
        at: list[I64],
        credits: list[tuple[int, ...]] | None,
    ) -> MixRows:
        ids = np.empty((n, self._width), self._dtype)
        valid: I64 | None = None
        stretches = []
        for number, (part, all_rows) in enumerate(zip(self._parts, at, strict=True)):
            rows = all_rows[: int(np.searchsorted(all_rows, n))]
            self.given[number] += len(rows)
            taken = []
            begin = 0
            for piece in part.take(len(rows)):
                count = len(piece.ids)
                there = rows[begin : begin + count]
                ids[there] = piece.ids
                if piece.rows.valid is not None:
                    valid = np.full(n, self._width, np.int64) if valid is None else valid
                    valid[there] = piece.rows.valid[piece.first : piece.first + count]
                taken.append((piece.rows, piece.first, count))
                begin += count
            stretches.append(Stretch(rows, taken, part.mark()))
        told = self._chooser.told(int(numbers[n - 1]))
        return MixRows(
            ids, valid, self._epoch, self._row, self._lanes, stretches, chosen[:n], told, credits,
            tuple(self._left), self._before_end,
        )  # fmt: skip

    def _weights(self, row: int) -> tuple[int, ...]:
        return [weights for begin, weights in self._schedule if begin <= row][-1]

    def _substitute(self, chosen: Parts, numbers: I64) -> tuple[Parts, list[tuple[int, ...]]]:
        """Give the rows of parts that have left to the others, by their weights, within this lane.

        Also what each part is owed before each row, and after the last.
        """
        owed = list(self._credits)
        out: list[int] = []
        before: list[tuple[int, ...]] = []
        staying = [p for p, left in enumerate(self._left) if not left]
        for part, number in zip(chosen.tolist(), numbers.tolist(), strict=True):
            before.append(tuple(owed))
            if self._left[part]:
                weights = self._weights(number)
                shares = [weights[p] or 1 for p in staying]
                for p, share in zip(staying, shares, strict=True):
                    owed[p] += share
                part = max(staying, key=lambda p: (owed[p], -p))
                owed[part] -= sum(shares)
            out.append(part)
        return np.array(out, np.int16), [*before, tuple(owed)]

    def _end_of(self, ending: int) -> None:
        """A part has no more rows: its failure is ours, or else its end is dealt with as was chosen."""
        failed = self._parts[ending].packer.failed
        if self._on_end == "leave" and isinstance(failed, NoData):
            failed = None  # this lane gets nothing of it; others may
        if failed is not None or self._on_end == "restart":
            self.failed = failed or NoData("a part of the mixture ended that was to go on for ever")
            return
        if self._on_end == "leave":
            self._left[ending] = 1
            self._credits = [0] * len(self._parts)
            weights = self._weights(self._row * self._lanes)
            if not all(
                left or not weight for left, weight in zip(self._left, weights, strict=True)
            ):
                return
        if not self._given_in_pass:
            self.failed = NoData(
                f"lane {self._lane} of {self._lanes} gets no row of the mixture: a part has too few"
            )
            return
        self._epoch += 1
        self._given_in_pass = 0
        self._credits = [0] * len(self._parts)
        self._left = [0] * len(self._parts)
        if self._end_epoch is not None and self._epoch >= self._end_epoch:
            self._ended = True
            for part in self._parts:
                _add(self._packed, part.packer.counts)
            self._parts = []
            return
        self._open([first(self._epoch) for first in self._first_places])


def _add(into: PackCounts, more: PackCounts) -> None:
    for name in PackCounts.__slots__:
        setattr(into, name, getattr(into, name) + getattr(more, name))

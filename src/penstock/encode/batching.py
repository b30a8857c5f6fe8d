"""Deal rows from a rank's lanes in turn, and make batches of them.

Runs on the producer thread. Global row g is row g div lanes of lane g mod lanes, so the stream is
the same for any number of ranks. Ids stay in their narrow type, and if all rows come from one lane
they are not copied; `next` or the device widens them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch
from penstock.encode.rows import Mark, Packer, Rows
from penstock.encode.window import I64, NO_IDS
from penstock.types import Shard, Span, StreamPosition
from penstock.watch.stage_timer import Clock

I32 = np.ndarray[Any, np.dtype[np.int32]]
Piece = tuple[I64, Rows]
"""Consecutive rows of a lane, and which rows of the batch they are."""


@dataclass(slots=True)
class RowsOrigin:
    """Where the rows of a batch came from, and where the stream continues after them."""

    row: int
    batch: int
    marks: tuple[Mark, ...]
    pieces: list[Piece]
    size: int

    def position(self) -> StreamPosition:
        return StreamPosition(self.row, self.batch, tuple(mark() for mark in self.marks))

    def spans(self) -> list[list[Span]]:
        spans: list[list[Span]] = [[] for _ in range(self.size)]
        for at, rows in self.pieces:
            for i, row in enumerate(at.tolist()):
                spans[row] = rows.spans(i)
        return spans


class Batcher:
    """Makes the batches of one rank."""

    def __init__(
        self,
        packers: Sequence[Packer],
        *,
        shard: Shard,
        lanes: int,
        batch_size: int,
        seq_len: int,
        drop_last: bool,
        positions: bool,
        dtype: np.dtype[Any],
        start: StreamPosition,
        state: Callable[[StreamPosition], dict[str, Any]],
        clock: Clock,
        by_lane: bool = True,
        total_rows: int | None = None,
    ) -> None:
        """`by_lane`: a state needs the lanes' positions. `total_rows` bounds a state's row: the last
        batch may repeat rows."""
        self._packers, self._shard, self._lanes = packers, shard, lanes
        self._batch_size, self._seq_len, self._drop_last = batch_size, seq_len, drop_last
        self._positions, self._dtype = positions, dtype
        self._row, self._batch, self._total_rows = start.row, start.batch, total_rows
        self._by_lane = by_lane
        self._state, self._clock = state, clock
        self._finished = [False] * len(packers)
        self._slots = np.arange(batch_size)
        self._ended = False
        self._failed: Exception | None = None

    def take(self, n: int) -> list[Batch]:
        """Return the next batches, at most `n`; none at the end of a finite stream.

        After the first one it stops where a row would have to be waited for. A failure is raised
        after the batches before it.
        """
        if self._failed is not None:
            raise self._failed
        dealt: list[RowsOrigin] = []
        try:
            while len(dealt) < n and not self._ended and (not dealt or self._is_buffered()):
                pieces, size, turns = self._deal()
                self._ended = size == 0
                if size:
                    dealt.append(self._origin(pieces, size, turns))
        except Exception as error:
            self._failed = error
            if not dealt:
                raise
        with self._clock.stage("batch") as timeline:
            batches = [self._make(origin) for origin in dealt]
        timeline.count("pack", sum(origin.size for origin in dealt))
        return batches

    def _is_buffered(self) -> bool:
        """Return True if the rows of a batch are there."""
        each = -(-self._batch_size // len(self._packers))
        return all(packer.buffered >= each for packer in self._packers)

    def _deal(self) -> tuple[list[Piece], int, int]:
        """Take a batch's rows from the lanes in turn. Return them, how many, and the turns used."""
        own, wanted = len(self._packers), self._batch_size
        first = self._lane_of(0)
        pieces: list[Piece] = []
        missing: list[tuple[int, int]] = []
        """The first turn for which a lane had no row, and the lane."""
        for i in range(min(own, wanted)):
            lane = (first + i) % own
            turns = self._slots[i::own]
            got = self._take(lane, turns, pieces)
            if got < len(turns):
                missing.append((int(turns[got]), lane))
        if not missing:
            return pieces, wanted, wanted
        # With drop_last the stream ends with the first missing row: later failures do not count.
        for _, lane in [min(missing)] if self._drop_last else missing:
            if (error := self._packers[lane].failed) is not None:
                raise error
        if self._drop_last:
            return [], 0, 0
        return self._without_finished(pieces)

    def _without_finished(self, pieces: list[Piece]) -> tuple[list[Piece], int, int]:
        """Fill the batch up from the lanes that have rows left."""
        present = sorted(turn for turns, _ in pieces for turn in turns.tolist())
        turn = self._batch_size
        while len(present) < self._batch_size and not all(self._finished):
            lane = self._lane_of(turn)
            if self._take(lane, np.array([turn]), pieces):
                present.append(turn)
            elif (error := self._packers[lane].failed) is not None:
                raise error
            turn += 1
        places = np.array(present, np.int64)
        pieces = [(np.searchsorted(places, turns), rows) for turns, rows in pieces]
        return pieces, len(present), turn

    def _take(self, lane: int, turns: I64, pieces: list[Piece]) -> int:
        """Append the lane's rows for some turns. Return how many there were."""
        got = 0
        if not self._finished[lane]:
            for rows in self._packers[lane].rows(len(turns)):
                pieces.append((turns[got : got + len(rows.ids)], rows))
                got += len(rows.ids)
            self._finished[lane] = got < len(turns)
        return got

    def _lane_of(self, turn: int) -> int:
        """Return which of this rank's lanes has the row of a turn."""
        shard = self._shard
        row = self._row + (shard.rem - self._row) % shard.mod + turn * shard.mod
        return (row % self._lanes - shard.rem) // shard.mod

    def _origin(self, pieces: list[Piece], size: int, turns: int) -> RowsOrigin:
        row = self._row = self._row + turns * self._shard.mod
        if self._total_rows is not None:
            row = min(row, self._total_rows)
        self._batch += 1
        marks = tuple(packer.mark() for packer in self._packers) if self._by_lane else ()
        return RowsOrigin(row, self._batch, marks, pieces, size)

    def _make(self, origin: RowsOrigin) -> Batch:
        pieces, size = origin.pieces, origin.size
        epoch = min(rows.epoch for _, rows in pieces)
        batch = Batch(None, None, epoch, origin.batch - 1, _origin=origin, _state=self._state)
        batch._tokens, batch._ids = size * self._seq_len, True
        batch.narrow = self._narrow(pieces, size)
        if self._positions:
            positions, cu_seqlens = self._documents(pieces, size)
            batch.max_seqlen = int(np.diff(cu_seqlens).max())
            batch.narrow |= {"positions": positions, "cu_seqlens": cu_seqlens}
        for _, rows in pieces:
            rows.ids = NO_IDS  # what the batch keeps for `provenance` needs no ids
        return batch

    def _narrow(self, pieces: list[Piece], size: int) -> dict[str, np.ndarray[Any, Any]]:
        """Return the ids of a batch's rows and, if some are padded, how many of each are real."""
        if len(pieces) == 1:
            rows = pieces[0][1]
            return {"ids": rows.ids} | ({} if rows.valid is None else {"valid": rows.valid})
        ids = np.empty((size, self._seq_len + 1), self._dtype)
        valid = np.full(size, self._seq_len + 1)
        for at, rows in pieces:
            ids[at] = rows.ids
            if rows.valid is not None:
                valid[at] = rows.valid
        padded = any(rows.valid is not None for _, rows in pieces)
        return {"ids": ids} | ({"valid": valid} if padded else {})

    def _documents(self, pieces: list[Piece], size: int) -> tuple[I32, I32]:
        """Return `positions` and `cu_seqlens`. A document that began in an earlier row begins again
        at position 0; padding counts as a document of its own."""
        seq_len = self._seq_len
        starts = [np.arange(size) * seq_len]
        for at, rows in pieces:
            row, column = rows.boundaries()
            inside = column < seq_len
            starts.append(at[row[inside]] * seq_len + column[inside])
            if rows.valid is not None:
                padded = np.flatnonzero(rows.valid < seq_len)
                starts.append(at[padded] * seq_len + rows.valid[padded])
        begins = np.unique(np.concatenate(starts))
        bounds = np.append(begins, size * seq_len)
        positions = np.arange(size * seq_len) - np.repeat(begins, np.diff(bounds))
        return positions.reshape(size, seq_len).astype(np.int32), bounds.astype(np.int32)

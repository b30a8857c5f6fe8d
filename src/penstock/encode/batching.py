"""Deal rows from a rank's lanes in turn, and make batches of them.

Runs on the producer thread. Global row g is row g div lanes of lane g mod lanes, so the stream is
the same for any number of ranks. Each token is widened to int64 twice, into inputs and targets,
which share no memory; on the way to a device ids stay narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch
from penstock.encode.rows import Mark, Packer, Rows
from penstock.encode.window import I64, NO_IDS
from penstock.types import IGNORE, Shard, Span, StreamPosition
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
        narrow: np.dtype[Any] | None,
        start: StreamPosition,
        state: Callable[[StreamPosition], dict[str, Any]],
        clock: Clock,
        by_lane: bool = True,
        total_rows: int | None = None,
    ) -> None:
        """`narrow` is the type of ids on their way to a device; None to widen them here. `by_lane`:
        a state needs the lanes' positions. `total_rows` bounds a state's row: the last batch may
        repeat rows."""
        self._packers, self._shard, self._lanes = packers, shard, lanes
        self._batch_size, self._seq_len, self._drop_last = batch_size, seq_len, drop_last
        self._positions, self._narrow = positions, narrow
        self._row, self._batch, self._total_rows = start.row, start.batch, total_rows
        self._by_lane = by_lane
        self._state, self._clock = state, clock
        self._finished = [False] * len(packers)
        self._slots = np.arange(batch_size)
        self._ended = False

    def next(self) -> Batch | None:
        """Return the next batch, or None at the end of a finite stream."""
        if self._ended:
            return None
        pieces, size, slots = self._deal()
        if size == 0:
            self._ended = True
            return None
        row = self._row = self._row + slots * self._shard.mod
        if self._total_rows is not None:
            row = min(row, self._total_rows)
        self._batch += 1
        marks = tuple(packer.mark() for packer in self._packers) if self._by_lane else ()
        with self._clock.stage("batch") as timeline:
            batch = self._make(pieces, size)
        batch._origin = RowsOrigin(row, self._batch, marks, pieces, size)
        timeline.count("pack", size)
        return batch

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

    def _make(self, pieces: list[Piece], size: int) -> Batch:
        seq_len = self._seq_len
        batch = Batch(
            None, None, min(rows.epoch for _, rows in pieces), self._batch - 1, _state=self._state
        )
        batch._tokens, batch._ids = size * seq_len, True
        if self._narrow is not None:
            ids = np.empty((size, seq_len + 1), self._narrow)
            valid = np.full(size, seq_len + 1, np.int32)
            for at, rows in pieces:
                ids[at] = rows.ids
                if rows.valid is not None:
                    valid[at] = rows.valid
            batch.narrow = {"ids": ids, "valid": valid}
        else:
            inputs = np.empty((size, seq_len), np.int64)
            targets = np.empty((size, seq_len), np.int64)
            for at, rows in pieces:
                where = slice(at[0], at[-1] + 1) if at[-1] - at[0] == len(at) - 1 else at
                inputs[where], targets[where] = rows.ids[:, :-1], rows.ids[:, 1:]
                if rows.valid is not None:
                    for row, valid_ids in zip(at.tolist(), rows.valid.tolist(), strict=True):
                        targets[row, max(0, valid_ids - 1) :] = IGNORE
            batch.inputs, batch.targets = inputs, targets
        if self._positions:
            positions, cu_seqlens = self._documents(pieces, size)
            batch.max_seqlen = int(np.diff(cu_seqlens).max())
            if batch.narrow is not None:
                batch.narrow |= {"positions": positions.astype(np.int32), "cu_seqlens": cu_seqlens}
            else:
                batch.positions, batch.cu_seqlens = positions, cu_seqlens
        for _, rows in pieces:
            rows.ids = NO_IDS  # the batch need not keep alive what was copied
        return batch

    def _documents(self, pieces: list[Piece], size: int) -> tuple[I64, I32]:
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
        return positions.reshape(size, seq_len), bounds.astype(np.int32)

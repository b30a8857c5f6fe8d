"""Take rows from the lanes of a rank in turn, and make batches of them.

Runs on the producer thread. Global row g is row g div lanes of lane g mod lanes, so the stream is
the same for any number of ranks. Buffered rows of several batches are taken and widened to int64
together; each batch is a slice of the result. With a device, ids are widened there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.encode.batch import Batch, widened
from penstock.encode.rows import Mark, Packer, Rows
from penstock.encode.window import I64, NO_IDS
from penstock.types import Span, StreamPosition

if TYPE_CHECKING:
    from penstock.sources.base import RowSource, RunContext

Piece = tuple[int, I64, Rows]
"""Consecutive rows of a lane: the lane, their indices in the batch, and the rows."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(slots=True)
class Block:
    """Rows taken together, without their ids, and the lanes' positions before and after them."""

    pieces: list[Piece]
    size: int
    before: tuple[Mark, ...]
    after: tuple[Mark, ...]


@dataclass(slots=True)
class RowsOrigin:
    """The provenance of a batch, and the position of the stream after it."""

    row: int
    batch: int
    block: Block
    first: int
    last: int
    """The batch is the rows [first, last) of the block."""

    def marks(self) -> list[Mark]:
        """Return the position of each lane after the batch."""
        if self.last == self.block.size:
            return list(self.block.after)
        marks = list(self.block.before)
        if marks:
            for lane, at, rows in self.block.pieces:
                if used := int(np.searchsorted(at, self.last)):
                    marks[lane] = partial(rows.position, used)
        return marks

    def position(self) -> StreamPosition:
        return StreamPosition(self.row, self.batch, tuple(mark() for mark in self.marks()))

    def spans(self) -> list[list[Span]]:
        spans: list[list[Span]] = [[] for _ in range(self.last - self.first)]
        for _, at, rows in self.block.pieces:
            for i in np.flatnonzero((at >= self.first) & (at < self.last)).tolist():
                spans[int(at[i]) - self.first] = rows.spans(i)
        return spans


class Batcher:
    """Makes the batches of one rank."""

    def __init__(
        self,
        packers: Sequence[Packer],
        source: RowSource,
        run: RunContext,
        total_rows: int | None = None,
    ) -> None:
        """`total_rows` limits the row in a state, because the last batch may repeat rows."""
        self._packers, self._source, self._run = packers, source, run
        self._shard, self._batch_size, self._seq_len = run.shard, run.batch_size, source.seq_len
        self._row, self._batch, self._total_rows = run.start.row, run.start.batch, total_rows
        self._narrow = run.device is not None
        """True if the ids are widened on a device."""
        self._finished = [False] * len(packers)
        self._marks = self._lane_marks()
        """The position of each lane after the last batch."""
        self._ended = False

    def take(self, n: int) -> list[Batch]:
        """Return up to `n` batches; an empty list at the end of a finite stream.

        Waits only for the rows of the first batch.
        """
        if self._ended:
            return []
        own = len(self._packers)
        needed = -(-self._batch_size // own)
        buffered = min([packer.fill(needed) for packer in self._packers]) * own
        n = max(1, min(n, buffered // self._batch_size))
        pieces, size, turns = self._deal(n * self._batch_size)
        self._ended = size == 0
        if self._ended:
            return []
        with self._run.clock.stage("batch") as timeline:
            arrays = self._arrays(pieces, size)
            before, self._marks = self._marks, self._lane_marks()
            block = Block(pieces, size, before, self._marks)
            batches = self._batches(block, n, turns // n, arrays)
            for _, _, rows in pieces:
                rows.ids = NO_IDS  # `provenance` does not need the ids
        timeline.count("pack", size)
        return batches

    def _lane_marks(self) -> tuple[Mark, ...]:
        return tuple(packer.mark() for packer in self._packers) if self._source.by_lane else ()

    def _deal(self, wanted: int) -> tuple[list[Piece], int, int]:
        """Take rows from the lanes in turn. Return the rows, their number, and the turns used."""
        own = len(self._packers)
        first = self._lane_of(0)
        pieces: list[Piece] = []
        missing: list[tuple[int, int]] = []
        """The first turn without a row for each lane that ended, and the lane."""
        for i in range(min(own, wanted)):
            lane = (first + i) % own
            turns = np.arange(i, wanted, own)
            got = self._take(lane, turns, pieces)
            if got < len(turns):
                missing.append((int(turns[got]), lane))
        if not missing:
            return pieces, wanted, wanted
        # With drop_last, the stream ends at the first missing row, so later failures are ignored.
        for _, lane in [min(missing)] if self._run.drop_last else missing:
            if (error := self._packers[lane].failed) is not None:
                raise error
        if self._run.drop_last:
            return [], 0, 0
        return self._without_finished(pieces)

    def _without_finished(self, pieces: list[Piece]) -> tuple[list[Piece], int, int]:
        """Fill the batch from the lanes that have rows left."""
        present = sorted(turn for _, turns, _ in pieces for turn in turns.tolist())
        turn = self._batch_size
        while len(present) < self._batch_size and not all(self._finished):
            lane = self._lane_of(turn)
            if self._take(lane, np.array([turn]), pieces):
                present.append(turn)
            elif (error := self._packers[lane].failed) is not None:
                raise error
            turn += 1
        places = np.array(present, np.int64)
        pieces = [(lane, np.searchsorted(places, turns), rows) for lane, turns, rows in pieces]
        return pieces, len(present), turn

    def _take(self, lane: int, turns: I64, pieces: list[Piece]) -> int:
        """Append the lane's rows for these turns. Return the number of rows."""
        got = 0
        if not self._finished[lane]:
            for rows in self._packers[lane].rows(len(turns)):
                pieces.append((lane, turns[got : got + len(rows.ids)], rows))
                got += len(rows.ids)
            self._finished[lane] = got < len(turns)
        return got

    def _lane_of(self, turn: int) -> int:
        """Return the index of the lane on this rank that has the row of a turn."""
        shard = self._shard
        row = self._row + (shard.rem - self._row) % shard.mod + turn * shard.mod
        return (row % self._run.lanes - shard.rem) // shard.mod

    def _batches(self, block: Block, n: int, turns: int, arrays: Arrays) -> list[Batch]:
        """Cut a block into `n` batches of `turns` turns each, and advance the position."""
        size = block.size // n
        epochs = np.empty(block.size, np.int64)
        for _, at, rows in block.pieces:
            epochs[at] = rows.epochs()
        by_batch = epochs.reshape(n, size).min(axis=1).tolist()
        batches = []
        for first, epoch in zip(range(0, block.size, size), by_batch, strict=True):
            self._batch += 1
            row = self._row = self._row + turns * self._shard.mod
            if self._total_rows is not None:
                row = min(row, self._total_rows)
            part = slice(first, first + size)
            own = {name: array[part] for name, array in arrays.items()}
            fields: Any = {"narrow": own} if self._narrow else own
            batch = Batch(
                **fields,
                epoch=epoch,
                index=self._batch - 1,
                _origin=RowsOrigin(row, self._batch, block, first, first + size),
                _state=self._run.state,
                tokens=size * self._seq_len,
                _ids=True,
            )
            if "positions" in own:
                begins = np.flatnonzero(own["positions"] == 0).astype(np.int32)
                batch.cu_seqlens = np.append(begins, np.int32(own["positions"].size))
                batch.max_seqlen = int(np.diff(batch.cu_seqlens).max())
            batches.append(batch)
        return batches

    def _arrays(self, pieces: list[Piece], size: int) -> Arrays:
        """Return the arrays of a block, with its rows in order."""
        if len(pieces) == 1:
            rows = pieces[0][2]
            ids, valid = rows.ids, rows.valid
        else:
            ids = np.empty((size, self._seq_len + 1), self._source.dtype)
            valid = None
            if any(rows.valid is not None for _, _, rows in pieces):
                valid = np.full(size, self._seq_len + 1)
            for _, at, rows in pieces:
                ids[at] = rows.ids
                if valid is not None and rows.valid is not None:
                    valid[at] = rows.valid
        arrays = {"ids": ids} if valid is None else {"ids": ids, "valid": valid}
        if self._source.positions:
            arrays["positions"] = self._token_positions(pieces, size)
        return arrays if self._narrow else widened(arrays)

    def _token_positions(self, pieces: list[Piece], size: int) -> I64:
        """Return each token's position in its document. A document that continues from an earlier
        row starts again at 0; padding counts as a separate document."""
        seq_len = self._seq_len
        starts = [np.arange(size) * seq_len]
        for _, at, rows in pieces:
            row, column = rows.boundaries()
            inside = column < seq_len
            starts.append(at[row[inside]] * seq_len + column[inside])
            if rows.valid is not None:
                padded = np.flatnonzero(rows.valid < seq_len)
                starts.append(at[padded] * seq_len + rows.valid[padded])
        begins = np.unique(np.concatenate(starts))
        lengths = np.diff(np.append(begins, size * seq_len))
        return (np.arange(size * seq_len) - np.repeat(begins, lengths)).reshape(size, seq_len)

"""Deal rows from the lanes in turn, and make batches of them.

In:    the packers of this shard's lanes.
Out:   batches of int64 arrays, each of which knows where the stream continues after it.
Where: the producer thread; the consumer only wraps the arrays as tensors.
State: the number of rows dealt. Global row g is row g div lanes of lane g mod lanes.
Cost:  each token is widened twice, into inputs and targets: these share no memory, so a user may
       change one of them, and both are contiguous. Small batches are made a few at a time,
       which spreads the cost of Python over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.encode.rows import Mark, Packer, Rows
from penstock.encode.window import Place
from penstock.types import IGNORE, Shard, Span

I64 = np.ndarray[Any, np.dtype[np.int64]]

BLOCK_TOKENS = 1 << 16
"""Batches of fewer tokens are made together, up to this many tokens: a batch that is kept keeps them all."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream continues."""

    row: int
    """Global rows dealt, over all ranks."""
    batch: int
    places: tuple[Place, ...]
    """One for each lane of this shard."""


@dataclass(slots=True)
class Block:
    """Where the rows of some batches came from, in slots: the turns in which rows are dealt."""

    row: int
    world: int
    batch: int
    lanes: list[list[tuple[I64, Rows]]]
    """For each lane of the shard, its rows and their slots."""
    ends: tuple[Mark | Place, ...]
    """Where each lane continues after the block."""
    slots: I64 | None
    """The slots that got a row; None where all did. A slot whose lane is at its end stays empty."""

    def position(self, count: int, batches: int) -> Position:
        """Where the stream continues after `count` rows, which make `batches`."""
        used = count if self.slots is None else int(self.slots[count - 1]) + 1 if count else 0
        places = []
        for rows_of_lane, end in zip(self.lanes, self.ends, strict=True):
            mark = next((rows.mark(n) for slots, rows in rows_of_lane if (n := _before(slots, used)) < len(slots)), end)
            places.append(mark.place() if isinstance(mark, Mark) else mark)
        return Position(self.row + used * self.world, self.batch + batches, tuple(places))

    def targets_of(self, slots: I64) -> I64:
        """Which row of the block a slot is."""
        return slots if self.slots is None else np.searchsorted(self.slots, slots)

    def one_epoch(self) -> int | None:
        """The epoch in which all rows begin, if it is the same for all."""
        epochs = {rows.epoch(i) for lane in self.lanes for _, rows in lane for i in (0, -1)}
        return epochs.pop() if len(epochs) == 1 else None

    def epoch(self, first: int, last: int) -> int:
        """The epoch that each of the rows [first, last) has reached."""
        lo, hi = (first, last) if self.slots is None else (int(self.slots[first]), int(self.slots[last - 1]) + 1)
        return min(
            rows.epoch(n)
            for lane in self.lanes
            for slots, rows in lane
            if (n := _before(slots, lo)) < _before(slots, hi)
        )

    def spans(self, first: int, last: int) -> list[list[Span]]:
        """Where the ids of the rows [first, last) come from."""
        spans: list[list[Span]] = [[] for _ in range(last - first)]
        for rows_of_lane in self.lanes:
            for slots, rows in rows_of_lane:
                for i, row in enumerate(self.targets_of(slots).tolist()):
                    if first <= row < last:
                        spans[row - first] = rows.spans(i)
        return spans


def _torch_is_here() -> bool:
    """Whether torch has been imported, wholly. It is not for the producer to import it: the trainer
    may be building its model, and the import would hold the GIL for seconds."""
    torch = sys.modules.get("torch")
    return torch is not None and not getattr(torch.__spec__, "_initializing", False)


def _before(slots: I64, slot: int) -> int:
    return int(slots.searchsorted(slot))


@dataclass(slots=True)
class Batch:
    """`batch_size` packed rows. Yours to keep and to change: nothing is reused."""

    inputs: Any
    """(batch, seq_len) int64: a torch tensor where torch is installed, else a numpy array."""
    targets: Any
    """The inputs shifted by one; -100 where there is nothing to predict."""
    epoch: int
    """The epoch that every row of the batch has reached."""
    index: int
    """The batch's number since the beginning of the stream, resumes included."""
    positions: Any = None
    """(batch, seq_len): each token's distance from the start of its document in the row."""
    cu_seqlens: Any = None
    """int32: where documents begin and end in the flattened batch, as varlen attention wants it."""
    synthetic: bool = False
    """Whether these ids stand in for data that could not be had."""
    _block: Block | None = field(default=None, repr=False)
    _rows: tuple[int, int] = field(default=(0, 0), repr=False)
    _number: int = field(default=0, repr=False)
    _tokens: int = field(default=0, repr=False)
    _state: Callable[[Position], dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Input ids in the batch, padding included."""
        return self._tokens

    def to_torch(self) -> None:
        """Wrap the arrays as tensors, if they are not yet. No data is copied."""
        if not isinstance(self.inputs, np.ndarray):
            return
        import torch

        for name in ("inputs", "targets", "positions", "cu_seqlens"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                setattr(self, name, torch.from_numpy(value))

    def provenance(self) -> list[list[Span]]:
        """For each row, the documents that its ids come from."""
        assert self._block is not None
        return self._block.spans(*self._rows)

    def state_dict(self) -> dict[str, Any]:
        """The state that continues after this batch."""
        assert self._state is not None
        return self._state(self.locate()())

    def locate(self) -> Callable[[], Position]:
        """Finds where the stream continues after this batch, when called; keeps none of its ids alive."""
        assert self._block is not None
        return partial(self._block.position, self._rows[1], self._number + 1)


class Batcher:
    """Makes the batches of one shard."""

    def __init__(
        self,
        packers: Sequence[Packer],
        *,
        shard: Shard,
        lanes: int,
        batch_size: int,
        seq_len: int,
        drop_last: bool,
        extras: bool,
        tensors: bool,
        most: int,
        row: int,
        batch: int,
        state: Callable[[Position], dict[str, Any]],
    ) -> None:
        self._packers = packers
        self._shard = shard
        self._lanes = lanes
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._drop_last = drop_last
        self._extras = extras
        self._tensors = tensors
        self._most = max(1, min(most, BLOCK_TOKENS // (batch_size * seq_len)))
        self._size = 1
        self._row = row
        self._batch = batch
        self._state = state
        self._ended = False
        self._dry = [False] * len(packers)
        self._failed: Exception | None = None

    def next(self) -> list[Batch]:
        """The next batches; none at the end of a finite stream.

        A failure is raised when everything before it has been given out, however many batches are
        made at once.
        """
        self._raise_failure()
        if self._ended:
            return []
        block, count = self._deal(self._size * self._batch_size)
        self._size = min(2 * self._size, self._most)  # the first batch does not wait for a second
        if self._drop_last or self._failed is not None:
            count -= count % self._batch_size
        batches = self._make(block, count) if count else []
        self._batch += len(batches)
        if not batches:
            self._raise_failure()
        return batches

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _deal(self, wanted: int) -> tuple[Block, int]:
        """Take rows from the lanes in turn: `wanted` of them, or to the end of some lane."""
        own = len(self._packers)
        turn = self._turn(0)
        lanes: list[list[tuple[I64, Rows]]] = [[] for _ in range(own)]
        missing: list[int] = []
        for i in range(min(own, wanted)):
            lane = (turn + i) % own
            missing += self._take(lane, np.arange(i, wanted, own), lanes[lane])
        slots: I64 | None = None
        count = used = wanted
        if missing:
            present = np.setdiff1d(np.arange(wanted), np.array(missing))
            if self._drop_last or self._failed is not None:
                self._ended = True
                slots = present[: int(np.searchsorted(present, min(missing)))]
            else:
                slots, used = self._fill_up(present, wanted, lanes)
            count = len(slots)
        ends = tuple(packer.mark() for packer in self._packers)
        block = Block(self._row, self._shard.mod, self._batch, lanes, ends, slots)
        self._row += used * self._shard.mod
        return block, count

    def _fill_up(self, present: I64, slot: int, lanes: list[list[tuple[I64, Rows]]]) -> tuple[I64, int]:
        """Some lanes are at their end: go on with the others until a batch is full, or all are."""
        slots = present.tolist()
        while not all(self._dry) and (len(slots) % self._batch_size or not slots):
            lane = self._turn(slot)
            if not self._take(lane, np.array([slot]), lanes[lane]):
                slots.append(slot)
            slot += 1
        self._ended = all(self._dry)
        return np.array(slots, np.int64), slot

    def _take(self, lane: int, slots: I64, into: list[tuple[I64, Rows]]) -> list[int]:
        """Rows of a lane for some slots. Gives the slots for which there was none."""
        got = 0
        if not self._dry[lane]:
            for rows in self._packers[lane].rows(len(slots)):
                into.append((slots[got : got + len(rows.ids)], rows))
                got += len(rows.ids)
            self._dry[lane] = got < len(slots)
            self._failed = self._failed or self._packers[lane].failed
        left: list[int] = slots[got:].tolist()
        return left

    def _turn(self, slot: int) -> int:
        """Which of this shard's lanes has the row of a slot."""
        shard = self._shard
        mine = self._row + (shard.rem - self._row) % shard.mod + slot * shard.mod
        return (mine % self._lanes - shard.rem) // shard.mod

    def _make(self, block: Block, count: int) -> list[Batch]:
        inputs = np.empty((count, self._seq_len), np.int64)
        targets = np.empty((count, self._seq_len), np.int64)
        begins: list[I64] = []
        for rows_of_lane in block.lanes:
            for slots, rows in rows_of_lane:
                at = block.targets_of(slots)
                kept = len(at) if not len(at) or at[-1] < count else _before(at, count)
                self._copy(rows, at[:kept], inputs, targets)
                if self._extras:
                    begins += self._begins(rows, at[:kept])
                rows.ids = rows.ids[:0].copy()  # the batch need not keep alive what was copied
        return self._slice(block, inputs, targets, begins)

    def _copy(self, rows: Rows, at: I64, inputs: I64, targets: I64) -> None:
        ids = rows.ids[: len(at)]
        where: Any = at
        if len(at) and at[-1] - at[0] == len(at) - 1:
            where = slice(int(at[0]), int(at[-1]) + 1)
        inputs[where] = ids[:, :-1]
        targets[where] = ids[:, 1:]
        if rows.valid is not None:
            for row, real in zip(at.tolist(), rows.valid.tolist(), strict=False):
                if real <= self._seq_len:
                    targets[row, max(0, real - 1) :] = IGNORE

    def _begins(self, rows: Rows, at: I64) -> list[I64]:
        """Where in the flattened block documents begin, and padding after them."""
        row, column = rows.boundaries()
        kept = row < len(at)
        begins = [at[row[kept]] * self._seq_len + column[kept]]
        if rows.valid is not None:
            padded = np.flatnonzero(rows.valid[: len(at)] < self._seq_len)
            begins.append(at[padded] * self._seq_len + rows.valid[padded])
        return begins

    def _slice(self, block: Block, inputs: I64, targets: I64, begins: list[I64]) -> list[Batch]:
        size, count = self._batch_size, len(inputs)
        starts: I64 | None = None
        if self._extras:
            starts = np.unique(np.concatenate([np.arange(count) * self._seq_len, *begins]))
        batches = []
        epoch = block.one_epoch()
        for number, first in enumerate(range(0, count, size)):
            last = min(first + size, count)
            batch = Batch(
                inputs[first:last], targets[first:last], block.epoch(first, last) if epoch is None else epoch,
                self._batch + number,
                _block=block, _rows=(first, last), _number=number, _tokens=(last - first) * self._seq_len,
                _state=self._state,
            )  # fmt: skip
            if starts is not None:
                batch.positions, batch.cu_seqlens = self._documents(starts, first, last)
            if self._tensors and _torch_is_here():
                batch.to_torch()
            batches.append(batch)
        return batches

    def _documents(self, starts: I64, first: int, last: int) -> tuple[I64, np.ndarray[Any, np.dtype[np.int32]]]:
        """Positions and cumulative lengths; a document that began in an earlier row begins anew."""
        lo, hi = first * self._seq_len, last * self._seq_len
        inside = starts[_before(starts, lo) : _before(starts, hi)] - lo
        bounds = np.append(inside, hi - lo)
        positions = np.arange(hi - lo) - np.repeat(inside, np.diff(bounds))
        return positions.reshape(last - first, self._seq_len), bounds.astype(np.int32)

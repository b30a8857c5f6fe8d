"""Deal rows from the lanes in turn, and make batches of them.

In:    the packers of this shard's lanes.
Out:   batches of int64 arrays, each of which knows where the stream continues after it.
Where: the producer thread, or whoever makes batches in its place (see `feed.prefetch`).
State: the number of rows dealt. Global row g is row g div lanes of lane g mod lanes.
Cost:  each token is widened twice, into inputs and targets: these share no memory, so a user may
       change one of them, and both are contiguous. Small batches are made a few at a time,
       which spreads the cost of Python over them. On the way to a device ids stay narrow; who takes batches as
       fast as they come has them widened one at a time, as each is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, Position, Unfinished, shifted, torch_is_here
from penstock.encode.rows import Marked, Packer, Rows
from penstock.types import IGNORE, Shard, Span
from penstock.watch.spans import Clock, Quiet

I64 = np.ndarray[Any, np.dtype[np.int64]]

BLOCK_TOKENS = 1 << 17
"""Batches of fewer tokens are made together, up to this many tokens: a batch that is kept keeps them all."""
LEFT_TOKENS = 1 << 20
"""The same for batches whose ids are left as they are until they are taken."""


@dataclass(slots=True)
class Block:
    """Where the rows of some batches came from, in slots: the turns in which rows are dealt."""

    row: int
    world: int
    batch: int
    lanes: list[list[tuple[I64, Rows]]]
    """For each lane of the shard, its rows and their slots."""
    ends: tuple[Marked, ...]
    """Where each lane continues after the block."""
    slots: I64 | None
    """The slots that got a row; None where all did. A slot whose lane is at its end stays empty."""

    def position(self, count: int, batches: int) -> Position:
        """Where the stream continues after `count` rows, which make `batches`."""
        used = count if self.slots is None else int(self.slots[count - 1]) + 1 if count else 0
        places = []
        for rows_of_lane, end in zip(self.lanes, self.ends, strict=True):
            mark = next(
                (
                    rows.mark(n)
                    for slots, rows in rows_of_lane
                    if (n := _before(slots, used)) < len(slots)
                ),
                end,
            )
            places.append(mark.place())
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
        lo, hi = (
            (first, last)
            if self.slots is None
            else (int(self.slots[first]), int(self.slots[last - 1]) + 1)
        )
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


@dataclass(slots=True)
class DealtFrom:
    """The rows [first, last) of a block, which end its batch number `number`."""

    block: Block
    first: int
    last: int
    number: int

    def position(self) -> Position:
        return self.block.position(self.last, self.number + 1)

    def spans(self) -> list[list[Span]]:
        return self.block.spans(self.first, self.last)


def _before(slots: I64, slot: int) -> int:
    return int(slots.searchsorted(slot))


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
        narrow: np.dtype[Any] | None = None,
        most: int,
        row: int,
        batch: int,
        state: Callable[[Position], dict[str, Any]],
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or Quiet()
        self._packers = packers
        self._shard = shard
        self._lanes = lanes
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._drop_last = drop_last
        self._extras = extras
        self._tensors = tensors and narrow is None
        self._narrow = narrow
        self._most = max(1, min(most, BLOCK_TOKENS // (batch_size * seq_len)))
        self._size = 1
        leaves = narrow is None and not extras and len(packers) == 1
        self._leaves = LEFT_TOKENS // (batch_size * seq_len) if leaves else 0
        self._row = row
        self._batch = batch
        self._state = state
        self._ended = False
        self._dry = [False] * len(packers)
        self._numbers: I64 = np.arange(0)
        self._failed: Exception | None = None

    def next(self) -> list[Batch]:
        """The next batches; none at the end of a finite stream.

        A failure is raised when everything before it has been given out, however many batches are
        made at once.
        """
        self._raise_failure()
        if self._ended:
            return []
        size, self._size = (
            self._size,
            min(2 * self._size, self._most),
        )  # the first batch does not wait for a second
        return self._next(size, leave=False)

    def at_once(self) -> list[Batch]:
        """The next batches, if they can be made without waiting for anybody; else none. Their ids may be left as they
        are: whoever takes such a batch finishes it."""
        if self._ended or self._failed is not None:
            return []
        if (
            self._leaves
            and (size := min(self._leaves, self._packers[0].at_hand() // self._batch_size))
            > self._size
        ):
            return self._next(size, leave=True)
        rows = -(-self._size * self._batch_size // len(self._packers))
        return (
            self._next(self._size, leave=False)
            if all(packer.holds(rows) for packer in self._packers)
            else []
        )

    def _next(self, size: int, *, leave: bool) -> list[Batch]:
        block, count = self._deal(size * self._batch_size)
        if self._drop_last or self._failed is not None:
            count -= count % self._batch_size
        batches: list[Batch] = []
        if count:
            with self._clock.stage("batch") as track:
                batches = self._make(block, count, leave=leave)
            track.count("pack", count)
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
        broken: list[int] = []
        """Of these, the first of each lane that failed, as opposed to one that is at its end."""
        for i, slots_of_lane in enumerate(self._slots_of(wanted)):
            lane = (turn + i) % own
            without = self._take(lane, slots_of_lane, lanes[lane])
            missing += without
            broken += without[:1] if self._packers[lane].failed is not None else []
        slots: I64 | None = None
        count = used = wanted
        if missing:
            present = np.setdiff1d(np.arange(wanted), np.array(missing))
            if self._drop_last or self._failed is not None:
                self._ended = True
                end = min(missing) if self._drop_last else min(broken, default=wanted)
                if end not in broken and self._drop_last:
                    self._failed = None  # the stream ends before it comes to that
                slots = present[: int(np.searchsorted(present, end))]
            else:
                slots, used = self._fill_up(present, wanted, lanes)
            count = len(slots)
        ends = tuple(packer.mark() for packer in self._packers)
        block = Block(self._row, self._shard.mod, self._batch, lanes, ends, slots)
        self._row += used * self._shard.mod
        return block, count

    def _slots_of(self, wanted: int) -> list[I64]:
        """The slots of each lane, for the lanes in turn."""
        if len(self._numbers) < wanted:
            self._numbers = np.arange(wanted)
        own = len(self._packers)
        return [self._numbers[i:wanted:own] for i in range(min(own, wanted))]

    def _fill_up(
        self, present: I64, slot: int, lanes: list[list[tuple[I64, Rows]]]
    ) -> tuple[I64, int]:
        """Some lanes are at their end: go on with the others until a batch is full, or all are."""
        slots = present.tolist()
        while (
            not all(self._dry)
            and self._failed is None
            and (len(slots) % self._batch_size or not slots)
        ):
            lane = self._turn(slot)
            if not self._take(lane, np.array([slot]), lanes[lane]):
                slots.append(slot)
            slot += 1
        self._ended = all(self._dry) or self._failed is not None
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

    def _make(self, block: Block, count: int, *, leave: bool) -> list[Batch]:
        made: _Wide | _Narrow | _Left
        if leave:
            made = _Left()
        elif self._narrow is not None:
            made = _Narrow(count, self._seq_len, self._narrow)
        else:
            made = _Wide(count, self._seq_len)
        begins: list[I64] = []
        for rows_of_lane in block.lanes:
            for slots, rows in rows_of_lane:
                at = block.targets_of(slots)
                kept = len(at) if not len(at) or at[-1] < count else _before(at, count)
                made.copy(rows, at[:kept])
                if self._extras:
                    begins += self._begins(rows, at[:kept])
                rows.ids = rows.ids[:0].copy()  # the batch need not keep alive what was copied
        return self._slice(block, made, count, begins)

    def _begins(self, rows: Rows, at: I64) -> list[I64]:
        """Where in the flattened block documents begin, and padding after them."""
        row, column = rows.boundaries()
        kept = row < len(at)
        begins = [at[row[kept]] * self._seq_len + column[kept]]
        if rows.valid is not None:
            padded = np.flatnonzero(rows.valid[: len(at)] < self._seq_len)
            begins.append(at[padded] * self._seq_len + rows.valid[padded])
        return begins

    def _slice(
        self, block: Block, made: _Wide | _Narrow | _Left, count: int, begins: list[I64]
    ) -> list[Batch]:
        size = self._batch_size
        starts: I64 | None = None
        if self._extras:
            starts = np.unique(np.concatenate([np.arange(count) * self._seq_len, *begins]))
        batches = []
        epoch, left = block.one_epoch(), isinstance(made, _Left)
        wrap, kind = self._tensors and not left and torch_is_here(), Unfinished if left else Batch
        for number, first in enumerate(range(0, count, size)):
            last = min(first + size, count)
            batch = kind(
                None, None, block.epoch(first, last) if epoch is None else epoch, self._batch + number,
                _origin=DealtFrom(block, first, last, number), _tokens=(last - first) * self._seq_len,
                _state=self._state,
            )  # fmt: skip
            made.fill(batch, first, last)
            if starts is not None:
                positions, lengths = self._documents(starts, first, last)
                if batch.narrow is not None:
                    batch.narrow |= {"positions": positions.astype(np.int32), "cu_seqlens": lengths}
                else:
                    batch.positions, batch.cu_seqlens = positions, lengths
            if wrap:
                batch.to_torch()
            batches.append(batch)
        return batches

    def _documents(
        self, starts: I64, first: int, last: int
    ) -> tuple[I64, np.ndarray[Any, np.dtype[np.int32]]]:
        """Positions and cumulative lengths; a document that began in an earlier row begins anew."""
        lo, hi = first * self._seq_len, last * self._seq_len
        inside = starts[_before(starts, lo) : _before(starts, hi)] - lo
        return document_fields(inside, last - first, self._seq_len)


def document_fields(
    starts: I64, rows: int, seq_len: int
) -> tuple[I64, np.ndarray[Any, np.dtype[np.int32]]]:
    """`positions` and `cu_seqlens` of a batch, given where documents (and rows) begin in it when flattened."""
    bounds = np.append(starts, rows * seq_len)
    positions = np.arange(rows * seq_len) - np.repeat(starts, np.diff(bounds))
    return positions.reshape(rows, seq_len), bounds.astype(np.int32)


class _Wide:
    """Inputs and targets of int64, for batches that stay where they are."""

    def __init__(self, count: int, seq_len: int) -> None:
        self._inputs = np.empty((count, seq_len), np.int64)
        self._targets = np.empty((count, seq_len), np.int64)
        self._seq_len = seq_len

    def copy(self, rows: Rows, at: I64) -> None:
        ids = rows.ids[: len(at)]
        where = _stretch(at)
        self._inputs[where] = ids[:, :-1]
        self._targets[where] = ids[:, 1:]
        if rows.valid is not None:
            for row, real in zip(at.tolist(), rows.valid.tolist(), strict=False):
                if real <= self._seq_len:
                    self._targets[row, max(0, real - 1) :] = IGNORE

    def fill(self, batch: Batch, first: int, last: int) -> None:
        batch.inputs, batch.targets = self._inputs[first:last], self._targets[first:last]


class _Narrow:
    """Ids in their own type and how many of each row are real: a device makes inputs and targets of them."""

    def __init__(self, count: int, seq_len: int, dtype: np.dtype[Any]) -> None:
        self._ids = np.empty((count, seq_len + 1), dtype)
        self._valid = np.full(count, seq_len + 1, np.int32)

    def copy(self, rows: Rows, at: I64) -> None:
        where = _stretch(at)
        self._ids[where] = rows.ids[: len(at)]
        if rows.valid is not None:
            self._valid[where] = rows.valid[: len(at)]

    def fill(self, batch: Batch, first: int, last: int) -> None:
        batch.narrow = {"ids": self._ids[first:last], "valid": self._valid[first:last]}


class _Left:
    """Ids as they are, of one stretch of rows."""

    def __init__(self) -> None:
        self._ids = np.empty((2, 0, 0), np.uint16)

    def copy(self, rows: Rows, at: I64) -> None:
        self._ids = shifted(rows.ids[: len(at)])

    def fill(self, batch: Batch, first: int, last: int) -> None:
        batch._left = self._ids[:, first:last]


def _stretch(at: I64) -> Any:
    """Rows that follow each other as a slice, which is quicker than a list of them."""
    if len(at) and at[-1] - at[0] == len(at) - 1:
        return slice(int(at[0]), int(at[-1]) + 1)
    return at

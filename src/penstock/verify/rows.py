"""Rows of a stream, so that two runs of it can be compared: what each is, and where it came from.

In:    batches.
Out:   a digest for each row, and one for all of them in global order; the origin of a row in words.
Where: the calling thread.
State: a digest and a line for each row of the reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.encode.batch import Batch
from penstock.types import Span


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the reference."""

    digest: bytes
    origin: str


@dataclass(slots=True)
class Stream:
    """The reference: what every trial has to give."""

    batches: list[list[Row]] = field(default_factory=list)
    ended: bool = False
    """Whether the data came to its end."""
    epoch: int = 0
    """The one that the last batch has reached."""
    _sha: Any = field(default_factory=hashlib.sha256)

    def add(self, batch: Batch) -> None:
        """One more, of all ranks' rows in global order."""
        for values in contents(batch):
            self._sha.update(values)
        rows = zip(digests(batch), batch.provenance(), strict=True)
        self.batches.append([Row(digest, origin(spans)) for digest, spans in rows])
        self.epoch = batch.epoch

    def digest(self) -> str:
        """Of inputs and targets of all rows, however they were cut into batches."""
        return str(self._sha.hexdigest())


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a trial is not what the reference was."""

    batch: int
    row: int
    """In the batch of all ranks."""
    expected: str
    got: str
    """Where the row should have come from, and where it did. The same place may have other ids."""

    def __str__(self) -> str:
        if self.expected == self.got:
            return f"batch {self.batch}, row {self.row}: {self.got} has other ids now: its text or its vocabulary changed"
        return f"batch {self.batch}, row {self.row}: expected {self.expected}; got {self.got}"


def contents(batch: Batch) -> list[bytes]:
    """For each row its inputs and targets."""
    inputs, targets = np.ascontiguousarray(batch.inputs), np.ascontiguousarray(batch.targets)
    return [row.tobytes() + target.tobytes() for row, target in zip(inputs, targets, strict=True)]


def digests(batch: Batch) -> list[bytes]:
    """For each row, short enough to keep all of them."""
    return [hashlib.sha256(values).digest() for values in contents(batch)]


def compare(
    batch: Batch | None, expected: Sequence[Row], number: int, world: int, rank: int
) -> Difference | None:
    """A rank's batch beside the rows that should be in it."""
    got = [] if batch is None else digests(batch)
    for at, row in enumerate(expected):
        if at >= len(got):
            what = "nothing: the stream has ended"
        elif got[at] != row.digest:
            assert batch is not None
            what = origin(batch.provenance()[at])
        else:
            continue
        return Difference(number, at * world + rank, row.origin, what)
    if len(got) > len(expected):
        assert batch is not None
        what = origin(batch.provenance()[len(expected)])
        return Difference(
            number, len(expected) * world + rank, "nothing: the stream ends there", what
        )
    if batch is not None and batch.index != number:
        return Difference(
            number,
            rank,
            f"a batch of this number, {number}",
            f"the same rows in number {batch.index}",
        )
    return None


def origin(spans: Sequence[Span]) -> str:
    """Where a row comes from, in words: its first document, and how many follow."""
    if not spans:
        return "nothing but padding"
    first = spans[0]
    place = (
        f"row group {first.row_group}, row {first.row}"
        if first.row_group is not None
        else f"row {first.row}"
    )
    place = f"byte {first.offset}" if first.offset is not None else place
    more = f" and {len(spans) - 1} more" if len(spans) > 1 else ""
    return f"{first.file} ({place}, tokens {first.tokens[0]} to {first.tokens[1]}{more})"

"""The plain values that the rest of the package passes around: addresses, chunks, positions.

Addresses (`FileRef`, `ChunkRef`, `Address`) say where data is and never hold any. `Documents` and
`TokenChunk` are what a worker makes of one address. `LanePosition` and `StreamPosition` say where
a stream is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Format = Literal["parquet", "jsonl", "text"]
Codec = Literal["", "gz", "zst", "bz2", "xz", "iterable"]
"""How a file is compressed; "iterable" marks an iterable instead of a file."""
Packing = Literal["concat", "best_fit", "bos"]
OnBadRecord = Literal["raise", "skip", "quarantine"]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

AUTO: Literal["auto"] = "auto"
WORD_CACHE_BYTES = 128 * MiB
"""Memory that a tokenizer's cache of words may take by default."""

IGNORE = -100
"""The target of a position that must not count in the loss; PyTorch's default `ignore_index`."""

LONGEST_STREAM = 1 << 62
"""Rows, epochs and chunks beyond this are refused as damage of a state."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the data that belongs to one reader: every `mod`-th piece, from `rem` on.

    The shards `Shard(n, 0) … Shard(n, n - 1)` are disjoint, and together they are everything.
    """

    mod: int
    rem: int

    def __post_init__(self) -> None:
        if self.mod < 1 or not 0 <= self.rem < self.mod:
            raise ConfigError(f"Shard({self.mod}, {self.rem}): needs mod >= 1 and 0 <= rem < mod")


class Member(NamedTuple):
    """One small file inside a bundle."""

    path: str
    name: str
    size: int
    etag: str = ""


def shown_address(address: str) -> str:
    """Return an address without its secrets: a login, a signature in the query."""
    # Not by urlsplit, which raises for malformed addresses: those are shown in errors too.
    if re.match(r"\s*https?://", address, re.IGNORECASE):
        return re.sub(r"://[^/]*@", "://", re.sub(r"[?#].*", "", address, flags=re.DOTALL))
    # Elsewhere an @ may be part of a name (abfss://container@account), and a ? or # of a path.
    return re.sub(r"://[^/]*:[^/]*@", "://", address)


MODIFIED = "modified "
"""Prefix of a modification date that stands in for an ETag."""


def version_change(before: str, now: str) -> str:
    """Describe a change of a file's ETag, or of the date that stands in for one."""
    what = "date" if all(each.startswith(MODIFIED) for each in (before, now)) else "ETag"
    was, is_now = (each.removeprefix(MODIFIED)[:100] or "none" for each in (before, now))
    return f"its {what} was {was}, it is {is_now}"


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file, or a bundle of small plain-text files that are read together."""

    path: str
    name: str
    """Its path below the listed folder. It survives a move, so it identifies the file in states."""
    size: int
    format: Format
    codec: Codec = ""
    members: tuple[Member, ...] = ()
    etag: str = ""
    """The server's ETag, or `MODIFIED` and a date if the server sends only that."""

    def __str__(self) -> str:
        return self.path

    @property
    def remote(self) -> bool:
        """True if the file has to be fetched."""
        return "://" in self.path

    @property
    def sequential(self) -> bool:
        """True if the file can only be read in order: its end is known once it was read."""
        return self.codec != "" and self.format != "parquet"


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """The address of a chunk: the unit of reading, tokenizing and caching."""

    file: FileRef
    index: int
    """The row group, or the number of the byte range."""
    nbytes: int
    """About how much text it holds. Used for read-ahead and windows, never for content."""
    part: int = 0
    parts: int = 1
    span: int = 1
    """A chunk may be split by rows: this covers the parts [part, part + span) of `parts`."""
    lane: int = 0
    """The lane that reads it. Lanes that share a compressed file each have a decompressor."""

    def __str__(self) -> str:
        unit = "row group" if self.file.format == "parquet" else "chunk"
        part = f" part {self.part + 1}/{self.parts}" if self.parts > 1 else ""
        return f"{self.file.path}, {unit} {self.index}{part}"

    def bounds(self, n: int) -> tuple[int, int]:
        """Return which of the chunk's `n` rows (or bytes) belong to this part: [first, last)."""
        return n * self.part // self.parts, n * (self.part + self.span) // self.parts

    def divided(self, spans: Sequence[int]) -> list[ChunkRef]:
        """Return parts of this size relation, such as 1, 3, 4: a small first one, and the rest."""
        total, out, part = sum(spans), [], 0
        for span in spans:
            at, nbytes = self.part * total + part, self.nbytes * span // total
            out.append(replace(self, part=at, parts=self.parts * total, span=span, nbytes=nbytes))
            part += span
        return out


class Address(NamedTuple):
    """Where a document is: by row group and row, or by its byte offset (group is None)."""

    file: str
    group: int | None
    row: int

    @classmethod
    def of(cls, entry: Any) -> Address:
        """Return the address of a `Span`, or of a list of file, row group or None, and row."""
        file, group, row = getattr(entry, "address", entry)
        if not (isinstance(file, str) and (group is None or is_count(group)) and is_count(row)):
            raise ValueError(f"not the address of a document: {entry!r:.80}")
        return cls(file, group, row)


class Span(NamedTuple):
    """A stretch of a row that comes from one document."""

    file: str
    row_group: int | None
    offset: int | None
    """Byte offset of the document's record, in files that have no row groups."""
    row: int
    """The row in its row group, or the document's number in its chunk."""
    tokens: tuple[int, int]
    """Which of the document's own tokens (its separator included)."""
    at: tuple[int, int]
    """Which ids of the packed row of `seq_len + 1`."""

    @property
    def address(self) -> Address:
        """The address that `TextDataset(skip=[…])` takes to leave this document out."""
        if self.offset is not None:
            return Address(self.file, None, self.offset)
        return Address(self.file, self.row_group, self.row)


class Bad(NamedTuple):
    """A record that was left out, and why."""

    address: Address
    reason: str
    detail: str


@dataclass(slots=True)
class Documents:
    """The texts of a chunk and the address of each one."""

    texts: pa.Array
    """large_string without nulls; a document that was left out is an empty string."""
    rows: np.ndarray[Any, np.dtype[np.int64]]
    """The row in the row group, or the byte offset, of each text."""
    last: bool = False
    """For sequential files: nothing follows in this file."""
    bad: list[Bad] = field(default_factory=list)
    empty: int = 0
    filtered: int = 0
    """Documents that a filter or transform left out."""
    source: Any = None
    """For iterables: their position before this chunk, as JSON."""


@dataclass(slots=True)
class TokenChunk:
    """A chunk's tokens: one binary value of ids for each document, its separator included."""

    ref: ChunkRef
    docs: pa.LargeBinaryArray
    rows: np.ndarray[Any, np.dtype[np.int64]]
    last: bool
    bad: list[Bad]
    empty: int
    text_bytes: int
    filtered: int = 0
    source: Any = None
    cached: bool = False
    """True if it comes from the token cache."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = int(self.docs.nbytes) + self.rows.nbytes

    @classmethod
    def of(
        cls, ref: ChunkRef, docs: pa.LargeBinaryArray, made_of: Documents, text_bytes: int = 0
    ) -> TokenChunk:
        """Return the tokens of documents."""
        rest = (made_of.rows, made_of.last, made_of.bad, made_of.empty)
        return cls(ref, docs, *rest, text_bytes, made_of.filtered, made_of.source)


class LanePosition(NamedTuple):
    """Where one lane continues."""

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    window: int = 0
    """Group of files, chunk in the group, and number of the window that begins there."""
    doc: int = 0
    token: int = 0
    """A document of the window, in shuffled order, and a token of it."""
    row: int = 0
    """Rows taken so far: of a best-fit group, of map-style data, or of a mixture."""
    source: Any = None
    """For iterables: their own position before the window's first chunk, as JSON."""
    counts: tuple[int, ...] = ()
    """For mixtures: rows of each part since the weights changed."""
    parts: tuple[LanePosition, ...] = ()
    """For mixtures: the position in each part."""

    def to_list(self) -> list[Any]:
        """Return JSON: seven integers, and what else there is."""
        rest = [self.source, list(self.counts), [part.to_list() for part in self.parts]]
        while rest and not rest[-1]:
            rest.pop()
        return [*self[:7], *rest]

    @classmethod
    def from_list(cls, value: Any) -> LanePosition:
        """Parse what `to_list` returned. Raise TypeError or ValueError if it is something else."""
        numbers, (source, counts, parts) = value[:7], [*value[7:], None, None, None][:3]
        counts, parts = tuple(counts or ()), tuple(map(cls.from_list, parts or ()))
        if len(numbers) != 7 or not all(map(is_count, [*numbers, *counts])):
            raise ValueError(f"a lane's position needs 7 integers ≥ 0, not {value!r:.80}")
        return cls._make([*numbers, source, counts, parts])


class StreamPosition(NamedTuple):
    """Where a rank's stream continues."""

    row: int
    """Global rows dealt, over all ranks."""
    batch: int
    """The number of the next batch."""
    lanes: tuple[LanePosition, ...] = ()
    """One for each of the rank's lanes; none for map-style data, where `row` is enough."""
    source: Any = None
    """For an iterable of samples: its own position."""


def is_count(value: Any) -> bool:
    """Return True for a non-negative integer that fits a stream."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LONGEST_STREAM

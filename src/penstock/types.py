"""Plain value types shared by the whole package: addresses, chunks, positions.

Addresses (`FileRef`, `ChunkRef`, `Address`) locate data and never hold any. Workers turn an address
into `Documents` and a `TokenChunk`. `LanePosition` and `StreamPosition` are positions in a stream.
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

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

AUTO: Literal["auto"] = "auto"
WORD_CACHE_BYTES = 128 * MiB
"""Default memory limit of a tokenizer's word cache."""

IGNORE = -100
"""The target of a position excluded from the loss; PyTorch's default `ignore_index`."""

LONGEST_STREAM = 1 << 62
"""A state with a larger row, epoch or chunk is rejected as damaged."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the data that one rank reads: every `mod`-th piece, from `rem` on.

    The shards `Shard(n, 0) … Shard(n, n - 1)` are disjoint, and together cover the data.
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
    """Return an address without secrets, such as a login or a signature in the query."""
    # Not urlsplit, which raises for malformed addresses, and errors show those too.
    if re.match(r"\s*https?://", address, re.IGNORECASE):
        return re.sub(r"://[^/]*@", "://", re.sub(r"[?#].*", "", address, flags=re.DOTALL))
    # Elsewhere an @ may be part of a name (abfss://container@account), and a ? or # of a path.
    return re.sub(r"://[^/]*:[^/]*@", "://", address)


MODIFIED = "modified "
"""Prefix of a modification date that replaces an ETag."""


def version_change(before: str, now: str) -> str:
    """Describe a change of a file's ETag, or of the date that replaces it."""
    what = "date" if all(each.startswith(MODIFIED) for each in (before, now)) else "ETag"
    was, is_now = (each.removeprefix(MODIFIED)[:100] or "none" for each in (before, now))
    return f"its {what} was {was}, it is {is_now}"


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file, or a bundle of small plain-text files that are read together."""

    path: str
    name: str
    """Its path below the listed folder. States identify the file by it, so the folder may move."""
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
        """True if the file can only be read in order: its end is unknown until it is reached."""
        return self.codec != "" and self.format != "parquet"


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """The address of a chunk: the unit of reading, tokenizing and caching."""

    file: FileRef
    index: int
    """The row group, or the number of the byte range."""
    nbytes: int
    """Approximate bytes of text, for read-ahead and windows. Does not affect the content."""
    part: int = 0
    parts: int = 1
    span: int = 1
    """A chunk may be split by rows: this one covers the parts [part, part + span) of `parts`."""
    lane: int = 0
    """The lane that reads it. Lanes that share a compressed file each have a decompressor."""

    def __str__(self) -> str:
        unit = "row group" if self.file.format == "parquet" else "chunk"
        part = f" part {self.part + 1}/{self.parts}" if self.parts > 1 else ""
        return f"{self.file.path}, {unit} {self.index}{part}"

    def bounds(self, n: int) -> tuple[int, int]:
        """Return the range [first, last) of this part among the chunk's `n` rows or bytes."""
        return n * self.part // self.parts, n * (self.part + self.span) // self.parts

    def divided(self, spans: Sequence[int]) -> list[ChunkRef]:
        """Return parts whose sizes have these proportions, such as 1, 3, 4."""
        total, out, part = sum(spans), [], 0
        for span in spans:
            at, nbytes = self.part * total + part, self.nbytes * span // total
            out.append(replace(self, part=at, parts=self.parts * total, span=span, nbytes=nbytes))
            part += span
        return out


class Address(NamedTuple):
    """The location of a document: row group and row, or byte offset (then group is None)."""

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
    """A range of a row that comes from one document."""

    file: str
    row_group: int | None
    offset: int | None
    """Byte offset of the document's record, in files that have no row groups."""
    row: int
    """The row in its row group, or the document's number in its chunk."""
    tokens: tuple[int, int]
    """The range of the document's tokens, separators included."""
    at: tuple[int, int]
    """The range in the packed row of `seq_len + 1` ids."""

    @property
    def address(self) -> Address:
        """The address that `TextDataset(skip=[…])` takes to leave this document out."""
        if self.offset is not None:
            return Address(self.file, None, self.offset)
        return Address(self.file, self.row_group, self.row)


class Bad(NamedTuple):
    """A rejected record, with the reason."""

    address: Address
    reason: str
    detail: str


@dataclass(slots=True)
class Documents:
    """The texts of a chunk and the address of each one."""

    texts: pa.Array
    """large_string without nulls; an omitted document is an empty string."""
    rows: np.ndarray[Any, np.dtype[np.int64]]
    """The row in the row group, or the byte offset, of each text."""
    last: bool = False
    """For sequential files: True for the last chunk of the file."""
    bad: list[Bad] = field(default_factory=list)
    empty: int = 0
    filtered: int = 0
    """The number of documents that a filter or transform dropped."""
    source: Any = None
    """For iterables: their position before this chunk, as JSON."""


@dataclass(slots=True)
class TokenChunk:
    """A chunk's tokens: one binary value of ids per document, separators included."""

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
    """True if it was read from the token cache or a store."""
    merged: Sequence[tuple[ChunkRef, int]] = ()
    """If it was merged from several chunks: the address and the number of documents of each."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = int(self.docs.nbytes) + self.rows.nbytes

    @property
    def parts(self) -> Sequence[tuple[ChunkRef, int]]:
        """The addresses of its documents, and the number of documents at each."""
        return self.merged or [(self.ref, len(self.docs))]

    @classmethod
    def of(
        cls, ref: ChunkRef, docs: pa.LargeBinaryArray, made_of: Documents, text_bytes: int = 0
    ) -> TokenChunk:
        """Return a chunk of tokens, with the metadata of the documents they were made from."""
        rest = (made_of.rows, made_of.last, made_of.bad, made_of.empty)
        return cls(ref, docs, *rest, text_bytes, made_of.filtered, made_of.source)


class LanePosition(NamedTuple):
    """The position at which one lane resumes."""

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    window: int = 0
    """Group of files, chunk in the group, and number of the window that begins there."""
    doc: int = 0
    token: int = 0
    """A document of the window, in shuffled order, and a token in it."""
    row: int = 0
    """Rows taken so far: of a best-fit group, of map-style data, or of a mixture."""
    source: Any = None
    """For iterables: their own position before the window's first chunk, as JSON."""
    counts: tuple[int, ...] = ()
    """For mixtures: rows of each part since the weights changed."""
    parts: tuple[LanePosition, ...] = ()
    """For mixtures: the position in each part."""

    def to_list(self) -> list[Any]:
        """Return a list for JSON: seven integers, then the other fields that are set."""
        rest = [self.source, list(self.counts), [part.to_list() for part in self.parts]]
        while rest and not rest[-1]:
            rest.pop()
        return [*self[:7], *rest]

    @classmethod
    def from_list(cls, value: Any) -> LanePosition:
        """Parse the result of `to_list`. Raise TypeError or ValueError for anything else."""
        numbers, (source, counts, parts) = value[:7], [*value[7:], None, None, None][:3]
        counts, parts = tuple(counts or ()), tuple(map(cls.from_list, parts or ()))
        if len(numbers) != 7 or not all(map(is_count, [*numbers, *counts])):
            raise ValueError(f"a lane's position needs 7 integers ≥ 0, not {value!r:.80}")
        return cls._make([*numbers, source, counts, parts])


class StreamPosition(NamedTuple):
    """The position at which a rank's stream resumes."""

    row: int
    """The number of rows returned, over all ranks."""
    batch: int
    """The number of the next batch."""
    lanes: tuple[LanePosition, ...] = ()
    """The position of each lane of the rank; none for map-style data, where `row` is enough."""
    source: Any = None
    """For an iterable of samples: its position."""


def is_count(value: Any) -> bool:
    """Return True for a non-negative integer that fits a stream."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LONGEST_STREAM

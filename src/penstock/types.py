"""The words of the design, as types: addresses, chunks, shards and batches.

Everything here is a plain value. Addresses (`FileRef`, `ChunkRef`, `Address`) say where data is and
never hold any; `Documents` and `TokenChunk` are what a worker thread makes of one address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

T = TypeVar("T")

Format = Literal["parquet", "jsonl", "text"]
Codec = Literal["", "gz", "zst", "bz2", "xz", "iterable"]
"""How a file is compressed; "iterable" stands for what is no file at all."""
Packing = Literal["concat", "best_fit", "bos"]
OnBadRecord = Literal["raise", "skip", "quarantine"]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

AUTO: Literal["auto"] = "auto"
WORD_CACHE_BYTES = 128 * MiB
"""How far a tokenizer's memory of words may grow, unless told otherwise."""

IGNORE = -100
"""The target of a position that must not count in the loss; PyTorch's default `ignore_index`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the data that belongs to one reader: every `mod`-th piece, from `rem` on.

    The shards `Shard(n, 0) … Shard(n, n - 1)` are disjoint, and their union is everything.
    """

    mod: int
    rem: int

    def __post_init__(self) -> None:
        if self.mod < 1 or not 0 <= self.rem < self.mod:
            raise ConfigError(f"Shard({self.mod}, {self.rem}): needs mod >= 1 and 0 <= rem < mod")

    def select(self, items: Sequence[T]) -> Sequence[T]:
        """This shard's items, in their order."""
        return items[self.rem :: self.mod]


class Member(NamedTuple):
    """One small file inside a bundle."""

    path: str
    name: str
    size: int


def shown_address(address: str) -> str:
    """An address without what may be secret of it: a login, a signature in the query."""
    scheme, there, rest = address.partition("://")
    if not there:
        return address
    # By hand: what is no address is shown as well, and urlsplit would raise.
    web = scheme.strip().lower() in ("http", "https")
    ends = [at for at in map(rest.find, "?#") if at >= 0] if web else []
    server, slash, path = rest[: min(ends, default=len(rest))].partition("/")
    login, _, host = server.rpartition("@")
    # Elsewhere an @ may be part of a name (abfss://container@account), and a ? or # of a path.
    return f"{scheme}://{host if web or ':' in login else server}{slash}{path}"


MODIFIED = "modified "
"""What stands before a date that stands for an ETag."""


def version_change(before: str, now: str) -> str:
    """That an ETag, or what stands for one, is another one, in words."""
    what = "date" if all(each.startswith(MODIFIED) for each in (before, now)) else "ETag"
    was, is_now = (each.removeprefix(MODIFIED)[:100] or "none" for each in (before, now))
    return f"its {what} was {was}, it is {is_now}"


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file, or a bundle of small plain-text files that are read together."""

    path: str
    name: str
    """Its path below what was listed: the part that survives a move, used wherever identity counts."""
    size: int
    format: Format
    codec: Codec = ""
    members: tuple[Member, ...] = ()
    etag: str = ""
    """What its server says of its content, where it comes from one; where that is nothing but a date, `MODIFIED` and it."""

    def __str__(self) -> str:
        return self.path

    @property
    def remote(self) -> bool:
        """Whether it has to be fetched."""
        return "://" in self.path

    @property
    def open_ended(self) -> bool:
        """Whether the number of chunks is known only once the end has been read."""
        return self.codec != "" and self.format != "parquet"


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """The address of a chunk: what is read at once."""

    file: FileRef
    index: int
    """The row group, or the number of the byte range."""
    nbytes: int
    """About how much text it holds: for read-ahead and windows, never for the stream's content."""
    part: int = 0
    parts: int = 1
    """A chunk is split only where there are fewer chunks than lanes, or one would not fit in memory."""
    reader: int = 0
    """Whose decompressor to use: lanes that share a compressed file each keep their own."""

    def __str__(self) -> str:
        unit = "row group" if self.file.format == "parquet" else "chunk"
        part = f" part {self.part + 1}/{self.parts}" if self.parts > 1 else ""
        return f"{self.file.path}, {unit} {self.index}{part}"


class Address(NamedTuple):
    """Where a document is: by row group and row, or by its byte offset (group is None)."""

    file: str
    group: int | None
    row: int


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
        """What `TextDataset(skip=[…])` takes to leave this document out."""
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
    """What a reader makes of a chunk: a column of texts and where each one stands."""

    texts: pa.Array
    """large_string without nulls; a document that was left out is an empty string."""
    rows: np.ndarray[Any, np.dtype[np.int64]]
    """The row in the row group, or the byte offset, of each text."""
    last: bool = False
    """For open-ended files: nothing follows in this file."""
    bad: list[Bad] = field(default_factory=list)
    empty: int = 0


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
    source: Any = None
    """For iterables that have a `state_dict`: what it gave before this chunk."""
    cached: bool = False
    """Whether it comes from the token cache."""
    rest: Documents | None = None
    """Documents of the chunk that were left for later: they follow as a chunk of their own."""
    whole: TokenChunk | None = None
    """Of such a rest: the chunk as it is kept."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = (
            int(self.docs.nbytes) + self.rows.nbytes
        )  # asked for often, and Arrow counts for a while

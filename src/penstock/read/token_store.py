"""Store token chunks by key, on disk or in a bucket: the cache of a run, and prepared corpora.

An entry is an Arrow IPC stream. The metadata of its schema is a header in JSON: the key, what else is
known of the chunk, and a table of blocks. A block is a record batch of whole documents with a CRC-32 of
its bytes, so that it can be read and checked alone. Entries appear whole or not at all. A folder may have
a limit in bytes, and then takes entries until it is full.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.config import write_atomically
from penstock.errors import CorruptFile
from penstock.options import RemoteOptions
from penstock.read.arrow_utils import as_numpy, integers, lengths
from penstock.read.listing import Entry
from penstock.types import Address, Bad, ChunkRef, KiB, TokenChunk

if TYPE_CHECKING:
    from penstock.read.buckets import Bucket

log = logging.getLogger("penstock")

VERSION = 2
"""Part of every key: entries of another version are never read."""
SCHEMA = pa.schema([("docs", pa.large_binary()), ("rows", pa.int64())])
"""The ids of a document as bytes, and the document's row in its source."""
EMPTY = pa.record_batch([pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
HEAD_BYTES = 64 * KiB
"""First read of a header. A larger value makes a second request to a bucket rarer."""
NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{16}-[0-9]+-[0-9a-f]{24}\.arrows")
FIELDS = ("last", "bad", "empty", "text_bytes", "filtered")
"""The fields of a `TokenChunk` besides its documents."""
LOCK = ".lock"


class Key(NamedTuple):
    """Identifies an entry by everything that determines its tokens."""

    source: str
    """The source file and its version. It is stored and shown, so it must not hold secrets."""
    chunk: int
    settings: str
    """Tokenizer, filter and all other settings that the ids depend on, as text."""

    @property
    def text(self) -> str:
        return json.dumps([VERSION, self.source, self.chunk, self.settings])

    @property
    def name(self) -> str:
        """The entry's path in its store."""
        file = _digest(self.source, 16)
        return f"{file[:2]}/{file}-{self.chunk}-{_digest(self.text, 24)}.arrows"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


class Block(NamedTuple):
    """A part of an entry that can be read separately."""

    offset: int
    """The first byte in the entry."""
    length: int
    documents: int
    id_bytes: int
    crc32: int


class Header(NamedTuple):
    """The header of an entry."""

    key: Key
    blocks: tuple[Block, ...]
    size: int
    """Bytes of the whole entry."""
    chunk: dict[str, Any]
    """The fields of the `TokenChunk` other than its documents."""


class TokenStore:
    """Token chunks in a folder or a bucket. Opens and creates nothing before the first use."""

    def __init__(
        self, place: str | os.PathLike[str], limit_bytes: int | None = None,
        block_bytes: int | None = None, best_effort: bool = False,
    ) -> None:  # fmt: skip
        """`limit_bytes` bounds a folder, `block_bytes` the ids of a block (by default an entry has one).

        `best_effort` is for caches: a damaged entry is removed and counts as absent, and the first
        write that fails is logged and ends writing. Otherwise both raise.
        """
        self.place = os.fspath(place)
        self.limit_bytes, self.block_bytes, self.best_effort = limit_bytes, block_bytes, best_effort
        self._place = _open_place(self.place, limit_bytes)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.off: str | None = None
        """Why writing has stopped; None while it has not."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.place, self.limit_bytes, self.block_bytes, self.best_effort)

    def counts(self) -> dict[str, int]:
        """Return counts of written, refused and damaged entries, by their names in `Stats`."""
        with self._lock:
            names = ("written", "written_bytes", "refused", "damaged")
            return {f"cache_{name}": self._counts[name] for name in names}

    def exists(self, key: Key) -> bool:
        """Return True if there is an entry, damaged or not."""
        return self._place.exists(key.name)

    def list(self) -> Iterator[Entry]:
        return (entry for entry in self._place.entries() if NAME.fullmatch(entry.name))

    def remove(self, names: Sequence[str]) -> None:
        self._place.remove(names)

    def read_file(self, name: str) -> bytes:
        """Return the content of a file beside the entries, such as a manifest."""
        return bytes(self._place.read(name, 0, 1 << 40))

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file beside the entries. It appears whole or not at all."""
        self._place.write(name, [data], len(data))

    def header(self, name: str) -> Header:
        """Read the header of an entry: one short read."""
        data = self._place.read(name, 0, HEAD_BYTES)
        length = 8 + int.from_bytes(data[4:8], "little")
        if length > HEAD_BYTES:
            data = self._place.read(name, 0, length)
        return _parse_header(self._path(name), data, length)

    def read_blocks(self, name: str, blocks: Sequence[Block]) -> pa.RecordBatch:
        """Read the documents and rows of adjacent blocks in one read, and verify them."""
        if not blocks:
            return EMPTY
        start, batches = blocks[0].offset, []
        data = self._place.read(name, start, blocks[-1].offset + blocks[-1].length - start)
        for block in blocks:
            body = data[block.offset - start :][: block.length]  # shorter, if the entry is
            if zlib.crc32(body) != block.crc32:
                raise CorruptFile(f"{self._path(name)} is damaged: a block has another checksum")
            batches.append(pa.ipc.read_record_batch(body, SCHEMA))
        # A single block is not copied.
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def get(self, key: Key, ref: ChunkRef) -> TokenChunk | None:
        """Return the verified chunk of a key, or None if there is none."""
        try:
            header = self.header(key.name)
            docs, rows = self.read_blocks(key.name, header.blocks).columns
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (CorruptFile, OSError) as error:
            if not self.best_effort:
                raise
            self._count(f"token cache: {error}. What cannot be read is made again.", damaged=1)
            if isinstance(error, CorruptFile):
                with suppress(OSError):  # read-only: it stays, and is refused again
                    self.remove([key.name])
            return None
        if self.best_effort:
            with suppress(OSError):  # read-only, or removed meanwhile
                os.utime(self._path(key.name))
        bad = [Bad(Address(*address), *why) for address, *why in header.chunk["bad"]]
        return TokenChunk(ref, docs, as_numpy(rows), **(header.chunk | {"bad": bad}))

    def put(self, key: Key, chunk: TokenChunk) -> Header | None:
        """Write a chunk and return its header; None if the store is full or writing has stopped."""
        try:
            if self.off is None:
                header, parts = _serialize(key, chunk, self.block_bytes)
                if self._place.write(key.name, parts, header.size):
                    self._count(written=1, written_bytes=header.size)
                    return header
        except Exception as error:
            if not self.best_effort:
                raise
            self.off = f"{error}. Free or repair it, or name another with PENSTOCK_CACHE"
        advice = "Raise RemoteOptions(cache_bytes=…), or: penstock cache clear --older-than 7d"
        full = f"is full ({self.limit_bytes} bytes). {advice}"
        why = full if self.off is None else f"is off: {self.off}."
        self._count(f"the token cache in {self.place} {why}", refused=1)
        return None

    def verify(self) -> Sequence[tuple[str, str]]:
        """Read every entry; return the names of those that are damaged, and why."""
        damaged = []
        for entry in self.list():
            try:
                header = self.header(entry.name)
                if header.size != entry.size or header.key.name != entry.name:
                    raise CorruptFile(f"{self._path(entry.name)} has another size or name")
                self.read_blocks(entry.name, header.blocks)
            except FileNotFoundError:
                continue  # removed meanwhile
            except (CorruptFile, OSError) as error:
                damaged.append((entry.name, str(error)))
        return damaged

    def _path(self, name: str) -> str:
        return f"{self.place.rstrip('/')}/{name}"

    def _count(self, why: str = "", **more: int) -> None:
        """Count events. The first of a kind that has a reason is logged."""
        with self._lock:
            new = not any(self._counts[name] for name in more)
            self._counts.update(more)
        if why and new:
            log.warning("%s", why)


# Entries


def _serialize(
    key: Key, chunk: TokenChunk, block_bytes: int | None
) -> tuple[Header, list[pa.Buffer | bytes]]:
    """Return an entry's header and bytes."""
    whole = pa.record_batch([chunk.docs, integers(chunk.rows)], schema=SCHEMA)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths(chunk.docs))])
    step = block_bytes or max(1, int(ends[-1]))
    cuts = np.searchsorted(ends, np.arange(step, ends[-1], step)).tolist()
    bodies, table = [], []
    for first, last in itertools.pairwise(sorted({0, *cuts, len(whole)})):
        body = whole.slice(first, last - first).serialize()
        bodies.append(body)
        table.append([len(body), last - first, int(ends[last] - ends[first]), zlib.crc32(body)])
    fields = {name: getattr(chunk, name) for name in FIELDS}
    header = {"key": key.text, "chunk": fields, "blocks": table}
    text = json.dumps(header, default=int).encode()  # some fields may be numpy's
    head = SCHEMA.with_metadata({"penstock": text, "crc32": str(zlib.crc32(text))}).serialize()
    return _parse_header(key.name, head, len(head)), [head, *bodies, END_OF_STREAM]


def _parse_header(path: str, data: pa.Buffer, length: int) -> Header:
    try:
        metadata = pa.ipc.read_schema(data).metadata
        if int(metadata[b"crc32"]) != zlib.crc32(metadata[b"penstock"]):
            raise ValueError("its header has another checksum")
        header = json.loads(metadata[b"penstock"])
        offset, blocks = length, []
        for size, *more in header["blocks"]:
            blocks.append(Block(offset, size, *more))
            offset += size
        key = Key(*json.loads(header["key"])[1:])
        return Header(key, tuple(blocks), offset + len(END_OF_STREAM), header["chunk"])
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error


# Places


def _open_place(place: str, limit_bytes: int | None) -> Folder | Bucket:
    if "://" not in place:
        return Folder(place, limit_bytes)
    from penstock.read.buckets import Bucket
    from penstock.read.http import Network

    return Bucket(Network(RemoteOptions()), place.rstrip("/"))


class Folder:
    """Entries in a folder that many processes may share.

    With a limit, the bytes in use are kept in a lock file. They are raised before an entry is written
    and only one process writes at a time, so the limit holds. Each process counts them once, which
    corrects what a killed process left behind.
    """

    def __init__(self, folder: str, limit_bytes: int | None) -> None:
        self._folder, self._limit, self._counted = Path(folder), limit_bytes, False

    def exists(self, name: str) -> bool:
        return os.path.exists(self._folder / name)

    def read(self, name: str, start: int, length: int) -> pa.Buffer:
        """Read a range; shorter at the end of the file."""
        # Not mapped: a failing disk raises OSError here, but would kill the process at the first
        # access to a mapped page.
        with open(self._folder / name, "rb", buffering=0) as file:
            length = max(0, min(length, os.fstat(file.fileno()).st_size - start))
            return pa.py_buffer(os.pread(file.fileno(), length, start))

    def write(self, name: str, parts: Sequence[Any], size: int) -> bool:
        path = self._folder / name
        if self._limit is None:
            write_atomically(path, parts)
            return True
        with self._locked() as lock:
            if path.exists():
                return True
            known = os.pread(lock, 20, 0) if self._counted else b""
            used, self._counted = int(known) if known else self._count(), True
            if used + size > self._limit:
                return False
            os.pwrite(lock, b"%020d" % (used + size), 0)
            write_atomically(path, parts)
            return True

    def remove(self, names: Sequence[str]) -> None:
        with self._locked() as lock:
            for name in names:
                (self._folder / name).unlink(missing_ok=True)
            os.truncate(lock, 0)  # the next writer counts again

    def entries(self) -> Iterator[Entry]:
        for path in sorted(self._folder.glob("??/*.arrows")):
            with suppress(FileNotFoundError):  # removed meanwhile
                about = path.stat()
                name = path.relative_to(self._folder).as_posix()
                yield Entry(name, about.st_size, used=about.st_mtime)

    def _count(self) -> int:
        """Return the bytes in use, after removing what killed processes left. Needs the lock."""
        for left in self._folder.glob("??/.*"):
            left.unlink(missing_ok=True)
        return sum(entry.size for entry in self.entries())

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Exclude other writers. The kernel releases the lock of a process that dies."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / LOCK).touch()
        with open(self._folder / LOCK, "rb+", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock.fileno()

"""One entry of the token cache: its name, and what is in the file.

In:    a token chunk and the text of its key.
Out:   an Arrow IPC file, uncompressed, of one record batch: the ids of each document as
       `large_binary`, and the rows where they are not simply one after the other. All else is
       JSON in the batch's metadata, under "penstock".
Where: `Image` on the thread that writes, `load` on worker threads.
State: none.
Cost:  `load` reads the file once for its checksum, and maps it. Nothing is decoded or copied.

Arrow IPC, because any tool reads it and because what is mapped is used as it lies there.
The checksum is of the whole file, its own eight digits taken as zeros: no byte is left unguarded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import CorruptFile
from penstock.read.columns import integers
from penstock.types import Address, Bad, ChunkRef, KiB, MiB, TokenChunk

VERSION = 1
"""Part of every key: entries of another version are never looked at."""
FIELD = b"penstock"
BLANK = "0" * 8
MARK = b'{"crc32":"'
"""What comes before the checksum. In JSON no string can hold it: its quotes would be escaped."""
HEAD_BYTES = 64 * KiB
"""Where the checksum is: after the schema, which is always the same."""
BLOCK_BYTES = MiB
NAME = re.compile(r"([0-9a-f]{16})-([0-9]+)-([0-9a-f]{24})\.arrow")
TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Key:
    """What an entry is found by."""

    file: str
    """Stands for the file's identity: 16 hex digits."""
    index: int
    digest: str
    """Stands for everything that decides the ids: 8 hex digits for what the chunks of a run have in common, 16 for all."""
    text: str
    """All of it, kept in the entry: what it says decides, not the digests."""

    @property
    def file_id(self) -> str:
        """The file's name and version, as given."""
        return str(json.loads(self.text)[1])

    @property
    def kind(self) -> str:
        """Stands for all that is neither file nor chunk: tokenizer and settings."""
        return self.digest[:8]

    @property
    def name(self) -> str:
        """The entry's path below the folder of all entries."""
        return f"{self.file[:2]}/{self.file}-{self.index}-{self.digest}.arrow"


def make_key(file_id: str, index: int, rest: str) -> Key:
    """The key of a chunk of a file. `rest` is everything else that decides the ids."""
    text = json.dumps([VERSION, file_id, index, rest])
    return Key(_hex(file_id, 16), index, _hex(rest, 8) + _hex(text, 16), text)


def read_key(text: str) -> Key:
    """The key that a text describes; ValueError if it describes none."""
    parts = json.loads(text)
    if (
        not isinstance(parts, list)
        or [type(part) for part in parts] != [int, str, int, str]
        or parts[0] != VERSION
    ):
        raise ValueError("not the key of an entry")
    return make_key(*parts[1:])


def _hex(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


class Entry(NamedTuple):
    """An entry as the folder shows it, unopened."""

    where: str
    file: str
    chunk: int
    digest: str
    size: int
    used: float
    """When it was last written or read, to the minute: its modification time."""

    @property
    def path(self) -> Path:
        return Path(self.where)


def entries(folder: Path) -> Iterator[Entry]:
    """The entries of a cache folder. What vanishes meanwhile is left out."""
    for item, status in listing(folder / "tokens"):
        if entry := as_entry(item, status):
            yield entry


def as_entry(item: os.DirEntry[str], status: os.stat_result) -> Entry | None:
    """What a file's name says of it, if it is an entry."""
    if (found := NAME.fullmatch(item.name)) is None:
        return None
    file, chunk, digest = found.groups()
    return Entry(item.path, file, int(chunk), digest, status.st_size, status.st_mtime)


def listing(tokens: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The files in the folders of entries, temporary ones too."""
    try:
        folders = [item.path for item in os.scandir(tokens) if item.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for folder in sorted(folders):
        try:
            items = list(os.scandir(folder))
        except FileNotFoundError:
            continue
        for item in items:
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield item, status


class Image:
    """What an entry will be: its size at once, its bytes when asked for."""

    def __init__(self, text: str, chunk: TokenChunk) -> None:
        import numpy as np
        import pyarrow as pa

        rows, columns = chunk.rows, {"docs": chunk.docs}
        first = int(rows[0]) if len(rows) else 0
        # The rows of a row group are nearly always 0, 1, 2, …: two numbers instead of eight bytes each.
        plain = np.array_equal(rows, np.arange(first, first + len(rows)))
        if not plain:
            columns["rows"] = integers(rows)
        self._batch = pa.record_batch(columns)
        meta = {
            "crc32": BLANK,
            "key": text,
            "rows": [first, first + len(rows)] if plain else None,
            "last": bool(chunk.last),
            "empty": int(chunk.empty),
            "text_bytes": int(chunk.text_bytes),
            "bad": [[*bad.address, bad.reason, bad.detail] for bad in chunk.bad],
        }
        self._meta = json.dumps(meta, separators=(",", ":"))
        counted = pa.MockOutputStream()
        self._write(counted)
        self.size = counted.size()

    def pieces(self) -> list[bytes | memoryview]:
        """The bytes, in pieces that follow each other."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        self._write(sink)
        blank = memoryview(sink.getvalue())
        at = bytes(blank[:HEAD_BYTES]).index(MARK) + len(MARK)
        return [blank[:at], f"{zlib.crc32(blank):08x}".encode(), blank[at + len(BLANK) :]]

    def _write(self, sink: Any) -> None:
        import pyarrow as pa

        with pa.ipc.new_file(sink, self._batch.schema) as writer:
            writer.write_batch(self._batch, {FIELD: self._meta})


def load(path: Path, text: str, ref: ChunkRef) -> tuple[TokenChunk, float]:
    """The chunk in an entry, mapped, and when it was used last. CorruptFile if it is not what was written.

    The file is read before it is mapped: a disk that fails then raises OSError, where the first
    look at a mapped page would end the process. Once mapped, it may be removed by anybody.
    """
    import pyarrow as pa

    with open(path, "rb", buffering=0) as file:
        used = os.fstat(file.fileno()).st_mtime
        digits = _check(path, file)
    try:
        with pa.memory_map(os.fsencode(path)) as source, pa.ipc.open_file(source) as reader:
            batch, custom = reader.get_batch_with_custom_metadata(0)
        meta = json.loads(custom[FIELD])
        if meta["crc32"] != digits:
            raise CorruptFile(f"{path}: replaced while it was read")
        if meta["key"] != text:
            raise CorruptFile(f"{path}: holds other tokens than its name says")
        return _chunk(meta, batch, ref), used
    except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        raise CorruptFile(f"{path}: not an entry of the token cache: {error}") from error


def _chunk(meta: dict[str, Any], batch: Any, ref: ChunkRef) -> TokenChunk:
    import numpy as np

    docs = batch.column("docs")
    rows = (
        np.arange(*meta["rows"], dtype=np.int64)
        if meta["rows"]
        else batch.column("rows").to_numpy()
    )
    bad = [
        Bad(Address(file, group, row), reason, detail)
        for file, group, row, reason, detail in meta["bad"]
    ]
    if len(rows) != len(docs):
        raise ValueError(f"{len(rows)} rows for {len(docs)} documents")
    return TokenChunk(ref, docs, rows, meta["last"], bad, meta["empty"], meta["text_bytes"])


def check(path: Path) -> Key:
    """Read an entry and compare its checksum. Its key, or CorruptFile, or OSError."""
    with open(path, "rb", buffering=0) as file:
        _check(path, file)
    key = describe(path)
    if path.name != Path(key.name).name:
        raise CorruptFile(f"{path}: holds other tokens than its name says")
    return key


def describe(path: Path) -> Key:
    """The key in an entry, from its beginning and unchecked; CorruptFile if there is none."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        for begin in (head, None):
            data = head + file.read() if begin is None else begin
            at = data.find(MARK)
            try:
                meta, _ = json.JSONDecoder().raw_decode(
                    data[at:].decode("latin-1") if at >= 0 else ""
                )
                return read_key(meta["key"])
            except (ValueError, KeyError, TypeError) as error:
                why = error
    raise CorruptFile(f"{path}: not an entry of the token cache: {why}") from why


def _check(path: Path, file: FileIO) -> str:
    """The checksum in the file, if it is that of the file."""
    block = memoryview(bytearray(BLOCK_BYTES))
    n = _fill(file, block)
    at = bytes(block[: min(n, HEAD_BYTES)]).find(MARK) + len(MARK)
    digits = bytes(block[at : at + len(BLANK)]).decode("latin-1")
    if at < len(MARK) or at + len(BLANK) > n:
        raise CorruptFile(f"{path}: cut off, or not an entry of the token cache")
    block[at : at + len(BLANK)] = BLANK.encode()
    found = 0
    while n:
        found = zlib.crc32(block[:n], found)
        n = _fill(file, block)
    if digits != f"{found:08x}":
        raise CorruptFile(f"{path}: its checksum is {found:08x}, and {digits!r} was written")
    return digits


def _fill(file: FileIO, block: memoryview) -> int:
    """Read a whole block, or what is left."""
    n = 0
    while n < len(block) and (more := file.readinto(block[n:])):
        n += more
    return n

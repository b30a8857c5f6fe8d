"""The footers of Parquet files, wherever these are.

In:    a `FileRef`.
Out:   its metadata.
Where: worker and fetch threads.
State: the last bytes of small remote files, which are often all there is to them; footers of
       remote files are kept on disk, and fetched once for all processes of a host.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import CorruptFile
from penstock.read.columns import integers
from penstock.read.storage import FetchedFile, PlainFile, is_damage
from penstock.types import FileRef, KiB, MiB

if TYPE_CHECKING:
    from penstock.read.kept import Kept
    from penstock.read.remote import RemoteFiles

MAGIC = b"PAR1"
SMALL = 256 * KiB
"""A file up to this size is fetched whole with its footer: one round trip instead of two."""
SMALL_BYTES = 32 * MiB
"""What small files may take in memory."""
MAX_SIZE = 1 << 46
"""What a process can address is not much more, and no file is as long; a server may say so."""
MAX_FOOTER = 256 * MiB
"""A longer one is none: its length is damaged, or it was made to fill the memory."""


def column_range(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where a column of a row group lies: its start and length."""
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        start = min(start, column.dictionary_page_offset)
    return start, column.total_compressed_size


def parse_footer(file: FileRef, source: Any) -> pq.FileMetaData:
    """The metadata at the end of `source`."""
    try:
        footer = pq.read_metadata(source)
        _ = footer.schema.to_arrow_schema()  # its names may be no text
        _look_at_columns(footer, os.path.getsize(source) if isinstance(source, str) else file.size)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise
        raise damaged(file, str(error)) from error
    # A damaged footer may still parse: what it says must at least be possible.
    rows = sum(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    if rows != footer.num_rows:
        raise damaged(file, f"its row groups have {rows} rows, the whole has {footer.num_rows}")
    return footer


def _look_at_columns(footer: pq.FileMetaData, size: int) -> None:
    """Have Arrow look at all columns of all row groups, in the one way in which it raises what it finds.

    To ask for one that does not fit the schema would end the process: there, an exception of its own that
    nobody catches. Reading catches it, and first works out where everything lies.
    """
    found = _found_in_zeros(footer, size)
    if found is not None and str(found) != _found_in_a_sound_file():
        raise found


def _found_in_zeros(footer: pq.FileMetaData, size: int) -> Exception | None:
    """What Arrow says of a file that has nothing but zeros before its footer.

    Not by way of a file of Python's: Arrow would ask for its bytes on threads of its own, and one that still holds on to
    something of Python's when the interpreter ends takes the process down with it. Zeros in memory are read at once, and
    take none: only as much address space as the file is long.
    """
    zeros = mmap.mmap(-1, min(size, MAX_SIZE), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    opened = pq.ParquetFile(pa.BufferReader(zeros), metadata=footer, pre_buffer=True)
    try:
        opened.reader.read_row_groups(list(range(footer.num_row_groups)), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        return error.with_traceback(None)  # which would hold on to the zeros
    finally:
        opened.close(force=True)
    return None


@cache
def _found_in_a_sound_file() -> str:
    """The same of a file whose columns are as they should be, in the words of this Arrow."""
    batch = pa.RecordBatch.from_arrays([integers(np.zeros(1, np.int64))], ["a"])
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, batch.schema) as writer:
        writer.write_batch(batch)
    whole = sink.getvalue()
    return str(_found_in_zeros(pq.read_metadata(pa.BufferReader(whole)), whole.size))


def damaged(file: FileRef, why: str) -> CorruptFile:
    return CorruptFile(
        f"{file.path} is no readable Parquet file ({file.size} bytes): {why}. "
        "It is damaged or was cut short: fetch it again, or leave it out."
    )


class RemoteFooters:
    """The footers of remote files: fetched once, kept on disk."""

    def __init__(self, remote: RemoteFiles, kept: Kept | None) -> None:
        self._remote = remote
        self._kept = kept
        self._lock = threading.Lock()
        self._small: OrderedDict[str, bytearray] = OrderedDict()
        self._small_bytes = 0

    def footer(self, file: FileRef) -> pq.FileMetaData:
        """A file's metadata. What cannot be parsed is fetched a second time before it is believed."""
        if (
            self._kept is None or not file.etag
        ):  # nothing would tell that the file is another one by now
            tail = self._fetch(file)
        else:
            stop = self._remote.closing
            tail = self._kept.once(
                "footers", _key(file), lambda: self._fetch(file), wait_s=30.0, stop=stop
            )
        try:
            return self._parse(file, tail)
        except CorruptFile:
            again = self._fetch(file)
            footer = self._parse(file, again)
            if self._kept is not None and file.etag:
                self._kept.put("footers", _key(file), again)
            return footer

    def small(self, file: FileRef) -> bytearray | None:
        """The whole of a small file, if it was fetched with its footer."""
        with self._lock:
            return self._small.get(file.path)

    def _parse(self, file: FileRef, kept: bytes) -> pq.FileMetaData:
        etag, _, tail = kept.partition(b"\n")
        if not tail.endswith(MAGIC):
            raise damaged(file, f"it ends in {tail[-4:]!r} instead of {MAGIC!r}")
        footer = parse_footer(file, pa.BufferReader(tail))
        if not file.etag:
            # All that tells whether the bytes fetched today are of the file that this footer was of.
            self._remote.expect(file, etag.decode("utf-8", "replace"))
        return footer

    def _fetch(self, file: FileRef) -> bytes:
        """The ETag that the file came with, a newline, and its last bytes from the footer on."""
        if file.size < 12:
            raise damaged(file, "it is too short")
        guess = (
            file.size
            if file.size <= SMALL
            else min(file.size, max(64 * KiB, min(file.size // 1000, 2 * MiB)))
        )
        tail = self._remote.read(file, file.size - guess, guess)
        need = int.from_bytes(tail[-8:-4], "little") + 8
        if tail.endswith(MAGIC) and guess < need <= min(file.size, MAX_FOOTER):
            tail = self._remote.read(file, file.size - need, need - guess) + tail
        if guess == file.size:
            self._keep_small(file, tail)
        footer = tail[-need:] if tail.endswith(MAGIC) and need <= len(tail) else tail[-8:]
        return self._remote.etag(file).encode() + b"\n" + bytes(footer)

    def _keep_small(self, file: FileRef, data: bytearray) -> None:
        with self._lock:
            self._small_bytes += len(data) - len(self._small.pop(file.path, b""))
            self._small[file.path] = data
            while self._small_bytes > SMALL_BYTES:
                self._small_bytes -= len(self._small.popitem(last=False)[1])


def _key(file: FileRef) -> str:
    return f"{file.path}\n{file.size}\n{file.etag}"


class AsFile:
    """What Arrow needs of a file, over the parts of it that are here. Arrow calls it with the GIL held."""

    closed = False

    def __init__(self, size: int, file: FetchedFile | PlainFile) -> None:
        self._size = size
        self._file = file
        self._at = 0

    def read(self, n: int = -1) -> bytes:
        n = self._size - self._at if n is None or n < 0 else min(n, max(0, self._size - self._at))
        data = self._file.read(self._at, n)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        return

    def flush(self) -> None:
        return

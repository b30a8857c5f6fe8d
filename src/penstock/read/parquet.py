"""Read columns of one Parquet row group, on disk or remote.

Decodes row groups a few rows at a time, so that a decompression bomb raises before it fills the
memory. Keeps the footers of remote files in the metadata cache.
"""

from __future__ import annotations

import io
from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import CorruptFile, SourceError
from penstock.read import ReadSettings
from penstock.read.arrow_utils import is_text, widened
from penstock.read.listing import MetadataCache
from penstock.read.storage import AnyFile, is_damage
from penstock.read.validation import filter_columns, filter_groups
from penstock.types import ChunkRef, FileRef, KiB, MiB

if TYPE_CHECKING:
    from penstock.read.remote_files import RemoteFiles

MAX_CHUNK_BYTES = 256 * MiB
MAX_FOOTER = 256 * MiB
"""A longer footer counts as damaged."""
STEP_ROWS, STEP_BYTES = 1024, 64 * MiB
"""Rows and bytes that are decoded at once."""


class Footer(NamedTuple):
    """The footer of a file, and the columns to read."""

    meta: pq.FileMetaData
    names: list[str]
    """The columns to read, the text first."""
    leaves: list[int]
    """Their indices among the leaf columns."""
    matching: Container[int]
    """The row groups that may have rows that pass the filter."""

    def rows(self, group: int) -> int:
        return int(self.meta.row_group(group).num_rows)

    def text_bytes(self, group: int) -> int:
        """Return the decompressed size of the text column in a row group."""
        return int(self.meta.row_group(group).column(self.leaves[0]).total_uncompressed_size)

    def parts(self, group: int) -> int:
        """Return the number of chunks in a row group: more than one if it is too large."""
        wanted = -(-self.text_bytes(group) // MAX_CHUNK_BYTES)
        return max(1, min(self.rows(group), wanted))

    def chunks(self, file: FileRef) -> list[ChunkRef]:
        """Return the chunks of the file."""
        refs = []
        for group in range(self.meta.num_row_groups):
            parts = self.parts(group)
            size = self.text_bytes(group) // parts
            refs += [ChunkRef(file, group, size, part, parts) for part in range(parts)]
        return refs

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """Return the start and length of each column to read in a row group."""
        ranges = []
        for leaf in self.leaves:
            column = self.meta.row_group(group).column(leaf)
            start = column.dictionary_page_offset or column.data_page_offset
            ranges.append((min(start, column.data_page_offset), column.total_compressed_size))
        return ranges


def read_chunk(
    ref: ChunkRef, footer: Footer, opened: AnyFile, settings: ReadSettings
) -> tuple[int, pa.Table]:
    """Return the number of the first row of a chunk, and its columns, the text first."""
    file, names, rows = ref.file, footer.names, footer.rows(ref.index)
    lo, hi = ref.bounds(rows)
    limit, encoded = int(settings.max_ratio * file.size) + 64 * MiB, footer.text_bytes(ref.index)
    # Every row may refer to one dictionary value that is as long as all the encoded bytes.
    most = min(STEP_BYTES * rows, limit) // max(1, encoded)
    step = max(1, min(STEP_ROWS, most))
    batches, have, at = [], 0, 0
    # Not memory-mapped, because a mapped file that shrinks kills the process.
    source = pa.PythonFile(RangeFile(file.size, opened), mode="r")
    try:
        # Not pre-buffered, because that would read on an Arrow thread, unmeasured.
        parquet = pq.ParquetFile(
            source, metadata=footer.meta, page_checksum_verification=True, pre_buffer=False
        )
        for batch in parquet.iter_batches(step, [ref.index], names, use_threads=False):
            first, at = at, at + len(batch)
            columns = [batch.column(name) for name in names]
            columns[0] = widened(columns[0])
            have += columns[0].nbytes
            if have > limit:
                advice = "If the data is valid, store it with less compression."
                raise CorruptFile(f"{ref}: {file.size} bytes decode to more than {limit}. {advice}")
            if at > lo:
                columns = [column[max(0, lo - first) : hi - first] for column in columns]
                batches.append(pa.RecordBatch.from_arrays(columns, names))
            if at >= hi:
                break
    except (pa.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        raise CorruptFile(f"{ref} cannot be read: {error!s:.500}") from error
    if at < hi:
        raise CorruptFile(f"{ref}: the footer declares {rows} rows, but there are {at}")
    if not batches:
        schema = footer.meta.schema.to_arrow_schema()
        return lo, pa.schema([schema.field(name) for name in names]).empty_table()
    return lo, pa.Table.from_batches(batches)


# Footers


def load_footer(
    settings: ReadSettings, remote: RemoteFiles | None, cache: MetadataCache | None, file: FileRef
) -> Footer:
    """Return the checked footer of a file. Fetch a damaged one a second time before raising."""
    if not file.remote:
        return _parse(file, file.path, settings)
    assert remote is not None
    # Without an ETag, a change of the file cannot be detected.
    cache = cache if file.etag else None
    key = f"{file.path}\n{file.size}\n{file.etag}"
    kept = None if cache is None else cache.get("footers", key)
    data = kept or _tail(file, remote)
    try:
        footer = _parse(file, pa.BufferReader(data), settings)
    except CorruptFile:
        data = _tail(file, remote)
        footer = _parse(file, pa.BufferReader(data), settings)
    if cache is not None and data is not kept:
        cache.put("footers", key, data)
    return footer


def _tail(file: FileRef, remote: RemoteFiles) -> bytes:
    size = min(file.size, max(64 * KiB, min(file.size // 1000, 2 * MiB)))
    tail = remote.read(file, file.size - size, size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if size < length <= min(file.size, MAX_FOOTER):
        tail = remote.read(file, file.size - length, length - size) + tail
    return bytes(tail[-length:])


def _parse(file: FileRef, source: Any, settings: ReadSettings) -> Footer:
    try:
        meta = pq.read_metadata(source)
        schema = meta.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise
        raise _damaged(file, str(error)) from error
    field, found = settings.text_field, schema.names
    if found.count(field) != 1:
        has = f"has {'two columns' if field in found else 'no column'} {field!r}"
        known = ", ".join(found)
        raise SourceError(f"{file.path} {has}; it has {known}. Name one: text_field=…")
    if not is_text(kind := schema.field(field).type):
        wrong = f"column {field!r} is {kind}, not text"
        raise SourceError(f"{file.path}: {wrong}. Name another: text_field=…")
    kept = settings.filter
    others = [] if kept is None else filter_columns(kept, schema, file.path)
    others = others if settings.transform is None else found
    names = [field, *(name for name in others if name != field)]
    leaves = [meta.schema.column(i).path.partition(".")[0] for i in range(meta.num_columns)]
    numbers = [i for name in names for i, leaf in enumerate(leaves) if leaf == name]
    groups = range(meta.num_row_groups)
    matching = groups if kept is None else filter_groups(kept, meta)
    footer = Footer(meta, names, numbers, matching)
    # A damaged footer may parse, but its numbers do not add up.
    ends = [(*each, sum(each)) for group in groups for each in footer.ranges(group)]
    inside = all(min(each) >= 0 and each[2] <= file.size for each in ends)
    if not inside or sum(map(footer.rows, groups)) != meta.num_rows:
        raise _damaged(file, "its row groups do not add up")
    return footer


def _damaged(file: FileRef, why: str) -> CorruptFile:
    return CorruptFile(
        f"{file.path} is not a readable Parquet file ({file.size} bytes): {why}. "
        "It is damaged or was cut short: fetch it again, or leave it out."
    )


class RangeFile(io.RawIOBase):
    """A file object for Arrow that reads ranges of a file."""

    def __init__(self, size: int, file: AnyFile) -> None:
        self._size, self._file, self._at = size, file, 0

    def read(self, n: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._file.read(self._at, left if n is None or n < 0 else min(n, left))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readable(self) -> bool:
        return True

    seekable = readable

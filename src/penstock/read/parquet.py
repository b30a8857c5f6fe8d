"""Read columns of one Parquet row group, on disk or remote.

Row groups are decoded in steps of some rows, which ends a decompression bomb before it fills the memory.
Footers of remote files are kept in the metadata cache.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import CorruptFile, SourceError
from penstock.read.arrow_utils import is_text, widened
from penstock.read.settings import ReadSettings
from penstock.read.storage import (
    BombError,
    Bytes,
    FetchedFile,
    PlainFile,
    expansion_limit,
    is_damage,
)
from penstock.types import ChunkRef, FileRef, KiB, MiB
from penstock.watch.stage_timer import Clock

if TYPE_CHECKING:
    from penstock.read.metadata_cache import MetadataCache
    from penstock.read.remote_files import RemoteFiles

FOOTERS = 256
"""Footers kept in memory: more than the files whose chunks are read in turn."""
MAX_FOOTER = 256 * MiB
"""A longer footer is damage."""
STEP_ROWS, STEP_BYTES = 1024, 64 * MiB
"""Rows and bytes that are decoded at once."""


class Footer(NamedTuple):
    """What is known of a file."""

    meta: pq.FileMetaData
    names: list[str]
    """The columns to read, the text first."""
    leaves: list[int]
    """Their numbers among the leaf columns."""

    def rows(self, group: int) -> int:
        return int(self.meta.row_group(group).num_rows)

    def text_bytes(self, group: int) -> int:
        """Return the decompressed size of the text column in a row group."""
        return int(self.meta.row_group(group).column(self.leaves[0]).total_uncompressed_size)

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """Return the start and length of each column to read in a row group."""
        ranges = []
        for leaf in self.leaves:
            column = self.meta.row_group(group).column(leaf)
            start = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset:
                start = min(start, column.dictionary_page_offset)
            ranges.append((start, column.total_compressed_size))
        return ranges


class ParquetReader:
    """The Parquet files of one dataset."""

    def __init__(
        self,
        settings: ReadSettings,
        max_chunk_bytes: int,
        remote: RemoteFiles | None = None,
        cache: MetadataCache | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings, self._max_chunk_bytes = settings, max_chunk_bytes
        self._remote, self._cache, self._clock = remote, cache, clock
        self._lock = threading.Lock()
        self._footers: OrderedDict[str, Footer] = OrderedDict()

    def inspect(self, file: FileRef) -> list[ChunkRef]:
        """Return the file's row groups; those too large to decode at once are divided."""
        footer = self.footer(file)
        refs = []
        for group in range(footer.meta.num_row_groups):
            start, length = footer.ranges(group)[0]
            if min(start, length) < 0 or start + length > file.size:
                end = start + length
                raise _damaged(file, f"row group {group} has text at bytes {start} to {end}")
            parts = self.parts_of(file, group)
            size = footer.text_bytes(group) // parts
            refs += [ChunkRef(file, group, size, part, parts) for part in range(parts)]
        return refs

    def parts_of(self, file: FileRef, group: int) -> int:
        """Return into how many chunks a row group is divided."""
        footer = self.footer(file)
        wanted = -(-footer.text_bytes(group) // self._max_chunk_bytes)
        return max(1, min(footer.rows(group), wanted))

    def may_match(self, ref: ChunkRef) -> bool:
        """Return False if no row of a row group can pass the filter."""
        row_filter = self._settings.filter
        group = self.footer(ref.file).meta.row_group(ref.index)
        return row_filter is None or row_filter.may_match(group)

    def read(self, ref: ChunkRef, fetched: Sequence[Bytes] = ()) -> tuple[int, pa.Table]:
        """Return the columns of a chunk, the text first, and the first row's number."""
        file, footer = ref.file, self.footer(ref.file)
        rows, size = footer.rows(ref.index), footer.text_bytes(ref.index)
        lo, hi = ref.bounds(rows)
        step = max(16, min(STEP_ROWS, STEP_BYTES * rows // max(1, size)))
        limit = expansion_limit(file, self._settings.max_ratio)
        batches, have, at = [], 0, 0
        try:
            # Not buffered ahead: that would read on a thread of Arrow's, unmeasured.
            opened = pq.ParquetFile(
                self._open(ref, footer, fetched), metadata=footer.meta,
                page_checksum_verification=True, pre_buffer=False,
            )  # fmt: skip
            for batch in opened.iter_batches(
                step, row_groups=[ref.index], columns=footer.names, use_threads=False
            ):
                first, at = at, at + len(batch)
                columns = [batch.column(name) for name in footer.names]
                columns[0] = widened(columns[0])
                have += columns[0].nbytes
                if have > limit:
                    raise BombError(
                        f"{ref}: {file.size} bytes on disk decode to more than {limit}. "
                        "If this is honest data, store it with less compression."
                    )
                if at > lo:
                    columns = [column[max(0, lo - first) : hi - first] for column in columns]
                    batches.append(pa.RecordBatch.from_arrays(columns, footer.names))
                if at >= hi:
                    break
        except (pa.ArrowException, OSError) as error:
            if not is_damage(error):
                raise
            why = str(error).strip() or type(error).__name__
            raise CorruptFile(f"{ref} cannot be read: {why}") from error
        if at < hi:
            raise CorruptFile(f"{ref}: the footer promises {rows} rows, there are {at}")
        if not batches:
            schema = footer.meta.schema.to_arrow_schema()
            return lo, pa.schema([schema.field(name) for name in footer.names]).empty_table()
        return lo, pa.Table.from_batches(batches)

    def _open(self, ref: ChunkRef, footer: Footer, fetched: Sequence[Bytes]) -> Any:
        # Not memory-mapped: a file that shrinks under a map kills the process.
        opened: PlainFile | FetchedFile = PlainFile(ref.file, self._clock)
        if ref.file.remote:
            assert self._remote is not None
            starts = [start for start, _ in footer.ranges(ref.index)]
            opened = FetchedFile(ref.file, self._remote, [*zip(starts, fetched, strict=True)])
        return pa.PythonFile(RangeFile(ref.file.size, opened), mode="r")

    # Footers

    def footer(self, file: FileRef) -> Footer:
        """Return the footer of a file, checked."""
        with self._lock:
            if (known := self._footers.get(file.path)) is not None:
                self._footers.move_to_end(file.path)
                return known
        footer = self._fetch(file) if file.remote else self._parse(file, file.path)
        with self._lock:
            self._footers[file.path] = footer
            if len(self._footers) > FOOTERS:
                self._footers.popitem(last=False)
        return footer

    def _fetch(self, file: FileRef) -> Footer:
        """Return the footer of a remote file. It is fetched a second time before damage is believed."""
        # Without an ETag a change of the file would not be noticed.
        cache = self._cache if file.etag else None
        key = f"{file.path}\n{file.size}\n{file.etag}"
        kept = None if cache is None else cache.get("footers", key)
        try:
            data = kept or self._tail(file)
            footer = self._parse(file, pa.BufferReader(data))
        except CorruptFile:
            data = self._tail(file)
            footer = self._parse(file, pa.BufferReader(data))
        if cache is not None and data is not kept:
            cache.put("footers", key, data)
        return footer

    def _tail(self, file: FileRef) -> bytes:
        assert self._remote is not None
        size = min(file.size, max(64 * KiB, min(file.size // 1000, 2 * MiB)))
        tail = self._remote.read(file, file.size - size, size)
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if size < length <= min(file.size, MAX_FOOTER):
            tail = self._remote.read(file, file.size - length, length - size) + tail
        return bytes(tail[-length:])

    def _parse(self, file: FileRef, source: Any) -> Footer:
        try:
            meta = pq.read_metadata(source)
            schema = meta.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise
            raise _damaged(file, str(error)) from error
        # A damaged footer may still parse, but not add up.
        rows = sum(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
        if rows != meta.num_rows:
            raise _damaged(file, f"its row groups have {rows} rows, the whole has {meta.num_rows}")
        settings, found = self._settings, schema.names
        field = settings.text_field
        if found.count(field) != 1:
            has = "two columns" if field in found else "no column"
            raise SourceError(
                f"{file.path} has {has} {field!r}; it has {', '.join(found)}. Name one: text_field=…"
            )
        if not is_text(kind := schema.field(field).type):
            raise SourceError(
                f"{file.path}: column {field!r} is {kind}, not text. Name another: text_field=…"
            )
        others = found if settings.transform is not None else []
        if settings.transform is None and settings.filter is not None:
            others = settings.filter.columns(schema, file.path)
        names = [field, *(name for name in others if name != field)]
        leaves = [meta.schema.column(i).path.partition(".")[0] for i in range(meta.num_columns)]
        numbers = [i for name in names for i, leaf in enumerate(leaves) if leaf == name]
        return Footer(meta, names, numbers)


def _damaged(file: FileRef, why: str) -> CorruptFile:
    return CorruptFile(
        f"{file.path} is not a readable Parquet file ({file.size} bytes): {why}. "
        "It is damaged or was cut short: fetch it again, or leave it out."
    )


class RangeFile(io.RawIOBase):
    """A file object for Arrow, over a file that is read by ranges."""

    def __init__(self, size: int, file: FetchedFile | PlainFile) -> None:
        self._size, self._file, self._at = size, file, 0

    def read(self, n: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._file.read(self._at, left if n is None or n < 0 else min(n, left))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    seekable = readable

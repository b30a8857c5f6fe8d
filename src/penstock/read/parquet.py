"""Read columns of one Parquet row group, on disk or remote.

Row groups are decoded in steps of some rows, which ends a decompression bomb before it fills the memory.
Footers of remote files are kept on disk and fetched once for all processes of a host.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import CorruptFile, SourceError
from penstock.read.arrow_utils import is_text, widened
from penstock.read.storage import BombError, Bytes, FetchedFile, PlainFile, Storage, is_damage
from penstock.types import ChunkRef, FileRef, KiB, MiB

if TYPE_CHECKING:
    from penstock.read.filters import RowFilter
    from penstock.read.metadata_cache import MetadataCache

FOOTERS = 256
"""Footers kept in memory: more than the files whose chunks are read in turn."""
SMALL = 256 * KiB
"""A remote file up to this size is fetched whole with its footer: one round trip instead of two."""
MAX_FOOTER = 256 * MiB
"""A longer footer is damage."""
STEP_ROWS, STEP_BYTES = 1024, 64 * MiB
"""Rows and bytes that are decoded at once."""


class Footer(NamedTuple):
    """What is known of a file."""

    meta: pq.FileMetaData
    columns: list[int]
    """The numbers of the columns to read among the leaf columns, the text first."""
    others: list[str]
    """The names of the columns to read besides the text."""
    whole: bytes | None = None
    """The whole of a small remote file."""

    def size_of(self, group: int) -> int:
        """Return the decompressed size of the text column in a row group."""
        return int(self.meta.row_group(group).column(self.columns[0]).total_uncompressed_size)

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """Return the start and length of each column to read in a row group."""
        ranges = []
        for number in self.columns:
            column = self.meta.row_group(group).column(number)
            start = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset:
                start = min(start, column.dictionary_page_offset)
            ranges.append((start, column.total_compressed_size))
        return ranges


class ParquetReader:
    """The Parquet files of one dataset."""

    def __init__(
        self,
        storage: Storage,
        field: str,
        max_chunk_bytes: int,
        kept: MetadataCache | None = None,
        filter: RowFilter | None = None,
        all_columns: bool = False,
    ) -> None:
        """`all_columns`: read all columns, not only those of the text and of the filter."""
        self._storage, self._field, self._kept = storage, field, kept
        self._filter, self._all_columns = filter, all_columns
        self._max_chunk_bytes = max_chunk_bytes
        self._lock = threading.Lock()
        self._footers: OrderedDict[str, Footer] = OrderedDict()

    def inspect(self, file: FileRef) -> list[ChunkRef]:
        """Return the file's row groups; those too large to decode at once are divided."""
        footer = self._footer(file)
        refs = []
        for i in range(footer.meta.num_row_groups):
            start, length = footer.ranges(i)[0]
            if min(start, length) < 0 or (not file.codec and start + length > file.size):
                raise _damaged(file, f"row group {i} has text at bytes {start} to {start + length}")
            size, rows = footer.size_of(i), footer.meta.row_group(i).num_rows
            parts = max(1, min(rows, -(-size // self._max_chunk_bytes)))
            refs += [ChunkRef(file, i, size // parts, part, parts) for part in range(parts)]
        return refs

    def rows_of(self, ref: ChunkRef) -> int:
        """Return the rows of a row group."""
        return int(self._footer(ref.file).meta.row_group(ref.index).num_rows)

    def parts_of(self, ref: ChunkRef) -> int:
        """Return into how many chunks `inspect` divides a row group."""
        return sum(each.index == ref.index for each in self.inspect(ref.file))

    def may_match(self, ref: ChunkRef) -> bool:
        """Return False if no row of a row group can pass the filter."""
        group = self._footer(ref.file).meta.row_group(ref.index)
        return self._filter is None or self._filter.may_match(group)

    def ranges(self, ref: ChunkRef) -> list[tuple[int, int]]:
        """Return the start and length of each column to read in a row group."""
        return self._footer(ref.file).ranges(ref.index)

    def buffered(self, ref: ChunkRef) -> list[Bytes] | None:
        """Return the columns of a row group if they were fetched together with the footer."""
        footer = self._footer(ref.file)
        if (whole := footer.whole) is None:
            return None
        return [whole[start : start + length] for start, length in footer.ranges(ref.index)]

    def read(self, ref: ChunkRef, fetched: list[Bytes] | None = None) -> tuple[int, pa.Table]:
        """Return the columns of a chunk, the text first, and the first row's number."""
        file, footer = ref.file, self._footer(ref.file)
        others = footer.others
        rows, size = footer.meta.row_group(ref.index).num_rows, footer.size_of(ref.index)
        lo, hi = ref.bounds(rows)
        step = max(16, min(STEP_ROWS, STEP_BYTES * rows // max(1, size)))
        limit = self._storage.max_bytes(file)
        names, batches, have, at = [self._field, *others], [], 0, 0
        try:
            # Not buffered ahead: that would read on a thread of Arrow's, unmeasured.
            opened = pq.ParquetFile(
                self._open(ref, footer, fetched), metadata=footer.meta,
                page_checksum_verification=True, pre_buffer=False,
            )  # fmt: skip
            for batch in opened.iter_batches(
                step, row_groups=[ref.index], columns=names, use_threads=False
            ):
                first, at = at, at + len(batch)
                columns = [widened(batch.column(self._field)), *map(batch.column, others)]
                have += columns[0].nbytes
                if have > limit:
                    raise BombError(
                        f"{ref}: {file.size} bytes on disk decode to more than {limit}. "
                        "If this is honest data, store it with less compression."
                    )
                if at > lo:
                    columns = [column[max(0, lo - first) : hi - first] for column in columns]
                    batches.append(pa.RecordBatch.from_arrays(columns, names))
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
            return lo, pa.schema([schema.field(name) for name in names]).empty_table()
        return lo, pa.Table.from_batches(batches)

    def _open(self, ref: ChunkRef, footer: Footer, fetched: list[Bytes] | None) -> Any:
        file = ref.file
        if not file.remote:
            # Not memory-mapped: a file that shrinks under a map kills the process.
            return pa.PythonFile(RangeFile(file.size, self._storage.plain(file)), mode="r")
        assert fetched is not None
        starts = [start for start, _ in footer.ranges(ref.index)]
        parts = list(zip(starts, fetched, strict=True))
        return pa.PythonFile(RangeFile(file.size, self._storage.fetched(file, parts)), mode="r")

    # Footers

    def _footer(self, file: FileRef) -> Footer:
        with self._lock:
            if (known := self._footers.get(file.path)) is not None:
                self._footers.move_to_end(file.path)
                return known
        if file.remote and not file.codec:
            footer = self._fetch_footer(file)
        else:
            footer = self._parse(file, file.path)
        with self._lock:
            self._footers[file.path] = footer
            if len(self._footers) > FOOTERS:
                self._footers.popitem(last=False)
        return footer

    def _fetch_footer(self, file: FileRef) -> Footer:
        """Return the footer of a remote file. It is fetched a second time before damage is believed."""
        remote, whole = self._storage.remote, None
        assert remote is not None

        def fetch() -> bytes:
            nonlocal whole
            size = max(64 * KiB, min(file.size // 1000, 2 * MiB))
            size = file.size if file.size <= SMALL else size
            tail = remote.read(file, file.size - size, size)
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if size < length <= min(file.size, MAX_FOOTER):
                tail = remote.read(file, file.size - length, length - size) + tail
            whole = bytes(tail) if len(tail) == file.size else None
            return bytes(tail[-length:])

        key = f"{file.path}\n{file.size}\n{file.etag}"
        kept = self._kept if file.etag else None  # without an ETag a change would not be noticed
        tail = fetch() if kept is None else kept.once("footers", key, fetch)
        try:
            footer = self._parse(file, pa.BufferReader(tail))
        except CorruptFile:
            tail = fetch()
            footer = self._parse(file, pa.BufferReader(tail))
            if kept is not None:
                kept.put("footers", key, tail)
        return footer._replace(whole=whole)

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
        field, names = self._field, schema.names
        if names.count(field) != 1:
            has = "two columns" if field in names else "no column"
            raise SourceError(
                f"{file.path} has {has} {field!r}; it has {', '.join(names)}. Name one: text_field=…"
            )
        kind = schema.field(field).type
        if not is_text(kind):
            raise SourceError(
                f"{file.path}: column {field!r} is {kind}, not text. Name another: text_field=…"
            )
        others: list[str] = []
        if self._all_columns:
            others = [name for name in names if name != field]
        elif self._filter is not None:
            others = [name for name in self._filter.columns(schema, file.path) if name != field]
        leaves = [meta.schema.column(i).path.partition(".")[0] for i in range(meta.num_columns)]
        columns = [i for name in (field, *others) for i, leaf in enumerate(leaves) if leaf == name]
        return Footer(meta, columns, others)


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

"""Read the text column of one Parquet row group.

In:    a file's footer (kept once read) and the number of a row group.
Out:   the column as Arrow has it, in bounded steps.
Where: worker threads.
State: the footers of the files read last.
Cost:  the text column only; no other column is touched. Steps of some rows cost nothing
       measurable, and end a decompression bomb before it has filled the memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import CorruptFile, SourceError
from penstock.read.columns import call, nothing, widened
from penstock.read.footer import AsFile, RemoteFooters, column_range, damaged, parse_footer
from penstock.read.records import Judge, clean
from penstock.read.storage import BombError, Bytes, Storage, is_damage
from penstock.types import Address, ChunkRef, Documents, FileRef, MiB

if TYPE_CHECKING:
    from penstock.read.kept import Kept

FOOTERS = 256
"""Footers kept: more than the files whose chunks are read in turn."""
STEP_ROWS = 1024
STEP_BYTES = 64 * MiB
"""A row group is decoded in steps of so many rows, fewer where they are long."""


class ParquetReader:
    """The Parquet files of one dataset."""

    def __init__(
        self, storage: Storage, field: str, max_chunk_bytes: int, kept: Kept | None = None
    ) -> None:
        self._storage = storage
        self._remote = RemoteFooters(storage.remote, kept) if storage.remote is not None else None
        self._field = field
        self._max_chunk_bytes = max_chunk_bytes
        self._lock = threading.Lock()
        self._footers: OrderedDict[str, tuple[pq.FileMetaData, int]] = OrderedDict()
        """By path, with the text column's number among the leaf columns."""

    def inspect(self, file: FileRef) -> list[ChunkRef]:
        """The file's row groups; those too large to decode at once are split."""
        footer, column = self._footer(file)
        refs = []
        for i in range(footer.num_row_groups):
            group = footer.row_group(i)
            meta = group.column(column)
            start, length = column_range(meta)
            if min(start, length) < 0 or (not file.codec and start + length > file.size):
                raise damaged(
                    file,
                    f"the text of row group {i} is said to lie at bytes {start} to {start + length}",
                )
            size = meta.total_uncompressed_size
            parts = max(1, min(group.num_rows, -(-size // self._max_chunk_bytes)))
            refs += [ChunkRef(file, i, size // parts, part, parts) for part in range(parts)]
        return refs

    def range_of(self, ref: ChunkRef) -> tuple[int, int]:
        """Where the text column of a row group lies: its start and length."""
        footer, column = self._footer(ref.file)
        return column_range(footer.row_group(ref.index).column(column))

    def at_hand(self, ref: ChunkRef) -> Bytes | None:
        """The text column of a row group, where it came together with a small file's footer."""
        start, length = self.range_of(ref)
        whole = self._remote.small(ref.file) if self._remote is not None else None
        return None if whole is None else whole[start : start + length]

    def read(self, ref: ChunkRef, judge: Judge, fetched: list[Bytes] | None = None) -> Documents:
        """The texts of a row group, or of a part of one."""
        file = ref.file
        footer, text = self._footer(file)
        meta = footer.row_group(ref.index)
        lo, hi = ref.bounds(meta.num_rows)
        pieces: list[pa.Array] = []
        have = at = 0
        size = meta.column(text).total_uncompressed_size
        limit = self._storage.max_bytes(file)
        step = max(16, min(STEP_ROWS, STEP_BYTES * meta.num_rows // max(1, size)))
        opened = None
        try:
            source = self._source(ref, fetched)
            # Not buffered beforehand: that reads on a thread of Arrow's, which nobody measures.
            opened = pq.ParquetFile(
                source, metadata=footer, page_checksum_verification=True, pre_buffer=False
            )
            for batch in opened.iter_batches(
                step, row_groups=[ref.index], columns=[self._field], use_threads=False
            ):
                column = batch.column(0)
                first, at = at, at + len(column)
                have += _decoded_bytes(column)
                if at > lo:
                    pieces.append(column[max(0, lo - first) : hi - first])
                if have > limit:
                    raise BombError(
                        f"{ref}: {file.size} bytes on disk decode to more than {limit}. "
                        "If this is honest data, store it with less compression."
                    )
                if at >= hi:
                    break
            else:
                if at != meta.num_rows:
                    raise CorruptFile(
                        f"{ref}: the footer promises {meta.num_rows} rows, there are {at}"
                    )
            return self._clean(ref, pieces, lo, judge)
        except (pa.ArrowException, OSError, BombError, CorruptFile) as error:
            if not is_damage(error):
                raise
            judge.reject_chunk(Address(file.name, ref.index, -1), _corrupt(ref, error))
            return Documents(nothing(pa.large_string()), np.empty(0, np.int64), bad=judge.bad)
        finally:
            if opened is not None:
                opened.close(force=True)

    def _clean(self, ref: ChunkRef, pieces: list[pa.Array], lo: int, judge: Judge) -> Documents:
        # 32-bit offsets end at 2 GiB: widened before the pieces are put together.
        chunks = [widened(piece) for piece in pieces] or [nothing(pa.large_string())]
        array = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        rows = np.arange(lo, lo + len(array), dtype=np.int64)
        return clean(array, rows, lambda i: Address(ref.file.name, ref.index, lo + i), judge)

    def _source(self, ref: ChunkRef, fetched: list[Bytes] | None) -> Any:
        file = ref.file
        if file.codec:
            return self._storage.spool(file)
        if not file.remote:
            # Read by ourselves, so that a slow disk and a slow decoder can be told apart. Not memory-mapped: a file
            # that shrinks under a map ends the process, not the read.
            return pa.PythonFile(AsFile(file.size, self._storage.plain(file)), mode="r")
        assert fetched is not None
        parts = [(self.range_of(ref)[0], fetched[0])]
        return pa.PythonFile(AsFile(file.size, self._storage.fetched(file, parts)), mode="r")

    def _footer(self, file: FileRef) -> tuple[pq.FileMetaData, int]:
        with self._lock:
            known = self._footers.get(file.path)
            if known is not None:
                self._footers.move_to_end(file.path)
                return known
        if file.remote and not file.codec:
            assert self._remote is not None
            footer = self._remote.footer(file)
        else:
            path = self._storage.spool(file) if file.codec else file.path
            footer = parse_footer(file, path)
        found = footer, self._column(file, footer)
        with self._lock:
            self._footers[file.path] = found
            if len(self._footers) > FOOTERS:
                self._footers.popitem(last=False)
        return found

    def _column(self, file: FileRef, footer: pq.FileMetaData) -> int:
        """The text column's number among the leaf columns."""
        schema = footer.schema.to_arrow_schema()
        names = schema.names
        if names.count(self._field) > 1:
            raise CorruptFile(
                f"{file.path} has two columns named {self._field!r}: rename one of them"
            )
        if self._field not in names:
            raise SourceError(
                f"{file.path} has no column {self._field!r}; it has {', '.join(names)}. Name one: text_field=…"
            )
        kind = schema.field(self._field).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (
            pa.types.is_string(value)
            or pa.types.is_large_string(value)
            or pa.types.is_string_view(value)
            or pa.types.is_binary(value)
            or pa.types.is_large_binary(value)
            or pa.types.is_binary_view(value)
        ):
            raise SourceError(f"{file.path}: column {self._field!r} is {kind}, not text. Name another: text_field=…")  # fmt: skip
        for i in range(footer.num_columns):
            if footer.schema.column(i).path == self._field:
                return i
        raise SourceError(
            f"{file.path}: column {self._field!r} is nested, which text_field cannot name"
        )


def _decoded_bytes(column: pa.Array) -> int:
    """What a column takes once dictionaries are written out."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = call("binary_length", column.dictionary)
    total = call("sum", call("take", lengths, column.indices)).as_py()
    return int(total or 0)


def _corrupt(ref: ChunkRef, error: Exception) -> CorruptFile:
    if isinstance(error, CorruptFile):
        return error
    return CorruptFile(f"{ref} cannot be read: {str(error).strip() or type(error).__name__}")

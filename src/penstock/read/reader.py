"""Read the documents of a chunk, in any format."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, CorruptFile
from penstock.read import ReadSettings, text
from penstock.read.arrow_utils import binaries
from penstock.read.listing import MetadataCache, members_of
from penstock.read.parquet import load_footer, read_chunk
from penstock.read.storage import AnyFile, Bytes, CompressedFile, FetchedFile, PlainFile
from penstock.read.validation import ChunkValidator, where
from penstock.types import Address, Bad, ChunkRef, Documents, FileRef, MiB
from penstock.watch.stage_timer import Clock

if TYPE_CHECKING:
    from penstock.read.remote_files import RemoteFiles

FOOTERS = 256
"""Footers kept in memory: more than the files that are read at the same time."""
SHARED_BYTES = 256 * MiB
"""Memory for the columns of divided row groups. One row group is always kept."""


class Reader:
    """The files of one dataset, open for reading. Used by many threads at once."""

    def __init__(
        self, settings: ReadSettings, n_workers: int, lanes: int, remote: RemoteFiles | None = None,
        cache: MetadataCache | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._remote, self._clock = settings, remote, clock
        # Enough for all workers to read from one compressed file. Lanes share the workers, so each
        # needs less, but at least for two of them.
        self.lane_bytes = max(3, -(-(n_workers + 2) // lanes)) * settings.chunk_bytes
        """Memory for the decompressed parts of files, for each lane."""
        self._footer = lru_cache(FOOTERS)(partial(load_footer, settings, remote, cache))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._compressed: OrderedDict[tuple[str, int], CompressedFile] = OrderedDict()
        self._shared: OrderedDict[tuple[str, int], tuple[Future[list[Bytes]], int]] = OrderedDict()
        self._skip: dict[str, list[Address]] = {}
        for address in settings.skip:
            self._skip.setdefault(address.file, []).append(address)

    def inspect(self, file: FileRef) -> tuple[list[ChunkRef], list[Bad]]:
        """Return a file's chunks. A file that cannot be read is reported as one bad record."""
        try:
            self._check_skip(file)
            if file.format == "parquet":
                return self._footer(file).chunks(file), []
        except CorruptFile as error:
            whole = ChunkValidator(ChunkRef(file, -1, 0), self._settings)
            whole.reject_chunk(error)
            return [], whole.bad
        if file.members:
            return [ChunkRef(file, 0, file.size)], []
        step = self._settings.chunk_bytes
        starts = range(0, file.size, step)
        return [ChunkRef(file, at // step, min(step, file.size - at)) for at in starts], []

    def _check_skip(self, file: FileRef) -> None:
        """Raise if an address to skip lies beyond the end of its file or row group."""
        for each in members_of(file) if self._skip else []:
            for address in self._skip.get(each.name, ()):
                end = 1 if file.members else file.size
                if address.group is not None:
                    footer = self._footer(file)
                    known = address.group < footer.meta.num_row_groups
                    end = footer.rows(address.group) if known else 0
                if address.row >= end and not file.sequential:
                    raise ConfigError(f"skip: there is no document at {where(address)}")

    # Fetching

    def fetch(self, ref: ChunkRef, *, again: bool = False) -> list[Bytes]:
        """Fetch the bytes of a chunk; nothing for files that are decompressed in order.

        `again` means that what was fetched before is in doubt.
        """
        assert self._remote is not None
        if ref.file.format == "parquet" and not again:
            if ref.index not in self._footer(ref.file).matching:
                return []
            if ref.parts > 1:
                return self._fetch_shared(ref)
        return [*self._remote.read_all(self._ranges(ref))]

    def _fetch_shared(self, ref: ChunkRef) -> list[Bytes]:
        """Fetch the columns of a divided row group once for all parts that are read soon."""
        key, size = (ref.file.path, ref.index), ref.nbytes * ref.parts // ref.span
        with self._lock:
            known = self._shared.pop(key, None)
            future, _ = self._shared[key] = known or (Future(), size)
            while len(self._shared) > 1 and sum(n for _, n in self._shared.values()) > SHARED_BYTES:
                self._shared.popitem(last=False)
        if known is None:
            try:
                future.set_result(self.fetch(ref, again=True))
            except BaseException as error:
                with self._lock:
                    self._shared.pop(key, None)  # a later part tries again
                future.set_exception(error)
        return future.result()

    def _ranges(self, ref: ChunkRef) -> list[tuple[FileRef, int, int]]:
        file, limit = ref.file, self._settings.max_doc_bytes + 1
        if file.members:
            return [(member, 0, min(member.size, limit)) for member in _members(ref)]
        if file.format == "parquet":
            return [(file, *each) for each in self._footer(file).ranges(ref.index)]
        separator = self._separator(file)
        if file.codec or separator is None:
            return []
        lo, hi = self._span(ref)
        start = max(0, lo - len(separator))
        return [(file, start, min(file.size, hi + len(separator) + text.TAIL) - start)]

    # Reading

    def read(self, ref: ChunkRef, fetched: list[Bytes] | None = None) -> Documents:
        """Return the documents of a chunk that are in the chosen split."""
        file = ref.file
        validator = ChunkValidator(ref, self._settings)
        if fetched is None:
            fetched = self.fetch(ref) if file.remote else []
        if file.members:
            limit = validator.max_bytes + 1
            parts = fetched or [
                PlainFile(each, self._clock).read(0, min(each.size + 1, limit))
                for each in _members(ref)
            ]
            rows = np.arange(*ref.bounds(len(file.members)), dtype=np.int64)
            return validator.documents(self._table(map(bytes, parts)), rows)
        if file.format != "parquet":
            return self._read_range(ref, fetched, validator)
        try:
            footer = self._footer(file)
            if ref.index not in footer.matching:
                lo, hi = self.rows_of(ref)
                return replace(validator.no_documents(), filtered=hi - lo)
            lo, table = read_chunk(ref, footer, self._open(ref, fetched), self._settings)
        except CorruptFile as error:
            validator.reject_chunk(error)
            return validator.no_documents()
        return validator.documents(table, np.arange(lo, lo + len(table), dtype=np.int64))

    def _table(self, texts: Iterable[bytes]) -> pa.Table:
        return pa.table({self._settings.text_field: binaries(list(texts))})

    def _read_range(
        self, ref: ChunkRef, fetched: list[Bytes], validator: ChunkValidator
    ) -> Documents:
        source, separator = self._open(ref, fetched), self._separator(ref.file)
        documents = validator.no_documents(last=True)
        if separator is not None:
            records = text.read_records(source, *self._span(ref), separator, validator.max_bytes)
            documents = self._read_records(ref, records, source.broken is not None, validator)
        elif ref.index == ref.part == 0:
            data = source.read(0, validator.max_bytes + 1)
            if source.broken is None:
                rows = np.zeros(1, np.int64)
                documents = validator.documents(self._table([data]), rows, last=True)
        if source.broken is not None and documents.last:
            validator.reject_chunk(source.broken)
        return documents

    def _open(self, ref: ChunkRef, fetched: Sequence[Bytes]) -> AnyFile:
        file, key = ref.file, (ref.file.path, ref.lane)
        if not file.codec and not file.remote:
            return PlainFile(file, self._clock)
        if not file.codec:
            assert self._remote is not None
            starts = [start for _, start, _ in self._ranges(ref)]
            return FetchedFile(file, self._remote, [*zip(starts, fetched, strict=True)])
        with self._lock:
            if key not in self._compressed:
                opened = CompressedFile(file, self.lane_bytes, self._closing, self._remote)
                self._compressed[key] = opened
                # A lane reads one file after another, and has two open at the transition.
                for old in [k for k in self._compressed if k[1] == ref.lane][:-2]:
                    self._compressed.pop(old).close()
            return self._compressed[key]

    def _read_records(
        self, ref: ChunkRef, records: text.Records, broken: bool, validator: ChunkValidator
    ) -> Documents:
        cut = records.rows[-1:] if records.cut else records.rows[:0]
        if records.cut or (broken and records.unended):  # the last one is not a whole document
            records.keep(slice(-1))
        settings = self._settings
        if ref.file.format == "jsonl":
            text.drop_blank(records)
            selects = settings.filter is not None or settings.transform is not None
            table = text.parse_json(records, settings.text_field, validator.reject, selects)
        else:
            table = pa.table({settings.text_field: text.split(records)})
        documents = validator.documents(table, records.rows, last=records.last)
        detail = f"a record exceeds max_doc_bytes={validator.max_bytes}"
        for row in cut.tolist():
            validator.reject(row, "too_long", detail)
        return documents

    def whole(self, ref: ChunkRef) -> ChunkRef:
        """Return the undivided chunk that contains a chunk."""
        if ref.parts == 1:
            return ref
        parquet = ref.file.format == "parquet"
        parts = self._footer(ref.file).parts(ref.index) if parquet else 1
        return replace(ref, part=ref.part * parts // ref.parts, parts=parts, span=1)

    def rows_of(self, ref: ChunkRef) -> tuple[int, int]:
        """Return the range of the addresses of a chunk's documents: rows or byte offsets."""
        if ref.file.members:
            return ref.bounds(len(ref.file.members))
        if ref.file.format == "parquet":
            return ref.bounds(self._footer(ref.file).rows(ref.index))
        return self._span(ref)

    def _separator(self, file: FileRef) -> bytes | None:
        return b"\n" if file.format == "jsonl" else self._settings.separator

    def _span(self, ref: ChunkRef) -> tuple[int, int]:
        """Return the byte range in which the records of a chunk begin."""
        step, file = self._settings.chunk_bytes, ref.file
        begin = ref.index * step
        # The last chunk of a file may be short.
        first, last = ref.bounds(step if file.sequential else min(step, file.size - begin))
        return begin + first, begin + last

    def stop(self) -> None:
        """Stop decompression at its next step, without waiting."""
        self._closing.set()

    def close(self) -> None:
        """Close all files. Called after all readers have stopped."""
        self.stop()
        for opened in self._compressed.values():
            opened.close()
        self._compressed.clear()


def _members(ref: ChunkRef) -> list[FileRef]:
    return members_of(ref.file)[slice(*ref.bounds(len(ref.file.members)))]

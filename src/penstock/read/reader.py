"""From a chunk's address to its documents, whatever the format: what a worker thread calls.

In:    a `ChunkRef`, and for a remote file what was fetched for it.
Out:   `Documents`: the texts of the chosen split, judged, those to be skipped blanked out.
Where: worker threads, many at once; `fetch` on fetch threads.
State: open files and footers, behind locks.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, CorruptFile
from penstock.order.shuffle import mix, mix_array
from penstock.read import jsonl, text
from penstock.read.columns import call, flags, nothing, scalar
from penstock.read.delimited import read_records
from penstock.read.parquet import ParquetReader
from penstock.read.records import Judge, count_empty
from penstock.read.settings import ReadSettings
from penstock.read.storage import Bytes, Storage
from penstock.types import Address, Bad, ChunkRef, Documents, FileRef, KiB, MiB
from penstock.watch.stage_timer import Clock

if TYPE_CHECKING:
    from penstock.read.kept import Kept
    from penstock.read.remote import RemoteFiles

MAX_CHUNK_BYTES = 256 * MiB
SHARED_BYTES = 256 * MiB
"""What the columns of row groups that were split may take in memory, one at the least."""
TAIL = 64 * KiB
"""Fetched beyond a range of records: one that begins in it ends after it."""


class Reader:
    """The files of one dataset, open for reading."""

    def __init__(
        self,
        settings: ReadSettings,
        n_workers: int,
        lanes: int,
        remote: RemoteFiles | None = None,
        kept: Kept | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        # What is read at once from one compressed file, by all workers or, where lanes share
        # them, by some; never less than lets two of them work side by side.
        keep = max(3, -(-(n_workers + 2) // lanes)) * settings.chunk_bytes
        self.lane_bytes = keep
        """What the decompressed parts of files may take for each lane, where files are compressed."""
        self._storage = Storage(
            max_ratio=settings.max_ratio, keep_bytes=keep, remote=remote, clock=clock
        )
        self._parquet = ParquetReader(self._storage, settings.text_field, MAX_CHUNK_BYTES, kept)
        self._shared = Shared()
        self._skip: dict[str, set[tuple[int | None, int]]] = {}
        for address in settings.skip:
            self._skip.setdefault(address.file, set()).add((address.group, address.row))

    def inspect(self, file: FileRef) -> tuple[list[ChunkRef], list[Bad]]:
        """A file's chunks. A file that cannot be read at all is a bad record of its own."""
        if file.members:
            return [ChunkRef(file, 0, file.size)], []
        if file.format == "parquet":
            judge = self._judge()
            try:
                chunks = self._parquet.inspect(file)
                self._check_skip(file, {ref.index for ref in chunks})
                return chunks, []
            except CorruptFile as error:
                judge.reject_chunk(Address(file.name, None, -1), error)
                return [], judge.bad
        step = self._settings.chunk_bytes
        return [
            ChunkRef(file, i, min(step, file.size - i * step)) for i in range(-(-file.size // step))
        ], []

    def _check_skip(self, file: FileRef, groups: set[int]) -> None:
        for group, row in self._skip.get(file.name, ()):
            if group not in groups:
                raise ConfigError(
                    f"skip: {file.name!r} has {len(groups)} row groups, and row {row} of row group "
                    f"{group} was named"
                )

    def fetch(self, ref: ChunkRef, *, again: bool = False) -> list[Bytes]:
        """What has to be fetched to read a chunk, side by side. Nothing of files that are read forwards.

        `again` says that what was fetched before is in doubt.
        """
        remote = self._storage.remote
        assert remote is not None
        if again or ref.file.format != "parquet" or ref.file.codec:
            return [*remote.read_all(self._ranges(ref))]
        here = self._parquet.at_hand(ref)
        if here is not None:
            return [here]
        if ref.parts == 1:
            return [*remote.read_all(self._ranges(ref))]
        # The parts of a row group all need the whole of its column.
        return self._shared.get(
            (ref.file.path, ref.index), lambda: [*remote.read_all(self._ranges(ref))]
        )

    def _ranges(self, ref: ChunkRef) -> list[tuple[FileRef, int, int]]:
        file, settings = ref.file, self._settings
        if file.members:
            return [
                (member, 0, min(member.size, settings.max_doc_bytes + 1))
                for member in text.bundled(ref)[1]
            ]
        if file.codec:
            return []
        if file.format == "parquet":
            return [(file, *self._parquet.range_of(ref))]
        separator = self._separator(file)
        if separator is None:
            return [(file, 0, min(file.size, settings.max_doc_bytes + 1))] if ref.index == 0 else []
        lo, hi = self._span(ref)
        start = max(0, lo - len(separator))
        # Its last record ends a little further on.
        return [(file, start, min(file.size, hi + len(separator) + TAIL) - start)]

    def read(self, ref: ChunkRef, fetched: list[Bytes] | None = None) -> Documents:
        """The documents of a chunk."""
        judge = self._judge()
        if ref.file.remote and fetched is None:
            fetched = self.fetch(ref)
        if ref.file.members:
            documents = text.bundle(ref, fetched, self._storage.plain, judge)
        elif ref.file.format == "parquet":
            documents = self._parquet.read(ref, judge, fetched)
        else:
            documents = self._read_range(ref, fetched, judge)
        return self._select(ref, documents)

    def _separator(self, file: FileRef) -> bytes | None:
        return b"\n" if file.format == "jsonl" else self._settings.separator

    def _span(self, ref: ChunkRef) -> tuple[int, int]:
        """The bytes in which the records of a chunk begin."""
        step, file = self._settings.chunk_bytes, ref.file
        begin = ref.index * step
        # A part is a part of what there is: the last chunk of a file may be short.
        size = step if file.sequential else min(step, file.size - begin)
        first, last = ref.bounds(size)
        return begin + first, begin + last

    def _read_range(self, ref: ChunkRef, fetched: list[Bytes] | None, judge: Judge) -> Documents:
        file, settings = ref.file, self._settings
        parts = [
            (start, data)
            for (_, start, _), data in zip(self._ranges(ref), fetched or (), strict=False)
        ]
        source = self._storage.open(file, ref.lane, parts)
        separator = self._separator(file)
        if separator is None:
            if ref.index or ref.part:
                return Documents(nothing(pa.large_string()), np.empty(0, np.int64), last=True)
            documents = text.whole(file, source, judge)
            if source.broken is not None:
                documents = Documents(
                    nothing(pa.large_string()), np.empty(0, np.int64), last=True, bad=judge.bad
                )
        else:
            lo, hi = self._span(ref)
            records = read_records(source, lo, hi, separator, settings.max_doc_bytes)
            if source.broken is not None and records.unended:
                # The damage cut this record short: what there is of it is not the document.
                records.starts, records.ends = records.starts[:-1], records.ends[:-1]
            if file.format == "jsonl":
                documents = jsonl.parse(file, records, settings.text_field, judge)
            else:
                documents = text.split(file, records, judge)
            documents.last = records.last
        if source.broken is not None and documents.last:
            judge.reject_chunk(Address(file.name, None, -1), source.broken)
        return documents

    def _select(self, ref: ChunkRef, documents: Documents) -> Documents:
        """Keep the chosen split, and blank out what is to be skipped."""
        settings = self._settings
        if settings.split is not None:
            keep = self._in_val(ref, documents.rows)
            if settings.split == "train":
                keep = ~keep
            documents.texts = documents.texts.filter(flags(keep))
            documents.rows = documents.rows[keep]
            documents.bad = [bad for bad in documents.bad if self._chosen(ref, bad.address)]
            # Of those left out, some are blank texts here, and some are no texts at all: a record cut short, a file.
            texts = {0} if ref.file.members else set(documents.rows.tolist())
            blank = sum(bad.address.row in texts for bad in documents.bad)
            documents.empty = count_empty(documents.texts) - blank
        if self._skip:
            wanted = np.fromiter(self._wanted(ref, documents.rows), bool, len(documents.rows))
            if not wanted.all():
                documents.texts = call(
                    "if_else", flags(wanted), documents.texts, scalar(b"", pa.large_string())
                )
        return documents

    def _in_val(
        self, ref: ChunkRef, rows: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each document is in the validation split: by its own address, whatever else there is."""
        file, seed = ref.file, self._settings.split_seed
        if file.members:
            hashed = np.array(
                [_key(seed, file.members[i].name, None) for i in rows.tolist()],
                np.uint64,
            )
        else:
            group = ref.index if file.format == "parquet" else None
            hashed = mix_array(_key(seed, file.name, group), rows)
        return hashed < np.uint64(int(self._settings.val_fraction * 2**64))

    def _chosen(self, ref: ChunkRef, address: Address) -> bool:
        """Whether a record that is left out is of the chosen split. Damage of a chunk or a file is told in both."""
        if address.row < 0:
            return True
        members = ref.file.members
        # A file of a bundle goes by its number in it, its address by its name.
        row = (
            next(i for i, m in enumerate(members) if m.name == address.file)
            if members
            else address.row
        )
        return bool(self._in_val(ref, np.array([row]))[0]) == (self._settings.split == "val")

    def _wanted(self, ref: ChunkRef, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Iterable[bool]:
        file = ref.file
        if file.members:
            return (
                (None, 0) not in self._skip.get(file.members[i].name, ()) for i in rows.tolist()
            )
        skip = self._skip.get(file.name, set())
        group = ref.index if file.format == "parquet" else None
        return ((group, row) not in skip for row in rows.tolist())

    def _judge(self) -> Judge:
        return Judge(self._settings.on_bad_record, self._settings.max_doc_bytes, [])

    def stop(self) -> None:
        """Have whoever reads stop soon. Waits for nobody."""
        self._storage.stop()

    def close(self) -> None:
        """Close all files. To be called when nobody reads any more."""
        self._storage.close()


class Shared:
    """What several chunks need: fetched by the first that asks, kept for those that follow soon."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, int], Future[list[Bytes]]] = OrderedDict()

    def get(self, key: tuple[str, int], fetch: Callable[[], list[Bytes]]) -> list[Bytes]:
        with self._lock:
            known = self._recent.get(key)
            future: Future[list[Bytes]] = known or Future()
            self._recent[key] = future
            self._recent.move_to_end(key)
            while len(self._recent) > 1 and self._size() > SHARED_BYTES:
                self._recent.popitem(last=False)
        if known is None:
            try:
                future.set_result(fetch())
            except BaseException as error:
                with self._lock:
                    self._recent.pop(key, None)  # whoever comes later tries for himself
                future.set_exception(error)
        return future.result()

    def _size(self) -> int:
        ended = [f.result() for f in self._recent.values() if f.done() and f.exception() is None]
        return sum(len(data) for result in ended for data in result)


def _key(seed: int, name: str, group: int | None) -> int:
    # By the file's own name, without its folder: a name relative to what was listed would change
    # with the other files, and an absolute path with a move of the data.
    digest = hashlib.sha256(os.path.basename(name).encode("utf-8", "surrogateescape")).digest()
    return mix(seed, -1 if group is None else group, int.from_bytes(digest[:8], "little"))

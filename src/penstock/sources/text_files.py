"""Text in files, on disk or remote.

`TextWork` is what workers do: list a file's chunks, fetch, decode and tokenize a chunk. It is pure and
travels to other processes, where each copy opens its own files. `FileChunks` decides where each
step runs: fetches on the I/O pool, ahead of the workers, so that no worker blocks on a network.
Token chunks that were made are written to the token cache by the I/O pool.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.config import access_variables, adopt
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import (
    CorruptFile,
    LoaderClosed,
    SourceChanged,
    StateMismatch,
)
from penstock.feed.worker_pool import Pool, Task, ThreadPool
from penstock.order.plan import Plan
from penstock.read.columns import nothing
from penstock.read.reader import MAX_CHUNK_BYTES, Reader
from penstock.read.records import Quarantine
from penstock.read.settings import ReadSettings
from penstock.read.storage import BombError, Bytes
from penstock.sources.base import RowSource, RunContext, Work, noted
from penstock.sources.chunk_lanes import ChunkLanes, ChunkReader
from penstock.types import Bad, ChunkRef, Documents, FileRef, LanePosition, MiB, TokenChunk
from penstock.watch.stage_timer import Clock, NullClock

if TYPE_CHECKING:
    # Local files need no network, and its libraries take a while to import.
    from penstock.dataset import TextDataset
    from penstock.read.cache import TokenCache
    from penstock.read.cache_file import Key
    from penstock.sources.remote_dataset import RemoteConfig, RemoteSession
    from penstock.state import State

log = logging.getLogger("penstock")

FORMAT = 2
"""Increased when the same text would give other token chunks than before."""
LOOKED_UP = 64
"""Files whose chunks are remembered, beyond those of the current group."""
UNWRITTEN_BYTES = 64 * MiB
"""Token chunks that may wait to be written to the cache. More ride out a slower disk."""
WRITE_S = 120.0
"""How long filling the cache (`penstock stage`) waits for a disk."""
CLOSE_S = 5.0
"""How long a shutdown waits for the cache. What a slow disk leaves undone by then is dropped."""
DAMAGE = (CorruptFile.reason, BombError.reason)


class TextWork(Work):
    """The work of one run."""

    def __init__(
        self,
        read: ReadSettings,
        tokenizer: Tokenizer,
        doc_batch: int | None,
        n_workers: int,
        lanes: int,
        remote: RemoteConfig | None = None,
        clock: Clock | None = None,
        *,
        threads: bool = False,
    ) -> None:
        """`threads` allows the session with remote servers to have threads of its own."""
        self.clock = clock or NullClock()
        self._made_of = (read, tokenizer, doc_batch, n_workers, lanes, remote, self.clock)
        self._read, self._tokenizer, self._doc_batch = read, tokenizer, doc_batch
        session = None if remote is None else remote.open(threads=threads)
        self.session: RemoteSession | None = session
        files, kept = (None, None) if session is None else (session.files, session.kept)
        self._reader = Reader(read, n_workers, lanes, files, kept, self.clock)
        self.lane_bytes = self._reader.lane_bytes
        """Memory for the decompressed parts of compressed files, for each lane."""
        self.cache: TokenCache | None = None if remote is None else remote.cache()
        self._stopped = False
        self._identities: dict[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        access = access_variables() if self._made_of[-2] is not None else None
        return _in_worker_process, (access, *self._made_of)

    def prepare(self) -> None:
        """Load the vocabulary, while the first chunk is fetched."""
        self._tokenizer.engine.prepare()

    def inspect(self, file: FileRef) -> tuple[list[ChunkRef], list[Bad]]:
        """Return a file's chunks, and why it is left out if it cannot be read."""
        note = f"in stage fetch, listing the chunks of {file.path}"
        with noted(note), self.clock.stage("fetch", file):
            return self._reader.inspect(file)

    def fetch(self, ref: ChunkRef) -> list[Bytes]:
        """Fetch what is needed to decode a chunk of a remote file."""
        note = f"in stage fetch, reading {ref}"
        with noted(note), self.clock.stage("fetch", ref) as timeline:
            fetched = self._reader.fetch(ref)
        timeline.count("fetch", 1, sum(map(len, fetched)))
        return fetched

    def encode(self, ref: ChunkRef, fetched: list[Bytes] | None = None) -> TokenChunk:
        """Return a chunk's tokens: from the cache, or decoded and tokenized."""
        if fetched is None and self.cache is not None and self.caches(ref.file):
            with self.clock.stage("fetch", ref) as timeline:
                chunk = self.cache.get(self.key(ref), ref)
            if chunk is not None:
                chunk.cached = True
                timeline.count("fetch", 1, chunk.nbytes)
                return chunk
        return self.tokenize(ref, self.decode(ref, fetched))

    def read_next(self, ref: ChunkRef, before: Documents | TokenChunk | None = None) -> Documents:
        """Return the documents of a chunk of a sequential file; `before` is the chunk before it."""
        if before is not None and before.last:
            return Documents(nothing(pa.large_string()), np.empty(0, np.int64), last=True)
        return self.decode(ref)

    def decode(self, ref: ChunkRef, fetched: list[Bytes] | None = None) -> Documents:
        """Return a chunk's documents."""
        note = f"in stage fetch, decode, reading {ref}"
        with noted(note), self.clock.stage("decode", ref) as timeline:
            documents = self._documents(ref, fetched)
        timeline.count("decode", len(documents.rows), documents.texts.nbytes)
        return documents

    def tokenize(self, ref: ChunkRef, documents: Documents) -> TokenChunk:
        """Return the tokens of documents."""
        note = f"in stage tokenize, reading {ref}"
        with noted(note), self.clock.stage("tokenize", ref) as timeline:
            chunk = self._tokenizer.encode(ref, documents, self._doc_batch, self._check_stopped)
        timeline.count("tokenize", len(documents.rows), chunk.text_bytes)
        return chunk

    def _check_stopped(self) -> None:
        if self._stopped:
            raise LoaderClosed("the loader was shut down")

    def _documents(self, ref: ChunkRef, fetched: list[Bytes] | None) -> Documents:
        if not ref.file.remote or ref.file.codec:
            return self._reader.read(ref)
        if fetched is None:
            fetched = self.fetch(ref)
        try:
            documents = self._reader.read(ref, fetched)
            if not any(bad.reason in DAMAGE for bad in documents.bad):
                return documents
        except CorruptFile:  # raised again below, if it is still there
            pass
        # Data from the network is fetched a second time before its damage is believed.
        with self.clock.stage("fetch", ref):
            again = self._reader.fetch(ref, again=True)
        return self._reader.read(ref, again)

    # The token cache

    def key(self, ref: ChunkRef) -> Key:
        """Return a chunk's key in the cache: everything that decides its tokens."""
        assert self.cache is not None
        file, read = ref.file, self._read
        names = {member.name for member in file.members} or {file.name}
        settings = {
            "version": FORMAT,
            "tokenizer": [self._tokenizer.cache_key, self._tokenizer.dtype.name],
            "text_field": read.text_field,
            "separator": None if read.separator is None else read.separator.hex(),
            "chunk_bytes": [read.chunk_bytes, MAX_CHUNK_BYTES],
            "split": [read.split, read.val_fraction, read.split_seed] if read.split else None,
            "bad": [read.on_bad_record == "raise", read.max_doc_bytes, read.max_ratio],
            "part": [ref.part, ref.parts, ref.span],
            "format": [file.format, file.codec],
            "skip": sorted(([a.group, a.row] for a in read.skip if a.file in names), key=str),
        }
        return self.cache.key(self._identity(file), ref.index, json.dumps(settings, sort_keys=True))

    def caches(self, file: FileRef) -> bool:
        """Return True if there is a cache, and a change of the file would be noticed: a server that
        sends neither an ETag nor a date gives no way to tell."""
        if self.cache is None:
            return False
        return not file.remote or all(file.etag.split(",") if file.members else [file.etag])

    def has_cached(self, ref: ChunkRef) -> bool:
        return self.cache is not None and self.caches(ref.file) and self.cache.has(self.key(ref))

    def save(self, chunk: TokenChunk) -> None:
        """Write a chunk to the cache. A cache that fails turns itself off, and the run continues."""
        assert self.cache is not None
        try:
            self.cache.put(self.key(chunk.ref), chunk)
        except Exception as error:
            self.cache.turn_off(f"{type(error).__name__}: {error}", error)

    def _identity(self, file: FileRef) -> str:
        """Return what identifies a file and its content, without the Hub's commit: the ETag is enough."""
        if (known := self._identities.get(file.path)) is not None:
            return known
        path, version = file.path, file.etag
        if path.startswith("hf://"):
            before, _, after = path.partition("@")
            path = before + "/" + after.partition("/")[2]
        if not file.remote:
            paths = [member.path for member in file.members] or [file.path]
            times = repr([os.stat(path).st_mtime_ns for path in paths])
            version = hashlib.sha256(times.encode()).hexdigest()[:16]
            path = os.path.realpath(path)
        # The name belongs to it: a document's split depends on the name.
        identity = f"{path}\n{file.name}\n{file.size}\n{version}"
        if file.members:
            names = repr([(member.name, member.size) for member in file.members])
            digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
            identity += f"\n{digest[:16]}"
        self._identities[file.path] = identity
        return identity

    def stop(self) -> None:
        self._stopped = True
        self._reader.stop()
        if self.session is not None:
            self.session.stop()

    def close(self) -> None:
        self._reader.close()
        if self.session is not None:
            self.session.close()


def _in_worker_process(access: dict[str, str] | None, *made_of: Any) -> TextWork:
    if access is not None:
        adopt(access)
    return TextWork(*made_of)


class FileChunks(ChunkReader):
    """The chunks of files, for the lanes of one rank."""

    def __init__(self, dataset: TextDataset, run: RunContext, pool: Pool, work: TextWork) -> None:
        self._files, self._pool, self._work = dataset.files, pool, work
        self._looked_up: OrderedDict[int, Task[tuple[list[ChunkRef], list[Bad]]]] = OrderedDict()
        self._unreadable: set[int] = set()
        self._bad_files: list[Bad] = []
        self._before: dict[int, tuple[FileRef, Task[Any]]] = {}
        """By lane: the chunk before the next one of the sequential file that the lane reads."""
        self._quarantine = Quarantine(dataset.quarantine) if dataset.quarantine else None
        self._writes: list[tuple[int, Task[None]]] = []
        self.skipped_writes = 0
        self.wait_for_cache = False
        """True to wait for the disk instead of skipping a chunk that cannot be written in time."""
        self.fetches = dataset.fetches() if pool.n_workers else 0
        threads = self.fetches or int(pool.n_workers > 0 and work.cache is not None)
        self.io: ThreadPool | None = None
        if threads:
            self.io = ThreadPool(threads, work, name="fetch", clock=run.clock)
        self._prepared = pool.n_workers == 0

    @property
    def read_ahead(self) -> int:
        # Twice as many as are fetched at once: while one is late, the others go on.
        return 2 * self.fetches

    def look_up(self, files: tuple[int, ...]) -> None:
        for index in files:
            file = self._files[index]
            if index not in self._looked_up and not file.sequential:
                pool = self.io if self.io is not None and file.remote else self._pool
                self._looked_up[index] = pool.submit("inspect", file, urgent=True)

    def known(self, files: tuple[int, ...]) -> bool:
        return all(i in self._looked_up and self._looked_up[i].ready() for i in files)

    def chunks_of(self, files: tuple[int, ...]) -> list[list[ChunkRef]]:
        self.look_up(files)
        chunks = []
        for index in files:
            refs, bad = self._looked_up[index].result()
            if bad and index not in self._unreadable:
                self._unreadable.add(index)
                self._bad_files += bad
            chunks.append(refs)
        while len(self._looked_up) > max(LOOKED_UP, len(files)):
            self._looked_up.popitem(last=False)
        return chunks

    def take_bad(self) -> list[Bad]:
        bad, self._bad_files = self._bad_files, []
        return bad

    def submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        task = self._submit(ref)
        if not self._prepared:  # the vocabulary is loaded while the first chunk is read
            self._prepared = True
            self._pool.submit("prepare")
        return task

    def _submit(self, ref: ChunkRef) -> Task[TokenChunk]:
        if ref.file.sequential:
            return self._submit_sequential(ref)
        if self.io is None or not ref.file.remote or ref.file.codec or self._work.has_cached(ref):
            return self._pool.submit("encode", ref)
        return self._pool.submit("encode", ref, after=self.io.submit("fetch", ref))

    def _submit_sequential(self, ref: ChunkRef) -> Task[TokenChunk]:
        """Read the next chunk of a file after the one before it, and tokenize it on any worker."""
        file, before = self._before.get(ref.lane, (None, None))
        if self._work.has_cached(ref):
            task = self._pool.submit("encode", ref)
            self._before[ref.lane] = ref.file, task
            return task
        # As a function: in this process, also if workers are processes. They could not pass the
        # decompressor on.
        follows = before if file is ref.file else None
        read = self._pool.submit(self._work.read_next, ref, after=follows)
        self._before[ref.lane] = ref.file, read
        return self._pool.submit("tokenize", ref, after=read)

    def reopen(self, lane: int, epoch: int) -> None:
        self._before.pop(lane, None)

    def used(self, chunk: TokenChunk) -> None:
        if chunk.last and chunk.ref.file.sequential:
            self._before.pop(chunk.ref.lane, None)  # its next epoch begins with nothing before it
        if self.io is None or chunk.cached or not self._work.caches(chunk.ref.file):
            return
        self._writes = [write for write in self._writes if not write[1].done()]
        while self._writes and sum(n for n, _ in self._writes) + chunk.nbytes > UNWRITTEN_BYTES:
            if not self.wait_for_cache:
                self.skipped_writes += 1
                return
            self._writes.pop(0)[1].result(WRITE_S)
        self._writes.append((chunk.nbytes, self.io.submit("save", chunk)))

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is in the cache."""
        for _, write in self._writes:
            write.result(timeout_s)

    def rejected(self, bad: Sequence[Bad]) -> None:
        if self._quarantine is not None:
            self._quarantine.write(list(bad))

    def totals(self) -> dict[str, int]:
        work = self._work
        network = work.session.counts() if work.session is not None else {}
        cache = work.cache.counts() if work.cache is not None else {}
        return network | cache | {"cache_skipped": self.skipped_writes}

    def gauges(self) -> dict[str, Any]:
        session = self._work.session
        return {
            "fetch": session.times() if session is not None and self.fetches else None,
            "fetches": self.fetches,
            "cached": self._work.cache is not None,
        }

    def set_fetches(self, fetches: int) -> None:
        """Have more or fewer requests in flight. The stream stays the same."""
        assert self.io is not None
        assert self._work.session is not None
        self._work.session.resize(fetches)
        self.io.resize(fetches)
        self.fetches = fetches

    def stop(self) -> None:
        if self.io is not None and not self._writes:
            self.io.stop()  # else in `close`, once the cache has what was tokenized

    def close(self) -> None:
        if self.io is not None:
            wait([write for _, write in self._writes], CLOSE_S)
            self.io.stop()
            self.io.join(CLOSE_S)
        if self._quarantine is not None:
            self._quarantine.close()


class TextSource(RowSource):
    """A `TextDataset` as the loader sees it."""

    def __init__(self, dataset: TextDataset) -> None:
        self.dataset = dataset
        self.seq_len, self.positions = dataset.seq_len, dataset.options.positions
        self.dtype = dataset.tokenizer.dtype
        self.skip = dataset.read.skip

    def data_id(self) -> dict[str, Any]:
        return self.dataset.data_id()

    def tokenizer_id(self) -> dict[str, Any]:
        return self.dataset.tokenizer_id()

    def settings_id(self) -> dict[str, Any]:
        return self.dataset.settings_id()

    def listings(self) -> list[tuple[float, float]]:
        told, self.dataset.listing_told = self.dataset.listing_told, True
        return [] if told else [self.dataset.listed]

    def check_state(self, state: State) -> None:
        dataset, files = self.dataset, str(state.data.get("files"))
        if files == self.data_id()["files"]:
            shuffle = bool(state.stream.get("shuffle"))
            plan = Plan(files=dataset.files, lanes=state.lanes, shuffle=shuffle, seed=0)
            for lane, at in state.lane_positions.items():
                if at.group > (groups := len(plan.groups(lane, at.epoch))):
                    raise StateMismatch(
                        f"the state continues lane {lane} at group {at.group} of {groups} groups of "
                        "files: it belongs to other data"
                    )
        elif dataset.remote_config is not None:
            change = dataset.remote_config.explain_change(files, dataset.files)
            if change is not None:
                raise SourceChanged(f"the data changed since the state was saved: {change}")

    def work(self, run: RunContext) -> TextWork:
        dataset = self.dataset
        return TextWork(
            replace(dataset.read, skip=run.skip),
            dataset.tokenizer,
            dataset.options.doc_batch,
            run.n_workers,
            len(run.own_lanes),
            dataset.remote_config,
            run.clock,
            threads=run.n_workers > 0,
        )

    def open_lanes(self, run: RunContext, pool: Pool, work: TextWork) -> ChunkLanes:
        dataset = self.dataset
        reader = FileChunks(dataset, run, pool, work)
        if any(file.sequential for file in dataset.files):
            decompressors = work.lane_bytes * len(run.own_lanes)
            run = replace(run, read_ahead_bytes=max(1, run.read_ahead_bytes - decompressors))
        return ChunkLanes(
            self, dataset.files, dataset.options, dataset.tokenizer, reader, run, pool
        )

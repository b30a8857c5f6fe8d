"""Text in files, on disk or remote.

`TextWork` has the steps that workers run: list a file's chunks; fetch, decode and tokenize a chunk.
It can be pickled, and each copy opens its own files. `FileChunks` decides where each step runs:
fetches run on the I/O pool, ahead of the workers, so that no worker blocks on the network. The I/O
pool also writes new token chunks to the token cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from penstock.config import access_variables, adopt
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import CorruptFile, LoaderClosed, SourceError
from penstock.feed.worker_pool import Pool, Task, ThreadPool
from penstock.order.plan import Plan
from penstock.read import ReadSettings
from penstock.read.parquet import MAX_CHUNK_BYTES
from penstock.read.reader import Reader
from penstock.read.storage import Bytes
from penstock.read.token_store import Key, TokenStore
from penstock.read.validation import Quarantine
from penstock.sources.base import RunContext, Work, noted
from penstock.sources.chunk_lanes import CLOSE_S, ChunkLanes, ChunkReader, ChunkSource
from penstock.types import Bad, ChunkRef, Documents, FileRef, LanePosition, MiB, TokenChunk
from penstock.watch.loader_stats import SourceChunks
from penstock.watch.stage_timer import Clock, NullClock

if TYPE_CHECKING:
    # Local files need no network, and its libraries take a while to import.
    from penstock.dataset import TextDataset
    from penstock.sources.remote_dataset import RemoteConfig, RemoteSession
    from penstock.state import State

log = logging.getLogger("penstock")

FORMAT = 3
"""Incremented when the token chunks of the same text change."""
LOOKED_UP = 1024
"""The number of files whose chunk lists are kept."""
UNWRITTEN_BYTES = 64 * MiB
"""Limit on token chunks waiting to be written to the cache. Beyond it, chunks are not cached."""


@dataclass(eq=False)
class TextWork(Work):
    """The work of one run."""

    read: ReadSettings
    tokenizer: Tokenizer
    doc_batch: int | None
    n_workers: int
    lanes: int
    remote: RemoteConfig | None = None
    clock: Clock = field(default_factory=NullClock)
    store: TokenStore | None = None
    """The store of prepared chunks, if any."""

    def __post_init__(self) -> None:
        self.session: RemoteSession | None = None
        self.cache: TokenStore | None = None
        files = metadata = None
        self.fetches = 0
        if self.remote is not None:
            from penstock.sources.remote_dataset import RemoteSession

            self.session, self.cache = RemoteSession(self.remote), self.remote.cache()
            files, metadata = self.session.files, self.session.metadata
            self.fetches = self.remote.limits.fetches
        read, tokenizer = self.read, self.tokenizer
        self._reader = Reader(read, self.n_workers, self.lanes, files, metadata, self.clock)
        self.lane_bytes = self._reader.lane_bytes
        """Memory for the decompressed parts of compressed files, per lane."""
        self.expansion = tokenizer.expansion
        self.settings = {
            "version": FORMAT,
            "tokenizer": [tokenizer.cache_key, tokenizer.dtype.name],
            "text_field": read.text_field,
            "separator": None if read.separator is None else read.separator.hex(),
            "chunk_bytes": [read.chunk_bytes, MAX_CHUNK_BYTES],
            "split": [read.split, read.val_fraction, read.split_seed] if read.split else None,
            "limits": [read.max_doc_bytes, read.max_ratio],
            "filter": None if read.filter is None else str(read.filter),
            "transform": None if read.transform is None else read.transform[0],
        }
        """The settings that determine the tokens of every chunk."""
        self._stopped = False
        self._identities: dict[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        made_of = (getattr(self, each.name) for each in fields(self))
        return _in_worker_process, (access_variables(), *made_of)

    def prepare(self) -> None:
        """Load the vocabulary."""
        self.tokenizer.engine.prepare()

    def inspect(self, file: FileRef) -> tuple[list[ChunkRef], list[Bad]]:
        """Return a file's chunks; if it cannot be read, also the reason for skipping it."""
        note = f"in stage fetch, listing the chunks of {file.path}"
        with noted(note), self.clock.stage("fetch", file):
            return self._reader.inspect(file)

    def fetch(self, ref: ChunkRef) -> list[Bytes]:
        """Return the bytes that decoding a chunk of a remote file needs."""
        note = f"in stage fetch, reading {ref}"
        with noted(note), self.clock.stage("fetch", ref) as timeline:
            fetched = self._reader.fetch(ref)
        timeline.count("fetch", 1, sum(map(len, fetched)))
        return fetched

    def encode(self, ref: ChunkRef, fetched: list[Bytes] | None = None) -> TokenChunk:
        """Return a chunk's tokens from the store or the cache, or else decode and tokenize it."""
        if fetched is None and has_version(ref.file):
            for store in (self.store, self.cache):
                if store is not None and (chunk := self._stored(store, ref)) is not None:
                    return chunk
        return self.tokenize(ref, self.decode(ref, fetched))

    def read_next(self, ref: ChunkRef, before: Documents | TokenChunk | None = None) -> Documents:
        """Return the documents of a chunk of a sequential file; `before` is the previous chunk."""
        if before is not None and before.last:
            return Documents(pa.nulls(0, pa.large_string()), np.empty(0, np.int64), last=True)
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
            chunk = self.tokenizer.encode(ref, documents, self.doc_batch, self._check_stopped)
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
            if not any(bad.reason == CorruptFile.reason for bad in documents.bad):
                return documents
        except CorruptFile:  # raised again below if the damage persists
            pass
        # Damaged data from the network is fetched once more before it is rejected.
        with self.clock.stage("fetch", ref):
            again = self._reader.fetch(ref, again=True)
        return self._reader.read(ref, again)

    # The token cache and prepared chunks

    def has_stored(self, ref: ChunkRef) -> bool:
        """Return True if the store has the chunk, or the whole chunk that it is a part of."""
        return self.store is not None and self.key(self._reader.whole(ref)).name in self._in_store

    @cached_property
    def _in_store(self) -> set[str]:
        return set() if self.store is None else {entry.name for entry in self.store.list()}

    def _stored(self, store: TokenStore, ref: ChunkRef) -> TokenChunk | None:
        """Return a chunk from the store or the cache. The store has whole chunks only."""
        whole = self._reader.whole(ref) if store is self.store else ref
        with self.clock.stage("fetch", ref) as timeline:
            chunk = store.get(self.key(whole), ref)
        if chunk is None or (chunk.bad and self.read.on_bad_record == "raise"):
            return None
        timeline.count("fetch", 1, chunk.nbytes)
        chunk.cached = True
        if (whole.part, whole.parts) != (ref.part, ref.parts):
            lo, hi = self._reader.rows_of(ref)
            first, last = np.searchsorted(chunk.rows, [lo, hi])
            share = (last - first) / max(1, len(chunk.rows))
            chunk.docs, chunk.rows = chunk.docs[first:last], chunk.rows[first:last]
            chunk.bad = [bad for bad in chunk.bad if lo <= bad.address.row < hi]
            # The entry counts the whole chunk.
            counts = (chunk.empty, chunk.text_bytes, chunk.filtered)
            chunk.empty, chunk.text_bytes, chunk.filtered = (round(n * share) for n in counts)
        return chunk

    def key(self, ref: ChunkRef) -> Key:
        """Return a chunk's cache key: everything that determines its tokens."""
        file = ref.file
        names = {member.name for member in file.members} or {file.name}
        skip = sorted(([a.group, a.row] for a in self.read.skip if a.file in names), key=str)
        settings = self.settings | {
            "part": [ref.part, ref.parts, ref.span],
            "format": [file.format, file.codec],
            "skip": skip,
        }
        if (source := self._identities.get(file.path)) is None:
            source = self._identities[file.path] = identity(file)
        return Key(source, ref.index, json.dumps(settings, sort_keys=True))

    def caches(self, file: FileRef) -> bool:
        """Return True if there is a cache and a change of the file can be detected."""
        return self.cache is not None and has_version(file)

    def has_cached(self, ref: ChunkRef) -> bool:
        return self.cache is not None and self.caches(ref.file) and self.cache.exists(self.key(ref))

    def stop(self) -> None:
        self._stopped = True
        self._reader.stop()
        if self.session is not None:
            self.session.network.stop()

    def close(self) -> None:
        self._reader.close()
        if self.session is not None:
            self.session.network.close()


def has_version(file: FileRef) -> bool:
    """Return False if changes cannot be detected: the server sends neither an ETag nor a date."""
    return not file.remote or all(each.etag for each in file.members or [file])


def identity(file: FileRef) -> str:
    """Return a string that identifies a file and its content. The ETag replaces the Hub's commit."""
    path, version = file.path, file.etag
    if path.startswith("hf://datasets/"):
        before, _, after = path.partition("@")
        path = before + "/" + after.partition("/")[2]
    if not file.remote:
        paths = [member.path for member in file.members] or [file.path]
        times = repr([os.stat(path).st_mtime_ns for path in paths])
        version = hashlib.sha256(times.encode()).hexdigest()[:16]
        path = os.path.realpath(path)
    # Includes the name, because a document's split depends on it.
    identity = f"{path}\n{file.name}\n{file.size}\n{version}"
    if file.members:
        names = repr([member[1:] for member in file.members])
        digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
        identity += f"\n{digest[:16]}"
    return identity


def _in_worker_process(access: dict[str, str], *made_of: Any) -> TextWork:
    adopt(access)
    return TextWork(*made_of)


class FileChunks(ChunkReader):
    """The chunks of files, for the lanes of one rank."""

    def __init__(self, dataset: TextDataset, run: RunContext, pool: Pool, work: TextWork) -> None:
        self._files, self._pool, self._work = dataset.files, pool, work
        self._chunk_bytes = dataset.options.chunk_bytes
        self._looked_up: dict[int, Task[tuple[list[ChunkRef], list[Bad]]]] = {}
        self._before: dict[int, Task[Any]] = {}
        """By lane: the previous chunk, if its file can only be read in order."""
        self._ahead: WeakValueDictionary[ChunkRef, Task[TokenChunk]] = WeakValueDictionary()
        """Remote chunks that were read ahead. The next epoch of a small dataset reuses them."""
        self._quarantine = Quarantine(dataset.quarantine) if dataset.quarantine else None
        self._unwritten: deque[TokenChunk] = deque()
        self._writing = threading.Lock()
        self.skipped_writes = 0
        remote = any(file.remote for file in dataset.files)
        self.fetches = work.fetches if remote and pool.n_workers else 0
        self._remote_store = work.store is not None and "://" in work.store.place
        threads = max(
            self.fetches, self._remote_store * dataset.remote.fetches, work.cache is not None
        )
        if threads and pool.n_workers:
            self.io = ThreadPool(threads, work, name="fetch", clock=run.clock)
            if work.session is not None:
                work.session.network.threads = self.io
        self._prepared = False
        """True once a task loads the vocabulary."""

    def look_up(self, files: tuple[int, ...]) -> list[Task[tuple[list[ChunkRef], list[Bad]]]]:
        for index in files:
            file = self._files[index]
            if index not in self._looked_up and not file.sequential:
                pool = self.io if self.io is not None and file.remote else self._pool
                if len(self._looked_up) >= LOOKED_UP:
                    del self._looked_up[next(iter(self._looked_up))]
                self._looked_up[index] = pool.submit("inspect", file, urgent=True)
        return [self._looked_up[index] for index in files if index in self._looked_up]

    def submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        earlier = self._ahead.get(ref)
        if earlier is not None and not earlier.cancelled():
            return earlier
        task = self._submit(ref, position)
        if self.io is not None and self._work.caches(ref.file):
            task.add_done_callback(self._made)
        return task

    def _submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        pool, work, file = self._pool, self._work, ref.file
        fetched: Task[Any] | None = None
        stored = work.has_stored(ref)
        tokenized = stored or work.has_cached(ref)
        if stored and self.io is not None and self._remote_store:
            pool = self.io
        elif not tokenized:
            if file.sequential:
                # Read after the previous chunk, then tokenized on any worker. A function runs in
                # this process even if workers are processes, which cannot share a decompressor.
                before = self._before.get(ref.lane) if position.chunk else None
                read = self._before[ref.lane] = pool.submit(work.read_next, ref, after=before)
                return pool.submit("tokenize", ref, after=read)
            if self.io is not None and file.remote and not file.codec:
                fetched = self.io.submit("fetch", ref)
        task = pool.submit("encode", ref, after=fetched)
        if not self._prepared and not tokenized:
            # Load the vocabulary while the first chunk is fetched or decoded.
            self._prepared = True
            pool.submit("prepare")
        if file.sequential:
            self._before[ref.lane] = task
        elif fetched is not None:
            self._ahead[ref] = task
        return task

    def _made(self, task: Future[TokenChunk]) -> None:
        """Schedule the write of a new chunk to the cache. Called on any thread."""
        if task.cancelled() or task.exception() is not None or (chunk := task.result()).cached:
            return
        with self._writing:
            waiting = sum(other.nbytes for other in self._unwritten)
            if waiting and waiting + chunk.nbytes > UNWRITTEN_BYTES:
                self.skipped_writes += 1
                return
            self._unwritten.append(chunk)
        assert self.io is not None
        with suppress(LoaderClosed):  # `close` writes it
            self.io.submit(self._write_next)

    def _write_next(self) -> None:
        with self._writing:
            chunk = self._unwritten.popleft() if self._unwritten else None
        if chunk is not None and self._work.cache is not None:  # a failing cache disables itself
            self._work.cache.put(self._work.key(chunk.ref), chunk)

    def rejected(self, bad: Sequence[Bad]) -> None:
        if self._quarantine is not None:
            self._quarantine.write(list(bad))

    def totals(self) -> dict[str, int]:
        work = self._work
        network = work.session.network.stats.totals() if work.session is not None else {}
        cache = work.cache.counts() if work.cache is not None else {}
        return network | cache | {"cache_skipped": self.skipped_writes}

    def gauges(self) -> dict[str, Any]:
        session = self._work.session
        return {
            "fetch": session.network.stats.times() if session and self.fetches else None,
            "fetches": self.fetches,
            "cached": self._work.cache is not None,
            "source_chunks": SourceChunks(np.ones(self._estimated_chunks()), self._chunk_bytes),
        }

    def _estimated_chunks(self) -> int:
        """Return an estimate of the number of chunks, from the files that were looked up."""
        known = [len(task.result()[0]) for task in list(self._looked_up.values()) if task.ready()]
        if known:
            return round(sum(known) / len(known) * len(self._files))
        return sum(-(-file.size // self._chunk_bytes) for file in self._files)

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        super().close()
        while self._unwritten and time.monotonic() < deadline:  # the rest is dropped
            self._write_next()
        if self._quarantine is not None:
            self._quarantine.close()


class TextSource(ChunkSource):
    """A `TextDataset` as the loader sees it."""

    dataset: TextDataset

    def __init__(self, dataset: TextDataset) -> None:
        super().__init__(dataset, dataset.options.shuffle_chunks)
        self.skip = dataset.read.skip

    def data_id(self) -> dict[str, Any]:
        return self.dataset.data_id()

    def tokenizer_id(self) -> dict[str, Any]:
        return self.dataset.tokenizer_id()

    def settings_id(self) -> dict[str, Any]:
        settings, read = super().settings_id(), self.dataset.read
        if read.split is not None:
            settings |= {"split": read.split, "val_fraction": read.val_fraction}
        if read.filter is not None:
            settings["filter"] = str(read.filter)
        if read.transform is not None:
            settings["transform"] = read.transform[0]
        if read.separator is not None:
            settings["separator"] = read.separator.decode("utf-8", "backslashreplace")
        return settings

    def listings(self) -> list[tuple[float, float]]:
        listings, self.dataset.listings = self.dataset.listings, []
        return listings

    def check_state(self, state: State) -> None:
        dataset, saved = self.dataset, str(state.data.get("files"))
        if saved != self.data_id()["files"] and dataset.remote_config is not None:
            change = dataset.remote_config.explain_change(saved, dataset.files)
            if change is not None:
                raise SourceError(f"the data changed since the state was saved: {change}")

    def work(self, run: RunContext) -> TextWork:
        dataset, path = self.dataset, self.dataset.options.store
        store = None if path is None else TokenStore(path)
        work = TextWork(
            replace(dataset.read, skip=run.skip),
            dataset.tokenizer,
            dataset.remote.doc_batch,
            run.n_workers,
            len(run.own_lanes),
            dataset.remote_config,
            run.clock,
            store,
        )
        if store is not None:
            from penstock.prepare.manifest import require_settings

            require_settings(store, work.settings)
        return work

    def open_lanes(self, run: RunContext, pool: Pool, work: TextWork) -> ChunkLanes:
        dataset = self.dataset
        reader = FileChunks(dataset, run, pool, work)
        if any(file.sequential for file in dataset.files):
            decompressors = work.lane_bytes * len(run.own_lanes)
            run = replace(run, read_ahead_bytes=max(1, run.read_ahead_bytes - decompressors))
        plan = Plan(files=dataset.files, lanes=run.lanes, shuffle=run.shuffle, seed=run.seed)
        return ChunkLanes(self, plan, reader, run, pool, dataset.remote.report_docs)

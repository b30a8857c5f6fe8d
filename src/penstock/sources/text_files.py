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
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from penstock.config import access_variables, adopt
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import (
    CorruptFile,
    LoaderClosed,
    SourceError,
    StateError,
)
from penstock.feed.worker_pool import Pool, Task, ThreadPool
from penstock.order.plan import Plan
from penstock.prepare.manifest import require_settings
from penstock.read.arrow_utils import empty
from penstock.read.reader import MAX_CHUNK_BYTES, Reader
from penstock.read.settings import ReadSettings
from penstock.read.storage import BombError, Bytes
from penstock.read.token_store import Key, TokenStore
from penstock.read.validation import Quarantine
from penstock.sources.base import RowSource, RunContext, Work, noted
from penstock.sources.chunk_lanes import ChunkLanes, ChunkReader, text_lanes
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
"""Increased when the same text would give other token chunks than before."""
LOOKED_UP = 64
"""Files whose chunks are remembered, beyond those of the current group."""
UNWRITTEN_BYTES = 64 * MiB
"""Token chunks that may wait to be written to the cache. More ride out a slower disk."""
CLOSE_S = 5.0
"""How long a shutdown writes to the cache. What a slow disk leaves undone by then is dropped."""
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
        store: TokenStore | None = None,
    ) -> None:
        """`store` has prepared chunks."""
        self.clock, self.store = clock or NullClock(), store
        self._made_of = (read, tokenizer, doc_batch, n_workers, lanes, remote, self.clock, store)
        self._read, self._tokenizer, self._doc_batch = read, tokenizer, doc_batch
        session = None if remote is None else remote.open()
        self.session: RemoteSession | None = session
        files, kept = (None, None) if session is None else (session.files, session.metadata)
        self._reader = Reader(read, n_workers, lanes, files, kept, self.clock)
        self.lane_bytes = self._reader.lane_bytes
        """Memory for the decompressed parts of compressed files, for each lane."""
        self.cache: TokenStore | None = None if remote is None else remote.cache()
        self.fetches = 0 if remote is None else remote.limits.fetches
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
        """The settings that decide the tokens of every chunk."""
        self._stopped = False
        self._stored_names: set[str] | None = None
        self._identities: dict[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        access = access_variables() if self._made_of[5] is not None else None
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
        """Return a chunk's tokens: from the store or the cache, or decoded and tokenized."""
        if fetched is None and self.store is not None and has_version(ref.file):
            with self.clock.stage("fetch", ref) as timeline:
                chunk = self._stored(self.store, ref)
            if chunk is not None:
                timeline.count("fetch", 1, chunk.nbytes)
                return chunk
        if fetched is None and self.cache is not None and self.caches(ref.file):
            with self.clock.stage("fetch", ref) as timeline:
                chunk = self.cache.get(self.key(ref), ref)
            if chunk is not None and self._may_use(chunk):
                chunk.cached = True
                timeline.count("fetch", 1, chunk.nbytes)
                return chunk
        return self.tokenize(ref, self.decode(ref, fetched))

    def read_next(self, ref: ChunkRef, before: Documents | TokenChunk | None = None) -> Documents:
        """Return the documents of a chunk of a sequential file; `before` is the chunk before it."""
        if before is not None and before.last:
            return Documents(empty(pa.large_string()), np.empty(0, np.int64), last=True)
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

    # The token cache, and prepared chunks

    def _may_use(self, chunk: TokenChunk) -> bool:
        """Return False for a chunk with rejected records that are to be raised: by reading it again."""
        return not (chunk.bad and self._read.on_bad_record == "raise")

    def has_stored(self, ref: ChunkRef) -> bool:
        """Return True if the chunk, or the chunk that it is a part of, is in the store."""
        if self.store is None:
            return False
        if self._stored_names is None:
            self._stored_names = {entry.name for entry in self.store.list()}
        return self.key(self._reader.whole(ref)).name in self._stored_names

    def _stored(self, store: TokenStore, ref: ChunkRef) -> TokenChunk | None:
        """Return a chunk's documents from the entry of the whole chunk."""
        whole = self._reader.whole(ref)
        chunk = store.get(self.key(whole), ref)
        if chunk is None or not self._may_use(chunk):
            return None
        chunk.cached = True
        if (whole.part, whole.parts) != (ref.part, ref.parts):
            lo, hi = self._reader.rows_of(ref)
            first, last = np.searchsorted(chunk.rows, [lo, hi])
            share = (last - first) / max(1, len(chunk.rows))
            chunk.docs, chunk.rows = chunk.docs[first:last], chunk.rows[first:last]
            chunk.bad = [bad for bad in chunk.bad if lo <= bad.address.row < hi]
            # The entry has them for the whole chunk.
            counts = (chunk.empty, chunk.text_bytes, chunk.filtered)
            chunk.empty, chunk.text_bytes, chunk.filtered = (round(n * share) for n in counts)
        return chunk

    def key(self, ref: ChunkRef) -> Key:
        """Return a chunk's key in the cache: everything that decides its tokens."""
        file = ref.file
        names = {member.name for member in file.members} or {file.name}
        skip = sorted(([a.group, a.row] for a in self._read.skip if a.file in names), key=str)
        settings = self.settings | {
            "part": [ref.part, ref.parts, ref.span],
            "format": [file.format, file.codec],
            "skip": skip,
        }
        if (source := self._identities.get(file.path)) is None:
            source = self._identities[file.path] = identity(file)
        return Key(source, ref.index, json.dumps(settings, sort_keys=True))

    def caches(self, file: FileRef) -> bool:
        """Return True if there is a cache, and a change of the file would be noticed."""
        return self.cache is not None and has_version(file)

    def has_cached(self, ref: ChunkRef) -> bool:
        return self.cache is not None and self.caches(ref.file) and self.cache.exists(self.key(ref))

    def save(self, chunk: TokenChunk) -> None:
        """Write a chunk to the cache. A cache that fails turns itself off, and the run continues."""
        assert self.cache is not None
        self.cache.put(self.key(chunk.ref), chunk)

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
    """Return False if a change could not be noticed: the server sends neither an ETag nor a date."""
    return not file.remote or all(file.etag.split(",") if file.members else [file.etag])


def identity(file: FileRef) -> str:
    """Return what identifies a file and its content, without the Hub's commit: the ETag is enough."""
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
    return identity


def _in_worker_process(access: dict[str, str] | None, *made_of: Any) -> TextWork:
    if access is not None:
        adopt(access)
    return TextWork(*made_of)


def _same_chunk(ref: ChunkRef, chunk: TokenChunk) -> TokenChunk:
    return replace(chunk, ref=ref, cached=True)


class FileChunks(ChunkReader):
    """The chunks of files, for the lanes of one rank."""

    def __init__(self, dataset: TextDataset, run: RunContext, pool: Pool, work: TextWork) -> None:
        self._files, self._pool, self._work = dataset.files, pool, work
        self._chunk_bytes = dataset.options.chunk_bytes
        self._looked_up: OrderedDict[int, Task[tuple[list[ChunkRef], list[Bad]]]] = OrderedDict()
        self._unreadable: set[int] = set()
        self._bad_files: list[Bad] = []
        self._before: dict[int, tuple[FileRef, Task[Any]]] = {}
        """By lane: the chunk before the next one of the sequential file that the lane reads."""
        self._ahead: WeakValueDictionary[tuple[Any, ...], Task[Any]] = WeakValueDictionary()
        """Remote chunks that are read ahead. The next epoch of a small dataset needs them too."""
        self._quarantine = Quarantine(dataset.quarantine) if dataset.quarantine else None
        self._unwritten: deque[TokenChunk] = deque()
        self._writing = threading.Lock()
        self.skipped_writes = 0
        self.fetches = dataset.fetches() if pool.n_workers else 0
        threads = self.fetches or int(pool.n_workers > 0 and work.cache is not None)
        if pool.n_workers and work.store is not None and "://" in work.store.place:
            threads = max(threads, dataset.remote.fetches)
        self.io: ThreadPool | None = None
        if threads:
            self.io = ThreadPool(threads, work, name="fetch", clock=run.clock)
            if work.session is not None:
                work.session.network.threads = self.io
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
        if self.io is not None and self._work.caches(ref.file):
            task.add_done_callback(self._made)
        if not self._prepared:  # the vocabulary is loaded while the first chunk is read
            self._prepared = True
            self._pool.submit("prepare")
        return task

    def _submit(self, ref: ChunkRef) -> Task[TokenChunk]:
        store = self._work.store
        if store is not None and self._work.has_stored(ref):
            pool = self.io if self.io is not None and "://" in store.place else self._pool
            task = pool.submit("encode", ref)
            self._before[ref.lane] = ref.file, task
            return task
        if ref.file.sequential:
            return self._submit_sequential(ref)
        if self.io is None or not ref.file.remote or ref.file.codec or self._work.has_cached(ref):
            return self._pool.submit("encode", ref)
        key = (ref.file.path, ref.index, ref.part, ref.parts, ref.span)
        if (earlier := self._ahead.get(key)) is not None:
            task = self._pool.submit(_same_chunk, ref, after=earlier)
        else:
            task = self._pool.submit("encode", ref, after=self.io.submit("fetch", ref))
        self._ahead[key] = task
        return task

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

    def _made(self, task: Future[TokenChunk]) -> None:
        """Have a chunk written, whether or not the stream comes to it. Called on any thread."""
        if task.cancelled() or task.exception() is not None or (chunk := task.result()).cached:
            return
        with self._writing:
            waiting = sum(other.nbytes for other in self._unwritten)
            if waiting and waiting + chunk.nbytes > UNWRITTEN_BYTES:
                self.skipped_writes += 1
                return
            self._unwritten.append(chunk)
        assert self.io is not None
        with suppress(LoaderClosed):  # then `close` writes it
            self.io.submit(self._write_next)

    def _write_next(self) -> None:
        with self._writing:
            chunk = self._unwritten.popleft() if self._unwritten else None
        if chunk is not None:
            self._work.save(chunk)

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
        """Return about how many chunks all files have, from those that were looked up."""
        known = [len(task.result()[0]) for task in list(self._looked_up.values()) if task.ready()]
        if known:
            return round(sum(known) / len(known) * len(self._files))
        return sum(-(-file.size // self._chunk_bytes) for file in self._files)

    def set_fetches(self, fetches: int) -> None:
        """Have more or fewer requests in flight. The stream stays the same."""
        assert self.io is not None
        self.io.resize(fetches)
        self.fetches = fetches

    def stop(self) -> None:
        if self.io is not None:
            self.io.stop()

    def close(self) -> None:
        if self.io is not None:
            deadline = time.monotonic() + CLOSE_S
            self.io.join(CLOSE_S)
            while self._unwritten and time.monotonic() < deadline:
                self._write_next()
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
                    raise StateError(
                        f"the state continues lane {lane} at group {at.group} of {groups} groups of "
                        "files: it belongs to other data"
                    )
        elif dataset.remote_config is not None:
            change = dataset.remote_config.explain_change(files, dataset.files)
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
            require_settings(store, work.settings)
        return work

    def open_lanes(self, run: RunContext, pool: Pool, work: TextWork) -> ChunkLanes:
        dataset = self.dataset
        reader = FileChunks(dataset, run, pool, work)
        if any(file.sequential for file in dataset.files):
            decompressors = work.lane_bytes * len(run.own_lanes)
            run = replace(run, read_ahead_bytes=max(1, run.read_ahead_bytes - decompressors))
        report_docs = dataset.remote.report_docs
        return text_lanes(
            self, dataset.files, dataset.options, dataset.tokenizer, reader, run, pool, report_docs
        )

"""Prepare a corpus: tokenize every chunk of the source and write it to a token store.

The unit of work is the address of a chunk, or of a whole file if it can only be decompressed in
order. An entry's name is derived from its address and the settings, and writes are atomic, so a
repeated run makes only the missing entries. Engines differ only in where `make_entries` runs.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any, Literal

import numpy as np
from rich.filesize import decimal as size

from penstock import __version__
from penstock.config import available_cores, whole_number
from penstock.dataset import TextDataset, any_remote
from penstock.encode.window import flatten
from penstock.errors import ConfigError, SourceError
from penstock.feed.worker_pool import Task, ThreadPool
from penstock.options import TextOptions, options_of
from penstock.prepare.manifest import (
    BLOCK_TOKENS,
    FORMAT,
    Manifest,
    agree_on_plan,
    read_blocks,
    read_manifest,
    write_manifest,
)
from penstock.read.token_store import Header, TokenStore
from penstock.read.validation import Quarantine
from penstock.sources.text_files import TextWork, has_version, identity
from penstock.types import Address, Bad, ChunkRef, GiB, TokenChunk
from penstock.watch import seconds

Path = str | os.PathLike[str]
Made = tuple[ChunkRef, Header]
Engine = Callable[
    [TextWork, ThreadPool, TokenStore, Sequence[ChunkRef], int | None], Iterator[Made]
]

IN_FLIGHT_BYTES = GiB
"""Memory limit for chunks that are being fetched, tokenized or written."""
WRITERS = 4
"""Concurrent writes of entries. They wait for the disk or the bucket, not for a core."""
SAMPLED_BLOCKS = 64
"""Blocks sampled for the percentiles of document lengths."""
TEXT_ONLY = {"seq_len", "packing", "positions", "shuffle_chunks", "cache", "store"}
"""Options of a `TextDataset` that do not affect its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The progress or the result of preparing a corpus."""

    path: str
    complete: bool = False
    """True if the manifest was written, so the corpus can be read."""
    chunks: int = 0
    """Units of work of this run; a file that can only be decompressed in order is one."""
    chunks_done: int = 0
    already: int = 0
    """Units of work that earlier runs finished."""
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Documents, tokens and bytes of the corpus if it is complete, otherwise of this run."""
    text_bytes: int = 0
    filtered: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    """Rejected records by reason."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Percentiles of document lengths in tokens, from a sample of blocks."""
    seconds: float = 0.0
    written: int = 0
    """Tokens written by this run."""

    @property
    def rate(self) -> str:
        """The rate at which this run writes tokens, as text."""
        return f"{self.written / max(1e-9, self.seconds) / 1e6:.2f} million tokens/s"

    def describe_progress(self) -> str:
        """Return a line with the progress, the rate and the time left."""
        done, made = self.chunks_done, self.chunks_done - self.already
        left_s = (self.chunks - done) * self.seconds / max(1, made)
        return f"{done} of {self.chunks} chunks, {self.rate}, {seconds(left_s)} left"

    def as_text(self) -> str:
        """Return a readable summary."""
        lengths = ", ".join(f"{name} {n:,}" for name, n in self.lengths.items())
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in self.bad.items())
        already = f"; {self.already} of {self.chunks} chunks existed" if self.already else ""
        read = f"PreparedDataset({self.path!r}, seq_len=1024)"
        rest = "This part is done. The last part to finish, or a run without --slice, completes it."
        lines = {
            "documents": f"{self.documents:,}",
            "tokens": f"{self.tokens:,} in {size(self.bytes)}",
            "lengths": lengths and f"{lengths} tokens",
            "filtered": self.filtered and f"{self.filtered:,}",
            "rejected": reasons and f"{sum(self.bad.values()):,} ({reasons})",
            "time": f"{seconds(self.seconds)}, {self.rate}{already}",
            "read it" if self.complete else "next": read if self.complete else rest,
        }
        return "\n".join(f"{name:<10} {line}" for name, line in lines.items() if line)


def prepare(
    source: Path | Sequence[Path],
    *,
    tokenizer: Any,
    out: Path,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    slice: tuple[int, int] | None = None,
    ray_address: str | None = None,
    progress: Callable[[Prepared], None] | None = None,
    **text: Any,
) -> Prepared:
    """Tokenize a corpus into `out`, a folder or a bucket, skipping entries that exist.

    source, tokenizer, text: as for `TextDataset`, such as text_field, filter or on_bad_record.
    workers: threads on this machine, or cores of a Ray cluster. Defaults to all available.
    engine: "local", or "ray" for a cluster: `ray_address`, RAY_ADDRESS, or one on this machine.
    slice: (i, n) makes the i-th of n parts, from 0 on, for job arrays. The last part to finish
        writes the manifest, as does a run without `slice`.
    progress: called after each chunk.
    """
    began = time.monotonic()
    for name in text:
        if name in TEXT_ONLY or name not in options_of(TextOptions):
            raise ConfigError(f"{name}=…: not an option of prepare()")
    part, parts = (0, 1) if slice is None else slice
    if not 0 <= part < whole_number("slice", parts, 1):
        raise ConfigError(f"slice={slice!r}: must be (i, n) with 0 <= i < n")
    run = _engine(engine, ray_address)
    dataset = TextDataset(_absolute(source), tokenizer=tokenizer, seq_len=1, cache=False, **text)
    dtype = dataset.tokenizer.dtype
    store = TokenStore(_absolute(out), block_bytes=BLOCK_TOKENS * dtype.itemsize)
    n_workers = available_cores() if workers is None else whole_number("workers", workers, 1)
    with _opened(dataset, n_workers) as (work, io):
        plan = _plan(dataset, work)
        agree_on_plan(store, plan)
        addresses, bad_files = _addresses(dataset, io)
        corpus = Corpus(work, store, addresses)
        own = addresses[part::parts]
        todo = [ref for ref in own if not corpus.is_complete(ref)]
        already = len(own) - len(todo)
        done = Prepared(
            path=store.place, chunks=len(own), chunks_done=already, already=already,
            bad=dict(Counter(each.reason for each in bad_files)),
        )  # fmt: skip
        bad_records = Quarantine(dataset.quarantine) if dataset.quarantine else None
        with closing(bad_records) if bad_records else nullcontext() as quarantine:
            if quarantine is not None and bad_files and part == 0:
                quarantine.write(bad_files)
            for ref, header in run(work, io, store, todo, workers):
                found = corpus.add(header)
                if quarantine is not None and found:
                    quarantine.write(found)
                done = _add(done, ref, header, dtype.itemsize, found, time.monotonic() - began)
                if progress is not None:
                    progress(done)
        agree_on_plan(store, _plan(dataset, work))  # the files may have changed during the run
        if corpus.list_again():
            entries = list(corpus.read_headers(io))
            reasons = Counter(each.reason for each in bad_files)
            about = write_manifest(store, plan, dataset.files, entries, reasons)
            names = ("documents", "tokens", "bytes", "text_bytes", "filtered", "bad")
            done = replace(done, complete=True, **{name: about[name] for name in names})
            done = replace(done, lengths=_lengths(store, read_manifest(store), dtype))
    return replace(done, seconds=time.monotonic() - began)


def _absolute(places: Any) -> Any:
    """Return absolute paths, because workers of a cluster run in other folders."""
    if not isinstance(places, str | os.PathLike):
        return [_absolute(place) for place in places]
    place = os.fspath(places)
    return place if any_remote(place) else os.path.abspath(place)


def _engine(engine: str, ray_address: str | None) -> Engine:
    if engine == "local":
        return run_local
    if engine != "ray":
        raise ConfigError(f"engine={engine!r}: must be 'local' or 'ray'")
    from penstock.prepare.ray import run_on

    return run_on(ray_address)


def _add(
    done: Prepared, ref: ChunkRef, header: Header, itemsize: int, bad: list[Bad], seconds: float
) -> Prepared:
    tokens = sum(block.id_bytes for block in header.blocks) // itemsize
    documents = sum(block.documents for block in header.blocks)
    return replace(
        done,
        chunks_done=done.chunks_done + (not ref.file.sequential or header.chunk["last"]),
        documents=done.documents + documents,
        tokens=done.tokens + tokens,
        bytes=done.bytes + header.size,
        text_bytes=done.text_bytes + header.chunk["text_bytes"],
        filtered=done.filtered + header.chunk["filtered"],
        bad=dict(Counter(done.bad) + Counter(each.reason for each in bad)),
        seconds=seconds,
        written=done.written + tokens,
    )


@contextmanager
def _opened(dataset: TextDataset, n_workers: int) -> Iterator[tuple[TextWork, ThreadPool]]:
    """Open the files of a dataset, and start threads that list, fetch and write."""
    work = TextWork(dataset.read, dataset.tokenizer, None, n_workers, 1, dataset.remote_config)
    with io_pool(work, n_workers) as io:
        try:
            yield work, io
        finally:
            work.stop()
    work.close()


@contextmanager
def io_pool(work: TextWork, n_workers: int) -> Iterator[ThreadPool]:
    """Start threads that list, fetch and write for `n_workers` workers."""
    pool = ThreadPool(max(WRITERS, work.fetches, n_workers), work, name="fetch")
    try:
        yield pool
    finally:
        pool.stop()
        pool.join(10.0)


def _plan(dataset: TextDataset, work: TextWork) -> dict[str, Any]:
    """Return everything that determines the corpus."""
    tokenizer = dataset.tokenizer
    for file in dataset.files:
        if not has_version(file):
            raise SourceError(
                f"{file.path}: its server sends neither an ETag nor a date, so a change cannot be "
                "detected. Use another server, or copy the file to disk."
            )
    return {
        "format": FORMAT,
        "penstock": __version__,
        "settings": work.settings,
        "tokenizer": dataset.tokenizer_id() | {
            "dtype": tokenizer.dtype.name,
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad_id,
        },
        "files": [
            {
                "source": identity(file),
                "name": file.name,
                "size": file.size,
                "format": file.format,
                "members": [member.name for member in file.members],
            }
            for file in dataset.files
        ],
    }  # fmt: skip


def _addresses(dataset: TextDataset, io: ThreadPool) -> tuple[list[ChunkRef], list[Bad]]:
    """Return the units of work in corpus order, and the files that cannot be read."""
    tasks = [None if file.sequential else io.submit("inspect", file) for file in dataset.files]
    addresses: list[ChunkRef] = []
    bad_files: list[Bad] = []
    for file, task in zip(dataset.files, tasks, strict=True):
        refs, bad = ([ChunkRef(file, 0, file.size)], []) if task is None else task.result()
        addresses += refs
        bad_files += bad
    return addresses, bad_files


class Corpus:
    """Tracks which entries of a corpus exist."""

    def __init__(self, work: TextWork, store: TokenStore, addresses: list[ChunkRef]) -> None:
        self._work, self._store, self._addresses = work, store, addresses
        self._names = {entry.name for entry in store.list()}
        self._headers: dict[str, Header] = {}

    def add(self, header: Header) -> list[Bad]:
        """Add a new entry. Return its rejected records."""
        self._headers[header.key.name] = header
        return [Bad(Address(*where), *why) for where, *why in header.chunk["bad"]]

    def list_again(self) -> bool:
        """List the entries again. Return True if the corpus is complete."""
        self._names = {entry.name for entry in self._store.list()}
        return all(map(self.is_complete, self._addresses))

    def is_complete(self, ref: ChunkRef) -> bool:
        refs = self._existing(ref)
        return bool(refs) and (not ref.file.sequential or self._header(refs[-1]).chunk["last"])

    def _existing(self, ref: ChunkRef) -> list[ChunkRef]:
        """Return the existing chunks of an address, up to the first missing one."""
        indices = count() if ref.file.sequential else (ref.index,)
        every = (replace(ref, index=index) for index in indices)
        return [*takewhile(lambda each: self._work.key(each).name in self._names, every)]

    def _header(self, ref: ChunkRef) -> Header:
        name = self._work.key(ref).name
        if name not in self._headers:
            self._headers[name] = self._store.header(name)
        return self._headers[name]

    def read_headers(self, io: ThreadPool) -> Iterator[Made]:
        """Yield all entries in corpus order."""
        refs = [each for ref in self._addresses for each in self._existing(ref)]
        tasks = [io.submit(self._header, ref) for ref in refs]
        for ref, task in zip(refs, tasks, strict=True):
            yield ref, task.result()


def run_local(
    work: TextWork, io: ThreadPool, store: TokenStore, refs: Sequence[ChunkRef], workers: int | None
) -> Iterator[Made]:
    """Make entries with worker threads on this machine."""
    n_workers = workers or available_cores()
    pool = ThreadPool(n_workers, work)
    try:
        yield from make_entries(work, io, store, refs, pool, 2 * n_workers + work.fetches)
    finally:
        pool.stop()
        pool.join(10.0)


def make_entries(
    work: TextWork,
    io: ThreadPool,
    store: TokenStore,
    refs: Sequence[ChunkRef],
    pool: ThreadPool,
    ahead: int,
) -> Iterator[Made]:
    """Fetch, tokenize and write chunks, up to `ahead` at a time, and yield entries in order."""
    pending: deque[tuple[int, Task[list[Made]]]] = deque()

    def put(ref: ChunkRef, chunk: TokenChunk) -> list[Made]:
        header = store.put(work.key(ref), chunk)
        assert header is not None  # this store raises instead of returning None
        return [(ref, header)]

    def make_file(ref: ChunkRef) -> list[Made]:
        made: list[Made] = []
        while not made or not made[-1][1].chunk["last"]:
            made += put(ref, work.encode(ref))
            ref = replace(ref, index=ref.index + 1)
        return made

    for number, ref in enumerate(refs):
        if ref.file.sequential:
            # Files that are open at the same time need separate readers.
            ref = replace(ref, lane=number % ahead, nbytes=work.lane_bytes)
            task = pool.submit(make_file, ref)
        else:
            remote = ref.file.remote and not ref.file.codec
            fetched = io.submit("fetch", ref) if remote else None
            task = io.submit(put, ref, after=pool.submit("encode", ref, after=fetched))
        pending.append((work.expansion * ref.nbytes, task))
        while len(pending) >= ahead or sum(size for size, _ in pending) > IN_FLIGHT_BYTES:
            yield from pending.popleft()[1].result()
    while pending:
        yield from pending.popleft()[1].result()


def _lengths(store: TokenStore, manifest: Manifest, dtype: np.dtype[Any]) -> dict[str, int]:
    """Return percentiles of document lengths in tokens, from evenly spaced blocks."""
    n = len(manifest.offsets)
    lengths = [np.zeros(0, np.int64)]
    sampled = np.unique(np.linspace(0, n - 1, min(n, SAMPLED_BLOCKS)).astype(np.int64))
    _, names, blocks = manifest.locate(sampled)
    for name, block in zip(names, blocks, strict=True):
        batch = read_blocks(store, name, [block])
        lengths.append(np.diff(flatten(batch.column(0), dtype)[1]))
    found = np.concatenate(lengths)
    found = found[found > 0]
    if not len(found):
        return {}
    return {f"p{p}": int(np.percentile(found, p)) for p in (5, 25, 50, 75, 95, 99)} | {
        "max": int(found.max())
    }

"""What workers do with files: list their chunks, and turn a chunk into tokens.

In:    a file, or the address of a chunk and what was fetched for it.
Out:   its chunks, or its token chunk: from the cache where it is there.
Where: worker threads or processes; `inspect` and `fetch` of what is remote on fetch threads.
State: open files, footers and connections, behind locks. What it is made of travels to other
       processes, where each copy opens its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.config import access_variables, adopt
from penstock.encode.engines import text_buffers
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import CorruptFile, LoaderClosed
from penstock.read.columns import nothing
from penstock.read.reader import MAX_CHUNK_BYTES, Reader
from penstock.read.settings import ReadSettings
from penstock.read.storage import BombError, Bytes
from penstock.types import Bad, ChunkRef, Documents, FileRef, TokenChunk
from penstock.watch.spans import Clock, Quiet

if TYPE_CHECKING:
    # Local files need no network, and its libraries take a while to import.
    from penstock.read.cache import TokenCache
    from penstock.read.cache_file import Key
    from penstock.read.cache_room import When
    from penstock.sources.network import Opened, Outside

FORMAT = 1
"""Counts up when the same text would give other token chunks than before."""
BESIDE_S = 0.1
"""How long the vocabulary is not loaded, for the first chunk's file to be read before."""
DAMAGE = (CorruptFile.reason, BombError.reason)


class TextWork:
    """The work of one run."""

    def __init__(
        self,
        read: ReadSettings,
        tokenizer: Tokenizer,
        doc_batch: int | None,
        workers: int,
        lanes: int,
        outside: Outside | None = None,
        clock: Clock | None = None,
        *,
        threads: bool = False,
    ) -> None:
        self.clock = clock or Quiet()
        self._made_of = (read, tokenizer, doc_batch, workers, lanes, outside, self.clock)
        self._tokenizer = tokenizer
        self._doc_batch = doc_batch
        self._opened: Opened | None = outside.open(threads=threads) if outside is not None else None
        files, kept = (
            (None, None) if self._opened is None else (self._opened.files, self._opened.kept)
        )
        self._reader = Reader(read, workers, lanes, files, kept, self.clock)
        self.lanes = lanes
        """Those that share it."""
        self.lane_bytes = self._reader.lane_bytes
        """What the decompressed parts of files may take for each of them, where files are compressed."""
        self.reported: set[int] = set()
        """Files that cannot be read at all, by number: told of once, however often lanes are opened."""
        self.cache: TokenCache | None = outside.cache() if outside is not None else None
        self._stopped = False
        self._foreseen: dict[range, When] = {}
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        self._settings = _settings(read, tokenizer)
        self._skip: dict[str, list[Any]] = {}
        for file, group, row in sorted(read.skip, key=str):
            self._skip.setdefault(file, []).append([group, row])

    def __reduce__(self) -> tuple[Any, ...]:
        return _elsewhere, (
            access_variables() if self._made_of[-2] is not None else None,
            *self._made_of,
        )

    def prepare(self, beside: bool = False) -> None:
        """Load what the first chunk will need, while it is fetched; or `beside` another thread, while it is decoded.

        To load a vocabulary holds the GIL, which to decode does not need once it has begun.
        """
        if beside:
            self._reader.await_begin(BESIDE_S)
        self._tokenizer.engine.prepare()

    def inspect(self, file: FileRef) -> tuple[list[ChunkRef], list[Bad]]:
        try:
            with self.clock.stage("fetch", file):
                return self._reader.inspect(file)
        except BaseException as error:
            error.add_note(f"in stage fetch, listing the chunks of {file.path}")
            raise

    def fetch(self, ref: ChunkRef) -> list[Bytes]:
        try:
            with self.clock.stage("fetch", ref) as track:
                fetched = self._reader.fetch(ref)
            track.count("fetch", 1, sum(map(len, fetched)))
            return fetched
        except BaseException as error:
            error.add_note(f"in stage fetch, reading {ref}")
            raise

    def encode(
        self,
        ref: ChunkRef,
        fetched: list[Bytes] | None = None,
        beyond: bool = False,
        enough: int = 0,
    ) -> TokenChunk:
        """A chunk's tokens. `beyond` says that its file has ended before it; `enough`, that somebody waits for the first
        so many bytes of text: the rest of a long chunk is left for `encode_rest`."""
        stage = "fetch, decode"
        try:
            if beyond:
                empty = Documents(nothing(pa.large_string()), np.empty(0, np.int64), last=True)
                return self._tokenizer.encode(ref, empty)
            if self.cache is not None and fetched is None and self.keeps(ref.file):
                with self.clock.stage("fetch", ref) as track:
                    kept = self.cache.get(self.key(ref), ref)
                if kept is not None:
                    kept.cached = True
                    track.count("fetch", 1, kept.nbytes)
                    return kept
            with self.clock.stage("decode", ref) as track:
                documents = self._documents(ref, fetched)
            track.count("decode", len(documents.rows), documents.texts.nbytes)
            stage = "tokenize"
            documents, rest = _divided(documents, enough) if enough else (documents, None)
            chunk = self._tokenized(ref, documents)
            chunk.rest = rest
            return chunk
        except BaseException as error:
            error.add_note(f"in stage {stage}, reading {ref}")
            raise

    def encode_rest(self, begun: TokenChunk) -> TokenChunk:
        """The tokens of the documents that were left for later."""
        assert begun.rest is not None
        try:
            chunk = self._tokenized(begun.ref, begun.rest)
        except BaseException as error:
            error.add_note(f"in stage tokenize, reading {begun.ref}")
            raise
        if self.cache is not None:
            docs = pa.concat_arrays([begun.docs, chunk.docs])
            rows, text_bytes = (
                np.concatenate([begun.rows, chunk.rows]),
                begun.text_bytes + chunk.text_bytes,
            )
            chunk.whole = TokenChunk(
                begun.ref, docs, rows, chunk.last, begun.bad, begun.empty, text_bytes
            )
        return chunk

    def _tokenized(self, ref: ChunkRef, documents: Documents) -> TokenChunk:
        with self.clock.stage("tokenize", ref) as track:
            chunk = self._tokenizer.encode(ref, documents, self._doc_batch, self._check_closed)
        track.count("tokenize", len(documents.rows), chunk.text_bytes)
        return chunk

    def _check_closed(self) -> None:
        if self._stopped:
            raise LoaderClosed("the loader was shut down")

    def _documents(self, ref: ChunkRef, fetched: list[Bytes] | None) -> Documents:
        if not ref.file.remote or ref.file.codec:
            return self._reader.read(ref)
        if fetched is None:
            fetched = self.fetch(ref)
        damage: CorruptFile | None = None
        try:
            documents = self._reader.read(ref, fetched)
        except CorruptFile as error:
            damage = error
        else:
            if not any(bad.reason in DAMAGE for bad in documents.bad):
                return documents
        # What came over the network is fetched a second time before its damage is believed.
        with self.clock.stage("fetch", ref):
            again = self._reader.fetch(ref, again=True)
        if again != fetched:
            return self._reader.read(ref, again)
        if damage is not None:
            raise damage
        return documents

    # The token cache

    def key(self, ref: ChunkRef) -> Key:
        """The address of a token chunk in the cache: everything that decides what is in it."""
        assert self.cache is not None
        file = ref.file
        rest = {
            **self._settings,
            "part": [ref.part, ref.parts],
            "format": [file.format, file.codec],
        }
        if skip := [entry for name in _names(file) for entry in self._skip.get(name, ())]:
            rest["skip"] = skip
        return self.cache.key(self._id(file), ref.index, json.dumps(rest, sort_keys=True))

    def at_hand(self, ref: ChunkRef) -> bool:
        """Whether the cache seems to have a chunk."""
        return self.cache is not None and self.keeps(ref.file) and self.cache.has(self.key(ref))

    def keeps(self, file: FileRef) -> bool:
        """Whether a file's tokens may be kept for another run: something has to tell its content from what may stand at
        the same address by then, which no server has to."""
        return not file.remote or all(file.etag.split(",") if file.members else [file.etag])

    def foresee(self, lanes: range, when: When) -> None:
        """Take `when` for when some lanes need a chunk next. What other lanes said still holds."""
        assert self.cache is not None
        self._foreseen[lanes] = when
        self.cache.foresee(self._needed)

    def _needed(self, file: str, index: int) -> float | None:
        asked = [when(file, index) for when in list(self._foreseen.values())]
        return min((at for at in asked if at is not None), default=None)

    def file_hash(self, file: FileRef) -> str:
        """How the cache names a file."""
        assert self.cache is not None
        return self.cache.key(self._id(file), 0, "").file

    def _id(self, file: FileRef) -> str:
        """A file and its content. The Hub's commits are left out: the ETag says what is in it."""
        with self._lock:
            known = self._ids.get(file.path)
        if known is not None:
            return known
        path = file.path
        if path.startswith("hf://"):
            before, _, after = path.partition("@")
            path = before + "/" + after.partition("/")[2]
        version = file.etag
        if not file.remote:
            paths = [member.path for member in file.members] or [file.path]
            version = hashlib.sha256(
                repr([os.stat(p).st_mtime_ns for p in paths]).encode()
            ).hexdigest()[:16]
            path = os.path.realpath(path)
        # The name is part of it: a document's split depends on it.
        identity = f"{path}\n{file.name}\n{file.size}\n{version}"
        if file.members:
            names = repr([(member.name, member.size) for member in file.members])
            identity += (
                f"\n{hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
            )
        with self._lock:
            self._ids[file.path] = identity
        return identity

    def counts(self) -> dict[str, Any]:
        """What the network was asked for."""
        return self._opened.counts() if self._opened is not None else {}

    def fetch_times(self) -> dict[str, Any] | None:
        """Where the network's time goes, if there is one."""
        return self._opened.times() if self._opened is not None else None

    def resize(self, fetches: int) -> None:
        """Have more or fewer requests under way at once."""
        if self._opened is not None:
            self._opened.resize(fetches)

    def stop(self) -> None:
        self._stopped = True
        self._reader.stop()
        if self._opened is not None:
            self._opened.stop()

    def close(self) -> None:
        self._reader.close()
        if self._opened is not None:
            self._opened.close()


def _elsewhere(access: dict[str, str] | None, *made_of: Any) -> TextWork:
    """The same work in a worker process."""
    if access is not None:
        adopt(access)
    return TextWork(*made_of)


def _divided(documents: Documents, enough: int) -> tuple[Documents, Documents | None]:
    """Documents that together have `enough` bytes of text, and the others, if these are worth being left for later."""
    if len(documents.rows) == 0:
        return documents, None
    _, offsets = text_buffers(documents.texts)
    first = int(np.searchsorted(offsets, enough))
    if offsets[min(first, len(offsets) - 1)] * 2 >= offsets[-1]:
        return documents, None
    texts, rows = documents.texts, documents.rows
    return replace(documents, texts=texts[:first], rows=rows[:first], last=False), Documents(
        texts[first:], rows[first:], documents.last
    )


def _names(file: FileRef) -> list[str]:
    return [member.name for member in file.members] or [file.name]


def _settings(read: ReadSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the ids, besides the file."""
    return {
        "version": FORMAT,
        "tokenizer": [tokenizer.cache_key, tokenizer.dtype.name],
        "text_field": read.text_field,
        "separator": None if read.separator is None else read.separator.hex(),
        "chunk_bytes": [read.chunk_bytes, MAX_CHUNK_BYTES],
        "split": [read.split, read.val_fraction, read.split_seed]
        if read.split is not None
        else None,
        "bad": [read.on_bad_record == "raise", read.max_doc_bytes, read.max_ratio],
    }

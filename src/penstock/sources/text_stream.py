"""Text that cannot be addressed: a generator, a `datasets` stream, any iterable of documents.

In:    an iterable of strings, of mappings with a text field, or of arrays of ids.
Out:   rows, by lane, through the same tokenizer and packing as files.
Where: the iterable is read by one worker thread at a time, in order; tokenizing is spread over all.
State: as for files, with chunks of documents in place of chunks of bytes; see `tape` for a resume.
Cost:  every rank reads the whole iterable and keeps its own lanes' chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.config import one_of, whole_number
from penstock.encode.collate import plain
from penstock.encode.tokenize import Tokenizer, load_tokenizer
from penstock.encode.window import Place
from penstock.errors import BadRecord, ConfigError
from penstock.feed.pool import Pool, Task
from penstock.order.plan import Plan
from penstock.read.tape import END, Tape, known, name_of
from penstock.sources.source import RowSource, Run
from penstock.sources.text import PackSettings, TextLanes, check_place
from penstock.types import (
    AUTO,
    Address,
    ChunkRef,
    Documents,
    FileRef,
    MiB,
    Packing,
    TokenChunk,
)
from penstock.watch.spans import Clock

IDS = np.dtype(np.uint32)
"""The type of ids where there is no tokenizer to say how large they get."""


class TextStream:
    """An iterable of documents, to be streamed as packed rows: made by `TextDataset.from_iterable`."""

    packed = True
    """It gives packed rows of ids."""

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any,
        seq_len: int,
        text_field: str = "text",
        packing: Packing = "concat",
        name: str | None = None,
        eos: str | int | None = AUTO,
        bos: str | int | None = None,
        positions: bool = False,
        chunk_docs: int = 512,
        chunk_bytes: int = 4 * MiB,
        shuffle_chunks: int = 16,
        doc_batch: int | None = None,
    ) -> None:
        """See `TextDataset.from_iterable`."""
        if isinstance(source, str | bytes | Mapping) or not (
            callable(source) or hasattr(source, "__iter__")
        ):
            raise ConfigError(
                f"source={source!r}: needs an iterable of documents, or a function that gives one"
            )
        one_of("packing", packing, ("concat", "best_fit", "bos"))
        self.source = source
        self.known = known(source)
        self.name = name or name_of(source)
        self.seq_len = whole_number("seq_len", seq_len, 1)
        self.text_field = text_field
        self.packing: Packing = packing
        self.positions = bool(positions)
        self.chunk_docs = whole_number("chunk_docs", chunk_docs, 1)
        self.chunk_bytes = whole_number("chunk_bytes", chunk_bytes, 1)
        self.shuffle_chunks = whole_number("shuffle_chunks", shuffle_chunks, 1)
        self.doc_batch = None if doc_batch is None else whole_number("doc_batch", doc_batch, 1)
        self.tokenizer: Tokenizer | None = None
        if tokenizer is not None:
            self.tokenizer = load_tokenizer(tokenizer, eos=eos, bos=bos)

    def __repr__(self) -> str:
        return f"TextStream({self.name}, seq_len={self.seq_len})"


@dataclass(slots=True)
class Pulled:
    """A chunk as it came out of the iterable."""

    documents: Documents
    source: Any


class StreamReader:
    """Reads the iterable, chunk by chunk, for the lanes of one shard."""

    def __init__(
        self, stream: TextStream, lanes: int, places: Mapping[int, Place], partial: bool
    ) -> None:
        """`partial`: whether documents before a failure may come without those after it."""
        self._stream = stream
        self._lanes = lanes
        self._places = dict(places)
        self._tape = Tape(stream.source, stream.name, stream.known)
        self._partial = partial
        self._late: Exception | None = None
        self._lock = threading.Lock()
        self._ready: dict[tuple[int, int], Pulled] = {}
        self._failed: Exception | None = None
        self._ended = False
        # The lane that is furthest behind decides where to begin; a place names the lane's own chunk.
        lane = min(places, key=lambda n: (places[n].epoch, places[n].chunk * lanes + n))
        self._start = places[lane]
        self._number = (
            self._start.chunk * lanes + lane
            if self._start.chunk or self._start.source is not None
            else 0
        )
        self._epoch = self._start.epoch
        self._opened = False

    def read(self, epoch: int, number: int) -> Pulled:
        """A chunk of an epoch; empty, and the last one, where the epoch has fewer."""
        with self._lock:
            wanted = (epoch, number)
            while wanted not in self._ready:
                if self._failed is not None:
                    raise self._failed
                if wanted < (self._epoch, self._number) or (epoch == self._epoch and self._ended):
                    return Pulled(_no_documents(), None)
                try:
                    self._pull()
                except Exception as error:
                    error.add_note(
                        f"in stage fetch, reading {self._stream.name}, document {self._tape.taken}"
                    )
                    self._failed = error
            return self._ready.pop(wanted)

    def _pull(self) -> None:
        """Read the next chunk."""
        if self._late is not None:
            raise self._late
        if not self._opened:
            self._open()
        elif self._ended:
            self._tape.next_epoch()
            self._epoch, self._number, self._ended = self._epoch + 1, 0, False
        said = self._tape.state()
        first = self._tape.taken
        items: list[Any] = []
        size = 0
        while len(items) < self._stream.chunk_docs and size < self._stream.chunk_bytes:
            try:
                item = self._tape.take()
                if item is END:
                    self._ended = True
                    break
                items.append(self._document(item))
            except Exception as error:
                if not items or not self._partial:
                    raise
                self._late = error  # what came before it comes first
                break
            size += len(items[-1] or "")
        if self._wanted():
            place = {"taken": first} if said is None else {"taken": first, "state": said}
            self._ready[self._epoch, self._number] = Pulled(self._documents(items, first), place)
        self._number += 1

    def _wanted(self) -> bool:
        """Whether a lane of ours will ask for the chunk just read: not for one before the place it begins at."""
        index, lane = divmod(self._number, self._lanes)
        place = self._places.get(lane)
        return place is not None and (self._epoch, index) >= (place.epoch, place.chunk)

    def _open(self) -> None:
        self._opened = True
        at = self._start.source or {}
        self._tape.open(self._epoch, int(at.get("taken", 0)), at.get("state"))

    def _document(self, item: Any) -> Any:
        """A text, or the bytes of some ids."""
        if isinstance(item, Mapping):
            if self._stream.text_field not in item:
                known = ", ".join(map(repr, list(item)[:8]))
                raise BadRecord(
                    f"a document has no field {self._stream.text_field!r}; it has {known}"
                )
            item = item[self._stream.text_field]
        if item is None:
            return None
        if isinstance(item, str):
            if self._stream.tokenizer is None:
                raise BadRecord("a document is text, and there is no tokenizer: give tokenizer=…")
            return item
        ids = np.asarray(plain(item))
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise BadRecord(
                f"a document is {type(item).__name__}: needs text, a mapping with one, or ids in one dimension"
            )
        tokenizer = self._stream.tokenizer
        kind = IDS if tokenizer is None else tokenizer.dtype
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(kind).max):
            raise BadRecord(
                f"a document has ids from {ids.min()} to {ids.max()}, which do not fit in {kind}"
            )
        return ids.astype(kind).tobytes()

    def _documents(self, items: list[Any], first: int) -> Documents:
        ids = any(isinstance(item, bytes) for item in items)
        if ids and any(isinstance(item, str) for item in items):
            raise BadRecord("texts and arrays of ids in one stream: give one or the other")
        try:
            empty = b"" if ids else ""
            texts = pa.array(
                [item or empty for item in items], pa.large_binary() if ids else pa.large_string()
            )
        except UnicodeEncodeError as error:
            raise BadRecord(f"a document is not valid Unicode: {error}") from error
        rows = np.arange(first, first + len(items))
        return Documents(texts, rows, last=self._ended, empty=sum(not item for item in items))


def _no_documents() -> Documents:
    return Documents(pa.array([], pa.large_string()), np.empty(0, np.int64), last=True)


class StreamWork:
    """What workers do with documents that were read."""

    def __init__(self, tokenizer: Tokenizer | None, doc_batch: int | None, clock: Clock) -> None:
        self.clock = clock
        self._tokenizer = tokenizer
        self._doc_batch = doc_batch

    def encode(self, ref: ChunkRef, documents: Documents, source: Any) -> TokenChunk:
        try:
            texts = documents.texts
            if self._tokenizer is not None and not pa.types.is_large_binary(texts.type):
                with self.clock.stage("tokenize", ref) as track:
                    chunk = self._tokenizer.encode(ref, documents, self._doc_batch)
                track.count("tokenize", len(documents.rows), chunk.text_bytes)
            else:
                docs = texts.cast(pa.large_binary())
                chunk = TokenChunk(
                    ref, docs, documents.rows, documents.last, [], documents.empty, 0
                )
        except BaseException as error:
            error.add_note(f"in stage tokenize, {ref}")
            raise
        chunk.source = source
        return chunk


class StreamLanes(TextLanes):
    """Lanes that share an iterable."""

    def __init__(self, stream: TextStream, run: Run, pool: Pool) -> None:
        file = FileRef(stream.name, stream.name, 0, "text", "iterable")
        places = {n: run.places[n] for n in run.own_lanes}
        self._reader = StreamReader(stream, run.lanes, places, partial=not run.shuffle)
        tokenizer = stream.tokenizer
        super().__init__(
            plan=Plan(files=(file,), lanes=run.lanes, shuffle=run.shuffle, seed=run.seed),
            pack=PackSettings(
                seq_len=stream.seq_len,
                packing=stream.packing,
                window_chunks=stream.shuffle_chunks,
                window_bytes=stream.shuffle_chunks * stream.chunk_bytes,
                extras=stream.positions,
                chunk_bytes=stream.chunk_bytes,
                pad_id=0 if tokenizer is None else tokenizer.pad_id,
                dtype=IDS if tokenizer is None else tokenizer.dtype,
                expansion=2 if tokenizer is None else tokenizer.expansion,
            ),
            run=run,
            pool=pool,
            read_ahead_bytes=run.read_ahead_bytes,
        )

    def chunks_of(self, group: tuple[int, ...]) -> list[list[ChunkRef]]:
        return [[] for _ in group]  # nothing is known of it beforehand

    def submit(self, ref: ChunkRef, place: Place, fresh: bool) -> Task[TokenChunk]:
        def read() -> tuple[Any, ...]:
            with self._run.clock.stage("fetch", ref):
                pulled = self._reader.read(place.epoch, ref.index)
            return ref, pulled.documents, pulled.source

        return self._pool.submit("encode", before=read)


class TextStreamSource(RowSource):
    """A `TextStream`, as the loader sees it."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.seq_len = stream.seq_len
        self.positions = stream.positions
        self.dtype = IDS if stream.tokenizer is None else stream.tokenizer.dtype
        self.skip: frozenset[Address] = frozenset()

    def data_id(self) -> dict[str, Any]:
        return {"iterable": self.stream.name}

    def tokenizer_id(self) -> dict[str, Any]:
        tokenizer = self.stream.tokenizer
        return {} if tokenizer is None else {"fingerprint": tokenizer.fingerprint}

    def settings_id(self) -> dict[str, Any]:
        names = ("seq_len", "packing", "text_field", "chunk_docs", "chunk_bytes", "shuffle_chunks")
        return {name: getattr(self.stream, name) for name in names}

    def first_place(self, epoch: int) -> Place:
        return Place(epoch=epoch)

    def check_place(self, value: Any) -> Place:
        return check_place(value)

    def work(self, run: Run) -> StreamWork:
        return StreamWork(self.stream.tokenizer, self.stream.doc_batch, run.clock)

    def open_lanes(self, run: Run, pool: Pool, work: StreamWork) -> StreamLanes:
        return StreamLanes(self.stream, run, pool)

"""Text from an iterable of documents, such as a generator or a `datasets` stream.

Tasks read the iterable in order, one at a time; all workers tokenize.
Every rank reads the whole iterable and keeps its own lanes' chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.config import whole_number
from penstock.encode.collate import plain
from penstock.encode.tokenizer import Tokenizer, load_tokenizer
from penstock.errors import ConfigError, SourceError, StateError
from penstock.feed.worker_pool import Pool, Task
from penstock.options import TextOptions, from_habit
from penstock.order.plan import Plan
from penstock.read.resumable_iterator import END, ResumableIterator, SharedPosition, name_of
from penstock.sources.base import RunContext, Work, noted
from penstock.sources.chunk_lanes import ChunkLanes, ChunkReader, ChunkSource
from penstock.state import State
from penstock.types import AUTO, ChunkRef, Documents, FileRef, LanePosition, TokenChunk, is_count
from penstock.watch.stage_timer import Clock

OPTIONS = {"text_field", "packing", "eos", "bos", "positions", "chunk_bytes", "shuffle_chunks"}
"""The options of `TextDataset` that also apply here."""


class TextIterable:
    """An iterable of documents, streamed as packed rows. See `TextDataset.from_iterable`."""

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any,
        seq_len: int,
        name: str | None = None,
        chunk_docs: int = 512,
        **more: Any,
    ) -> None:
        """Take the arguments of `TextDataset.from_iterable`."""
        iterable = callable(source) or hasattr(source, "__iter__")
        if isinstance(source, str | bytes | Mapping) or not iterable:
            raise ConfigError(
                f"source={source!r}: must be an iterable of documents, or a function that returns one"
            )
        more = from_habit(more, OPTIONS)
        self.options = TextOptions(tokenizer=tokenizer, seq_len=seq_len, **more)
        self.source, self.shared = source, SharedPosition(source)
        self.name = name or name_of(source)
        self.seq_len = seq_len
        self.chunk_docs = whole_number("chunk_docs", chunk_docs, 1)
        eos, bos = self.options.eos, self.options.bos
        given = tokenizer is not None
        if not given and (eos not in (AUTO, None) or bos is not None):
            raise ConfigError("eos=… and bos=… need a tokenizer: add them to the documents of ids")
        self.tokenizer = load_tokenizer(tokenizer, eos=eos, bos=bos) if given else None

    def __repr__(self) -> str:
        return f"TextIterable({self.name}, seq_len={self.seq_len})"

    def as_source(self) -> TextIterableSource:
        """Return the source of packed rows that a loader reads."""
        return TextIterableSource(self)

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's vocabulary size; None without a tokenizer."""
        return self.tokenizer.vocab_size if self.tokenizer is not None else None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a row of ids, with special tokens by name."""
        if self.tokenizer is None:
            raise ConfigError("decode: these documents are ids, without a tokenizer")
        return self.tokenizer.decode(ids)


class DocumentReader:
    """Reads the iterable chunk by chunk, for the lanes of one rank. One read runs at a time."""

    last: Task[Documents] | None = None
    """The most recently submitted read."""

    def __init__(
        self, data: TextIterable, run: RunContext, positions: Mapping[int, LanePosition]
    ) -> None:
        self._data, self._run, self._positions = data, run, positions
        self._items = ResumableIterator(data.source, data.name, data.shared)
        self._ready: dict[tuple[int, int], Documents] = {}
        """Chunks read but not yet requested by their lane, by epoch and number."""
        # Reading starts at the lane that is furthest behind.
        places = {(at.epoch, at.chunk * run.lanes + lane): at for lane, at in positions.items()}
        self._next = epoch, _ = min(places)
        """Epoch and number of the next chunk to read."""
        self._start = start = places[self._next]
        if not start.chunk and start.source is None:
            self._next = epoch, 0
        self._reading = self._read_chunks()

    def read(self, epoch: int, number: int) -> Documents:
        """Return a chunk of an epoch, or an empty last chunk after the end of the epoch."""
        while (epoch, number) not in self._ready:
            if (epoch, number) < self._next:
                return Documents(pa.nulls(0, pa.large_string()), np.empty(0, np.int64), last=True)
            try:
                next(self._reading)
            except Exception as error:  # later reads depend on this one and fail too
                place = f"{self._data.name}, document {self._items.taken}"
                error.add_note(f"in stage fetch, reading {place}")
                raise
        return self._ready.pop((epoch, number))

    def _read_chunks(self) -> Iterator[None]:
        """Read one chunk per step, and keep it if a lane of this rank needs it."""
        items, data, lanes = self._items, self._data, self._run.lanes
        at = self._start.source or {}
        items.open(self._next[0], int(at.get("taken", 0)), at.get("state"))
        while True:
            (epoch, number), state, first = self._next, items.state(), items.taken
            documents: list[Any] = []
            failed: Exception | None = None
            size, last = 0, False
            while len(documents) < data.chunk_docs and size < data.options.chunk_bytes:
                try:
                    last = (item := items.take()) is END
                    if last:
                        break
                    documents.append(self._document(item))
                except Exception as error:
                    if not documents or self._run.shuffle:
                        raise
                    failed = error  # raised after the documents that came before it
                    break
                size += len(documents[-1] or "")
            own = self._positions.get(number % lanes)
            if own is not None and (epoch, number // lanes) >= (own.epoch, own.chunk):
                chunk = self._documents(documents, first, last)
                chunk.source = {"taken": first} | ({} if state is None else {"state": state})
                self._ready[epoch, number] = chunk
            self._next = (epoch + 1, 0) if last else (epoch, number + 1)
            yield
            if failed is not None:
                raise failed
            if last:
                items.next_epoch()

    def _document(self, item: Any) -> Any:
        """Return a document as text, or as bytes if it is ids."""
        tokenizer, field = self._data.tokenizer, self._data.options.text_field
        if isinstance(item, Mapping):
            if field not in item:
                known = ", ".join(map(repr, list(item)[:8]))
                raise SourceError(f"a document has no field {field!r}; it has {known}")
            item = item[field]
        if item is None:
            return None
        if isinstance(item, str):
            if tokenizer is None:
                raise SourceError("a document is text, but there is no tokenizer. Pass tokenizer=…")
            return item
        ids = np.asarray(plain(item))
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise SourceError(
                f"a document is {type(item).__name__}: must be text, a mapping with a text, or ids in "
                "one dimension"
            )
        dtype = ChunkSource.dtype if tokenizer is None else tokenizer.dtype
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= np.iinfo(dtype).max:
            raise SourceError(f"ids from {ids.min()} to {ids.max()} do not fit in {dtype}")
        return ids.astype(dtype, copy=False).tobytes()

    def _documents(self, items: list[Any], first: int, last: bool) -> Documents:
        ids = any(isinstance(item, bytes) for item in items)
        if ids and any(isinstance(item, str) for item in items):
            raise SourceError("the iterable mixes texts and arrays of ids. Use one or the other")
        nothing, kind = (b"", pa.large_binary()) if ids else ("", pa.large_string())
        try:
            texts = pa.array([item or nothing for item in items], kind)
        except UnicodeEncodeError as error:
            raise SourceError(f"a document is not valid Unicode: {error}") from error
        rows = np.arange(first, first + len(items))
        return Documents(texts, rows, last=last, empty=sum(not item for item in items))


class IterableWork(Work):
    """Tokenizes the documents of a chunk on a worker."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Clock) -> None:
        self.clock, self._tokenizer = clock, tokenizer

    def tokenize(self, ref: ChunkRef, documents: Documents) -> TokenChunk:
        texts = documents.texts
        if self._tokenizer is None or pa.types.is_large_binary(texts.type):
            return TokenChunk.of(ref, texts.cast(pa.large_binary()), documents)
        note = f"in stage tokenize, {ref}"
        with noted(note), self.clock.stage("tokenize", ref) as timeline:
            chunk = self._tokenizer.encode(ref, documents)
        timeline.count("tokenize", len(documents.rows), chunk.text_bytes)
        return chunk


class IterableChunks(ChunkReader):
    """The chunks of an iterable, for the lanes of one rank."""

    def __init__(self, data: TextIterable, run: RunContext, pool: Pool) -> None:
        self._data, self._run, self._pool = data, run, pool
        own = {lane: run.positions[lane] for lane in run.own_lanes}
        self._readers = dict.fromkeys(own, DocumentReader(data, run, own))

    def submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        reader = self._readers[ref.lane]

        def read(_previous: Any = None) -> Documents:
            with self._run.clock.stage("fetch", ref):
                return reader.read(position.epoch, ref.index)

        # Reads run one after another, in any order of lanes; a read keeps the chunks of other lanes.
        # A function runs in this process even if workers are processes.
        reader.last = self._pool.submit(read, after=reader.last)
        return self._pool.submit("tokenize", ref, after=reader.last)

    def reopen(self, lane: int, epoch: int) -> None:
        # A separate reader, because other lanes may still be in the previous epoch.
        start = {lane: LanePosition(epoch=epoch)}
        self._readers[lane] = DocumentReader(self._data, self._run, start)


class TextIterableSource(ChunkSource):
    """A `TextIterable` as the loader sees it."""

    def __init__(self, dataset: TextIterable) -> None:
        super().__init__(dataset, dataset.options.shuffle_chunks)

    def data_id(self) -> dict[str, Any]:
        return {"iterable": self.dataset.name}

    def tokenizer_id(self) -> dict[str, Any]:
        tokenizer = self.dataset.tokenizer
        return {} if tokenizer is None else {"fingerprint": tokenizer.fingerprint}

    def settings_id(self) -> dict[str, Any]:
        return super().settings_id() | {"chunk_docs": self.dataset.chunk_docs}

    def check_state(self, state: State) -> None:
        for at in (position.source for position in state.lane_positions.values()):
            if at is not None and not (isinstance(at, dict) and is_count(at.get("taken"))):
                raise StateError(
                    f"invalid state: the position of an iterable must have 'taken': {at!r:.80}"
                )

    def work(self, run: RunContext) -> IterableWork:
        return IterableWork(self.dataset.tokenizer, run.clock)

    def open_lanes(self, run: RunContext, pool: Pool, work: IterableWork) -> ChunkLanes:
        file = FileRef(self.dataset.name, self.dataset.name, 0, "text", "iterable")
        plan = Plan(files=(file,), lanes=run.lanes, shuffle=run.shuffle, seed=run.seed)
        return ChunkLanes(self, plan, IterableChunks(self.dataset, run, pool), run, pool)

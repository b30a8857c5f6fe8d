"""A window: the documents of some chunks in their shuffled order, and where each came from.

In:    the token chunks of one window.
Out:   flat ids of any stretch of its documents; the way from a token back to its file and row.
Where: the producer thread.
State: the ids of the window. Its `WindowMap` has none of them and may outlive it: batches keep it
       for `provenance()` and for their place in the stream.
Cost:  documents are taken from their chunks and brought into order as they are needed, a stretch at a time: three
       copies that stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.read.columns import integers
from penstock.types import ChunkRef, Span, TokenChunk

I64 = np.ndarray[Any, np.dtype[np.int64]]
Ids = np.ndarray[Any, np.dtype[Any]]


class Place(NamedTuple):
    """Where a lane stands: which window, and where in it the next row begins."""

    epoch: int = 0
    group: int = 0
    chunk: int = 0
    window: int = 0
    """Epoch, group of files, chunk in the group, and number of the window that begins there."""
    doc: int = 0
    """A document of the window, in shuffled order."""
    token: int = 0
    row: int = 0
    """Rows already taken from the group of documents that begins at `doc` (best_fit only)."""
    source: Any = None
    """What an iterable's own `state_dict` said before the window's first chunk, where it has one."""

    def place(self) -> Place:
        return self

    def to_list(self) -> list[Any]:
        """As it is saved: seven integers, and what the source said where it said something."""
        return list(self) if self.source is not None else list(self[:7])


class WindowMap(NamedTuple):
    """A window without its ids."""

    start: Place
    refs: tuple[ChunkRef, ...]
    firsts: I64
    """The number of each chunk's first document, before shuffling; one more at the end."""
    rows: I64
    """The address of each document in its chunk, before shuffling."""
    order: I64 | None
    """Which document comes when; None where they keep their order."""
    ends: I64
    """Where each document ends, in tokens of the window, after shuffling."""
    skipped: int = 0
    """Documents of the chunk that came before, in a window of their own."""

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def begin(self, doc: int) -> int:
        """The window's token at which a document begins."""
        return int(self.ends[doc - 1]) if doc > 0 else 0

    def doc_at(self, token: int) -> int:
        """The document that a token of the window belongs to."""
        return int(self.ends.searchsorted(token, side="right"))

    def place(self, token: int, row: int) -> Place:
        """The place of a token, by document, so that it holds even where a document before it is skipped."""
        doc = self.doc_at(token)
        epoch, group, chunk, window, _, _, _, source = self.start
        return Place(
            epoch, group, chunk, window, self.skipped + doc, token - self.begin(doc), row, source
        )

    def token_of(self, place: Place) -> int:
        """The token that a place names."""
        doc = min(place.doc, len(self.ends))
        if doc == len(self.ends):
            return self.tokens
        return min(self.begin(doc) + place.token, int(self.ends[doc]))

    def spans(self, token: int, length: int, at: int) -> list[Span]:
        """Where `length` tokens from `token` on come from; the first stands at `at` in its row."""
        spans = []
        while length > 0:
            doc = self.doc_at(token)
            begin, end = self.begin(doc), int(self.ends[doc])
            n = min(length, end - token)
            spans.append(self._span(doc, (token - begin, token - begin + n), (at, at + n)))
            token, at, length = token + n, at + n, length - n
        return spans

    def _span(self, doc: int, tokens: tuple[int, int], at: tuple[int, int]) -> Span:
        original = doc if self.order is None else int(self.order[doc])
        chunk = int(np.searchsorted(self.firsts, original, side="right")) - 1
        file, index = self.refs[chunk].file, self.refs[chunk].index
        row = int(self.rows[original])
        if file.format == "parquet":
            return Span(file.name, index, None, row, tokens, at)
        number = self.skipped + original - int(self.firsts[chunk])
        if file.members:
            return Span(file.members[row].name, None, 0, number, tokens, at)
        return Span(file.name, None, row, number, tokens, at)


class Window:
    """The ids of a window's documents, to be taken in shuffled order."""

    def __init__(
        self,
        start: Place,
        chunks: Sequence[TokenChunk],
        order: I64 | None,
        dtype: np.dtype[Any],
        skipped: int = 0,
    ) -> None:
        self._dtype = dtype
        self._docs = [chunk.docs for chunk in chunks]
        if order is None and len(chunks) > 1:
            self._docs = [pa.concat_arrays(self._docs)]
        # Shuffled chunks stay apart: to put those of a full window together first would take a tenth of a second, in
        # which batches run out.
        flat = [flatten(docs, dtype) for docs in self._docs]
        self._flat = flat[0][0]
        lengths = np.concatenate([np.diff(offsets) for _, offsets in flat])
        self._order = order
        self.map = WindowMap(
            start=start,
            refs=tuple(chunk.ref for chunk in chunks),
            firsts=np.cumsum([0, *(len(chunk.docs) for chunk in chunks)]),
            rows=np.concatenate([chunk.rows for chunk in chunks]),
            order=order,
            ends=np.cumsum(lengths if order is None else lengths[order]),
            skipped=skipped,
        )

    def gather(self, first: int, last: int) -> Ids:
        """The ids of the documents [first, last), one after the other."""
        if self._order is None:
            return self._flat[self.map.begin(first) : self.map.begin(last)]
        return flatten(self._taken(self._order[first:last]), self._dtype)[0]

    def _taken(self, wanted: I64) -> pa.LargeBinaryArray:
        """Some documents, in this order: from one chunk after the other first, and then into their order."""
        firsts = self.map.firsts
        of = np.searchsorted(firsts, wanted, side="right") - 1
        by_chunk = np.argsort(of, kind="stable")
        sorted_of, sorted_wanted = of[by_chunk], wanted[by_chunk]
        parts = []
        for chunk in np.unique(sorted_of).tolist():
            begin, end = np.searchsorted(sorted_of, [chunk, chunk + 1])
            parts.append(self._docs[chunk].take(integers(sorted_wanted[begin:end] - firsts[chunk])))
        if len(parts) <= 1:
            return (
                parts[0] if parts else self._docs[0][:0]
            )  # sorting has left their order as it was
        back = np.empty_like(by_chunk)
        back[by_chunk] = np.arange(len(back))
        return pa.concat_arrays(parts).take(integers(back))


def flatten(docs: pa.LargeBinaryArray, dtype: np.dtype[Any]) -> tuple[Ids, I64]:
    """The ids of all documents and their offsets, counted in ids, without a copy."""
    _, raw_offsets, raw = docs.buffers()
    if len(docs) == 0 or raw is None:
        return np.empty(0, dtype), np.zeros(len(docs) + 1, np.int64)
    offsets = np.frombuffer(raw_offsets, np.int64)[docs.offset : docs.offset + len(docs) + 1]
    flat = np.frombuffer(raw, np.uint8)[offsets[0] : offsets[-1]].view(dtype)
    return flat, (offsets - offsets[0]) // dtype.itemsize

"""A window: the documents of some chunks in shuffled order, and where each one came from.

Built on the producer thread. A `WindowMap` has no ids and may outlive its window: batches keep it
for `provenance()` and for their position. Documents are gathered a stretch at a time, as they are
needed, so that the copies stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.read.arrow_utils import integers
from penstock.types import ChunkRef, LanePosition, Span, TokenChunk

I64 = np.ndarray[Any, np.dtype[np.int64]]
Ids = np.ndarray[Any, np.dtype[Any]]
APART = 64
"""Windows of more chunks are joined: a stretch of documents would take a little of each of them."""
NO_IDS: Ids = np.empty((0, 0), np.uint16)


class WindowMap(NamedTuple):
    """A window without its ids."""

    start: LanePosition
    refs: tuple[ChunkRef, ...]
    firsts: I64
    """The number of each chunk's first document before shuffling; one more at the end."""
    rows: I64
    """The address of each document in its chunk, before shuffling."""
    order: I64 | None
    """The shuffled order of the documents; None if they keep their order."""
    ends: I64
    """Where each document ends, in tokens of the window, after shuffling."""

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def begin(self, doc: int) -> int:
        """Return the window's token at which a document begins."""
        return int(self.ends[doc - 1]) if doc > 0 else 0

    def doc_at(self, token: int) -> int:
        """Return the document that a token of the window belongs to."""
        return int(self.ends.searchsorted(token, side="right"))

    def position(self, token: int, row: int = 0) -> LanePosition:
        """Return the position of a token. By document, so that it holds if one is skipped later."""
        doc = self.doc_at(token)
        return self.start._replace(doc=doc, token=token - self.begin(doc), row=row)

    def token_of(self, position: LanePosition) -> int:
        """Return the token of a position."""
        if position.doc >= len(self.ends):
            return self.tokens
        return min(self.begin(position.doc) + position.token, int(self.ends[position.doc]))

    def spans(self, token: int, length: int, at: int) -> list[Span]:
        """Return the sources of `length` tokens from `token` on; the first is id `at` of its row."""
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
        number = original - int(self.firsts[chunk])
        if file.members:
            return Span(file.members[row].name, None, 0, number, tokens, at)
        return Span(file.name, None, row, number, tokens, at)


class Window:
    """The ids of a window's documents, to be taken in shuffled order."""

    def __init__(
        self,
        start: LanePosition,
        chunks: Sequence[TokenChunk],
        order: I64 | None,
        dtype: np.dtype[Any],
    ) -> None:
        self._dtype = dtype
        # Shuffled chunks stay apart: joining those of a full window first would take a tenth of
        # a second, in which the queue runs empty.
        self._docs = [chunk.docs for chunk in chunks]
        if len(chunks) > (1 if order is None else APART):
            self._docs = [pa.concat_arrays(self._docs)]
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
        )

    def gather(self, first: int, last: int) -> Ids:
        """Return the ids of the documents [first, last), one after the other."""
        if self._order is None:
            return self._flat[self.map.begin(first) : self.map.begin(last)]
        return flatten(self._taken(self._order[first:last]), self._dtype)[0]

    def _taken(self, wanted: I64) -> pa.LargeBinaryArray:
        """Return documents in this order: taken chunk by chunk, then brought into order."""
        if len(self._docs) == 1:
            return self._docs[0].take(integers(wanted))
        firsts = self.map.firsts
        of = np.searchsorted(firsts, wanted, side="right") - 1
        by_chunk = np.argsort(of, kind="stable")
        sorted_of, sorted_wanted = of[by_chunk], wanted[by_chunk]
        parts = []
        for chunk in np.unique(sorted_of).tolist():
            begin, end = np.searchsorted(sorted_of, [chunk, chunk + 1])
            parts.append(self._docs[chunk].take(integers(sorted_wanted[begin:end] - firsts[chunk])))
        if len(parts) <= 1:
            return parts[0] if parts else self._docs[0][:0]
        back = np.empty_like(by_chunk)
        back[by_chunk] = np.arange(len(back))
        return pa.concat_arrays(parts).take(integers(back))


def flatten(docs: pa.LargeBinaryArray, dtype: np.dtype[Any]) -> tuple[Ids, I64]:
    """Return the ids of all documents and their offsets, counted in ids, without a copy."""
    _, raw_offsets, raw = docs.buffers()
    if len(docs) == 0 or raw is None:
        return np.empty(0, dtype), np.zeros(len(docs) + 1, np.int64)
    offsets = np.frombuffer(raw_offsets, np.int64)[docs.offset : docs.offset + len(docs) + 1]
    flat = np.frombuffer(raw, np.uint8)[offsets[0] : offsets[-1]].view(dtype)
    return flat, (offsets - offsets[0]) // dtype.itemsize

"""A window: the documents of some chunks in shuffled order, and their origins.

Built on the producer thread. A `WindowMap` has no ids and may outlive its window: batches keep it
for `provenance()` and for their position. Documents are gathered on demand, a range at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.types import ChunkRef, LanePosition, Span, TokenChunk

I64 = np.ndarray[Any, np.dtype[np.int64]]
Ids = np.ndarray[Any, np.dtype[Any]]
NO_IDS: Ids = np.empty((0, 0), np.uint16)


class WindowMap(NamedTuple):
    """A window without its ids."""

    start: LanePosition
    refs: tuple[ChunkRef, ...]
    firsts: I64
    """The number of each chunk's first document before shuffling, and the total at the end."""
    rows: I64
    """The address of each document in its chunk, before shuffling."""
    order: I64 | None
    """The shuffled order of the documents; None if they keep their order."""
    ends: I64
    """The end of each document in tokens of the window, after shuffling."""

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def begin(self, doc: int) -> int:
        """Return the first token of a document in the window."""
        return int(self.ends[doc - 1]) if doc > 0 else 0

    def doc_at(self, token: int) -> int:
        """Return the document that a token of the window belongs to."""
        return int(self.ends.searchsorted(token, side="right"))

    def position(self, token: int, row: int = 0) -> LanePosition:
        """Return the position of a token, by document, so that skipping others keeps it valid."""
        doc = self.doc_at(token)
        return self.start._replace(doc=doc, token=token - self.begin(doc), row=row)

    def token_of(self, position: LanePosition) -> int:
        """Return the token of a position."""
        if position.doc >= len(self.ends):
            return self.tokens
        return min(self.begin(position.doc) + position.token, int(self.ends[position.doc]))

    def spans(self, token: int, length: int, at: int) -> list[Span]:
        """Return the origins of `length` tokens from `token` on; the first is id `at` of a row."""
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
    """The ids of a window's documents, in shuffled order."""

    def __init__(
        self,
        start: LanePosition,
        chunks: Sequence[TokenChunk],
        order: I64 | None,
        dtype: np.dtype[Any],
    ) -> None:
        """`order`: the shuffled order of the documents; None if they keep their order."""
        parts = [part for chunk in chunks for part in chunk.parts]
        flat = [flatten(chunk.docs, dtype) for chunk in chunks]
        self._flat = [ids for ids, _ in flat]
        lengths = np.concatenate([np.diff(offsets) for _, offsets in flat])
        if order is not None:
            documents = [len(chunk.docs) for chunk in chunks]
            self._chunks = np.repeat(np.arange(len(chunks)), documents)[order]
            self._begins = np.concatenate([offsets[:-1] for _, offsets in flat])[order]
        self.map = WindowMap(
            start=start,
            refs=tuple(ref for ref, _ in parts),
            firsts=np.cumsum([0, *(documents for _, documents in parts)]),
            rows=np.concatenate([chunk.rows for chunk in chunks]),
            order=order,
            ends=np.cumsum(lengths if order is None else lengths[order]),
        )

    def gather(self, first: int, last: int) -> list[Ids]:
        """Return the ids of the documents [first, last), as views in their order.

        A view per document costs less than reordering them with Arrow, unless documents have far
        fewer than a hundred tokens.
        """
        window, flat = self.map, self._flat
        if window.order is None:
            begin, end, pieces = window.begin(first), window.begin(last), []
            for ids in flat:
                if begin < len(ids) and end > 0:
                    pieces.append(ids[max(0, begin) : end])
                begin, end = begin - len(ids), end - len(ids)
            return pieces or [flat[0][:0]]
        begins = self._begins[first:last]
        ends = begins + np.diff(window.ends[first:last], prepend=window.begin(first))
        chunks = self._chunks[first:last].tolist()
        places = zip(chunks, begins.tolist(), ends.tolist(), strict=True)
        return [flat[chunk][begin:end] for chunk, begin, end in places]


def flatten(docs: pa.LargeBinaryArray, dtype: np.dtype[Any]) -> tuple[Ids, I64]:
    """Return the ids of all documents and their offsets, counted in ids, without a copy."""
    _, raw_offsets, raw = docs.buffers()
    if len(docs) == 0 or raw is None:
        return np.empty(0, dtype), np.zeros(len(docs) + 1, np.int64)
    offsets = np.frombuffer(raw_offsets, np.int64)[docs.offset : docs.offset + len(docs) + 1]
    flat = np.frombuffer(raw, np.uint8)[offsets[0] : offsets[-1]].view(dtype)
    return flat, (offsets - offsets[0]) // dtype.itemsize

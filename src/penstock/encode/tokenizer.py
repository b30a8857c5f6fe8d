"""Turn the documents of a chunk into ids, each document with its separators.

Runs on worker threads. Copies the ids twice, to narrow them and to add separators; runs no Python
per document if the engine returns flat arrays. A document without ids (empty, null, skipped) gets
no separators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from penstock.config import installed_version
from penstock.encode.engines import REFERENCES, Engine, checked_gigatoken
from penstock.encode.vocabulary import Vocabulary, find_vocabulary
from penstock.encode.window import flatten
from penstock.errors import ConfigError
from penstock.read.arrow_utils import binaries, booleans, scalar
from penstock.types import AUTO, WORD_CACHE_BYTES, ChunkRef, Documents, TokenChunk

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tokenizer:
    """A vocabulary, the engine that encodes it, and the separators of documents."""

    vocabulary: Vocabulary
    engine: Engine
    vocab_size: int
    """One more than the largest id."""
    eos_id: int | None
    bos_id: int | None

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self.vocabulary.name!r}, engine={self.engine.name!r}, "
            f"vocab_size={self.vocab_size}, eos_id={self.eos_id}, bos_id={self.bos_id})"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def expansion(self) -> int:
        """Peak memory of encoding as a multiple of the text: text, ids, narrow ids, a copy."""
        return 5 if self.engine.name == "byte" else 3

    @property
    def pad_id(self) -> int:
        """The id that fills a row without enough tokens. Its targets are ignored."""
        return self.eos_id if self.eos_id is not None else 0

    @property
    def fingerprint(self) -> str:
        """Identifies the ids, regardless of the engine: a run may resume with another one."""
        return f"{self.vocabulary.fingerprint}/{self.eos_id}/{self.bos_id}"

    @property
    def cache_key(self) -> str:
        """Identifies the ids and the version of the engine."""
        return f"{self.fingerprint}/{self.engine.name}/{installed_version(self.engine.name)}"

    def encode(
        self,
        ref: ChunkRef,
        documents: Documents,
        doc_batch: int | None = None,
        check_closed: Callable[[], None] | None = None,
    ) -> TokenChunk:
        """Return the tokens of a chunk.

        Encodes `doc_batch` documents at a time; by default all, or 128 with a slow engine. Calls
        `check_closed` before each part; it raises if the loader was shut down.
        """
        texts = documents.texts
        step = doc_batch or self.engine.doc_batch or max(1, len(texts))
        parts = [pa.nulls(0, pa.large_binary())] if len(texts) == 0 else []
        for i in range(0, len(texts), step):
            if check_closed is not None:
                check_closed()
            parts.append(self._encode(texts[i : i + step]))
        docs = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
        return TokenChunk.of(ref, docs, documents, len(flatten(texts, np.dtype(np.uint8))[0]))

    def _encode(self, texts: pa.LargeStringArray) -> pa.LargeBinaryArray:
        encoded, dtype = self.engine.encode(texts), self.dtype
        ids = (self.bos_id, self.eos_id)
        before, after = (b"" if id is None else np.array(id, dtype).tobytes() for id in ids)
        if isinstance(encoded, list):
            each = [np.asarray(document, dtype).tobytes() for document in encoded]
            return binaries([before + doc + after if doc else doc for doc in each])
        import pyarrow.compute as pc

        flat, offsets = encoded
        narrow = np.ascontiguousarray(flat, dtype)
        buffers = [None, pa.py_buffer(offsets * narrow.itemsize), pa.py_buffer(narrow)]
        docs = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(texts), buffers)
        around = [scalar(before), scalar(after)]
        some = np.diff(offsets) > 0
        if not some.all():
            around = [pc.if_else(booleans(some), each, scalar(b"")) for each in around]
        return pc.binary_join_element_wise(around[0], docs, around[1], scalar(b""))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens by name."""
        names = {id: name for name, id in self.vocabulary.specials.items()}
        data = b""
        for name, group in groupby(map(int, ids), names.get):
            run = list(group)
            if name is None and not (min(run) >= 0 and max(run) < self.engine.vocab_size):
                raise ConfigError(f"{self} has no token for one of the ids {run}")
            data += self.engine.decode(run) if name is None else name.encode() * len(run)
        return data.decode("utf-8", "replace")


def load_tokenizer(
    spec: Any,
    *,
    eos: str | int | None = AUTO,
    bos: str | int | None = None,
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken"] = "auto",
    cache_bytes: int = WORD_CACHE_BYTES,
) -> Tokenizer:
    """Find a vocabulary and the fastest engine that encodes it correctly."""
    if isinstance(spec, Tokenizer):
        if (eos, bos, engine) != (AUTO, None, "auto"):
            raise ConfigError(
                f"{spec} is already loaded: pass eos, bos and engine to load_tokenizer"
            )
        return spec
    vocabulary = find_vocabulary(spec)
    if isinstance(eos, str) and eos == AUTO:
        if vocabulary.eos is None:
            raise ConfigError(
                f"{vocabulary.name} does not say which token ends a document (it has "
                f"{', '.join(vocabulary.specials) or 'no special tokens'}). "
                "Pass its name as eos='…', or eos=None for none"
            )
        eos = vocabulary.eos
    chosen = _choose_engine(vocabulary, engine, cache_bytes)
    size = max(chosen.vocab_size, *(id + 1 for id in vocabulary.specials.values()), 0)
    return Tokenizer(
        vocabulary=vocabulary,
        engine=chosen,
        vocab_size=size,
        eos_id=vocabulary.token_id(eos, "eos", size),
        bos_id=vocabulary.token_id(bos, "bos", size),
    )


def _choose_engine(vocabulary: Vocabulary, wanted: str, cache_bytes: int) -> Engine:
    name = vocabulary.reference
    reference = partial(REFERENCES[name], vocabulary)
    if wanted == "gigatoken" or (wanted == "auto" and name != "byte"):
        try:
            return checked_gigatoken(vocabulary, cache_bytes, reference)
        except ConfigError as error:
            if wanted == "gigatoken":
                raise
            log.warning("%s: using %s, which is slower", error, name)
    if wanted not in ("auto", name):
        raise ConfigError(
            f"engine={wanted!r} cannot encode {vocabulary.name}; its reference engine is {name!r}"
        )
    return reference()

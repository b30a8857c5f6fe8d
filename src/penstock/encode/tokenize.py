"""Turn the documents of a chunk into ids.

In:    `Documents` of one chunk.
Out:   a `TokenChunk`: for each document its ids in the narrowest type, with its separator.
Where: worker threads.
State: none but the engine's.
Cost:  the engine's time; the ids are copied twice, to narrow them and to put separators between documents, and no
       Python runs per document.

A document that gives no ids (empty, null, skipped) gives no separator either.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from penstock.encode.check import Check, Found, is_refusal, load_gigatoken
from penstock.encode.engines import (
    ByteEngine,
    Engine,
    GigatokenEngine,
    TiktokenEngine,
    TokenizersEngine,
    text_buffers,
)  # fmt: skip
from penstock.encode.vocabulary import TIKTOKEN, Vocabulary, find
from penstock.errors import MissingExtra, TokenizerError
from penstock.read.columns import call, flags, nothing, scalar
from penstock.types import AUTO, WORD_CACHE_BYTES, ChunkRef, Documents, TokenChunk

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A vocabulary with its separator policy and the engine that encodes it."""

    vocabulary: Vocabulary
    engine: Engine
    eos_id: int | None
    bos_id: int | None

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return vocabulary_size(self.vocabulary, self.engine)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every id."""
        return np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)

    @property
    def expansion(self) -> int:
        """How many times a text's bytes are needed while it is encoded: text, ids, narrow ids, a copy."""
        return 5 if self.engine.name == "byte" else 3

    @property
    def pad_id(self) -> int:
        """What stands where a row has no token. Its targets are ignored."""
        return self.eos_id if self.eos_id is not None else 0

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the ids, the engine excepted: all give the same."""
        return f"{self.vocabulary.fingerprint}/{self.eos_id}/{self.bos_id}"

    @property
    def slow(self) -> bool:
        """Whether a chunk takes seconds."""
        return self.engine.name in ("tokenizers", "tiktoken")

    def encode(
        self,
        ref: ChunkRef,
        documents: Documents,
        doc_batch: int | None = None,
        between: Callable[[], None] | None = None,
    ) -> TokenChunk:
        """The tokens of a chunk. `doc_batch` bounds how many documents are encoded at once; `between` these, somebody may
        look whether there is a reason to go on, and raise if there is none."""
        texts = documents.texts
        step = doc_batch or max(1, len(texts))
        parts = []
        for i in range(0, len(texts), step):
            if between is not None:
                between()
            parts.append(self._encode(texts[i : i + step]))
        docs = (
            parts[0]
            if len(parts) == 1
            else pa.concat_arrays(parts)
            if parts
            else nothing(pa.large_binary())
        )
        return TokenChunk(
            ref,
            docs,
            documents.rows,
            documents.last,
            documents.bad,
            documents.empty,
            _text_bytes(texts),
        )

    def _encode(self, texts: pa.LargeStringArray) -> pa.LargeBinaryArray:
        ids, offsets = self.engine.encode(texts)
        if len(offsets) != len(texts) + 1 or offsets[-1] != len(ids):
            raise TokenizerError(
                f"{self.engine.name} gave {len(offsets) - 1} documents for {len(texts)}: a bug in it. "
                "Use engine='tokenizers'."
            )
        narrow = np.ascontiguousarray(ids, self.dtype)
        docs = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            len(texts),
            [None, pa.py_buffer(offsets * narrow.itemsize), pa.py_buffer(narrow)],
        )
        before, after = self._bytes(self.bos_id), self._bytes(self.eos_id)
        if not (before or after) or len(docs) == 0:
            return docs
        some = np.diff(offsets) > 0
        glue = scalar(b"")
        if some.all():
            around = [scalar(b) for b in (before, after)]
        else:
            mask = flags(some)
            around = [call("if_else", mask, scalar(b), glue) for b in (before, after)]
        return call("binary_join_element_wise", around[0], docs, around[1], glue)

    def _bytes(self, id: int | None) -> bytes:
        return b"" if id is None else np.array(id, self.dtype).tobytes()


def _text_bytes(texts: pa.LargeStringArray) -> int:
    return len(text_buffers(texts)[0]) if len(texts) else 0


def load_tokenizer(
    spec: Any,
    *,
    eos: str | int | None = AUTO,
    bos: str | int | None = None,
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken"] = "auto",
    cache_bytes: int = WORD_CACHE_BYTES,
) -> Tokenizer:
    """Find a vocabulary and the fastest engine that encodes it right."""
    if isinstance(spec, Tokenizer):
        return spec
    vocabulary = find(spec)
    if eos == AUTO:
        if vocabulary.eos is None:
            raise TokenizerError(
                f"{vocabulary.name} does not say which token ends a document (it has "
                f"{', '.join(vocabulary.specials) or 'no special tokens'}). Name it: eos='…', or eos=None for none"
            )
        eos = vocabulary.eos
    chosen = _choose_engine(vocabulary, engine, cache_bytes)
    size = vocabulary_size(vocabulary, chosen)
    return Tokenizer(
        vocabulary=vocabulary,
        engine=chosen,
        eos_id=vocabulary.special(eos, "eos", size),
        bos_id=vocabulary.special(bos, "bos", size),
    )


def vocabulary_size(vocabulary: Vocabulary, engine: Engine) -> int:
    """One more than the largest id, special tokens included: the engine knows only the others."""
    return max(engine.vocab_size, *(id + 1 for id in vocabulary.specials.values()), 0)


def _choose_engine(vocabulary: Vocabulary, wanted: str, cache_bytes: int) -> Engine:
    if vocabulary.name == "byte":
        return ByteEngine()
    reference = _reference(vocabulary)
    if wanted in ("auto", "gigatoken"):
        check = Check(vocabulary, *reference)
        known = check.recall()
        fast = _gigatoken(
            vocabulary, cache_bytes, known, check.find_ranks, required=wanted == "gigatoken"
        )
        if fast is not None and check.heed(
            known.differs if known is not None else check.reach(fast)
        ):
            return fast
        if wanted == "gigatoken":
            raise TokenizerError(
                f"gigatoken does not give the reference's ids for {vocabulary.name}"
            )
    name, build = reference
    if wanted not in ("auto", name):
        raise TokenizerError(
            f"engine={wanted!r} cannot encode {vocabulary.name}; its reference engine is {name!r}"
        )
    return build()


def _reference(vocabulary: Vocabulary) -> tuple[str, Callable[[], Engine]]:
    """The engine whose ids are right by definition, not yet built."""
    if vocabulary.tokenizer_json is not None:
        text = vocabulary.tokenizer_json

        def build() -> Engine:
            try:
                return TokenizersEngine(text)
            except ImportError as error:
                raise MissingExtra(
                    "tokenizers", f"the tokenizer {vocabulary.name}", "hf"
                ) from error

        return "tokenizers", build

    def build_tiktoken() -> Engine:
        try:
            import tiktoken
        except ImportError as error:
            raise MissingExtra(
                "tiktoken", f"the tokenizer {vocabulary.name}", "tiktoken"
            ) from error
        encoding = vocabulary.encoding
        if encoding is None:
            import base64

            assert vocabulary.ranks is not None
            ranks = {
                base64.b64decode(token): int(rank)
                for token, rank in (line.split() for line in vocabulary.ranks.splitlines() if line)
            }
            pattern = _TIKTOKEN_PATTERNS[TIKTOKEN[vocabulary.name][0]]
            encoding = tiktoken.Encoding(
                vocabulary.name,
                pat_str=pattern,
                mergeable_ranks=ranks,
                special_tokens=vocabulary.specials,
            )
        return TiktokenEngine(encoding)

    return "tiktoken", build_tiktoken


def _gigatoken(
    vocabulary: Vocabulary,
    cache_bytes: int,
    known: Found | None,
    later: Callable[[Any], None],
    *,
    required: bool,
) -> GigatokenEngine | None:
    if importlib.util.find_spec("gigatoken") is None:
        if required:
            raise TokenizerError("engine='gigatoken' needs gigatoken: pip install gigatoken")
        return None
    if vocabulary.tokenizer_json is None and vocabulary.ranks is None:
        return None
    try:
        if known is None:
            return GigatokenEngine(partial(load_gigatoken, vocabulary), cache_bytes, later=later)
        load, looked = partial(load_gigatoken, vocabulary, known.ranks), known.ranks is not None
        return GigatokenEngine(load, cache_bytes, known.size, None if looked else later)
    except BaseException as error:  # it refuses vocabularies with exceptions of many types
        if not is_refusal(error):
            raise
        if required:
            raise TokenizerError(f"gigatoken does not take {vocabulary.name}: {error}") from error
        log.info(
            "gigatoken does not take %s (%s): using the reference engine", vocabulary.name, error
        )
        return None


_TIKTOKEN_PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "gpt4": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": "|".join(
        [
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    ),
}
"""How OpenAI's encodings split text into words (facts of those vocabularies, from tiktoken)."""

"""The tokenizer libraries, behind one protocol.

An engine takes a large_string array without nulls. It returns the ids of each document, or one
flat array of ids and the offsets of the documents in it. Worker threads call it concurrently.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from penstock.config import cache_dir, installed_version, write_atomically
from penstock.encode.vocabulary import ENCODINGS, Vocabulary, parse_ranks
from penstock.encode.window import I64, Ids, flatten
from penstock.errors import ConfigError, missing_extra
from penstock.read.arrow_utils import binaries
from penstock.types import MiB

SLOW_DOCS = 128
Encoded = list[Any] | tuple[Ids, I64]


def by_document(encoded: Encoded) -> list[Any]:
    """Return the ids of each document."""
    return encoded if isinstance(encoded, list) else np.split(encoded[0], encoded[1][1:-1])


class Engine(Protocol):
    """Encodes texts. Thread-safe."""

    name: str
    vocab_size: int
    doc_batch: int | None = None
    """Documents per call, so that a loader can be shut down between calls. None: a whole chunk."""

    def encode(self, texts: pa.LargeStringArray) -> Encoded: ...

    def decode(self, ids: Sequence[int]) -> bytes: ...

    def prepare(self) -> None:
        """Load the vocabulary before the first call."""
        return


def library(name: str, vocabulary: Vocabulary, extra: str) -> Any:
    """Import the library that defines the ids of a vocabulary."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_extra(name, f"the tokenizer {vocabulary.name}", extra) from error


class ByteEngine(Engine):
    """Each byte is its own id."""

    name = "byte"
    vocab_size = 256

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Take a vocabulary, as all engines do."""

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        return flatten(texts, np.dtype(np.uint8))

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)


class TokenizersEngine(Engine):
    """Hugging Face `tokenizers`, the reference for a tokenizer.json."""

    name = "tokenizers"
    doc_batch = SLOW_DOCS

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizers = library("tokenizers", vocabulary, "hf")
        self._vocabulary = vocabulary
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(vocabulary.tokenizer_json or "")
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"{vocabulary.name} is not a tokenizer.json: {error}") from error
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenizersEngine, (self._vocabulary,)

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        encodings = self._tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> bytes:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)).encode()


class TiktokenEngine(Engine):
    """OpenAI's `tiktoken`, the reference for its own vocabularies."""

    name = "tiktoken"
    doc_batch = SLOW_DOCS

    def __init__(self, vocabulary: Vocabulary) -> None:
        tiktoken = library("tiktoken", vocabulary, "tiktoken")
        self._encoding = vocabulary.encoding
        if vocabulary.ranks is not None and self._encoding is None:
            self._encoding = tiktoken.Encoding(
                vocabulary.name,
                pat_str=ENCODINGS[vocabulary.name].pattern,
                mergeable_ranks=parse_ranks(vocabulary.ranks),
                special_tokens=vocabulary.specials,
            )
        self.vocab_size = self._encoding.n_vocab

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        return [self._encoding.encode_ordinary(text) for text in texts.to_pylist()]

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(self._encoding.decode_bytes(ids))


REFERENCES = {each.name: each for each in (ByteEngine, TokenizersEngine, TiktokenEngine)}
"""The engines that define the ids of their vocabularies, by name."""


class GigatokenEngine(Engine):
    """gigatoken: takes Arrow, returns numpy, and releases the GIL in between.

    An instance of the library serialises its callers, so each call takes its own. An instance
    caches every word it has seen: when the process has grown by more than `cache_bytes`, all
    instances are dropped and loaded again. All of them, because the size of the process does not
    show which one grew.
    """

    name = "gigatoken"
    FIRST_BYTES = 16 * MiB
    """The first text is encoded document by document, on one instance, which holds the GIL for
    milliseconds. Batches release it and are faster, but importing awkward and loading another
    instance hold it for 0.2 s each, which would delay the first batches of a run."""
    SETTLED_BYTES = 64 * MiB
    """Text before the first check of the size of the process, which grows while its buffers fill."""
    CHECK_BYTES = 8 * MiB
    """Text between two checks."""

    def __init__(
        self, vocabulary: Vocabulary, cache_bytes: int, vocab_size: int | None = None
    ) -> None:
        """Load the vocabulary now, or in the first call if `vocab_size` is given."""
        self._vocabulary, self._cache_bytes = vocabulary, cache_bytes
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._seen_bytes, self._checked_bytes = 0, self.SETTLED_BYTES
        self._warm_size: int | None = None
        """Size of the process at the first check after these instances were loaded."""
        self.replaced = 0
        """The number of times that all instances were dropped."""
        self.vocab_size = int(self._shared().vocab_size) if vocab_size is None else vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        return GigatokenEngine, (self._vocabulary, self._cache_bytes, self.vocab_size)

    def prepare(self) -> None:
        with self._lock:
            self._shared()

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        with self._lock:
            self._seen_bytes += texts.nbytes
            tokenizer, generation = self._shared(), self.replaced
            if self._seen_bytes <= self.FIRST_BYTES:
                documents = texts.view(pa.large_binary()).to_pylist()
                return [tokenizer.encode(document) for document in documents]
            self._idle.pop()
        import awkward

        batch = tokenizer.encode_batch(awkward.from_arrow(texts), parallel=False).layout
        with self._lock:
            if generation == self.replaced:
                self._idle.append(tokenizer)
                self._bound_cache()
        return np.asarray(batch.content.data), np.asarray(batch.offsets.data)

    def decode(self, ids: Sequence[int]) -> bytes:
        with self._lock:
            return bytes(self._shared().decode(np.array(ids, np.uint32)))

    def _shared(self) -> Any:
        """Return the last idle instance, whose cache is warm. Load one if there is none."""
        if not self._idle:
            self._idle.append(load_gigatoken(self._vocabulary))
        return self._idle[-1]

    def _bound_cache(self) -> None:
        if self._seen_bytes - self._checked_bytes < self.CHECK_BYTES:
            return
        self._checked_bytes = self._seen_bytes
        # If the size is unknown, assume that words take an eighth of the text.
        size = anonymous_bytes() or self._seen_bytes // 8
        if self._warm_size is None:
            self._warm_size = size
        if size - self._warm_size > self._cache_bytes:
            self._idle.clear()
            self._warm_size = None
            self.replaced += 1


def load_gigatoken(vocabulary: Vocabulary) -> Any:
    """Return a new instance of gigatoken. Raise ConfigError if it cannot load the vocabulary."""
    try:
        import gigatoken

        if vocabulary.tokenizer_json is not None:
            return gigatoken.Tokenizer.from_json(vocabulary.tokenizer_json)
        if vocabulary.ranks is None:
            raise ConfigError("its rule for splitting words is unknown")
        import tempfile  # takes 3 ms

        # The library reads ranks only from a path. Special tokens are omitted, so they stay text.
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(vocabulary.ranks)
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, ENCODINGS[vocabulary.name].scheme)
    except BaseException as error:
        # A panic in its Rust code is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"gigatoken cannot load {vocabulary.name}: {error}") from error


def anonymous_bytes() -> int:
    """Return the bytes of this process's memory that are not mapped files, or 0 if unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


# The choice of gigatoken

PROBE_VERSION = 5
PROBE = (
    "The quick brown fox can't jump over 12,345.67 lazy dogs — it's they'll WE'VE I'd\n\n\t  trailing   ",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # naïve café\r\n\r\n",
    "Größe, Ærøskøbing, Ελληνικά, русский язык, עִבְרִית, العربية, हिन्दी, ภาษาไทย, 日本語テキスト, 中文，한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ½ ² ① Ⅷ ﬁ ẛ̣ é e\u0301 \u200b\u200d\ufeff\u00a0\u2028\u3000",
    "\x00\x01\x07\x1f\x7f\x80\ufffd \U0001f600\U0010ffff 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa          1000000000000",
    "<|endoftext|><|im_start|>user</s><s>[INST] <pad> not special",
    " leading", "", "x", "\n", "   ",
)  # fmt: skip


def checked_gigatoken(
    vocabulary: Vocabulary, cache_bytes: int, reference: Callable[[], Engine]
) -> GigatokenEngine:
    """Return gigatoken's engine, or raise ConfigError if its ids differ from the reference's.

    Both encode a probe of many kinds of characters when a vocabulary is first loaded. The result is
    cached on disk per vocabulary and pair of versions.
    """
    versions = [(name, installed_version(name)) for name in ("gigatoken", vocabulary.reference)]
    key = f"{vocabulary.fingerprint} {versions} {PROBE_VERSION}"
    path = cache_dir() / "engines" / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        note = json.loads(path.read_text("utf-8"))
        differs = bool(note["differs"])
        engine = GigatokenEngine(vocabulary, cache_bytes, int(note["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError):  # not cached, or damaged
        engine = GigatokenEngine(vocabulary, cache_bytes)
        differs = False
        if versions[1][1] is not None:  # without the reference, nothing can be compared
            texts = binaries([text.encode() for text in PROBE], pa.large_string())
            both = (by_document(each.encode(texts)) for each in (engine, reference()))
            pairs = zip(*both, strict=True)
            differs = not all(np.array_equal(fast, slow) for fast, slow in pairs)
        note = json.dumps({"vocab_size": engine.vocab_size, "differs": differs})
        with suppress(OSError):  # only a cache
            write_atomically(path, note)
    if differs:
        raise ConfigError(
            f"gigatoken's ids for {vocabulary.name} differ from those of {vocabulary.reference}"
        )
    return engine

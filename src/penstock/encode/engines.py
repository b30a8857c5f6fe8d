"""The engines that turn a column of texts into ids, behind one small protocol.

In:    a large_string array without nulls.
Out:   one flat array of ids and the offsets of each document in it.
Where: worker threads; each call has an instance of the library to itself.
State: the libraries' own caches. gigatoken's never forgets a word, so its instance is dropped
       and loaded again once the process has grown by more than a budget.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from penstock.types import GiB, MiB

I64 = np.ndarray[Any, np.dtype[np.int64]]
Ids = np.ndarray[Any, np.dtype[Any]]


class Engine(Protocol):
    """Encodes texts. Called by many threads at once."""

    name: str
    vocab_size: int

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, I64]: ...

    def prepare(self) -> None:
        """Do beforehand what the first call would have to wait for."""
        return


def text_buffers(texts: pa.LargeStringArray) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], I64]:
    """A column's bytes and offsets, without a copy, the first offset being 0."""
    _, raw_offsets, raw_bytes = texts.buffers()
    offsets = np.frombuffer(raw_offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(raw_bytes, np.uint8) if raw_bytes is not None else np.empty(0, np.uint8)
    if offsets[0]:
        return data[offsets[0] : offsets[-1]], offsets - offsets[0]
    return data[: offsets[-1]], offsets


class ByteEngine(Engine):
    """Each byte is its own id."""

    name = "byte"
    vocab_size = 256

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, I64]:
        return text_buffers(texts)


class TokenizersEngine(Engine):
    """Hugging Face `tokenizers`: the reference, and the fallback for whatever else there is."""

    name = "tokenizers"

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        self._json = tokenizer_json
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenizersEngine, (self._json,)

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, I64]:
        encodings = self._tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])


class TiktokenEngine(Engine):
    """OpenAI's `tiktoken`: the reference for its own vocabularies."""

    name = "tiktoken"

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, I64]:
        return _flatten([self._encoding.encode_ordinary(text) for text in texts.to_pylist()])


def _flatten(ids: list[list[int]]) -> tuple[Ids, I64]:
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(i) for i in ids], out=offsets[1:])
    flat = np.empty(int(offsets[-1]), np.uint32)
    for of_doc, start, end in zip(ids, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        flat[start:end] = of_doc
    return flat, offsets


class GigatokenEngine(Engine):
    """gigatoken: Arrow memory in, numpy out, the GIL released in between."""

    name = "gigatoken"
    MIN_TEXT = 8 * MiB
    """Text an instance must have seen before it is replaced, which bounds what replacing can cost, and between two looks at
    how much the process has grown."""
    PLAIN = 8 * MiB
    """A first text no longer than this is encoded without awkward, whose import takes longer than that."""
    FIRST = 2
    """Calls that are served by one instance before another is loaded: the first documents, and the rest of their chunk."""
    MAX_TEXT = GiB
    """Where the system does not tell a process its own size, replace after this much text."""

    SETTLED = 64 * MiB
    """Text that an instance has encoded when nobody waits for the first batches any more."""

    def __init__(
        self,
        load: Callable[[], Any],
        cache_bytes: int,
        vocab_size: int | None = None,
        later: Callable[[Any], None] | None = None,
    ) -> None:
        """Where `vocab_size` is known, the vocabulary has been loaded before, and is loaded when it is needed. `later` is
        called once with an instance, in a run that is long enough: for what nobody should have to wait for."""
        self._load = load
        self._later = later
        self._cache_bytes = cache_bytes
        self._generation = 0
        self._floor: int | None = None
        """The size of the process when an instance of this generation had seen the common words."""
        # An instance serialises its callers, so each call has one to itself. There are as many as
        # there were calls at once, and the one used last, whose cache is warm, is used next.
        self._idle: list[_Instance] = []
        self._unborn = vocab_size is not None
        """Whether nobody has begun to load the first one."""
        if vocab_size is None:
            self._idle.append(
                _Instance(load())
            )  # fails here and now if the vocabulary is not for it
            vocab_size = int(self._idle[0].tokenizer.vocab_size)
        self._changed = threading.Condition()
        self._done = 0
        self.vocab_size = vocab_size
        self.replaced = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return GigatokenEngine, (self._load, self._cache_bytes, self.vocab_size)

    def tried_out(self) -> None:
        """What was encoded so far was no text of a run: the first is still to come."""
        with self._changed:
            self._done = 0

    def prepare(self) -> None:
        with self._changed:
            if not self._unborn:
                return
            self._unborn = False
        first = self._new(0)
        with self._changed:
            self._idle.append(first)
            self._changed.notify_all()

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, I64]:
        instance = self._take()
        try:
            # The first batches, for which somebody is waiting, do without a quarter of a second of import,
            # during which no other thread gets on either.
            if (
                self._done < self.FIRST
                and "awkward" not in sys.modules
                and texts.nbytes <= self.PLAIN
            ):
                return self._encode_plainly(instance, texts)
            if self._later is not None and instance.seen >= self.SETTLED:
                self._settle(instance)
            return self._encode(instance, texts)
        finally:
            instance.seen += texts.nbytes
            self._give_back(instance)

    def _settle(self, instance: _Instance) -> None:
        with self._changed:
            later, self._later = self._later, None
        if later is not None:
            later(instance.tokenizer)

    def _take(self) -> _Instance:
        """An instance that nobody uses, or a new one."""
        with self._changed:
            # Loading holds the GIL for a tenth of a second. The first batch, for which somebody is
            # waiting, goes before it: until it is on its way, the threads share the one instance.
            self._changed.wait_for(lambda: self._idle or self._unborn or self._done >= self.FIRST)
            if self._idle:
                return self._idle.pop()
            self._unborn = False
            generation = self._generation
        return self._new(generation)

    def _new(self, generation: int) -> _Instance:
        try:
            return _Instance(self._load(), generation)
        except BaseException:
            with self._changed:  # whoever waits for this one tries for himself
                self._unborn = True
                self._changed.notify_all()
            raise

    def _give_back(self, instance: _Instance) -> None:
        with self._changed:
            self._done += 1
            if self._outgrown(instance):
                # The process's size does not tell whose growth it was, so all instances go together:
                # what is left when their successors are warm was somebody else's.
                self._generation += 1
                self._floor = None
                self.replaced += len(self._idle)
                self._idle.clear()
            if instance.generation == self._generation:
                self._idle.append(instance)
            else:
                instance.tokenizer = None
                self.replaced += 1
                self._done = max(self._done, self.FIRST)
            self._changed.notify_all()

    def _encode(self, instance: _Instance, texts: pa.LargeStringArray) -> tuple[Ids, I64]:
        from penstock.encode.lists import strings

        encoded = instance.tokenizer.encode_batch(
            strings(*text_buffers(texts)), parallel=False
        ).layout
        return np.asarray(encoded.content.data), np.asarray(encoded.offsets.data)

    def _encode_plainly(self, instance: _Instance, texts: pa.LargeStringArray) -> tuple[Ids, I64]:
        """The same, one document after the other. No other thread gets on meanwhile."""
        data, bounds = text_buffers(texts)
        view, encode = data.data, instance.tokenizer.encode
        ids = [encode(bytes(view[a:b])) for a, b in itertools.pairwise(bounds.tolist())]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(of_document) for of_document in ids], out=offsets[1:])
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), offsets

    def _outgrown(self, instance: _Instance) -> bool:
        """Whether the process has grown by more than the budget since these instances were warm."""
        if (
            instance.seen - instance.looked < self.MIN_TEXT
            or instance.generation != self._generation
        ):
            return False
        now, instance.looked = anonymous_bytes(), instance.seen
        if now is None:
            return instance.seen >= self.MAX_TEXT
        if self._floor is None:
            self._floor = now
        return now - self._floor > self._cache_bytes


@dataclass(slots=True)
class _Instance:
    """One of the library's, and what it has done."""

    tokenizer: Any
    generation: int = 0
    seen: int = 0
    """Bytes of text it has encoded."""
    looked: int = 0
    """How many these were when the size of the process was last looked at."""


def anonymous_bytes() -> int | None:
    """Memory of this process that is not a mapped file, or None where the system does not say."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
    try:
        _, resident, shared, *_ = os.read(fd, 256).split()
    finally:
        os.close(fd)
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

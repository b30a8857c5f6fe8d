"""From texts to one flat array of ids, end-of-text after each: the tokenizers of the contenders.

own:  what a contender's documentation uses: `tokenizers`, in batches (it uses all cores by itself),
      or `tiktoken`.
ours: gigatoken, as Penstock uses it: one instance a thread, Arrow memory in, numpy out.

All can be pickled: what they load is loaded again by each process, and by each thread for gigatoken.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from case import EOS, Case

Encode = Callable[[Any], npt.NDArray[np.uint16]]
"""Takes a list of str, or an Arrow array of strings."""


def encoder(case: Case) -> Encode:
    """Return the tokenizer that the case asks for."""
    return Gigatoken(case.vocabulary) if case.tokenizer == "ours" else Tokenizers(case.vocabulary)


def as_strings(texts: Any) -> list[str]:
    return texts if isinstance(texts, list) else list(texts.to_pylist())


class Loaded:
    """A vocabulary that is loaded where it is used, and pickled by its name."""

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.load()

    def load(self) -> None:
        """Load what the tokenizer needs."""

    def __getstate__(self) -> str:
        return self.vocabulary

    def __setstate__(self, vocabulary: str) -> None:
        Loaded.__init__(self, vocabulary)


class Tokenizers(Loaded):
    """Hugging Face's, a batch at a call."""

    def load(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(self.vocabulary)
        self._eos = int(self._tokenizer.get_vocab()[EOS])

    def __call__(self, texts: Any) -> npt.NDArray[np.uint16]:
        ids: list[int] = []
        encode = self._tokenizer.encode_batch_fast
        for encoding in encode(as_strings(texts), add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(self._eos)
        return np.array(ids, np.uint16)


class Tiktoken(Loaded):
    """OpenAI's. Its ranks are made from the vocabulary, so that all have the same ids."""

    PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    """GPT-2's way to split text, as tiktoken spells it."""

    def load(self) -> None:
        import tiktoken

        told = json.loads(Path(self.vocabulary).read_text(encoding="utf-8"))
        words: dict[str, int] = told["model"]["vocab"]
        special = {token["content"] for token in told["added_tokens"]}
        # GPT-2 writes each byte as a printable character.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        characters = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
        decode = {character: byte for byte, character in enumerate(characters)}
        ranks = {
            bytes(decode[c] for c in word): i for word, i in words.items() if word not in special
        }
        self._end = np.array([words[EOS]], np.uint16)
        self._encoding = tiktoken.Encoding(
            "vocabulary",
            pat_str=self.PATTERN,
            mergeable_ranks=ranks,
            special_tokens={EOS: words[EOS]},
        )

    def __call__(self, texts: Any) -> npt.NDArray[np.uint16]:
        pieces = [np.empty(0, np.uint16)]
        for text in as_strings(texts):
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
            pieces += [ids.astype(np.uint16), self._end]
        return np.concatenate(pieces)


class Gigatoken(Loaded):
    """What Penstock tokenizes with, given to others."""

    def load(self) -> None:
        told = json.loads(Path(self.vocabulary).read_text(encoding="utf-8"))
        self._eos = int(told["model"]["vocab"][EOS])
        self._own = threading.local()

    def __call__(self, texts: Any) -> npt.NDArray[np.uint16]:
        import awkward
        import gigatoken
        import pyarrow as pa

        if not hasattr(self._own, "instance"):
            self._own.instance = gigatoken.Tokenizer(self.vocabulary)
        large = pa.large_string()
        column = pa.array(texts, large) if isinstance(texts, list) else texts.cast(large)
        encoded = self._own.instance.encode_batch(awkward.from_arrow(column), parallel=False).layout
        ends = np.asarray(encoded.offsets.data)[1:]
        content = np.asarray(encoded.content.data)[: ends[-1] if len(ends) else 0]
        places = ends + np.arange(len(ends))
        ids = np.full(len(content) + len(ends), self._eos, np.uint16)
        whole = np.ones(len(ids), bool)
        whole[places] = False
        ids[whole] = content
        return ids

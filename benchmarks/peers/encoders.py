"""From texts to one flat array of ids, end-of-text after each: the tokenizers that contenders are given.

own:   what a contender's documentation uses: `tokenizers`, in batches (it uses all cores by itself), or `tiktoken`.
ours:  gigatoken, which is what Penstock uses: one instance for each thread, Arrow memory in, numpy out.
Where: whichever thread or process calls them.
State: the loaded vocabulary, per thread for gigatoken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from case import EOS, Case

Texts = Any
"""A list of str, or an Arrow array of strings: whichever the contender has at hand."""
Encode = Callable[[Texts], npt.NDArray[np.uint16]]


def encoder(case: Case) -> Encode:
    """The one that the case asks for, `tokenizers` where the contender's own is."""
    return Gigatoken(case.vocabulary) if case.tokenizer == "ours" else Tokenizers(case.vocabulary)


def strings(texts: Texts) -> Sequence[str]:
    """As Python strings."""
    listed: list[str] = texts if isinstance(texts, list) else texts.to_pylist()
    return listed


class Tokenizers:
    """Hugging Face's, a batch at a call."""

    def __init__(self, vocabulary: str) -> None:
        self._vocabulary = vocabulary
        self._load()

    def _load(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(self._vocabulary)
        eos = self._tokenizer.token_to_id(EOS)
        if eos is None:
            raise ValueError(f"{self._vocabulary} has no {EOS}")
        self._eos: int = eos

    def __call__(self, texts: Texts) -> npt.NDArray[np.uint16]:
        eos = self._eos
        ids: list[int] = []
        for encoding in self._tokenizer.encode_batch_fast(strings(texts), add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(eos)
        return np.array(ids, np.uint16)

    def __getstate__(self) -> str:
        return self._vocabulary

    def __setstate__(self, vocabulary: str) -> None:
        self._vocabulary = vocabulary
        self._load()


class Tiktoken:
    """OpenAI's. Its ranks are made from the vocabulary, so that all have the same ids."""

    PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    """GPT-2's way to split text, as tiktoken spells it."""

    def __init__(self, vocabulary: str) -> None:
        import json

        import tiktoken

        with open(vocabulary, encoding="utf-8") as file:
            told = json.load(file)
        words: dict[str, int] = told["model"]["vocab"]
        special = {token["content"] for token in told["added_tokens"]}
        decode = {character: byte for byte, character in enumerate(byte_characters())}
        ranks = {
            bytes(decode[c] for c in word): i for word, i in words.items() if word not in special
        }
        self._eos = words[EOS]
        self._encoding = tiktoken.Encoding(
            "vocabulary",
            pat_str=self.PATTERN,
            mergeable_ranks=ranks,
            special_tokens={EOS: self._eos},
        )

    def __call__(self, texts: Texts) -> npt.NDArray[np.uint16]:
        pieces = []
        end = np.array([self._eos], np.uint16)
        for text in strings(texts):
            pieces += [
                self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16),
                end,
            ]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint16)


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Gigatoken:
    """What Penstock tokenizes with, handed to others."""

    def __init__(self, vocabulary: str) -> None:
        self._vocabulary = vocabulary
        self._begin()

    def _begin(self) -> None:
        import json

        with open(self._vocabulary, encoding="utf-8") as file:
            self._eos = int(json.load(file)["model"]["vocab"][EOS])
        self._own = threading.local()

    def __call__(self, texts: Texts) -> npt.NDArray[np.uint16]:
        import awkward
        import pyarrow as pa

        instance = getattr(self._own, "instance", None)
        if instance is None:
            import gigatoken

            instance = self._own.instance = gigatoken.Tokenizer(self._vocabulary)
        column = (
            pa.array(texts, pa.large_string())
            if isinstance(texts, list)
            else texts.cast(pa.large_string())
        )
        encoded = instance.encode_batch(awkward.from_arrow(column), parallel=False).layout
        ends = np.asarray(encoded.offsets.data)[1:]
        ids = np.empty(len(column) + int(ends[-1] if len(ends) else 0), np.uint16)
        whole = np.ones(len(ids), bool)
        places = ends + np.arange(len(ends))
        whole[places] = False
        ids[places] = self._eos
        ids[whole] = np.asarray(encoded.content.data)[: int(ends[-1]) if len(ends) else 0]
        return ids

    def __getstate__(self) -> str:
        return self._vocabulary

    def __setstate__(self, vocabulary: str) -> None:
        self._vocabulary = vocabulary
        self._begin()

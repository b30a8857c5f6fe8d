"""Whether gigatoken gives the ids that the reference gives: found out once for a vocabulary, and remembered.

In:    a vocabulary, gigatoken with it, and the engine whose ids are right by definition.
Out:   the verdict; an instance of gigatoken, from the form of the vocabulary that loads soonest.
Where: whoever loads a tokenizer, and the workers that load an instance.
State: notes in the cache folder. One that is damaged or of other versions counts for nothing.
Cost:  a second the first time; then the time to read a note.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.config import cache_dir, installed_version, write_atomically
from penstock.encode.engines import Engine, GigatokenEngine, Ids
from penstock.encode.vocabulary import TIKTOKEN, Vocabulary, behead
from penstock.read.columns import binaries

log = logging.getLogger("penstock")

PROBE_VERSION = 2
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
"""Many kinds of characters, for comparing an engine's ids with the reference's."""


class Found(NamedTuple):
    """What a check has found."""

    differs: list[int]
    """The probe texts on which the engines differ."""
    size: int
    """Of the vocabulary."""
    ranks: str | None
    """The digest of the same vocabulary as ranks, "" where there are none; None where nobody has looked: see `as_ranks`."""


class Check:
    """Whether the fast engine gives the reference's ids on the probe; remembered on disk."""

    def __init__(self, vocabulary: Vocabulary, name: str, build: Callable[[], Engine]) -> None:
        """`name` and `build`: of the reference."""
        self._vocabulary = vocabulary
        self._name, self._build = name, build
        ours, theirs = installed_version("gigatoken"), installed_version(self._name)
        versions = (
            f"{ours} {self._name} {theirs} {PROBE_VERSION}" if ours and theirs else ""
        )  # else nothing to compare
        self._key = f"{vocabulary.fingerprint} {versions}" if versions else ""
        self._path = cache_dir() / "engines" / hashlib.sha256(self._key.encode()).hexdigest()[:24]

    def recall(self) -> Found | None:
        """What was found before."""
        if not self._key:
            return None
        try:
            known = json.loads(self._path.read_text())
            differs, size, ranks = known["differs"], known["size"], known["ranks"]
            sound = all(type(i) is int for i in [*differs, size]) and (
                ranks is None or DIGEST.fullmatch(ranks)
            )
            if known["key"] == self._key and sound and size > 0:
                gone = ranks and not _ranks_path(ranks).exists()
                return Found(differs, size, None if gone else ranks)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not checked yet, or the note is damaged: check now
        return None

    def reach(self, fast: GigatokenEngine) -> list[int]:
        """Compare, and remember. Gives the probe texts on which the engines differ."""
        if not self._key:
            return []
        differs = compare(fast, self._build())
        fast.tried_out()
        self._write(Found(differs, fast.vocab_size, None))
        return differs

    def find_ranks(self, tokenizer: Any) -> None:
        """Look for the form of the vocabulary that loads soonest, and remember it for the next run."""
        if not self._key:
            return
        ranks = _keep_ranks(self._vocabulary, tokenizer)
        self._write(Found([], tokenizer.vocab_size, ranks))

    def _write(self, found: Found) -> None:
        write_atomically(
            self._path, json.dumps({"key": self._key, **found._asdict()}), best_effort=True
        )

    def heed(self, differs: list[int]) -> bool:
        """Whether to use the fast engine."""
        if differs:
            log.warning(
                "gigatoken's ids for %s differ from %s on %d of %d probe texts: using %s, which is slower",
                self._vocabulary.name, self._name, len(differs), len(PROBE), self._name,
            )  # fmt: skip
        return not differs


def load_gigatoken(vocabulary: Vocabulary, ranks: str | None = None) -> Any:
    """An instance. It cannot be sent to another process; this function and a vocabulary can.

    `ranks`: the digest of the same vocabulary in the form that loads soonest.
    """
    import gigatoken

    if ranks and (kept := _kept_ranks(ranks)) is not None:
        try:
            return gigatoken.Tokenizer.from_tiktoken(kept, GPT2)
        except BaseException as error:  # somebody may clear the cache just now
            if not is_refusal(error):
                raise
    if vocabulary.tokenizer_json is not None:
        return gigatoken.Tokenizer.from_json(vocabulary.tokenizer_json)
    assert vocabulary.ranks is not None
    return _from_ranks(vocabulary.ranks, TIKTOKEN[vocabulary.name][0])


def _from_ranks(ranks: bytes, splits: str) -> Any:
    import tempfile

    import gigatoken

    # The library reads ranks from a path only. Without special tokens: text stays text.
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.write(ranks)
        file.flush()
        return gigatoken.Tokenizer.from_tiktoken(file.name, splits)


def is_refusal(error: BaseException) -> bool:
    """Whether gigatoken does not take something. A panic of its Rust is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


# The same vocabulary in another form

DIGEST = re.compile("|[0-9a-f]{64}")
GPT2 = TIKTOKEN["gpt2"][0]
MERGES_ONLY = {
    "dropout": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
    "ignore_merges": False,
}
"""What a model must have, or leave out, to be merges of bytes and nothing else."""


def as_ranks(tokenizer_json: str, tokenizer: Any) -> tuple[bytes, Any] | None:
    """A vocabulary that splits words as GPT-2 does as the lines of a .tiktoken file, and an instance made of them; None
    where that would not be the same. Such a file loads in half the time, for which the first batch waits, and during
    which no thread gets on.

    A tokenizer.json says which pairs to merge, ranks only what comes out of it. But gigatoken makes pairs of the ranks
    when it loads them: where they are those of the file, in the same order and with the same ids, it is the same.
    """
    head, rest = behead(tokenizer_json)
    splits = head.get("pre_tokenizer") or {}
    spaced, split = splits.get("add_prefix_space", True), splits.get("use_regex", True)
    if (
        splits.get("type") != "ByteLevel"
        or not split
        or spaced
        or head.get("normalizer")
        or head.get("added_tokens")
    ):
        return None
    model, _ = json.JSONDecoder().raw_decode(rest)
    usual = [(model.get(name) or without) == without for name, without in MERGES_ONLY.items()]
    if model.get("type") != "BPE" or not all(usual):
        return None
    vocabulary, merges = tokenizer.vocab, tokenizer.merges
    ids = {token: id for id, token in vocabulary.items()}
    tokens = [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in merges)]
    own = [ids.get(token, -1) for token in tokens]
    if (
        len(ids) < len(vocabulary)
        or sorted(own) != list(range(len(own)))
        or own[256:] != sorted(own[256:])
    ):
        return None  # ranks are the ids, leave none out, and say what is merged first
    ranks = b"".join(base64.b64encode(vocabulary[id]) + b" %d\n" % id for id in range(len(tokens)))
    again = _from_ranks(ranks, GPT2)
    same = again.merges == merges and all(
        vocabulary[id] == token for id, token in again.vocab.items()
    )
    return (ranks, again) if same else None


def _keep_ranks(vocabulary: Vocabulary, tokenizer: Any) -> str:
    """Write down the other form of a vocabulary, if it has one. Gives its digest, or ""."""
    if vocabulary.tokenizer_json is None:
        return ""
    try:
        found = as_ranks(vocabulary.tokenizer_json, tokenizer)
        if found is None or compare(_around(tokenizer), _around(found[1])):
            return ""
        digest = hashlib.sha256(found[0]).hexdigest()
        write_atomically(_ranks_path(digest), found[0].decode("ascii"))
        return digest
    except BaseException as error:  # no run fails of what it could do without
        if not is_refusal(error):
            raise
        log.info("%s is not kept as ranks (%s): it loads as it is", vocabulary.name, error)
        return ""


def _around(tokenizer: Any) -> GigatokenEngine:
    return GigatokenEngine(lambda: tokenizer, 0)


def _kept_ranks(digest: str) -> Path | None:
    """The file of that digest, if it is there and whole."""
    path = _ranks_path(digest)
    try:
        return path if hashlib.sha256(path.read_bytes()).hexdigest() == digest else None
    except OSError:
        return None


def _ranks_path(digest: str) -> Path:
    return cache_dir() / "ranks" / f"{digest[:24]}.tiktoken"


def compare(fast: Engine, reference: Engine) -> list[int]:
    """The numbers of the probe texts on which two engines differ."""
    texts = binaries([text.encode() for text in PROBE], pa.large_string())
    results: list[list[Ids]] = []
    for engine in (fast, reference):
        ids, offsets = engine.encode(texts)
        results.append([ids[a:b] for a, b in itertools.pairwise(offsets)])
    return [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not np.array_equal(a, b)]

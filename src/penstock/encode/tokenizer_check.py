"""Use gigatoken only if it gives the ids of the reference engine.

Both encode a probe of many kinds of characters when a vocabulary is first loaded. The result is
kept on disk for each vocabulary and each pair of versions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from penstock.config import cache_dir, installed_version, write_atomically
from penstock.encode.engines import Engine, GigatokenEngine
from penstock.encode.vocabulary import Vocabulary
from penstock.errors import TokenizerError
from penstock.read.columns import binaries

PROBE_VERSION = 4
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
    """Return gigatoken's engine. Raise TokenizerError if it cannot be used for this vocabulary."""
    versions = [(name, installed_version(name)) for name in ("gigatoken", vocabulary.reference)]
    key = f"{vocabulary.fingerprint} {versions} {PROBE_VERSION}"
    path = cache_dir() / "engines" / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        note = json.loads(path.read_text("utf-8"))
        vocab_size, differs = int(note["vocab_size"]), int(note["differs"])
        engine = GigatokenEngine(vocabulary, cache_bytes, vocab_size)
    except (OSError, ValueError, KeyError, TypeError):  # no note, or it is damaged
        engine = GigatokenEngine(vocabulary, cache_bytes)
        # Without the reference's library there is nothing to compare with.
        differs = differing(engine, reference()) if versions[1][1] is not None else 0
        note = json.dumps({"vocab_size": engine.vocab_size, "differs": differs})
        write_atomically(path, note, best_effort=True)
    if differs:
        raise TokenizerError(
            f"gigatoken's ids for {vocabulary.name} differ from those of {vocabulary.reference} "
            f"on {differs} of {len(PROBE)} probe texts"
        )
    return engine


def differing(fast: Engine, reference: Engine) -> int:
    """Return the number of probe texts on which two engines differ."""
    texts = binaries([text.encode() for text in PROBE], pa.large_string())
    results = []
    for engine in (fast, reference):
        ids, offsets = engine.encode(texts)
        results.append([ids[a:b] for a, b in itertools.pairwise(offsets)])
    return sum(not np.array_equal(a, b) for a, b in zip(*results, strict=True))

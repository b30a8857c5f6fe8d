"""What would be gained if some stages cost nothing: measured by leaving them out, beside what the attribution says.

In:    how to make a loader of the real data, and one of data that needs fewer stages.
Out:   a `WhatIf`: how much of the wait disappears, and how much was charged to the stages left out.
Where: the calling thread.
State: a folder of its own for tokens, while it lasts; the user's cache is neither read nor written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np

from penstock.dataset import TextDataset
from penstock.doctor.flow import Flow, drain, together
from penstock.doctor.trial import Alone
from penstock.errors import ConfigError
from penstock.loader import AsyncDataLoader
from penstock.order.shuffle import I64
from penstock.read.attempt import Remote
from penstock.read.synthetic import Ids, SyntheticDataset
from penstock.tools.stage import stage
from penstock.types import GiB, MiB

Question = Literal["cached", "synthetic"]
Make = Callable[[Any], AsyncDataLoader]

ROUNDS = 2
"""Real, what-if, real, what-if: a machine that gets slower meanwhile gets slower for both."""
PASSES = 100
"""A cache that holds only a part of the data is read so often at most."""
HELD_IDS = 1 << 17
"""Of random rows: few enough to stay in a core's own cache."""
LEFT_OUT = {
    "cached": ("fetch", "decode", "tokenize"),
    "synthetic": ("fetch", "decode", "tokenize", "pack", "ranks"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Two measurements of the same thing. Shares are of the time that the real data took."""

    question: Question
    tokens_per_s: float
    if_tokens_per_s: float
    data_wait: float
    if_data_wait: float
    disappears: float
    """By difference: what is left of the time for as many tokens."""
    attributed: float
    """By attribution: what was charged to the stages that were left out."""

    @property
    def apart(self) -> float:
        """By how many percentage points they differ."""
        return 100 * abs(self.disappears - self.attributed)


def ask(
    question: Question,
    dataset: Any,
    make: Make,
    real: Flow,
    alone: Alone | None,
    folder: Path,
    seconds: float,
    by: float,
    tokens_per_s: float | None,
) -> WhatIf:
    """Run the same consumer on both, in turn. `real` is a run of the real data that was made before."""
    limit: int | None = None
    other: Any
    if question == "cached":
        other = with_cache(dataset, folder)
        limit = _fill(other, make, real, seconds, alone)
    else:
        other = _synthetic(dataset, real)
    pairs: list[tuple[Flow, Flow]] = []
    for _ in range(ROUNDS):
        before = drain(make(dataset), seconds, by=by, tokens_per_s=tokens_per_s)
        pairs.append((before, _passes(lambda: make(other), seconds, by, tokens_per_s, limit)))
    return _compare(question, pairs)


def with_cache(dataset: Any, folder: Path) -> TextDataset:
    """The same data with a token cache of its own."""
    if not isinstance(dataset, TextDataset):
        raise ConfigError(
            f"what_if='cached' is for text in files, and this is {type(dataset).__name__}: there is nothing to keep. "
            "Use what_if='synthetic'."
        )
    from penstock.sources.network import Outside

    kept = copy.copy(dataset)
    outside = dataset.outside or Outside(limits=Remote.of(None), folder=folder)
    kept.outside = replace(outside, folder=folder, cache_bytes=8 * GiB)
    return kept


def _fill(
    dataset: TextDataset, make: Make, real: Flow, seconds: float, alone: Alone | None
) -> int | None:
    """Fill the cache with what the real data gives in about the time. Gives the tokens; None for a whole epoch."""
    itemsize = dataset.tokenizer.dtype.itemsize
    goal = max(MiB, int(seconds * real.tokens_per_s * itemsize))
    while not (done := stage(make(dataset), goal)).chunks and not done.complete:
        goal *= 4  # a single chunk is larger
    if done.complete or alone is None:
        return None
    # Less than there is: the run reads ahead, and should find what it reads.
    return int(0.7 * done.chunks * alone.chunk_tokens)


def _synthetic(dataset: Any, real: Flow) -> SyntheticDataset:
    """Random ids in rows of the same shape."""
    if not real.seq_len:
        raise ConfigError(
            "what_if='synthetic' is for batches of rows of ids, and these have another shape"
        )
    size = getattr(getattr(dataset, "tokenizer", None), "size", 50257)
    return _HeldRows(size, real.seq_len, 1 << 20, 0)


class _HeldRows(SyntheticDataset):
    """The same few rows again and again: making new ones would be a stage of its own."""

    def __init__(self, vocab_size: int, seq_len: int, num_samples: int, seed: int) -> None:
        super().__init__(vocab_size, seq_len, num_samples, seed)
        self._table = super().__getitems__(np.arange(max(1, HELD_IDS // seq_len)))

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        held: Ids = self._table[np.asarray(indices) % len(self._table)]
        return held


def _passes(
    make: Callable[[], AsyncDataLoader],
    seconds: float,
    by: float,
    tokens_per_s: float | None,
    limit: int | None,
) -> Flow:
    """As often as it takes to fill the time."""
    flows: list[Flow] = []
    begun = perf_counter()
    while not flows or (
        limit is not None and perf_counter() - begun < seconds and len(flows) < PASSES
    ):
        flows.append(drain(make(), seconds, by=by, tokens_per_s=tokens_per_s, max_tokens=limit))
    return together(flows)


def _compare(question: Question, pairs: Sequence[tuple[Flow, Flow]]) -> WhatIf:
    def middle(of: Callable[[Flow, Flow], float]) -> float:
        return median(of(real, other) for real, other in pairs)

    def gone(real: Flow, other: Flow) -> float:
        # For as many tokens: the runs have given different numbers of them.
        left = other.wait_s * real.tokens / other.tokens if other.tokens else 0.0
        return (real.wait_s - left) / real.seconds

    def charged(real: Flow, other: Flow) -> float:
        return sum(real.by_stage.get(stage, 0.0) for stage in LEFT_OUT[question]) / real.seconds

    return WhatIf(
        question=question,
        tokens_per_s=middle(lambda real, _: real.tokens_per_s),
        if_tokens_per_s=middle(lambda _, other: other.tokens_per_s),
        data_wait=middle(lambda real, _: real.data_wait),
        if_data_wait=middle(lambda _, other: other.data_wait),
        disappears=middle(gone),
        attributed=middle(charged),
    )

"""Settings that suit what was measured, as lines to paste.

In:    how fast each stage is alone, how fast all of it is, and how fast the trainer is.
Out:   `Recommended`: values, and the lines of a settings file that say them.
Where: the calling thread.
State: none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.config import default_workers
from penstock.doctor.trial import Alone
from penstock.types import MiB

SPARE = 1.2
"""How much faster than needed: no two moments of a machine are alike."""
PREFETCH = (8, 32)
MOST_FETCHES = 64
LEAST_MEMORY = 256 * MiB
STEP_MEMORY = 64 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the loader that was tried is set up."""

    n_workers: int
    prefetch_size: int
    batch_tokens: int
    batch_bytes: int
    """What a batch takes in the queue."""
    memory_limit: int
    window_chunks: int
    lanes: int
    expansion: int
    """How many times its text a chunk takes while it is worked on."""
    cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """Settings. None: does not apply to this data."""

    n_workers: int
    prefetch_size: int
    memory_limit: int
    fetches: int | None
    cache: bool | Literal["auto"] | None

    def lines(self) -> list[str]:
        """As a settings file has them."""
        lines = [
            "[loader]",
            f"n_workers = {self.n_workers}",
            f"prefetch_size = {self.prefetch_size}",
            f'memory_limit = "{self.memory_limit // MiB}MiB"',
        ]
        if self.cache is not None:
            lines += [
                "",
                "[data]",
                'cache = "auto"' if self.cache == "auto" else f"cache = {str(self.cache).lower()}",
            ]
        if self.fetches is not None:
            lines.append(f"remote = {{ fetches = {self.fetches} }}")
        return lines


def recommend(
    setup: Setup, alone: Alone | None, limited_by: str, wanted: float | None, enough: bool
) -> Recommended:
    """What to set. `wanted`: the tokens/s of the trainer; without it, as fast as the machine can."""
    if alone is None:
        limit = _memory(setup.batch_bytes * (setup.prefetch_size + 1))
        return Recommended(
            n_workers=setup.n_workers
            if enough and wanted
            else max(setup.n_workers, default_workers()),
            prefetch_size=setup.prefetch_size,
            memory_limit=max(setup.memory_limit, limit),
            fetches=None,
            cache=None,
        )
    worker_s = 1 / alone.tokenize_tokens_per_s + alone.bytes_per_token / alone.decode_bytes_per_s
    cores = default_workers()
    workers = cores if wanted is None else min(cores, max(1, math.ceil(SPARE * wanted * worker_s)))
    prefetch = PREFETCH[0]
    if wanted is not None and enough:
        # A chunk that is late by as long as it takes to make one should not be noticed.
        late_s = alone.chunk_tokens * worker_s + (alone.fetch_p95_ms or 0.0) / 1e3
        prefetch = min(PREFETCH[1], max(prefetch, math.ceil(late_s * wanted / setup.batch_tokens)))
    fetches = _fetches(alone, wanted)
    ahead = setup.lanes * setup.window_chunks + 2 * workers + 2 * (fetches or 0)
    need = setup.batch_bytes * (prefetch + 1) + ahead * setup.expansion * alone.chunk_bytes
    cache: bool | Literal["auto"] = "auto" if alone.remote else setup.cache
    if not enough and not alone.remote and limited_by in ("fetch", "decode", "tokenize"):
        cache = True
    return Recommended(
        n_workers=workers,
        prefetch_size=prefetch,
        memory_limit=_memory(need),
        fetches=fetches,
        cache=cache,
    )


def _fetches(alone: Alone, wanted: float | None) -> int | None:
    """More fetches at a time where they are needed, and where those so far have not filled the link."""
    if not alone.remote:
        return None
    one, many, stored = (
        alone.fetch_bytes_per_s,
        alone.in_flight_bytes_per_s,
        alone.stored_bytes_per_token,
    )
    if not one or not many or not stored:
        return alone.in_flight
    need = SPARE * stored * (wanted if wanted is not None else alone.workers_tokens_per_s)
    scales = many > 0.5 * one * alone.in_flight
    if need <= many or not scales:
        return alone.in_flight
    # Twice as many, and then measured again: where the link is full, nobody can tell from here.
    return min(max(MOST_FETCHES, alone.in_flight), 2 * alone.in_flight)


def _memory(need: float) -> int:
    return max(LEAST_MEMORY, math.ceil(SPARE * need / STEP_MEMORY) * STEP_MEMORY)

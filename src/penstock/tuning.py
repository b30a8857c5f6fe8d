"""The knobs of a pipeline: what may be changed while it runs, and how far.

In:    a pipeline's pool, queue and lanes.
Out:   knobs for `feed.autotune`.
Where: made on the trainer's thread, and turned there.
State: when requests were last counted.
"""

from __future__ import annotations

import math
import time
from typing import Any

from penstock.feed.autotune import Knob
from penstock.feed.pool import Pool, ThreadPool
from penstock.feed.prefetch import Prefetcher
from penstock.sources.source import Run

FETCHES = 64
"""Requests in flight, at the most: a server counts more than that as an attack."""
AHEAD = 64
"""Chunks beyond the window, at the most; memory usually ends it earlier."""
PREFETCH = 256

MADE = frozenset({"fetch", "decode", "tokenize"})
ALL = MADE | {"pack", "batch", "copy"}


def knobs(
    pool: Pool, queue: Prefetcher[Any], lanes: Any, run: Run, *, cores: int, batch_bytes: int
) -> list[Knob]:
    """What can be turned here. `lanes` are those of text, or anything else, which has fewer of them."""
    found: list[Knob] = []
    text = hasattr(lanes, "read_ahead")
    if text and hasattr(lanes, "set_fetches") and lanes.fetches:
        found.append(
            Knob(
                "fetches",
                lambda: lanes.fetches,
                lanes.set_fetches,
                lambda: 1 if lanes.tight else FETCHES,
                frozenset({"fetch"}),
                wanted=_Littles(lanes),
            )
        )
    # Files that are read forwards keep what their workers need, for as many of them as there were.
    # Processes take long to start: they stay as many as they are.
    if type(pool) is ThreadPool and not getattr(lanes, "forward", False):
        found.append(
            Knob(
                "n_workers",
                lambda: pool.n_workers,
                pool.resize,
                lambda: cores,
                frozenset({"decode", "tokenize"}),
                1,
            )
        )
    if text:

        def set_ahead(chunks: int) -> None:
            lanes.extra = chunks

        found.append(
            Knob(
                "read_ahead", lanes.read_ahead, set_ahead, lambda: 0 if lanes.tight else AHEAD, MADE
            )
        )
    if batch_bytes:
        total = run.queue_bytes + run.read_ahead_bytes
        most = min(PREFETCH, max(run.prefetch_size, total // 2 // batch_bytes))

        def set_prefetch(batches: int) -> None:
            queue.resize(batches)
            if hasattr(lanes, "allow"):
                more = (batches - run.prefetch_size) * batch_bytes
                lanes.allow(run.read_ahead_bytes - max(0, more))

        found.append(Knob("prefetch_size", lambda: queue.capacity, set_prefetch, lambda: most, ALL))
    return found


class _Littles:
    """How many requests have to be in flight for the rate there is, by the time that one of them takes."""

    def __init__(self, lanes: Any) -> None:
        self._lanes = lanes
        self._last: tuple[float, int] | None = None

    def __call__(self) -> int | None:
        times = self._lanes.fetch_times()
        if times is None:
            return None
        now, requests, p95_s = (
            time.monotonic(),
            int(times["requests"]),
            float(times["p95_ms"]) / 1e3,
        )
        before, self._last = self._last, (now, requests)
        if before is None or now - before[0] < 0.5:
            return None
        rate: float = (requests - before[1]) / (now - before[0])
        return math.ceil(1.5 * rate * p95_s)

"""The statistics of a loader, accumulated over its pipelines, and of its requests."""

from __future__ import annotations

import copy
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.types import Span
from penstock.watch.telemetry import StageTimes, Telemetry

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

FAULT = "fault "
"""Prefix of the counters of failed attempts, followed by the reason."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a loader since it was created or a state was loaded."""

    batches: int
    tokens: int
    """Input ids returned, padding included."""
    documents: int = 0
    """Documents read into the stream, including buffered batches."""
    text_bytes: int = 0
    queue_depth: int = 0
    wait_s: float = 0.0
    """Time spent in `next`."""
    wall_s: float = 0.0
    """Time from the first call of `next` to the end of the last one, without pauses."""
    empty: int = 0
    filtered: int = 0
    """Documents that a filter or transform dropped."""
    bad: dict[str, int] = field(default_factory=dict)
    """Rejected records by reason."""
    cropped_tokens: int = 0
    padded_tokens: int = 0
    dropped_tokens: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """For mixtures: rows of each part returned."""
    requests: int = 0
    """Requests to servers, counting every attempt."""
    fetched_bytes: int = 0
    """Bytes fetched from servers and used."""
    hedges: int = 0
    """Slow reads that were repeated on another connection."""
    faults: dict[str, int] = field(default_factory=dict)
    """Failed attempts by reason."""
    retry_wait_ms: int = 0
    """Total time that fetch threads waited between attempts."""
    cache_hits: int = 0
    """Chunks read from the token cache."""
    cache_misses: int = 0
    """Chunks that were read and tokenized."""
    cache_written: int = 0
    """Chunks written to the cache; below, those that it refused or skipped."""
    cache_written_bytes: int = 0
    cache_refused: int = 0
    cache_skipped: int = 0
    cache_damaged: int = 0
    """Damaged cache entries, whose chunks were tokenized again."""
    worker_restarts: int = 0
    """Worker processes that died and were replaced."""
    next_p50_ms: float = 0.0
    next_p95_ms: float = 0.0
    next_p99_ms: float = 0.0
    """Percentiles of the time in `next` over the last few hundred steps."""
    wait_by_stage: dict[str, float] = field(default_factory=dict)
    """Seconds spent in `next`, by causing stage."""
    stages: dict[str, StageTimes] = field(default_factory=dict)
    """The totals of each stage over all its threads."""
    fetch: dict[str, Any] = field(default_factory=dict)
    """The time of fetches by phase, in seconds over all threads, and percentiles."""
    paused_s: dict[str, float] = field(default_factory=dict)
    """Time in `loader.pause(name)`, excluded from `wall_s`."""
    device_wait_s: float | None = None
    """The time that the device itself waited, if known. `wait_s` is an upper bound."""
    verdict: str = ""
    """The cause of the last steps' waits and advice, in one line."""
    memory_estimate: int = 0
    """Estimated bytes of queue and device batches. Read-ahead has the rest of `memory_limit`."""
    lane_balance: float | None = None
    """Bytes of the smallest lane as a share of the mean; None if lanes have no sizes."""

    shuffle_quality: float | None = None
    """Distinct source chunks in the last global batch, as a share of the expected number in a
    uniformly random order of documents; None if the data is not shuffled or has no chunks."""

    @property
    def data_wait(self) -> float:
        """The share of wall time spent in `next`."""
        return self.wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0


class SourceChunks(NamedTuple):
    """The chunks of a corpus, to measure how well a batch mixes them."""

    documents: np.ndarray[Any, np.dtype[Any]]
    """The number of documents in each chunk; equal numbers if unknown."""
    nbytes: int
    """Bytes per chunk, to find the chunk of a document by its offset."""
    parts: float = 1.0
    """The number of parts of a chunk that ranks may read separately."""


def shuffle_quality(
    rows: Sequence[Sequence[Span]], chunks: SourceChunks, ranks: int
) -> float | None:
    """Return the distinct chunks in a global batch as a share of those in a uniform order.

    Extrapolates from the batch of one rank: other ranks read as many other parts of chunks.
    """
    documents = {
        (span.file, span.row_group, span.offset if span.row_group is None else span.row)
        for row in rows
        for span in row
    }
    n = len(chunks.documents)
    if not n or not documents:
        return None
    distinct = {
        (file, (at or 0) // max(1, chunks.nbytes) if group is None else group)
        for file, group, at in documents
    }
    own = 1 - (1 - min(1.0, len(distinct) / n)) ** (1 / chunks.parts)  # share of all parts
    found = n * (1 - (1 - min(1.0, ranks * own)) ** chunks.parts)
    shares = chunks.documents / chunks.documents.sum()
    uniform = (1 - (1 - shares) ** (ranks * len(documents))).sum()
    return float(found / uniform)


RESTARTS = 8
"""Slow attempts that may be repeated, beyond a tenth of all requests."""


class NetworkStats:
    """Counts of requests, bytes, seconds and faults, shared by many threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._reads: dict[int, deque[float]] = {}
        """Durations of recent reads, by the power of two of their lengths."""
        self._lock = threading.Lock()

    def add(self, fault: str = "", **counts: Any) -> None:
        with self._lock:
            self.counts.update(counts)
            self.faults.update([fault] if fault else [])

    def add_read(self, length: int, seconds: float) -> None:
        with self._lock:
            self._reads.setdefault(length.bit_length(), deque(maxlen=128)).append(seconds)

    def slow_s(self, length: int) -> float | None:
        """Return a duration that few reads of this length exceed, or None if too few are known."""
        with self._lock:
            recent = sorted(self._reads.get(length.bit_length(), ()))
            # If everything is slow, more requests would make it slower.
            many = self.counts["restarts"] > RESTARTS + self.counts["requests"] // 10
        # Reads share the link, so one that is slightly slower than most is not stuck.
        known = len(recent) >= 8 and not many
        return 1.5 * recent[int(0.95 * len(recent))] + 0.1 if known else None

    def times(self) -> dict[str, Any]:
        """Return the time that requests spent in each phase, over all threads."""
        with self._lock:
            waits, counts = sorted(chain(*self._reads.values())) or [0.0], self.counts
            parts = ("first_byte_s", "body_s", "retry_s")
            return {
                **{name: round(counts[name], 6) for name in parts},
                **{f"p{p}_ms": round(1e3 * waits[len(waits) * p // 101], 3) for p in (50, 95, 99)},
                "requests": counts["requests"],
                "retries": self.faults.total(),
                "bytes": counts["bytes"],
            }

    def totals(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requests": self.counts["requests"],
                "fetched_bytes": self.counts["bytes"],
                "hedges": self.counts["restarts"],
                "retry_wait_ms": round(1e3 * self.counts["retry_s"]),
                **{f"fault {name}": n for name, n in self.faults.items()},
            }


class LoaderStats:
    """Accumulates the counters of a loader's successive pipelines."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()

    def keep(self, pipeline: Pipeline, parts: dict[str, int]) -> None:
        """Add the counters of a pipeline, and the rows of each part that it returned."""
        self._counts.update(pipeline.totals())
        self._bad.update(pipeline.bad())
        self._parts.update(parts)

    def stats(
        self,
        pipeline: Pipeline | None,
        telemetry: Telemetry,
        *,
        parts: dict[str, int],
        memory_estimate: int,
        device_wait_s: float | None,
    ) -> Stats:
        """Return the statistics so far, including the running pipeline."""
        now, gauges = copy.deepcopy(self), telemetry.gauges()
        if pipeline is not None:
            now.keep(pipeline, parts)
        counts, timer = now._counts, telemetry.timer
        faults = [name for name in counts if name.startswith(FAULT)]
        total, current = timer.total, timer.current
        p50_ms, p95_ms, p99_ms = timer.percentiles_ms().values()
        return Stats(
            batches=timer.steps,
            tokens=total.tokens,
            queue_depth=telemetry.queue()[0],
            wait_s=total.wait,
            wall_s=total.wall + (0.0 if current is None else current.wait),
            bad=dict(now._bad),
            parts=dict(now._parts),
            faults={name.removeprefix(FAULT): counts.pop(name) for name in faults},
            memory_estimate=memory_estimate,
            lane_balance=gauges.get("balance"),
            shuffle_quality=gauges.get("shuffle_quality"),
            wait_by_stage=dict(total.charges),
            stages=telemetry.stages(),
            fetch=gauges.get("fetch") or {},
            paused_s=dict(timer.paused_s),
            device_wait_s=device_wait_s,
            verdict=telemetry.verdict().line,
            next_p50_ms=p50_ms,
            next_p95_ms=p95_ms,
            next_p99_ms=p99_ms,
            **counts,
        )

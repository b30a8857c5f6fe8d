"""What a loader has done: `Stats`, and the sums it is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.watch.telemetry import Telemetry
from penstock.watch.window import StageTimes

PART, FAULT = "rows of ", "fault "
"""Prefixes of a pipeline's counts by part of a mixture and by reason of a failed attempt."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a loader has done since it was created or a state was loaded."""

    batches: int
    tokens: int
    """Input ids handed out, padding included."""
    documents: int = 0
    """Documents read into the stream, including batches that are not yet handed out."""
    text_bytes: int = 0
    queue_depth: int = 0
    wait_s: float = 0.0
    """Time spent in `next`."""
    wall_s: float = 0.0
    """Time since the first `next`."""
    empty: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    """Rejected records by reason."""
    cropped_tokens: int = 0
    padded_tokens: int = 0
    dropped_tokens: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """For mixtures: rows of each part, including batches that are not yet handed out."""
    requests: int = 0
    """Requests to servers, each attempt counted."""
    fetched_bytes: int = 0
    """Bytes fetched from servers and used."""
    hedges: int = 0
    """Slow reads that were sent a second time."""
    faults: dict[str, int] = field(default_factory=dict)
    """Failed attempts by reason."""
    retry_wait_ms: int = 0
    """Time that fetch threads spent waiting between attempts, added up."""
    cache_hits: int = 0
    """Chunks read from the token cache."""
    cache_misses: int = 0
    """Chunks that were read and tokenized."""
    cache_written: int = 0
    """Chunks written to the cache, and those that it refused, skipped or evicted."""
    cache_written_bytes: int = 0
    cache_refused: int = 0
    cache_skipped: int = 0
    cache_evicted: int = 0
    cache_damaged: int = 0
    """Damaged cache entries, which were made again."""
    worker_restarts: int = 0
    """Worker processes that died and were replaced."""
    next_p50_ms: float = 0.0
    next_p95_ms: float = 0.0
    next_p99_ms: float = 0.0
    """Percentiles of the time in `next`, over the last few hundred steps."""
    wait_by_stage: dict[str, float] = field(default_factory=dict)
    """Seconds spent in `next`, by the stage that caused them."""
    stages: dict[str, StageTimes] = field(default_factory=dict)
    """What each stage did, over all its threads."""
    fetch: dict[str, Any] = field(default_factory=dict)
    """Where fetches spend their time, in seconds over all threads, and percentiles."""
    paused_s: dict[str, float] = field(default_factory=dict)
    """Time within `loader.pause(name)`, which is not part of `wall_s`."""
    device_wait_s: float | None = None
    """How long the device itself waited, if known. `wait_s` is an upper bound of it."""
    verdict: str = ""
    """Why the last steps waited and what to do, in one line."""
    memory_estimate: int = 0
    """Bytes that queue and device are expected to take; read-ahead has the rest of `memory_limit`."""
    lane_balance: float | None = None
    """Bytes of the smallest lane as a share of the mean lane; None if lanes have no sizes."""

    @property
    def data_wait(self) -> float:
        """The share of wall time that was spent in `next`."""
        return self.wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0


class Counting(Protocol):
    """The parts of a pipeline that are used here."""

    @property
    def depth(self) -> int: ...
    def totals(self) -> dict[str, int]: ...
    def bad(self) -> dict[str, int]: ...
    def gauges(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class LoaderStats:
    """Adds up what a loader and its pipelines, one after the other, have done."""

    batches: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    first: float | None = None
    last: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)

    def took(self, begun: float, now: float, tokens: int | None) -> None:
        """Record a call of `next`, and the tokens of its batch or None."""
        self.wait_s += now - begun
        self.first = begun if self.first is None else self.first
        self.last = now
        if tokens is not None:
            self.batches += 1
            self.tokens += tokens

    def keep(self, pipeline: Counting) -> None:
        """Add what a pipeline that ends has counted."""
        self.counts.update(pipeline.totals())
        self.bad.update(pipeline.bad())

    def stats(
        self,
        pipeline: Counting | None,
        telemetry: Telemetry,
        memory_estimate: int,
        device_wait_s: float | None,
    ) -> Stats:
        """Return everything so far, with the counts of the running pipeline."""
        counts, bad = Counter(self.counts), Counter(self.bad)
        gauges: dict[str, Any] = {}
        if pipeline is not None:
            counts.update(pipeline.totals())
            bad.update(pipeline.bad())
            gauges = pipeline.gauges()
        parts, faults = _taken(counts, PART), _taken(counts, FAULT)
        consumer, window = telemetry.consumer, telemetry.window
        wall_s = 0.0 if self.first is None else self.last - self.first - consumer.paused.within_s
        return Stats(
            batches=self.batches,
            tokens=self.tokens,
            queue_depth=0 if pipeline is None else pipeline.depth,
            wait_s=self.wait_s,
            wall_s=wall_s,
            bad=dict(bad),
            parts=parts,
            faults=faults,
            memory_estimate=memory_estimate,
            lane_balance=gauges.get("balance"),
            next_p50_ms=1e3 * window.percentile(0.5),
            next_p95_ms=1e3 * window.percentile(0.95),
            next_p99_ms=1e3 * window.percentile(0.99),
            wait_by_stage=dict(consumer.wait_s),
            stages=telemetry.stages(),
            fetch=gauges.get("fetch") or {},
            paused_s=dict(consumer.paused.total),
            device_wait_s=device_wait_s,
            verdict=telemetry.verdict().line,
            **counts,
        )


def _taken(counts: Counter[str], prefix: str) -> dict[str, int]:
    """Remove and return the counts whose names have a prefix."""
    names = [name for name in counts if name.startswith(prefix)]
    return {name.removeprefix(prefix): counts.pop(name) for name in names}

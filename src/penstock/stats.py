"""What a loader has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.watch.window import StageTimes


@dataclass(frozen=True, slots=True)
class Stats:
    """What a loader has done since it was created or last given a state."""

    batches: int
    tokens: int
    """Input ids handed out, padding included."""
    documents: int = 0
    """Documents read into the stream, those of batches not yet handed out included."""
    text_bytes: int = 0
    queue_depth: int = 0
    wait_s: float = 0.0
    """Time spent in `next`."""
    wall_s: float = 0.0
    """Time since the first `next`."""
    empty: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    """Records left out, by reason."""
    cropped_tokens: int = 0
    padded_tokens: int = 0
    dropped_tokens: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """For mixtures: rows of each part, those of batches not yet handed out included."""
    requests: int = 0
    """Requests to servers, each attempt counted."""
    fetched_bytes: int = 0
    """Bytes that came over the network and were used."""
    hedges: int = 0
    """Reads that took so long that they were asked for a second time."""
    faults: dict[str, int] = field(default_factory=dict)
    """Attempts that failed, by reason."""
    retry_wait_ms: int = 0
    """Time that fetch threads, added up, spent waiting between attempts: no bandwidth was to be had by it."""
    cache_hits: int = 0
    """Chunks that came from the token cache."""
    cache_misses: int = 0
    """Chunks that were read and tokenized."""
    cache_written: int = 0
    """Chunks that were put there, and those for which it had no room, no time, or which it had to drop again."""
    cache_written_bytes: int = 0
    cache_refused: int = 0
    cache_skipped: int = 0
    cache_evicted: int = 0
    cache_damaged: int = 0
    """Entries of the cache that were damaged, and so made again."""
    worker_restarts: int = 0
    """Worker processes that died and were replaced."""
    next_p50_ms: float = 0.0
    next_p95_ms: float = 0.0
    next_p99_ms: float = 0.0
    """Time in `next`, over the last few hundred steps."""
    wait_by_stage: dict[str, float] = field(default_factory=dict)
    """Seconds spent in `next`, by the stage that is to blame."""
    stages: dict[str, StageTimes] = field(default_factory=dict)
    """What each stage did, over all its threads: see docs/numbers.md."""
    fetch: dict[str, Any] = field(default_factory=dict)
    """Where fetches from servers spend their time, in seconds over all threads, and percentiles of the last ones."""
    paused_s: dict[str, float] = field(default_factory=dict)
    """Time that `loader.pause(name)` kept apart. It is not part of `wall_s`."""
    device_wait_s: float | None = None
    """How long the device itself waited, where it can tell. `wait_s` is the host's time, an upper bound of it."""
    verdict: str = ""
    """Why the last steps waited, and what to do, in one line."""
    memory_estimate: int = 0
    """Bytes that queue and device are expected to take; read-ahead gets the rest of `memory_limit`."""

    @property
    def data_wait(self) -> float:
        """The share of the wall time that was spent waiting for data."""
        return self.wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

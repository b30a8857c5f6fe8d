"""What a loader has done: `Stats`, and the sums it is made of."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.types import Span
from penstock.watch.telemetry import StageTimes, Telemetry

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

FAULT = "fault "
"""Prefix of a pipeline's counts by reason of a failed attempt."""


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
    """Time from the first `next` to the end of the last one, without pauses."""
    empty: int = 0
    filtered: int = 0
    """Documents that a filter or transform left out."""
    bad: dict[str, int] = field(default_factory=dict)
    """Rejected records by reason."""
    cropped_tokens: int = 0
    padded_tokens: int = 0
    dropped_tokens: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """For mixtures: rows of each part that were handed out."""
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
    """Chunks written to the cache, and those that it refused or skipped."""
    cache_written_bytes: int = 0
    cache_refused: int = 0
    cache_skipped: int = 0
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

    shuffle_quality: float | None = None
    """Distinct source chunks in the last global batch, as a share of what a uniformly random order of
    the documents would give on average; None if the data is not shuffled or has no chunks."""

    @property
    def data_wait(self) -> float:
        """The share of wall time that was spent in `next`."""
        return self.wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0


class SourceChunks(NamedTuple):
    """The chunks of a corpus, to measure how well a batch mixes them."""

    documents: np.ndarray[Any, np.dtype[Any]]
    """How many documents each chunk has; equal numbers if that is not known."""
    nbytes: int
    """Bytes of a chunk, to find the chunk of a document that is known by its offset."""
    parts: float = 1.0
    """Parts of a chunk that ranks may read apart from each other."""


def shuffle_quality(
    rows: Sequence[Sequence[Span]], chunks: SourceChunks, ranks: int
) -> float | None:
    """Return the distinct chunks of a global batch as a share of those that a uniform order gives.

    The batch of one rank stands for all: other ranks read other parts of chunks, as many.
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


class LoaderStats:
    """Adds up what the pipelines of a loader, one after the other, have counted."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()

    def keep(self, pipeline: Pipeline, parts: dict[str, int]) -> None:
        """Add what a pipeline that ends has counted, and the rows of each part it handed out."""
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
        """Return everything so far, with the counts of the running pipeline."""
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

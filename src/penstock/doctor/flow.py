"""Run a loader for a while, and see how fast it goes and what its consumer waits for.

In:    a loader that has not begun, and how fast the consumer is.
Out:   a `Flow`: tokens, time, the wait and whose it was, memory.
Where: the calling thread.
State: none. The loader is shut down afterwards.

Text comes in chunks, each of which gives many batches at once. So what is measured begins with a chunk's
arrival and ends with one: else a short look at slow data would count a chunk too many.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter, process_time
from typing import Any

from penstock.errors import LoaderTimeout, NoData
from penstock.loader import AsyncDataLoader
from penstock.loader_stats import Stats
from penstock.watch.attribution import Known
from penstock.watch.memory import resident_bytes

LOOK_S = 0.02
"""How often memory is looked at."""
FEWEST = 2
"""Batches after the first one without which there is nothing to divide by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What a loader gave, after its first batch."""

    tokens: int
    seconds: float
    wait_s: float
    by_stage: Mapping[str, float]
    """The wait, by the stage that is to blame, in seconds."""
    first_batch_s: float
    seq_len: int
    peak_bytes: int
    """How far the resident memory grew while it ran."""
    cores_used: float
    """Seconds of processor time a second, of all threads of this process."""
    chunks_ahead: int
    """The most chunks that were under way or ready at a time."""
    known: Known
    """What a word of advice takes into account."""
    stats: Stats
    """All of it, the first batch included."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def data_wait(self) -> float:
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """Each stage's share of the wait, the largest first."""
        total = sum(self.by_stage.values())
        ranked = sorted(self.by_stage.items(), key=lambda item: -item[1])
        return {stage: seconds / total for stage, seconds in ranked} if total > 0 else {}


class _Step:
    """A timed stand-in for a training step. It keeps its rate on average, however late it wakes up.

    One that would end after `by` is not begun: at a low enough rate it takes days.
    """

    def __init__(self, tokens_per_s: float | None, by: float) -> None:
        self._rate = tokens_per_s
        self._by = by
        self._never = threading.Event()
        self._over = 0.0

    def take(self, tokens: int) -> None:
        if self._rate is None:
            return
        begun, due = perf_counter(), max(0.0, tokens / self._rate - self._over)
        if due > (left := _left(self._by)):
            raise LoaderTimeout(
                f"a step of {tokens:,} tokens takes {due:,.1f} s at {self._rate:g} tokens a second, and {left:.1f} s are "
                "left of the time for all of it. Try a rate this low with smaller batches or more --seconds, or without "
                "--what-if."
            )
        self._never.wait(due)
        self._over = max(0.0, self._over - tokens / self._rate) + perf_counter() - begun - due


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far a run has come."""

    at: float
    tokens: int
    wait_s: float
    by_stage: Mapping[str, float]


def drain(
    loader: AsyncDataLoader,
    seconds: float,
    *,
    by: float,
    tokens_per_s: float | None = None,
    max_tokens: int | None = None,
) -> Flow:
    """Take batches for `seconds` after the first one, as fast as they come or with a timed stand-in for a step.

    by: when, in monotonic time, even the slowest batch and step have to be done; `LoaderTimeout` if they are not.
    tokens_per_s: what the stand-in consumes. max_tokens: stop after so many.
    """
    resident, begun = resident_bytes(), perf_counter()
    step = _Step(tokens_per_s, by)
    with loader:
        batch = loader.next_batch(_left(by))
        if batch is None:
            raise NoData(
                "the data gives no batch: lower batch_size or seq_len, or use drop_last=False"
            )
        now = perf_counter()
        first_s = now - begun
        tokens, waited, longest, taken = 0, 0.0, 0.0, 0
        start = arrival = last = _Mark(now, 0, 0.0, dict(loader.telemetry.consumer.wait_s))
        looked, peak, ahead, used = now, resident_bytes(), _ahead(loader), process_time()
        shape: tuple[int, ...] = tuple(getattr(batch.inputs, "shape", ()))
        first_tokens = batch.tokens
        while True:
            step.take(batch.tokens)
            asked = perf_counter()
            enough = asked - start.at >= seconds or (
                max_tokens is not None and tokens >= max_tokens
            )
            if enough and taken >= FEWEST:
                break
            batch = loader.next_batch(_left(by))
            if batch is None:
                break
            now = perf_counter()
            tokens, waited, taken = tokens + batch.tokens, waited + now - asked, taken + 1
            if now - asked >= longest / 2:
                longest = max(longest, now - asked)
                arrival = _Mark(now, tokens, waited, dict(loader.telemetry.consumer.wait_s))
            if now - looked >= LOOK_S:
                looked, peak, ahead = now, max(peak, resident_bytes()), max(ahead, _ahead(loader))
        cores = (process_time() - used) / max(1e-9, perf_counter() - start.at)
        if taken:
            last = _Mark(now, tokens, waited, dict(loader.telemetry.consumer.wait_s))
        known, stats = loader.telemetry.known(), loader.stats()
    end = arrival if arrival.at - start.at >= 0.5 * (last.at - start.at) else last
    if end is start:  # there was but one batch: it is all that can be gone by
        start, end = (
            _Mark(begun, 0, 0.0, {}),
            _Mark(begun + first_s, first_tokens, first_s, start.by_stage),
        )
    return Flow(
        tokens=end.tokens - start.tokens,
        seconds=end.at - start.at,
        wait_s=end.wait_s - start.wait_s,
        by_stage={
            stage: max(0.0, s - start.by_stage.get(stage, 0.0)) for stage, s in end.by_stage.items()
        },
        first_batch_s=first_s,
        seq_len=shape[1] if len(shape) == 2 else 0,
        peak_bytes=max(0, peak - resident),
        cores_used=cores,
        chunks_ahead=ahead,
        known=known,
        stats=stats,
    )


def together(flows: Sequence[Flow]) -> Flow:
    """Several runs of the same, as one."""
    by_stage: dict[str, float] = {}
    for flow in flows:
        for stage, seconds in flow.by_stage.items():
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds
    last = flows[-1]
    return Flow(
        tokens=sum(flow.tokens for flow in flows),
        seconds=sum(flow.seconds for flow in flows),
        wait_s=sum(flow.wait_s for flow in flows),
        by_stage=by_stage,
        first_batch_s=flows[0].first_batch_s,
        seq_len=last.seq_len,
        peak_bytes=max(flow.peak_bytes for flow in flows),
        cores_used=sum(flow.cores_used for flow in flows) / len(flows),
        chunks_ahead=max(flow.chunks_ahead for flow in flows),
        known=last.known,
        stats=last.stats,
    )


def _left(by: float) -> float:
    return max(0.0, by - monotonic())


def _ahead(loader: AsyncDataLoader) -> int:
    chunks: Mapping[str, Any] = loader.telemetry.gauges().get("queues", {}).get("chunks", {})
    return int(chunks.get("capacity", 0))

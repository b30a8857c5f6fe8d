"""What a loader has done, added up.

In:    each call of `next`, and what pipelines have counted.
Out:   `Stats`, when asked for.
Where: the trainer's thread.
State: the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import sub
from typing import TYPE_CHECKING

from penstock.pipeline import Pipeline
from penstock.watch.consumer import Ready
from penstock.watch.telemetry import Telemetry

if TYPE_CHECKING:
    # A class of that many fields takes two milliseconds to make, for which the first batch would have to wait.
    from penstock.stats import Stats

PART = "rows of "
"""How a pipeline names its count of the rows of a mixture's part."""
FAULT = "fault "
"""How it names its count of attempts that failed for a reason."""


@dataclass(slots=True)
class Tally:
    """Adds up what a loader and its pipelines, one after the other, have done."""

    batches: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    first: float | None = None
    last: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, telemetry: Telemetry) -> Tally:
        """A new one, told of what the telemetry writes down later."""
        tally = cls()
        telemetry.tally = tally.took_ready
        return tally

    def took(self, begun: float, now: float, tokens: int | None) -> None:
        """A call of `next`, with the tokens it gave or None for none."""
        self.wait_s += now - begun
        self.first = begun if self.first is None else self.first
        self.last = now
        if tokens is not None:
            self.batches += 1
            self.tokens += tokens

    def took_ready(self, steps: list[Ready]) -> None:
        """Calls of `next` that found their batch ready, one after the other."""
        begun, ended, tokens, _ = zip(*steps, strict=True)
        self.wait_s += sum(map(sub, ended, begun))
        self.first = begun[0] if self.first is None else self.first
        self.last = ended[-1]
        self.batches += len(steps)
        self.tokens += sum(tokens)

    def keep(self, pipeline: Pipeline) -> None:
        """Carry over what a pipeline that ends has counted."""
        _add(self.counts, pipeline.totals())
        _add(self.bad, pipeline.bad())

    def stats(
        self,
        pipeline: Pipeline | None,
        telemetry: Telemetry,
        memory_estimate: int,
        device_wait_s: float | None = None,
    ) -> Stats:
        """Everything so far, with what the running pipeline has counted."""
        from penstock.stats import Stats

        consumer = telemetry.consumer  # first: what was jotted down is written down with it
        counts, bad = dict(self.counts), dict(self.bad)
        if pipeline is not None:
            _add(counts, pipeline.totals())
            _add(bad, pipeline.bad())
        parts, faults = _those(counts, PART), _those(counts, FAULT)
        return Stats(
            batches=self.batches,
            tokens=self.tokens,
            queue_depth=0 if pipeline is None else pipeline.depth,
            wait_s=self.wait_s,
            wall_s=0.0 if self.first is None else self.last - self.first - consumer.paused.within_s,
            bad=bad,
            parts=parts,
            faults=faults,
            memory_estimate=memory_estimate,
            next_p50_ms=1e3 * telemetry.window.percentile(0.5),
            next_p95_ms=1e3 * telemetry.window.percentile(0.95),
            next_p99_ms=1e3 * telemetry.window.percentile(0.99),
            wait_by_stage=dict(consumer.wait_s),
            stages=telemetry.stages(),
            fetch=(pipeline.gauges()["fetch"] if pipeline is not None else None) or {},
            paused_s=dict(consumer.paused.total),
            device_wait_s=device_wait_s,
            verdict=telemetry.verdict().line,
            **counts,
        )


def _those(counts: dict[str, int], prefix: str) -> dict[str, int]:
    """Take out the counts whose names begin so."""
    return {
        name.removeprefix(prefix): counts.pop(name)
        for name in list(counts)
        if name.startswith(prefix)
    }


def _add(into: dict[str, int], more: dict[str, int]) -> None:
    for name, n in more.items():
        into[name] = into.get(name, 0) + n

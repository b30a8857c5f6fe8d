"""Tune a running pipeline by measurement: workers, requests, read-ahead and queue.

A hill climb on the trainer's thread: raise the knob that may help the stage with the largest share
of the data wait, measure the token rate, and keep the change only if the rate rose. Knobs affect
when batches are made, never their content, so the stream does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.feed.prefetch_queue import PrefetchQueue
from penstock.feed.worker_pool import Pool, ThreadPool

if TYPE_CHECKING:
    from penstock.sources.base import RunContext
    from penstock.watch.telemetry import Telemetry

log = logging.getLogger("penstock")

WARM_STEPS = 20
"""Unmeasured first steps, in which the trainer compiles and fills its caches."""
SETTLE_S = 1.0
"""Unmeasured time after a change, while batches made under the old settings are used up."""
PERIOD_S, PERIOD_STEPS = 2.0, 10
"""The shortest measurement of a rate: both must be reached."""
MIN_GAIN = 1.03
"""A change is kept if the rate rises by this factor. Less is noise."""
MIN_WAIT = 0.01
"""Stages with a smaller share of data wait are not tuned."""
RETRY_S = 60.0
"""Time before a knob that did not help is tried again."""

MAX_FETCHES = 64
"""Requests in flight. Servers limit clients that send more."""
MAX_READ_AHEAD = 64
"""Chunks beyond the window. Memory usually sets a lower limit."""
MAX_PREFETCH = 256

WORKER_STAGES = frozenset({"decode", "tokenize"})
READ_STAGES = WORKER_STAGES | {"fetch"}


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that may be changed while a pipeline runs."""

    name: str
    get: Callable[[], int]
    set: Callable[[int], None]
    max: Callable[[], int]
    """The current limit, given memory and cores."""
    stages: frozenset[str]
    """The stages that a larger value may speed up."""

    def raised(self) -> int:
        """Return the next value to try, or the current one if it is at the maximum."""
        now = self.get()
        return max(now, min(2 * max(1, now), self.max()))


class _Trial(NamedTuple):
    """A change that is being measured."""

    knob: Knob
    before: int
    rate: float
    """Tokens per second before the change."""


class Autotune:
    """Tunes the knobs of one pipeline."""

    def __init__(self, knobs: Iterable[Knob], observed: Telemetry) -> None:
        self.knobs, self._observed = list(knobs), observed
        self._trial: _Trial | None = None
        self._retry_at: dict[str, float] = {}
        self._warm_steps = WARM_STEPS
        self._measure_from(0.0)

    def values(self) -> dict[str, int]:
        """Return the values of the knobs, ignoring an undecided trial."""
        values = {knob.name: knob.get() for knob in self.knobs}
        if self._trial is not None:
            values[self._trial.knob.name] = self._trial.before
        return values

    def adopt(self, values: dict[str, int]) -> None:
        """Start with the values that an earlier pipeline of the same loader found."""
        for knob in self.knobs:
            if knob.name in values:
                knob.set(min(values[knob.name], max(knob.get(), knob.max())))

    def step(self, now: float, tokens: int, paused_s: float = 0.0) -> None:
        """Record a step that ended at `now`, of which `paused_s` was a pause such as evaluation."""
        if self._warm_steps > 0:
            self._warm_steps -= 1
            self._measure_from(now)
        elif now >= self._begun:
            self._tokens += tokens
            self._steps += 1
            self._paused_s += paused_s
            seconds = now - self._begun - self._paused_s
            if self._steps >= PERIOD_STEPS and seconds >= PERIOD_S:
                rate = self._tokens / seconds
                changed = self._undo_or_keep(now, rate) or self._try_next(now, rate)
                self._measure_from(now + SETTLE_S if changed else now)

    def _measure_from(self, begun: float) -> None:
        self._begun, self._tokens, self._steps, self._paused_s = begun, 0, 0, 0.0

    def _undo_or_keep(self, now: float, rate: float) -> bool:
        """Keep or undo the measured change. Return True if it was undone."""
        trial, self._trial = self._trial, None
        if trial is None:
            return False
        why = f"{trial.rate:.0f} → {rate:.0f} tokens/s"
        if rate >= MIN_GAIN * trial.rate:
            self._retry_at.clear()  # a former bottleneck may be gone
            self._report(trial.knob, trial.before, why, True)
            return False
        raised = trial.knob.get()
        trial.knob.set(trial.before)
        self._retry_at[trial.knob.name] = now + RETRY_S
        self._report(trial.knob, raised, why, False)
        return True

    def _try_next(self, now: float, rate: float) -> bool:
        """Raise the knob that may help the stage with the largest share. Return False if none."""
        verdict = self._observed.verdict()
        for stage, share in sorted(verdict.shares.items(), key=lambda item: -item[1]):
            for knob in self.knobs:
                before, waits = knob.get(), now < self._retry_at.get(knob.name, 0.0)
                if share < MIN_WAIT or stage not in knob.stages or waits or knob.raised() == before:
                    continue
                knob.set(knob.raised())
                self._trial = _Trial(knob, before, rate)
                why = f"data wait {verdict.data_wait:.0%}, {stage} {share:.0%}"
                self._report(knob, before, why, None)
                return True
        return False

    def _report(self, knob: Knob, before: int, why: str, kept: bool | None) -> None:
        word = {None: "tried", True: "kept", False: "undone"}[kept]
        log.info("autotune: %s %d → %d %s: %s", knob.name, before, knob.get(), word, why)
        fields = {"what": knob.name, "from": before, "to": knob.get(), "why": why, "kept": kept}
        self._observed.event("tune", **fields)


def pipeline_knobs(
    pool: Pool,
    queue: PrefetchQueue[Any],
    lanes: Any,
    run: RunContext,
    cores: int,
) -> Iterator[Knob]:
    """Yield the knobs of a pipeline. Lanes of chunks have more knobs than other data.

    The queue has a knob only if the size of a batch is known.
    """
    batch_bytes = run.row_bytes * run.batch_size
    reader: Any = getattr(lanes, "reader", None)
    if getattr(reader, "fetches", 0):
        yield Knob(
            "fetches",
            get=lambda: reader.fetches,
            set=reader.set_fetches,
            max=lambda: 1 if lanes.memory_bound else MAX_FETCHES,
            stages=frozenset({"fetch"}),
        )
    if type(pool) is ThreadPool:  # processes are slow to start
        yield Knob("n_workers", lambda: pool.n_workers, pool.resize, lambda: cores, WORKER_STAGES)
    if reader is not None:
        yield Knob(
            "read_ahead",
            get=lambda: lanes.read_ahead,
            set=lambda chunks: setattr(lanes, "min_read_ahead", chunks),
            max=lambda: 0 if lanes.memory_bound else MAX_READ_AHEAD,
            stages=READ_STAGES,
        )
    if batch_bytes:
        size = queue.capacity
        largest = min(
            MAX_PREFETCH, max(size, (run.queue_bytes + run.read_ahead_bytes) // 2 // batch_bytes)
        )

        def resize(batches: int) -> None:
            queue.resize(batches)
            if reader is not None:  # a longer queue takes memory from read-ahead
                more = max(0, batches - size) * batch_bytes
                lanes.read_ahead_bytes = run.read_ahead_bytes - more

        stages = READ_STAGES | {"pack", "batch", "copy"}
        yield Knob("prefetch_size", lambda: queue.capacity, resize, lambda: largest, stages)

"""Run the loader for some seconds at full speed, and report if that is fast enough.

All figures come from the loader's statistics: the rate, the work of each stage, and the stage that
batches waited for. The run ends about `seconds` after the first batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, NamedTuple

from rich.filesize import decimal as size

from penstock.dataset import TextDataset
from penstock.errors import ConfigError, LoaderTimeout, SourceError
from penstock.loader import AsyncDataLoader
from penstock.types import Shard
from penstock.watch.attribution import advise, band
from penstock.watch.loader_stats import Stats

GOOD_DATA_WAIT = 0.05
"""The target rate is met if a trainer would wait for less than this share of its time."""
OPEN_S = 30.0
"""Limit for the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRate:
    """The activity of a stage during the run."""

    busy_threads: float
    """The average number of threads busy with it."""
    bytes_per_s: float
    """Bytes processed per second; 0 for stages that do not count bytes."""
    one_thread_tokens_per_s: float
    """Tokens per second of one thread that does nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The measured rate of the loader, its bottleneck, and if it is enough."""

    data: str
    tokens_per_s: float
    target_tokens_per_s: float | None
    first_batch_s: float
    stages: Mapping[str, StageRate]
    slowest: str
    """The stage that batches waited for the longest."""
    advice: str
    """What to change to go faster."""
    queue_bytes: int
    """Estimated memory of the queue of batches."""
    shuffle_quality: float | None
    """Distinct source chunks of a batch as a share of a uniform order's; None without a shuffle."""
    bad: Mapping[str, int]
    """Skipped records, by reason."""

    @property
    def data_wait(self) -> float | None:
        """The share of time that a trainer at the target rate would wait."""
        if self.target_tokens_per_s is None:
            return None
        return max(0.0, 1 - self.tokens_per_s / self.target_tokens_per_s)

    @property
    def enough(self) -> bool:
        """True if the target rate is met, or if there is no target."""
        return self.data_wait is None or self.data_wait < GOOD_DATA_WAIT

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if the target rate is met, otherwise 1."""
        return 0 if self.enough else 1

    @property
    def answer(self) -> str:
        """The result in one line."""
        available = f"{self.tokens_per_s:,.0f} tokens/s available"
        if self.target_tokens_per_s is None or self.data_wait is None:
            return available
        needed = f"{available}, {self.target_tokens_per_s:,.0f} needed"
        if self.enough:
            return f"yes: {needed}"
        return f"no: {needed}: data wait {100 * self.data_wait:.0f} %, {band(self.data_wait)}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        computed = ("answer", "data_wait", "enough", "exit_code")
        return asdict(self) | {name: getattr(self, name) for name in computed}

    def as_text(self) -> str:
        """Return the answer, a table of stages, and advice."""
        lines = [
            self.answer,
            f"data         {self.data}",
            f"first batch  {self.first_batch_s:.2f} s",
            f"stage        {'busy threads':>12} {'rate':>12} {'one thread could do':>26}",
            *(_stage_line(stage, rate) for stage, rate in self.stages.items()),
            f"waits for    {self.slowest}",
            f"to go faster {self.advice}",
            f"memory       queue {size(self.queue_bytes)}",
        ]
        if self.shuffle_quality is not None:
            lines.append(f"shuffle      {100 * self.shuffle_quality:.0f} % of a uniform order")
        if self.bad:
            skipped = ", ".join(f"{n} {reason}" for reason, n in self.bad.items())
            lines.append(f"skipped      {skipped}")
        return "\n".join(lines)


def diagnose(
    dataset: Any,
    batch_size: int = 16,
    *,
    seconds: float = 5.0,
    tokens_per_second: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> Diagnosis:
    """Run a loader on the dataset for `seconds` after its first batch.

    tokens_per_second: the rate that the trainer needs. trace: a file to write a Perfetto trace
    of the run to. arguments: of `AsyncDataLoader`. Text that is shorter than the run is repeated.
    Raise `LoaderTimeout` if the first batch takes longer than 30 s.
    """
    for name, value in (("seconds", seconds), ("tokens_per_second", tokens_per_second)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r}: must be a number above 0")
    arguments = {"shard": Shard(1, 0)} | arguments
    if isinstance(dataset, TextDataset):
        arguments["epochs"] = None
    loader = AsyncDataLoader(dataset, batch_size, **arguments)
    with ExitStack() as stack:
        if trace is not None:
            from penstock.watch.trace import write_trace

            stack.enter_context(write_trace(trace, loader.telemetry))
        run = _run(loader, seconds)
    before = run.before.wait_by_stage
    waits = {stage: s - before.get(stage, 0.0) for stage, s in run.after.wait_by_stage.items()}
    slowest = max(waits, key=lambda stage: waits[stage], default="batch")
    return Diagnosis(
        data=repr(dataset),
        tokens_per_s=run.tokens_per_s,
        target_tokens_per_s=tokens_per_second,
        first_batch_s=run.first_batch_s,
        stages=_stages(run),
        slowest=slowest,
        advice=advise(slowest, loader.telemetry.known()),
        queue_bytes=run.after.memory_estimate,
        shuffle_quality=run.after.shuffle_quality,
        bad=run.after.bad,
    )


class _Run(NamedTuple):
    """Measurements of one run. `before`: after the first batch. `after`: at the end."""

    tokens_per_s: float
    first_batch_s: float
    elapsed_s: float
    before: Stats
    after: Stats


def _run(loader: AsyncDataLoader, seconds: float) -> _Run:
    """Take batches at full speed, for `seconds` after the first one."""
    begun = perf_counter()
    with loader:
        first = loader.next_batch(OPEN_S)
        if first is None:
            raise SourceError("the data has no full batch: use a smaller batch_size or seq_len")
        before, start = loader.stats(), perf_counter()
        now, tokens, longest, arrival = start, 0, 0.0, (start, 0)
        while (left := start + seconds - now) > 0:
            asked = perf_counter()
            try:
                batch = loader.next_batch(left)
            except LoaderTimeout:
                batch = None
            now = perf_counter()
            if batch is None:
                break
            tokens += batch.tokens
            # A chunk gives many batches at once. Measure between the arrivals of two chunks:
            # otherwise a short run of slow data counts one chunk too many.
            if now - asked >= longest / 2:
                longest, arrival = max(longest, now - asked), (now, tokens)
        elapsed, after = now - start, loader.stats()
    if tokens == 0:
        rate = first.tokens / (now - begun)
    elif arrival[0] - start >= elapsed / 2:
        rate = arrival[1] / (arrival[0] - start)
    else:
        rate = tokens / elapsed
    return _Run(rate, loader.telemetry.first.get("dt", start - begun), elapsed, before, after)


def _stages(run: _Run) -> dict[str, StageRate]:
    """Return the stages that were busy."""
    tokens, rates = run.after.tokens - run.before.tokens, {}
    for stage, after in run.after.stages.items():
        before = run.before.stages[stage]
        busy_s, passed = after.busy_s - before.busy_s, after.bytes - before.bytes
        if busy_s > 0:
            rates[stage] = StageRate(
                busy_threads=busy_s / run.elapsed_s,
                bytes_per_s=passed / run.elapsed_s,
                one_thread_tokens_per_s=tokens / busy_s,
            )
    return rates


def _stage_line(stage: str, rate: StageRate) -> str:
    passed = f"{size(int(rate.bytes_per_s))}/s" if rate.bytes_per_s else ""
    could = f"{rate.one_thread_tokens_per_s:,.0f} tokens/s"
    return f"  {stage:<10} {rate.busy_threads:>12.2f} {passed:>12} {could:>26}"

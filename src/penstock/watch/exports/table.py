"""The metrics: one table of names, and the readings behind them.

In:    heartbeat lines, or the numbers of one progress line.
Out:   for each metric, rank and label the value that a scrape shows.
Where: lines come on the heartbeat's or the watcher's thread, scrapes on a server's own: hence the lock.
State: the last value, or the sum so far, of every series; their number is bounded.
Cost:  some tens of microseconds a line, most of it for the stages in a beat.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.watch.stage_timer import RANKS, STAGES
from penstock.watch.view.fields import kind, number, whole

PREFIX = "penstock_"
OTHER = "other"
MAX_REASONS = 16
"""Different reasons kept of a metric and rank; the rest are `other`. Each is a series that a server keeps for good."""
DEEPEST = 3
"""How deep fields are nested at most; what lies deeper is not ours."""
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9 _-]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """With the prefix and, on counters, `_total`."""
    help: str
    unit: str
    """Seconds, bytes, tokens and so on, in the plural, or `ratio`."""
    kind: Literal["counter", "gauge"]
    of: str
    """The lines it is read from: progress, beat, stall …; empty for all."""
    key: str
    """The field, nested ones joined by `/`; a `*` in it is the label's value."""
    how: Literal["last", "add", "count"]
    """The value as it stands, the sum over all lines, or the number of lines."""
    scale: float = 1.0
    """Turns the field's unit into the metric's."""
    label: Literal["", "stage", "reason"] = ""
    named_by: str = ""
    """The field whose text is the label, where the key has no `*`."""


def _gauge(name: str, unit: str, of: str, key: str, help: str, scale: float = 1.0) -> Metric:
    return Metric(
        name=PREFIX + name, help=help, unit=unit, kind="gauge", of=of, key=key, how="last", scale=scale
    )  # fmt: skip


def _counter(
    name: str,
    unit: str,
    of: str,
    key: str,
    help: str,
    how: Literal["last", "add", "count"] = "last",
    label: Literal["", "stage", "reason"] = "",
    named_by: str = "",
) -> Metric:
    return Metric(
        name=f"{PREFIX}{name}_total", help=help, unit=unit, kind="counter", of=of, key=key, how=how, label=label,
        named_by=named_by,
    )  # fmt: skip


METRICS: tuple[Metric, ...] = (
    # the run
    _gauge("running", "0 or 1", "", "is/running", "1 from boot to shutdown, 0 after."),
    _gauge("heartbeat_timestamp_seconds", "seconds", "", "ts", "Unix time of the last line of the heartbeat."),
    _gauge("since_step_seconds", "seconds", "beat", "since_step_s", "Time since the last step ended."),
    _counter("steps", "steps", "progress", "step", "The last finished step."),
    _counter("tokens", "tokens", "progress", "tokens_total", "Tokens trained on by this rank."),
    _gauge("tokens_per_second", "tokens per second", "progress", "toks_per_s", "Tokens a second over wall time."),
    _gauge("loss", "", "progress", "loss", "Loss of the last step."),
    _gauge("grad_norm", "", "progress", "grad_norm", "Norm of the gradients of the last step."),
    _gauge("learning_rate", "", "progress", "lr", "Learning rate of the last step."),
    _counter("compiles", "compilations", "progress", "compiles", "Graphs that torch.compile has compiled."),
    _gauge("steady", "0 or 1", "", "is/steady", "1 once the steady state is reached, 0 while warming up."),
    _gauge("health_status", "0, 1, 2", "health", "is/health", "The last judgement: 0 is ok, 1 warn, 2 fail."),
    # time
    _counter("step_seconds", "seconds", "progress", "dt_step_s", "Time of all steps, pauses taken out.", "add"),
    _gauge("last_step_seconds", "seconds", "progress", "dt_step_s", "Time of the last step, pauses taken out."),
    _counter("pause_seconds", "seconds", "progress", "paused/*", "Time in named pauses: eval, checkpoint.", "add", "reason"),
    _counter("data_wait_seconds", "seconds", "progress", "dt_fetch_s", "Time in next().", "add"),
    _gauge("last_data_wait_seconds", "seconds", "progress", "dt_fetch_s", "Time in next() of the last step."),
    _gauge("data_wait_ratio", "ratio", "progress", "data_wait_pct", "Time in next() over wall time, rolling.", 0.01),
    _counter("stage_wait_seconds", "seconds", "progress", "wait_by_stage/*", "Time in next() by the stage that caused it.", "add", "stage"),
    _gauge("next_p50_seconds", "seconds", "progress", "fetch_p50_ms", "Median of the time in next(), rolling.", 1e-3),
    _gauge("next_p95_seconds", "seconds", "progress", "fetch_p95_ms", "95th percentile of the time in next(), rolling.", 1e-3),
    _gauge("next_p99_seconds", "seconds", "progress", "fetch_p99_ms", "99th percentile of the time in next(), rolling.", 1e-3),
    _counter("device_wait_seconds", "seconds", "", "device_wait_s", "Time the device itself waited for data (CUDA)."),
    # queues and memory
    _gauge("queue_batches", "batches", "", "queue_depth", "Batches that stand ready."),
    _gauge("queue_capacity_batches", "batches", "", "queue_capacity", "Batches that may stand ready."),
    _gauge("queue_occupancy_ratio", "ratio", "beat", "queues/batches/occupancy", "How full the queue of batches is on average."),
    _gauge("read_ahead_occupancy_ratio", "ratio", "beat", "queues/chunks/occupancy", "Of the chunks that are read ahead, the share that stands ready."),
    _gauge("resident_memory_bytes", "bytes", "", "rss_bytes", "Resident memory of the process."),
    _gauge("device_memory_bytes", "bytes", "", "device_bytes", "Memory of this process in use on its device (CUDA)."),
    # stages
    _counter("stage_busy_seconds", "seconds", "beat", "stages/*/busy_s", "Time a stage was busy, its threads added up.", label="stage"),
    _counter("stage_blocked_in_seconds", "seconds", "beat", "stages/*/blocked_in_s", "Time a stage waited for input.", label="stage"),
    _counter("stage_blocked_out_seconds", "seconds", "beat", "stages/*/blocked_out_s", "Time a stage waited for room for its output.", label="stage"),
    _counter("stage_items", "items", "beat", "stages/*/items", "Pieces of work a stage has done.", label="stage"),
    _counter("stage_bytes", "bytes", "beat", "stages/*/bytes", "Bytes a stage has put out.", label="stage"),
    # fetching
    _counter("fetch_connect_seconds", "seconds", "beat", "fetch/connect_s", "Fetching: time to connect."),
    _counter("fetch_first_byte_seconds", "seconds", "beat", "fetch/first_byte_s", "Fetching: time from request to first byte."),
    _counter("fetch_body_seconds", "seconds", "beat", "fetch/body_s", "Fetching: time from first byte to last."),
    _counter("fetch_retry_seconds", "seconds", "beat", "fetch/retry_s", "Fetching: time asleep between attempts."),
    _gauge("fetch_p50_seconds", "seconds", "beat", "fetch/p50_ms", "Median time of a fetch, rolling.", 1e-3),
    _gauge("fetch_p95_seconds", "seconds", "beat", "fetch/p95_ms", "95th percentile of the time of a fetch, rolling.", 1e-3),
    _gauge("fetch_p99_seconds", "seconds", "beat", "fetch/p99_ms", "99th percentile of the time of a fetch, rolling.", 1e-3),
    _counter("fetch_requests", "requests", "beat", "fetch/requests", "Requests to servers, each attempt counted."),
    _counter("fetch_retries", "requests", "beat", "fetch/retries", "Requests that were made again."),
    # events
    _gauge("first_batch_seconds", "seconds", "loader_ready", "dt", "Time to the first batch."),
    _gauge("warmup_wait_seconds", "seconds", "loader_warmup", "wait_ms", "Time the loader's warmup waited.", 1e-3),
    _counter("stalls", "stalls", "stall", "", "Waits that were reported as stalls.", "count", "stage", "stage"),
    _counter("stall_seconds", "seconds", "stall", "wait_s", "Time in reported stalls.", "add", "stage", "stage"),
    _counter("loader_errors", "errors", "loader_error", "", "Errors of the loader.", "count", "stage", "stage"),
    _counter("fallbacks", "changes", "fallback", "", "Changes to synthetic data, and back to data.", "count", "reason", "to"),
    _gauge("synthetic", "0 or 1", "", "is/synthetic", "1 while training on synthetic data."),
    _counter("heartbeat_dropped_lines", "lines", "beat", "dropped", "Lines that the heartbeat could not write."),
)  # fmt: skip
"""Every metric there is. Labels: rank on all; stage or reason where the row names it."""


class Sample(NamedTuple):
    """One value of a scrape."""

    metric: Metric
    rank: int
    label: str
    value: float


def flatten(fields: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, float]:
    """The numbers of a line, nested names joined by `/`: `wait_by_stage/fetch`."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if depth > 0:
                found |= {f"{name}/{inner}": n for inner, n in flatten(value, depth - 1).items()}
        elif (n := number(value)) is not None:
            found[str(name)] = n
    return found


class Readings:
    """What the metrics read, for all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[int, str, str], float] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a heartbeat line. One without a rank is nobody's, and left out."""
        rank, msg = whole(line.get("rank")), kind(line)
        if (
            rank is None or not msg or (msg == "loader_warmup" and line.get("of"))
        ):  # not of the data trained on
            return
        values = flatten(line) | _states(line, msg)
        with self._lock:
            if msg == "boot" and not line.get("rotated"):
                self._forget(rank)
            self._take(rank, msg, values, line)

    def add_progress(self, rank: int, step: int, values: Mapping[str, float], ts: float) -> None:
        """Take in the numbers of a progress line, as `on_metrics` gives them."""
        numbers = {name: n for name, value in values.items() if (n := number(value)) is not None}
        with self._lock:
            self._take(
                rank, "progress", numbers | {"step": float(step), "ts": ts, "is/running": 1.0}, {}
            )

    def samples(self) -> list[Sample]:
        """All there is, in the order of the table."""
        with self._lock:
            taken = dict(self._values)
        by_name: dict[str, list[tuple[int, str, float]]] = {}
        for (rank, name, label), value in sorted(taken.items()):
            by_name.setdefault(name, []).append((rank, label, value))
        return [
            Sample(m, rank, label, value)
            for m in METRICS
            for rank, label, value in by_name.get(m.name, ())
        ]

    def _forget(self, rank: int) -> None:
        """A new process begins: what the one before it said last holds no longer. Sums go on."""
        for key in [
            key for key in self._values if key[0] == rank and _BY_NAME[key[1]].how == "last"
        ]:
            del self._values[key]

    def _take(
        self, rank: int, msg: str, values: Mapping[str, float], line: Mapping[str, Any]
    ) -> None:
        for plan in (_PLANS.get(msg), _PLANS[""]):
            if plan is None:
                continue
            for metric in plan.counted:
                self._put(metric, rank, line.get(metric.named_by), 1.0)
            for name, value in values.items():
                for metric in plan.by_key.get(name, ()):
                    self._put(
                        metric, rank, line.get(metric.named_by) if metric.label else "", value
                    )
                if "/" in name:
                    for before, after, metric in plan.by_pattern:
                        if name.startswith(before) and name.endswith(after):
                            self._put(
                                metric, rank, name[len(before) : len(name) - len(after)], value
                            )

    def _put(self, metric: Metric, rank: int, label: Any, value: float) -> None:
        # A counter that is not a number for once stays so for good, a gauge until its next value.
        if metric.kind == "counter" and not (math.isfinite(value) and value >= 0):
            return
        key = (rank, metric.name, self._label(metric, rank, label))
        scaled = value * metric.scale
        self._values[key] = scaled if metric.how == "last" else self._values.get(key, 0.0) + scaled

    def _label(self, metric: Metric, rank: int, given: Any) -> str:
        if not metric.label:
            return ""
        if not isinstance(given, str):
            return OTHER
        if metric.label == "stage":
            return given if given in STAGES or given == RANKS else OTHER
        if (rank, metric.name, given) in self._values:
            return given
        known = sum(1 for r, name, _ in self._values if r == rank and name == metric.name)
        return given if known < MAX_REASONS and _REASON.fullmatch(given) else OTHER


def _states(line: Mapping[str, Any], msg: str) -> dict[str, float]:
    """What a line says that is not a number."""
    said = {"is/running": 0.0 if msg == "shutdown" else 1.0}
    if msg == "steady_state":
        said["is/steady"] = 1.0
    elif msg == "boot" and not line.get("rotated"):
        said["is/steady"] = 0.0
    elif msg == "fallback":
        said["is/synthetic"] = 1.0 if line.get("to") == "synthetic" else 0.0
    elif msg == "health":
        status = {"ok": 0.0, "warn": 1.0, "fail": 2.0}.get(str(line.get("status")))
        said |= {} if status is None else {"is/health": status}
    return said


_BY_NAME = {metric.name: metric for metric in METRICS}


class _Plan:
    """What the lines of one kind are searched for."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.counted = [metric for metric in metrics if metric.how == "count"]
        self.by_key: dict[str, list[Metric]] = {}
        self.by_pattern: list[tuple[str, str, Metric]] = []
        for metric in metrics:
            before, star, after = metric.key.partition("*")
            if star:
                self.by_pattern.append((before, after, metric))
            elif metric.how != "count":
                self.by_key.setdefault(metric.key, []).append(metric)


_PLANS = {
    of: _Plan([metric for metric in METRICS if metric.of == of])
    for of in {metric.of for metric in METRICS}
}

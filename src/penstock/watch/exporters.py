"""Export the metrics of a run to Prometheus, TensorBoard and W&B.

`MetricsServer` serves metrics from heartbeat lines. Hooks for `Heartbeat(on_metrics=[…])` receive
the numbers of each step; nested names are joined by a slash.
"""

from __future__ import annotations

import importlib.util
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

from penstock.config import whole_number
from penstock.errors import ConfigError, missing_extra
from penstock.watch.heartbeat import Hook
from penstock.watch.heartbeat_reader import kind, numbers

Values = Mapping[str, float]

FLUSH_S = 10
"""The interval at which TensorBoard's files are flushed."""


class Metric(NamedTuple):
    """A Prometheus metric, in base units. The name of a counter ends in `_total`."""

    name: str
    of: str
    """The kind of lines to read it from, such as progress or beat; empty for all."""
    key: str
    """The field; nested names are joined by `/`. A `*` matches the label's value."""
    help: str
    label: Literal["", "stage", "reason"] = ""
    add: bool = False
    """Add up the values of all lines instead of keeping the last one."""

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def scale(self) -> float:
        """The factor from the field's unit to the base unit."""
        return 1e-3 if self.key.endswith("_ms") else 0.01 if self.key.endswith("_pct") else 1.0

    def find(
        self, msg: str, line: Mapping[str, Any], values: Values
    ) -> Iterator[tuple[str, float]]:
        """Yield the label and value of each of the metric's samples in a line."""
        before, star, after = self.key.partition("*")
        for name, value in values.items() if self.of in ("", msg) else ():
            if self.kind == "counter" and not 0 <= value < math.inf:
                continue  # a NaN would stay in the sum
            if star and name.startswith(before) and name.endswith(after):
                yield name.removeprefix(before).removesuffix(after), value
            elif name == self.key:
                yield str(line.get("stage")) if self.label else "", value


METRICS = tuple(
    Metric(f"penstock_{name}", *rest)
    for name, *rest in (
        ("running", "", "is/running", "1 from boot to shutdown, 0 after."),
        ("heartbeat_timestamp_seconds", "", "ts", "Unix time of the last line."),
        ("steps_total", "progress", "step", "The last finished step."),
        ("tokens_total", "progress", "tokens_total", "Tokens trained on by this rank."),
        ("tokens_per_second", "progress", "toks_per_s", "Rolling rate over wall time."),
        ("loss", "progress", "loss", "Loss of the last step."),
        ("grad_norm", "progress", "grad_norm", "Norm of the gradients of the last step."),
        ("steady", "", "is/steady", "1 once the steady state is reached, 0 before."),
        ("health_status", "health", "is/health", "The last verdict: 0 ok, 1 warn, 2 fail."),
        ("step_seconds_total", "progress", "dt_step_s", "Time of steps, without pauses.", "", True),
        ("pause_seconds_total", "progress", "paused/*", "Time in pauses.", "reason", True),
        ("data_wait_seconds_total", "progress", "dt_fetch_s", "Time in next().", "", True),
        ("data_wait_ratio", "progress", "data_wait_pct", "Share of time in next()."),
        ("stage_wait_seconds_total", "progress", "wait_by_stage/*", "Time in next() by cause.", "stage", True),
        ("next_p95_seconds", "progress", "fetch_p95_ms", "95th percentile of next()."),
        ("device_wait_seconds_total", "", "device_wait_s", "Time that the device waited (CUDA)."),
        ("queue_batches", "", "queue_depth", "Batches that are buffered."),
        ("resident_memory_bytes", "", "rss_bytes", "Resident memory of the process."),
        ("stage_busy_seconds_total", "beat", "stages/*/busy_s", "Time busy, over all threads.", "stage"),
        ("fetch_p95_seconds", "beat", "fetch/p95_ms", "95th percentile of a fetch."),
        ("first_batch_seconds", "loader_ready", "dt", "Time to the first batch."),
        ("stalls_total", "stall", "is/line", "Waits reported as stalls.", "stage", True),
        ("loader_errors_total", "loader_error", "is/line", "Errors of the loader.", "stage", True),
        ("synthetic", "", "is/synthetic", "1 while training on synthetic data."),
        ("heartbeat_dropped_lines_total", "beat", "dropped", "Lines that could not be written."),
    )
)  # fmt: skip
"""All metrics have the label `rank`; some also have `stage` or `reason`."""


class MetricsServer(AbstractContextManager["MetricsServer"]):
    """Serves metrics to Prometheus. Pass it to `Heartbeat(on_metrics=[…])`, or call `add_line`."""

    def __init__(
        self, port: int, addr: str = "127.0.0.1", *, setting: str = "metrics_port"
    ) -> None:
        """Start serving at a port; 0 chooses a free one and sets `port`.

        setting: the name of the port in errors. Any client that can reach `addr` can read the
        metrics, which contain neither text nor file names.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise missing_extra("prometheus_client", "serving metrics", "metrics") from None
        self._lock = threading.Lock()
        self._values: dict[tuple[int, Metric, str], float] = {}
        """Values by rank, metric and label."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            port = whole_number(setting, port, 0)
            self._server, self._thread = start_http_server(port, addr, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{setting}={port}: cannot serve metrics at {addr}:{port}: {error}. Take another port, or 0."
            ) from error
        self._thread.name = "penstock-metrics"
        self.port: int = self._server.server_port
        self.url = f"http://{f'[{addr}]' if ':' in addr else addr}:{self.port}/metrics"

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Update the metrics from a heartbeat line of any rank."""
        rank, msg = line["rank"], kind(line)
        values = numbers(line) | {name: line[name] for name in ("ts", "step") if name in line}
        values |= {"is/line": 1.0, "is/running": float(msg != "shutdown")}
        if msg == "fallback":
            values["is/synthetic"] = float(line["to"] == "synthetic")
        elif msg == "health":
            values["is/health"] = float(("ok", "warn", "fail").index(line["status"]))
        elif msg == "steady_state" or (msg == "boot" and not line.get("rotated")):
            values["is/steady"] = float(msg == "steady_state")
        with self._lock:
            if msg == "boot" and not line.get("rotated"):  # a new process; sums are kept
                self._values = {k: v for k, v in self._values.items() if k[0] != rank or k[1].add}
            for metric in METRICS:
                for label, value in metric.find(msg, line, values):
                    key = (rank, metric, label)
                    so_far = self._values.get(key, 0.0) if metric.add else 0.0
                    self._values[key] = so_far + value * metric.scale

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. Called for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            samples = sorted(self._values.items())
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            labels = ["rank", metric.label] if metric.label else ["rank"]
            family = kind(metric.name.removesuffix("_total"), metric.help, labels=labels)
            for (rank, of, label), value in samples:
                if of is metric:
                    family.add_metric([str(rank), label][: len(labels)], value)
            if family.samples:
                yield family

    def close(self) -> None:
        """Stop serving and join the thread. Safe to call again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def __exit__(self, *error: object) -> None:
        self.close()


def wandb_hook(run: Any) -> Hook:
    """Return a hook that logs to `run`, the result of `wandb.init()`."""
    return lambda step, values: run.log(values, step=step)


@contextmanager
def tensorboard(log_dir: str | os.PathLike[str]) -> Iterator[Hook]:
    """Yield a hook that writes TensorBoard's event files, which are complete after the block."""
    if importlib.util.find_spec("tensorboard") is None:
        raise missing_extra("tensorboard", "writing for TensorBoard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(os.fspath(log_dir), flush_secs=FLUSH_S) as writer:

        def hook(step: int, values: Values) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield hook

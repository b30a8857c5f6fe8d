"""Serve the metrics to Prometheus.

In:    progress as the heartbeat's `on_metrics` hook gives it, or heartbeat lines.
Out:   the text formats of Prometheus and OpenMetrics, over HTTP, made anew for each scrape.
Where: the thread of prometheus_client's server, and one more for each scrape under way.
State: the readings. The registry is the server's own; nothing global is touched.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.config import current_shard, whole_number
from penstock.errors import ConfigError, MissingExtra
from penstock.watch.exports.table import METRICS, Readings

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

log = logging.getLogger("penstock")

CLIENT_TIMEOUT_S = 10.0
"""A client that connects and says nothing is let go after this, so that it does not keep a thread for good."""
JOIN_TIMEOUT_S = 5.0


class MetricsServer:
    """Serves the metrics of this process, or of the heartbeat files that somebody reads.

    It is a hook for `Heartbeat(on_metrics=[…])`; or feed it lines with `add`.
    """

    def __init__(
        self,
        port: int,
        latest: Readings | None = None,
        addr: str = "127.0.0.1",
        *,
        rank: int | None = None,
        setting: str = "metrics_port",
    ) -> None:
        """Start serving at a port; 0 takes a free one, which `port` then tells.

        `rank` labels what comes through the hook; by default it is this process's. `setting` is what errors call the
        port. Whoever can reach `addr` can read the metrics: they hold no text and no file names.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise MissingExtra("prometheus_client", "serving metrics", "metrics") from None
        if whole_number(setting, port, 0) > 65535:
            raise ConfigError(f"{setting}={port}: needs a port, 0 to 65535; 0 takes a free one")
        self.latest = Readings() if latest is None else latest
        self._rank = current_shard().rem if rank is None else whole_number("rank", rank, 0)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self.latest))
        server: Any
        try:
            server, thread = start_http_server(port, addr, registry)
        except OSError as error:
            raise ConfigError(
                f"{setting}={port}: cannot serve metrics at {addr}:{port}: {error.strerror or error}. Another run, or "
                f"another rank on this host, may have it: give each its own, or 0 for a free one"
            ) from error
        thread.name = "penstock-metrics"
        faults = _Faults()
        server.RequestHandlerClass = type(
            "Handler", (server.RequestHandlerClass,), {"timeout": CLIENT_TIMEOUT_S}
        )
        server.handle_error = faults.tell
        self.addr = addr
        self.port: int = server.server_port
        self._end = weakref.finalize(self, _stop, server, thread, os.getpid())

    @property
    def url(self) -> str:
        host = f"[{self.addr}]" if ":" in self.addr else self.addr
        return f"http://{host}:{self.port}/metrics"

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the numbers of a progress line: the hook."""
        self.latest.add_progress(self._rank, step, values, time.time())

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a heartbeat line, of any rank."""
        self.latest.add(line)

    def close(self) -> None:
        """Stop serving, and end the thread. May be called again."""
        self._end()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(port: int, latest: Readings, addr: str = "127.0.0.1") -> MetricsServer:
    """Serve what `latest` reads."""
    return MetricsServer(port, latest, addr, rank=0)


class _Collector:
    """Makes the metrics when they are asked for."""

    def __init__(self, latest: Readings) -> None:
        self._latest = latest

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        samples = self._latest.samples()
        for metric in METRICS:
            mine = [sample for sample in samples if sample.metric is metric]
            if not mine:
                continue
            labels = ["rank", metric.label] if metric.label else ["rank"]
            family: CounterMetricFamily | GaugeMetricFamily = (
                CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=labels)
                if metric.kind == "counter"
                else GaugeMetricFamily(metric.name, metric.help, labels=labels)
            )
            for sample in mine:
                family.add_metric(
                    [str(sample.rank), *([sample.label] if metric.label else [])], sample.value
                )
            yield family


class _Faults:
    """Scrapes that broke off. The library prints a traceback for each, into whatever the terminal shows."""

    def __init__(self) -> None:
        self.count = 0

    def tell(self, request: object, client: object) -> None:
        self.count += 1
        level = logging.WARNING if self.count == 1 else logging.DEBUG
        log.log(
            level,
            "a scrape of the metrics broke off (%s so far): %r",
            self.count,
            sys.exc_info()[1],
        )


def _stop(server: Any, thread: Any, pid: int) -> None:
    if os.getpid() != pid:
        server.socket.close()  # a fork: it has the socket, and not the thread that would have to be waited for
        return
    if threading.current_thread() is thread:
        return  # a garbage collection on the server's own thread; that cannot wait for itself, and is a daemon
    server.shutdown()
    server.server_close()
    thread.join(JOIN_TIMEOUT_S)

"""Metrics: their names, what a real scrape gives, and what TensorBoard's own reader finds."""

from __future__ import annotations

import math
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from penstock.errors import ConfigError
from penstock.watch.exporters import METRICS, MetricsServer, tensorboard
from penstock.watch.heartbeat import Heartbeat
from tests.recorded import Recording, lines

PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"
PATIENCE_S = 60.0


def line(msg: str, rank: int = 0, step: int = 0, **fields: Any) -> dict[str, Any]:
    known = {"ts": 1.79e9, "iso": "2026-09-21T14:13:20.000Z", "mono": 100.0, "pid": 1}
    return known | {"rank": rank, "step": step, "msg": msg} | fields


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(server.url, timeout=PATIENCE_S) as reply:
        assert reply.status == 200
        return str(reply.read().decode())


def read(server: MetricsServer) -> dict[tuple[str, str], float]:
    """The values of a scrape, by name and label."""
    samples = [sample for family in parse(scrape(server)) for sample in family.samples]
    labels = [sample.labels.get("stage") or sample.labels.get("reason", "") for sample in samples]
    names = [sample.name.removeprefix("penstock_") for sample in samples]
    values = [sample.value for sample in samples]
    return dict(zip(zip(names, labels, strict=True), values, strict=True))


def of(*told: dict[str, Any]) -> dict[tuple[str, str], float]:
    with MetricsServer(0) as server:
        for each in told:
            server.add_line(each)
        return read(server)


@pytest.fixture
def served() -> Iterator[MetricsServer]:
    """A run of two ranks that has had everything happen to it."""
    run = Recording(
        steps=90, ranks=2, stalls=(40, 50), checkpoint_every=30, slow_rank=1, fallback_at=70, slower_from=80,
        settings={"max_steps": 500},
    )  # fmt: skip
    with MetricsServer(0) as server:
        for rank in range(2):
            for each in lines(run, rank):
                server.add_line(each)
        yield server


# Names


TYPES = {"counter", "gauge", "histogram", "summary"}
OTHER_UNITS = re.compile(
    r"[mun]?s|sec|[kmgtp]?b|m|h|d|pct|"
    r"(milli|micro|nano|kilo|mega|giga|kibi|mebi|gibi)(seconds|bytes)|minutes|hours|days|bits|percent"
)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_keeps_the_rules_of_promtool(metric: Any) -> None:
    words = metric.name.split("_")
    assert re.fullmatch(r"penstock_[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_info", "_created"))
    assert not TYPES & set(words)
    assert not any(OTHER_UNITS.fullmatch(word) for word in words)
    assert metric.help.endswith(".")
    assert metric.label in ("", "stage", "reason")


def test_the_page_names_every_metric() -> None:
    page = PAGE.read_text()
    named = set(re.findall(r"`(penstock_\w+)`", page[page.index("## Metrics") :]))
    assert named == {metric.name for metric in METRICS}


# Scrapes


def test_a_scrape_is_what_prometheus_reads(served: MetricsServer) -> None:
    text = scrape(served)
    assert "parquet" not in text  # nor any other file name
    families = {family.name: family for family in parse(text)}
    known = {metric.name: metric for metric in METRICS}
    for family in families.values():
        for sample in family.samples:
            metric = known[sample.name]
            assert family.type == metric.kind
            assert family.documentation == metric.help
            assert set(sample.labels) == {"rank", metric.label} - {""}
            assert math.isfinite(sample.value)
    shown = {sample.name for family in families.values() for sample in family.samples}
    # All there is to read in a run without a device.
    assert known.keys() - shown == {"penstock_device_wait_seconds_total"}


# Readings


def test_what_each_step_adds_is_summed_and_what_is_a_total_is_taken_as_it_is() -> None:
    shown = of(
        line("progress", step=1, dt_step_s=0.5, dt_fetch_s=0.1, tokens_total=100, wait_by_stage={"fetch": 0.1}),
        line("progress", step=2, dt_step_s=0.25, dt_fetch_s=0.2, tokens_total=200, wait_by_stage={"fetch": 0.15, "pack": 0.05}),
        line("beat", stages={"fetch": {"busy_s": 3.0}}),
        line("beat", stages={"fetch": {"busy_s": 4.0}}),
    )  # fmt: skip
    assert shown["step_seconds_total", ""] == 0.75
    assert shown["data_wait_seconds_total", ""] == pytest.approx(0.3)
    assert shown["stage_wait_seconds_total", "fetch"] == 0.25
    assert shown["stage_wait_seconds_total", "pack"] == 0.05
    assert shown["tokens_total", ""] == 200
    assert shown["stage_busy_seconds_total", "fetch"] == 4.0


def test_states_follow_the_events() -> None:
    told = [
        line("boot"),
        line("steady_state", at_step=3),
        line("fallback", to="synthetic"),
        line("health", status="warn"),
    ]
    names = ("running", "steady", "synthetic", "health_status")
    shown = of(*told)
    assert [shown[name, ""] for name in names] == [1, 1, 1, 1]
    shown = of(*told, line("fallback", to="data"), line("health", status="ok"), line("shutdown"))
    assert [shown[name, ""] for name in names] == [0, 1, 0, 0]


# The server


def test_a_port_that_is_taken_is_refused_with_the_setting_that_named_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics_port={port}.*another port, or 0"):
            MetricsServer(port)
        with pytest.raises(ConfigError, match=f"--metrics-port={port}"):
            MetricsServer(port, setting="--metrics-port")


def servers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-metrics"]


def test_closing_ends_the_thread_and_frees_the_port() -> None:
    server = MetricsServer(0)
    assert len(servers()) == 1
    server.close()
    server.close()
    assert servers() == []
    socket.create_server(("127.0.0.1", server.port)).close()


# Hooks


def test_a_heartbeat_feeds_the_server_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsServer(0) as server, tensorboard(tmp_path / "ours") as ours:
        with Heartbeat(tmp_path, rank=3, on_metrics=[server, ours]) as heartbeat:
            for step in range(1, 21):
                waits = {"fetch": 0.01, "pack": 0.02}
                more = {
                    "dt_fetch_s": 0.03,
                    "dt_step_s": 0.5,
                    "data_wait_pct": 6.0,
                    "wait_by_stage": waits,
                }
                heartbeat.progress(
                    step, loss=10.0 / step, tokens=64, tokens_total=64 * step, **more
                )
        values, text = read(server), scrape(server)
    assert 'penstock_steps_total{rank="3"} 20.0' in text
    assert values["stage_wait_seconds_total", "pack"] == pytest.approx(0.4)
    assert values["data_wait_ratio", ""] == pytest.approx(0.06)

    found = EventAccumulator(str(tmp_path / "ours")).Reload()
    assert {"loss", "dt_step_s", "wait_by_stage/fetch"} <= set(found.Tags()["scalars"])
    assert [(event.step, round(event.value, 4)) for event in found.Scalars("loss")] == [
        (step, round(10.0 / step, 4)) for step in range(1, 21)
    ]

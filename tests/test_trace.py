"""Traces: what the threads did is drawn, by the rules of the Trace Event Format."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, TextDataset
from penstock.watch.trace import write_trace

STEPS = 30
Events = list[dict[str, Any]]


def make(corpus: Path, **how: Any) -> AsyncDataLoader:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32)
    return AsyncDataLoader(data, 4, **how)


def train(loader: AsyncDataLoader, steps: int = STEPS) -> None:
    for _ in range(steps):
        next(loader)
        threading.Event().wait(0.002)


def recorded(loader: AsyncDataLoader, path: Path, steps: int = STEPS, **how: Any) -> Events:
    """Return the trace of some steps. One more ends the last of them."""
    with write_trace(path, loader.telemetry, **how), loader:
        train(loader, steps + 1)
    return read(path)


def read(path: Path) -> Events:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    events: Events = json.loads(path.read_text(), parse_constant=refuse)["traceEvents"]
    return events


def spans(events: Events, *names: str) -> Events:
    found = (e for e in events if e["ph"] == "X" and (not names or e["name"] in names))
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


def rows(events: Events) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}


def check_format(events: Events) -> None:
    """Check what the format asks for; spans of a row lie within each other or apart."""
    for event in events:
        assert isinstance(event["ts"], int | float)
        assert event["tid"] in rows(events) or event["ph"] in "iC"
    open_until: dict[int, list[float]] = defaultdict(list)
    for span in spans(events):
        ends = open_until[span["tid"]]
        while ends and ends[-1] <= span["ts"] + 0.001:
            ends.pop()
        assert not ends or span["ts"] + span["dur"] <= ends[-1] + 0.002, span
        ends.append(span["ts"] + span["dur"])


@pytest.mark.parametrize(
    "how", [{"n_workers": 0}, {"n_workers": 2}, {"n_workers": 2, "workers": "process"}], ids=str
)
def test_every_stage_is_on_the_row_of_its_thread(
    corpus: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    events = recorded(make(corpus, shuffle=True, **how), tmp_path / "trace.json")
    check_format(events)
    assert {"fetch", "decode", "tokenize", "pack", "batch"} <= {e["name"] for e in spans(events)}
    on = rows(events)
    for span in spans(events, "tokenize"):
        where = "penstock-worker" if how["n_workers"] else "trainer (MainThread)"
        assert on[span["tid"]].startswith(where)
        assert str(corpus / "parquet") in span["args"]["what"]
    assert ("penstock-producer" in on.values()) == (how["n_workers"] > 0)


def test_every_call_of_next_and_every_step_is_on_the_trainers_row(
    corpus: Path, tmp_path: Path
) -> None:
    events = recorded(make(corpus), tmp_path / "trace.json")
    calls, steps = spans(events, "next"), spans(events, "step")
    assert len(calls) == len(steps) == STEPS
    for call, step in zip(calls, steps, strict=True):
        assert step["ts"] == pytest.approx(call["ts"] + call["dur"], abs=0.01)
        assert step["dur"] >= 2000
        assert step["args"] == {"tokens": 4 * 32}
    assert {rows(events)[call["tid"]] for call in calls} == {"trainer (MainThread)"}


def test_queues_pauses_and_events_are_drawn(corpus: Path, tmp_path: Path) -> None:
    loader = make(corpus, n_workers=1)
    with write_trace(tmp_path / "trace.json", loader.telemetry), loader:
        train(loader, 5)
        with loader.pause("eval"):
            threading.Event().wait(0.02)
        train(loader, 5)
        loader.telemetry.event("tune", what="prefetch_size", why=float("nan"))
    events = read(tmp_path / "trace.json")
    check_format(events)
    assert max(event["args"]["ready"] for event in events if event["ph"] == "C") > 0
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert marks.count("loader_ready") == marks.count("tune") == 1
    [pause] = spans(events, "eval")
    assert pause["dur"] >= 20_000
    assert len(loader.telemetry.take_events()) == 3, "they are still there for a heartbeat"


def test_only_the_latest_segments_are_kept(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = recorded(make(corpus, n_workers=2), tmp_path / "trace.json", max_segments=20)
    check_format(events)
    assert len(spans(events)) <= 40
    assert "only the latest 20" in caplog.text


def test_nothing_is_recorded_outside_the_block(corpus: Path, tmp_path: Path) -> None:
    with make(corpus, n_workers=1) as loader:
        train(loader, 5)
        with write_trace(tmp_path / "a.json", loader.telemetry):
            train(loader, 5)
        train(loader, 5)
        assert all(timeline.log is None for timeline in loader.telemetry.clock.timelines)
    assert len(spans(read(tmp_path / "a.json"), "next")) == 5

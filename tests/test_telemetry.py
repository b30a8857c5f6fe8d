"""Telemetry: steps, pauses, stages and events of a loader."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, ConfigError, Telemetry, TextDataset
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import CorruptFile
from penstock.watch.stage_timer import STAGES


def text(corpus: Path, **more: Any) -> TextDataset:
    return TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32, **more)


def loader_of(corpus: Path, **more: Any) -> AsyncDataLoader:
    return AsyncDataLoader(text(corpus), 4, **more)


def observed(corpus: Path, telemetry: Telemetry, **more: Any) -> AsyncDataLoader:
    loader = loader_of(corpus, **more)
    loader.observe(telemetry)
    return loader


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.parametrize(
    "how", [{"n_workers": 0}, {"n_workers": 2}, {"n_workers": 1, "workers": "process"}], ids=str
)
def test_every_stage_says_what_it_did(corpus: Path, how: dict[str, Any]) -> None:
    with loader_of(corpus, epochs=1, **how) as loader:
        tokens = sum(batch.tokens for batch in loader)
        stats = loader.stats()
    stages = stats.stages
    assert set(stages) == set(STAGES)
    for name in ("fetch", "decode", "tokenize", "pack", "batch"):
        assert stages[name].busy_s > 0, name
    assert stages["tokenize"].items == stages["decode"].items >= stats.documents > 0
    assert stages["tokenize"].bytes == stats.text_bytes
    assert stages["pack"].items * 32 == tokens
    assert stages["copy"].items == 0
    assert sum(stats.wait_by_stage.values()) == pytest.approx(stats.wait_s, rel=0.05)


def test_a_pause_is_kept_apart_from_the_run(corpus: Path) -> None:
    begun = time.perf_counter()
    with loader_of(corpus) as loader:
        next(loader)
        for _ in range(3):
            next(loader)
            with loader.pause("eval"):
                wait(0.1)
                with loader.pause("checkpoint"):  # one within another is counted once
                    wait(0.05)
        next(loader)
        next(loader)
        stats = loader.stats()
        took = time.perf_counter() - begun
        events = [fields for _, _, msg, fields in loader.telemetry.take_events() if msg == "pause"]
    assert set(stats.paused_s) == {"eval"}
    assert stats.paused_s["eval"] >= 0.45
    besides = took - stats.paused_s["eval"]
    assert loader.telemetry.timer.rolling.wall <= besides
    assert stats.wall_s <= besides
    assert [event["name"] for event in events] == ["eval"] * 3


def test_step_fields_are_those_of_a_heartbeat_and_add_up(corpus: Path) -> None:
    with loader_of(corpus) as loader:
        for _ in range(30):
            batch = next(loader)
            wait(0.002)
        fields = loader.telemetry.step_fields()
        beat = loader.telemetry.beat_fields()
    assert fields["tokens"] == fields["tokens_total"] == 30 * batch.tokens, (
        "nothing was reported before"
    )
    assert (
        fields["dt_fetch_s"]
        == fields["dt_fetch_last"]
        == pytest.approx(sum(fields["wait_by_stage"].values()), abs=1e-5)
    )
    assert fields["dt_step_s"] >= 0.002 + fields["dt_fetch_s"]
    assert 0 <= fields["fetch_p50_ms"] <= fields["fetch_p95_ms"] <= fields["fetch_p99_ms"]
    assert 0 < fields["data_wait_pct"] < 100
    assert fields["queue_capacity"] == 8
    assert json.loads(json.dumps(fields)) == fields
    assert set(beat["stages"]) == set(STAGES)
    assert beat["queues"]["batches"]["capacity"] == 8
    assert beat["verdict"]
    assert json.loads(json.dumps(beat)) == beat


def test_the_first_batch_has_a_ledger_and_is_no_part_of_the_rolling_numbers(corpus: Path) -> None:
    with loader_of(corpus) as loader:
        next(loader)
        ready = [
            fields for _, _, msg, fields in loader.telemetry.take_events() if msg == "loader_ready"
        ]
        next(loader)
        assert len(loader.telemetry.timer.window) == 0
        next(loader)
        assert len(loader.telemetry.timer.window) == 1
        assert not [1 for _, _, msg, _ in loader.telemetry.take_events() if msg == "loader_ready"]
    assert len(ready) == 1
    ledger = ready[0]["ledger"]
    order = ["import", "list", "open", "first_tokens", "first_batch"]
    assert sorted(order, key=lambda name: ledger[name]) == order
    assert {"import", "list", "open", "fetch", "decode", "tokenize", "pack"} <= set(
        ready[0]["parts"]
    )
    assert 0 < ready[0]["dt"] < 60


def test_a_stall_is_told_with_its_stage_and_its_file(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    calls = []
    original = Tokenizer.encode

    def encode(self: Tokenizer, *args: Any, **more: Any) -> Any:
        calls.append(args[0])
        if len(calls) == 3:
            gate.wait(30)
        return original(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    telemetry = Telemetry()
    telemetry.stall_s = 1.0
    asked = threading.Event()
    seen: list[Any] = []

    def watch() -> None:
        """As a heartbeat does, while the trainer is stuck."""
        asked.wait(30)
        deadline = time.monotonic() + 30
        while (
            not any(waiting and waiting["for_s"] > 1.2 for waiting in seen)
            and time.monotonic() < deadline
        ):
            seen.append(telemetry.waiting())
            wait(0.02)
        gate.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with (
        observed(corpus, telemetry, n_workers=1) as loader,
        caplog.at_level(logging.WARNING, "penstock"),
    ):
        next(loader)
        asked.set()
        while not gate.is_set() or len(telemetry.timer.window) < 20:
            next(loader)
        stalls = [fields for _, _, msg, fields in telemetry.take_events() if msg == "stall"]
    watcher.join()
    stuck = [waiting for waiting in seen if waiting][-1]
    assert stuck["stage"] == "tokenize"
    assert stuck["where"] == str(calls[2])
    assert {stall["stage"] for stall in stalls} == {"tokenize"}
    assert stalls[0]["where"] == str(calls[2])
    assert len(stalls) == 1, "once, while it lasted"
    assert any("tokenize" in record.message for record in caplog.records)
    assert telemetry.waiting() is None


def test_a_failure_is_an_event_with_stage_and_place(corpus: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    source = sorted((corpus / "parquet").glob("*.parquet"))[0].read_bytes()
    broken.write_bytes(source[:100] + bytes(200) + source[300:])
    data = TextDataset(broken, tokenizer="byte", seq_len=32, on_bad_record="raise")
    with AsyncDataLoader(data, 4) as loader:
        with pytest.raises(CorruptFile):
            list(zip(range(1000), loader, strict=False))
        errors = [
            fields for _, _, msg, fields in loader.telemetry.take_events() if msg == "loader_error"
        ]
    assert len(errors) == 1
    assert errors[0]["error"].startswith("CorruptFile: ")
    assert "broken.parquet" in errors[0]["where"]
    assert errors[0]["stage"]


def test_a_warmup_is_one_event_with_all_its_names(corpus: Path) -> None:
    with loader_of(corpus, n_workers=1) as loader:
        done = loader.warmup("auto", timeout=30)
        assert loader.warmup(0) == loader.warmup(3, timeout=0)
        events = [
            fields for _, _, msg, fields in loader.telemetry.take_events() if msg == "loader_warmup"
        ]
    assert len(events) == 1
    assert events[0]["requested"] == done.requested
    assert events[0]["filled"] == events[0]["fetch_warmup_batches"] == done.filled
    assert events[0]["wait_ms"] == events[0]["fetch_warmup_wait_ms"]


def test_a_change_of_band_is_logged_once(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.watch.telemetry.BAND_EVERY_S", 0.0)
    original = Tokenizer.encode

    def encode(self: Tokenizer, *args: Any, **more: Any) -> Any:
        wait(0.2)  # far longer than a busy machine takes for the batches of a chunk
        return original(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with loader_of(corpus, n_workers=1) as loader, caplog.at_level(logging.INFO, "penstock"):
        for _ in range(200):
            next(loader)
            wait(0.001)
    lines = [record for record in caplog.records if record.message.startswith("input-bound")]
    assert 1 <= len(lines) < 8
    assert "tokenize" in lines[-1].message
    assert lines[0].levelno == logging.WARNING


def test_one_telemetry_belongs_to_one_loader(corpus: Path) -> None:
    telemetry = Telemetry()
    first = observed(corpus, telemetry)
    with pytest.raises(ConfigError, match="belongs to another loader"):
        observed(corpus, telemetry)
    del first
    gc.collect()
    observed(corpus, telemetry)


def test_a_state_that_is_loaded_begins_new_numbers(corpus: Path) -> None:
    with loader_of(corpus) as loader:
        for _ in range(20):
            next(loader)
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert loader.stats().wait_by_stage == {}
        next(loader)
        assert loader.stats().batches == loader.telemetry.timer.steps == 1


def test_a_heartbeat_says_how_full_every_queue_is(corpus: Path) -> None:
    with loader_of(corpus) as loader:
        for _ in range(20):
            next(loader)
        queues = loader.telemetry.beat_fields()["queues"]
    assert set(queues) == {"batches", "chunks"}
    for queue in queues.values():
        assert 0 <= queue["occupancy"] <= 1


IMPORTING = """
import sys
from penstock import AsyncDataLoader, TextDataset
data = TextDataset(sys.argv[1], tokenizer="byte", seq_len=32)
with AsyncDataLoader(data, 4) as loader:
    assert "torch" not in sys.modules
    next(loader)
    assert "torch" in sys.modules
    stats = loader.stats()
assert stats.wait_by_stage["import"] > 0.5 * stats.wait_s, stats.wait_by_stage
"""


def test_importing_torch_is_charged_to_importing(corpus: Path) -> None:
    pytest.importorskip("torch")
    line = [sys.executable, "-c", IMPORTING, str(corpus / "parquet")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr

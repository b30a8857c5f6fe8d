"""Telemetry: steps, pauses, stages and events of a loader."""

from __future__ import annotations

import gc
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


def test_the_first_batch_has_its_milestones_and_is_no_part_of_the_rolling_numbers(
    corpus: Path,
) -> None:
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
    reached = ready[0]["reached"]
    order = ["import", "list", "open", "first_tokens", "first_batch"]
    assert sorted(order, key=lambda name: reached[name]) == order
    assert {"import", "list", "open", "fetch", "decode", "tokenize", "pack"} <= set(
        ready[0]["parts"]
    )
    assert 0 < ready[0]["dt"] < 60


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

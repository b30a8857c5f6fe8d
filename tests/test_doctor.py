"""`penstock doctor`: the answer, the stages, exit codes and time limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import ConfigError, SyntheticDataset, TextDataset
from penstock.encode.tokenizer import Tokenizer
from penstock.prepare import prepare
from penstock.tools.doctor import diagnose
from tests import commands
from tests.corpus import texts
from tests.servers import Fault, HubServer

STAGES = {"fetch", "decode", "tokenize", "pack", "batch"}


def run(*args: Any) -> commands.Done:
    return commands.run("doctor", *args, "--seconds", 0.2)


def run_json(*args: Any) -> tuple[int, dict[str, Any]]:
    """Return exit code and JSON."""
    done = run(*args, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts() * 12}), sink, row_group_size=40)
    with HubServer(latency_s=0.01, bandwidth=20e6) as server:
        server.add(
            "org/name", {f"data/{i}.parquet": sink.getvalue().to_pybytes() for i in range(3)}
        )
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk takes 50 ms longer to tokenize, without using a core."""
    real, never = Tokenizer.encode, threading.Event()

    def encode(self: Tokenizer, *args: Any, **more: Any) -> Any:
        never.wait(0.05)
        return real(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", encode)


# The answer


def test_first_line_answers_with_a_target(corpus: Path) -> None:
    done = run(corpus / "parquet", "--seq-len", 64, "--tokens-per-second", 1)
    assert done.exit_code == 0
    first = done.stdout.splitlines()[0]
    assert first.startswith("yes: ")
    assert first.endswith(" tokens/s available, 1 needed")
    done = run(corpus / "parquet", "--seq-len", 64, "--tokens-per-second", 1e15)
    assert done.exit_code == 1
    assert done.stdout.startswith("no: ")
    assert ", 1,000,000,000,000,000 needed: data wait 100 %, poor\n" in done.stdout


def test_first_line_is_the_rate_without_a_target(corpus: Path) -> None:
    done = run(corpus / "parquet", "--seq-len", 64)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" tokens/s available")
    for word in ("data", "first batch", "stage", "waits for", "to go faster", "memory"):
        assert any(line.startswith(f"{word} ") for line in lines), word
    assert {line.split()[0] for line in lines if line.startswith("  ")} <= STAGES


def test_json_has_the_answer_and_every_number(corpus: Path) -> None:
    tokenizer = corpus / "tokenizer.json"
    code, found = run_json(
        corpus / "parquet", "--tokenizer", tokenizer, "--seq-len", 64, "--set", "shuffle=on"
    )
    assert code == found["exit_code"] == 0
    assert found["tokens_per_s"] > 0
    assert found["data_wait"] is None
    assert "tokenize" in found["stages"]
    assert found["stages"].keys() <= STAGES
    assert all(stage["busy_threads"] > 0 for stage in found["stages"].values())
    assert found["slowest"] in STAGES
    assert found["queue_bytes"] > 0
    assert found["first_batch_s"] > 0


@pytest.mark.usefixtures("slow_tokenizer")
def test_slow_stage_is_named_and_bounds_the_rate(tmp_path: Path) -> None:
    """Batches of a chunk arrive together; a short run must not count a chunk too many."""
    pq.write_table(
        pa.table({"text": ["x" * 999] * 600}), tmp_path / "equal.parquet", row_group_size=10
    )
    data = TextDataset(tmp_path / "equal.parquet", tokenizer="byte", seq_len=64)
    found = diagnose(data, 4, n_workers=1, seconds=0.3)
    assert found.slowest == "tokenize"
    assert found.tokens_per_s < 1.1 * 10_000 / 0.05


# Every kind of data


def test_remote_text_is_diagnosed_without_the_token_cache(hub: HubServer) -> None:
    for _ in range(2):
        before = len(hub.log)
        code, found = run_json("hf://datasets/org/name/data", "--seq-len", 256)
        assert code == 0
        assert found["stages"]["fetch"]["bytes_per_s"] > 0
        assert any(".parquet" in request.path for request in list(hub.log)[before:])


def test_a_prepared_corpus_is_diagnosed(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    code, found = run_json(tmp_path, "--seq-len", "64", "--set", "shuffle=true")
    assert code == 0
    assert "PreparedDataset" in found["data"]
    assert found["shuffle_quality"] > 0


def test_settings_file_describes_the_run_and_options_override_it(
    corpus: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[loader]\nbatch_size = 4\nn_workers = 1\nmemory_limit = "64MiB"\nepochs = 1\n[data]\n'
        f'kind = "text"\nurls = "{corpus}/parquet"\ntokenizer = "byte"\nseq_len = 32\ncache = true\n'
    )
    code, found = run_json(config)
    assert code == 0
    assert found["queue_bytes"] == 9 * 4 * 32 * 16
    _, found = run_json(config, "--seq-len", 64, "--batch", 2)
    assert "seq_len=64" in found["data"]
    assert found["queue_bytes"] == 9 * 2 * 64 * 16


def test_trace_file_is_written(corpus: Path, tmp_path: Path) -> None:
    done = run(corpus / "parquet", "--seq-len", 64, "--trace", tmp_path / "trace.json")
    assert done.exit_code == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"decode", "tokenize", "pack"} <= {event["name"].split()[0] for event in events}


# Failures


def test_unreadable_data_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run(tmp_path / "missing")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "missing") in done.stderr
    code, found = run_json(tmp_path / "missing.toml")
    assert code == found["exit_code"] == 2
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not a footer PAR1")
    code, found = run_json(tmp_path / "bad.parquet")
    assert code == 2
    assert "CorruptFile" in found["error"]


def test_silent_server_ends_in_an_error_at_the_limit(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tools.doctor.OPEN_S", 0.5)
    hub.fault(Fault("silence", path="*.parquet", method="*", times=None))
    code, found = run_json("hf://datasets/org/name/data")
    assert code == 2
    assert "LoaderTimeout" in found["error"]


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": 0}, {"seconds": float("nan")}, {"tokens_per_second": -1}, {"batch_size": 0}],
    ids=str,
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        diagnose(SyntheticDataset(100, 64, 5000), **wrong)

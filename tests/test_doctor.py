"""The doctor tries a pipeline out: what it says of data of every kind, and what scripts learn from it."""

from __future__ import annotations

import json
import re
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from penstock.encode.tokenize import Tokenizer
from typer.testing import CliRunner, Result

from penstock import (
    AsyncDataLoader,
    ConfigError,
    RemoteOptions,
    SyntheticDataset,
    TextDataset,
    TokenFileDataset,
)
from penstock.cli.doctor import _row, doctor
from penstock.config import cache_dir
from penstock.doctor.examine import Diagnosis, examine
from penstock.doctor.flow import drain
from penstock.errors import LoaderTimeout, NoData, PenstockError
from tests.corpus import texts
from tests.servers import Fault, FileServer, HubServer

QUICK = {"seconds": 0.2}
DEAD = RemoteOptions(
    retry_budget=1, metadata_budget=1, backoff=0.05, connect_timeout=1, stall_timeout=1
)


def run(*args: Any) -> Result:
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def look(*args: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a quick run."""
    done = run(*args, "--seconds", "0.2", "--json")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def numbers(values: Any) -> Iterator[float]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, dict | list):
            yield from numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


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
    """Every chunk takes 50 ms longer to tokenize, without any work for a core."""
    real, never = Tokenizer.encode, threading.Event()

    def encode(self: Tokenizer, *args: Any, **more: Any) -> Any:
        never.wait(0.05)
        return real(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", encode)


# What it finds


def test_local_parquet_is_tried_stage_by_stage(corpus: Path) -> None:
    code, found = look(
        corpus / "parquet", "--tokenizer", corpus / "tokenizer.json", "--seq-len", 64, "--shuffle"
    )
    assert code == 0
    assert found["files"] == 2
    assert found["bytes"] == sum(path.stat().st_size for path in (corpus / "parquet").iterdir())
    alone = found["alone"]
    assert alone["footer_ms"] > 0
    unknown = {name for name, value in alone.items() if value is None}
    assert unknown == {
        "in_flight_bytes_per_s",
        "fetch_p50_ms",
        "fetch_p95_ms",
        "first_byte_ms",
    }  # there is no network
    assert {"fetch_bytes_per_s", "decode_bytes_per_s", "pack_tokens_per_s"} <= alone.keys()
    assert all(
        alone[name] > 0 for name in alone if name.endswith("_per_s") and alone[name] is not None
    )
    assert 1 < alone["bytes_per_token"] < 10
    assert alone["cropped_share"] == alone["padded_share"] == 0
    assert found["tokens_per_s"] > 0
    assert found["limited_by"] in ("fetch", "decode", "tokenize", "pack", "batch")
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["memory"]["queue_bytes"] > 0
    assert found["memory"]["window_bytes"] > 0
    assert all(number >= 0 for number in numbers(found))


def test_jsonl_and_compressed_jsonl_are_tried_alike(corpus: Path) -> None:
    _, plain = look(corpus / "docs.jsonl", "--seq-len", 64)
    _, packed = look(corpus / "docs.jsonl.gz", "--seq-len", 64)
    for found in (plain, packed):
        assert found["alone"]["footer_ms"] is None
        assert found["alone"]["decode_bytes_per_s"] > 0
        # A byte is a token, and a separator follows each document.
        assert 0.9 < found["alone"]["bytes_per_token"] < 1
    assert plain["alone"]["bytes_per_token"] == pytest.approx(packed["alone"]["bytes_per_token"])


def test_packing_says_what_it_crops_and_pads(corpus: Path) -> None:
    _, found = look(corpus / "parquet", "--seq-len", 256, "--packing", "best_fit")
    assert 0 < found["alone"]["padded_share"] < 1
    _, found = look(corpus / "parquet", "--seq-len", 256, "--packing", "bos")
    assert 0 < found["alone"]["cropped_share"] < 1


def test_remote_text_is_fetched_one_and_many_at_a_time(hub: HubServer) -> None:
    code, found = look("hf://datasets/org/name/data", "--seq-len", 256)
    assert code == 0
    alone = found["alone"]
    assert alone["remote"]
    assert alone["in_flight"] == RemoteOptions().fetches
    assert alone["in_flight_bytes_per_s"] > 0
    assert (
        alone["fetch_p95_ms"] >= alone["fetch_p50_ms"] >= 10
    )  # the server waits so long before it answers
    assert alone["first_byte_ms"] >= 10
    assert alone["footer_ms"] >= 10
    assert found["recommended"]["fetches"] >= alone["in_flight"]
    assert None not in alone.values()


def test_data_of_other_kinds_is_run_as_a_whole(tmp_path: Path) -> None:
    import numpy as np

    np.arange(50_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    for data in (
        SyntheticDataset(100, 64, 5000),
        TokenFileDataset.from_binary_file(tmp_path / "ids.bin", 64),
    ):
        found = examine(data, 4, **QUICK)
        assert found.alone is None
        assert found.tokens_per_s > 0
        assert found.recommended.cache is found.recommended.fetches is None
        json.dumps(found.as_dict())


def test_a_finite_stream_that_ends_meanwhile_is_enough() -> None:
    rows = [[1, 2, 3, 4]] * 10
    found = examine(rows, 5, epochs=1, **QUICK)
    assert found.tokens_per_s > 0
    assert found.exit_code == 0


def test_the_users_cache_is_left_alone(hub: HubServer) -> None:
    data = TextDataset("hf://datasets/org/name/data", tokenizer="byte", seq_len=64)
    before = {path: path.stat().st_mtime_ns for path in cache_dir().rglob("*")}
    examine(data, 4, what_if="cached", **QUICK)
    assert {path: path.stat().st_mtime_ns for path in cache_dir().rglob("*")} == before


def test_rates_are_of_the_settings_that_are_given(corpus: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[loader]\nbatch_size = 4\nn_workers = 1\nmemory_limit = "64MiB"\nepochs = 1\n'
        f'[data]\nkind = "text"\nurls = "{corpus}/parquet"\ntokenizer = "{corpus}/tokenizer.json"\nseq_len = 32\n'
    )
    code, found = look(config)
    assert code == 0
    assert found["alone"]["workers"] == 1
    assert found["memory"]["limit_bytes"] == 64 << 20
    assert found["memory"]["queue_bytes"] == 9 * 4 * 32 * 16
    code, found = look(config, "--tokenizer", "byte")
    assert code == 2
    assert "--tokenizer" in found["error"]


def test_a_file_without_a_batch_size_is_tried_with_the_default(
    corpus: Path, tmp_path: Path
) -> None:
    data = (
        f"[data]\nkind = 'text'\nurls = '{corpus / 'parquet'}'\ntokenizer = 'byte'\nseq_len = 64\n"
    )
    (tmp_path / "run.toml").write_text(data)
    code, found = look(tmp_path / "run.toml")
    assert code == 0
    assert found["tokens_per_s"] > 0
    refused = run(tmp_path / "run.toml", "--seq-len", "8")
    assert refused.exit_code == 2
    assert (
        f"--seq-len: the data is described in {tmp_path / 'run.toml'}; change it there"
        in refused.stderr
    )


def test_listing_is_told_whether_or_not_a_loader_has_told_it_before(corpus: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
    begun, ended = data.listed
    for _ in range(2):
        assert examine(data, 4, **QUICK).listing_s == ended - begun
    done = run(corpus / "parquet", "--seq-len", 64, "--seconds", "0.2")
    assert "listed, and the vocabulary loaded, in " in done.stdout


# What scripts learn


def test_exit_codes_say_whether_the_trainer_can_be_fed(corpus: Path) -> None:
    code, found = look(corpus / "parquet", "--seq-len", 64, "--tokens-per-second", 1)
    assert (code, found["data_wait"], found["band"], found["advice"]) == (0, 0, "excellent", "")
    code, found = look(corpus / "parquet", "--seq-len", 64, "--tokens-per-second", 1e15)
    assert code == found["exit_code"] == 1
    assert found["data_wait"] > 0.99
    assert found["band"] == "poor"
    assert found["advice"]


def test_projected_wait_is_what_the_rate_falls_short_by(corpus: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
    found = examine(data, 4, tokens_per_second=1e12, **QUICK)
    assert found.data_wait == pytest.approx(1 - found.tokens_per_s / 1e12)
    assert not found.enough


@pytest.mark.usefixtures("slow_tokenizer")
def test_settings_to_paste_are_settings(corpus: Path, tmp_path: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
    lines = examine(data, 4, tokens_per_second=1e12, **QUICK).recommended.lines()
    pasted = tomllib.loads("\n".join(lines))
    assert pasted["data"]["cache"] is True  # tokens that are at hand are what would help
    config = tmp_path / "run.toml"
    text = "\n".join(lines).replace("[loader]", "[loader]\nbatch_size = 4")
    config.write_text(
        f'{text}\nkind = "text"\nurls = "{corpus}/parquet"\ntokenizer = "byte"\nseq_len = 64\n'
    )
    with AsyncDataLoader.from_config(config) as loader:
        assert next(loader).inputs.shape == (4, 64)


def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run(tmp_path / "missing")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "NoData" in done.stderr
    code, found = look(tmp_path / "missing.toml")
    assert code == found["exit_code"] == 2
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is none PAR1")
    code, found = look(tmp_path / "bad.parquet")
    assert code == 2
    assert "CorruptFile" in found["error"]


def test_text_without_documents_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 5)
    with pytest.raises(NoData, match="no text"):
        examine(TextDataset(tmp_path / "empty.jsonl", tokenizer="byte", seq_len=8), 1, **QUICK)


def test_a_server_that_dies_ends_in_an_error_and_not_in_a_hang(corpus: Path) -> None:
    lines = (corpus / "docs.jsonl").read_bytes()
    with FileServer({"docs.jsonl": lines}) as server:
        data = TextDataset(server.url_of("docs.jsonl"), tokenizer="byte", seq_len=64, remote=DEAD)
        server.fault(Fault("reset", times=None))
        with pytest.raises(PenstockError, match=r"docs\.jsonl"):
            examine(data, 2, **QUICK)


def test_an_address_nobody_answers_at_is_given_up_after_the_doctors_own_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The listing too, which comes before all else and has a minute in a run."""
    monkeypatch.setattr("penstock.doctor.examine.PATIENCE_S", 0.5)
    with FileServer({}) as server:
        gone = server.url_of("docs.jsonl")
    done = run(gone, "--seconds", "0.2")
    assert done.exit_code == 2
    took = re.search(r"attempts? in ([0-9.]+) s failed", done.stderr)
    assert took, done.stderr
    assert float(took[1]) < RemoteOptions().metadata_budget / 2


@pytest.mark.parametrize("rate", [1e-3, 1e-320])
def test_a_step_that_would_end_after_the_time_is_an_error_and_not_waited_for(rate: float) -> None:
    loader = AsyncDataLoader(SyntheticDataset(100, 64, 5000), 4)
    with pytest.raises(
        LoaderTimeout,
        match=rf"256 tokens takes .* s at {rate:g} tokens a second, and [0-9.]+ s are left",
    ):
        drain(loader, 0.2, by=time.monotonic() + 60, tokens_per_s=rate)


def test_a_rate_too_low_to_be_tried_is_one_line_and_exit_code_2(corpus: Path) -> None:
    """Exit code 1 says that the trainer cannot be fed."""
    code, found = look(
        corpus / "docs.jsonl", "--tokens-per-second", "1e-320", "--what-if", "synthetic"
    )
    assert code == found["exit_code"] == 2
    assert "LoaderTimeout" in found["error"]
    assert "--seconds" in found["error"]


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(54_321.4, "54,321"), (999_999, "999,999"), (1e6, "1.00 M"), (1.2345e9, "1,234.50 M")],
)
def test_rates_are_shown_in_millions_from_a_million_on(rate: float, shown: str) -> None:
    assert _row("altogether", "", rate).split(None, 1)[1] == shown


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"tokens_per_second": -1},
        {"what_if": "magic"},
        {"batch_size": 0},
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(corpus: Path, wrong: dict[str, Any]) -> None:
    data = TextDataset(corpus / "docs.jsonl", tokenizer="byte", seq_len=64)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        examine(data, **wrong)


def test_only_text_can_be_asked_what_a_cache_would_bring() -> None:
    with pytest.raises(ConfigError, match="synthetic"):
        examine(SyntheticDataset(100, 64, 5000), 4, what_if="cached", **QUICK)


# What if


def diagnose(corpus: Path, **how: Any) -> Diagnosis:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
    return examine(data, 4, n_workers=1, seconds=0.4, **how)


def diagnose_quietly(corpus: Path, **how: Any) -> Diagnosis:
    """Looks again where something else on the machine took the time between the two looks that are compared."""
    for _ in range(3):
        found = diagnose(corpus, **how)
        if found.what_if is not None and found.what_if.apart < 10:
            break
    return found


@pytest.mark.usefixtures("slow_tokenizer")
@pytest.mark.parametrize("question", ["cached", "synthetic"])
def test_a_known_delay_disappears_as_the_attribution_says(corpus: Path, question: Any) -> None:
    found = diagnose_quietly(corpus, what_if=question)
    assert found.limited_by == "tokenize"
    gained = found.what_if
    assert gained is not None
    assert gained.attributed > 0.5
    assert gained.apart < 10
    assert gained.if_tokens_per_s > gained.tokens_per_s


@pytest.mark.usefixtures("slow_tokenizer")
def test_beside_a_timed_step_the_two_agree_as_well(corpus: Path) -> None:
    # A chunk is some thousand tokens, so a delay of 50 ms is half of what the trainer takes for it.
    tokens = sum(len(text.encode()) + 1 for text in texts() if text)
    chunks = 14
    found = diagnose_quietly(corpus, what_if="cached", tokens_per_second=2 * tokens / chunks / 0.05)
    assert found.what_if is not None
    assert found.what_if.apart < 10
    assert found.what_if.if_data_wait < found.what_if.data_wait


def test_without_a_table_there_is_the_same_in_words(corpus: Path) -> None:
    done = run(
        corpus / "parquet",
        "--seq-len",
        64,
        "--seconds",
        "0.2",
        "--tokens-per-second",
        1e15,
        "--what-if",
        "cached",
    )
    assert done.exit_code == 1
    for word in (
        "footer",
        "decode",
        "tokenize",
        "pack",
        "memory",
        "altogether",
        "wanted",
        "if cached",
        "points apart",
    ):
        assert word in done.stdout, word
    assert "n_workers = " in done.stdout


# How it measures


@pytest.mark.usefixtures("slow_tokenizer")
def test_a_rate_is_never_above_what_the_slowest_stage_allows(tmp_path: Path) -> None:
    """A chunk's batches come all at once, and yet a short look counts no chunk that it did not wait for."""
    pq.write_table(
        pa.table({"text": ["x" * 999] * 600}), tmp_path / "equal.parquet", row_group_size=10
    )
    data = TextDataset(tmp_path / "equal.parquet", tokenizer="byte", seq_len=64)
    for seconds in (0.12, 0.2):
        loader = AsyncDataLoader(data, 4, n_workers=1)
        flow = drain(loader, seconds, by=time.monotonic() + 60)
        assert flow.tokens_per_s < 1.1 * 10_000 / 0.05
        assert sum(flow.by_stage.values()) == pytest.approx(flow.wait_s, rel=0.05, abs=0.03)


@pytest.mark.usefixtures("slow_tokenizer")
def test_a_cache_with_a_part_of_the_data_is_read_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} many words " * 60}) + "\n" for i in range(4000))
    )
    data = TextDataset(
        tmp_path / "large.jsonl", tokenizer="byte", seq_len=512, chunk_bytes=64 << 10
    )
    found = examine(data, 16, n_workers=1, what_if="cached", seconds=0.4)
    assert found.what_if is not None
    assert found.what_if.attributed > 0.5
    assert found.what_if.apart < 10

"""Staging fills the cache in the order of the run; the run's stream does not change."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import (
    AsyncDataLoader,
    ConfigError,
    RemoteOptions,
    Shard,
    SyntheticDataset,
    TextDataset,
)
from penstock.cli.main import app
from penstock.config import cache_dir
from penstock.errors import SourceError
from penstock.sources.text_files import TextSource
from penstock.tools.stage import Staged, stage
from tests.contracts import digest, ledger, take
from tests.servers import Fault, HubServer

FILES, GROUPS, DOCUMENTS = 12, 5, 6
QUICK = RemoteOptions(retry_budget=2, metadata_budget=2, backoff=0.02, connect_timeout=1)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files: dict[str, bytes] = {}
    for i in range(FILES):
        texts = [f"file {i} document {j} " * (3 + (i * j) % 11) for j in range(GROUPS * DOCUMENTS)]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"text": texts}), sink, row_group_size=DOCUMENTS)
        files[f"data/{i:02}.parquet"] = sink.getvalue().to_pybytes()
    with HubServer() as server:
        server.add("org/name", files)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
        yield server


def make(**how: Any) -> AsyncDataLoader:
    data: dict[str, Any] = {n: how.pop(n) for n in ("cache", "remote") if n in how}
    text = TextDataset(
        "hf://datasets/org/name/data", tokenizer="byte", seq_len=64, **({"remote": QUICK} | data)
    )
    options: dict[str, Any] = {
        "batch_size": 2,
        "shuffle": True,
        "seed": 5,
        "epochs": 2,
        "shard": Shard(1, 0),
    }
    return AsyncDataLoader(text, **(options | how))


def fetched(hub: HubServer) -> int:
    return sum(1 for request in hub.log if request.port == "cdn" and request.status == 206)


@pytest.mark.parametrize(
    "how", [{"shuffle": True}, {"shuffle": False}, {"shuffle": True, "lanes": 3}]
)
def test_a_run_on_a_staged_part_is_the_run_without_it(hub: HubServer, how: dict[str, Any]) -> None:
    whole = ledger(make, 10**6, cache=False, **how)
    half = FILES * GROUPS // 2
    sizes: list[Staged] = []
    done = stage(make(**how), 10**9, sizes.append)
    assert done.complete
    assert done.chunks == FILES * GROUPS
    clear_cache()
    done = stage(make(**how), sizes[half - 1].bytes)
    assert (done.chunks, done.complete) == (half, False)
    with make(**how) as loader:
        assert take(loader, 10**6) == whole
        stats = loader.stats()
    assert stats.cache_hits >= half


def clear_cache() -> None:
    shutil.rmtree(cache_dir() / "tokens")


def test_what_is_staged_is_what_the_run_needs_first(hub: HubServer) -> None:
    """With the network gone, the run gets as far as the staged chunks reach, and then says so."""
    from penstock.errors import RemoteError

    whole = ledger(make, 10**6, cache=False)
    assert 3 <= stage(make(), 6_000).chunks < FILES * GROUPS
    got: list[str] = []
    with make(epochs=None) as loader:
        hub.fault(Fault("status", path="*", times=None, code=503))
        with pytest.raises(RemoteError, match="503"):
            got.extend(digest(batch) for batch in loader)
    assert len(got) > 3
    assert whole[: len(got)] == got


def test_an_interrupted_staging_goes_on_where_it_was(hub: HubServer) -> None:
    class Stop(Exception):
        pass

    def stop(done: Staged) -> None:
        if done.chunks == 20:
            raise Stop

    with pytest.raises(Stop):
        stage(make(), 10**9, stop)
    hub.clear_log()
    done = stage(make(), 10**9)
    assert done.complete
    assert done.already >= 19
    assert fetched(hub) <= FILES * GROUPS - done.already + FILES
    hub.clear_log()
    again = stage(make(), 10**9)
    assert again.already == again.chunks == FILES * GROUPS
    assert fetched(hub) == 0


def test_staging_that_cannot_keep_anything_is_an_error(hub: HubServer) -> None:
    with pytest.raises(SourceError, match=r"full.*cache_bytes"):
        stage(make(remote=replace(QUICK, cache_bytes=5_000)), 10**9)
    with pytest.raises(ConfigError, match="no cache"):
        stage(make(cache=False), 10**9)
    with pytest.raises(ConfigError, match="TextDataset"):
        stage(AsyncDataLoader(SyntheticDataset(100, 8, 64), 2), 10**9)
    with pytest.raises(ConfigError, match="bytes=0"):
        stage(make(), 0)


def test_staging_that_cannot_open_its_lanes_leaves_no_thread(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError("no room for a quarantine")

    before = set(threading.enumerate())
    monkeypatch.setattr(TextSource, "open_lanes", fails)
    with pytest.raises(OSError, match="no room for a quarantine"):
        stage(make(n_workers=2), 10**9)
    assert set(threading.enumerate()) <= before


def test_the_command_stages_shows_how_far_it_is_and_names_the_commit(
    hub: HubServer, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "stage"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)

    done = run("hf://datasets/org/name/data", "--bytes", "1GB", "--shuffle", "--seed", "5")
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"staged .* in {FILES * GROUPS} chunks \(0 were there\).*a whole epoch", done.stdout
    )
    assert re.search(r"@[0-9a-f]{40}", done.stdout)
    settings = tmp_path / "run.toml"
    settings.write_text(
        '[data]\nkind = "text"\nurls = "hf://datasets/org/name/data"\ntokenizer = "byte"\nseq_len = 64\n'
        "[loader]\nshuffle = true\n"
    )
    done = run("--settings", str(settings))
    assert f"({FILES * GROUPS} were there)" in done.stdout
    for arguments, text in (
        ((), "what to stage"),
        (("x", "--bytes", "much"), "--bytes much: must be bytes"),
        (("x", "--settings", str(settings)), "what to stage"),
    ):
        failed = run(*arguments)
        assert failed.returncode == 1
        assert text in failed.stderr
        assert "Traceback" not in failed.stderr


def test_what_came_last_and_had_no_room_counts_as_fetched(hub: HubServer) -> None:
    sizes: list[Staged] = []
    stage(make(), 10**9, sizes.append)
    clear_cache()
    done = stage(make(), sizes[0].bytes - 1)
    assert (done.bytes, done.chunks, done.complete) == (0, 0, False)
    assert done.fetched_bytes > 0
    assert done.seconds > 0
    assert done.next_bytes == sizes[0].bytes


def staged(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    """Exit code of the command, and what it says."""
    with pytest.raises(SystemExit) as ended:
        app(["stage", *arguments])
    return ended.value.code, *capfd.readouterr()


def test_a_first_chunk_larger_than_asked_for_is_an_error_that_says_how_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    code, out, err = staged(capfd, str(tmp_path / "a.jsonl"), "--bytes", "500")
    assert (code, out) == (1, "")
    found = re.fullmatch(
        r"penstock: --bytes 500: the first chunk takes .* Use --bytes (\d+) or more\.\n", err
    )
    assert found, err
    code, out, _ = staged(capfd, str(tmp_path / "a.jsonl"), "--bytes", found[1])
    assert code == 0
    assert "in 1 chunk (1 was there)" in out  # what came is kept, and not made again


def test_a_cache_that_cannot_be_written_ends_a_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)
    code, out, err = staged(capfd, str(tmp_path / "a.jsonl"))
    assert (code, out) == (1, "")
    assert "staging ended: the cache cannot be written" in err


def test_staging_without_prefetch_fills_the_cache(hub: HubServer) -> None:
    assert stage(make(n_workers=0), 10**9).complete
    again = stage(make(n_workers=2), 10**9)
    assert again.already == again.chunks == FILES * GROUPS


def test_worker_processes_stage_the_same_chunks(hub: HubServer) -> None:
    assert stage(make(n_workers=1, workers="process"), 10**9).complete
    assert stage(make(), 10**9).already == FILES * GROUPS

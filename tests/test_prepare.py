"""Preparing a corpus: the same bytes however it is made, and nothing is made twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from penstock import AsyncDataLoader, ConfigError, PreparedDataset, TextDataset
from penstock.cli.main import cli
from penstock.errors import CorruptFile, SourceError
from penstock.prepare import Prepared, prepare
from tests.contracts import digest
from tests.corpus import texts

SOURCES = {
    "parquet": {},
    "many": {},
    "docs.jsonl": {"chunk_bytes": 4096},
    "docs.jsonl.gz": {"chunk_bytes": 4096},
    "docs.txt": {"chunk_bytes": 4096, "separator": "\0\0"},
}


def files_of(folder: Path) -> dict[str, bytes]:
    """Return everything in a folder but what writers use meanwhile, or leave when they are killed."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and ".tmp-" not in path.name
    }


def rows_of(dataset: Any, **how: Any) -> list[str]:
    how = {"epochs": 1, "drop_last": False, "shuffle": False, "n_workers": 2} | how
    with AsyncDataLoader(dataset, 8, **how) as loader:
        return [digest(batch) for batch in loader]


@pytest.mark.parametrize("source", SOURCES)
def test_a_prepared_corpus_in_order_is_the_text_in_order(
    corpus: Path, tmp_path: Path, source: str
) -> None:
    about = SOURCES[source]
    done = prepare(corpus / source, tokenizer="byte", out=tmp_path, **about)
    text = TextDataset(corpus / source, tokenizer="byte", seq_len=128, **about)
    assert done.complete
    assert (done.chunks == 1) == source.endswith(".gz")  # one unit of work
    assert done.text_bytes == sum(len(each.encode()) for each in texts())
    assert rows_of(PreparedDataset(tmp_path, seq_len=128)) == rows_of(text)


@pytest.mark.parametrize("source", ["parquet", "docs.jsonl.gz"])
def test_a_second_run_makes_only_what_is_missing(corpus: Path, tmp_path: Path, source: str) -> None:
    about = SOURCES[source]
    done = prepare(corpus / source, tokenizer="byte", out=tmp_path, **about)
    before = files_of(tmp_path)
    again = prepare(corpus / source, tokenizer="byte", out=tmp_path, **about)
    assert (again.already, again.written) == (done.chunks, 0)
    assert again.tokens == done.tokens
    last = max((path for path in before if path.endswith(".arrows")), key=lambda p: p.split("-")[1])
    for path in (last, "manifest.json"):
        (tmp_path / path).unlink()
    repaired = prepare(corpus / source, tokenizer="byte", out=tmp_path, **about)
    assert repaired.written > 0
    assert repaired.tokens == done.tokens
    assert files_of(tmp_path) == before


def test_a_run_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    source, killed, whole = tmp_path / "docs.jsonl", tmp_path / "killed", tmp_path / "whole"
    source.write_text(
        "".join(json.dumps({"text": f"document {i} " * 99}) + "\n" for i in range(99))
    )
    code = (
        "import os, sys; from penstock.prepare import prepare; prepare(sys.argv[1], "
        "out=sys.argv[2], tokenizer='byte', chunk_bytes=8192, workers=1, "
        "progress=lambda now: now.chunks_done < 5 or os.kill(os.getpid(), 9))"
    )
    process = subprocess.run([sys.executable, "-c", code, str(source), str(killed)])
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(SourceError, match="interrupted, run it again"):
        PreparedDataset(killed, seq_len=128)
    done, _ = (prepare(source, out=o, tokenizer="byte", chunk_bytes=8192) for o in (killed, whole))
    assert done.complete
    assert 5 <= done.already < done.chunks
    assert files_of(killed) == files_of(whole)


def test_slices_make_the_corpus_together(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "many"
    whole, sliced = tmp_path / "whole", tmp_path / "sliced"
    prepare(source, tokenizer="byte", out=whole)
    parts = [prepare(source, tokenizer="byte", out=sliced, slice=(i, 3)) for i in (2, 0, 1)]
    assert [part.complete for part in parts] == [False, False, True]
    assert sum(part.chunks for part in parts) == 48
    assert files_of(sliced) == files_of(whole)
    with pytest.raises(ConfigError, match=r"slice=\(3, 3\)"):
        prepare(source, tokenizer="byte", out=sliced, slice=(3, 3))


def test_two_runs_at_once_and_the_number_of_workers_change_no_byte(
    corpus: Path, tmp_path: Path
) -> None:
    def run(out: str, workers: int) -> Prepared:
        how: Any = {"tokenizer": str(corpus / "tokenizer.json"), "out": tmp_path / out}
        return prepare(corpus / "parquet", workers=workers, **how)

    with ThreadPoolExecutor(2) as pool:
        assert all(done.complete for done in pool.map(run, ["both", "both"], [1, 3]))
    run("one", 1)
    assert files_of(tmp_path / "both") == files_of(tmp_path / "one")


def test_a_source_that_changed_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.jsonl").write_text('{"text": "hello"}\n' * 50)

    def run(progress: Any = None) -> Prepared:
        return prepare(source, tokenizer="byte", out=tmp_path / "out", progress=progress)

    with pytest.raises(SourceError, match=r"out was begun with other data.*: .*b\.jsonl changed"):
        run(lambda _: os.utime(source / "b.jsonl", (1, 1)))  # meanwhile
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(SourceError, match=r"b\.jsonl changed"):
        run()
    (source / "b.jsonl").unlink()
    with pytest.raises(SourceError, match=r"b\.jsonl is gone"):
        run()


def test_other_settings_do_not_mix(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the columns"):  # a mistake that made no entry
        prepare(corpus / "parquet", tokenizer="byte", out=tmp_path, filter="score >= 3")
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    with pytest.raises(SourceError, match="settings: filter was None, is"):
        prepare(corpus / "parquet", tokenizer="byte", out=tmp_path, filter="row >= 3")
    with pytest.raises(SourceError, match="settings: tokenizer was"):
        prepare(corpus / "parquet", tokenizer=str(corpus / "tokenizer.json"), out=tmp_path)
    with pytest.raises(ConfigError, match="seq_len"):
        prepare(corpus / "parquet", tokenizer="byte", out=tmp_path, seq_len=5)


def test_bad_records_are_raised_skipped_or_quarantined(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "good"}\nnot json\n{"text": "also good"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl, byte 17"):
        prepare(source, tokenizer="byte", out=tmp_path / "raised")
    done = prepare(source, tokenizer="byte", out=tmp_path / "skipped", on_bad_record="skip")
    assert done.bad == {"invalid_json": 1}
    found = tmp_path / "bad.jsonl"
    prepare(source, tokenizer="byte", out=tmp_path / "q", on_bad_record=f"quarantine:{found}")
    assert json.loads(found.read_text())["row"] == 17
    manifest = json.loads((tmp_path / "q" / "manifest.json").read_text())
    assert manifest["bad"] == {"invalid_json": 1}


def test_the_summary_counts_documents_and_their_lengths(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * n for n in range(1, 101)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    seen: list[Prepared] = []
    done = prepare(
        tmp_path / "a.parquet", tokenizer="byte", out=tmp_path / "out", progress=seen.append
    )
    assert (done.documents, done.tokens) == (100, 5150)
    assert (done.lengths["p50"], done.lengths["max"]) == (51, 101)
    assert [each.chunks_done for each in seen] == list(range(1, 11))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["tokenizer"]["name"] == "byte"
    assert manifest["files"][0]["name"] == "a.parquet"


def test_a_damaged_manifest_is_noticed(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    for name in ("manifest.json", "entries.arrow"):
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(good.replace(b"a", b"b", 1))
        with pytest.raises(CorruptFile, match=name):
            PreparedDataset(tmp_path, seq_len=128)
        (tmp_path / name).write_bytes(good)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("obstore")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/prepared", method="PUT")).close()
    keys = {"ACCESS_KEY_ID": "AKIAEXAMPLE", "SECRET_ACCESS_KEY": "open-sesame"}
    for name, value in {"ENDPOINT_URL": url, "REGION": "us-east-1", **keys}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield "s3://prepared/corpus"
    server.stop()


def test_a_corpus_in_a_bucket_is_read_as_one_on_disk(
    corpus: Path, tmp_path: Path, bucket: str
) -> None:
    source = corpus / "parquet"
    for out in (bucket, tmp_path):
        assert prepare(source, tokenizer="byte", out=out).complete
    assert prepare(source, tokenizer="byte", out=bucket).written == 0
    for shuffle in (False, True):
        prepared = [PreparedDataset(out, seq_len=128) for out in (tmp_path, bucket)]
        here, there = (rows_of(data, shuffle=shuffle) for data in prepared)
        assert here == there
    texts = [
        TextDataset(source, tokenizer="byte", seq_len=128, store=each) for each in (None, bucket)
    ]
    without, with_store = (rows_of(data, shuffle=True) for data in texts)
    assert without == with_store


# TextDataset(store=…)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_text_with_a_store_gives_the_same_stream(
    corpus: Path, tmp_path: Path, source: str, shuffle: bool
) -> None:
    about = SOURCES[source]
    prepare(corpus / source, tokenizer="byte", out=tmp_path, **about)
    entries = sorted(tmp_path.glob("??/*.arrows"))
    streams = []
    for missing in (None, [], entries[::2]):
        for entry in missing or []:
            entry.unlink()
        store = None if missing is None else tmp_path
        text = TextDataset(
            corpus / source, tokenizer="byte", seq_len=128, shuffle_chunks=4, store=store, **about
        )
        with AsyncDataLoader(text, 8, shuffle=shuffle, epochs=2, lanes=2, seed=3) as loader:
            streams.append([digest(batch) for batch in loader])
            stats = loader.stats()
        assert (stats.cache_hits > 0) == (missing is not None)
        if not source.endswith(".gz"):  # a lane finds the end of such a file by reading on
            assert (stats.cache_misses > 0) == (missing != [])
    assert streams[0] == streams[1] == streams[2]


def test_a_store_of_other_settings_is_refused(corpus: Path, tmp_path: Path) -> None:
    def first(**how: Any) -> None:
        about = {"tokenizer": "byte", "seq_len": 128, "store": tmp_path, **how}
        with AsyncDataLoader(TextDataset(corpus / "parquet", **about), 8) as loader:
            next(loader)

    with pytest.raises(ConfigError, match="not a prepared corpus"):
        first()
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    first()
    with pytest.raises(ConfigError, match="was prepared with tokenizer="):
        first(tokenizer=str(corpus / "tokenizer.json"))
    with pytest.raises(ConfigError, match="was prepared with split=None"):
        first(split="val:0.3")


# The command


def test_the_command_prepares_and_says_how_to_read_the_result(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("penstock.cli.command.LINE_EVERY_S", 0.0)
    how = ["prepare", str(corpus / "parquet"), "--out", str(out), "--filter", "id < 30"]
    first = CliRunner().invoke(cli, how)
    assert first.exit_code == 0
    assert "documents  60" in first.stdout
    assert "filtered   27" in first.stdout
    assert re.search(r"^7 of 14 chunks, .* million tokens/s, .* left$", first.stderr, re.MULTILINE)
    assert f"PreparedDataset({str(out)!r}, seq_len=1024)" in first.stdout
    second = CliRunner().invoke(cli, [*how, "--json"])
    assert json.loads(second.stdout)["already"] == 14
    assert PreparedDataset(out, seq_len=8).documents == 60
    assert CliRunner().invoke(cli, [*how, "--split", "val"]).exit_code == 1  # another corpus
    assert CliRunner().invoke(cli, how[:2]).exit_code == 2  # no --out


def test_cache_shows_verifies_and_clears_a_prepared_corpus(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)

    def cache(*how: str) -> Any:
        return CliRunner().invoke(cli, ["cache", *how, "--dir", str(tmp_path)])

    assert "14 entries" in cache("info").output
    assert cache("verify").exit_code == 0
    entries = sorted(tmp_path.glob("??/*.arrows"))
    entries[3].unlink()
    damaged = cache("verify")
    assert damaged.exit_code == 1
    assert f"{entries[3].name} is missing" in damaged.output
    assert cache("clear", "--yes").exit_code == 0
    assert not list(tmp_path.glob("??/*.arrows"))
    with pytest.raises(SourceError):
        PreparedDataset(tmp_path, seq_len=8)

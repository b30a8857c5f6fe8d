"""Text from anywhere keeps every promise that text on disk keeps, and what was fetched once stays."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, RemoteOptions, TextDataset
from penstock.errors import RemoteError, SourceError
from tests.contracts import (
    closes_cleanly,
    digest,
    ledger,
    resumes_everywhere,
    resumes_repeatedly,
    same_for_any,
    take,
)
from tests.reading import limited
from tests.servers import Fault, FileServer, HubServer

QUICK = RemoteOptions(
    connect_timeout=2,
    request_timeout=5,
    stall_timeout=1,
    retry_budget=10,
    metadata_budget=10,
    backoff=0.02,
)
FORMS = ["parquet", "docs.jsonl", "docs.jsonl.gz"]


@pytest.fixture(scope="module")
def serving(corpus: Path) -> Iterator[HubServer]:
    with HubServer() as hub:
        files = {p.relative_to(corpus).as_posix(): p for p in corpus.rglob("*") if p.is_file()}
        hub.add("org/name", files)
        hub.add_bucket("org/bucket", {**files, "parquet-old/c.parquet": b"?"}, private=True)
        yield hub


@pytest.fixture
def hub(serving: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """The server, with nothing kept of it yet."""
    monkeypatch.setenv("HF_ENDPOINT", serving.endpoint)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    serving.clear_faults()
    serving.clear_log()
    return serving


def maker(url: Any, **data: Any) -> Any:
    def make(**how: Any) -> AsyncDataLoader:
        text = limited(url, **({"tokenizer": "byte", "seq_len": 32, "remote": QUICK} | data))
        return AsyncDataLoader(
            text, **({"batch_size": 4, "shuffle": True, "seed": 3, "epochs": 2} | how)
        )

    return make


def data_requests(hub: HubServer) -> list[Any]:
    return [r for r in hub.log if "/resolve/" in r.path or r.port == "cdn"]


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_is_that_of_a_local_copy_for_any_way_to_run(
    hub: HubServer, corpus: Path, form: str
) -> None:
    local = ledger(maker(corpus / form), 10**6)
    remote = maker(f"hf://datasets/org/name/{form}")
    assert ledger(remote, 10**6) == local
    same_for_any(
        maker(f"hf://datasets/org/name/{form}", cache=False),
        60,
        [
            {"n_workers": 0},
            {"n_workers": 1},
            {"n_workers": 3, "prefetch_size": 2},
            {"n_workers": 1, "workers": "process"},
        ],
    )
    assert ledger(remote, 10**6, n_workers=0) == local, "from the cache"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache", [True, False])
def test_it_resumes_everywhere_and_again(hub: HubServer, form: str, cache: bool) -> None:
    make = maker(f"hf://datasets/org/name/{form}", cache=cache)
    resumes_everywhere(make, 40, every=9)
    resumes_repeatedly(make, 40, [7] * 6)


def test_it_closes_cleanly(hub: HubServer) -> None:
    closes_cleanly(maker("hf://datasets/org/name/parquet"))


def test_only_the_text_columns_bytes_are_fetched(hub: HubServer) -> None:
    text = [f"document {i} " * 50 for i in range(4000)]
    noise = [bytes((i * j) % 251 for j in range(500)) for i in range(4000)]
    sink = pa.BufferOutputStream()
    table = pa.table({"a": noise, "text": text, "z": noise})
    pq.write_table(table, sink, row_group_size=500, compression="none", use_dictionary=False)
    content = sink.getvalue().to_pybytes()
    hub.add("org/wide", {"a.parquet": content})
    with maker("hf://datasets/org/wide", cache=False)(epochs=1) as loader:
        take(loader, 10**6)
        fetched = loader.stats().fetched_bytes
    column = pq.read_metadata(pa.BufferReader(content)).to_dict()["row_groups"]
    wanted = sum(group["columns"][1]["total_compressed_size"] for group in column)
    assert wanted < len(content) / 2
    assert wanted <= fetched <= wanted + 80_000, "the column, and a footer's guess"


def test_a_row_group_that_lanes_share_is_fetched_once(hub: HubServer, tmp_path: Path) -> None:
    table = pa.table({"text": [f"document {i} of the only row group " * 40 for i in range(600)]})
    pq.write_table(table, tmp_path / "one.parquet", compression="none", use_dictionary=False)
    content = (tmp_path / "one.parquet").read_bytes()
    assert len(content) > 500_000
    hub.add("org/one", {"one.parquet": content})
    with maker("hf://datasets/org/one", cache=False)(epochs=1, lanes=2, n_workers=2) as loader:
        got = take(loader, 10**6)
        assert loader.stats().fetched_bytes < 1.3 * len(content)
    assert got == ledger(maker(tmp_path / "one.parquet"), 10**6, epochs=1, lanes=2)


def test_epochs_that_are_read_ahead_are_fetched_once(hub: HubServer, tmp_path: Path) -> None:
    table = pa.table({"text": [hashlib.sha256(bytes([i])).hexdigest() * 400 for i in range(200)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, use_dictionary=False)
    size = (tmp_path / "a.parquet").stat().st_size
    hub.add("org/small", {"a.parquet": tmp_path / "a.parquet"})
    with maker("org/small", seq_len=1024)(epochs=6) as loader:
        take(loader, 10**6)
        # The first chunk is read in parts and then as a whole.
        assert loader.stats().fetched_bytes < 1.3 * size


def test_the_second_epoch_and_the_next_run_need_no_network(hub: HubServer, corpus: Path) -> None:
    make = maker("hf://datasets/org/name/parquet")
    whole = ledger(make, 10**6)
    first_epoch = len(data_requests(hub))
    assert first_epoch > 0
    hub.clear_log()
    assert ledger(make, 10**6) == whole
    assert [r.path.split("/")[-2:] for r in hub.log] == [["revision", "main"]], (
        "a branch needs one request"
    )
    data = TextDataset("hf://datasets/org/name/parquet", tokenizer="byte", seq_len=8)
    sha = data.files[0].path.partition("@")[2].partition("/")[0]
    hub.clear_log()
    pinned = maker(f"hf://datasets/org/name@{sha}/parquet")
    with pinned() as loader:
        assert take(loader, 10**6) == whole
        stats = loader.stats()
    assert hub.log == []
    assert stats.cache_misses == 0 < stats.cache_hits
    assert stats.requests == stats.fetched_bytes == 0


def test_offline_works_from_what_is_there_and_says_what_is_missing(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ledger(maker("hf://datasets/org/name/docs.jsonl"), 10**6)
    take_footer = maker("hf://datasets/org/name/parquet", cache=False)
    ledger(take_footer, 10**6)  # to the end: no request may be under way afterwards
    hub.clear_log()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ledger(maker("hf://datasets/org/name/docs.jsonl"), 10**6) == whole
    with pytest.raises(
        RemoteError, match=r"parquet/[ab]\.parquet is not in this machine's cache.*penstock prepare"
    ):
        ledger(take_footer, 10)
    with pytest.raises(RemoteError, match="org/other"):
        maker("hf://datasets/org/other/parquet")()
    assert hub.log == []


def test_local_files_are_cached_where_asked_for_and_a_changed_file_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one and two"}\n' * 50)
    with maker(path)(epochs=1) as loader:
        plain = take(loader, 100)
        assert loader.stats().cache_written == 0
    make = maker(path, cache=True)
    assert ledger(make, 100, epochs=1) == plain
    with make(epochs=1) as loader:
        assert take(loader, 100) == plain
        assert loader.stats().cache_hits == 1
    path.write_text('{"text": "two and one"}\n' * 50)
    assert ledger(make, 100, epochs=1) == ledger(maker(path), 100, epochs=1) != plain


def test_files_over_http_by_a_list_of_addresses(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    files = {p.name: p for p in (corpus / "parquet").iterdir()}
    with FileServer(files) as server:
        urls = [server.url_of(name) for name in sorted(files)]
        assert ledger(maker(urls), 10**6) == ledger(maker(corpus / "parquet"), 10**6)
        with maker(urls, cache=False)() as loader:
            state = None
            for _ in range(3):
                assert loader.next_batch(timeout=10) is not None
                state = loader.state_dict()
        server.put("b.parquet", (corpus / "parquet" / "a.parquet").read_bytes())
        with maker(urls)() as loader, pytest.raises(SourceError, match=r"b\.parquet.*was.*is"):
            loader.load_state_dict(state)


def test_a_new_commit_is_refused_on_resume_unless_the_old_one_is_named(
    hub: HubServer, corpus: Path
) -> None:
    repo = hub.add("org/moving", {p.name: p for p in (corpus / "parquet").iterdir()})
    old = repo.sha
    make = maker("hf://datasets/org/moving")
    with make() as loader:
        take(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = take(loader, 10)
    repo.commit({"b.parquet": (corpus / "parquet" / "a.parquet").read_bytes()})
    with make() as loader, pytest.raises(SourceError) as refused:
        loader.load_state_dict(state)
    assert "b.parquet" in str(refused.value)
    assert "was" in str(refused.value)
    with maker(f"hf://datasets/org/moving@{old}")() as loader:
        loader.load_state_dict(state)
        assert take(loader, 10) == rest


def test_an_error_names_the_file_and_the_stage_and_comes_after_the_batches_before_it(
    hub: HubServer,
) -> None:
    make = maker(
        "hf://datasets/org/name/parquet",
        cache=False,
        remote=RemoteOptions(retry_budget=2, backoff=0.02),
    )
    whole = ledger(make, 10**6, shuffle=False)
    hub.fault(Fault("status", path="*b.parquet", times=None, code=503))
    got: list[str] = []
    with (
        make(shuffle=False) as loader,
        pytest.raises(RemoteError, match=r"b\.parquet.*503") as raised,
    ):
        got.extend(digest(batch) for batch in loader)
    assert any("in stage fetch" in note for note in raised.value.__notes__)
    assert 0 < len(got) < len(whole)
    assert whole[: len(got)] == got


def test_telemetry_counts_requests_made_again_and_the_time_between_them(hub: HubServer) -> None:
    loader = maker("hf://datasets/org/name/parquet", cache=False)(epochs=1)
    hub.fault(Fault("status", path="*.parquet", times=3, code=503))
    with loader:
        take(loader, 10**6)
        fetch = loader.telemetry.gauges()["fetch"]
        beat = loader.telemetry.beat_fields()["fetch"]
    assert fetch["requests"] > fetch["retries"] >= 3
    assert beat["retry_s"] == fetch["retry_s"] > 0
    assert loader.telemetry.known().retries == fetch["retries"], (
        "known still, when the loader is closed"
    )


def test_streaming_local_files_imports_nothing_of_the_network(corpus: Path) -> None:
    code = (
        "import sys; from penstock import *\n"
        f"data = TextDataset({str(corpus / 'parquet')!r}, tokenizer='byte', seq_len=8)\n"
        "with AsyncDataLoader(data, 2) as loader: loader.warmup(2)\n"
        "print([m for m in ('urllib3', 'huggingface_hub', 'obstore', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# Storage buckets on the Hub


@pytest.mark.parametrize("path", ["parquet", "parquet/*.parquet", "docs.jsonl"])
def test_a_storage_bucket_gives_the_stream_of_a_local_copy(
    hub: HubServer, corpus: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "page_size", 2)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    make, local = maker(f"hf://buckets/org/bucket/{path}"), ledger(maker(corpus / path), 10**6)
    assert ledger(make, 10**6) == local
    sent = {(r.port, r.headers.get("authorization")) for r in hub.log}
    assert sent == {("hub", "Bearer hf_secret"), ("cdn", None)}
    hub.clear_log()
    assert ledger(make, 10**6) == local
    assert {r.path.split("/")[1] for r in hub.log} == {"api"}, "listed again, from the cache"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ledger(make, 10**6) == local


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none/a.parquet", "There is no bucket org/none.*or it is private.*HF_TOKEN"),
        ("bucket/a.parquet", r"hf://buckets/org/bucket/a\.parquet does not exist"),
        ("bucket/*.csv", "matches no file"),
    ],
)
def test_a_bucket_or_file_that_does_not_exist_is_named(
    hub: HubServer, path: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(SourceError, match=words):
        maker(f"hf://buckets/org/{path}")()


@pytest.mark.parametrize("batches", [0, 1])
def test_a_file_of_a_bucket_that_changes_after_it_was_listed_ends_the_run(
    hub: HubServer, corpus: Path, batches: int
) -> None:
    data = (corpus / "docs.jsonl").read_bytes()
    bucket = hub.add_bucket("org/moving", {"a.jsonl": data})
    make = maker("hf://buckets/org/moving/a.jsonl", cache=False, chunk_bytes=1024)
    with make(n_workers=1, prefetch_size=1, epochs=None) as loader:
        take(loader, batches)
        bucket.commit({"a.jsonl": data.replace(b"e", b"a")})
        hub.expire_signatures()
        with pytest.raises(SourceError, match=r"moving/a\.jsonl changed: its ETag was"):
            take(loader, 10**4)

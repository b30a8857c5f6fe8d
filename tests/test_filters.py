"""Filters and transforms: which rows are read, and that streams, states and caches know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, ConfigError, PreparedDataset, TextDataset
from penstock.errors import SourceError, StateError
from penstock.prepare import prepare
from tests import contracts
from tests.contracts import digest
from tests.servers import HubServer

N = 300
TEXTS = [f"document {i} " * (1 + i % 7) for i in range(N)]
SCORES = [i % 5 for i in range(N)]
LANGUAGES = ["en" if i % 3 else "de" for i in range(N)]
WANTED = [TEXTS[i] for i in range(N) if SCORES[i] >= 3]
FILTERS = {
    "tuples": [("score", ">=", 3)],
    "alternatives": [[("score", "=", 3)], [("score", "=", 4)]],
    "lists": [["score", ">=", 3]],
    "text": "score >= 3",
    "texts": ["score >= 3", "lang in ('en', 'de')"],
    "expression": pc.field("score") > 2,
}


def write(folder: Path, kind: str) -> Path:
    table = pa.table({"id": range(N), "text": TEXTS, "score": SCORES, "lang": LANGUAGES})
    if kind == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=40)
        return folder / "a.parquet"
    lines = [json.dumps(row) for row in table.to_pylist()]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def dataset(path: Path, **how: Any) -> TextDataset:
    return TextDataset(path, **{"tokenizer": "byte", "seq_len": 64, "chunk_bytes": 4096, **how})


def documents(data: Any) -> list[str]:
    """Return the documents of one pass, in order."""
    with AsyncDataLoader(data, 8, epochs=1, drop_last=False) as loader:
        batches = [np.asarray(batch.inputs)[np.asarray(batch.targets) >= 0] for batch in loader]
        assert loader.stats().documents + loader.stats().filtered == N
    # The last id of the stream, an end of document, is only a target.
    ids = np.concatenate(batches)
    texts = bytes(np.where(ids == 256, 0, ids).astype(np.uint8)).split(b"\0")
    return [text.decode() for text in texts if text]


@pytest.mark.parametrize("given", FILTERS)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_only_rows_that_pass_the_filter_are_read(tmp_path: Path, kind: str, given: str) -> None:
    data = dataset(write(tmp_path, kind), filter=FILTERS[given])
    assert documents(data) == WANTED


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_provenance_names_the_rows_of_the_source(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    with AsyncDataLoader(dataset(path, filter="score >= 3"), 8, shuffle=True) as loader:
        spans = [span for _ in range(5) for row in next(loader).provenance() for span in row]
    for span in spans:
        if kind == "parquet":
            assert SCORES[40 * (span.row_group or 0) + span.row] >= 3
        else:
            line = path.read_bytes()[span.offset :].partition(b"\n")[0]
            assert json.loads(line)["score"] >= 3


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_missing_column_is_an_error_that_names_the_columns(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    for given in ([("points", ">", 1)], pc.field("points") > 1):
        with (
            AsyncDataLoader(dataset(path, filter=given), 8) as loader,
            pytest.raises(ConfigError, match=r"points.* has the columns .*score, lang"),
        ):
            next(loader)


def test_a_filter_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    for given in (5, "score", [("score", "~", 3)], [("score", ">=")]):
        with pytest.raises(ConfigError, match="filter="):
            dataset(path, filter=given)
    with (
        AsyncDataLoader(dataset(path, filter="score > abc"), 8) as loader,
        pytest.raises(ConfigError, match="filter"),
    ):
        next(loader)


def test_row_groups_that_cannot_match_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["".join(np.random.default_rng(i).choice(list("abcdef"), 20_000)) for i in range(N)]
    table = pa.table({"id": range(N), "text": texts})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=30)
    content = sink.getvalue().to_pybytes()
    with HubServer() as server:
        server.add("org/name", {"data/a.parquet": content})
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        data = TextDataset(
            "hf://datasets/org/name/data", tokenizer="byte", seq_len=64, cache=False,
            filter=[("id", ">=", 250), ("id", "<", 260)],
        )  # fmt: skip
        with AsyncDataLoader(data, 64, epochs=1) as loader:
            rows = {s.row for batch in loader for row in batch.provenance() for s in row}
            stats = loader.stats()
    assert rows == set(range(10, 20))
    assert (stats.documents, stats.filtered) == (10, N - 10)
    assert stats.fetched_bytes < len(content) / 5


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_transform_makes_the_texts(tmp_path: Path, kind: str) -> None:
    data = dataset(write(tmp_path, kind), filter="score >= 3", transform=("titles-1", titles))
    assert documents(data) == [
        f"{LANGUAGES[i]}: {TEXTS[i]}" for i in range(N) if SCORES[i] >= 3 and LANGUAGES[i] == "en"
    ]


def titles(table: pa.Table) -> pa.Array:
    english = pc.equal(table["lang"], "en")
    texts = pc.binary_join_element_wise(table["lang"], table["text"], ": ")
    return pc.if_else(english, texts, None)


def test_a_transform_that_returns_something_else_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    for function in (lambda table: table["score"], lambda table: ["x"]):
        with (
            AsyncDataLoader(dataset(path, transform=("bad", function)), 8) as loader,
            pytest.raises(SourceError, match="transform 'bad' must return a text for each of 40"),
        ):
            next(loader)
    with pytest.raises(ConfigError, match="name, function"):
        dataset(path, transform=(titles, "titles"))


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_filtered_stream_resumes_exactly(tmp_path: Path, workers: str) -> None:
    path = write(tmp_path, "parquet")

    def make(**how: Any) -> AsyncDataLoader:
        data = dataset(path, filter=pc.field("score") > 2, transform=("titles-1", titles))
        return AsyncDataLoader(data, 4, shuffle=True, workers=workers, **{"n_workers": 2, **how})

    every = 2 if workers == "thread" else 15
    contracts.resumes_everywhere(make, n=20, every=every, tail=3)


def test_a_state_knows_its_filter(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    state = AsyncDataLoader(dataset(path, filter="score >= 3"), 4).state_dict()
    AsyncDataLoader(dataset(path, filter=[("score", ">=", 3)]), 4).load_state_dict(state)
    for other in ({"filter": "score >= 2"}, {}, {"transform": ("titles-1", titles)}):
        with pytest.raises(StateError, match="filter"):
            AsyncDataLoader(dataset(path, **other), 4).load_state_dict(state)


def test_the_cache_keeps_filters_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    for given in ("score >= 3", "score >= 1", None, "score >= 3"):
        data = dataset(path, filter=given, cache=True)
        least = int(given[-1]) if given else 0
        assert documents(data) == [TEXTS[i] for i in range(N) if SCORES[i] >= least]


def test_a_filter_may_come_from_a_settings_file(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    (tmp_path / "run.toml").write_text(
        f'[data]\nkind = "text"\nurls = "{path}"\ntokenizer = "byte"\nseq_len = 64\n'
        'filter = [["score", ">=", 3]]\n[loader]\nbatch_size = 8\nepochs = 1\n'
    )
    with AsyncDataLoader.from_config(tmp_path / "run.toml") as loader:
        list(loader)
        assert loader.stats().filtered == N - len(WANTED)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_prepared_corpus_holds_what_passed(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    done = prepare(
        path, tokenizer="byte", out=tmp_path / "out", filter="score >= 3", chunk_bytes=4096
    )
    assert (done.documents, done.filtered) == (len(WANTED), N - len(WANTED))
    streams = []
    for data in (PreparedDataset(tmp_path / "out", seq_len=64), dataset(path, filter="score >= 3")):
        with AsyncDataLoader(data, 8, epochs=1) as loader:
            streams.append([digest(batch) for batch in loader])
    assert streams[0] == streams[1]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "score >= 3" in manifest["settings"]["filter"]

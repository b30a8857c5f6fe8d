"""The first documents of the first chunk go before the rest of it: sooner, and otherwise nobody can tell."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.sources.text_work import TextWork, _divided

from penstock import AsyncDataLoader, TextDataset
from penstock.encode.engines import ByteEngine
from penstock.encode.tokenizer import Tokenizer
from penstock.read.storage import PlainFile, Storage
from penstock.sources import files, text_work
from penstock.types import ChunkRef, Documents, TokenChunk
from tests.corpus import texts

SEQ_LEN = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose chunks have many documents, some of them empty."""
    folder = tmp_path_factory.mktemp("chunks")
    documents = [*texts(), "", "", "the end"]
    pq.write_table(
        pa.table({"text": documents}), folder / "a.parquet", row_group_size=len(documents) // 2 + 1
    )
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    (folder / "a.txt").write_bytes(b"\0\0".join(text.encode() for text in documents))
    (folder / "texts").mkdir()
    for i, text in enumerate(documents):
        (folder / "texts" / f"{i:03}.txt").write_text(text)
    return folder


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ChunkRef, int]]:
    """The chunks that were divided, and how many documents came first."""
    found: list[tuple[ChunkRef, int]] = []
    usual = TextWork.encode_rest

    def encode_rest(work: TextWork, begun: TokenChunk) -> TokenChunk:
        found.append((begun.ref, len(begun.docs)))
        return usual(work, begun)

    monkeypatch.setattr(TextWork, "encode_rest", encode_rest)
    return found


def data(folder: Path, kind: str, **how: Any) -> TextDataset:
    if kind in ("txt", "texts"):
        path, more = (
            (folder / "a.txt", {"separator": "\0\0"}) if kind == "txt" else (folder / "texts", {})
        )
        return TextDataset(path, tokenizer="byte", seq_len=SEQ_LEN, **more, **how)
    return TextDataset(folder / f"a.{kind}", tokenizer="byte", seq_len=SEQ_LEN, **how)


def stream(dataset: Any, n_workers: int = 2, **how: Any) -> list[Any]:
    """Everything that can be known of each batch of an epoch."""
    with AsyncDataLoader(
        dataset, 2, n_workers=n_workers, epochs=1, drop_last=True, **how
    ) as loader:
        found = []
        for batch in loader:
            extras = [
                None if x is None else x.tolist() for x in (batch.positions, batch.cu_seqlens)
            ]
            state = loader.state_dict()
            found.append(
                (
                    batch.inputs.tolist(),
                    batch.targets.tolist(),
                    extras,
                    batch.provenance(),
                    state["lanes"],
                )
            )
        stats = loader.stats()
        return [*found, (stats.documents, stats.text_bytes, stats.empty)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "texts"])
@pytest.mark.parametrize("packing", ["concat", "bos"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_stream_and_its_states_are_those_of_a_whole_chunk(
    divided: list[Any], folder: Path, kind: str, packing: Any, lanes: int
) -> None:
    dataset = data(folder, kind, packing=packing, positions=True)
    whole = stream(dataset, n_workers=0, lanes=lanes)
    assert not divided, "without workers nobody could go on meanwhile"
    parted = stream(dataset, lanes=lanes)
    assert parted[:-1] == whole[:-1]
    assert (
        parted[-1] == whole[-1] or lanes > 1
    )  # one lane ends first, however far the other has come
    assert 1 <= len(divided) <= lanes


@pytest.mark.parametrize("bytes_a_token", [1, 3, 40])
def test_however_much_is_divided_off_every_state_goes_on_exactly(
    monkeypatch: pytest.MonkeyPatch, divided: list[Any], folder: Path, bytes_a_token: int
) -> None:
    monkeypatch.setattr(files, "FIRST_BYTES", bytes_a_token)
    dataset = data(folder, "parquet")
    with AsyncDataLoader(dataset, 2, n_workers=2, epochs=1, drop_last=True) as loader:
        given = [(batch.inputs.tolist(), loader.state_dict()) for batch in loader]
    assert len(divided) == 1
    assert 0 < divided[0][1] < 60
    for at in range(0, len(given) - 1, 7):
        with AsyncDataLoader(dataset, 2, n_workers=2, epochs=1, drop_last=True) as again:
            again.load_state_dict(given[at][1])
            assert next(again).inputs.tolist() == given[at + 1][0]


def test_a_lane_that_has_begun_beside_others_that_have_not_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    for number in range(16):
        lines = [json.dumps({"text": f"<{number}:{i}>"}) for i in range(400)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    dataset = TextDataset(tmp_path, tokenizer="byte", seq_len=64)

    def loader() -> AsyncDataLoader:
        return AsyncDataLoader(dataset, 1, lanes=16, n_workers=2, epochs=1)

    for taken in (1, 5, 15, 16):
        with loader() as whole:
            for _ in range(taken):
                next(whole)
            state = whole.state_dict()
            expected = [next(whole).inputs.tolist() for _ in range(40)]
        with loader() as again:
            again.load_state_dict(state)
            assert [next(again).inputs.tolist() for _ in range(40)] == expected


@pytest.mark.parametrize(
    "how",
    [{"shuffle": True}, {"packing": "best_fit"}, {"workers": "process"}],
    ids=["shuffled", "best_fit", "process"],
)
def test_what_is_needed_as_a_whole_is_not_divided(
    divided: list[Any], folder: Path, how: dict[str, Any]
) -> None:
    packing = how.pop("packing", "concat")
    with AsyncDataLoader(data(folder, "parquet", packing=packing), 2, n_workers=1, **how) as loader:
        for _ in range(200):
            next(loader)
    assert not divided


def test_the_first_batch_is_there_while_the_rest_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    calls, go_on = 0, threading.Event()
    usual = ByteEngine.encode

    def encode(engine: ByteEngine, column: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            assert go_on.wait(60)
        return usual(engine, column)

    monkeypatch.setattr(ByteEngine, "encode", encode)
    with AsyncDataLoader(data(folder, "parquet"), 2, n_workers=1) as loader:
        try:
            assert loader.next_batch(timeout=60) is not None
            assert calls <= 2
        finally:
            go_on.set()
        assert loader.next_batch(timeout=60) is not None


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("lanes", [1, 3])
def test_no_worker_begins_with_what_comes_after_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lanes: int, workers: int
) -> None:
    """Else the second batch would wait for chunks that are needed long after it."""
    for number in range(3 * lanes):
        table = pa.table({"text": [f"{number} {i} " + "x" * 40 for i in range(400)]})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=200)
    told: list[tuple[str, ChunkRef]] = []
    usual = Tokenizer.encode

    def encode(tokenizer: Tokenizer, ref: ChunkRef, documents: Documents, *rest: Any) -> TokenChunk:
        told.append(("begins", ref))
        chunk = usual(tokenizer, ref, documents, *rest)
        told.append(("ends", ref))
        return chunk

    monkeypatch.setattr(Tokenizer, "encode", encode)
    dataset = TextDataset(tmp_path, tokenizer="byte", seq_len=SEQ_LEN)
    with AsyncDataLoader(dataset, 2 * lanes, n_workers=workers, lanes=lanes, epochs=1) as loader:
        assert sum(1 for _ in loader)
    first = {ref for _, ref in told[: 2 * lanes]}
    assert len(first) == lanes
    last = max(i for i, (what, ref) in enumerate(told) if what == "begins" and ref in first)
    assert sum(1 for what, ref in told if what == "begins" and ref in first) == 2 * lanes
    assert {ref for what, ref in told[:last] if what == "begins"} == first


def test_a_rest_that_cannot_be_tokenized_is_an_error_after_what_came_before(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    usual = Tokenizer.encode

    def encode(tokenizer: Tokenizer, ref: ChunkRef, documents: Documents, *rest: Any) -> TokenChunk:
        if len(documents.texts) > 20:
            raise ValueError("too many of them")
        return usual(tokenizer, ref, documents, *rest)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    dataset = data(folder, "parquet")
    with AsyncDataLoader(dataset, 2, n_workers=2) as loader:
        assert next(loader).index == 0
        with pytest.raises(ValueError, match="too many") as caught:
            list(loader)
        assert any("in stage tokenize, reading" in note for note in caught.value.__notes__)
        assert "row group 0" in str(caught.value.__notes__)


def test_records_that_are_left_out_are_counted_once(divided: list[Any], tmp_path: Path) -> None:
    documents = [b"x" * 40] * 30 + [b"\xff\xfe"] + [b"y" * 40] * 200
    pq.write_table(pa.table({"text": pa.array(documents, pa.binary())}), tmp_path / "a.parquet")
    dataset = TextDataset(tmp_path, tokenizer="byte", seq_len=SEQ_LEN, on_bad_record="skip")
    with AsyncDataLoader(dataset, 2, n_workers=2, epochs=1) as loader:
        assert sum(1 for _ in loader)
        stats = loader.stats()
    assert len(divided) == 1
    assert (stats.documents, stats.bad, stats.empty) == (231, {"invalid_utf8": 1}, 0)


def test_what_is_kept_of_a_divided_chunk_is_the_whole_of_it(
    monkeypatch: pytest.MonkeyPatch, divided: list[Any], folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with AsyncDataLoader(data(folder, "parquet", cache=True), 2, n_workers=2, epochs=1) as loader:
        assert sum(1 for _ in loader)
        stats = loader.stats()
    assert (stats.cache_hits, stats.cache_misses) == (0, 2), (
        "a chunk is one chunk, however it was made"
    )
    assert len(divided) == 1
    first = stream(data(folder, "parquet", cache=True))
    again = stream(data(folder, "parquet", cache=True))
    assert again == first == stream(data(folder, "parquet"), n_workers=0)
    with AsyncDataLoader(data(folder, "parquet", cache=True), 2, n_workers=2, epochs=1) as loader:
        assert sum(1 for _ in loader)
        stats = loader.stats()
    assert (stats.cache_hits, stats.cache_misses) == (2, 0)


@pytest.mark.parametrize(
    ("lengths", "enough", "first"),
    [
        ([10] * 100, 50, 5),
        ([10] * 100, 51, 6),
        ([10] * 100, 501, None),
        ([600, 400], 1, None),
        ([400, 600], 1, 1),
        ([0] * 5 + [10] * 20, 1, 6),
        ([10], 1, None),
        ([], 1, None),
        ([0, 0, 0], 1, None),
    ],
)
def test_documents_are_divided_where_there_is_enough(
    lengths: list[int], enough: int, first: int | None
) -> None:
    column = pa.array(["x" * n for n in [7, *lengths]], pa.large_string())[
        1:
    ]  # as a slice of something longer
    documents = Documents(column, np.arange(len(lengths)), last=True, empty=3)
    begun, rest = _divided(documents, enough)
    if first is None:
        assert begun is documents
        assert rest is None
        return
    assert rest is not None
    assert begun.texts.to_pylist() + rest.texts.to_pylist() == column.to_pylist()
    assert [*begun.rows, *rest.rows] == list(range(len(lengths)))
    assert (len(begun.texts), begun.last, rest.last, begun.empty, rest.empty) == (
        first,
        False,
        True,
        3,
        0,
    )


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "texts"])
def test_the_vocabulary_is_loaded_beside_the_first_decoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, n_workers: int
) -> None:
    events: list[str] = []
    usual = PlainFile._read

    def read(file: PlainFile, start: int, length: int) -> bytes:
        time.sleep(0.02)  # whoever does not wait for it is sooner
        events.append("read")
        return usual(file, start, length)

    monkeypatch.setattr(PlainFile, "_read", read)
    monkeypatch.setattr(ByteEngine, "prepare", lambda engine: events.append("loaded"))
    monkeypatch.setattr(text_work, "BESIDE_S", 30.0)
    with AsyncDataLoader(data(folder, kind), 2, n_workers=n_workers) as loader:
        next(loader)
        deadline = time.monotonic() + 30
        while "loaded" not in events and time.monotonic() < deadline:
            time.sleep(0.001)
    assert events.index("read") < events.index("loaded")


def test_who_is_shut_down_does_not_wait_for_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_work, "BESIDE_S", 3600.0)
    monkeypatch.setattr(
        Storage, "plain", lambda storage, file: PlainFile(file)
    )  # which tells nobody
    loader = AsyncDataLoader(data(folder, "parquet"), 2, n_workers=2)
    next(loader)
    loader.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-")]


@pytest.mark.parametrize(("n_workers", "codec"), [(1, ""), (2, "gz"), (1, "gz")])
def test_nobody_waits_for_a_file_to_be_read_where_that_is_not_told(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, n_workers: int, codec: str
) -> None:
    asked: list[bool] = []
    usual = TextWork.prepare

    def prepare(work: TextWork, beside: bool = False) -> None:
        asked.append(beside)
        usual(work, beside)

    monkeypatch.setattr(TextWork, "prepare", prepare)
    whole = (folder / "a.parquet").read_bytes()
    path = tmp_path / f"a.parquet{codec and '.'}{codec}"
    path.write_bytes(gzip.compress(whole) if codec else whole)
    with AsyncDataLoader(
        TextDataset(path, tokenizer="byte", seq_len=SEQ_LEN), 2, n_workers=n_workers
    ) as loader:
        next(loader)
        deadline = time.monotonic() + 30
        while not asked and time.monotonic() < deadline:
            time.sleep(0.001)
    assert asked == [False]

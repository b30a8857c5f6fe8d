"""Texts from Parquet, however the file was written."""

from __future__ import annotations

import gc
import gzip
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import CorruptFile, NoData, SourceError
from penstock.read import footer, parquet, reader
from penstock.read.manifest import list_files
from penstock.read.parquet import ParquetReader
from penstock.read.records import Judge
from penstock.read.storage import Storage
from penstock.types import MiB
from tests.reading import bytes_of, documents, documents_of_lanes, ids_of, open_loader, split_ids

TEXTS = [f"document {i} " + "ü🙂" * (i % 17) for i in range(100)]
WANTED = [text.encode() for text in TEXTS]


def write(path: Path, column: Any = TEXTS, name: str = "text", **how: Any) -> Path:
    """A file with the column between two others."""
    table = pa.table(
        {"id": pa.array(range(len(column))), name: column, "url": pa.array(["u"] * len(column))}
    )
    pq.write_table(table, path, **how)
    return path


@pytest.mark.parametrize("rows", [1, 2, 7, 99, 100, 1000])
def test_any_row_group_size_gives_every_document_in_order(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "a.parquet", row_group_size=rows)
    assert documents(bytes_of(path)) == WANTED


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [9, 100])
def test_any_kind_of_text_column_gives_the_same_documents(
    tmp_path: Path, kind: pa.DataType, rows: int
) -> None:
    column = (
        pa.array(TEXTS).cast(kind) if not pa.types.is_dictionary(kind) else pa.array(TEXTS, kind)
    )
    path = write(tmp_path / "a.parquet", column, row_group_size=rows)
    # Arrow writes its own types beside Parquet's, so that the column comes back as it was.
    assert pq.read_schema(path).field("text").type == kind
    assert documents(bytes_of(path)) == WANTED


@pytest.mark.parametrize(
    "how", [{"use_dictionary": False}, {"use_dictionary": True}, {"data_page_version": "2.0"}]
)
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
def test_any_encoding_and_compression_gives_the_same_documents(
    tmp_path: Path, compression: str, how: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.parquet", compression=compression, row_group_size=33, **how)
    assert documents(bytes_of(path)) == WANTED


def test_a_file_without_arrow_schema_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", store_schema=False, row_group_size=33)
    assert documents(bytes_of(path)) == WANTED


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_nulls_and_empty_texts_are_nothing(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array([None, "a", "", None, "b", None], kind)
    assert documents(bytes_of(write(tmp_path / "a.parquet", column, row_group_size=4))) == [
        b"a",
        b"b",
    ]


def test_nulls_and_empty_texts_are_counted_as_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([None, "a", "", None, "b"]), row_group_size=2)
    with open_loader(bytes_of(path)) as loader:
        assert split_ids(ids_of(loader)) == [b"a", b"b"]
        assert loader.stats().empty == 3


def test_a_row_group_of_nulls_only_is_nothing(tmp_path: Path) -> None:
    column = pa.array([None] * 5 + ["a"], pa.string())
    assert documents(bytes_of(write(tmp_path / "a.parquet", column, row_group_size=5))) == [b"a"]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_file_without_documents_is_nothing_beside_others(tmp_path: Path, rows: int) -> None:
    write(tmp_path / "empty.parquet", pa.array([None] * rows, pa.string()))
    write(tmp_path / "full.parquet")
    assert documents(bytes_of(tmp_path)) == WANTED


def test_a_file_with_zero_row_groups_is_nothing_beside_others(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "empty.parquet", pa.schema([("text", pa.string())])):
        pass
    assert pq.read_metadata(tmp_path / "empty.parquet").num_row_groups == 0
    write(tmp_path / "full.parquet")
    assert documents(bytes_of(tmp_path)) == WANTED


def test_nothing_but_empty_files_is_no_data(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.array([], pa.string()))
    with pytest.raises(NoData, match="hold no text"):
        documents(bytes_of(tmp_path))


def test_another_text_field_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", name="content")
    assert documents(bytes_of(path, text_field="content")) == WANTED


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", name="content")
    with pytest.raises(
        SourceError, match=r"a\.parquet has no column 'text'; it has id, content, url.*text_field"
    ):
        documents(bytes_of(path))


def test_a_missing_column_is_an_error_even_where_bad_records_are_skipped(tmp_path: Path) -> None:
    # A wrong name would otherwise skip every file there is.
    path = write(tmp_path / "a.parquet", name="content")
    with pytest.raises(SourceError, match="has no column 'text'"):
        documents(bytes_of(path, on_bad_record="skip"))


@pytest.mark.parametrize(
    "column", [[1, 2], [["a"], ["b"]], [{"a": "x"}, {"a": "y"}]], ids=["int", "list", "struct"]
)
def test_a_column_that_is_not_text_is_refused_with_its_type(
    tmp_path: Path, column: list[Any]
) -> None:
    path = write(tmp_path / "a.parquet", pa.array(column))
    with pytest.raises(
        SourceError,
        match=r"a\.parquet: column 'text' is (int64|list|struct).*, not text.*text_field",
    ):
        documents(bytes_of(path))


def test_a_column_after_nested_ones_is_found(tmp_path: Path) -> None:
    # Nested columns have several leaves, so leaf numbers and column numbers differ.
    meta = pa.array([{"text": "wrong", "n": i} for i in range(100)])
    pq.write_table(
        pa.table({"meta": meta, "text": TEXTS}), tmp_path / "a.parquet", row_group_size=30
    )
    assert documents(bytes_of(tmp_path / "a.parquet")) == WANTED


# Large row groups


@pytest.mark.parametrize("max_chunk_bytes", [1, 50, 1000, 1 << 30])
def test_a_row_group_too_large_to_decode_at_once_is_split(
    tmp_path: Path, max_chunk_bytes: int
) -> None:
    (file,) = list_files(write(tmp_path / "a.parquet", row_group_size=64))
    opened = ParquetReader(Storage(max_ratio=1000, keep_bytes=1), "text", max_chunk_bytes)
    refs = opened.inspect(file)
    assert (len(refs) > 2) == (max_chunk_bytes <= 1000)
    texts = [
        text
        for ref in refs
        for text in opened.read(ref, Judge("raise", 1 << 20, [])).texts.to_pylist()
    ]
    assert texts == TEXTS


def test_parts_of_a_row_group_know_the_rows_of_their_texts(tmp_path: Path) -> None:
    (file,) = list_files(write(tmp_path / "a.parquet", row_group_size=64))
    opened = ParquetReader(Storage(max_ratio=1000, keep_bytes=1), "text", 100)
    for ref in opened.inspect(file):
        chunk = opened.read(ref, Judge("raise", 1 << 20, []))
        assert [
            TEXTS[64 * ref.index + row] for row in chunk.rows.tolist()
        ] == chunk.texts.to_pylist()


def test_a_split_row_group_gives_the_same_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_CHUNK_BYTES", 200)
    assert documents(bytes_of(write(tmp_path / "a.parquet"))) == WANTED


@pytest.mark.parametrize("step", [16, 31, 99])
def test_steps_that_do_not_divide_a_row_group_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(parquet, "STEP_ROWS", step)
    monkeypatch.setattr(reader, "MAX_CHUNK_BYTES", 700)
    assert documents(bytes_of(write(tmp_path / "a.parquet", row_group_size=77))) == WANTED


# Fewer row groups than lanes


@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_one_row_group_is_shared_by_many_lanes(tmp_path: Path, lanes: int) -> None:
    dealt = documents_of_lanes(bytes_of(write(tmp_path / "a.parquet")), lanes)
    assert sorted(text for lane in dealt for text in lane) == sorted(WANTED)
    assert all(dealt)


def test_a_lane_that_would_have_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["one", "two"])
    with pytest.raises(NoData, match=r"lane \d of 8 would have no text.*fewer lanes"):
        documents_of_lanes(bytes_of(path), 8)


# Compressed as a whole


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_compressed_file_gives_the_same_documents(tmp_path: Path, ending: str) -> None:
    plain = write(tmp_path / "a.parquet", row_group_size=30).read_bytes()
    packed = tmp_path / f"b.parquet.{ending}"
    if ending == "gz":
        packed.write_bytes(gzip.compress(plain))
    else:
        with pa.CompressedOutputStream(str(packed), "zstd") as out:
            out.write(plain)
    assert documents(bytes_of(packed)) == WANTED


def test_lanes_share_a_compressed_file(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.parquet", row_group_size=30).read_bytes()
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(plain))
    dealt = documents_of_lanes(bytes_of(tmp_path / "b.parquet.gz"), 3)
    assert sorted(text for lane in dealt for text in lane) == sorted(WANTED)


def test_a_truncated_compressed_file_is_corrupt_and_named(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(plain)[:-20])
    with pytest.raises(CorruptFile, match=r"b\.parquet\.gz cannot be decompressed"):
        documents(bytes_of(tmp_path / "b.parquet.gz"))


NO_STRANGERS = """
import os, sys, threading
import pyarrow.parquet  # which starts a thread for its memory
from penstock import AsyncDataLoader, TextDataset

def strangers():
    return set(map(int, os.listdir("/proc/self/task"))) - {thread.native_id for thread in threading.enumerate()}

before = strangers()
with AsyncDataLoader(TextDataset(sys.argv[1], tokenizer="byte", seq_len=64), 4, n_workers=3, epochs=1) as loader:
    batches = sum(1 for _ in loader)
    print(batches > 10, len(strangers() - before))
"""


@pytest.mark.parametrize("name", ["parquet", "docs.jsonl", "docs.jsonl.gz", "docs.txt"])
def test_no_file_is_read_on_threads_of_arrow(corpus: Path, name: str) -> None:
    # One that still lets go of something of Python's when the interpreter ends aborts the process.
    done = subprocess.run(
        [sys.executable, "-c", NO_STRANGERS, str(corpus / name)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


ENDS_AT_ONCE = """
import os, sys
import pyarrow.parquet
from penstock.read import footer
from penstock.read.manifest import list_files

(file,) = list_files([sys.argv[1]])
for _ in range(int(sys.argv[2])):
    if (child := os.fork()) == 0:
        footer.parse_footer(file, file.path)
        break  # and on to the interpreter's end
    assert os.waitpid(child, 0)[1] == 0
"""


def test_an_interpreter_that_ends_just_after_a_footer_was_read_is_not_aborted(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.parquet", row_group_size=10)
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(path), "60"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, 1 << 80])
def test_a_file_with_an_absurd_size_takes_no_memory_and_no_addresses_for_longer_than_the_look_at_it(
    tmp_path: Path, size: int
) -> None:
    path = write(tmp_path / "a.parquet", row_group_size=10)
    metadata = pq.read_metadata(path)
    before = mapped_and_resident()
    gc.disable()  # it is let go of at once, not when somebody collects garbage
    try:
        for _ in range(5):
            footer._look_at_columns(metadata, size)
        mapped, resident = mapped_and_resident()
    finally:
        gc.enable()
    assert mapped - before[0] < 1 << 32
    assert resident - before[1] < 100 * MiB


def mapped_and_resident() -> tuple[int, int]:
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()

"""Texts from Parquet, however the file was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import SourceError
from penstock.read import ReadSettings, parquet
from penstock.read.listing import list_files
from penstock.read.reader import Reader
from tests.reading import bytes_of, documents, ids_of, open_loader, split_ids

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
        pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()),
        pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)  # fmt: skip
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


def test_nulls_and_empty_texts_are_counted_as_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([None, "a", "", None, "b"]), row_group_size=2)
    with open_loader(bytes_of(path)) as loader:
        assert split_ids(ids_of(loader)) == [b"a", b"b"]
        assert loader.stats().empty == 3


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", name="content")
    words = r"a\.parquet has no column 'text'; it has id, content, url.*text_field"
    # Also where bad records are skipped: a wrong name would skip every file there is.
    for how in ("raise", "skip"):
        with pytest.raises(SourceError, match=words):
            documents(bytes_of(path, on_bad_record=how))


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


# Large row groups


@pytest.mark.parametrize("max_chunk_bytes", [1, 50, 1000, 1 << 30])
def test_a_row_group_too_large_to_decode_at_once_is_split(
    tmp_path: Path, max_chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_CHUNK_BYTES", max_chunk_bytes)
    (file,) = list_files(write(tmp_path / "a.parquet", row_group_size=64))
    opened = Reader(ReadSettings(), 0, 1)
    refs = opened.inspect(file)[0]
    assert (len(refs) > 2) == (max_chunk_bytes <= 1000)
    assert [text for ref in refs for text in opened.read(ref).texts.to_pylist()] == TEXTS
    assert documents(bytes_of(file.path)) == WANTED


def test_other_columns_come_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_CHUNK_BYTES", 200)
    path = write(tmp_path / "a.parquet", row_group_size=64)
    seen: list[Any] = []

    def transform(table: pa.Table) -> Any:
        assert table.column_names == ["text", "id", "url"]
        seen.extend(table["id"].to_pylist())
        return table["text"]

    assert documents(bytes_of(path, transform=("t1", transform))) == WANTED
    assert seen == [*range(100)]


# Compressed as a whole


NO_STRANGERS = """
import os, sys, threading, time
import pyarrow.parquet  # which starts a thread for its memory
from penstock import AsyncDataLoader, TextDataset

def strangers():
    return set(map(int, os.listdir("/proc/self/task"))) - {thread.native_id for thread in threading.enumerate()}

before = strangers()
with AsyncDataLoader(TextDataset(sys.argv[1], tokenizer="byte", seq_len=64), 4, n_workers=3, epochs=1) as loader:
    batches = sum(1 for _ in loader)
deadline = time.monotonic() + 5  # a thread that was joined is listed for a moment longer
while strangers() - before and time.monotonic() < deadline:
    time.sleep(0.01)
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

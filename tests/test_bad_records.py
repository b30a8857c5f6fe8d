"""Records that cannot be used: raised with their place, or left out and counted, alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import ConfigError
from penstock.errors import CorruptFile, SourceError
from tests.reading import bytes_of, documents, ids_of, open_loader, split_ids

GOOD = [b"first", "zweit\u00e9s".encode(), b"third", b"last"]
MAX_DOC = 2000


class Case(NamedTuple):
    """A file in which a bad record stands between good ones."""

    name: str
    data: bytes
    reason: str
    where: str
    """What the error says of its place."""
    settings: dict[str, Any]
    row_group: int | None
    row: int


def lines(bad: bytes) -> tuple[bytes, int]:
    """JSONL with the bad line in its middle, and where that begins."""
    good = [json.dumps({"text": text.decode()}).encode() for text in GOOD]
    before = b"".join(line + b"\n" for line in good[:2])
    return before + bad + b"\n" + b"\n".join(good[2:]), len(before)


def jsonl_case(bad: bytes, reason: str) -> Case:
    data, at = lines(bad)
    return Case("a.jsonl", data, reason, f"a.jsonl, byte {at}: ", {}, None, at)


def text_case(bad: bytes, reason: str) -> Case:
    data = b"\0".join([*GOOD[:2], bad, *GOOD[2:]])
    at = sum(len(text) + 1 for text in GOOD[:2])
    return Case("a.txt", data, reason, f"a.txt, byte {at}: ", {"separator": b"\0"}, None, at)


def parquet_bytes(column: pa.Array, **how: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": pa.array(range(len(column))), "text": column}), sink, **how)
    return bytes(sink.getvalue())


def unchecked(texts: list[bytes], kind: pa.DataType) -> pa.Array:
    """A column of bytes that claims to be text; Arrow's own constructors would refuse it."""
    width = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
    offsets = np.cumsum([0, *map(len, texts)]).astype(width)
    return pa.Array.from_buffers(
        kind, len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    )


def parquet_case(bad: bytes, reason: str, kind: pa.DataType, row_group_size: int) -> Case:
    column = unchecked([*GOOD[:2], bad, *GOOD[2:]], kind)
    group, row = divmod(2, row_group_size)
    where = f"a.parquet, row group {group}, row {row}: "
    data = parquet_bytes(column, row_group_size=row_group_size)
    return Case("a.parquet", data, reason, where, {}, group, row)


BROKEN_UTF8 = b"broken \xff\xfe bytes"
TOO_LONG = b"x" * (MAX_DOC + 1)
LONG_LINE = json.dumps({"text": "x" * 3 * MAX_DOC}).encode()

CASES: dict[str, Callable[[], Case]] = {
    "broken json": lambda: jsonl_case(b'{"text": "unfinished', "invalid_json"),
    "two objects in a line": lambda: jsonl_case(b'{"text": "a"} {"text": "b"}', "invalid_json"),
    "raw control character": lambda: jsonl_case(b'{"text": "a\x01b"}', "invalid_json"),
    "json array": lambda: jsonl_case(b'["text"]', "invalid_json"),
    "deep nesting": lambda: jsonl_case(b'{"text": ' + b"[" * 900 + b"]" * 899, "invalid_json"),
    "missing field": lambda: jsonl_case(b'{"content": "x"}', "missing_field"),
    "number for text": lambda: jsonl_case(b'{"text": 17}', "not_a_string"),
    "object for text": lambda: jsonl_case(b'{"text": {"text": "x"}}', "not_a_string"),
    "invalid utf-8 in jsonl": lambda: jsonl_case(
        b'{"text": "' + BROKEN_UTF8 + b'"}', "invalid_utf8"
    ),
    "cut character in jsonl": lambda: jsonl_case(b'{"text": "\xf0\x9f\x99"}', "invalid_utf8"),
    "encoded surrogate in jsonl": lambda: jsonl_case(b'{"text": "\xed\xa0\x80"}', "invalid_utf8"),
    "lone high surrogate": lambda: jsonl_case(b'{"text": "a \\ud83d b"}', "invalid_utf8"),
    "too long in jsonl": lambda: jsonl_case(LONG_LINE, "too_long"),
    "invalid utf-8 in text": lambda: text_case(BROKEN_UTF8, "invalid_utf8"),
    "too long in text": lambda: text_case(TOO_LONG, "too_long"),
    "much too long in text": lambda: text_case(TOO_LONG * 500, "too_long"),
    "invalid utf-8 in a string column": lambda: parquet_case(
        BROKEN_UTF8, "invalid_utf8", pa.string(), 100
    ),
    "invalid utf-8 in a large_string column": lambda: parquet_case(
        BROKEN_UTF8, "invalid_utf8", pa.large_string(), 3
    ),
    "invalid utf-8 in a binary column": lambda: parquet_case(
        BROKEN_UTF8, "invalid_utf8", pa.binary(), 2
    ),
    "too long in parquet": lambda: parquet_case(TOO_LONG, "too_long", pa.string(), 100),
}
every_case = pytest.mark.parametrize("case", list(CASES))


def dataset_of(folder: Path, case: Case, **settings: Any) -> Any:
    path = folder / case.name
    path.write_bytes(case.data)
    return bytes_of(path, max_doc_bytes=MAX_DOC, chunk_bytes=1 << 20, **case.settings, **settings)


@every_case
def test_raise_names_the_file_and_the_place_and_what_to_do(tmp_path: Path, case: str) -> None:
    made = CASES[case]()
    with pytest.raises(SourceError) as caught:
        documents(dataset_of(tmp_path, made))
    assert str(caught.value).startswith(made.where)
    assert "on_bad_record='skip'" in str(caught.value)


@every_case
def test_a_bad_record_alone_is_left_out_counted_and_written_to_the_quarantine(
    tmp_path: Path, case: str
) -> None:
    made, where = CASES[case](), tmp_path / "deep" / "bad.jsonl"
    data = dataset_of(tmp_path, made, on_bad_record=f"quarantine:{where}")
    with open_loader(data) as loader:
        assert split_ids(ids_of(loader)) == GOOD
        assert loader.stats().bad == {made.reason: 1}
    record = json.loads(where.read_text())
    assert record.pop("detail")
    place = {"file": made.name, "row_group": made.row_group, "row": made.row}
    assert record == place | {"reason": made.reason}


def test_reasons_are_counted_apart_and_empty_texts_are_not_bad(tmp_path: Path) -> None:
    bad = b'{\n{\n{"a": 1}\n{"text": 1}\n{"text": ""}\n{"text": null}\n\n' + LONG_LINE
    data, _ = lines(bad)
    (tmp_path / "a.jsonl").write_bytes(data)
    with open_loader(
        bytes_of(tmp_path / "a.jsonl", on_bad_record="skip", max_doc_bytes=MAX_DOC)
    ) as loader:
        assert split_ids(ids_of(loader)) == GOOD
        stats = loader.stats()
    assert stats.bad == {"invalid_json": 2, "missing_field": 1, "not_a_string": 1, "too_long": 1}
    assert stats.empty == 2


def test_a_quarantine_that_cannot_be_written_is_an_error_before_any_batch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = dataset_of(
        tmp_path,
        CASES["json array"](),
        on_bad_record=f"quarantine:{tmp_path / 'file' / 'bad.jsonl'}",
    )
    with pytest.raises(ConfigError, match=r"cannot write .*bad\.jsonl"):
        open_loader(data).start()


# How an error arrives


@pytest.mark.parametrize("n_workers", [0, 2])
def test_an_error_arrives_through_next_as_its_own_type_with_stage_and_file(
    tmp_path: Path, n_workers: int
) -> None:
    made = CASES["broken json"]()
    loader = open_loader(dataset_of(tmp_path, made), n_workers=n_workers)
    with loader, pytest.raises(SourceError) as caught:
        next(loader)
    (note,) = caught.value.__notes__
    assert "stage fetch, decode" in note
    assert str(tmp_path / made.name) in note


# Files and row groups that cannot be read

TEXTS = [f"text number {i} " + "lorem ipsum " * (i % 9) for i in range(400)]


def flip_page(data: bytes, row_group: int) -> bytes:
    """The file with some bits of a row group's text page flipped."""
    column = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(row_group).column(1)
    damaged = bytearray(data)
    at = column.data_page_offset + column.total_compressed_size // 2
    damaged[at] ^= 0x10
    return bytes(damaged)


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    """A file of four row groups, the second of which is damaged."""
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    data = parquet_bytes(pa.array(TEXTS), row_group_size=100, **plain)
    path = tmp_path / "a.parquet"
    path.write_bytes(flip_page(data, 1))
    return path


def test_a_flipped_bit_in_a_page_is_raised_with_file_and_row_group(flipped: Path) -> None:
    with pytest.raises(CorruptFile, match=r"a\.parquet, row group 1 cannot be read"):
        documents(bytes_of(flipped))

"""Files of token ids, against the plainest way to read them."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, CorruptFile, SourceError
from penstock.read.token_files import TokenFileDataset

CODES = {"int32": 4, "int64": 5, "uint16": 8}


def some_ids(n: int, seed: int = 0, top: int = 50257) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, top, n)


def write_plain(path: Path, ids: Any, dtype: str = "uint16") -> Path:
    np.asarray(ids).astype(dtype).tofile(path)
    return path


def write_header(
    path: Path, ids: Any, magic: int = 20240520, version: int = 1, count: int | None = None
) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    dtype = "<u4" if magic == 20240801 else "<u2"
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())
    return path


def write_megatron(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> Path:
    """Documents, each a list of sequences, each a list of ids."""
    sequences = [s for document in documents for s in document]
    sizes = np.array([len(s) for s in sequences], "<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype="<i8")]) * np.dtype(dtype).itemsize
    firsts = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype("<i8")
    np.array([i for s in sequences for i in s]).astype(dtype).tofile(path)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(firsts))
    tables = [table.tobytes() for table in (sizes, pointers.astype("<i8"), firsts)]
    path.with_suffix(".idx").write_bytes(head + b"".join(tables))
    return path


def rows_of(ids: Sequence[int], seq_len: int) -> list[list[int]]:
    """The oracle: rows of seq_len + 1 that overlap by one."""
    ids = list(map(int, ids))
    return [ids[i : i + seq_len + 1] for i in range(0, len(ids) - seq_len, seq_len)]


def all_rows(data: TokenFileDataset) -> list[list[int]]:
    return data.__getitems__(np.arange(len(data))).tolist()


def open_file(path: Any, seq_len: int = 8, dtype: Any = "auto") -> TokenFileDataset:
    return TokenFileDataset.from_binary_file(path, seq_len, dtype)


# Formats


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 1000])
def test_a_plain_file_gives_rows_that_overlap_by_one_id(tmp_path: Path, length: int) -> None:
    ids = some_ids(length)
    data = TokenFileDataset(write_plain(tmp_path / "train.bin", ids), seq_len=8)
    assert all_rows(data) == rows_of(ids, 8)
    assert len(data) == (length - 1) // 8


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64", np.uint32])
def test_ids_of_each_type_are_read_plain_and_from_numpy(tmp_path: Path, dtype: Any) -> None:
    ids = some_ids(100)
    plain = open_file(write_plain(tmp_path / "a.bin", ids, dtype), dtype=dtype)
    np.save(tmp_path / "b.npy", ids.astype(dtype))
    for data in (plain, open_file(tmp_path / "b.npy")):
        assert all_rows(data) == rows_of(ids, 8)
        assert data[0].dtype == data.dtype == (np.uint16 if dtype == "uint16" else np.uint32)


@pytest.mark.parametrize(("magic", "version", "top"), [(20240520, 1, 50257), (20240801, 7, 128256)])
def test_the_headers_of_llm_c_and_modded_nanogpt_are_recognised(
    tmp_path: Path, magic: int, version: int, top: int
) -> None:
    ids = some_ids(100, top=top)
    path = write_header(tmp_path / "a.bin", ids, magic, version)
    assert all_rows(open_file(path)) == rows_of(ids, 8)


@pytest.mark.parametrize(
    ("dtype", "named"), [("uint16", "d.bin"), ("int32", "d"), ("int64", "d.idx")]
)
def test_megatron_is_recognised_by_the_index_beside_it(
    tmp_path: Path, dtype: str, named: str
) -> None:
    ids = some_ids(100).tolist()
    write_megatron(tmp_path / "d.bin", [[ids[:30]], [ids[30:]]], dtype)
    data = open_file(tmp_path / named)
    assert all_rows(data) == rows_of(ids, 8)
    assert data.files[0].format == "megatron"


# Several files


def many_files(folder: Path) -> tuple[TokenFileDataset, list[list[int]]]:
    """Files of all formats, one of them too short for a row."""
    parts = [some_ids(n, n) for n in (100, 5, 9, 64, 200)]
    write_plain(folder / "a.bin", parts[0])
    write_plain(folder / "b.bin", parts[1])
    write_header(folder / "c.bin", parts[2])
    np.save(folder / "d.npy", parts[3].astype("int32"))
    write_megatron(folder / "e.bin", [[parts[4].tolist()[:50]], [parts[4].tolist()[50:]]], "int32")
    (folder / "meta.pkl").write_bytes(b"other")
    return open_file(folder), [row for part in parts for row in rows_of(part, 8)]


def test_several_files_are_one_dataset_and_no_row_crosses_them(tmp_path: Path) -> None:
    data, rows = many_files(tmp_path)
    assert [file.name for file in data.files] == ["a.bin", "b.bin", "c.bin", "d.npy", "e.bin"]
    assert all_rows(data) == rows
    assert data.dtype == np.uint32


def test_globs_and_lists_name_files_and_each_is_read_once(tmp_path: Path) -> None:
    for name in ("v.bin", "t1.bin", "t0.bin"):
        write_plain(tmp_path / name, some_ids(20))
    assert [f.name for f in open_file(tmp_path / "t*.bin").files] == ["t0.bin", "t1.bin"]
    assert [f.name for f in open_file(f"{tmp_path}/*").files] == ["t0.bin", "t1.bin", "v.bin"]
    both = [str(tmp_path / "v.bin"), tmp_path / "t0.bin", tmp_path / "v.bin"]
    assert [f.name for f in open_file(both).files] == ["v.bin", "t0.bin"]


# Documents

documents_of = st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=12).filter(
    lambda documents: sum(map(sum, documents)) >= 6
)


@given(
    documents=documents_of,
    seq_len=st.integers(1, 5),
    dtype=st.sampled_from(["uint16", "int32"]),
    data=st.data(),
)
def test_boundaries_and_spans_are_where_documents_begin(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    seq_len: int,
    dtype: str,
    data: Any,
) -> None:
    # Documents of several sequences, of none, and of empty ones; each id is the number of its document.
    path = tmp_path_factory.mktemp("m") / "d.bin"
    write_megatron(
        path, [[[n] * size for size in sizes] for n, sizes in enumerate(documents)], dtype
    )
    owner = [n for n, sizes in enumerate(documents) for size in sizes for _ in range(size)]
    set_ = open_file(path, seq_len)
    asked = data.draw(st.lists(st.integers(0, len(set_) - 1), max_size=6))
    expected = [
        (i, column)
        for i, row in enumerate(asked)
        for column in range(1, seq_len + 1)
        if owner[row * seq_len + column] != owner[row * seq_len + column - 1]
    ]
    rows, columns = set_.boundaries(np.array(asked, np.int64))
    assert [*zip(rows.tolist(), columns.tolist(), strict=True)] == expected
    assert rows.dtype == columns.dtype == np.int64
    for row in asked:
        rebuilt: list[int] = []
        for span in set_.spans(row):
            begin = owner.index(span.row)
            assert span.offset == row * seq_len + span.at[0] == begin + span.tokens[0]
            assert span.at == (len(rebuilt), len(rebuilt) + span.tokens[1] - span.tokens[0])
            assert span.tokens[1] <= owner.count(span.row)
            rebuilt += [span.row] * (span.tokens[1] - span.tokens[0])
        assert rebuilt == set_[row].tolist()
    shutil.rmtree(path.parent)


# Copies


def test_a_pickle_is_small_and_reads_the_same_rows(tmp_path: Path) -> None:
    data, rows = many_files(tmp_path)
    all_rows(data)
    dumped = pickle.dumps(data)
    assert len(dumped) < 2000
    again = pickle.loads(dumped)
    assert all_rows(again) == rows
    assert again.data_id() == data.data_id()
    every = np.arange(len(data))
    assert np.array_equal(again.boundaries(every), data.boundaries(every))


# Identity


def test_the_identity_survives_a_move_and_notices_other_data(tmp_path: Path) -> None:
    for folder in ("a", "b", "longer"):
        (tmp_path / folder).mkdir()
        write_plain(tmp_path / folder / "x.bin", some_ids(100 if folder != "longer" else 102))
    ids = {folder: open_file(tmp_path / folder).data_id() for folder in ("a", "b", "longer")}
    assert ids["a"] == ids["b"]
    assert ids["a"]["hash"] != ids["longer"]["hash"]
    assert (ids["a"]["kind"], ids["a"]["files"], ids["a"]["tokens"]) == ("tokens", 1, 100)
    assert open_file(tmp_path / "a", dtype="uint32").data_id()["hash"] != ids["a"]["hash"]
    assert open_file(tmp_path / "a", 16).settings_id() == {"seq_len": 16}


# Errors


def test_what_is_not_a_whole_file_of_ids_is_refused_by_name(tmp_path: Path) -> None:
    ids = some_ids(100)
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (SourceError, r"nope\.bin does not exist", tmp_path / "nope.bin", "auto"),
        (ConfigError, "urls must be a path", [], "auto"),
        (CorruptFile, r"b\.bin: 0 bytes", write_plain(tmp_path / "b.bin", []), "auto"),
        (CorruptFile, r"c\.bin: 202 bytes", write_plain(tmp_path / "c.bin", [*ids, 1]), "uint32"),
        (ConfigError, r"d\.bin holds <u2", write_header(tmp_path / "d.bin", ids), "uint32"),
        (CorruptFile, "of 101 ids", write_header(tmp_path / "e.bin", ids, count=101), "auto"),
        (CorruptFile, "version 2", write_header(tmp_path / "f.bin", ids, version=2), "auto"),
        (ConfigError, "dtype='float32'", tmp_path / "c.bin", "float32"),
    ]
    for error, match, path, dtype in cases:
        with pytest.raises(error, match=match):
            open_file(path, dtype=dtype)


@pytest.mark.parametrize(
    ("at", "change", "cut", "match"),
    [
        (0, b"TNTIDX\0\0\0", None, "is not an index of Megatron"),
        (0, b"", 0, "is not an index of Megatron"),
        (0, b"", -1, "lists 2 sequences, so takes 82 bytes; it has 81"),
        (17, b"\4", None, r"describes 60 bytes, but .*d\.bin has 40"),
        (34 + 8 + 16 + 8, b"\7", None, "a sequence that is not there"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, at: int, change: bytes, cut: int | None, match: str
) -> None:
    path = write_megatron(tmp_path / "d.bin", [[[1] * 10], [[2] * 10]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[at : at + len(change)] = change
    path.with_suffix(".idx").write_bytes(index[:cut])
    with pytest.raises(CorruptFile, match=match):
        open_file(path).boundaries([0])


def test_a_negative_id_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    ids = some_ids(100)
    ids[37] = -5
    data = open_file(write_plain(tmp_path / "a.bin", ids, "int32"), dtype="int32")
    assert data[3].tolist() == ids[24:33].tolist()
    with pytest.raises(CorruptFile, match=r"a\.bin: ids from -5"):
        data.__getitems__([0, 7, 4])


def test_a_file_that_changed_before_it_was_mapped_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.bin", some_ids(100))
    data = open_file(path)
    os.truncate(path, 100)
    with pytest.raises(CorruptFile, match="changed from 200 to 100 bytes"):
        data[0]

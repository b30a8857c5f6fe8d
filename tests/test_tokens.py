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

from penstock.errors import ConfigError, CorruptFile, NoData
from penstock.read.tokens import TokenFileDataset

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint16": 8,
    "uint32": 9,
    "uint64": 10,
}


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
    pointers = (
        np.concatenate([[0], np.cumsum(sizes, dtype="<i8")[:-1]]).astype("<i8")
        * np.dtype(dtype).itemsize
    )
    firsts = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype("<i8")
    np.array([i for s in sequences for i in s]).astype(dtype).tofile(path)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(firsts))
    path.with_suffix(".idx").write_bytes(
        head + sizes.tobytes() + pointers.tobytes() + firsts.tobytes()
    )
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
    data = open_file(write_plain(tmp_path / "train.bin", ids))
    assert all_rows(data) == rows_of(ids, 8)
    assert len(data) == (length - 1) // 8
    assert data.dtype == np.uint16


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64", ">u4", np.uint32]
)
def test_ids_of_any_integer_type_are_read_as_the_narrowest_that_fits(
    tmp_path: Path, dtype: Any
) -> None:
    ids = some_ids(100, top=128)
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    data = open_file(tmp_path / "a.bin", dtype=dtype)
    assert all_rows(data) == rows_of(ids, 8)
    assert data.dtype == (np.uint16 if np.dtype(dtype).itemsize <= 2 else np.uint32)
    assert data[0].dtype == data.dtype


def test_the_header_of_modded_nanogpt_is_recognised_and_is_no_data(tmp_path: Path) -> None:
    ids = some_ids(100)
    assert all_rows(open_file(write_header(tmp_path / "a.bin", ids))) == rows_of(ids, 8)


def test_the_header_of_llama_3_makes_ids_of_32_bits(tmp_path: Path) -> None:
    ids = some_ids(100, top=128_256)
    data = open_file(write_header(tmp_path / "a.bin", ids, 20240801, 7))
    assert all_rows(data) == rows_of(ids, 8)
    assert data.dtype == np.uint32


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "uint32", ">i8"])
def test_a_numpy_file_is_recognised_by_its_content(tmp_path: Path, dtype: str) -> None:
    ids = some_ids(100)
    with (tmp_path / "tokens.bin").open("wb") as file:
        np.save(file, ids.astype(dtype))
    assert all_rows(open_file(tmp_path / "tokens.bin")) == rows_of(ids, 8)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("named", ["d.bin", "d", "d.idx"])
def test_megatron_is_recognised_by_the_index_beside_it(
    tmp_path: Path, dtype: str, named: str
) -> None:
    ids = some_ids(100, top=256).tolist()
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


def test_a_row_says_from_where_in_which_file_it_comes(tmp_path: Path) -> None:
    write_plain(tmp_path / "a.bin", some_ids(20))
    write_plain(tmp_path / "b.bin", some_ids(40))
    (span,) = open_file(tmp_path).spans(4)
    assert (span.file, span.offset, span.row, span.tokens, span.at) == (
        "b.bin",
        16,
        2,
        (0, 9),
        (0, 9),
    )


# Size, threads, processes


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_pickle_is_small_and_reads_the_same_rows(tmp_path: Path) -> None:
    data, rows = many_files(tmp_path)
    all_rows(data)
    dumped = pickle.dumps(data)
    assert len(dumped) < 2000
    again = pickle.loads(dumped)
    assert all_rows(again) == rows
    assert again.data_id() == data.data_id()
    assert (
        again.boundaries(range(len(data)))[1].tolist()
        == data.boundaries(range(len(data)))[1].tolist()
    )


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


def refused(error: type[Exception], match: str, path: Any, **settings: Any) -> None:
    with pytest.raises(error, match=match):
        open_file(path, **settings)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(NoData, r"nope\.bin does not exist", tmp_path / "nope.bin")
    refused(NoData, r"\*\.bin matches no file", tmp_path / "*.bin")
    refused(NoData, "list of paths is empty", [])
    (tmp_path / "note.md").write_text("x")
    refused(NoData, r"no file that ends in \.bin", tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    refused(CorruptFile, r"a\.bin is empty", sparse(tmp_path / "a.bin", 0))


def test_half_an_id_is_refused(tmp_path: Path) -> None:
    refused(CorruptFile, "101 bytes are no whole number of uint16", sparse(tmp_path / "a.bin", 101))
    refused(
        CorruptFile,
        "102 bytes are no whole number of uint32",
        sparse(tmp_path / "b.bin", 102),
        dtype="uint32",
    )


def test_a_type_that_the_file_contradicts_is_refused(tmp_path: Path) -> None:
    header = write_header(tmp_path / "a.bin", some_ids(100))
    refused(ConfigError, "holds uint16", header, dtype="uint32")
    assert len(open_file(header, dtype="uint16")) == 12
    refused(
        ConfigError,
        "holds int32",
        write_megatron(tmp_path / "m.bin", [[[1] * 20]], "int32"),
        dtype="uint16",
    )


def test_a_header_that_does_not_fit_the_file_is_refused(tmp_path: Path) -> None:
    ids = some_ids(100)
    refused(
        CorruptFile,
        "header of 101 ids, so 1226 bytes; it has 1224",
        write_header(tmp_path / "a.bin", ids, count=101),
    )
    refused(CorruptFile, "header of 99 ids", write_header(tmp_path / "b.bin", ids, count=99))
    refused(
        CorruptFile,
        "version 2; we read version 1",
        write_header(tmp_path / "c.bin", ids, version=2),
    )
    (tmp_path / "d.bin").write_bytes(write_header(tmp_path / "d.bin", ids).read_bytes()[:600])
    refused(CorruptFile, "it has 600", tmp_path / "d.bin")
    refused(ConfigError, "evaluation file", write_header(tmp_path / "e.bin", ids, magic=20240522))


def megatron_with(folder: Path, at: int, change: bytes, cut: int | None = None) -> Path:
    """Two documents of 10 ids, with something in the index changed."""
    path = write_megatron(folder / "d.bin", [[[1] * 10], [[2] * 10]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[at : at + len(change)] = change
    path.with_suffix(".idx").write_bytes(index[:cut])
    return path


@pytest.mark.parametrize(
    ("at", "change", "cut", "match"),
    [
        (0, b"TNTIDX\0\0\0", None, "is no whole index of Megatron"),
        (0, b"", 20, "is no whole index of Megatron"),
        (9, b"\2", None, "version 2"),
        (17, b"\7", None, "type 7"),
        (0, b"", -1, r"lists 2 sequences, so takes 82 bytes; it has 81"),
        (18, b"\3", None, "lists 3 sequences"),
        (17, b"\4", None, r"describes a \.bin of 60 bytes, and .*d\.bin has 40"),
        (34 + 4, b"\11", None, r"describes a \.bin of 38 bytes"),
        (34 + 8, b"\1", None, "do not begin and end"),
        (34 + 8 + 16 + 16, b"\1", None, "do not begin and end"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, at: int, change: bytes, cut: int | None, match: str
) -> None:
    refused(CorruptFile, match, megatron_with(tmp_path, at, change, cut))


def test_a_negative_id_is_an_error_that_says_where(tmp_path: Path) -> None:
    ids = some_ids(100)
    ids[37] = -5
    for dtype in ("int32", "int64"):
        data = open_file(write_plain(tmp_path / f"{dtype}.bin", ids, dtype), dtype=dtype)
        assert data[3].tolist() == ids[24:33].tolist()
        with pytest.raises(CorruptFile, match=rf"{dtype}\.bin: the id at position 37 is -5"):
            data.__getitems__([0, 7, 4])


def test_a_file_that_changed_before_it_was_mapped_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.bin", some_ids(100))
    data = open_file(path)
    os.truncate(path, 100)
    with pytest.raises(CorruptFile, match="it had 200 bytes, it has 100"):
        data[0]
    path.unlink()
    with pytest.raises(NoData, match=r"a\.bin is gone"):
        data[0]

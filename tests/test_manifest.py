"""Which files a dataset consists of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock import ConfigError
from penstock.errors import SourceError
from penstock.read.listing import fingerprint, list_files
from tests.reading import bytes_of, documents


def touch(folder: Path, *names: str) -> Path:
    """Files with a byte each."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def names(urls: Any, **settings: Any) -> list[str]:
    return [file.name for file in list_files(urls, whole=False, **settings)]


def test_a_file_is_named_by_its_last_part(tmp_path: Path) -> None:
    touch(tmp_path, "deep/a.jsonl")
    assert names(tmp_path / "deep" / "a.jsonl") == ["a.jsonl"]


def test_a_folder_is_listed_by_name_at_any_depth(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a/z.parquet", "a/b/c.txt", "c.jsonl.gz")
    assert names(tmp_path) == ["a/b/c.txt", "a/z.parquet", "b.jsonl", "c.jsonl.gz"]


def test_a_glob_names_files_below_its_fixed_part(tmp_path: Path) -> None:
    touch(tmp_path, "x/a.jsonl", "x/b.txt", "y/c.jsonl", "d.jsonl")
    assert names(tmp_path / "*" / "*.jsonl") == ["x/a.jsonl", "y/c.jsonl"]


def test_a_list_keeps_its_own_order(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")
    assert names([tmp_path / "c.jsonl", str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"]) == [
        "c.jsonl", "a.jsonl", "b.jsonl"
    ]  # fmt: skip


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    touch(tmp_path, "x/part.jsonl", "y/part.jsonl")
    # The name is what addresses, splits and `skip` know a file by.
    assert len(set(names([tmp_path / "x", tmp_path / "y"]))) == 2


def test_hidden_and_marker_files_are_left_out_of_a_folder(tmp_path: Path) -> None:
    touch(
        tmp_path, ".a.jsonl", "_b.jsonl", ".git/c.jsonl", "_tmp/d.jsonl", "._e.parquet", "f.jsonl"
    )
    assert names(tmp_path) == ["f.jsonl"]


def test_files_with_unknown_endings_are_left_out_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "README", "image.png", "weights.safetensors", "data.csv.gz")
    assert names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "format", "codec"),
    [
        ("a.parquet", "parquet", ""),
        ("a.PQ", "parquet", ""),
        ("a.jsonl", "jsonl", ""),
        ("a.json", "jsonl", ""),
        ("a.NDJSON.zst", "jsonl", "zst"),
        ("a.jsonl.zstd", "jsonl", "zst"),
        ("a.txt.bz2", "text", "bz2"),
        ("a.b.md.xz", "text", "xz"),
    ],
)
def test_endings_tell_format_and_compression(
    tmp_path: Path, name: str, format: str, codec: str
) -> None:
    touch(tmp_path, name)
    (file,) = list_files(tmp_path / name, whole=False)
    assert (file.format, file.codec) == (format, codec)


def test_format_makes_any_ending_readable_and_keeps_its_compression(tmp_path: Path) -> None:
    touch(tmp_path, "a.data", "b.data.gz")
    found = list_files(tmp_path, format="jsonl")
    assert [(file.name, file.format, file.codec) for file in found] == [
        ("a.data", "jsonl", ""), ("b.data.gz", "jsonl", "gz")
    ]  # fmt: skip


def test_a_named_file_with_an_unknown_ending_asks_for_its_format(tmp_path: Path) -> None:
    touch(tmp_path, "data.bin")
    with pytest.raises(ConfigError, match=r"data\.bin: its name does not tell .* format="):
        list_files(tmp_path / "data.bin")


def test_a_missing_path_is_named_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SourceError, match=rf"gone/a\.jsonl does not exist \(looked from {tmp_path}\)"
    ):
        list_files("gone/a.jsonl")


@pytest.mark.parametrize(
    "url",
    ["ftp://host/a.parquet", "sftp://host/a.parquet", "data://x", "://x", "hdfs://a/b/*.parquet"],
)
def test_an_unknown_scheme_is_an_error_that_names_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*hf://.*s3://.*https://"):
        bytes_of(url)


# Bundles of small text files


def test_small_text_files_are_bundled_in_order(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{i:02}.txt" for i in range(20)))
    (bundle,) = list_files(tmp_path)
    assert [member.name for member in bundle.members] == [f"{i:02}.txt" for i in range(20)]


def test_each_file_of_a_bundle_is_one_document(tmp_path: Path) -> None:
    texts = [f"file {i}\n\nwith é and \r\n" * (i + 1) for i in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.md").write_bytes(text.encode())
    assert documents(bytes_of(tmp_path)) == [text.encode() for text in texts]


# Fingerprint


def folder_of(path: Path, **texts: str) -> Path:
    path.mkdir(parents=True)
    for name, text in texts.items():
        (path / f"{name}.txt").write_text(text)
    return path


def test_a_moved_folder_keeps_its_fingerprint(tmp_path: Path) -> None:
    before = fingerprint(list_files(folder_of(tmp_path / "one", a="1", b="22")))
    shutil.move(tmp_path / "one", tmp_path / "elsewhere")
    assert fingerprint(list_files(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize(
    "other",
    [{"a": "1", "b": "333"}, {"a": "1", "c": "22"}, {"a": "1"}, {"a": "1", "b": "22", "c": ""}],
)
def test_another_size_name_or_number_changes_the_fingerprint(
    tmp_path: Path, other: dict[str, str]
) -> None:
    one = fingerprint(list_files(folder_of(tmp_path / "one", a="1", b="22")))
    assert fingerprint(list_files(folder_of(tmp_path / "two", **other))) != one

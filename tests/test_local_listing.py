"""Which local files a dataset consists of."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("c/e.jsonl", ["e.jsonl"]),  # a file
        (".", ["a.jsonl.gz", "b.txt", "c/d/f.parquet", "c/e.jsonl"]),  # a folder, at any depth
        ("c/*.jsonl", ["e.jsonl"]),  # names below the fixed part
        ("?/*.jsonl", ["c/e.jsonl"]),
    ],
)
def test_files_are_listed_by_name(tmp_path: Path, source: str, found: list[str]) -> None:
    touch(tmp_path, "b.txt", "c/e.jsonl", "c/d/f.parquet", "a.jsonl.gz")
    touch(tmp_path, ".h.jsonl", "_m.jsonl", ".git/c.jsonl", "_tmp/d.jsonl", "._e.parquet")
    touch(tmp_path, "README", "image.png", "weights.safetensors", "data.csv.gz")
    assert names(tmp_path / source) == found


def test_a_list_keeps_its_own_order(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")
    assert names([tmp_path / "c.jsonl", str(tmp_path / "a.jsonl")]) == ["c.jsonl", "a.jsonl"]


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    touch(tmp_path, "x/part.jsonl", "y/part.jsonl")
    # The name is what addresses, splits and `skip` know a file by.
    assert len(set(names([tmp_path / "x", tmp_path / "y"]))) == 2


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


@pytest.mark.parametrize("name", ["data.bin", "data.csv", "https://host/page.html"])
def test_an_unknown_format_is_an_error_that_names_what_is_supported(
    tmp_path: Path, name: str
) -> None:
    url = name if "://" in name else str(touch(tmp_path, name) / name)
    with pytest.raises(ConfigError, match=r"no name tells a format \(\.parquet .*\.jsonl"):
        bytes_of(url)


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


def test_each_file_of_a_bundle_is_one_document(tmp_path: Path) -> None:
    texts = [f"file {i}\n\nwith é and \r\n" * (i + 1) for i in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.md").write_bytes(text.encode())
    (bundle,) = list_files(tmp_path)
    assert [member.name for member in bundle.members] == [f"{i:02}.md" for i in range(30)]
    assert documents(bytes_of(tmp_path)) == [text.encode() for text in texts]


# Fingerprint


def test_a_fingerprint_follows_names_and_sizes_and_not_the_place(tmp_path: Path) -> None:
    def of(place: str, **sizes: int) -> str:
        for name, size in sizes.items():
            touch(tmp_path / place, f"{name}.txt")
            (tmp_path / place / f"{name}.txt").write_bytes(b"x" * size)
        return fingerprint(list_files(tmp_path / place))

    one = of("one", a=1, b=2)
    assert of("elsewhere", a=1, b=2) == one
    others = [
        of("size", a=1, b=3),
        of("name", a=1, c=2),
        of("fewer", a=1),
        of("more", a=1, b=2, c=0),
    ]
    assert one not in others

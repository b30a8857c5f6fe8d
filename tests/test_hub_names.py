"""What an address on the Hub names, and what a dataset's card says of its files. Nothing is asked of any server."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, SourceError
from penstock.read.hub import HubName, choose, data_files, parse
from penstock.read.listing import Entry, full_address

# Addresses


def test_short_names_and_pages_of_the_hub_are_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "https://huggingface.co/datasets/org/name"
    for source, address in (
        ("fineweb_edu", "hf://datasets/HuggingFaceFW/fineweb-edu"),
        ("org/name", "hf://datasets/org/name"),
        (page, "hf://datasets/org/name/"),
        (f"{page}/tree/main/data%20x?p=1", "hf://datasets/org/name@main/data x"),
        (f"{page}/resolve/refs%2Fpr/a.txt", "hf://datasets/org/name@refs%2Fpr/a.txt"),
        ("https://hf.co/datasets/org/name/tree/v1", "hf://datasets/org/name@v1/"),
        ("org/name.jsonl", "org/name.jsonl"),
        ("org/name/deeper", "org/name/deeper"),
    ):
        assert full_address(source) == address
    (tmp_path / "org").mkdir()
    assert full_address("org/name") == "org/name", "a folder of that name is here"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("org/name/", ("org/name", "main", "")),
        ("org/name@v1/a/*.parquet", ("org/name", "v1", "a/*.parquet")),
        ("org/name/a@b/c.txt", ("org/name", "main", "a@b/c.txt")),
        ("org/name@refs/convert/parquet/x/y", ("org/name", "refs/convert/parquet", "x/y")),
        ("org/name@refs/pr/12/x", ("org/name", "refs/pr/12", "x")),
        ("org/name@feature%2Fone/x", ("org/name", "feature/one", "x")),
    ],
)
def test_an_address_names_repository_revision_and_path(
    address: str, name: tuple[str, str, str]
) -> None:
    assert parse(f"hf://datasets/{address}") == HubName(*name)


@pytest.mark.parametrize(
    "url",
    [
        "hf://org/name", "hf://datasets/", "hf://datasets/squad@v1/x", "hf://datasets/org//x", "hf://datasets/org/..", "hf://datasets/or g/name",
        "hf://datasets/org/name@", "hf://datasets/org/name@a b/x", "hf://datasets/org/name@..%2F../x",
        "hf://datasets/org/name/../x", "hf://datasets/org/name/a\\b", "hf://datasets/org/name/a\0b",
        "hf://datasets/" + "a" * 200, "hf://buckets/name", "hf://buckets/org/name@v1/x", "hf://buckets/org/name/../x",
    ],
)  # fmt: skip
def test_a_malformed_address_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"hf://datasets/ORG/NAME\[@revision\]/path-or-glob"):
        parse(url)


# Cards


def front(text: str) -> str:
    return f"---\n{textwrap.dedent(text).strip()}\n---\n# A dataset\nconfigs: not here\n"


def chosen(text: str, wanted: str | None = None) -> list[str] | None:
    return choose(front(text), wanted, "the card")[1]


FINEWEB = """
    license: odc-by
    configs:
    - config_name: default
      data_files:
      - split: train
        path: data/*/*
    - config_name: sample-10BT
      data_files:
      - split: train
        path: sample/10BT/*
    - config_name: "2024"
      data_files: data/CC-2024/*
    """


def test_the_default_configuration_is_taken_unless_another_is_named() -> None:
    assert chosen(FINEWEB) == ["data/*/*"]
    assert chosen(FINEWEB, "sample-10BT") == ["sample/10BT/*"]
    assert chosen(FINEWEB, "2024") == ["data/CC-2024/*"]


def test_a_split_is_chosen_by_name() -> None:
    text = """
    configs:
    - config_name: one/two
      data_files: [{split: valid, path: v/*}, {split: test, path: [t/*, u/*]}]
    """
    assert chosen(text, "one/two/test") == ["t/*", "u/*"]
    names = "config='one/two/valid', config='one/two/test'"
    for wanted in (None, "one/two/dev"):
        with pytest.raises(ConfigError, match=f"no configuration or split 'one/two.*{names}"):
            chosen(text, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "configs: [",
        "configs: [1, 2]",
        "configs: [{config_name: a, data_dir: [x]}]",
        "configs: [{config_name: a, data_files: {train: {x: y}}}]",
        "configs: !!python/object/apply:os.system [false]",
        "configs: " + "[" * 5000 + "]" * 5000,
        "configs:\n" + "- " * 5000 + "x",
    ],
)
def test_a_broken_card_is_named_and_nothing_worse_happens(text: str) -> None:
    with pytest.raises(SourceError, match="the card cannot be parsed") as caught:
        chosen(text)
    assert len(str(caught.value)) < 500


# Without a card


def data(*paths: str, format: Any = None) -> list[str]:
    listed = data_files([Entry(path, 1) for path in paths], "the repository", format)
    return [entry.name for entry in listed]


def test_parquet_comes_before_jsonl_before_text() -> None:
    assert data("a.txt", "b.jsonl", "c.parquet", "d.jsonl.zst") == ["c.parquet"]
    assert data("a.txt", "b.jsonl", "e.json.gz") == ["b.jsonl", "e.json.gz"]
    assert data("a.txt", "b.csv", "README.md", "script.py") == ["a.txt"]
    assert data("a.txt", "b.jsonl", format="text") == ["a.txt"]
    assert data("a.bin", "b.bin", format="jsonl") == ["a.bin", "b.bin"]

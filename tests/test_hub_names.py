"""What an address on the Hub names, and what a dataset's card says of its files. Nothing is asked of any server."""

from __future__ import annotations

import glob
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import (
    AccessDenied,
    ConfigError,
    NoData,
    RemoteError,
    SourceError,
)
from penstock.read.card import choose, configurations, data_files
from penstock.read.http import Refused
from penstock.read.hub import SHORT_NAMES, Entry, HubName, parse, refused, sound
from penstock.read.manifest import matcher

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_very_secret_indeed"


@pytest.fixture(autouse=True)
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.test")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


# Addresses


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("hf://datasets/org/name", ("org/name", "main", "")),
        ("hf://datasets/org/name/", ("org/name", "main", "")),
        ("hf://datasets/squad", ("squad", "main", "")),
        ("hf://datasets/squad@v1/a.parquet", ("squad", "v1", "a.parquet")),
        ("hf://datasets/org/name/a.parquet", ("org/name", "main", "a.parquet")),
        ("hf://datasets/org/name/a/b/", ("org/name", "main", "a/b")),
        ("hf://datasets/org/name@v1", ("org/name", "v1", "")),
        ("hf://datasets/org/name@v1/a/*.parquet", ("org/name", "v1", "a/*.parquet")),
        ("hf://datasets/org/name/a@b/c.txt", ("org/name", "main", "a@b/c.txt")),
        ("hf://datasets/org/name@v1/a@b.txt", ("org/name", "v1", "a@b.txt")),
        ("hf://datasets/org/name@refs/convert/parquet", ("org/name", "refs/convert/parquet", "")),
        (
            "hf://datasets/org/name@refs/convert/parquet/x/y",
            ("org/name", "refs/convert/parquet", "x/y"),
        ),
        (
            "hf://datasets/org/name@refs%2Fconvert%2Fparquet/x",
            ("org/name", "refs/convert/parquet", "x"),
        ),
        ("hf://datasets/org/name@refs/pr/12/x", ("org/name", "refs/pr/12", "x")),
        ("hf://datasets/org/name@feature%2Fone/x", ("org/name", "feature/one", "x")),
        (f"hf://datasets/org/name@{SHA.upper()}/x", ("org/name", SHA, "x")),
        (
            "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT",
            ("HuggingFaceFW/fineweb-edu", "main", "sample/10BT"),
        ),
    ],
)
def test_an_address_names_repository_revision_and_path(
    url: str, name: tuple[str, str, str]
) -> None:
    assert parse(url) == HubName(*name)


def test_only_a_whole_commit_is_pinned() -> None:
    assert parse(f"hf://datasets/org/name@{SHA}").pinned
    assert not parse("hf://datasets/org/name").pinned
    assert not parse(f"hf://datasets/org/name@{SHA[:7]}").pinned


@pytest.mark.parametrize(
    "url",
    [
        "hf://",
        "hf://org/name",
        "hf://datasets",
        "hf://datasets/",
        "hf://datasets//name",
        "hf://datasets/org//x",
        "hf://datasets/../name",
        "hf://datasets/org/..",
        "hf://datasets/or g/name",
        "hf://datasets/org/na?me",
        "hf://datasets/org/name@",
        "hf://datasets/org/name@/x",
        "hf://datasets/org/name@a b/x",
        "hf://datasets/org/name@..%2F../x",
        "hf://datasets/org/name@%00/x",
        "hf://datasets/org/name/../x",
        "hf://datasets/org/name//x",
        "hf://datasets/org/name/a/./x",
        "hf://datasets/org/name/a\\b",
        "hf://datasets/org/name/a\0b",
        "hf://datasets/" + "a" * 200,
    ],
)
def test_what_is_no_address_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"hf://datasets/ORG/NAME\[@revision\]/path-or-glob"):
        parse(url)


@given(st.text())
def test_any_text_is_an_address_or_is_refused(text: str) -> None:
    try:
        name = parse(f"hf://datasets/{text}")
    except ConfigError:
        return
    assert all(sound(part) for part in (name.repo, name.revision, name.path or "x"))


def test_a_short_name_is_an_address() -> None:
    assert parse(SHORT_NAMES["fineweb_edu"]) == HubName("HuggingFaceFW/fineweb-edu", "main", "")


# Refusals


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (
            401,
            "GatedRepo",
            AccessDenied,
            ["gated", "https://hub.test/datasets/org/name", "hf auth login", "HF_TOKEN"],
        ),
        (403, "GatedRepo", AccessDenied, ["gated", "accept", "https://hub.test/datasets/org/name"]),
        (401, "RepoNotFound", AccessDenied, ["no dataset org/name", "private", "HF_TOKEN"]),
        (404, "RepoNotFound", NoData, ["no dataset org/name", "private"]),
        (401, "", AccessDenied, ["org/name", "HF_TOKEN"]),
        (403, "", AccessDenied, ["403", "HF_TOKEN"]),
        (
            404,
            "RevisionNotFound",
            NoData,
            ["org/name", "'v 1'", "https://hub.test/datasets/org/name"],
        ),
        (404, "EntryNotFound", NoData, ["does not exist"]),
        (418, "", RemoteError, ["418"]),
    ],
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_refusal_says_what_to_do_and_never_shows_the_token(
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    kind: type,
    words: list[str],
    token: str | None,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    body = f"you sent {TOKEN}".encode()
    error = refused("hf://datasets/org/name@v%201/x", Refused(status, {"x-error-code": code}, body))
    assert type(error) is kind
    assert [word for word in words if word not in str(error)] == []
    assert TOKEN not in repr(error)
    if kind is AccessDenied:
        assert ("A token was sent" if token else "No token was sent") in str(error)


# Globs, as they are on disk


TREE = [
    "a.parquet", "b.txt", ".hidden.txt", "_b.txt", "x/a.parquet", "x/.h.txt", "x/y/c.parquet", "x/y/z/d.txt",
    ".dot/e.txt", "x/.dot/f.txt", "data-1/train-0.parquet", "data-2/train-1.parquet", "data-2/test.parquet", "[a].txt",
    "x/y/a**b.txt",
]  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in TREE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


@pytest.mark.parametrize(
    "pattern",
    [
        "*", "**", "*.txt", "**/*.txt", "*/*", "x/*", "x/**", "x/**/*", "**/y/*", "x/**/y/*", "**/**/*.parquet", "?.txt",
        "data-[12]/train-*", "data-[!1]/*", ".*", ".*/*", "x/.*", "**/.*", "x/y", "x/y/*/d.txt", "[[]a].txt", "**.txt",
        "x/y/a[*][*]b.txt", "*/**/*.txt", "**/x/**/d.txt", "nothing/*", "**/", "*/",
    ],
)  # fmt: skip
def test_globs_mean_what_they_mean_on_disk(tree: Path, pattern: str) -> None:
    found = glob.glob(
        str(tree / pattern) if not pattern.endswith("/") else f"{tree}/{pattern}", recursive=True
    )
    local = sorted({os.path.relpath(path, tree) for path in found if os.path.isfile(path)})
    matches = matcher(pattern)
    assert sorted(name for name in TREE if matches(name)) == local


# Cards


def front(text: str) -> str:
    return f"---\n{textwrap.dedent(text).strip()}\n---\n# A dataset\nconfigs: not here\n"


def chosen(text: str, wanted: str | None = None) -> list[str] | None:
    return choose(configurations(front(text), "the card"), wanted, "the card").patterns


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
    text = "configs:\n- config_name: one/two\n  data_files: {valid: v/*, test: t/*}"
    assert chosen(text, "one/two/test") == ["t/*"]
    with pytest.raises(
        ConfigError, match=r"no split 'train'.*config='one/two/valid', config='one/two/test'"
    ):
        chosen(text)
    with pytest.raises(ConfigError, match=r"no split 'dev'; it has valid, test"):
        chosen(text, "one/two/dev")


@pytest.mark.parametrize(
    "pattern",
    [
        "http://127.0.0.1:1/x.parquet", "https://evil.test/*", "file:///etc/passwd", "s3://bucket/x", "hf://datasets/a/b/c",
        "/etc/passwd", "../x", "a/../../x", "a//b", "a\\\\b", "a\\0b", "x" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["data_files", "data_dir"])
def test_a_card_cannot_name_anything_outside_its_repository(pattern: str, key: str) -> None:
    with pytest.raises(ConfigError, match="its own repository only"):
        chosen(f'configs:\n- config_name: a\n  {key}: "{pattern}"')


@pytest.mark.parametrize(
    "text",
    [
        "configs: [",
        "configs: x",
        "configs: [1, 2]",
        "configs: [{config_name: [a]}]",
        "configs: [{config_name: a, data_dir: [x]}]",
        "configs: [{config_name: a, data_files: 7}]",
        "configs: [{config_name: a, data_files: {train: {x: y}}}]",
        "configs: [{config_name: a, data_files: []}]",
        "configs: !!python/object/apply:os.system [false]",
        "configs: [{config_name: 2020-99-99, data_files: x}]",
        "configs: [{config_name: " + "9" * 5000 + ", data_files: x}]",
        "configs: [{config_name: !!int '', data_files: x}]",
        "configs: [{config_name: !!bool maybe, data_files: x}]",
        "configs: [{config_name: !!timestamp foo, data_files: x}]",
        "configs:\n\t- x",
        "configs: " + "[" * 50_000,
        "configs: " + "[" * 40 + "]" * 40,
        "a: &a [x]\nconfigs: *a\nb: *a\nc: [*a, *a]\nconfigs2: 1\nconfigs: [*a, *a]",
    ],
)
def test_a_broken_card_is_named_and_nothing_worse_happens(text: str) -> None:
    with pytest.raises(SourceError, match="the card cannot be understood") as caught:
        chosen(text)
    assert len(str(caught.value)) < 500


# Without a card


def data(*paths: str, format: Any = None) -> list[str]:
    return [
        entry.path
        for entry in data_files([Entry(path, 1, "") for path in paths], "the repository", format)
    ]


def test_parquet_comes_before_jsonl_before_text() -> None:
    assert data("a.txt", "b.jsonl", "c.parquet", "d.jsonl.zst") == ["c.parquet"]
    assert data("a.txt", "b.jsonl", "d.jsonl.zst", "e.json.gz") == [
        "b.jsonl",
        "d.jsonl.zst",
        "e.json.gz",
    ]
    assert data("a.txt", "b.csv", "README.md", "script.py") == ["a.txt"]
    assert data("a.txt", "b.jsonl", format="text") == ["a.txt"]
    assert data("a.bin", "b.bin", format="jsonl") == ["a.bin", "b.bin"]

"""The token cache: what goes in comes out, nothing foreign or damaged ever does, and the disk it takes is bounded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.cli.cache import cache as command
from penstock.encode.tokenizer import load_tokenizer
from penstock.read.cache import Key, TokenCache, describe, entries
from penstock.read.cache_file import make_key
from penstock.read.cache_room import Room
from penstock.types import Address, Bad, ChunkRef, Documents, FileRef, GiB, TokenChunk

REF = ChunkRef(FileRef("/data/a.parquet", "a.parquet", 1000, "parquet"), 3, 100)


def chunk_of(
    docs: Sequence[Sequence[int]],
    rows: Sequence[int] | None = None,
    dtype: Any = np.uint16,
    **more: Any,
) -> TokenChunk:
    binary = pa.array([np.array(doc, dtype).tobytes() for doc in docs], pa.large_binary())
    where = np.arange(len(docs)) if rows is None else np.array(rows, np.int64)
    return TokenChunk(
        REF, binary, where, **({"last": False, "bad": [], "empty": 0, "text_bytes": 7} | more)
    )


def sized(n: int, seed: int = 0) -> TokenChunk:
    """A chunk of about `n` bytes."""
    return chunk_of([np.random.default_rng(seed).integers(0, 60000, n // 2).tolist()])


def assert_same(a: TokenChunk | None, b: TokenChunk) -> None:
    assert a is not None
    assert a.docs.type == pa.large_binary()
    assert a.docs.equals(b.docs)
    assert a.rows.dtype == np.int64
    assert a.rows.tolist() == b.rows.tolist()
    assert (a.last, a.bad, a.empty, a.text_bytes) == (b.last, b.bad, b.empty, b.text_bytes)
    assert a.ref is REF


def only_file(folder: Path) -> Path:
    (entry,) = entries(folder)
    return entry.path


def bytes_in(folder: Path) -> int:
    return sum(entry.size for entry in entries(folder))


def age(folder: Path, key: Key, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / "tokens" / key.name, (then, then))


# What goes in comes out.

ids = st.lists(st.integers(0, 65535), max_size=20)
bads = st.builds(
    lambda file, group, row, why: Bad(Address(file, group, row), why, why),
    st.text(), st.none() | st.integers(0, 9), st.integers(-1, 2**40), st.text(),
)  # fmt: skip


@given(
    docs=st.lists(ids, max_size=12),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    first=st.none() | st.integers(0, 2**40),
    data=st.data(),
    bad=st.lists(bads, max_size=3),
    last=st.booleans(),
    text=st.text(max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_a_chunk_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    docs: list[list[int]], dtype: Any, first: int | None, data: Any, bad: list[Bad], last: bool, text: str,
) -> None:  # fmt: skip
    if first is None:
        rows = data.draw(st.lists(st.integers(0, 2**50), min_size=len(docs), max_size=len(docs)))
    else:
        rows = list(range(first, first + len(docs)))
    chunk = chunk_of(docs, rows, dtype, bad=bad, last=last, empty=2**33, text_bytes=2**34)
    cache = TokenCache(tmp_path_factory.getbasetemp() / "round", GiB)
    key = cache.key(f"{text}{os.urandom(8).hex()}", 3, text)
    assert cache.put(key, chunk)
    assert_same(cache.get(key, REF), chunk)
    assert describe(cache.folder / "tokens" / key.name) == key


def test_an_entry_takes_hardly_more_than_its_ids_in_the_narrowest_type(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("byte")
    text = Path(json.__file__).read_text()
    docs = [text[i : i + 1000] for i in range(0, 11000, 1000)] * 50
    documents = Documents(pa.array(docs, pa.large_string()), np.arange(len(docs)))
    cache = TokenCache(tmp_path, GiB)
    cache.put(cache.key("a", 0, "r"), tokenizer.encode(REF, documents))
    n_ids = sum(len(doc.encode()) + 1 for doc in docs)
    assert n_ids > 500_000
    assert tokenizer.vocab_size <= 1 << 16
    assert 2 * n_ids <= bytes_in(tmp_path) <= 1.02 * 2 * n_ids


# Nothing damaged or foreign comes out.


@pytest.fixture
def entry(tmp_path: Path) -> tuple[TokenCache, Key, Path, bytes]:
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    chunk = chunk_of(
        [[1, 2], [], [3, 4, 5]], [0, 7, 9], bad=[Bad(Address("a", 0, 1), "null", "no text")]
    )
    cache.put(key, chunk)
    path = only_file(tmp_path)
    return cache, key, path, path.read_bytes()


def test_a_flip_of_any_byte_is_noticed(entry: tuple[TokenCache, Key, Path, bytes]) -> None:
    cache, key, path, content = entry
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        assert cache.get(key, REF) is None, at
        assert not path.exists()
    assert cache.counts()["cache_damaged"] == len(content)


def test_a_file_cut_off_anywhere_is_noticed(entry: tuple[TokenCache, Key, Path, bytes]) -> None:
    cache, key, path, content = entry
    lengths = [*range(0, len(content), 7), len(content) - 1]
    for length in lengths:
        path.write_bytes(content[:length])
        assert cache.get(key, REF) is None, length
        path.write_bytes(
            content[:length] + bytes(len(content) - length)
        )  # what a crashed file system may leave
        assert cache.get(key, REF) is None, length
    path.write_bytes(content + b"\0")
    assert cache.get(key, REF) is None


def test_a_damaged_entry_is_made_again_and_told_once(
    entry: tuple[TokenCache, Key, Path, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cache, key, path, content = entry
    for _ in range(3):
        path.write_bytes(content[:-20])
        assert cache.get(key, REF) is None
        assert cache.put(key, chunk_of([[9]]))
        assert_same(cache.get(key, REF), chunk_of([[9]]))
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    counts = cache.counts()
    assert (counts["cache_damaged"], counts["cache_misses"], counts["cache_hits"]) == (3, 3, 3)


def test_an_entry_that_cannot_be_read_is_a_miss_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    (tmp_path / "tokens" / key.name).mkdir(parents=True)
    assert [cache.get(key, REF) for _ in range(3)] == [None] * 3
    assert cache.counts()["cache_misses"] == 3
    assert len(caplog.records) == 1


# The disk it takes is bounded.

STEP = 10_000
"""An entry is a little larger than the ids in it."""


def fill(cache: TokenCache, numbers: Sequence[int], rest: str = "r") -> list[Key]:
    keys = [cache.key("a", i, rest) for i in numbers]
    assert all(cache.put(key, sized(STEP, i)) for key, i in zip(keys, numbers, strict=True))
    return keys


def indices(cache: TokenCache) -> list[int]:
    return sorted(entry.chunk for entry in entries(cache.folder))


def test_what_a_dead_process_left_is_removed_and_what_a_live_one_writes_is_not(
    tmp_path: Path,
) -> None:
    live, old = (
        Room(tmp_path / "tokens", GiB).reserve(make_key("b", i, "r"), STEP)[0] for i in range(2)
    )
    assert live is not None
    assert old is not None
    left = Path(live.name).with_name(".tmp-1-aa")
    left.write_bytes(bytes(STEP))
    os.utime(old.name, (0, 0))
    cache = TokenCache(tmp_path, 3 * STEP)
    fill(cache, [0])
    assert [os.path.exists(path) for path in (left, live.name, old.name)] == [False, True, False]
    assert not cache.put(cache.key("a", 1, "r"), sized(STEP))  # what is being written counts
    live.close()
    old.close()
    fill(cache, [1])
    assert not os.path.exists(live.name)


def test_a_folder_that_cannot_be_turns_it_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = TokenCache(tmp_path / "file", GiB)
    for i in range(3):
        assert not cache.put(cache.key("a", i, "r"), chunk_of([[1]]))
        assert cache.get(cache.key("a", i, "r"), REF) is None
    assert cache.off is not None
    assert len(caplog.records) == 1
    assert cache.off in caplog.text


# The command.


def run(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(command, args)
    assert done.exit_code == code, done.output
    return done.output


def test_info_says_how_much_there_is_of_which_file(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    for i in range(3):
        cache.put(cache.key("s3://bucket/web.parquet", i, "r"), sized(STEP))
    old = cache.key("/data/code [old].jsonl", 0, "r")
    cache.put(old, sized(STEP))
    age(tmp_path, old, 3 * 86400)
    out = run("info", "--dir", str(tmp_path))
    assert "entries  4, 4" in out
    assert "3 d ago (oldest)" in out
    assert [line.split()[:2] for line in out.splitlines() if "bucket" in line] == [
        ["s3://bucket/web.parquet", "3"]
    ]
    assert "/data/code [old].jsonl" in out
    report = json.loads(run("info", "--dir", str(tmp_path), "--json"))
    assert (report["entries"], report["bytes"], report["folder"]) == (
        4,
        bytes_in(tmp_path),
        str(tmp_path),
    )
    assert [(file["file"], file["entries"]) for file in report["files"]] == [
        ("s3://bucket/web.parquet", 3),
        ("/data/code [old].jsonl", 1),
    ]


def test_verify_finds_damage_and_deletes_it_when_asked(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    keys = fill(cache, [0, 1, 2])
    assert "3 entries" in run("verify", "--dir", str(tmp_path))
    path = tmp_path / "tokens" / keys[1].name
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in run("verify", "--dir", str(tmp_path), code=1)
    report = json.loads(run("verify", "--json", "--dir", str(tmp_path), code=1))
    assert [one["path"] for one in report["damaged"]] == [str(path)]
    assert "unreadable" not in run("info", "--dir", str(tmp_path))
    assert "1 damaged, deleted" in run("verify", "--delete", "--dir", str(tmp_path))
    assert "0 damaged" in run("verify", "--dir", str(tmp_path))
    assert indices(cache) == [0, 2]


def test_clear_removes_what_was_not_used_for_so_long(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    keys = fill(cache, [0, 1, 2])
    age(tmp_path, keys[0], 8 * 86400)
    age(tmp_path, keys[1], 6 * 86400)
    assert "removed 1 files" in run("clear", "--dir", str(tmp_path), "--older-than", "7d", "--yes")
    assert indices(cache) == [1, 2]
    age(tmp_path, keys[2], -8 * 86400)
    assert "removed 2 files" in run("clear", "--dir", str(tmp_path))
    assert indices(cache) == []
    fill(cache, [0])


def test_clear_all_removes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    fill(TokenCache(tmp_path, GiB), [0])
    for name in (
        "listings/aa/one",
        "footers/two",
        "locks/3",
        "engines/four",
        "stdlib/five.parquet",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "tokens" / ".lock").write_bytes(b"")
    os.utime(tmp_path / "tokens" / ".lock", (2**33, 2**33))  # the age of a lock says nothing
    run("clear", "--dir", str(tmp_path), "--yes")
    assert (tmp_path / "listings/aa/one").exists()
    run("clear", "--dir", str(tmp_path), "--all", "--yes")
    left = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert left == ["engines/four", "stdlib/five.parquet"]

"""The token store: what goes in comes out, nothing damaged ever does, and its size is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

from penstock import AsyncDataLoader, TextDataset
from penstock.cli.cache import cache as command
from penstock.errors import CorruptFile
from penstock.read.token_store import Key, TokenStore
from penstock.types import Address, Bad, ChunkRef, FileRef, GiB, TokenChunk
from tests.contracts import digest

REF = ChunkRef(FileRef("/data/a.parquet", "a.parquet", 1000, "parquet"), 3, 100)
STEP = 10_000
"""Bytes of ids in a test entry, which is a little larger."""


def key_of(chunk: int, source: str = "a", rest: str = "r") -> Key:
    return Key(source, chunk, rest)


def chunk_of(
    docs: Sequence[Sequence[int]],
    rows: Sequence[int] | None = None,
    dtype: Any = np.uint16,
    **more: Any,
) -> TokenChunk:
    binary = pa.array([np.array(doc, dtype).tobytes() for doc in docs], pa.large_binary())
    where = np.arange(len(docs)) if rows is None else np.array(rows, np.int64)
    fields: dict[str, Any] = {"last": False, "bad": [], "empty": 0, "text_bytes": 7}
    return TokenChunk(REF, binary, where, **(fields | more))


def sized(n: int, seed: int = 0) -> TokenChunk:
    """Return a chunk of about `n` bytes."""
    return chunk_of([np.random.default_rng(seed).integers(0, 60000, n // 2).tolist()])


def assert_same(a: TokenChunk | None, b: TokenChunk) -> None:
    assert a is not None
    assert a.docs.type == pa.large_binary()
    assert a.docs.equals(b.docs)
    assert a.rows.dtype == np.int64
    assert a.rows.tolist() == b.rows.tolist()
    assert (a.last, a.bad, a.empty, a.text_bytes) == (b.last, b.bad, b.empty, b.text_bytes)
    assert a.ref is REF


def cache_in(folder: Path, limit: int = GiB) -> TokenStore:
    return TokenStore(folder / "tokens", limit, best_effort=True)


def bytes_in(store: TokenStore) -> int:
    return sum(entry.size for entry in store.list())


def chunks_in(store: TokenStore) -> list[int]:
    return sorted(store.header(entry.name).key.chunk for entry in store.list())


def fill(store: TokenStore, numbers: Sequence[int]) -> list[Key]:
    keys = [key_of(i) for i in numbers]
    assert all(store.put(key, sized(STEP, i)) for key, i in zip(keys, numbers, strict=True))
    return keys


def age(store: TokenStore, key: Key, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(Path(store.place, key.name), (then, then))


# What goes in comes out

ids = st.lists(st.integers(0, 65535), max_size=20)
bads = st.builds(
    lambda file, group, row, why: Bad(Address(file, group, row), why, why),
    st.text(), st.none() | st.integers(0, 9), st.integers(-1, 2**40), st.text(),
)  # fmt: skip


@given(
    docs=st.lists(ids, max_size=12),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    data=st.data(),
    bad=st.lists(bads, max_size=3),
    last=st.booleans(),
    text=st.text(max_size=30),
    block_bytes=st.none() | st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_a_chunk_comes_back_as_it_was_whole_and_in_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    docs: list[list[int]], dtype: Any, data: Any, bad: list[Bad], last: bool, text: str, block_bytes: int | None,
) -> None:  # fmt: skip
    rows = data.draw(st.lists(st.integers(0, 2**50), min_size=len(docs), max_size=len(docs)))
    chunk = chunk_of(docs, rows, dtype, bad=bad, last=last, empty=2**33, text_bytes=2**34)
    store = TokenStore(tmp_path_factory.getbasetemp() / "round", block_bytes=block_bytes)
    key = Key(f"{text}{os.urandom(8).hex()}", 3, text)
    assert not store.exists(key)
    header = store.put(key, chunk)
    assert header is not None
    assert store.exists(key)
    assert_same(store.get(key, REF), chunk)
    assert store.header(key.name) == header
    assert (header.key, sum(block.documents for block in header.blocks)) == (key, len(docs))
    assert header.size == Path(store.place, key.name).stat().st_size
    parts = [store.read_blocks(key.name, [block]) for block in header.blocks]
    assert [doc for part in parts for doc in part["docs"].to_pylist()] == chunk.docs.to_pylist()
    assert [row for part in parts for row in part["rows"].to_pylist()] == rows
    id_bytes = sum(block.id_bytes for block in header.blocks)
    assert sum(len(doc) * np.dtype(dtype).itemsize for doc in docs) == id_bytes


# Nothing damaged comes out


@pytest.fixture
def entry(tmp_path: Path) -> tuple[TokenStore, Key, Path, bytes, TokenChunk]:
    store, key = cache_in(tmp_path), key_of(0)
    bad = [Bad(Address("a", 0, 1), "null", "no text")]
    chunk = chunk_of([[1, 2], [], [3, 4, 5]], [0, 7, 9], bad=bad)
    store.put(key, chunk)
    path = Path(store.place, key.name)
    return store, key, path, path.read_bytes(), chunk


def test_a_flip_of_any_byte_is_noticed_or_changes_nothing(entry: Any) -> None:
    store, key, path, content, chunk = entry
    noticed = 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        if (found := store.get(key, REF)) is None:
            assert not path.exists()
            noticed += 1
        else:
            assert_same(found, chunk)
    assert noticed == store.counts()["cache_damaged"] > len(content) // 2


def test_a_damaged_entry_raises_in_a_corpus_and_is_made_again_in_a_cache(
    entry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, key, path, content, _ = entry
    for left in (b"", content[:100], content[:-20]):
        path.write_bytes(left)
        with pytest.raises(CorruptFile, match=path.name):
            TokenStore(store.place).get(key, REF)
        assert store.get(key, REF) is None
        assert store.put(key, chunk_of([[9]]))
        assert_same(store.get(key, REF), chunk_of([[9]]))
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


# The disk it takes is bounded


def test_entries_are_taken_until_the_limit_and_then_refused_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = cache_in(tmp_path, int(3.5 * STEP))
    kept = [store.put(key_of(i), sized(STEP, i)) is not None for i in range(6)]
    assert kept == [True] * 3 + [False] * 3
    assert store.put(key_of(9), chunk_of([[1]]))  # a small one still fits
    assert bytes_in(store) <= 3.5 * STEP
    assert len(caplog.records) == 1
    assert "penstock cache clear" in caplog.text
    store.remove([key_of(0).name])
    assert store.put(key_of(5), sized(STEP, 5))


WRITER = """
import sys
from pathlib import Path
from tests.test_token_store import STEP, cache_in, key_of, sized
print("ready", flush=True)
sys.stdin.readline()
store = cache_in(Path(sys.argv[1]), 10 * STEP)
for i in map(int, sys.argv[2].split(",")):
    store.put(key_of(i), sized(STEP, i))
"""


def test_two_processes_keep_within_one_limit(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), ",".join(map(str, numbers))],
            cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for numbers in (range(12), range(6, 18))
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n", timeout=60)
        assert writer.returncode == 0
    store = cache_in(tmp_path)
    assert 9 * STEP <= bytes_in(store) <= 10 * STEP
    assert store.verify() == []


def test_what_a_killed_process_left_is_removed_before_the_cache_counts_as_full(
    tmp_path: Path,
) -> None:
    store = cache_in(tmp_path, int(2.5 * STEP))
    (key,) = fill(store, [0])
    left = Path(store.place, key.name).with_name(".x.arrows.aa")
    left.write_bytes(bytes(STEP))
    Path(store.place, ".lock").write_bytes(b"%020d" % (2 * STEP))  # as counted before its write
    fill(cache_in(tmp_path, int(2.5 * STEP)), [1])
    assert not left.exists()


def test_a_folder_that_cannot_be_made_turns_writing_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = cache_in(tmp_path / "file")
    for i in range(3):
        assert store.put(key_of(i), chunk_of([[1]])) is None
        assert store.get(key_of(i), REF) is None
    assert store.off is not None
    assert len(caplog.records) == 1
    assert store.off in caplog.text
    with pytest.raises(OSError, match="file"):
        TokenStore(tmp_path / "file" / "tokens").put(key_of(0), chunk_of([[1]]))


def test_a_run_that_ends_early_keeps_what_it_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} " * 50}) + "\n" for i in range(400)))
    data = TextDataset(str(text), tokenizer="byte", seq_len=64, cache=True, chunk_bytes=4096)
    with AsyncDataLoader(data, 2, n_workers=2) as loader:
        first = digest(next(loader))
    assert list(cache_in(tmp_path / "cache").list())
    with AsyncDataLoader(data, 2, n_workers=2) as loader:
        assert digest(next(loader)) == first
        assert loader.stats().cache_misses == 0


# The command


def run(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(command, args)
    assert done.exit_code == code, done.output
    return done.output


def test_info_shows_how_much_there_is_and_when_it_was_used(tmp_path: Path) -> None:
    store = cache_in(tmp_path)
    for key in fill(store, [0, 1, 2]):
        age(store, key, 3 * 86400)
    assert "3 entries" in (out := run("info", "--dir", str(tmp_path)))
    assert "used 3.0 days ago" in out
    report = json.loads(run("info", "--dir", str(tmp_path), "--json"))
    assert (report["entries"], report["bytes"]) == (3, bytes_in(store))


def test_verify_finds_damage_and_deletes_it_when_asked(tmp_path: Path) -> None:
    store = cache_in(tmp_path)
    keys = fill(store, [0, 1, 2])
    path = Path(store.place, keys[1].name)
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in run("verify", "--dir", str(tmp_path), code=1)
    report = json.loads(run("verify", "--json", "--dir", str(tmp_path), code=1))
    assert [*report["damaged"]] == [keys[1].name]
    run("verify", "--delete", "--dir", str(tmp_path))
    assert "0 damaged" in run("verify", "--dir", str(tmp_path))
    assert chunks_in(store) == [0, 2]


def test_clear_removes_what_was_not_used_for_this_long(tmp_path: Path) -> None:
    store = cache_in(tmp_path)
    keys = fill(store, [0, 1, 2])
    age(store, keys[0], 8 * 86400)
    age(store, keys[1], 6 * 86400)
    assert "--yes" in run("clear", "--dir", str(tmp_path), code=2)
    assert "removed 1 entries" in run("clear", "--dir", str(tmp_path), "--older-than=7d", "--yes")
    assert chunks_in(store) == [1, 2]
    assert store.get(keys[1], REF) is not None  # used now
    assert "removed 0 entries" in run("clear", "--dir", str(tmp_path), "--older-than=1d", "--yes")
    for name in ("metadata", "engines"):
        (tmp_path / name).mkdir()
    run("clear", "--dir", str(tmp_path), "--yes", "--all")
    assert chunks_in(store) == []
    assert [(tmp_path / name).exists() for name in ("metadata", "engines")] == [False, True]
    fill(store, [0])

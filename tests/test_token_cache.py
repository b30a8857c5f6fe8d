"""The token cache: what goes in comes out, nothing foreign or damaged ever does, and the disk it takes is bounded."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.feed.keep import CacheWriter
from typer.testing import CliRunner

from penstock.cli.cache import cache as command
from penstock.encode.tokenizer import load_tokenizer
from penstock.errors import ConfigError, PenstockError
from penstock.read.cache import Key, TokenCache, clear, describe, entries, verify
from penstock.read.cache_file import TEMPORARY, make_key
from penstock.read.cache_room import Room, alone, remove_if_left
from penstock.types import Address, Bad, ChunkRef, Documents, FileRef, GiB, MiB, TokenChunk

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


def test_a_slice_comes_back_as_a_whole_of_its_own(tmp_path: Path) -> None:
    chunk = chunk_of([[1, 2], [3], [4, 5, 6], []])
    chunk.docs, chunk.rows = chunk.docs[1:3], chunk.rows[1:3]
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    cache.put(key, chunk)
    assert_same(cache.get(key, REF), chunk)
    assert cache.get(key, REF).docs.offset == 0  # type: ignore[union-attr]


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


def test_any_arrow_reader_reads_an_entry(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    chunk = chunk_of([[1, 2], [3]], [5, 99])
    cache.put(cache.key("a", 0, "r"), chunk)
    table = pa.ipc.open_file(only_file(tmp_path)).read_all()
    assert table.column("docs").to_pylist() == chunk.docs.to_pylist()
    assert table.column("rows").to_pylist() == [5, 99]


def test_a_mapped_chunk_outlives_its_file(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    key, chunk = cache.key("a", 0, "r"), sized(300_000)
    cache.put(key, chunk)
    before = pa.total_allocated_bytes()
    mapped = cache.get(key, REF)
    assert pa.total_allocated_bytes() - before < 10_000  # mapped, not copied
    clear(tmp_path)
    assert not cache.has(key)
    assert_same(mapped, chunk)


def test_nothing_is_made_before_the_first_chunk(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "new", GiB)
    key = cache.key("a", 0, "r")
    assert not cache.has(key)
    assert cache.get(key, REF) is None
    assert list(entries(tmp_path / "new")) == []
    assert verify(tmp_path / "new").entries == 0
    assert clear(tmp_path / "new") == (0, 0)
    assert not (tmp_path / "new").exists()
    assert cache.counts()["cache_misses"] == 1


def test_it_travels_to_another_process_by_its_settings(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    cache.put(key, chunk_of([[1]]))
    there, sent = pickle.loads(pickle.dumps((cache, key)))
    assert (there.folder, there.max_bytes) == (tmp_path, GiB)
    assert_same(there.get(sent, REF), chunk_of([[1]]))


def test_a_use_is_noted_at_most_once_a_minute(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    cache.put(key, chunk_of([[1]]))
    age(tmp_path, key, 30)
    noted = os.stat(only_file(tmp_path)).st_mtime
    cache.get(key, REF)
    assert os.stat(only_file(tmp_path)).st_mtime == noted
    age(tmp_path, key, 90)
    cache.get(key, REF)
    assert time.time() - os.stat(only_file(tmp_path)).st_mtime < 60


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


def test_damage_in_a_large_entry_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    cache.put(key, sized(5 * MiB))
    path = only_file(tmp_path)
    content = path.read_bytes()
    for at in (0, 2000, MiB - 1, MiB, 3 * MiB + 5, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
        assert cache.get(key, REF) is None
    path.write_bytes(content)
    assert_same(cache.get(key, REF), sized(5 * MiB))


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


def test_an_entry_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    mine, other = cache.key("a", 0, "gpt2"), cache.key("a", 0, "llama")
    cache.put(other, chunk_of([[1]]))
    os.rename(tmp_path / "tokens" / other.name, tmp_path / "tokens" / mine.name)
    assert len(verify(tmp_path).damaged) == 1
    assert cache.get(mine, REF) is None
    assert not cache.has(mine)


def test_equal_digests_with_another_text_give_no_tokens(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    key = cache.key("a", 0, "r")
    cache.put(key, chunk_of([[1]]))
    assert cache.get(Key(key.file, key.index, key.digest, key.text + " "), REF) is None


def test_every_part_of_a_key_counts(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    names = ["a", "a\ud800", "a\0", "../a", "/a", "A", "a" * 300, "a-1", "ä", '","']
    keys = [
        cache.key(file, index, rest)
        for file in names
        for index in (0, 1, 11)
        for rest in ("", "r", "1, r")
    ]
    assert len({key.name for key in keys}) == len(keys)
    for i, key in enumerate(keys):
        cache.put(key, chunk_of([[i]]))
    for i, key in enumerate(keys):
        assert_same(cache.get(key, REF), chunk_of([[i]]))
    assert verify(tmp_path) == (len(keys), bytes_in(tmp_path), [])
    assert all(
        path.parent.parent == tmp_path / "tokens"
        for path in (tmp_path / "tokens" / k.name for k in keys)
    )


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


def needed(*order: int) -> Callable[[str, int], float | None]:
    """The entries are needed in this order."""
    return lambda file, index: float(order.index(index)) if index in order else None


def test_what_is_needed_last_is_dropped_first(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 4 * STEP)
    cache.foresee(needed(7, 3, 8, 1, 0, 2))
    fill(cache, [0, 1, 2])
    fill(cache, [3])
    assert indices(cache) == [0, 1, 3]
    fill(cache, [7])
    assert indices(cache) == [1, 3, 7]
    assert not cache.put(cache.key("a", 2, "r"), sized(STEP))
    assert not cache.put(cache.key("a", 5, "r"), sized(STEP))  # not needed at all
    fill(cache, [8])
    assert indices(cache) == [3, 7, 8]
    counts = cache.counts()
    assert (counts["cache_evicted"], counts["cache_refused"], counts["cache_written"]) == (3, 2, 6)


def test_what_the_run_has_passed_is_needed_an_epoch_later(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 4 * STEP)
    now = 0
    cache.foresee(lambda file, index: index if index > now else index + 10)
    fill(cache, [1, 2, 3])
    assert not cache.put(cache.key("a", 4, "r"), sized(STEP))
    now = 2
    fill(cache, [4])
    assert indices(cache) == [1, 3, 4]


def test_between_two_scans_of_a_large_folder_room_is_made_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.read.cache_room.SCAN_PUTS", 1)  # as if every entry were 64
    another = TokenCache(tmp_path, GiB)
    fill(another, [10, 11, 12, 13, 14])
    cache = TokenCache(tmp_path, 7 * STEP)
    cache.foresee(lambda file, index: index)
    fill(cache, [9])  # with the only scan
    fill(cache, [8])
    assert indices(cache) == [8, 9, 10, 11, 12, 13]
    fill(another, [20])  # its bytes are in the account, but nobody looked at it
    fill(cache, [7])
    assert indices(cache) == [7, 8, 9, 10, 11, 20]
    assert bytes_in(tmp_path) <= 7 * STEP


def test_what_no_run_uses_goes_before_what_this_one_needs(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 5 * STEP)
    others = fill(TokenCache(tmp_path, GiB), [100, 101], "another tokenizer")
    age(tmp_path, others[0], 4000)
    age(tmp_path, others[1], 5000)
    cache.foresee(lambda file, index: index)  # knows 100 and 101 too, but not with that tokenizer
    fill(cache, [1, 2])
    fill(cache, [3])
    assert indices(cache) == [1, 2, 3, 100]
    fill(cache, [0])
    assert indices(cache) == [0, 1, 2, 3]
    assert not cache.put(cache.key("a", 4, "r"), sized(STEP))


def test_what_another_run_uses_stays(tmp_path: Path) -> None:
    theirs = TokenCache(tmp_path, GiB)
    keys = fill(theirs, [100, 101], "another tokenizer")
    for key in keys:
        age(tmp_path, key, 4000)
    cache = TokenCache(tmp_path, 4 * STEP)
    cache.foresee(lambda file, index: index)
    fill(cache, [1])
    theirs.get(keys[0], REF)
    fill(cache, [2])
    assert indices(cache) == [1, 2, 100]
    assert not cache.put(cache.key("a", 3, "r"), sized(STEP))


def test_without_foresight_only_what_is_unused_for_an_hour_goes(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 3 * STEP)
    keys = fill(cache, [0, 1])
    assert not cache.put(cache.key("a", 2, "r"), sized(STEP))
    age(tmp_path, keys[1], 3700)
    fill(cache, [2])
    assert indices(cache) == [0, 2]


@pytest.mark.parametrize("limit", [0, STEP])
def test_an_entry_larger_than_the_limit_is_refused(tmp_path: Path, limit: int) -> None:
    cache = TokenCache(tmp_path, limit)
    assert not cache.put(cache.key("a", 0, "r"), sized(STEP))
    assert cache.counts()["cache_refused"] == 1
    assert cache.off is None
    assert list(entries(tmp_path)) == []


def test_entries_cleared_by_somebody_make_room(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 3 * STEP)
    fill(cache, [0, 1])
    clear(tmp_path)
    fill(cache, [2, 3])
    only_file_of_2 = next(entry.path for entry in entries(tmp_path) if entry.chunk == 2)
    only_file_of_2.unlink()
    fill(cache, [4])
    assert indices(cache) == [3, 4]


@pytest.mark.parametrize(
    "account",
    [b"", b"12", b"nonsense\n", b"%020d\n" % 10**18, b"%020d\n" % 0, b"\xff" * 64],
    ids=repr,
)
def test_a_wrong_account_of_the_bytes_in_use_is_put_right(tmp_path: Path, account: bytes) -> None:
    fill(TokenCache(tmp_path, GiB), [0, 1])
    (tmp_path / "tokens" / ".lock").write_bytes(account)
    cache = TokenCache(tmp_path, 4 * STEP)
    fill(cache, [2])
    assert int((tmp_path / "tokens" / ".lock").read_bytes().splitlines()[0]) == bytes_in(tmp_path)
    assert not cache.put(cache.key("a", 3, "r"), sized(STEP))


def test_a_chunk_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    fill(cache, [0])
    inode = os.stat(only_file(tmp_path)).st_ino
    fill(cache, [0])
    assert os.stat(only_file(tmp_path)).st_ino == inode
    assert cache.counts()["cache_written"] == 1


def test_an_entry_made_by_two_at_once_counts_once(tmp_path: Path) -> None:
    key = make_key("a", 0, "r")
    rooms = [Room(tmp_path / "tokens", GiB) for _ in range(2)]
    files = [room.reserve(key, STEP)[0] for room in rooms]
    for room, file in zip(rooms, files, strict=True):
        assert file is not None
        with file:
            room.settle(file.name, tmp_path / "tokens" / key.name, STEP)
    assert bytes_in(tmp_path) == STEP
    assert int((tmp_path / "tokens" / ".lock").read_bytes()) == STEP
    assert len(list((tmp_path / "tokens").glob("*/.tmp-*"))) == 0


def test_an_entry_that_another_process_made_first_is_not_counted_as_written(tmp_path: Path) -> None:
    cache, other = TokenCache(tmp_path / "ours", GiB), TokenCache(tmp_path / "other", GiB)
    ours, theirs = (fill(one, [1])[0] for one in (cache, other))
    made = fill(other, [0])[0]
    place = tmp_path / "ours" / "tokens" / made.name
    late = TokenCache(tmp_path / "ours", GiB)

    def when(file: str, index: int) -> float:
        # Asked for while the entry is about to be written: the other process is quicker.
        place.write_bytes((tmp_path / "other" / "tokens" / made.name).read_bytes())
        return 0.0

    late.foresee(when)
    assert late.put(late.key("a", 0, "r"), sized(STEP, 0))
    assert ours.name == theirs.name
    assert late.counts()["cache_written"] == late.counts()["cache_written_bytes"] == 0


def test_only_a_lack_of_room_makes_it_full(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 10 * STEP)
    fill(cache, [1])
    later = TokenCache(tmp_path, 10 * STEP)

    def when(file: str, index: int) -> float:
        shutil.rmtree(tmp_path / "tokens")  # somebody clears the folder just now
        return 0.0

    later.foresee(when)
    assert not later.put(later.key("b", 0, "r"), sized(STEP))
    assert later.counts()["cache_refused"] == 1
    assert not later.full
    assert not cache.put(cache.key("a", 2, "r"), sized(11 * STEP))
    assert cache.full


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


WRITE_MANY = """
import sys
from pathlib import Path
from tests.test_token_cache import sized
from penstock.read.cache import TokenCache
folder, limit, me = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
cache = TokenCache(folder, limit)
cache.foresee(lambda file, index: -index)  # the newest are needed first: each has others to drop
for i in range(120):
    cache.put(cache.key(f"file {(me + i) % 5}", i, "r"), sized(10_000, i))
assert cache.off is None, cache.off
print(cache.counts()["cache_written"])
"""


def test_four_processes_together_keep_to_the_limit(tmp_path: Path) -> None:
    limit = 20 * STEP
    arguments = [sys.executable, "-c", WRITE_MANY, str(tmp_path), str(limit)]
    root = Path(__file__).parent.parent
    writers = [
        subprocess.Popen([*arguments, str(i)], stdout=subprocess.PIPE, text=True, cwd=root)
        for i in range(4)
    ]
    try:
        seen = []
        while any(writer.poll() is None for writer in writers):
            with alone(tmp_path / "tokens"):  # nothing comes or goes while it is counted
                files = [
                    os.stat(path).st_size
                    for path in (tmp_path / "tokens").glob("*/*")
                    if path.exists()
                ]
                seen.append(sum(files))
        written = [int(writer.communicate(timeout=60)[0]) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert max(seen) <= limit
    assert bytes_in(tmp_path) > limit - 2 * STEP
    assert sum(written) > 40
    assert verify(tmp_path).damaged == []


def test_many_threads_read_and_write_at_once(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, 8 * STEP)
    cache.foresee(lambda file, index: -index)
    wrong: list[int] = []

    def work(me: int) -> None:
        for i in range(me, 60 + me):
            key = cache.key("a", i, "r")
            cache.put(key, sized(STEP, i))
            for j in (i, i - 3):
                found = cache.get(cache.key("a", j, "r"), REF)
                if found is not None and not found.docs.equals(sized(STEP, j).docs):
                    wrong.append(j)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    counts = cache.counts()
    assert counts["cache_hits"] > 0
    assert counts["cache_damaged"] == 0
    assert counts["cache_written"] - counts["cache_evicted"] == len(list(entries(tmp_path)))
    assert bytes_in(tmp_path) <= 8 * STEP


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


def test_a_chunk_of_an_iterable_is_not_kept(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, GiB)
    assert not cache.put(cache.key("a", 0, "r"), chunk_of([[1]], source={"at": 1}))


# The thread that writes.


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CacheWriter]:
    writer = CacheWriter(TokenCache(tmp_path, GiB), max_queued_bytes=3 * STEP)
    yield writer
    writer.close()


def keyed(tmp_path: Path, i: int) -> tuple[Key, TokenChunk]:
    return TokenCache(tmp_path, GiB).key("a", i, "r"), sized(STEP, i)


def test_close_writes_what_was_taken_and_ends_the_thread(
    writer: CacheWriter, tmp_path: Path
) -> None:
    assert not any(thread.name == "penstock-cache" for thread in threading.enumerate())
    assert writer.offer(*keyed(tmp_path, 0))
    assert any(thread.name == "penstock-cache" for thread in threading.enumerate())
    for i in range(1, 10):
        assert writer.put(*keyed(tmp_path, i), 30)
    assert writer.close()
    assert writer.close()
    assert not any(thread.name == "penstock-cache" for thread in threading.enumerate())
    assert len(list(entries(tmp_path))) == 10
    assert not writer.offer(*keyed(tmp_path, 11))
    assert not writer.put(*keyed(tmp_path, 11), 30)


def test_a_writer_that_was_never_used_closes(tmp_path: Path) -> None:
    writer = CacheWriter(TokenCache(tmp_path, GiB))
    assert writer.flush(0)
    assert writer.close(0)


def test_an_offer_never_waits_for_the_disk(writer: CacheWriter, tmp_path: Path) -> None:
    with alone(tmp_path / "tokens"):  # the disk hangs, for all the thread knows
        taken = [writer.offer(*keyed(tmp_path, i)) for i in range(6)]
        assert taken == [True, True, False, False, False, False]
        assert writer.skipped == 4
        assert not writer.flush(0.05)
    assert writer.flush(30)
    assert len(list(entries(tmp_path))) == 2
    assert writer.offer(*keyed(tmp_path, 7))


def test_put_waits_for_room_and_stop_ends_the_wait(writer: CacheWriter, tmp_path: Path) -> None:
    done: list[bool] = []
    with alone(tmp_path / "tokens"):
        while writer.offer(*keyed(tmp_path, 0)):
            pass
        waiting = threading.Thread(target=lambda: done.append(writer.put(*keyed(tmp_path, 1), 30)))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        writer.stop()
        waiting.join(30)
        assert done == [False]


def test_put_waits_no_longer_than_it_is_told(writer: CacheWriter, tmp_path: Path) -> None:
    with alone(tmp_path / "tokens"):
        while writer.offer(*keyed(tmp_path, 0)):
            pass
        assert not writer.put(*keyed(tmp_path, 1), 0.01)
    assert writer.flush(30)
    assert [entry.chunk for entry in entries(tmp_path)] == [0]


def test_a_chunk_larger_than_the_queue_goes_through_alone(
    writer: CacheWriter, tmp_path: Path
) -> None:
    key, _ = keyed(tmp_path, 0)
    assert writer.put(key, sized(10 * STEP), 30)
    assert writer.flush(30)
    assert len(list(entries(tmp_path))) == 1


def test_a_disk_that_hangs_does_not_hold_up_close(writer: CacheWriter, tmp_path: Path) -> None:
    with alone(tmp_path / "tokens"):
        writer.offer(*keyed(tmp_path, 0))
        writer.offer(*keyed(tmp_path, 1))
        begun = time.monotonic()
        assert not writer.close(0.2)
        assert time.monotonic() - begun < 30
    assert writer.close(30)  # the disk is back: the thread ends
    assert len(list(entries(tmp_path))) == 1  # what was begun is finished, what waited was dropped


def test_an_unforeseen_error_turns_the_cache_off_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TokenCache(tmp_path, GiB)

    def when(file: str, index: int) -> float:
        raise LookupError(f"no chunk {index}")

    cache.foresee(when)
    writer = CacheWriter(cache)
    for i in range(3):
        writer.put(cache.key("a", i, "r"), sized(STEP), 30)
    assert writer.flush(30)
    assert not writer.offer(cache.key("a", 9, "r"), sized(STEP))
    assert writer.close()
    assert cache.off == "LookupError: no chunk 0"
    (record,) = caplog.records
    assert "LookupError" in record.getMessage()
    assert record.levelno == logging.WARNING
    assert record.exc_info is not None


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


def test_info_of_nothing_says_so_and_looks_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "here"))
    out = run("info")
    assert str(tmp_path / "here") in out
    assert "entries  0" in out


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


@pytest.mark.parametrize(("answer", "left"), [("n", 2), ("y", 0)])
def test_clear_asks_on_a_terminal(tmp_path: Path, answer: str, left: int) -> None:
    import pty

    fill(TokenCache(tmp_path, GiB), [0, 1])
    ours, theirs = pty.openpty()
    try:
        code = "from penstock.cli.cache import cache; cache()"
        asked = subprocess.Popen(
            [sys.executable, "-c", code, "clear", "--dir", str(tmp_path)],
            stdin=theirs,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.write(ours, f"{answer}\n".encode())
        out, _ = asked.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "Remove 2 entries" in out
    assert asked.returncode == (1 if left else 0)
    assert len(list(entries(tmp_path))) == left


@pytest.mark.parametrize("what", ["info", "verify", "clear"])
def test_a_folder_that_was_named_and_is_not_there_is_an_error(tmp_path: Path, what: str) -> None:
    done = CliRunner().invoke(command, [what, "--dir", str(tmp_path / "mistyped")])
    assert isinstance(done.exception, ConfigError)
    assert f"--dir {tmp_path / 'mistyped'}: there is no such folder" in str(done.exception)
    assert done.output == ""


@pytest.mark.parametrize("what", ["info", "verify", "clear"])
def test_the_usual_folder_may_not_be_there_yet(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "later"))
    assert str(tmp_path / "later") in run(what)


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("in the way")
    done = CliRunner().invoke(command, ["info", "--dir", str(tmp_path)])
    assert isinstance(done.exception, PenstockError)
    assert str(tmp_path) in str(done.exception)


@pytest.mark.parametrize("age", ["7 days", "-1d", "", "d", "1y"])
def test_an_age_that_is_none_is_refused(tmp_path: Path, age: str) -> None:
    done = CliRunner().invoke(command, ["clear", "--dir", str(tmp_path), f"--older-than={age}"])
    assert isinstance(done.exception, ConfigError)
    assert "7d" in str(done.exception)


def test_on_a_disk_where_only_what_is_written_may_be_locked_alone_the_cache_stays_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: an exclusive lock needs a file that is open for writing."""
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and os.readlink(f"/proc/self/fd/{file}").rpartition("/")[
            2
        ].startswith(TEMPORARY):
            writable = fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
            if not writable:
                raise OSError(errno.EBADF, "Bad file descriptor")
        real(file, operation)

    monkeypatch.setattr("penstock.read.cache_room.fcntl.flock", flock)
    path = tmp_path / f"{TEMPORARY}1"
    with path.open("wb") as writing:
        real(writing, fcntl.LOCK_EX)
        assert not remove_if_left(str(path), old=False)
        assert path.exists()
    assert remove_if_left(str(path), old=False)
    assert not path.exists()

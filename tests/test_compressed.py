"""Compressed files give what they would give uncompressed, in bounded memory, up to where they are damaged."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import BadRecord, CorruptFile
from penstock.read import storage
from penstock.read.cache import entries
from penstock.read.forwards import open_stream
from penstock.read.manifest import list_files
from penstock.read.storage import BLOCK, CompressedFile
from tests.reading import (
    bad_of,
    bytes_of,
    documents,
    documents_of_lanes,
    ids_of,
    open_loader,
    split_ids,
)


def zstd(data: bytes) -> bytes:
    """One frame."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return bytes(sink.getvalue())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "zst": zstd,
    "bz2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
}
each_codec = pytest.mark.parametrize("codec", list(COMPRESS))

# Every text differs from all others, and the numbers keep it from compressing into nothing.
TEXTS = [
    f"{i} é🙂 " + " ".join(str(j * j % 99991 * (i + 1)) for j in range(i % 60)) for i in range(400)
]
WANTED = [text.encode() for text in TEXTS]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
SEPARATED = "\n\n".join(TEXTS).encode()


def write(folder: Path, codec: str, data: bytes = JSONL, kind: str = "jsonl") -> Path:
    path = folder / f"a.{kind}.{codec}"
    path.write_bytes(COMPRESS[codec](data))
    return path


@each_codec
@pytest.mark.parametrize("chunk_bytes", [1024, 4093, 4 << 20])
def test_compressed_jsonl_gives_the_same_documents(
    tmp_path: Path, codec: str, chunk_bytes: int
) -> None:
    assert documents(bytes_of(write(tmp_path, codec), chunk_bytes=chunk_bytes)) == WANTED


@each_codec
def test_compressed_text_with_separators_gives_the_same_documents(
    tmp_path: Path, codec: str
) -> None:
    path = write(tmp_path, codec, SEPARATED, "txt")
    assert documents(bytes_of(path, separator="\n\n", chunk_bytes=1024)) == WANTED


@each_codec
def test_a_compressed_text_without_separator_is_one_document(tmp_path: Path, codec: str) -> None:
    assert documents(bytes_of(write(tmp_path, codec, SEPARATED, "txt"))) == [SEPARATED]


@each_codec
def test_a_document_longer_than_many_chunks_and_blocks_is_exact(tmp_path: Path, codec: str) -> None:
    long = b"".join(b"%d " % i for i in range(480_000))
    assert len(long) > 3 * BLOCK
    data = b"\n\n".join([b"before", long, b"after"])
    path = write(tmp_path, codec, data, "txt")
    got = documents(bytes_of(path, separator="\n\n", chunk_bytes=64 << 10, seq_len=65536))
    assert got == [b"before", long, b"after"]


@each_codec
def test_concatenated_streams_are_read_to_the_last(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.jsonl.{codec}"
    # Cut within lines: a member's end means nothing for the text.
    pieces = [JSONL[:1], JSONL[1:5000], b"", JSONL[5000:40_001], JSONL[40_001:]]
    path.write_bytes(b"".join(COMPRESS[codec](piece) for piece in pieces))
    assert documents(bytes_of(path, chunk_bytes=4096)) == WANTED


@each_codec
def test_a_member_that_ends_with_a_block_is_followed_by_the_next(
    tmp_path: Path, codec: str
) -> None:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    data = line * (2 * BLOCK // len(line) + 1)
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(COMPRESS[codec](data[:BLOCK]) + COMPRESS[codec](data[BLOCK:]))
    assert len(documents(bytes_of(path, seq_len=8192))) == len(data) // len(line)


@each_codec
def test_an_empty_compressed_file_is_nothing_beside_others(tmp_path: Path, codec: str) -> None:
    (tmp_path / f"empty.jsonl.{codec}").write_bytes(COMPRESS[codec](b""))
    write(tmp_path, codec)
    assert documents(bytes_of(tmp_path)) == WANTED


def test_files_of_every_codec_are_read_one_after_another(tmp_path: Path) -> None:
    for number, codec in enumerate(COMPRESS):
        lines = [json.dumps({"text": f"{codec} {i}"}) for i in range(50)]
        (tmp_path / f"{number}.jsonl.{codec}").write_bytes(
            COMPRESS[codec]("\n".join(lines).encode())
        )
    wanted = [f"{codec} {i}".encode() for codec in COMPRESS for i in range(50)]
    assert documents(bytes_of(tmp_path, chunk_bytes=1024)) == wanted


@each_codec
def test_threads_read_the_same_documents_in_the_same_order(tmp_path: Path, codec: str) -> None:
    assert documents(bytes_of(write(tmp_path, codec), chunk_bytes=1024), n_workers=3) == WANTED


@each_codec
def test_reading_in_order_decompresses_nothing_twice(tmp_path: Path, codec: str) -> None:
    data = b"".join(b"%d\n" % i for i in range(500_000))
    (file,) = list_files(write(tmp_path, codec, data, "txt"), whole=False)
    opened = CompressedFile(file, BLOCK, 1 << 30, threading.Event())
    try:
        got = [opened.read(at, 300_000) for at in range(0, len(data), 300_000)]
        assert b"".join(got) == data
        assert opened.restarts == 0
    finally:
        opened.close()


@each_codec
def test_reading_something_earlier_gives_the_right_bytes(tmp_path: Path, codec: str) -> None:
    data = b"".join(b"%d\n" % i for i in range(900_000))
    (file,) = list_files(write(tmp_path, codec, data, "txt"), whole=False)
    opened = CompressedFile(file, BLOCK, 1 << 30, threading.Event())
    try:
        for at in (
            6 * BLOCK - 5,
            3,
            5 * BLOCK,
            len(data) - 10,
            len(data),
            0,
            len(data) + 9 * BLOCK,
        ):
            assert opened.read(at, 100_000) == data[at : at + 100_000]
    finally:
        opened.close()


# Damage


def damaged(folder: Path, codec: str, how: str, data: bytes = JSONL, kind: str = "jsonl") -> Path:
    """A file that was cut short, or has some bits flipped, two thirds in."""
    packed = bytearray(COMPRESS[codec](data))
    at = 2 * len(packed) // 3
    if how == "truncated":
        del packed[at:]
    else:
        packed[at : at + 64] = bytes(byte ^ 0x5A for byte in packed[at : at + 64])
    path = folder / f"a.{kind}.{codec}"
    path.write_bytes(packed)
    return path


# Codecs work block by block, so there must be some before the damage.
MANY = [
    f"{i} " + " ".join(str((i * 7919 + j * 104729) % 1_000_003) for j in range(200))
    for i in range(800)
]
MANY_JSONL = "".join(json.dumps({"text": text}) + "\n" for text in MANY).encode()


@each_codec
def test_a_truncated_file_is_raised_by_name_and_says_what_to_do(tmp_path: Path, codec: str) -> None:
    path = damaged(tmp_path, codec, "truncated")
    with pytest.raises(
        CorruptFile,
        match=rf"a\.jsonl\.{codec} cannot be decompressed past byte \d+.*fetch it again",
    ):
        documents(bytes_of(path))


@each_codec
def test_flipped_bits_are_raised_by_the_name_of_the_file(tmp_path: Path, codec: str) -> None:
    # Checksums stand at the end of what they are for, so a line may turn out to be no JSON before that.
    path = damaged(tmp_path, codec, "flipped")
    with pytest.raises((CorruptFile, BadRecord), match=rf"a\.jsonl\.{codec}"):
        documents(bytes_of(path))


def sound(got: list[bytes]) -> int:
    """How many documents come before the first that is not as it was."""
    pairs = zip(got, MANY, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b.encode()), min(len(got), len(MANY)))


@each_codec
def test_skipping_a_cut_keeps_the_documents_before_it_and_no_part_of_another(
    tmp_path: Path, codec: str
) -> None:
    path = damaged(tmp_path, codec, "truncated", MANY_JSONL)
    got = documents(bytes_of(path, on_bad_record="skip", seq_len=65536))
    assert 440 < sound(got) == len(got) < 534


@each_codec
def test_skipping_a_cut_keeps_whole_separated_texts_only(tmp_path: Path, codec: str) -> None:
    path = damaged(tmp_path, codec, "truncated", "\n\n".join(MANY).encode(), "txt")
    got = documents(bytes_of(path, separator="\n\n", on_bad_record="skip", seq_len=65536))
    assert 440 < sound(got) == len(got) < 534


@each_codec
def test_skipping_flipped_bits_keeps_the_documents_before_them(tmp_path: Path, codec: str) -> None:
    path = damaged(tmp_path, codec, "flipped", MANY_JSONL)
    assert sound(documents(bytes_of(path, on_bad_record="skip", seq_len=65536))) > 440


# Arrow writes zstd without a checksum, so flipped bits in it may pass for text.
@pytest.mark.parametrize(
    ("codec", "how"),
    [
        *((codec, "truncated") for codec in COMPRESS),
        ("gz", "flipped"),
        ("bz2", "flipped"),
        ("xz", "flipped"),
    ],
)
def test_a_damaged_text_that_is_one_document_is_left_out_whole(
    tmp_path: Path, codec: str, how: str
) -> None:
    damaged(tmp_path, codec, how, "\n\n".join(MANY).encode(), "txt")
    (tmp_path / "b.txt").write_bytes(b"good")
    assert documents(bytes_of(tmp_path, on_bad_record="skip", seq_len=65536)) == [b"good"]


@each_codec
@pytest.mark.parametrize("chunk_bytes", [64 << 10, 4 << 20])
def test_a_cut_is_counted_once(tmp_path: Path, codec: str, chunk_bytes: int) -> None:
    path = damaged(tmp_path, codec, "truncated", MANY_JSONL)
    assert bad_of(bytes_of(path, on_bad_record="skip", seq_len=65536, chunk_bytes=chunk_bytes)) == {
        "corrupt": 1
    }


def test_damage_behind_a_document_that_is_too_long_costs_no_other(tmp_path: Path) -> None:
    # The damage lies in a block that was decompressed while the end of the long text was looked for.
    texts = ["first", "x" * 900_000, "second", "third"]
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(COMPRESS["gz"](data) + b"\x1f\x8b not a member of a gzip file")
    dataset = bytes_of(path, on_bad_record="skip", max_doc_bytes=1000, chunk_bytes=1024)
    assert documents(dataset) == [b"first", b"second", b"third"]
    assert bad_of(dataset) == {"too_long": 1, "corrupt": 1}


@each_codec
def test_a_file_that_is_not_compressed_at_all_is_corrupt_and_named(
    tmp_path: Path, codec: str
) -> None:
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(JSONL)
    with pytest.raises(CorruptFile, match=rf"a\.jsonl\.{codec} cannot be decompressed"):
        documents(bytes_of(path))


@each_codec
def test_a_compressed_file_of_zero_bytes_does_not_pass_for_good(tmp_path: Path, codec: str) -> None:
    (tmp_path / f"a.jsonl.{codec}").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(JSONL)
    # No codec writes nothing, not even for nothing: an upload broke off before its first byte.
    with pytest.raises(CorruptFile, match=rf"a\.jsonl\.{codec}"):
        documents(bytes_of(tmp_path))


# Resuming and lanes


@each_codec
def test_resuming_within_a_compressed_file_gives_the_same_tail(tmp_path: Path, codec: str) -> None:
    dataset = bytes_of(write(tmp_path, codec), chunk_bytes=2048)
    with open_loader(dataset) as loader:
        states, rows = [], []
        for batch in loader:
            rows.append((batch.inputs.tolist(), batch.targets.tolist()))
            states.append(loader.state_dict())
    for at in (0, 1, len(rows) // 2, len(rows) - 2):
        with open_loader(dataset) as loader:
            loader.load_state_dict(states[at])
            assert [(b.inputs.tolist(), b.targets.tolist()) for b in loader] == rows[at + 1 :]


@each_codec
@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_of_one_compressed_file_are_disjoint_and_complete(
    tmp_path: Path, codec: str, lanes: int
) -> None:
    dealt = documents_of_lanes(bytes_of(write(tmp_path, codec), chunk_bytes=1024), lanes)
    assert sorted(text for lane in dealt for text in lane) == sorted(WANTED)
    assert all(dealt)


def test_lanes_in_one_process_share_a_compressed_file(tmp_path: Path) -> None:
    dataset = bytes_of(write(tmp_path, "gz"), chunk_bytes=1024)
    alone = documents_of_lanes(dataset, 4)
    together: list[list[Any]] = [[] for _ in range(4)]
    with open_loader(dataset, lanes=4, n_workers=2) as loader:
        for batch in loader:
            # Which lane a row is of shows in its documents: no document is in two lanes.
            (spans,) = batch.provenance()
            lane = next(n for n, texts in enumerate(alone) if text_at(spans[0].offset) in texts)
            together[lane].append(batch)
    assert [split_ids(ids_of(batches)) for batches in together] == alone


def text_at(offset: int | None) -> bytes:
    """The text of the line that begins at an offset."""
    line = JSONL[offset:].partition(b"\n")[0]
    return str(json.loads(line)["text"]).encode()


# Memory

READ_ALL = """
import sys
from dataclasses import replace
from penstock import AsyncDataLoader, TextDataset

def high_water() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

data = TextDataset(sys.argv[1], tokenizer="byte", seq_len=65536, chunk_bytes=1 << 20)
data.read = replace(data.read, max_ratio=1e6)
with AsyncDataLoader(data, batch_size=8, n_workers=0, epochs=1) as loader:
    first = next(loader)
    before, tokens = high_water(), first.tokens
    for batch in loader:
        tokens += batch.tokens
print(tokens, (high_water() - before) << 10)
"""


# The others are read through the same steps of Python's as gz.
@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_memory_is_bounded_by_chunks_and_not_by_the_file(tmp_path: Path, codec: str) -> None:
    line = json.dumps({"text": "0123456789 " * 1000}).encode() + b"\n"
    text = 80 << 20
    path = tmp_path / f"a.jsonl.{codec}"
    # Members of the same bytes: compressing all of it would take longer than the test.
    path.write_bytes(
        COMPRESS[codec](line * (2**20 // len(line))) * (text // (2**20 // len(line) * len(line)))
    )
    ran = subprocess.run(
        [sys.executable, "-c", READ_ALL, path], capture_output=True, text=True, check=True
    )
    tokens, growth = map(int, ran.stdout.split())
    assert tokens > 0.98 * text
    assert growth < text // 2


def test_a_first_chunk_that_has_left_the_cache_is_made_again_in_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    data = bytes_of(write(tmp_path, "gz"), chunk_bytes=4096, cache=True)
    assert documents(data) == WANTED
    with open_loader(data, epochs=2) as loader:
        batches = [loader.next_batch()]
        (first,) = (entry for entry in entries(tmp_path / "cache") if entry.chunk == 0)
        first.path.unlink()  # as if another process had needed the room
        batches += list(loader)
        stats = loader.stats()
    assert split_ids(ids_of(batches)) == 2 * WANTED
    assert stats.cache_misses == 1


class FailsOnce:
    """A stream whose third read fails, as one of a disk or a network does."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._reads = 0

    def read1(self, size: int) -> bytes:
        self._reads += 1
        if self._reads == 3:
            raise OSError(errno.EIO, "the disk failed")
        return bytes(self._stream.read1(size))

    def close(self) -> None:
        self._stream.close()


@each_codec
def test_a_disk_that_failed_within_a_block_costs_no_byte_for_whoever_reads_next(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"".join(b"%d\n" % i for i in range(200_000))
    (file,) = list_files(write(tmp_path, codec, data, "txt"), whole=False)
    streams: list[Any] = []

    def opening(file: Any, remote: Any = None) -> Any:
        streams.append(open_stream(file, remote))
        return FailsOnce(streams[-1]) if len(streams) == 1 else streams[-1]

    monkeypatch.setattr(storage, "open_stream", opening)
    opened = CompressedFile(file, BLOCK, 1 << 30, threading.Event())
    try:
        with pytest.raises(OSError, match="the disk failed"):
            opened.read(0, 100)
        assert streams[0].closed
        assert opened.read(0, len(data)) == data
        assert opened.broken is None
    finally:
        opened.close()

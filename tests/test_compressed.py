"""Compressed files give what they would give uncompressed, in bounded memory, up to where they are damaged."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import CorruptFile
from tests.reading import bytes_of, documents, documents_of_lanes


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
def test_concatenated_streams_are_read_to_the_last(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.jsonl.{codec}"
    # Cut within lines: a member's end means nothing for the text.
    pieces = [JSONL[:1], JSONL[1:5000], b"", JSONL[5000:40_001], JSONL[40_001:]]
    path.write_bytes(b"".join(COMPRESS[codec](piece) for piece in pieces))
    assert documents(bytes_of(path, chunk_bytes=4096)) == WANTED


# Damage


def damaged(folder: Path, codec: str, data: bytes) -> Path:
    """A file that was cut short two thirds in."""
    packed = COMPRESS[codec](data)
    path = folder / f"a.jsonl.{codec}"
    path.write_bytes(packed[: 2 * len(packed) // 3])
    return path


# Codecs work block by block, so there must be some before the damage.
MANY = [
    f"{i} " + " ".join(str((i * 7919 + j * 104729) % 1_000_003) for j in range(200))
    for i in range(800)
]
MANY_JSONL = "".join(json.dumps({"text": text}) + "\n" for text in MANY).encode()


@each_codec
def test_a_cut_file_is_raised_by_name_and_skipping_it_keeps_the_documents_before(
    tmp_path: Path, codec: str
) -> None:
    path = damaged(tmp_path, codec, MANY_JSONL)
    words = rf"a\.jsonl\.{codec} cannot be decompressed past byte \d+.*fetch it again"
    with pytest.raises(CorruptFile, match=words):
        documents(bytes_of(path))
    got = documents(bytes_of(path, on_bad_record="skip", seq_len=65536))
    assert 440 < len(got) < 534
    assert got == [text.encode() for text in MANY[: len(got)]]


@each_codec
def test_a_file_that_is_not_compressed_at_all_is_corrupt_and_named(
    tmp_path: Path, codec: str
) -> None:
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(JSONL)
    with pytest.raises(CorruptFile, match=rf"a\.jsonl\.{codec} cannot be decompressed"):
        documents(bytes_of(path))


# Resuming and lanes


@each_codec
def test_lanes_of_one_compressed_file_are_disjoint_and_complete(tmp_path: Path, codec: str) -> None:
    dealt = documents_of_lanes(bytes_of(write(tmp_path, codec), chunk_bytes=1024), 3)
    assert sorted(text for lane in dealt for text in lane) == sorted(WANTED)
    assert all(dealt)


# Memory

READ_ALL = """
import sys
from penstock import AsyncDataLoader, TextDataset

def high_water() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

data = TextDataset(sys.argv[1], tokenizer="byte", seq_len=65536, chunk_bytes=1 << 20)
with AsyncDataLoader(data, batch_size=8, n_workers=0, epochs=1) as loader:
    first = next(loader)
    before, tokens = high_water(), first.tokens
    while (batch := loader.next_batch()) is not None:
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


READ_BOMB = """
import sys
import pyarrow.parquet, torch
from penstock import AsyncDataLoader, TextDataset
from penstock.errors import SourceError

def high_water() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = high_water()
try:
    with AsyncDataLoader(TextDataset(sys.argv[1], tokenizer="byte", seq_len=64), 8, epochs=1) as loader:
        next(loader)
except SourceError as error:
    print((high_water() - before) << 10, error)
"""


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_bomb_is_refused_by_name_before_it_fills_the_memory(tmp_path: Path, kind: str) -> None:
    path, piece = tmp_path / f"bomb.{kind}", b"x" * (4 << 20)
    if kind == "parquet":  # one dictionary value, in 4 GiB of rows
        values = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), [piece.decode()])
        pq.write_table(pa.table({"text": values}), path, compression="zstd", store_schema=False)
    else:  # one line of 4 GiB
        compress = COMPRESS[kind.removeprefix("jsonl.")]
        path.write_bytes(compress(b'{"text": "') + compress(piece) * 1024)
    assert path.stat().st_size < 8 << 20
    command = [sys.executable, "-c", READ_BOMB, path]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    growth, error = ran.stdout.split(maxsplit=1)
    assert path.name in error
    assert "exceeds max_doc_bytes" in error or "decode to more than" in error
    assert int(growth) < 1 << 30

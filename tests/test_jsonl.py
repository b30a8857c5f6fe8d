"""Records by byte range: whatever the cuts, each record once, in order, by whoever reads its beginning."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.read import ReadSettings
from penstock.read.listing import list_files
from penstock.read.reader import Reader
from penstock.read.storage import PlainFile
from penstock.read.text import parse_json, read_records
from tests.reading import bytes_of, documents, read_chunks, write_jsonl

relaxed = settings(max_examples=100, deadline=None, database=None)


@contextmanager
def file_of(data: bytes, name: str = "a.jsonl") -> Iterator[Path]:
    """A real file: hypothesis runs many examples in one test, so `tmp_path` would be shared by them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def flat(chunks: list[list[str]]) -> list[str]:
    return [text for chunk in chunks for text in chunk]


# Lines

texts = st.text(max_size=40) | st.text('aé漢🙂\n\r \\"\u2028\u0085\0', max_size=60)
blank = st.sampled_from([b"", b" ", b"\t", b"\r", b" \t \t \t "])


@st.composite
def jsonl(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A file as people write them, and the texts it holds."""
    wanted: list[str] = []
    lines: list[bytes] = []
    for text in draw(st.lists(st.none() | texts, max_size=6)):
        if text is None:
            lines.append(draw(blank))
            continue
        record: dict[str, Any] = {"text": text}
        if draw(st.booleans()):
            meta = {"text": "inner", "t": [1, None]}
            record = {"id": draw(st.integers()), "meta": meta, **record, "z": True}
        escaped = draw(st.booleans())
        lines.append(json.dumps(record, ensure_ascii=escaped).encode())
        wanted.append(text)
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    data = newline.join(lines) + draw(st.sampled_from([b"", newline]))
    if wanted and lines[0].startswith(b"{") and draw(st.booleans()):
        data = b"\xef\xbb\xbf" + data
    return data, [text for text in wanted if text]


@relaxed
@given(jsonl(), st.integers(1, 97) | st.sampled_from([127, 509, 4093, 1 << 20]))
def test_any_chunk_size_gives_every_line_once_and_in_order(
    made: tuple[bytes, list[str]], chunk_bytes: int
) -> None:
    data, wanted = made
    with file_of(data) as path:
        chunks, bad = read_chunks(path, chunk_bytes=chunk_bytes, on_bad_record="skip")
    assert bad == []
    assert flat(chunks) == wanted


@relaxed
@given(jsonl(), st.integers(5, 97))
def test_the_address_of_a_text_is_where_its_line_begins(
    made: tuple[bytes, list[str]], chunk_bytes: int
) -> None:
    data, wanted = made
    with file_of(data) as path:
        (file,) = list_files(path)
        reader = Reader(ReadSettings(chunk_bytes=chunk_bytes), 0, 1)
        chunks = [reader.read(ref) for ref in reader.inspect(file)[0]]
    found = []
    for chunk in chunks:
        for text, row in zip(chunk.texts.to_pylist(), chunk.rows.tolist(), strict=True):
            line = data[row:].removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
            assert json.loads(line)["text"] == text
            assert row == 0 or data[row - 1 : row] == b"\n"
            found += [text] if text else []
    assert found == wanted


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "before", [b"", b" " * 9, b"\t" * 100, b" " * 500 + b"\r", BOM, BOM + b"\r\n\r"]
)
def test_white_space_and_a_byte_order_mark_are_no_record(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(before + b'\n{"text": "a"}\n \r\n\n{"text": "b"}\n')
    assert documents(bytes_of(path)) == [b"a", b"b"]
    path.write_bytes(BOM + b'{"text": "a"}')
    assert documents(bytes_of(path)) == [b"a"]


@pytest.mark.parametrize("bad", [b"", b'{"text": 7, "score": 3}\n'])
def test_other_columns_come_with_the_text(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a", "score": 1}\n' + bad + b'{"score": 2, "text": "b"}\n')
    records = read_records(PlainFile(list_files(path)[0]), 0, 1000, b"\n", 1000)
    rejected: list[int] = []
    table = parse_json(records, "text", lambda row, *_: rejected.append(row), all_columns=True)
    assert table["score"].to_pylist() == ([1, 3, 2] if bad else [1, 2])
    assert rejected == ([26] if bad else [])


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_document_of_50_mb_that_spans_many_chunks_is_exact(tmp_path: Path, kind: str) -> None:
    long = "".join(f"{i} é🙂 " for i in range(360_000)) * 11
    assert len(long.encode()) > 50_000_000
    wanted = ["before", long, "after"]
    if kind == "jsonl":
        chunks, _ = read_chunks(write_jsonl(tmp_path / "a.jsonl", wanted), chunk_bytes=1 << 20)
    else:
        (tmp_path / "a.txt").write_bytes("\n\n".join(wanted).encode())
        chunks, _ = read_chunks(tmp_path / "a.txt", separator=b"\n\n", chunk_bytes=1 << 20)
    assert len(chunks) >= 50
    assert flat(chunks) == wanted


# Separators


def split(data: bytes, separator: bytes) -> list[bytes]:
    """The rule, read from the front: a text ends where a separator begins, and of separators that
    overlap the next text begins after the last one. Empty texts are nothing."""
    found, at, m = [], 0, len(separator)
    while (here := data.find(separator, at)) >= 0:
        found.append(data[at:here])
        while (overlapping := data.find(separator, here + 1, here + 2 * m - 1)) >= 0:
            here = overlapping
        at = here + m
    return [text for text in [*found, data[at:]] if text]


separators = st.sampled_from(
    [b"\n", b"\n\n", b"\n\n\n", b"aXa", b"aXaXa", b"abab", b"\r\n", b"<|end|>", b"\0", b"ab"]
)


@st.composite
def separated(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Bytes in which the separator, parts of it and overlaps of it are frequent."""
    separator = draw(separators)
    parts = [separator, separator[:1], separator[1:], separator[:-1]]
    pieces = [*parts, b"x", b"aX", b"\n", b"text", b"\xc3\xa9"]
    return b"".join(draw(st.lists(st.sampled_from(pieces), max_size=30))), separator


@relaxed
@given(separated(), st.lists(st.integers(0, 120), max_size=8))
def test_any_cut_gives_every_text_once_and_in_order(
    made: tuple[bytes, bytes], cuts: list[int]
) -> None:
    data, separator = made
    edges = sorted({0, *cuts, len(data) + 1})
    got: list[bytes] = []
    with file_of(data, "a.txt") as path:
        source = PlainFile(list_files(path, whole=False)[0])
        for lo, hi in itertools.pairwise(edges):
            records = read_records(source, lo, hi, separator, 1 << 20)
            for start, end in zip(records.starts.tolist(), records.ends.tolist(), strict=True):
                assert lo <= records.offset + start < hi
                got += [records.buffer[start:end]] if end > start else []
    assert got == split(data, separator)


def test_separated_text_reaches_the_stream_as_it_was(tmp_path: Path) -> None:
    wanted = [f"text {i}\nwith é lines\r\n" + "x" * (97 * i % 400) for i in range(80)]
    (tmp_path / "a.txt").write_bytes("<|end|>".join(wanted).encode())
    assert documents(bytes_of(tmp_path, separator="<|end|>", chunk_bytes=1024)) == [
        text.encode() for text in wanted
    ]

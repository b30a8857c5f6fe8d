"""Read the JSONL records that start within a byte range.

In:    a byte range of a file.
Out:   the text field of each line, with the line's byte offset as its address.
Where: worker threads.
State: none.
Cost:  Arrow's parser on the whole range (500 MB/s). Where that fails, or a line has no such
       field, the range is parsed again line by line, so that only the lines at fault are lost.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from penstock.read.columns import binaries, nothing
from penstock.read.delimited import Records
from penstock.read.records import I64, Judge, clean, reject_cut
from penstock.types import Address, Documents, FileRef

BOM = b"\xef\xbb\xbf"


def parse(file: FileRef, records: Records, field: str, judge: Judge) -> Documents:
    """The texts of the records, in order. Lines of white space only are no records."""
    starts, ends = records.starts, records.ends
    if records.cut:
        starts, ends = starts[:-1], ends[:-1]
    rows = starts + records.offset
    if len(rows) and rows[0] == 0 and records.buffer.startswith(BOM):
        starts = starts.copy()
        starts[0] += len(BOM)
    some = ~_blank(records.buffer, starts, ends)
    starts, ends, rows = starts[some], ends[some], rows[some]
    column = _parse_at_once(records.buffer, starts, ends, field)
    if column is None:
        column = _parse_lines(file, records.buffer, starts, ends, rows, field, judge)
    documents = clean(column, rows, lambda i: Address(file.name, None, int(rows[i])), judge)
    if records.cut:
        reject_cut(file, records, judge)
    return documents


def _blank(buffer: bytes, starts: I64, ends: I64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which lines have nothing but white space."""
    blank = ends <= starts
    data = np.frombuffer(buffer, np.uint8)
    some = np.flatnonzero(~blank)
    for i in some[np.isin(data[starts[some]], list(b" \t\r"))].tolist():
        blank[i] = not buffer[starts[i] : ends[i]].strip()
    return blank


def _parse_at_once(buffer: bytes, starts: I64, ends: I64, field: str) -> pa.Array | None:
    if len(starts) == 0:
        return nothing(pa.large_string())
    # To Arrow a newline is white space, so it would take an object that spans lines. One that
    # begins and ends with braces cannot: no object goes on with "{" after "}".
    data = np.frombuffer(buffer, np.uint8)
    last = ends - 1
    last = last - (data[last] == ord("\r"))
    if not ((data[starts] == ord("{")).all() and (data[last] == ord("}")).all()):
        return None
    block = memoryview(buffer)[int(starts[0]) : int(ends[-1])]
    try:
        table = pj.read_json(
            pa.BufferReader(pa.py_buffer(block)),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(field, pa.string())]),
                unexpected_field_behavior="ignore",
            ),
        )
    except (pa.ArrowException, OverflowError):
        return None
    column = table.column(field)
    # A null is either null or no such field, and lines and rows may not agree (two objects in
    # one line): the slow way tells these apart.
    if column.null_count or len(column) != len(starts):
        return None
    return pa.concat_arrays(column.cast(pa.large_string()).chunks)


def _parse_lines(
    file: FileRef, buffer: bytes, starts: I64, ends: I64, rows: I64, field: str, judge: Judge
) -> pa.Array:
    texts: list[bytes] = []
    for start, end, row in zip(starts.tolist(), ends.tolist(), rows.tolist(), strict=True):
        text, reason, detail = _line(buffer[start:end], field)
        if reason:
            judge.reject(Address(file.name, None, row), reason, detail)
        texts.append(text)
    return binaries(texts)


def _line(line: bytes, field: str) -> tuple[bytes, str, str]:
    """A line's text, or why there is none."""
    line = line.removeprefix(BOM)  # files with such a mark, one put after the other
    try:
        # What the other fields hold is nobody's business here: bytes that are no text stand for
        # themselves, and are judged only if they turn up in this one.
        value = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        return b"", "invalid_json", f"not JSON: {error}"
    if not isinstance(value, dict):
        return b"", "invalid_json", f"not a JSON object but {type(value).__name__}"
    if field not in value:
        return (
            b"",
            "missing_field",
            f"no field {field!r} among {', '.join(map(repr, list(value)[:8])) or 'none'}",
        )
    text = value[field]
    if text is None:
        return b"", "", ""
    if not isinstance(text, str):
        return b"", "not_a_string", f"field {field!r} is {type(text).__name__}, not text"
    try:
        return text.encode(), "", ""
    except UnicodeEncodeError as error:
        return b"", "invalid_utf8", f"field {field!r} is not UTF-8 at character {error.start}"

"""Parse JSON lines into columns.

Arrow's parser takes the whole range at once (500 MB/s). If that fails, or a line has no text, the range is
parsed again line by line, so that only the bad lines are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from penstock.read.arrow_utils import binaries, empty
from penstock.read.text import Records

BOM = b"\xef\xbb\xbf"


def drop_blank(records: Records) -> None:
    """Drop lines of white space only."""
    starts, ends, buffer = records.starts, records.ends, records.buffer
    filled = ends > starts
    some = np.flatnonzero(filled)
    first = np.frombuffer(buffer, np.uint8)[starts[some]]
    for i in some[np.isin(first, list(b" \t\r\xef"))].tolist():
        filled[i] = bool(buffer[starts[i] : ends[i]].removeprefix(BOM).strip())
    records.keep(filled)


def parse(
    records: Records,
    field: str,
    reject: Callable[[int, str, str], None],
    all_columns: bool = False,
) -> pa.Table:
    """Return the column `field`, of texts, or all columns, as Arrow infers them.

    `reject` is called with the row of a bad line, a reason and details.
    """
    table = _parse_at_once(records, field, all_columns)
    return _parse_lines(records, field, reject, all_columns) if table is None else table


def _parse_at_once(records: Records, field: str, all_columns: bool) -> pa.Table | None:
    starts, ends = records.starts, records.ends
    if len(starts) == 0:
        return pa.table({field: empty(pa.large_string())})
    # To Arrow a newline is white space, so it would take an object that spans lines. One that
    # begins and ends with braces cannot: no object continues with "{" after "}".
    data = np.frombuffer(records.buffer, np.uint8)
    last = ends - 1
    last = last - (data[last] == ord("\r"))
    if not ((data[starts] == ord("{")).all() and (data[last] == ord("}")).all()):
        return None
    block = memoryview(records.buffer)[int(starts[0]) : int(ends[-1])]
    try:
        table = pj.read_json(
            pa.BufferReader(pa.py_buffer(block)),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(field, pa.string())]),
                unexpected_field_behavior="infer" if all_columns else "ignore",
            ),
        )
    except (pa.ArrowException, OverflowError):
        return None
    # A null is either null or no such field, and lines and rows may not agree (two objects in one
    # line): line by line these are told apart.
    if table.column(field).null_count or len(table) != len(starts):
        return None
    return table


def _parse_lines(
    records: Records, field: str, reject: Callable[[int, str, str], None], all_columns: bool
) -> pa.Table:
    texts: list[bytes] = []
    values: list[dict[str, Any]] = []
    places = (records.starts.tolist(), records.ends.tolist(), records.rows.tolist())
    for start, end, row in zip(*places, strict=True):
        value, text, reason, detail = _parse_line(records.buffer[start:end], field)
        if reason:
            reject(row, reason, detail)
        texts.append(text)
        values.append(value)
    names = {name: None for value in values for name in value if all_columns and name != field}
    columns = {name: pa.array([value.get(name) for value in values]) for name in names}
    return pa.table({field: binaries(texts), **columns})


def _parse_line(line: bytes, field: str) -> tuple[dict[str, Any], bytes, str, str]:
    """Return a line's object and its text, or why it has none."""
    try:
        # Bytes that are not UTF-8 stand for themselves: they matter only in this field.
        value = json.loads(line.removeprefix(BOM).decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        return {}, b"", "invalid_json", f"not JSON: {error}"
    if not isinstance(value, dict):
        return {}, b"", "invalid_json", f"not a JSON object but {type(value).__name__}"
    if field not in value:
        fields = ", ".join(map(repr, list(value)[:8])) or "none"
        return value, b"", "missing_field", f"no field {field!r} among {fields}"
    text = value[field]
    if text is not None and not isinstance(text, str):
        detail = f"field {field!r} is {type(text).__name__}, not text"
        return value, b"", "not_a_string", detail
    try:
        return value, (text or "").encode(), "", ""
    except UnicodeEncodeError as error:
        detail = f"field {field!r} is not UTF-8 at character {error.start}"
        return value, b"", "invalid_utf8", detail

"""Read records by byte range: JSON lines, texts between separators, whole files.

The start of a record depends only on the bytes around it. So any range can be read alone, and
ranges that tile a file give every record exactly once.

Arrow's JSON parser reads a whole range at once (500 MB/s). If that fails, or a line has no text,
the range is parsed again line by line, so that only bad lines are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from penstock.order.shuffle import I64
from penstock.read.arrow_utils import binaries, integers
from penstock.read.storage import AnyFile
from penstock.types import KiB, MiB

BOM = b"\xef\xbb\xbf"
TAIL = 64 * KiB
"""Read first beyond a range of records, because its last record ends after the range."""


@dataclass(slots=True)
class Records:
    """Records of a range, as positions in `buffer`, which starts at byte `offset` of the file."""

    buffer: bytes
    offset: int
    starts: I64
    ends: I64
    last: bool
    cut: bool = False
    """True if the last record is longer than allowed, so its end is unknown."""
    unended: bool = False
    """True if the last record ends with the file, not with a separator."""

    @property
    def rows(self) -> I64:
        """The byte offset of each record in the file."""
        return self.starts + self.offset

    def keep(self, wanted: Any) -> None:
        self.starts, self.ends = self.starts[wanted], self.ends[wanted]


def read_records(source: AnyFile, lo: int, hi: int, separator: bytes, max_bytes: int) -> Records:
    """Return the records that start in [lo, hi)."""
    m = len(separator)
    offset = max(0, lo - m)
    wanted = hi + m - offset
    buffer = source.read(offset, wanted)
    size = offset + len(buffer)
    at_end = len(buffer) < wanted
    found = _find_all(buffer, separator)
    # If separators overlap ("\n\n" in "\n\n\n"), the text begins after the last one.
    final = np.ones(len(found), bool)
    final[:-1] = np.diff(found) >= m
    starts = found[final] + m
    starts = starts[(starts >= lo - offset) & (starts < min(hi, size) - offset)]
    if lo == 0 < hi and size > 0 and not buffer.startswith(separator):
        starts = np.concatenate([np.zeros(1, np.int64), starts])
    last = at_end and size <= hi
    if len(starts) == 0:
        return Records(b"", offset, starts, starts, last)
    after = np.searchsorted(found, starts)
    ends = np.append(found, -1)[after]
    records = Records(buffer, offset, starts, ends, last)
    if ends[-1] < 0:
        _extend(records, source, separator, max_bytes, at_end)
    return records


def _extend(
    records: Records, source: AnyFile, separator: bytes, max_bytes: int, at_end: bool
) -> None:
    """Read more until the last record is complete, or longer than allowed."""
    buffer, start = records.buffer, int(records.starts[-1])
    step, end = TAIL, -1
    while end < 0 and not at_end and len(buffer) - start <= max_bytes:
        part = source.read(records.offset + len(buffer), step)
        searched = max(start, len(buffer) - len(separator) + 1)
        buffer += part
        end = buffer.find(separator, searched)
        at_end = len(part) < step
        step = min(4 * step, 16 * MiB)
    records.buffer = buffer
    records.ends[-1] = end if end >= 0 else len(buffer)
    records.unended, records.cut = end < 0 and at_end, end < 0 and not at_end


def _find_all(buffer: bytes, separator: bytes) -> I64:
    """Return the positions of the separator, overlaps included."""
    data, m = np.frombuffer(buffer, np.uint8), len(separator)
    if len(data) < m:
        return np.empty(0, np.int64)
    found = np.flatnonzero(data[: len(data) - m + 1] == separator[0])
    for i in range(1, m):
        found = found[data[found + i] == separator[i]]
    return found


def split(records: Records) -> pa.Array:
    """Return the texts between separators."""
    if len(records.starts) == 0:
        return pa.nulls(0, pa.large_binary())
    # Text and separator alternate, so every other value between these offsets is a text.
    offsets = np.column_stack([records.starts, records.ends]).reshape(-1)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(records.buffer)]
    alternating = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    return alternating.take(integers(np.arange(0, len(offsets) - 1, 2)))


# JSON lines


def drop_blank(records: Records) -> None:
    """Drop lines that are empty or only white space."""
    starts, ends, buffer = records.starts, records.ends, records.buffer
    filled = ends > starts
    some = np.flatnonzero(filled)
    first = np.frombuffer(buffer, np.uint8)[starts[some]]
    for i in some[np.isin(first, list(b" \t\r\xef"))].tolist():
        filled[i] = bool(buffer[starts[i] : ends[i]].removeprefix(BOM).strip())
    records.keep(filled)


def parse_json(
    records: Records, field: str, reject: Callable[[int, str, str], None], all_columns: bool = False
) -> pa.Table:
    """Return the text column `field`, or all columns with types inferred by Arrow.

    Calls `reject` with the row of each bad line, a reason and details.
    """
    table = _parse_at_once(records, field, all_columns) if len(records.starts) else None
    if table is not None:
        return table
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


def _parse_at_once(records: Records, field: str, all_columns: bool) -> pa.Table | None:
    starts, ends = records.starts, records.ends
    # Arrow treats a newline as white space, so it would accept an object that spans lines. That is
    # impossible if each line begins and ends with a brace: no object continues with "{" after "}".
    data = np.frombuffer(records.buffer, np.uint8)
    last = ends - 1 - (data[ends - 1] == ord("\r"))
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
    # A null may be a missing field, and lines and rows may differ (two objects in one line).
    # Parsing line by line distinguishes these.
    agrees = not table.column(field).null_count and len(table) == len(starts)
    return table if agrees else None


def _parse_line(line: bytes, field: str) -> tuple[dict[str, Any], bytes, str, str]:
    """Return a line's object, its text, and the reason and detail if it is bad."""
    try:
        # Invalid UTF-8 is escaped, because it matters only in this field.
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
        return value, b"", "not_a_string", f"field {field!r} is {type(text).__name__}, not text"
    try:
        return value, (text or "").encode(), "", ""
    except UnicodeEncodeError as error:
        detail = f"field {field!r} is not UTF-8 at character {error.start}"
        return value, b"", "invalid_utf8", detail

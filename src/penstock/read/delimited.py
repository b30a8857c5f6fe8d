"""Find the records that start within a byte range, by their separator.

In:    a range of a file's bytes and a separator (a newline for JSONL).
Out:   a buffer and where in it each record begins and ends.
Where: worker threads.
State: none: whether a record starts at a byte depends on the bytes around it only, so any range
       can be read alone, and ranges that tile the file give every record exactly once.
Cost:  the range itself, one separator before it, and the rest of its last record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.read.storage import AnyFile
from penstock.types import MiB

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Records:
    """Records of a range, as positions in `buffer`; `offset` is where the buffer lies in the file."""

    buffer: bytes
    offset: int
    starts: I64
    ends: I64
    last: bool
    cut: bool = False
    """The last record is longer than was allowed, and its end was not looked for."""
    unended: bool = False
    """The last record ends with the file, not with a separator."""


def read_records(source: AnyFile, lo: int, hi: int, separator: bytes, max_bytes: int) -> Records:
    """The records that start in [lo, hi)."""
    m = len(separator)
    offset = max(0, lo - m)
    wanted = hi + m - offset
    buffer = source.read(offset, wanted)
    size = offset + len(buffer)
    at_end = len(buffer) < wanted
    found = find_all(buffer, separator)
    # Of separators that overlap ("\n\n" in "\n\n\n") the text begins after the last one.
    true = np.ones(len(found), bool)
    true[:-1] = np.diff(found) >= m
    starts = found[true] + m
    starts = starts[(starts >= lo - offset) & (starts < min(hi, size) - offset)]
    if lo == 0 < hi and size > 0 and not buffer.startswith(separator):
        starts = np.concatenate([np.zeros(1, np.int64), starts])
    last = at_end and size <= hi
    if len(starts) == 0:
        return Records(b"", offset, starts, starts, last)
    after = np.searchsorted(found, starts)
    ends = np.where(after < len(found), np.append(found, 0)[np.minimum(after, len(found))], -1)
    records = Records(buffer, offset, starts, ends, last)
    if ends[-1] < 0:
        _extend(records, source, separator, max_bytes, at_end)
    return records


def _extend(
    records: Records, source: AnyFile, separator: bytes, max_bytes: int, at_end: bool
) -> None:
    """Read on until the last record is complete, or longer than allowed."""
    start = int(records.starts[-1])
    parts = [records.buffer]
    have = len(records.buffer)
    overlap = len(separator) - 1
    tail = records.buffer[max(start, have - overlap) :]
    step = MiB // 4
    found = False
    while not (found or at_end or have - start > max_bytes):
        part = source.read(records.offset + have, step)
        at_end = len(part) < step
        searched = tail + part
        at = searched.find(separator)
        found = at >= 0
        parts.append(part)
        records.ends[-1] = have - len(tail) + at
        have += len(part)
        tail = searched[len(searched) - overlap :]
        step = min(2 * step, 16 * MiB)
    if not found:
        records.ends[-1] = have
        records.unended = at_end
        records.cut = not at_end
    records.buffer = b"".join(parts)


def find_all(buffer: bytes, separator: bytes) -> I64:
    """Where the separator stands in the buffer, overlaps included."""
    data = np.frombuffer(buffer, np.uint8)
    m = len(separator)
    if len(data) < m:
        return np.empty(0, np.int64)
    found = np.flatnonzero(data[: len(data) - m + 1] == separator[0])
    for i in range(1, m):
        found = found[data[found + i] == separator[i]]
    return found

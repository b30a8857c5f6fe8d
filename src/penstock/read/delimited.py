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

from penstock.read.storage import CompressedFile, PlainFile
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
    cut: bool
    """The last record is longer than was allowed, and its end was not looked for."""


def read_records(source: PlainFile | CompressedFile, lo: int, hi: int, separator: bytes, max_bytes: int) -> Records:
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
    if lo == 0 and size > 0 and not buffer.startswith(separator):
        starts = np.concatenate([np.zeros(1, np.int64), starts])
    last = at_end and size <= hi
    if len(starts) == 0:
        return Records(b"", offset, starts, starts, last, False)
    after = np.searchsorted(found, starts)
    ends = np.where(after < len(found), np.append(found, 0)[np.minimum(after, len(found))], -1)
    cut = False
    if ends[-1] < 0:
        buffer, end, cut = _extend(source, buffer, offset, int(starts[-1]), separator, max_bytes, at_end)
        ends[-1] = end
    return Records(buffer, offset, starts, ends, last, cut)


def _extend(
    source: PlainFile | CompressedFile,
    buffer: bytes,
    offset: int,
    start: int,
    separator: bytes,
    max_bytes: int,
    at_end: bool,
) -> tuple[bytes, int, bool]:
    """Read on until the record that begins at `start` is complete, or longer than allowed."""
    parts = [buffer]
    have = len(buffer)
    tail = buffer[max(start, have - len(separator) + 1) :]
    step = MiB // 4
    while not at_end:
        if have - start > max_bytes:
            return b"".join(parts), have, True
        part = source.read(offset + have, step)
        at_end = len(part) < step
        at = (tail + part).find(separator)
        parts.append(part)
        if at >= 0:
            end = have - len(tail) + at
            return b"".join(parts), end, False
        have += len(part)
        tail = (tail + part)[-(len(separator) - 1) :] if len(separator) > 1 else b""
        step = min(2 * step, 16 * MiB)
    return b"".join(parts), have, False


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

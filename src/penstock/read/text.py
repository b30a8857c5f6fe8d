"""Read records by byte range: lines, texts between separators, whole files.

Whether a record starts at a byte depends only on the bytes around it. So any range can be read alone,
and ranges that tile a file give every record exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.order.shuffle import I64
from penstock.read.arrow_utils import empty, integers
from penstock.read.storage import AnyFile
from penstock.types import MiB


@dataclass(slots=True)
class Records:
    """Records of a range, as positions in `buffer`, which begins at byte `offset` of the file."""

    buffer: bytes
    offset: int
    starts: I64
    ends: I64
    last: bool
    cut: bool = False
    """True if the last record is longer than allowed, and its end was not searched."""
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
    # Of separators that overlap ("\n\n" in "\n\n\n") the text begins after the last one.
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
    """Read on until the last record is complete, or longer than allowed."""
    buffer, start = records.buffer, int(records.starts[-1])
    step, end = MiB // 4, -1
    while end < 0 and not at_end and len(buffer) - start <= max_bytes:
        part = source.read(records.offset + len(buffer), step)
        searched = max(start, len(buffer) - len(separator) + 1)
        buffer += part
        end = buffer.find(separator, searched)
        at_end = len(part) < step
        step = min(2 * step, 16 * MiB)
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
        return empty(pa.large_binary())
    # Text and separator alternate, so every other value between these offsets is a text.
    offsets = np.column_stack([records.starts, records.ends]).reshape(-1)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(records.buffer)]
    alternating = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    return alternating.take(integers(np.arange(0, len(offsets) - 1, 2)))


def read_whole(source: AnyFile, max_bytes: int) -> bytes:
    """Return a whole file, or a little more than `max_bytes` of it."""
    parts: list[bytes] = []
    have = 0
    while have <= max_bytes and (part := source.read(have, 16 * MiB)):
        parts.append(part)
        have += len(part)
    return b"".join(parts)

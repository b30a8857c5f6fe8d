"""Convert between Arrow, numpy and bytes.

Avoids what would delay the first batch: `pa.array`, `pa.scalar` and `to_numpy` import pandas if it
is installed, which takes 0.1 s, and casts import `pyarrow.compute`, which takes 25 ms. Code that
needs it imports it late.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.order.shuffle import I64


def integers(values: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Int64Array:
    """Return an Arrow array over the same memory."""
    values = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def as_numpy(column: pa.Array) -> np.ndarray[Any, Any]:
    """Return integers without nulls as a numpy array over the same memory."""
    return np.from_dlpack(column)


def booleans(values: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.BooleanArray:
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def binaries(values: Sequence[bytes], kind: pa.DataType | None = None) -> pa.Array:
    """Return an array of byte strings, or of texts if `kind` is large_string (must be UTF-8)."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind or pa.large_binary(), len(values), buffers)


@lru_cache(64)
def scalar(value: bytes, kind: pa.DataType | None = None) -> pa.Scalar:
    """Return a scalar of a byte string or text."""
    return binaries([value], kind)[0]


def is_text(kind: pa.DataType) -> bool:
    """Return True for strings and byte strings of every kind."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return re.fullmatch("(large_)?(string|binary)(_view)?", str(kind)) is not None


def widened(column: Any) -> Any:
    """Return strings or byte strings with 64-bit offsets, over the same bytes if possible."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    wide = pa.large_string() if "string" in str(kind) else pa.large_binary()
    if column.type == wide:
        return column
    plain = isinstance(column, pa.Array) and column.type in (pa.string(), pa.binary())
    if not plain or not len(column):
        return column.cast(wide)
    validity, offsets, data = column.buffers()
    offsets = pa.py_buffer(np.frombuffer(offsets, np.int32).astype(np.int64))
    buffers = [validity, offsets, data or pa.py_buffer(b"")]
    return pa.Array.from_buffers(wide, len(column), buffers, column.null_count, column.offset)


def combined(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of texts as one array with 64-bit offsets."""
    # Widened first, because 32-bit offsets are limited to 2 GiB.
    column = widened(column)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def lengths(column: pa.Array) -> I64:
    """Return the length in bytes of each text in a column with 64-bit offsets."""
    if not len(column):
        return np.empty(0, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    return np.diff(offsets[column.offset : column.offset + len(column) + 1])

"""Arrow columns of what numpy or Python has.

In:    arrays, lists of bytes.
Out:   Arrow arrays and scalars.
Where: any thread.
State: none.

Not by `pa.array` or `pa.scalar`: these import pandas wherever it is installed, to see whether they were
given something of its own. That takes 0.3 s, for which the first batch would have to wait. Nor by way of
`pyarrow.compute` or what uses it, as `cast` does: its import writes the documentation of 300 functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa


def call(function: str, *arguments: Any) -> Any:
    """What Arrow's function of that name makes of columns and scalars."""
    try:
        from pyarrow._compute import call_function  # what `pyarrow.compute` has it from
    except ImportError:
        from pyarrow.compute import call_function
    return call_function(function, list(arguments))


def widened(column: pa.Array) -> pa.Array:
    """A column of strings or byte strings with 64-bit offsets, over the same bytes where that can be."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type):
        return column
    text = (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
    wide = pa.large_string() if text else pa.large_binary()
    if column.null_count or not (
        pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    ):
        return column.cast(wide)
    _, raw, data = column.buffers()
    if raw is None:
        return nothing(wide)
    offsets = np.frombuffer(raw, np.int32)[column.offset : column.offset + len(column) + 1].astype(
        np.int64
    )
    return pa.Array.from_buffers(wide, len(column), [None, pa.py_buffer(offsets), data])


def nothing(kind: pa.DataType) -> pa.Array:
    """A column without values."""
    return pa.nulls(0, kind)


def integers(values: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Int64Array:
    """A column over an array, without a copy."""
    values = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def flags(values: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.BooleanArray:
    """A column of truths."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def binaries(values: Sequence[bytes], kind: pa.DataType | None = None) -> pa.Array:
    """A column of byte strings; or of texts, if `kind` is large_string and they are UTF-8."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    data = pa.py_buffer(b"".join(values))
    return pa.Array.from_buffers(
        kind or pa.large_binary(), len(values), [None, pa.py_buffer(offsets), data]
    )


@lru_cache(64)
def scalar(value: bytes, kind: pa.DataType | None = None) -> pa.Scalar:
    """A single byte string, or text."""
    return binaries([value], kind)[0]

"""Arrow columns of what numpy or Python has.

In:    arrays, lists of bytes.
Out:   Arrow arrays and scalars.
Where: any thread.
State: none.

Not by `pa.array` or `pa.scalar`: these import pandas wherever it is installed, to see whether they were
given something of its own. That takes 0.3 s, for which the first batch would have to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


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
    return pa.Array.from_buffers(kind or pa.large_binary(), len(values), [None, pa.py_buffer(offsets), data])


def scalar(value: bytes, kind: pa.DataType | None = None) -> pa.Scalar:
    """A single byte string, or text."""
    return binaries([value], kind)[0]

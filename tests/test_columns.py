"""Arrow columns without what takes long to import: the same values as Arrow's own ways give."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.read.columns import call, flags, scalar, widened

VALUES = ["a", "", "two words", "é🙂", None, "x" * 300]
KINDS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
]


def column(kind: pa.DataType, nulls: bool) -> pa.Array:
    values = [value for value in VALUES if nulls or value is not None]
    texts = (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
    return pa.array(values if texts else [None if v is None else v.encode() for v in values], kind)


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "part", [slice(None), slice(1, 4), slice(2, 2)], ids=["all", "some", "none"]
)
def test_a_widened_column_has_the_same_values(kind: pa.DataType, nulls: bool, part: slice) -> None:
    narrow = column(kind, nulls)[part]
    wide = widened(narrow)
    wide.validate(full=True)
    assert wide.to_pylist() == narrow.to_pylist()
    assert wide.type in (pa.large_string(), pa.large_binary())
    assert pa.types.is_large_string(wide.type) == ("string" in str(kind))


def test_a_column_of_codes_is_written_out() -> None:
    codes = pa.array(["b", "a", "b", None]).dictionary_encode()
    assert widened(codes).equals(pa.array(["b", "a", "b", None], pa.large_string()))


def test_bytes_are_shared_where_they_can_be() -> None:
    narrow = column(pa.string(), nulls=False)
    assert widened(narrow).buffers()[2].address == narrow.buffers()[2].address


def test_functions_are_those_of_pyarrow_compute() -> None:
    texts = column(pa.large_binary(), nulls=True)
    mask = flags(pc.is_valid(texts).to_numpy(zero_copy_only=False))
    assert call("if_else", mask, texts, scalar(b"-")).equals(pc.if_else(mask, texts, scalar(b"-")))
    assert call("coalesce", texts, scalar(b"")).equals(pc.fill_null(texts, b""))

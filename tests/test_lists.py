"""A column as gigatoken takes it: an awkward array like any other, that has some answers ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import gigatoken
import numpy as np
import pytest

from penstock.encode.lists import strings

TEXTS = ["", "a", "naïve café — 日本", "", "x" * 50, "last"]


def column(texts: list[str] = TEXTS) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def plain(array: Any) -> Any:
    return ak.Array(ak.Array(array.layout))


@pytest.mark.parametrize(
    "function",
    [
        ak.without_parameters, ak.to_list, ak.num, ak.flatten, ak.type, ak.count, ak.to_layout, ak.is_none,
        lambda a: ak.num(a, axis=0), lambda a: ak.flatten(a, axis=0), lambda a: ak.concatenate([a, a]),
        lambda a: ak.num(ak.without_parameters(a)), lambda a: ak.flatten(ak.without_parameters(a)),
        lambda a: ak.to_numpy(ak.flatten(ak.without_parameters(a))), lambda a: ak.sum(ak.without_parameters(a), axis=1),
        lambda a: ak.to_numpy(ak.num(ak.without_parameters(a))), lambda a: ak.max(ak.num(ak.without_parameters(a))),
        lambda a: ak.flatten(ak.without_parameters(a), axis=None), lambda a: ak.where(ak.num(ak.without_parameters(a)) > 3, 1, 0),
    ],
)  # fmt: skip
def test_it_answers_as_awkward_does(function: Any) -> None:
    known = strings(*column())
    expected: Any = None
    try:
        expected = function(plain(known))
    except Exception as error:
        with pytest.raises(type(error)):
            function(known)
        return
    got = function(known)
    if isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray
        assert got.dtype == expected.dtype
    if hasattr(expected, "form"):
        assert got.form.type == expected.form.type
        got, expected = ak.Array(got), ak.Array(expected)
    elif isinstance(expected, ak.types.Type):
        assert got == expected
        return
    assert ak.to_list(got) == ak.to_list(expected)


def test_gigatoken_gets_every_answer_without_awkward(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = gigatoken.Tokenizer.from_json((corpus / "tokenizer.json").read_text())
    expected = tokenizer.encode_batch(plain(strings(*column())), parallel=False).to_list()
    asked: list[str] = []
    for name in ("without_parameters", "flatten", "num", "to_numpy"):
        impl = __import__(f"awkward.operations.ak_{name}", fromlist=["_impl"])
        monkeypatch.setattr(impl, "_impl", lambda *_, name=name, **__: asked.append(name))
    got = tokenizer.encode_batch(strings(*column()), parallel=False).to_list()
    assert got == expected
    assert asked == []

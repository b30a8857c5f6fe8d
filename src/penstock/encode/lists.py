"""A column of texts as the awkward array that gigatoken takes.

In:    the bytes of a column and the offsets of its documents.
Out:   an awkward array of strings over the same memory.
Where: worker threads.
State: none.
Cost:  awkward answers any question about any array, in a tenth of a millisecond of Python each, and gigatoken asks
       five about each chunk: while one worker answers, no other gets to its own. The answers to these are known
       beforehand, so the array gives them itself, by awkward's own way of overloading (`__awkward_function__`).
       Whatever else is asked, awkward answers as for any other array.
"""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

from penstock.encode.batch import rebuild

Array = np.ndarray[Any, Any]


def strings(data: Array, offsets: Array) -> Any:
    """Documents that lie one after the other. `offsets` begins with 0 and ends with the length of `data`."""
    return _made(_Strings, data, offsets, "char", "string")


def _made(kind: type, data: Array, offsets: Array, *names: str) -> Any:
    inner, outer = ({"__array__": name} for name in names) if names else (None, None)
    content = ak.contents.NumpyArray(data, parameters=inner)
    array = ak.Array(
        ak.contents.ListOffsetArray(ak.index.Index64(offsets), content, parameters=outer)
    )
    object.__setattr__(array, "__class__", kind)  # awkward chooses the class of what it makes
    return array


class _Known(ak.Array):  # type: ignore[misc]  # it has no types
    """An array that answers some questions itself."""

    def __awkward_function__(
        self, function: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if len(args) == 1 and not kwargs:
            layout = self.layout
            answer = self._answer(
                function, np.asarray(layout.content.data), np.asarray(layout.offsets.data)
            )
            if answer is not None:
                return answer
        return function(*_plain(args), **_plain(kwargs))

    def _answer(self, function: Any, data: Array, offsets: Array) -> Any:
        """What it knows; None for what awkward is to answer."""


class _Strings(_Known):
    def _answer(self, function: Any, data: Array, offsets: Array) -> Any:
        return _made(_Lists, data, offsets) if function is ak.without_parameters else None


class _Lists(_Known):
    """The same, as lists of bytes."""

    def _answer(self, function: Any, data: Array, offsets: Array) -> Any:
        if function is ak.flatten:
            return data.view(_Numbers)
        return np.diff(offsets).view(_Numbers) if function is ak.num else None


class _Numbers(np.ndarray[Any, Any]):
    """An answer: an array already, where awkward is asked to make it one."""

    def __awkward_function__(
        self, function: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function is ak.to_numpy and len(args) == 1 and not kwargs:
            return np.asarray(self)
        return function(*_plain(args), **_plain(kwargs))


def _plain(value: Any) -> Any:
    """The same, for awkward to answer: inside lists and the like too."""
    if isinstance(value, _Known):
        return ak.Array(value.layout)
    return np.asarray(value) if isinstance(value, _Numbers) else rebuild(value, _plain)

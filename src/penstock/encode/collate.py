"""Put samples of the user's own together.

In:    the samples of one batch.
Out:   inputs, targets, and everything else under its own name.
Where: the workers.
State: none.

    integers in one dimension      a row of ids: inputs, and the same shifted by one as targets
    a pair                         inputs and targets
    a mapping                      each field put together; `input_ids` (or `inputs`) and `labels`
                                   (or `targets`) are also the batch's inputs and targets
    anything else                  stacked, or listed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.encode.batch import rebuild
from penstock.errors import ConfigError
from penstock.types import IGNORE

Array = np.ndarray[Any, Any]

INPUTS, TARGETS = ("input_ids", "inputs"), ("labels", "targets")


class Collated(NamedTuple):
    inputs: Any
    targets: Any
    data: Any


def pad_with(id: int) -> Callable[[Sequence[Any]], Collated]:
    """Return a collate function that pads rows to the longest of their batch.

    Inputs are filled with `id`, targets and labels with -100, fields that end in "mask" with 0.
    """
    return partial(put_together, pad=id)


def put_together(samples: Sequence[Any], pad: int | None = None) -> Collated:
    """A batch of samples, by what the first one is."""
    first = samples[0]
    if isinstance(first, Mapping):
        fields = {
            str(key): _column([_field(s, key) for s in samples], _filler(key, pad)) for key in first
        }
        return of_mapping(fields)
    if isinstance(first, tuple) and len(first) == 2:
        inputs, targets = zip(*samples, strict=True)
        return Collated(
            _column(inputs, pad), _column(targets, None if pad is None else IGNORE), None
        )
    if isinstance(first, tuple):
        columns = tuple(_column(values, pad) for values in zip(*samples, strict=True))
        return Collated(None, None, columns)
    if _is_row(first):
        return _shifted([as_array(sample) for sample in samples], pad)
    column = _column(samples, pad)
    return (
        Collated(column, None, None)
        if isinstance(column, np.ndarray)
        else Collated(None, None, column)
    )


def of_mapping(fields: Mapping[str, Any]) -> Collated:
    """A mapping, with those of its fields that everybody knows."""
    named = [
        next((fields[name] for name in names if name in fields), None)
        for names in (INPUTS, TARGETS)
    ]
    return Collated(named[0], named[1], fields)


def as_array(value: Any) -> Array:
    """A tensor's memory, or a list as an array."""
    return np.asarray(plain(value))


def plain(value: Any) -> Any:
    """Tensors as arrays over the same memory, inside plain containers too, so that they can go anywhere.

    What numpy cannot hold (bfloat16, a tensor on a device, one that needs gradients) stays a tensor.
    """
    if hasattr(value, "numpy") and hasattr(value, "requires_grad"):
        try:
            return value.numpy()
        except (TypeError, RuntimeError):
            return value
    return rebuild(value, plain)


def _is_row(sample: Any) -> bool:
    if isinstance(sample, list):
        return bool(sample) and all(
            isinstance(id, int | np.integer) and not isinstance(id, bool) for id in sample
        )
    array = plain(sample)
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"


def _field(sample: Any, key: Any) -> Any:
    try:
        return sample[key]
    except (KeyError, TypeError) as error:
        error.add_note(
            f"the first sample of the batch has a field {key!r}, another has none: give a collate= of your own"
        )
        raise


def _filler(key: Any, pad: int | None) -> int | None:
    """What fills up a field's rows: targets that count for nothing, a mask that hides, else the pad id."""
    if pad is None:
        return None
    return IGNORE if key in TARGETS else 0 if str(key).endswith("mask") else pad


def _shifted(rows: list[Array], pad: int | None) -> Collated:
    lengths = {len(row) for row in rows}
    if min(lengths) < 2:
        raise ConfigError(
            "a row of ids needs at least two of them: one to go in, and one to predict"
        )
    if len(lengths) == 1:
        ids = np.stack(rows)
        return Collated(ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64), None)
    inputs, targets = [row[:-1] for row in rows], [row[1:] for row in rows]
    filler = None if pad is None else IGNORE
    return Collated(
        _padded(inputs, pad).astype(np.int64), _padded(targets, filler).astype(np.int64), None
    )


def _column(values: Sequence[Any], filler: int | None) -> Any:
    first = plain(values[0])
    if isinstance(first, Mapping):
        return {key: _column([_field(v, key) for v in values], filler) for key in first}
    if isinstance(first, bool | int | float | np.generic):
        return np.asarray(values)
    if isinstance(first, list) and _are_numbers(values):
        return _stacked([np.asarray(v) for v in values], filler)
    if isinstance(first, np.ndarray):
        return _stacked([as_array(v) for v in values], filler)
    if hasattr(first, "requires_grad"):
        import torch

        return torch.stack(list(values))
    return list(values)


def _are_numbers(lists: Sequence[Any]) -> bool:
    """Whether these are lists of numbers, of which some may be empty, but not all."""
    firsts = [values[0] for values in lists if isinstance(values, list) and values]
    return bool(firsts) and all(isinstance(value, int | float | np.generic) for value in firsts)


def _stacked(arrays: list[Array], filler: int | None) -> Array:
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return _padded(arrays, filler)


def _padded(arrays: list[Array], filler: int | None) -> Array:
    shapes = sorted({array.shape for array in arrays})
    if filler is None or any(array.ndim != 1 for array in arrays):
        raise ConfigError(
            f"the samples of a batch differ in shape: {shapes[0]} and {shapes[-1]}. Give "
            "collate=pad_with(id), from penstock.encode.collate, or a collate= of your own."
        )
    some = [array for array in arrays if array.size] or arrays
    kind = np.result_type(*some)
    if kind.kind in "iu" and not np.iinfo(kind).min <= filler <= np.iinfo(kind).max:
        kind = np.dtype(np.int64)
    padded = np.full((len(arrays), max(map(len, arrays))), filler, kind)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded

"""Collate samples of a map-style or iterable dataset into a batch.

Runs on the workers. The type of the first sample decides:

    integers in one dimension      a row of ids: inputs, and targets shifted by one
    a pair                         inputs and targets
    a mapping                      collated by field; `input_ids` (or `inputs`) and `labels`
                                   (or `targets`) are also the batch's inputs and targets
    anything else                  stacked if numeric, else kept as a list
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, rebuild
from penstock.errors import ConfigError
from penstock.types import IGNORE

Array = np.ndarray[Any, Any]

INPUTS, TARGETS = ("input_ids", "inputs"), ("labels", "targets")


def pad_with(id: int) -> Callable[[Sequence[Any]], Batch]:
    """Return a collate function that pads rows to the longest one in the batch.

    Pads inputs with `id`, targets and labels with -100, fields whose names end in "mask" with 0.
    """
    return partial(default_collate, pad=id)


def default_collate(samples: Sequence[Any], pad: int | None = None) -> Batch:
    """Collate samples by the type of the first one, as described above."""
    first, ignore = samples[0], None if pad is None else IGNORE
    if isinstance(first, Mapping):
        columns = {key: [_field(s, key) for s in samples] for key in first}
        return of_mapping({str(key): _column(v, _filler(key, pad)) for key, v in columns.items()})
    if isinstance(first, tuple):
        fields = list(zip(*samples, strict=True))
        if len(fields) == 2:
            return Batch(_column(fields[0], pad), _column(fields[1], ignore))
        return Batch(data=tuple(_column(values, pad) for values in fields))
    if _is_row(first):
        rows = [np.asarray(plain(sample)) for sample in samples]
        if min(map(len, rows)) < 2:
            raise ConfigError("a row needs at least two ids: one input and one target")
        inputs = _stacked([row[:-1] for row in rows], pad)
        targets = _stacked([row[1:] for row in rows], ignore)
        return Batch(inputs.astype(np.int64), targets.astype(np.int64), _ids=True)
    column = _column(samples, pad)
    return Batch(column) if isinstance(column, np.ndarray) else Batch(data=column)


def of_value(value: Any) -> Batch:
    """Return the result of a `collate` function as a batch."""
    if isinstance(value, Batch):
        return value
    value = plain(dict(value) if isinstance(value, Mapping) else value)
    if isinstance(value, Mapping):
        return of_mapping(value)
    pair = isinstance(value, tuple | list) and len(value) == 2
    if pair and (isinstance(value, tuple) or all(hasattr(part, "shape") for part in value)):
        return Batch(value[0], value[1])
    return Batch(value) if isinstance(value, np.ndarray) else Batch(data=value)


def of_mapping(fields: Mapping[str, Any]) -> Batch:
    """Return a mapping as a batch, with inputs and targets from its fields."""
    inputs, targets = (
        next((fields[name] for name in names if name in fields), None)
        for names in (INPUTS, TARGETS)
    )
    return Batch(inputs, targets, data=fields)


def plain(value: Any) -> Any:
    """Replace tensors with arrays over the same memory, also inside plain containers.

    Keeps tensors that numpy cannot hold: bfloat16, on a device, or with gradients.
    """
    if hasattr(value, "numpy") and hasattr(value, "requires_grad"):
        try:
            return value.numpy()
        except (TypeError, RuntimeError):
            return value
    return rebuild(value, plain)


def _is_row(sample: Any) -> bool:
    if isinstance(sample, list) and sample and isinstance(sample[0], int | np.integer):
        sample = np.asarray(sample)
    array = plain(sample)
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"


def _field(sample: Any, key: Any) -> Any:
    try:
        return sample[key]
    except (KeyError, TypeError) as error:
        error.add_note(
            f"the first sample of the batch has a field {key!r} that another one lacks: "
            "pass your own collate="
        )
        raise


def _filler(key: Any, pad: int | None) -> int | None:
    """Return the padding of a field: -100 for targets, 0 for a mask, otherwise the pad id."""
    if pad is None:
        return None
    return IGNORE if key in TARGETS else 0 if str(key).endswith("mask") else pad


def _column(values: Sequence[Any], filler: int | None) -> Any:
    first = plain(values[0])
    if isinstance(first, Mapping):
        return {key: _column([_field(v, key) for v in values], filler) for key in first}
    if isinstance(first, bool | int | float | np.generic):
        return np.asarray(values)
    if isinstance(first, np.ndarray) or (isinstance(first, list) and _are_numbers(values)):
        return _stacked([np.asarray(plain(value)) for value in values], filler)
    if hasattr(first, "requires_grad"):
        import torch

        return torch.stack(list(values))
    return list(values)


def _are_numbers(lists: Sequence[Any]) -> bool:
    """Return True for lists of numbers, of which some, but not all, may be empty."""
    firsts = [values[0] for values in lists if isinstance(values, list) and values]
    return bool(firsts) and all(isinstance(value, int | float | np.generic) for value in firsts)


def _stacked(arrays: list[Array], filler: int | None) -> Array:
    """Stack arrays, padding them to the longest if they differ in length."""
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) == 1:
        return np.stack(arrays)
    if filler is None or any(len(shape) != 1 for shape in shapes):
        raise ConfigError(
            f"the samples of a batch differ in shape: {shapes[0]} and {shapes[-1]}. Pass "
            "collate=pad_with(id), from penstock.encode.collate, or your own collate=."
        )
    kind = np.result_type(*(array for array in arrays if array.size))
    if kind.kind in "iu" and not np.iinfo(kind).min <= filler <= np.iinfo(kind).max:
        kind = np.dtype(np.int64)
    padded = np.full((len(arrays), max(map(len, arrays))), filler, kind)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded

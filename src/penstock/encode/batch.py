"""A batch: the data for a training step, and the position of the stream after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.types import IGNORE, Span, StreamPosition

FIELDS = ("inputs", "targets", "positions", "cu_seqlens", "data", "_labels")
"""The fields of a batch that may hold arrays or tensors."""
IDS = ("input_ids", "labels")
DOCUMENTS = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")


class BatchOrigin(Protocol):
    """The provenance of a batch. Holds no ids."""

    def position(self) -> StreamPosition:
        """Return the position of the stream after the batch."""

    def spans(self) -> list[list[Span]]:
        """Return the documents that the ids of each row come from."""


@dataclass(slots=True, eq=False, repr=False)
class Batch(Mapping[str, Any]):
    """Rows or samples. The caller may keep and change a batch: its memory is not reused.

    As a mapping it has the names that transformers models take: `model(**batch)`. Rows of ids have
    `input_ids` and `labels`; with `positions=True` also `position_ids`, `document_ids`,
    `cu_seqlens` and `max_seqlen`. User-defined samples have their own fields.

    `labels` and `targets` follow two conventions. `labels` are not shifted: `labels[:, t]` is
    `input_ids[:, t]`, and the model shifts them. `targets` are shifted: `targets[:, t]` is the id
    after `inputs[:, t]`, for your own loss. Both are -100 where there is nothing to predict.
    """

    inputs: Any = None
    """(batch, seq_len) int64: a torch tensor if torch is installed, else a numpy array."""
    targets: Any = None
    """The inputs shifted by one; -100 where there is nothing to predict. None without targets."""
    epoch: int = 0
    """The epoch that every row of the batch has reached."""
    index: int = 0
    """The number of the batch, counted from the start of the stream across resumes."""
    positions: Any = None
    """(batch, seq_len): each token's distance from the start of its document in the row."""
    cu_seqlens: Any = None
    """int32: the boundaries of documents in the flattened batch, for varlen attention."""
    max_seqlen: int | None = None
    """The length of the longest document in the batch, for varlen attention."""
    data: Any = None
    """For user-defined samples: the result of `collate`."""
    tokens: int = 0
    """The number of input ids, padding included; of samples if they have no ids."""
    synthetic: bool = False
    """True for synthetic ids that replace data that could not be read."""
    narrow: dict[str, np.ndarray[Any, Any]] | None = None
    """Arrays to widen on the device: `ids` (seq_len + 1 per row), `valid`, `positions`."""
    is_torch: bool = False
    """True if the arrays were wrapped as tensors."""
    _origin: BatchOrigin | None = None
    _ids: bool = False
    """True for rows of ids: the targets are the inputs shifted by one."""
    _state: Callable[[StreamPosition], dict[str, Any]] | None = None
    _labels: Any = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shape = tuple(getattr(self.inputs, "shape", ()))
        return f"Batch(index={self.index}, epoch={self.epoch}, shape={shape}, keys={[*self]})"

    # The mapping

    def _names(self) -> tuple[str, ...]:
        if self._ids:
            return IDS if self.positions is None else IDS + DOCUMENTS
        if isinstance(self.data, Mapping):
            return tuple(self.data)
        names = ("inputs", "targets", "data")
        return tuple(name for name in names if getattr(self, name) is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __getitem__(self, key: str) -> Any:
        if key not in self._names():
            raise KeyError(f"{key}: this batch has {', '.join(self)}")
        if isinstance(self.data, Mapping):
            return self.data[key]
        return getattr(self, {"input_ids": "inputs", "position_ids": "positions"}.get(key, key))

    @property
    def labels(self) -> Any:
        """(batch, seq_len): the inputs, not shifted; -100 where there is nothing to predict.

        The first id of a row is -100 too, because no id before it predicts it. None for
        user-defined samples, whose fields are in the mapping.
        """
        if self._labels is None and self._ids:
            self._labels = copy.deepcopy(self.targets)
            self._labels[:, 1:] = self.targets[:, :-1]
            self._labels[:, 0] = IGNORE
        return self._labels

    @property
    def document_ids(self) -> Any:
        """(batch, seq_len): the number of each token's document in its row. Needs `positions=True`.

        Padding counts as a separate document.
        """
        return None if self.positions is None else (self.positions == 0).cumsum(1) - 1

    # Arrays

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        if self.data is not None:  # includes inputs and targets
            return memory_of(self.data)
        return memory_of([self.inputs, self.targets, self.positions, self.cu_seqlens, self.narrow])

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch with its tensors on a device."""
        moved = copy.copy(self)
        moved.to_torch()
        moved.change(lambda v: v.to(device, non_blocking=non_blocking) if hasattr(v, "to") else v)
        return moved

    def to_torch(self) -> None:
        """Wrap arrays as tensors, without a copy."""
        self.is_torch = True
        if self._ids and self.positions is None and type(self.targets) is np.ndarray:
            # The usual case, several times faster.
            import torch

            self.inputs, self.targets = map(torch.from_numpy, (self.inputs, self.targets))
        else:
            self.change(_as_tensor)

    def change(self, function: Callable[[Any], Any]) -> None:
        """Replace each array or tensor with the result of a function, called once per object."""
        seen: dict[int, tuple[Any, Any]] = {}
        for name in FIELDS:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _changed(value, function, seen))

    # Position and provenance

    def take_place_of(self, other: Batch) -> None:
        """Copy the position in the stream from the batch that this one was made from."""
        self.index, self.synthetic = other.index, other.synthetic
        self._origin, self._state = other._origin, other._state
        self.tokens, self._ids = self.tokens or other.tokens, other._ids and self.data is None

    def provenance(self) -> list[list[Span]]:
        """Return the documents that the ids of each row come from."""
        assert self._origin is not None
        return self._origin.spans()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after this batch."""
        return self.state_maker()()

    def state_maker(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the state after this batch and does not keep it alive."""
        assert self._origin is not None
        assert self._state is not None
        origin, state = self._origin, self._state
        return lambda: state(origin.position())


def widened(narrow: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs, targets and positions of `Batch.narrow`, with int64 ids."""
    ids = narrow["ids"]
    (rows, width), (row_step, step) = ids.shape, ids.strides
    # One cast for both, because numpy releases the GIL for each. both[1] is shifted by one.
    both = as_strided(ids, (2, rows, width - 1), (step, row_step, step), writeable=False)
    inputs, targets = both.astype(np.int64, order="C")
    if "valid" in narrow:
        targets[np.arange(1, width) >= narrow["valid"][:, None]] = IGNORE
    made = {"inputs": inputs, "targets": targets}
    return made | ({"positions": narrow["positions"]} if "positions" in narrow else {})


def _changed(value: Any, function: Callable[[Any], Any], seen: dict[int, tuple[Any, Any]]) -> Any:
    # Not a recursive closure: its reference cycle would keep the arrays until garbage collection.
    if not hasattr(value, "shape"):
        return rebuild(value, lambda inner: _changed(inner, function, seen))
    if id(value) not in seen:
        seen[id(value)] = value, function(value)
    return seen[id(value)][1]


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        import torch

        return torch.from_numpy(value)
    return value


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a plain dict, list or tuple with its values changed, and any other value as is."""
    if type(value) is dict:
        return {key: change(v) for key, v in value.items()}
    if type(value) is list:
        return [change(v) for v in value]
    if isinstance(value, tuple):
        changed = (change(v) for v in value)
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    return value


def memory_of(value: Any) -> int:
    """Return the memory of the arrays in a value."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, dict | list | tuple):
        return sum(map(memory_of, value.values() if isinstance(value, dict) else value))
    return int(getattr(value, "nbytes", 0))

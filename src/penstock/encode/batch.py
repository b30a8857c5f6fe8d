"""A batch: what the trainer gets, and where the stream continues after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.types import Span, StreamPosition


class BatchOrigin(Protocol):
    """Where a batch came from. It holds no ids."""

    def position(self) -> StreamPosition:
        """Return where the stream continues after the batch."""

    def spans(self) -> list[list[Span]]:
        """Return, for each row, where its ids come from."""


def can_wrap() -> bool:
    """Return True if the calling thread should make tensors.

    Only once torch was imported: its import holds the GIL for seconds, which is the trainer's
    decision. Not in inference mode: tensors made there cannot be trained on.
    """
    torch: Any = sys.modules.get("torch")  # perhaps without its functions: it is being imported
    ready = hasattr(torch, "is_inference_mode_enabled") and hasattr(torch, "from_numpy")
    return ready and not torch.is_inference_mode_enabled()


@dataclass(slots=True)
class Batch:
    """Some rows or samples. Yours to keep and to change: no memory is reused.

    `inputs, targets = batch` works, and so does `batch["input_ids"]`.
    """

    inputs: Any
    """(batch, seq_len) int64: a torch tensor if torch is installed, else a numpy array."""
    targets: Any
    """The inputs shifted by one; -100 where there is nothing to predict. None if samples have none."""
    epoch: int
    """The epoch that every row of the batch has reached."""
    index: int
    """The batch's number since the beginning of the stream, resumes included."""
    positions: Any = None
    """(batch, seq_len): each token's distance from the start of its document in the row."""
    cu_seqlens: Any = None
    """int32: where documents begin and end in the flattened batch, for varlen attention."""
    data: Any = None
    """For samples of the user's own: what `collate` returned."""
    synthetic: bool = False
    """True if these ids stand in for data that could not be read."""
    narrow: dict[str, np.ndarray[Any, Any]] | None = field(default=None, repr=False)
    """On the way to a device: the arrays to send, in their narrowest types."""
    _origin: BatchOrigin | None = field(default=None, repr=False)
    _tokens: int = field(default=0, repr=False)
    _ids: bool = field(default=False, repr=False)
    """True for packed rows of ids."""
    _state: Callable[[StreamPosition], dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Input ids in the batch, padding included; for samples without ids, their number."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        if self.data is not None:  # inputs and targets are fields of it
            return memory_of(self.data)
        return memory_of([self.inputs, self.targets, self.positions, self.cu_seqlens, self.narrow])

    def __iter__(self) -> Iterator[Any]:
        yield self.inputs
        yield self.targets

    def __getitem__(self, key: Any) -> Any:
        """Return a field of the samples, or of a batch of ids by its usual name."""
        if self.data is not None:
            return self.data[key]
        return {"input_ids": self.inputs, "labels": self.targets}[key]

    def to_torch(self) -> None:
        """Wrap arrays as tensors, without a copy."""
        seen: dict[int, Any] = {}  # inputs may be one of the data's fields, and stay it
        for name in ("data", "inputs", "targets", "positions", "cu_seqlens"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, tensors(value, seen))

    def take_place_of(self, other: Batch) -> None:
        """Take another batch's place in the stream: this one was made of it."""
        self.index, self.synthetic = other.index, other.synthetic
        self._origin, self._state = other._origin, other._state
        self._tokens = self._tokens or other._tokens

    def provenance(self) -> list[list[Span]]:
        """Return, for each row, the documents that its ids come from."""
        assert self._origin is not None
        return self._origin.spans()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that continues after this batch."""
        return self.state_maker()()

    def state_maker(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the state, without keeping the batch alive."""
        assert self._origin is not None
        assert self._state is not None
        origin, state = self._origin, self._state
        return lambda: state(origin.position())


def tensors(value: Any, seen: dict[int, Any]) -> Any:
    """Return arrays as tensors, also inside plain containers; everything else as it is."""
    if not isinstance(value, np.ndarray):
        return rebuild(value, lambda v: tensors(v, seen))
    if value.dtype.kind not in "biufc" or value.dtype.byteorder == ">":
        return value
    if id(value) not in seen:
        import torch

        seen[id(value)] = torch.from_numpy(value)
    return seen[id(value)]


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a plain dict, list or tuple with each of its values changed; anything else as it is."""
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

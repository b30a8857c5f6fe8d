"""A batch, and what it knows of itself.

In:    arrays, made by `deal` from packed rows or by `samples` from a user's own.
Out:   what the trainer gets.
Where: made on the producer thread, or in its place on the trainer's; wrapped as tensors on either.
State: where the stream continues after it. It holds on to no ids but its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.types import Span


class Position(NamedTuple):
    """Where a stream continues."""

    row: int
    """Global rows dealt, over all ranks."""
    batch: int
    places: tuple[Any, ...]
    """One for each lane of this shard; none where the number of the row says it all."""
    source: Any = None
    """For an iterable of samples: where it stands."""


class Origin(Protocol):
    """Where a batch came from."""

    def position(self) -> Position:
        """Where the stream continues after the batch."""

    def spans(self) -> list[list[Span]]:
        """For each row, where its ids come from."""


def torch_is_here() -> bool:
    """Whether tensors can be made beforehand: torch has been imported, wholly. It is not for the producer to import it:
    the trainer may be building its model, and the import would hold the GIL for seconds.

    A trainer that makes batches itself may be in inference mode, and tensors made there are of no use to train on.
    """
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return False
    return not torch.is_inference_mode_enabled()


@dataclass(slots=True)
class Batch:
    """Some rows or samples, put together. Yours to keep and to change: nothing is reused.

    `inputs, targets = batch` works, and so does `batch["input_ids"]` where the samples are mappings.
    """

    inputs: Any
    """(batch, seq_len) int64: a torch tensor where torch is installed, else a numpy array."""
    targets: Any
    """The inputs shifted by one; -100 where there is nothing to predict. None where samples have none."""
    epoch: int
    """The epoch that every row of the batch has reached."""
    index: int
    """The batch's number since the beginning of the stream, resumes included."""
    positions: Any = None
    """(batch, seq_len): each token's distance from the start of its document in the row."""
    cu_seqlens: Any = None
    """int32: where documents begin and end in the flattened batch, as varlen attention wants it."""
    data: Any = None
    """For samples of the user's own: what `collate` made of them."""
    synthetic: bool = False
    """Whether these ids stand in for data that could not be had."""
    narrow: dict[str, np.ndarray[Any, Any]] | None = field(default=None, repr=False)
    """On the way to a device: the fields that are yet to be sent, in their narrowest types."""
    _origin: Origin | None = field(default=None, repr=False)
    _tokens: int = field(default=0, repr=False)
    _ids: bool = field(default=True, repr=False)
    """Whether inputs and targets are ids, as opposed to whatever a user's samples are."""
    _state: Callable[[Position], dict[str, Any]] | None = field(default=None, repr=False)
    _left: np.ndarray[Any, Any] | None = field(default=None, repr=False)
    """Ids that inputs and targets are yet to be made of, as `shifted` gives them: see `Unfinished`."""

    @property
    def tokens(self) -> int:
        """Input ids in the batch, padding included; for samples that have none, their number."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        if self.data is not None:  # of which inputs and targets are fields
            return memory_of(self.data)
        return memory_of([self.inputs, self.targets, self.positions, self.cu_seqlens, self.narrow])

    def __iter__(self) -> Iterator[Any]:
        yield self.inputs
        yield self.targets

    def __getitem__(self, key: Any) -> Any:
        """A field of samples that are mappings, or the fields of a batch of ids by their usual names."""
        if self.data is not None:
            return self.data[key]
        return {"input_ids": self.inputs, "labels": self.targets}[key]

    def finish(self, wrap: Callable[[Any], Any] | None = None) -> None:
        """Nothing is left to do: see `Unfinished`."""

    def to_torch(self) -> None:
        """Wrap the arrays as tensors, if they are not yet. No data is copied."""
        if self.data is None and self._ids:
            if not isinstance(self.inputs, np.ndarray):
                return
            if self.positions is None:  # as usual: no need to look far
                import torch

                self.inputs, self.targets = (
                    torch.from_numpy(self.inputs),
                    torch.from_numpy(self.targets),
                )
                return
        seen: dict[int, Any] = {}  # inputs may be one of the data's own fields, and stay it
        if self.data is not None:
            self.data = tensors(self.data, seen)
        for name in ("inputs", "targets", "positions", "cu_seqlens"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                setattr(self, name, tensors(value, seen))

    def take_place_of(self, other: Batch) -> None:
        """Take the place of another batch in the stream: its index, origin and state."""
        self.index, self.synthetic = other.index, other.synthetic
        self._origin, self._state, self._tokens = (
            other._origin,
            other._state,
            self._tokens or other._tokens,
        )

    def provenance(self) -> list[list[Span]]:
        """For each row, the documents that its ids come from."""
        assert self._origin is not None
        return self._origin.spans()

    def state_dict(self) -> dict[str, Any]:
        """The state that continues after this batch."""
        return self.state_maker()()

    def state_maker(self) -> Callable[[], dict[str, Any]]:
        """Gives the state that continues after this batch, when called; keeps none of its ids alive."""
        assert self._state is not None
        locate, state = self.locate(), self._state
        return lambda: state(locate())

    def locate(self) -> Callable[[], Position]:
        """Finds where the stream continues after this batch, when called; keeps none of its ids alive."""
        assert self._origin is not None
        return self._origin.position


class Unfinished(Batch):
    """A batch whose inputs and targets are yet to be made of ids that were left as they are. Whoever takes one batch after
    the other has that done as late as this, while the memory of the batch before is in the processor's caches."""

    __slots__ = ()

    def finish(self, wrap: Callable[[Any], Any] | None = None) -> None:
        """Make inputs and targets, and tensors of them by `wrap`."""
        assert self._left is not None
        both = self._left.astype(np.int64, "C")
        inputs, targets = both[0], both[1]  # to unpack an array takes three times as long
        if wrap is not None:
            inputs, targets = wrap(inputs), wrap(targets)
        self.inputs, self.targets, self._left = inputs, targets, None
        self.__class__ = Batch  # type: ignore[assignment]


def shifted(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of `seq_len + 1` ids as (2, rows, seq_len): inputs and, shifted by one, targets. Without a copy."""
    (rows, width), (row, id) = ids.shape, ids.strides
    if ids.flags.c_contiguous:  # the shorter way to the same
        return np.ndarray((2, rows, width - 1), ids.dtype, ids, 0, (id, row, id))
    return as_strided(ids, (2, rows, width - 1), (id, row, id), writeable=False)


def tensors(value: Any, seen: dict[int, Any]) -> Any:
    """Arrays as tensors, inside plain dicts, lists and tuples too; everything else as it is."""
    if not isinstance(value, np.ndarray):
        return rebuild(value, lambda v: tensors(v, seen))
    if value.dtype.kind not in "biufc" or value.dtype.byteorder == ">":
        return value
    if id(value) not in seen:
        import torch

        seen[id(value)] = torch.from_numpy(value)
    return seen[id(value)]


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """A plain dict, list or tuple with each of its values changed; anything else as it is."""
    if type(value) is dict:
        return {key: change(v) for key, v in value.items()}
    if type(value) is list:
        return [change(v) for v in value]
    if isinstance(value, tuple):
        changed = (change(v) for v in value)
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    return value


def memory_of(value: Any) -> int:
    """Memory of the arrays in a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, dict | list | tuple):
        return sum(map(memory_of, value.values() if isinstance(value, dict) else value))
    return int(getattr(value, "nbytes", 0))

"""What a training script does with a loader whose worker processes tokenize, or whose rows are ids already.

In:    a loader with state_dict and load_state_dict, as litdata and Streaming have it.
Out:   inputs and targets, as torch tensors.
Where: the process that calls; the loader's workers have done the rest.
State: the loader's own. Where ids are packed here, also those that have not been given yet: the script has to keep them.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from case import BATCH_SIZE, Case
from packing import Ids, Packer, Pair

Tensors = tuple[torch.Tensor, torch.Tensor]


def saved(case: Case) -> Any:
    """What `state` gave; None at a start from the beginning."""
    if not case.state:
        return None
    with open(case.state, "rb") as file:
        return pickle.load(file)


class Rows:
    """Batches of rows of 1025 ids."""

    def __init__(self, case: Case, loader: Any) -> None:
        self._loader = loader
        if (state := saved(case)) is not None:
            loader.load_state_dict(state)
        self._batches: Iterator[torch.Tensor] = iter(loader)

    def __next__(self) -> Tensors:
        rows = next(self._batches)
        while len(rows) < BATCH_SIZE:  # a worker may end with what it has
            rows = next(self._batches)
        return rows[:, :-1], rows[:, 1:]

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        del self._batches, self._loader  # the iterator ends its workers when it goes


class Documents:
    """Batches of documents that were tokenized by the collate function, packed here."""

    def __init__(self, case: Case, loader: Any, ids: Callable[[Any], Ids]) -> None:
        self._loader, self._ids = loader, ids
        self._packer, self._ready = Packer(), deque[Pair]()
        if (state := saved(case)) is not None:
            loaded, ready, rest = state
            loader.load_state_dict(loaded)
            self._packer, self._ready = Packer(rest), deque(ready)
        self._batches: Iterator[Any] = iter(loader)

    def __next__(self) -> Tensors:
        while not self._ready:
            self._ready.extend(self._packer.add(self._ids(next(self._batches))))
        inputs, targets = self._ready.popleft()
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def state(self) -> Any:
        return self._loader.state_dict(), list(self._ready), self._packer.rest()

    def close(self) -> None:
        del self._batches, self._loader

"""torchdata.nodes with threads: read row groups, tokenize in parallel, pack in order, prefetch.

Out:   the stream in the order of the files, whatever the number of workers.
Where: a thread reads, `workers` threads tokenize, a third kind puts results in order, the Prefetcher's thread packs.
State: what Loader.state_dict gives. The packing node's part is its source's state before the rows that it is cutting,
       the ids that were left then, and how many batches it has cut since, as the library's Unbatcher does it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torchdata.nodes import BaseNode, IterableWrapper, Loader, ParallelMapper, Prefetcher

from case import Case
from contenders.torch_loader import Tensors, columns, names
from encoders import encoder
from packing import Packer, Pair

ROWS = 256
"""Documents of a call to the tokenizer. Not varied."""
PREFETCH = 8
"""Batches that are ready ahead. Not varied."""


class Texts:
    """Columns of texts, a few hundred documents each. IterableWrapper saves and restores its state."""

    def __init__(self, case: Case) -> None:
        self._files = names(case)
        self._shuffle = case.shuffle
        self._next = {"group": 0, "row": 0}

    def __iter__(self) -> Iterator[Any]:
        begin = self._next
        for number, column in columns(self._files, self._shuffle, begin["group"]):
            for row in range(begin["row"] if number == begin["group"] else 0, len(column), ROWS):
                self._next = {"group": number, "row": row + ROWS}
                yield column.slice(row, ROWS)

    def state_dict(self) -> dict[str, int]:
        return self._next

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state


class Packed(BaseNode):  # type: ignore[misc]
    """Batches from arrays of ids."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"source": None, "rest": None, "given": 0}
        self._source.reset(state["source"])
        self._packer = Packer(state["rest"])
        self._ready: Iterator[Pair] = iter(())
        self._before, self._rest, self._given = self._source.state_dict(), self._packer.rest(), 0
        for _ in range(state["given"]):
            self.next()

    def next(self) -> Tensors:
        while (pair := next(self._ready, None)) is None:
            self._before, self._rest, self._given = (
                self._source.state_dict(),
                self._packer.rest(),
                0,
            )
            self._ready = self._packer.add(next(self._source))
        self._given += 1
        return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])

    def get_state(self) -> dict[str, Any]:
        return {"source": self._before, "rest": self._rest, "given": self._given}


class Nodes:
    """The nodes in their Loader."""

    def __init__(self, case: Case) -> None:
        ids = ParallelMapper(
            IterableWrapper(Texts(case)), encoder(case), num_workers=case.workers, method="thread"
        )
        self._loader = Loader(Prefetcher(Packed(ids), PREFETCH), restart_on_stop_iteration=False)
        if case.state:
            with open(case.state, "rb") as file:
                self._loader.load_state_dict(pickle.load(file))
        self._batches = iter(self._loader)

    def __next__(self) -> Tensors:
        inputs, targets = next(self._batches)
        return inputs, targets

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        del self._batches, self._loader  # nodes stop and join their threads when they go


def stream(case: Case) -> Nodes:
    """Start it."""
    return Nodes(case)

"""torchdata.nodes with threads: read row groups, tokenize in parallel, pack in order, prefetch.

The stream has the order of the files for any number of workers. The packing node's state is its
source's state before the rows that it is cutting, the ids that were left then, and how many batches
it has cut since, as the library's Unbatcher does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode, IterableWrapper, Loader, ParallelMapper, Prefetcher

from case import Case, Packer, Pair, Stream, as_tensors
from contenders.torch_loader import PREFETCH, ROWS, columns, file_names
from encoders import encoder


class Texts:
    """Columns of some hundred texts. IterableWrapper saves and restores its state."""

    def __init__(self, case: Case) -> None:
        self._files, self._shuffle = file_names(case), case.shuffle
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
        self._begin()
        for _ in range(state["given"]):
            self.next()

    def _begin(self) -> None:
        self._state = {"source": self._source.state_dict(), "rest": self._packer.rest, "given": 0}

    def next(self) -> Pair:
        while (pair := next(self._ready, None)) is None:
            self._begin()
            self._ready = self._packer.add(next(self._source))
        self._state["given"] += 1
        return as_tensors(pair)

    def get_state(self) -> dict[str, Any]:
        return dict(self._state)


def stream(case: Case) -> Stream:
    texts = IterableWrapper(Texts(case))
    ids = ParallelMapper(texts, encoder(case), num_workers=case.workers, method="thread")
    loader = Loader(Prefetcher(Packed(ids), PREFETCH), restart_on_stop_iteration=False)
    if case.state:
        loader.load_state_dict(case.saved())
    return Stream(iter(loader), loader.state_dict)

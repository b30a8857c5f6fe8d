"""What a training script does with a loader of litdata or Streaming: rows of ids, or documents.

The loader has state_dict and load_state_dict. Where documents are packed here, the state also has
the batches and ids that have not been given yet: the script has to keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from case import BATCH_SIZE, Case, Ids, Packer, Pair, Stream, as_tensors


def row_stream(case: Case, loader: Any) -> Stream:
    """Give batches of rows of 1025 ids."""
    if case.state:
        loader.load_state_dict(case.saved())

    def batches() -> Iterator[Pair]:
        for rows in loader:
            if len(rows) == BATCH_SIZE:  # a worker may end with what it has
                yield rows[:, :-1], rows[:, 1:]

    return Stream(batches(), loader.state_dict)


def document_stream(case: Case, loader: Any, ids_of: Callable[[Any], Ids]) -> Stream:
    """Pack documents that the collate function has tokenized."""
    packer, ready = Packer(), deque[Pair]()
    if case.state:
        loaded, given, rest = case.saved()
        loader.load_state_dict(loaded)
        packer, ready = Packer(rest), deque(given)

    def batches() -> Iterator[Pair]:
        source = iter(loader)
        while True:
            while ready:
                yield as_tensors(ready.popleft())
            documents = next(source, None)
            if documents is None:
                return
            ready.extend(packer.add(ids_of(documents)))

    return Stream(batches(), lambda: (loader.state_dict(), list(ready), packer.rest))

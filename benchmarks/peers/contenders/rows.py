"""What a training script does with a loader of litdata, Streaming or LanceDB.

It gives rows of ids or documents, and has state_dict and load_state_dict. Where documents are packed here, the state also has
the batches and ids that have not been given yet: the script has to keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from case import BATCH_SIZE, SEQ_LEN, Case, Ids, Packer, Pair, Stream, as_tensors


def cut_rows(texts: Iterable[Ids]) -> Iterator[Ids]:
    """Concatenate ids and cut rows of 1025; the last id of a row opens the next."""
    rest: Ids = np.empty(0, np.uint16)
    for ids in texts:
        flat = np.concatenate([rest, ids])
        last = (len(flat) - 1) // SEQ_LEN * SEQ_LEN
        yield np.lib.stride_tricks.sliding_window_view(flat, SEQ_LEN + 1)[:last:SEQ_LEN]
        rest = flat[last:]


def collate_rows(rows: list[Ids]) -> Any:
    import torch

    return torch.from_numpy(np.stack(rows).astype(np.int64))


def full_batches(loader: Iterable[Any]) -> Iterator[Pair]:
    for rows in loader:
        if len(rows) == BATCH_SIZE:  # a worker may end with what it has
            yield rows[:, :-1], rows[:, 1:]


def row_stream(case: Case, loader: Any) -> Stream:
    """Give batches of rows of 1025 ids."""
    if case.state:
        loader.load_state_dict(case.saved())
    return Stream(full_batches(loader), loader.state_dict)


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

"""PyTorch's DataLoader over an IterableDataset written by hand.

Each worker process takes its share of the row groups, tokenizes them and packs them, as the
documentation of `get_worker_info` shows. Batches come from the workers in turn, so their order
depends on the number of workers, and each worker drops what does not fill its last batch. The
dataset has a state, in torchdata's StatefulDataLoader: per worker the row group, the row in it, the
ids that were left before that row, and how many batches they have filled since.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from case import SEED, TOKENS, Case, Ids, Stream, as_tensors, cut, read_texts
from encoders import encoder

ROWS = 256
"""Documents of a call to the tokenizer."""
PREFETCH = 8
"""Batches that each worker is ahead."""


def file_names(case: Case) -> list[str]:
    if not case.remote:
        return [str(file) for file in case.files()]
    from huggingface_hub import HfFileSystem

    return sorted(HfFileSystem().glob(f"{case.source.removeprefix('hf://')}/**/*.parquet"))


def open_file(name: str) -> Any:
    if Path(name).exists():
        return pq.ParquetFile(name)
    from huggingface_hub import HfFileSystem

    return pq.ParquetFile(HfFileSystem().open(name), pre_buffer=True)


def columns(
    files: list[str], shuffle: bool, first: int = 0, share: int = 0, of: int = 1
) -> Iterator[tuple[int, Any]]:
    """Yield number and texts of each row group from `first` on that is this reader's share.

    Shuffled: the files, the row groups of each, and their rows. An iterable has no shuffle in
    PyTorch but the one that its author writes, and this one costs nothing.
    """
    order = np.random.default_rng(SEED)
    number = 0
    for place in order.permutation(len(files)) if shuffle else range(len(files)):
        file = open_file(files[place])
        groups = file.num_row_groups
        for group in order.permutation(groups) if shuffle else range(groups):
            if number >= first and number % of == share:
                texts = read_texts(file, int(group))
                if shuffle:
                    rows = np.random.default_rng((SEED, number)).permutation(len(texts))
                    texts = texts.take(pa.array(rows))
                yield number, texts
            number += 1


class Documents(IterableDataset[Ids]):
    """The ids of packed batches, from this worker's row groups."""

    def __init__(self, case: Case) -> None:
        self._files, self._shuffle = file_names(case), case.shuffle
        self._encode = encoder(case)
        self._place: dict[str, Any] = {"group": 0, "row": 0, "given": 0, "rest": None}

    def __iter__(self) -> Iterator[Ids]:
        worker = get_worker_info()
        share, of = (worker.id, worker.num_workers) if worker else (0, 1)
        begin = self._place
        rest = np.empty(0, np.uint16) if begin["rest"] is None else begin["rest"]
        for number, column in columns(self._files, self._shuffle, begin["group"], share, of):
            for row in range(begin["row"] if number == begin["group"] else 0, len(column), ROWS):
                again = begin["given"] if (number, row) == (begin["group"], begin["row"]) else 0
                flat = np.concatenate((rest, self._encode(column.slice(row, ROWS))))
                whole = max(0, len(flat) - 1) // TOKENS
                for given in range(again, whole):
                    self._place = {"group": number, "row": row, "rest": rest, "given": given + 1}
                    yield flat[given * TOKENS : (given + 1) * TOKENS + 1]
                rest = flat[whole * TOKENS :]

    def state_dict(self) -> dict[str, Any]:
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state


def unchanged(ids: Ids) -> Ids:
    """Collate nothing: 16-bit numpy takes half the CPU time of tensors in shared memory."""
    return ids


def stream(case: Case) -> Stream:
    loader = StatefulDataLoader(
        Documents(case),
        batch_size=None,
        num_workers=case.workers,
        prefetch_factor=PREFETCH,
        collate_fn=unchanged,
    )
    if case.state:
        loader.load_state_dict(case.saved())
    return Stream((as_tensors(cut(ids)) for ids in loader), loader.state_dict)

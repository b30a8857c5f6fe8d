"""PyTorch's DataLoader over an IterableDataset written by hand: each worker process takes its share of the row groups,
tokenizes them and packs them, as the documentation of `get_worker_info` shows for a range of numbers.

variant "":         torch.utils.data.DataLoader. It has no state; what was read is lost to whoever resumes.
variant "stateful": the same dataset with state_dict and load_state_dict, in torchdata's StatefulDataLoader.
Out:   batches from the workers in turn. So their order depends on the number of workers, and each worker drops what
       does not fill its last batch.
State: per worker the row group, the row in it, the ids that were left before that row, and how many batches they have
       filled since. The rows are tokenized again: the ids themselves would be half a megabyte with every batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from case import BATCH_SIZE, SEQ_LEN, Case, NotOffered
from encoders import encoder
from packing import Ids, cut

SEED = 42
ROWS = 256
"""Documents of a call to the tokenizer. Not varied."""
PREFETCH = 8
"""Batches that each worker is ahead. Not varied."""
TOKENS = BATCH_SIZE * SEQ_LEN

Tensors = tuple[torch.Tensor, torch.Tensor]


def names(case: Case) -> list[str]:
    """The files, in their order."""
    if "://" not in case.source:
        return [str(file) for file in case.files()]
    from huggingface_hub import HfFileSystem

    return sorted(HfFileSystem().glob(f"{case.source.removeprefix('hf://')}/**/*.parquet"))


def opened(name: str) -> Any:
    """A file on disk or of the Hub."""
    if Path(name).exists():
        return pq.ParquetFile(name)
    from huggingface_hub import HfFileSystem

    return pq.ParquetFile(HfFileSystem().open(name), pre_buffer=True)


def columns(
    files: list[str], shuffle: bool, first: int = 0, share: int = 0, of: int = 1
) -> Iterator[tuple[int, Any]]:
    """The texts of each row group from number `first` on that is this reader's share, with its number.

    Shuffled: the files, the row groups of each and the rows of those. An iterable has no shuffle in PyTorch but the
    one that its author writes, and this is the one that costs nothing.
    """
    order = np.random.default_rng(SEED)
    number = 0
    for place in order.permutation(len(files)) if shuffle else range(len(files)):
        file = opened(files[place])
        groups = file.num_row_groups
        for group in order.permutation(groups) if shuffle else range(groups):
            if number >= first and number % of == share:
                column = (
                    file.read_row_group(int(group), columns=["text"]).column(0).combine_chunks()
                )
                if shuffle:
                    column = column.take(
                        pa.array(np.random.default_rng((SEED, number)).permutation(len(column)))
                    )
                yield number, column
            number += 1


class Documents(IterableDataset[Ids]):
    """The ids of packed batches, from this worker's row groups."""

    def __init__(self, case: Case) -> None:
        self._files = names(case)
        self._shuffle = case.shuffle
        self._encode = encoder(case)
        self._place: dict[str, Any] = {
            "group": 0,
            "row": 0,
            "rest": np.empty(0, np.uint16),
            "given": 0,
        }

    def __iter__(self) -> Iterator[Ids]:
        worker = get_worker_info()
        share, of = (worker.id, worker.num_workers) if worker else (0, 1)
        begin = self._place
        rest = begin["rest"]
        for number, column in columns(self._files, self._shuffle, begin["group"], share, of):
            for row in range(begin["row"] if number == begin["group"] else 0, len(column), ROWS):
                again = begin["given"] if (number, row) == (begin["group"], begin["row"]) else 0
                flat = np.concatenate((rest, self._encode(column.slice(row, ROWS))))
                whole = max(0, len(flat) - 1) // TOKENS
                for given in range(again, whole):
                    self._place = {"group": number, "row": row, "rest": rest, "given": given + 1}
                    yield flat[given * TOKENS : (given + 1) * TOKENS + 1]
                rest = flat[whole * TOKENS :]


class StatefulDocuments(Documents):
    """The same, for a loader that asks for the state of its dataset."""

    def state_dict(self) -> dict[str, Any]:
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state


def as_it_is(ids: Ids) -> Ids:
    """In place of DataLoader's own conversion to tensors in shared memory: 16-bit numpy goes through the pipe.

    3,000 batches, two workers, the whole process, one run each: 16.9 s of CPU time with inputs and targets as tensors
    of int64, 12.4 s with one tensor for both, 9.0 s so.
    """
    return ids


class Loaded:
    """A DataLoader's iterator."""

    def __init__(self, case: Case) -> None:
        options: dict[str, Any] = {
            "num_workers": case.workers,
            "prefetch_factor": PREFETCH,
            "collate_fn": as_it_is,
        }
        self._loader: Any
        if case.variant == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            self._loader = StatefulDataLoader(StatefulDocuments(case), batch_size=None, **options)
            if case.state:
                with open(case.state, "rb") as file:
                    self._loader.load_state_dict(pickle.load(file))
        elif case.state:
            raise NotOffered("DataLoader has no state")
        else:
            self._loader = DataLoader(Documents(case), batch_size=None, **options)
        self._batches = iter(self._loader)

    def __next__(self) -> Tensors:
        inputs, targets = cut(next(self._batches))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def state(self) -> Any:
        if not hasattr(self._loader, "state_dict"):
            raise NotOffered("DataLoader has no state")
        return self._loader.state_dict()

    def close(self) -> None:
        del self._batches, self._loader  # the iterator ends its workers when it goes


def stream(case: Case) -> Loaded:
    """Start it."""
    return Loaded(case)

"""A flat file of token ids and `numpy.memmap`, as nanoGPT has it.

`prepare` makes a uint16 .bin with tiktoken in two processes, as nanoGPT's own script does. Shuffled:
slices from random offsets, with replacement, which is all that nanoGPT does; the stream ends after
as many batches as the file holds. It has neither workers nor state. Variant "loader": PyTorch's DataLoader
with workers over the rows of that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from case import BATCH_SIZE, SEQ_LEN, TOKENS, Case, Ids, NotOffered, Pair, Stream, read_texts
from encoders import Encode, Gigatoken, Tiktoken

FILE = "train.bin"
SEED = 1337
"""nanoGPT's."""


def tokenize(encode: Encode, place: tuple[str, int]) -> Ids:
    return encode(read_texts(*place))


def prepare(case: Case) -> None:
    """Tokenize everything into one file."""
    # Spawned: pyarrow's threads, which reading the footers has started, do not survive a fork.
    processes = ProcessPoolExecutor(case.workers, get_context("spawn"))
    with processes, open(Path(case.prepared) / FILE, "wb") as out:
        ours = case.tokenizer == "ours"
        work = partial(tokenize, (Gigatoken if ours else Tiktoken)(case.vocabulary))
        for ids in processes.map(work, case.row_groups()):
            ids.tofile(out)


def get_batch(data: Ids, starts: Any) -> torch.Tensor:
    rows = [data[start : start + SEQ_LEN].astype(np.int64) for start in starts.tolist()]
    return torch.stack([torch.from_numpy(row) for row in rows])


class Rows:
    """A map-style dataset: a slice of the file for each row."""

    def __init__(self, path: Path) -> None:
        self._ids = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self._ids) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> Pair:
        row = torch.from_numpy(self._ids[index * SEQ_LEN :][: SEQ_LEN + 1].astype(np.int64))
        return row[:-1], row[1:]


def stream(case: Case) -> Stream:
    if case.variant == "loader":
        rows: Any = Rows(Path(case.prepared) / FILE)
        order: Any = {"shuffle": case.shuffle, "num_workers": case.workers, "drop_last": True}
        return Stream(iter(torch.utils.data.DataLoader(rows, BATCH_SIZE, **order)))
    if case.state:
        raise NotOffered("it has no state")
    torch.manual_seed(SEED)
    path = Path(case.prepared) / FILE

    def batches() -> Iterator[Pair]:
        for number in range((path.stat().st_size // 2 - 1) // TOKENS):
            # Opened for each batch, as nanoGPT does, so that the pages it has read do not stay.
            data = np.memmap(path, np.uint16, "r")
            if case.shuffle:
                starts = torch.randint(len(data) - SEQ_LEN, (BATCH_SIZE,))
            else:
                starts = (number * BATCH_SIZE + torch.arange(BATCH_SIZE)) * SEQ_LEN
            yield get_batch(data, starts), get_batch(data, starts + 1)

    return Stream(batches())

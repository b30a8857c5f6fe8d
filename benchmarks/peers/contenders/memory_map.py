"""A flat file of token ids and `numpy.memmap`, as nanoGPT has it.

In:    a uint16 .bin. `prepare` makes it with tiktoken, in two processes, as nanoGPT's own script does.
Out:   16 slices of 1024 ids and the same slices one id further, int64. Shuffled: from random offsets, with replacement,
       which is all that nanoGPT does; it has no end, so the stream ends after as many batches as the file holds.
       In order is not nanoGPT's: the same reads from offsets that follow one another.
Where: the process that calls it. It has no workers, so their number changes nothing.
State: none. nanoGPT saves the model, the optimizer and the step, and draws other offsets when it goes on.
"""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from case import BATCH_SIZE, SEQ_LEN, Case, NotOffered
from encoders import Encode, Gigatoken, Tiktoken

FILE = "train.bin"
PROCESSES = 2
SEED = 1337
"""nanoGPT's."""


class RowGroups:
    """From a file's row group to its ids, in a process that loads the tokenizer once."""

    encode: Encode

    @classmethod
    def begin(cls, case: Case) -> None:
        """In each process."""
        cls.encode = staticmethod(
            Gigatoken(case.vocabulary) if case.tokenizer == "ours" else Tiktoken(case.vocabulary)
        )

    @classmethod
    def ids(cls, place: tuple[Path, int]) -> npt.NDArray[np.uint16]:
        """Of one row group."""
        import pyarrow.parquet as pq

        file, group = place
        column = (
            pq.ParquetFile(file)
            .read_row_group(group, columns=["text"], use_threads=False)
            .column(0)
        )
        return cls.encode(column.combine_chunks())


def prepare(case: Case) -> None:
    """Tokenize everything into one file."""
    import pyarrow.parquet as pq

    places = [
        (file, group)
        for file in case.files()
        for group in range(pq.ParquetFile(file).num_row_groups)
    ]
    # Spawned: pyarrow's threads, which the footers above have started, do not survive a fork.
    with (
        get_context("spawn").Pool(PROCESSES, RowGroups.begin, (case,)) as pool,
        open(Path(case.prepared) / FILE, "wb") as out,
    ):
        for ids in pool.imap(RowGroups.ids, places):
            ids.tofile(out)


class MemoryMap:
    """`get_batch`, and a count of what it gave."""

    def __init__(self, case: Case) -> None:
        if case.state:
            raise NotOffered("nanoGPT keeps no place in its data")
        self._file = Path(case.prepared) / FILE
        self._shuffle = case.shuffle
        self._given = 0
        torch.manual_seed(SEED)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Made anew for each batch, as nanoGPT does, so that the pages it has read do not stay with the process.
        data = np.memmap(self._file, np.uint16, "r")
        if (self._given + 1) * BATCH_SIZE * SEQ_LEN + 1 > len(data):
            raise StopIteration
        if self._shuffle:
            starts = torch.randint(len(data) - SEQ_LEN, (BATCH_SIZE,))
        else:
            starts = (self._given * BATCH_SIZE + torch.arange(BATCH_SIZE)) * SEQ_LEN
        self._given += 1
        return rows(data, starts), rows(data, starts + 1)

    def state(self) -> Any:
        raise NotOffered("nanoGPT keeps no place in its data")

    def close(self) -> None:
        """Nothing is held between batches."""


def rows(data: npt.NDArray[np.uint16], starts: torch.Tensor) -> torch.Tensor:
    """One row from each start."""
    return torch.stack(
        [
            torch.from_numpy(data[start : start + SEQ_LEN].astype(np.int64))
            for start in starts.tolist()
        ]
    )


def stream(case: Case) -> MemoryMap:
    """Start it."""
    return MemoryMap(case)

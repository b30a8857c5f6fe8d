"""Hugging Face `datasets`, streamed: a batched map tokenizes and packs, StatefulDataLoader has the workers.

Packing is that of its language modelling examples (`group_texts`): the documents of one call of the map are
concatenated and cut into rows; what does not fill a row is dropped. Rows overlap by one id, so within a call none is
lost. A map that carried the remainder over would not resume: its state has no place for it.
`tokenizers` is left to use its own threads in each worker: with TOKENIZERS_PARALLELISM=false one run each with one and
two workers took a fifth longer, on a busy machine.
Out:   rows of the workers' shards, 16 at a time, from the workers in turn: the order depends on their number.
State: StatefulDataLoader.state_dict, which holds the dataset's own. Its documentation says that a shuffle buffer is not
       part of it: what is in the buffer is lost.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from case import BATCH_SIZE, SEQ_LEN, Case
from encoders import encoder
from packing import Ids

SEED = 42
BUFFER = 1000
"""Documents of the shuffle buffer: the library's default."""
ROWS = 256
"""Documents of one call of the map. 1,000, the default, took the same CPU time, and a smaller call is done sooner. Each
call drops about half a row, so 256 lose about one id in 700."""
PREFETCH = 8
"""Batches that each worker is ahead. Not varied."""


class Pack:
    """The function of the map: texts to rows of 1024 + 1 ids."""

    def __init__(self, case: Case) -> None:
        self._encode = encoder(case)

    def __call__(self, texts: list[str]) -> dict[str, Ids]:
        ids = self._encode(texts)
        if len(ids) <= SEQ_LEN:
            return {"ids": np.empty((0, SEQ_LEN + 1), np.uint16)}
        return {"ids": np.lib.stride_tricks.sliding_window_view(ids, SEQ_LEN + 1)[::SEQ_LEN]}


def rows_of(examples: list[dict[str, Ids]]) -> Ids:
    """In place of DataLoader's own conversion to tensors in shared memory: 16-bit numpy goes through the pipe.

    3,000 batches, two workers, the whole process, one run each: 21.9 s of CPU time with tensors, 12.8 s so. A map in the format
    "arrow", which would hand columns to the tokenizer, took 20.9 s: its rows come out one table each.
    """
    return np.stack([example["ids"] for example in examples])


class Streamed:
    """A DataLoader's iterator over a streamed dataset."""

    def __init__(self, case: Case) -> None:
        if "://" in case.source:
            texts = load_dataset(
                case.source.removeprefix("hf://datasets/"), split="train", streaming=True
            )
        else:
            files = [str(file) for file in case.files()]
            texts = load_dataset("parquet", data_files=files, split="train", streaming=True)
        texts = texts.select_columns(["text"])
        if texts.num_shards < case.workers:
            texts = texts.reshard()  # by row group: else a worker would have nothing to do
        if case.shuffle:
            # By default up to 10 shards fill the buffer. With that, a state of two workers could not be loaded again
            # (IndexError, datasets 5.2.0): it lists a worker's own shards and is loaded over those of all.
            texts = texts.shuffle(seed=SEED, buffer_size=BUFFER, max_buffer_input_shards=1)
        rows = texts.map(
            Pack(case),
            input_columns=["text"],
            batched=True,
            batch_size=ROWS,
            remove_columns=["text"],
        )
        self._loader = StatefulDataLoader(
            rows,
            batch_size=BATCH_SIZE,
            num_workers=case.workers,
            prefetch_factor=PREFETCH,
            collate_fn=rows_of,
            drop_last=True,
        )
        if case.state:
            with open(case.state, "rb") as file:
                self._loader.load_state_dict(pickle.load(file))
        self._batches = iter(self._loader)

    def __next__(self) -> tuple[Any, Any]:
        ids = torch.from_numpy(next(self._batches).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        del self._batches, self._loader  # the iterator ends its workers when it goes


def stream(case: Case) -> Streamed:
    """Start it."""
    return Streamed(case)

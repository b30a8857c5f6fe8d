"""Hugging Face `datasets`, streamed: a batched map tokenizes and packs, StatefulDataLoader has the workers.

Packing is that of its language modelling examples (`group_texts`): the documents of one call of the
map are concatenated and cut into rows; what does not fill a row is dropped. A map that kept the
remainder would not resume: its state has no place for it. `tokenizers` uses its own threads in each
worker: with TOKENIZERS_PARALLELISM=false runs took a fifth longer. The order of rows depends on the
number of workers. A shuffle buffer is not part of its state: what is in the buffer is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from datasets import load_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from case import BATCH_SIZE, SEED, SEQ_LEN, Case, Ids, Pair, Stream
from encoders import encoder

BUFFER = 1000
"""Documents of the shuffle buffer: the library's default."""
ROWS = 256
"""Documents of one call of the map. 1,000, the default, took the same CPU time, and a smaller call
is done sooner. Each call drops about half a row, so 256 lose about one id in 700."""
PREFETCH = 8


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
    """Stack rows as 16-bit numpy, which takes half the CPU time of tensors in shared memory."""
    return np.stack([example["ids"] for example in examples])


def stream(case: Case) -> Stream:
    if case.remote:
        name = case.source.removeprefix("hf://datasets/")
        texts = load_dataset(name, split="train", streaming=True)
    else:
        files = [str(file) for file in case.files()]
        texts = load_dataset("parquet", data_files=files, split="train", streaming=True)
    texts = texts.select_columns(["text"])
    if texts.num_shards < case.workers:
        texts = texts.reshard()  # by row group: else a worker would have nothing to do
    if case.shuffle:
        # With the default of 10 input shards a state of two workers could not be loaded again
        # (IndexError, datasets 5.2.0): it lists a worker's own shards and is loaded over all.
        texts = texts.shuffle(seed=SEED, buffer_size=BUFFER, max_buffer_input_shards=1)
    columns = {"input_columns": ["text"], "remove_columns": ["text"]}
    loader = StatefulDataLoader(
        texts.map(Pack(case), batched=True, batch_size=ROWS, **columns),
        batch_size=BATCH_SIZE,
        num_workers=case.workers,
        prefetch_factor=PREFETCH,
        collate_fn=rows_of,
        drop_last=True,
    )
    if case.state:
        loader.load_state_dict(case.saved())

    def batches() -> Iterator[Pair]:
        for rows in loader:
            ids = torch.from_numpy(rows.astype(np.int64))
            yield ids[:, :-1], ids[:, 1:]

    return Stream(batches(), loader.state_dict)

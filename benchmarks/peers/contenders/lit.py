"""litdata: `StreamingDataset` and `StreamingDataLoader`.

In:    parquet: the Parquet files as they are, with the index that `prepare` makes of them. Documents are tokenized by
                the collate function and packed by the caller.
       tokens:  chunks of ids that `prepare` makes with `optimize`, cut into blocks of 1025 by `TokensLoader`. Blocks do
                not overlap, and what is left at the end of a chunk is lost, as its guide to pretraining has it.
Out:   inputs and targets, int64.
Where: worker processes read, and tokenize; the process that calls packs.
State: `StreamingDataLoader.state_dict()`. For parquet also the ids that have not been given yet, which the training
       script has to keep itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from litdata import (  # type: ignore[import-not-found, unused-ignore]
    StreamingDataLoader,
    StreamingDataset,
    TokensLoader,
    index_parquet_dataset,
    optimize,
)
from litdata.streaming.item_loader import ParquetLoader  # type: ignore[import-not-found, unused-ignore]

from case import BATCH_SIZE, SEQ_LEN, Case
from contenders.workers import Documents, Rows
from encoders import Encode, Tokenizers, encoder
from packing import Ids

DOCUMENTS = 64
"""Of a call to the tokenizer. The corpus took 16.5 s of CPU time with 16, 14.1 with 64 and 14.0 with 256."""
PROCESSES = 2


def prepare(case: Case) -> None:
    """An index of the Parquet files, or chunks of ids."""
    import pyarrow.parquet as pq

    if case.variant == "parquet":
        # The index has to lie beside the files: where another place is given, it is copied there.
        for file in case.files():
            (Path(case.prepared) / file.name).symlink_to(file.resolve())
        index_parquet_dataset(case.prepared)
        return
    # Row groups rather than files, so that one file gives work to both processes; each uses one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    optimize(
        fn=partial(tokenized, encode=Tokenizers(case.vocabulary)),
        inputs=[
            (str(file), group)
            for file in case.files()
            for group in range(pq.ParquetFile(file).num_row_groups)
        ],
        output_dir=case.prepared,
        chunk_size=(SEQ_LEN + 1) * 8012,
        item_loader=TokensLoader(),
        num_workers=PROCESSES,
        reorder_files=False,
    )


def tokenized(place: tuple[str, int], encode: Encode) -> Iterator[Ids]:
    """The ids of a row group, some documents at a time: they are concatenated anyway."""
    import pyarrow.parquet as pq

    file, group = place
    for texts in pq.ParquetFile(file).iter_batches(256, row_groups=[group], columns=["text"]):
        yield encode(texts.column(0))


class Tokenize:
    """A collate function."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def __call__(self, rows: list[dict[str, str]]) -> torch.Tensor:
        return torch.from_numpy(self._encode([row["text"] for row in rows]))


def stack(rows: list[Ids]) -> torch.Tensor:
    """A collate function for blocks of ids."""
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def tokens(case: Case) -> Rows:
    """Blocks as they were cut."""
    dataset = StreamingDataset(
        case.prepared,
        item_loader=TokensLoader(block_size=SEQ_LEN + 1),
        shuffle=case.shuffle,
        drop_last=True,
    )
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=case.workers, collate_fn=stack, drop_last=True
    )
    return Rows(case, loader)


def text(case: Case) -> Documents:
    """Documents, tokenized in the workers."""
    # Each worker would start as many tokenizing threads as there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    dataset = StreamingDataset(
        case.prepared,
        item_loader=ParquetLoader(columns=["text"]),
        shuffle=case.shuffle,
        drop_last=False,
    )
    loader = StreamingDataLoader(
        dataset,
        batch_size=DOCUMENTS,
        num_workers=case.workers,
        collate_fn=Tokenize(encoder(case)),
        multiprocessing_context="spawn",  # ParquetLoader refuses to be forked
    )
    return Documents(case, loader, torch.Tensor.numpy)


def stream(case: Case) -> Documents | Rows:
    """Start it."""
    return tokens(case) if case.variant == "tokens" else text(case)

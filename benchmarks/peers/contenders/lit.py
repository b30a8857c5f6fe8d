"""litdata: `StreamingDataset` and `StreamingDataLoader`.

parquet: the Parquet files as they are, with the index that `prepare` makes. Documents are tokenized
         by the collate function in worker processes and packed by the caller.
tokens:  chunks of ids that `prepare` makes with `optimize`, cut into blocks of 1025 by
         `TokensLoader`. Blocks do not overlap, and what is left at the end of a chunk is lost, as
         its guide to pretraining has it.

A state that is loaded with another number of workers switches to its elastic mode by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from litdata import (  # type: ignore[import-not-found, unused-ignore]
    StreamingDataLoader,
    StreamingDataset,
    TokensLoader,
    index_parquet_dataset,
    optimize,
)
from litdata.streaming.item_loader import ParquetLoader  # type: ignore[import-not-found, unused-ignore]

from case import BATCH_SIZE, SEQ_LEN, Case, Ids, Stream, read_texts
from contenders.rows import collate_rows, document_stream, row_stream
from encoders import Encode, encoder

DOCUMENTS = 64
"""Of a call to the tokenizer. The corpus took 16.5 s of CPU time with 16, 14.1 with 64 and 14.0
with 256."""


def prepare(case: Case) -> None:
    """Make an index of the Parquet files, or chunks of ids."""
    if case.variant == "parquet":
        # The index has to lie beside the files.
        for file in case.files():
            (Path(case.prepared) / file.name).symlink_to(file.resolve())
        index_parquet_dataset(case.prepared)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process uses one core
    optimize(
        fn=partial(tokenized, encode=encoder(case)),
        inputs=case.row_groups(),
        output_dir=case.prepared,
        chunk_size=(SEQ_LEN + 1) * 8012,
        item_loader=TokensLoader(),
        num_workers=case.workers,
        reorder_files=False,
    )


def tokenized(place: tuple[str, int], encode: Encode) -> Iterator[Ids]:
    """Yield the ids of a row group, some documents at a time: they are concatenated anyway."""
    texts = read_texts(*place)
    for at in range(0, len(texts), 256):
        yield encode(texts.slice(at, 256))


def collate_texts(rows: list[dict[str, str]], encode: Encode) -> torch.Tensor:
    return torch.from_numpy(encode([row["text"] for row in rows]))


def stream(case: Case) -> Stream:
    tokens = case.variant == "tokens"
    item_loader = TokensLoader(block_size=SEQ_LEN + 1) if tokens else ParquetLoader(["text"])
    options = {"shuffle": case.shuffle, "drop_last": tokens}
    dataset = StreamingDataset(case.prepared, item_loader=item_loader, **options)
    load: Any = partial(StreamingDataLoader, dataset, num_workers=case.workers)
    if tokens:
        return row_stream(
            case, load(batch_size=BATCH_SIZE, collate_fn=collate_rows, drop_last=True)
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else each worker starts a thread for each core
    collate = partial(collate_texts, encode=encoder(case))
    spawned = {"multiprocessing_context": "spawn"}  # ParquetLoader refuses to be forked
    loader = load(batch_size=DOCUMENTS, collate_fn=collate, **spawned)
    return document_stream(case, loader, torch.Tensor.numpy)

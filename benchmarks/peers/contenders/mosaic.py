"""MosaicML Streaming: shards of its MDS format, its `StreamingDataset` and its `StreamingDataLoader`.

In:    shards that `prepare` writes with `MDSWriter` from the Parquet files; it does not stream anything else.
       tokens: rows of 1025 ids, concatenated and cut beforehand, as its guides to pretraining do.
       text:   documents, tokenized on the fly by the collate function, packed by the caller.
Out:   inputs and targets, int64.
Where: worker processes read, and tokenize; the process that calls packs.
State: `StreamingDataLoader.state_dict()`: the epoch, and the samples given in it. For text also the ids that have not
       been given yet, which the training script has to keep itself.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found, unused-ignore]
from streaming.base.util import clean_stale_shared_memory  # type: ignore[import-not-found, unused-ignore]

from case import BATCH_SIZE, SEQ_LEN, Case
from contenders.workers import Documents, Rows
from encoders import Encode, encoder
from packing import Ids

DOCUMENTS = 256
"""Of a call to the tokenizer. The corpus took 13.8 s of CPU time with 64 and 12.5 with 256, seen once each."""


def prepare(case: Case) -> None:
    """Write the shards."""
    import pyarrow.parquet as pq

    groups = (
        group.column("text")
        for file in case.files()
        for group in pq.ParquetFile(file).iter_batches(1024, columns=["text"])
    )
    if case.variant == "text":
        with MDSWriter(out=case.prepared, columns={"text": "str"}) as out:
            for texts in groups:
                for text in texts.to_pylist():
                    out.write({"text": text})
        return
    encode = encoder(case)
    rest: Ids = np.empty(0, np.uint16)
    with MDSWriter(out=case.prepared, columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as out:
        for texts in groups:
            flat = np.concatenate([rest, encode(texts)])
            last = (len(flat) - 1) // SEQ_LEN * SEQ_LEN
            for at in range(0, last, SEQ_LEN):
                out.write({"tokens": flat[at : at + SEQ_LEN + 1]})
            rest = flat[last:]


class Tokenize:
    """A collate function. The loader counts samples by the length of the first thing in a batch: the documents."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def __call__(self, samples: list[dict[str, str]]) -> tuple[list[int], torch.Tensor]:
        texts = [sample["text"] for sample in samples]
        return [len(text) for text in texts], torch.from_numpy(self._encode(texts))


def stack(samples: list[dict[str, Ids]]) -> torch.Tensor:
    """A collate function for rows of ids."""
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def loader_of(case: Case, batch_size: int, **settings: Any) -> Any:
    """Over the shards, where the state says."""
    # A process that was killed leaves its shared memory behind, which its documentation has the next one clear.
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=case.prepared, batch_size=batch_size, shuffle=case.shuffle)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=case.workers, **settings)


def ids_of(batch: tuple[list[int], torch.Tensor]) -> Ids:
    """The ids of a batch of documents."""
    ids: Ids = batch[1].numpy()
    return ids


def stream(case: Case) -> Documents | Rows:
    """Start it."""
    if case.variant != "text":
        return Rows(case, loader_of(case, BATCH_SIZE, collate_fn=stack, drop_last=True))
    # Each worker would start as many tokenizing threads as there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Documents(case, loader_of(case, DOCUMENTS, collate_fn=Tokenize(encoder(case))), ids_of)

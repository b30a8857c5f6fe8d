"""MosaicML Streaming: shards of its MDS format, its `StreamingDataset` and its `StreamingDataLoader`.

`prepare` writes the shards with `MDSWriter`; it streams nothing else. Variant "text": documents,
tokenized by the collate function in worker processes, packed by the caller. Else rows of 1025 ids,
concatenated and cut beforehand, as its guides to pretraining do.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found, unused-ignore]
from streaming.base.util import clean_stale_shared_memory  # type: ignore[import-not-found, unused-ignore]

from case import BATCH_SIZE, SEQ_LEN, Case, Ids, Stream, read_texts
from contenders.rows import collate_rows, cut_rows, document_stream, row_stream
from encoders import Encode, encoder

DOCUMENTS = 256
"""Of a call to the tokenizer. The corpus took 13.8 s of CPU time with 64 and 12.5 with 256."""


def prepare(case: Case) -> None:
    """Write the shards."""
    row_groups = (read_texts(*place) for place in case.row_groups())
    if case.variant == "text":
        with MDSWriter(out=case.prepared, columns={"text": "str"}) as out:
            for texts in row_groups:
                for text in texts.to_pylist():
                    out.write({"text": text})
        return
    with MDSWriter(out=case.prepared, columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as out:
        for rows in cut_rows(map(encoder(case), row_groups)):
            for row in rows:
                out.write({"tokens": row})


def collate_texts(samples: list[dict[str, str]], encode: Encode) -> tuple[list[int], torch.Tensor]:
    """The loader counts samples by the length of the first item of a batch: the documents."""
    texts = [sample["text"] for sample in samples]
    return [len(text) for text in texts], torch.from_numpy(encode(texts))


def collate_ids(samples: list[dict[str, Ids]]) -> Any:
    return collate_rows([sample["tokens"] for sample in samples])


def stream(case: Case) -> Stream:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else each worker starts a thread for each core
    # A process that was killed leaves its shared memory behind; its documentation clears it so.
    clean_stale_shared_memory()
    size = DOCUMENTS if case.variant == "text" else BATCH_SIZE
    dataset = StreamingDataset(local=case.prepared, batch_size=size, shuffle=case.shuffle)
    load = partial(StreamingDataLoader, dataset, batch_size=size, num_workers=case.workers)
    if case.variant != "text":
        return row_stream(case, load(collate_fn=collate_ids, drop_last=True))
    loader = load(collate_fn=partial(collate_texts, encode=encoder(case)))
    return document_stream(case, loader, lambda batch: batch[1].numpy())

"""LanceDB: a table of rows of 1025 ids and its `StreamingDataset`.

`prepare` writes the table. The dataset has its own threads for reads and transforms, so the `DataLoader`
has no worker processes, as in its documentation: two of them took more than twice as long. `workers`
is the number of threads for transforms. Rows are shuffled one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lancedb  # type: ignore[import-not-found, unused-ignore]
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataset  # type: ignore[import-not-found, unused-ignore]

from case import BATCH_SIZE, SEED, SEQ_LEN, Case, Ids, Stream, read_texts
from contenders.rows import collate_rows, cut_rows, full_batches
from encoders import encoder

ROWS = pa.schema({"tokens": pa.list_(pa.uint16(), SEQ_LEN + 1)})
SPLITS, READ = 4, 256
"""Into how many lists rows are divided (at least the number of ranks), and rows of a read. With 16
and 64 it took 1.7 times as long."""


def prepare(case: Case) -> None:
    """Write the table."""

    def batches() -> Iterator[pa.RecordBatch]:
        for rows in cut_rows(map(encoder(case), (read_texts(*each) for each in case.row_groups()))):
            ids = pa.FixedSizeListArray.from_arrays(rows.ravel(), type=ROWS.field(0).type)
            yield pa.record_batch([ids], schema=ROWS)

    table = lancedb.connect(case.prepared).create_table("rows", schema=ROWS)
    table.add(pa.RecordBatchReader.from_batches(ROWS, batches()))


def as_rows(batch: pa.RecordBatch) -> Ids:
    ids: Ids = batch.column(0).flatten().to_numpy()
    return ids.reshape(batch.num_rows, SEQ_LEN + 1)


def stream(case: Case) -> Stream:
    table = lancedb.connect(case.prepared).open_table("rows")
    order: dict[str, Any] = {"num_splits": SPLITS, "shuffle": case.shuffle, "shuffle_seed": SEED}
    threads = {"read_batch_size": READ, "transform_parallelism": case.workers}
    dataset = StreamingDataset(table, transform=as_rows, **order, **threads)
    if case.state:
        dataset.load_state_dict(case.saved())
    loader = torch.utils.data.DataLoader(dataset, BATCH_SIZE, collate_fn=collate_rows)
    return Stream(full_batches(loader), dataset.state_dict)

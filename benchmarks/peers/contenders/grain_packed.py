"""Google's Grain: a source with random access, workers that map it, and Grain's own packing.

The source's items are pieces of row groups. Grain packs rows of 1025 ids; inputs and targets are
those without the last and without the first, so the step from one row to the next is not a target.
Threads of Grain read and tokenize ahead, in order; one more packs. Variant "processes": each process
reads, tokenizes and packs its share. Shuffled: pieces by Grain's global shuffle, the documents of a
piece by its random_map.

Tried: ParquetIterDataset, which gives documents one by one and divides work by files: as fast with
`tokenizers`. Processes take half more CPU time, and give another stream for each number of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import grain  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import pyarrow.parquet as pq

from case import BATCH_SIZE, SEED, SEQ_LEN, Case, Ids, NotOffered, Pair, Stream, read_texts
from encoders import Encode, encoder

ROWS = {"own": 64, "ours": 1 << 20}
"""Documents of a piece. `tokenizers` takes seconds for a row group, and the first batch would wait
for it. With gigatoken, whole row groups took the least CPU time."""
AHEAD = 4
"""Batches that wait for the reader."""


class Pieces:
    """What Grain calls a random access data source."""

    def __init__(self, case: Case) -> None:
        self._rows = ROWS[case.tokenizer]
        self._pieces = [
            (file, group, at)
            for file, group in case.row_groups()
            for at in range(0, pq.read_metadata(file).row_group(group).num_rows, self._rows)
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Any:
        file, group, at = self._pieces[number]
        return kept_texts(file, group).slice(at, self._rows)


@functools.lru_cache(maxsize=2)
def kept_texts(file: str, group: int) -> Any:
    """Read a row group; neighbouring pieces are of the same one."""
    return read_texts(file, group)


def permute(column: Any, rng: np.random.Generator) -> Any:
    return column.take(rng.permutation(len(column)))


def tokenize(encode: Encode, column: Any) -> dict[str, Ids]:
    return {"tokens": encode(column)}


def collate(rows: Sequence[Mapping[str, Ids]]) -> Pair:
    """Make inputs and targets; positions and segments, which packing makes too, are left out."""
    tokens = np.stack([row["tokens"] for row in rows], dtype=np.int64)
    return tokens[:, :-1], tokens[:, 1:]


def stream(case: Case) -> Stream:
    if case.remote:
        raise NotOffered("it reads no Hub by itself")
    pieces = grain.MapDataset.source(Pieces(case)).seed(SEED)
    if case.shuffle:
        pieces = pieces.shuffle().random_map(permute)
    processes = case.variant == "processes"
    threads = 1 if processes else case.workers
    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    tokens = pieces.map(functools.partial(tokenize, encoder(case))).to_iter_dataset(reading)
    pack = grain.experimental.ConcatThenSplitIterDataset
    rows = pack(tokens, length_struct={"tokens": SEQ_LEN + 1})
    made = rows.batch(BATCH_SIZE, drop_remainder=True, batch_fn=collate)
    if processes:
        ahead = {"num_workers": case.workers, "per_worker_buffer_size": AHEAD}
        batches = iter(made.mp_prefetch(grain.MultiprocessingOptions(**ahead)))
    else:
        prefetch = grain.experimental.ThreadPrefetchIterDataset
        batches = iter(prefetch(made, prefetch_buffer_size=AHEAD))
    if case.state:
        batches.set_state(case.saved())
    return Stream(batches, batches.get_state, batches.close)

"""Google's Grain: a source with random access, workers that map it, and Grain's own packing.

In:    the Parquet files of a case, as pieces of row groups that can be asked for by number.
Out:   numpy. Grain packs rows of 1025 ids; inputs and targets are those without the last and without the first, so
       16,400 ids go into a batch, and the step from one row to the next is nobody's target.
Where: `workers` threads of Grain read and tokenize ahead, in order; one more packs and batches. Variant "processes":
       `workers` processes, each of which reads, tokenizes and packs its share of the pieces; batches come in turn.
State: what the iterator's get_state gives: the next piece, and which part of the one before is not packed yet.

Shuffled: the pieces by Grain's global shuffle, the documents of a piece by its random_map, seeded.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import grain  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import pyarrow.parquet as pq

from case import BATCH_SIZE, SEQ_LEN, Case, NotOffered
from encoders import Encode, encoder
from packing import Ids, Pair

SEED = 42
ROWS = {"own": 64, "ours": 1 << 20}
"""Documents of a piece. `tokenizers` takes seconds for a row group, and the first batch would wait for all of it. With
gigatoken, whole row groups took the least CPU time: a quarter less than pieces of 256 documents."""
AHEAD = 4
"""Batches that wait for the reader."""


class Pieces:
    """What Grain calls a random access data source."""

    def __init__(self, case: Case) -> None:
        rows = ROWS[case.tokenizer]
        self._pieces = [
            (str(file), group, at, rows)
            for file, footer in ((file, pq.read_metadata(file)) for file in case.files())
            for group in range(footer.num_row_groups)
            for at in range(0, footer.row_group(group).num_rows, rows)
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Any:
        file, group, at, rows = self._pieces[number]
        return texts(file, group).slice(at, rows)


@functools.lru_cache(maxsize=2)
def texts(file: str, group: int) -> Any:
    """The texts of a row group, an Arrow column. Neighbouring pieces are of the same one."""
    return pq.ParquetFile(file).read_row_group(group, columns=["text"]).column(0).combine_chunks()


def permute(column: Any, rng: np.random.Generator) -> Any:
    """Its documents in another order."""
    return column.take(rng.permutation(len(column)))


def tokenize(encode: Encode, column: Any) -> dict[str, Ids]:
    """As packing wants it: a feature of some length."""
    return {"tokens": encode(column)}


def collate(rows: Sequence[Mapping[str, Ids]]) -> Pair:
    """Inputs and targets. Positions and segments, which packing makes too, are left out."""
    tokens = np.stack([row["tokens"] for row in rows], dtype=np.int64)
    return tokens[:, :-1], tokens[:, 1:]


class Grain:
    """The iterator of a dataset.

    Tried on a busy machine: processes, which pack in parallel: with gigatoken faster in five pairs of runs of six, for
    half more CPU time in all, a later first batch, and another stream for each number of them; ParquetIterDataset,
    which gives documents one by one and divides work by files: as fast with `tokenizers`; smaller pieces: see ROWS.
    """

    def __init__(self, case: Case) -> None:
        if "://" in case.source:
            raise NotOffered("it reads no Hub by itself")
        pieces = grain.MapDataset.source(Pieces(case)).seed(SEED)
        if case.shuffle:
            pieces = pieces.shuffle().random_map(permute)
        processes = case.variant == "processes"
        threads = 1 if processes else case.workers
        tokens = pieces.map(functools.partial(tokenize, encoder(case))).to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        )
        rows = grain.experimental.ConcatThenSplitIterDataset(
            tokens, length_struct={"tokens": SEQ_LEN + 1}
        )
        batches = rows.batch(BATCH_SIZE, drop_remainder=True, batch_fn=collate)
        if processes:
            options = grain.MultiprocessingOptions(
                num_workers=case.workers, per_worker_buffer_size=AHEAD
            )
            self._batches = iter(batches.mp_prefetch(options))
        else:
            self._batches = iter(
                grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=AHEAD)
            )
        if case.state:
            with open(case.state, "rb") as file:
                self._batches.set_state(pickle.load(file))

    def __next__(self) -> Pair:
        inputs, targets = next(self._batches)
        return inputs, targets

    def state(self) -> Any:
        return self._batches.get_state()

    def close(self) -> None:
        self._batches.close()


def stream(case: Case) -> Grain:
    """Start it."""
    return Grain(case)

"""Meta's SPDL: a sampler of row groups, and stages on threads whose results keep the order of what came in.

In:    the Parquet files of a case. A sampler gives the numbers of row groups, and shuffles them if asked to.
Out:   torch tensors, which is what SPDL's examples make; variant "numpy": arrays, and torch is never imported.
Where: one thread reads, `workers` threads tokenize, one packs: a pool that an event loop on a further thread feeds.
State: none. SPDL has no checkpoints: its pipeline cannot say what was consumed, its sampler cannot start in the middle.

Shuffled: row groups by SPDL's own sampler, the documents of each by a permutation; nothing mixes row groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import spdl.source as samplers  # type: ignore[import-not-found, unused-ignore]
from spdl.pipeline import PipelineBuilder  # type: ignore[import-not-found, unused-ignore]
from spdl.source.utils import embed_shuffle  # type: ignore[import-not-found, unused-ignore]

from case import Case, NotOffered
from encoders import encoder
from packing import Ids, Packer

SEED = 42
ROWS = {"own": 64, "ours": 512}
"""Documents of a call to the tokenizer. `tokenizers` takes seconds for a row group, and the first batch would wait for
all of it. With gigatoken, 256, 512 and whole row groups took the same time."""
SINK = 2
"""Finished lists of batches, each of some tens with gigatoken: more would only take memory."""


class Read:
    """A row group, in pieces."""

    def __init__(self, rows: int, *, shuffle: bool) -> None:
        self._rows, self._shuffle = rows, shuffle

    def __call__(self, address: tuple[int, Path, int]) -> Iterator[Any]:
        """Arrow columns of texts."""
        number, file, group = address
        column = (
            pq.ParquetFile(file).read_row_group(group, columns=["text"]).column(0).combine_chunks()
        )
        if self._shuffle:
            column = column.take(np.random.default_rng((SEED, number)).permutation(len(column)))
        for at in range(0, len(column), self._rows):
            yield column.slice(at, self._rows)


class Pack:
    """Ids to batches. It keeps what is left over, so it is a stage without concurrency."""

    def __init__(self, *, tensors: bool) -> None:
        self._packer = Packer()
        self._tensors = tensors

    def __call__(self, ids: Ids) -> list[tuple[Any, Any]]:
        """The batches that are complete now."""
        batches = list(self._packer.add(ids))
        if not self._tensors:
            return list(batches)
        import torch

        return [
            (torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in batches
        ]


class Spdl:
    """A pipeline that runs ahead by what its queues hold."""

    def __init__(self, case: Case) -> None:
        if "://" in case.source:
            raise NotOffered("it reads no Hub by itself")
        if case.state:
            raise NotOffered("it has no checkpoints")
        tensors = case.variant != "numpy"
        if tensors:
            import torch  # noqa: F401 (a script that trains has it at its top)
        addresses = [
            (file, group)
            for file in case.files()
            for group in range(pq.read_metadata(file).num_row_groups)
        ]
        numbered = [(number, *address) for number, address in enumerate(addresses)]
        if case.shuffle:
            source = embed_shuffle(
                samplers.DistributedRandomSampler(len(numbered), rank=0, world_size=1), epoch=SEED
            )
        else:
            source = samplers.DistributedDeterministicSampler(len(numbered), rank=0, world_size=1)
        # The reader takes the lists of batches apart. A `disaggregate` stage, which passes each batch through the event
        # loop, took nearly half more CPU time. With it, a thread queue at the end gave a third more batches a second
        # than the default queue. An item that fails ends the pipeline: by default it would be dropped.
        self._pipeline = (
            PipelineBuilder()
            .add_source(source)
            .pipe(numbered)
            .pipe(Read(ROWS[case.tokenizer], shuffle=case.shuffle))
            .pipe(encoder(case), concurrency=case.workers, output_order="input")
            .pipe(Pack(tensors=tensors))
            .add_sink(SINK)
            .build(num_threads=case.workers + 2, max_failures=0, use_thread_output_queue=True)
        )
        self._pipeline.start()
        self._batches = chain.from_iterable(self._pipeline)

    def __next__(self) -> tuple[Any, Any]:
        inputs, targets = next(self._batches)
        return inputs, targets

    def state(self) -> Any:
        return None

    def close(self) -> None:
        self._pipeline.stop()


def stream(case: Case) -> Spdl:
    """Start it."""
    return Spdl(case)

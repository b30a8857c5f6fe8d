"""Meta's SPDL: a sampler of row groups, and stages on threads that keep the order of their input.

One thread reads, `workers` threads tokenize, one packs: a pool that an event loop on a further
thread feeds. Batches are torch tensors, as in SPDL's examples. Shuffled: row groups by SPDL's own
sampler, the documents of each by a permutation. It has no checkpoints: its pipeline does not know
what was consumed, and its sampler cannot start in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import spdl.source as samplers  # type: ignore[import-not-found, unused-ignore]
import torch  # noqa: F401 (a script that trains has it at its top)
from spdl.pipeline import PipelineBuilder  # type: ignore[import-not-found, unused-ignore]
from spdl.source.utils import embed_shuffle  # type: ignore[import-not-found, unused-ignore]

from case import SEED, Case, Ids, NotOffered, Packer, Pair, Stream, as_tensors, read_texts
from encoders import encoder

ROWS = {"own": 64, "ours": 512}
"""Documents of a call to the tokenizer. `tokenizers` takes seconds for a row group, and the first
batch would wait for it. With gigatoken, 256, 512 and whole row groups took the same time."""
SINK = 2
"""Finished lists of batches, each of some tens with gigatoken: more would only take memory."""


def stream(case: Case) -> Stream:
    if case.remote or case.state:
        raise NotOffered("it reads no Hub by itself" if case.remote else "it has no checkpoints")
    addresses = case.row_groups()
    rows = ROWS[case.tokenizer]

    def read(number: int) -> Iterator[Any]:
        texts = read_texts(*addresses[number])
        if case.shuffle:
            texts = texts.take(np.random.default_rng((SEED, number)).permutation(len(texts)))
        for at in range(0, len(texts), rows):
            yield texts.slice(at, rows)

    packer = Packer()

    def pack(ids: Ids) -> list[Pair]:
        return [as_tensors(pair) for pair in packer.add(ids)]

    size = {"rank": 0, "world_size": 1}
    if case.shuffle:
        shuffled = samplers.DistributedRandomSampler(len(addresses), **size)
        source = embed_shuffle(shuffled, epoch=SEED)
    else:
        source = samplers.DistributedDeterministicSampler(len(addresses), **size)
    # The reader takes lists of batches apart: a `disaggregate` stage, which passes each batch
    # through the event loop, took nearly half more CPU time. An item that fails ends the pipeline:
    # by default it would be dropped.
    pipeline = (
        PipelineBuilder()
        .add_source(source)
        .pipe(read)
        .pipe(encoder(case), concurrency=case.workers, output_order="input")
        .pipe(pack)
        .add_sink(SINK)
        .build(num_threads=case.workers + 2, max_failures=0, use_thread_output_queue=True)
    )
    pipeline.start()
    return Stream(chain.from_iterable(pipeline), close=pipeline.stop)

"""The loop that people write first: read some rows, tokenize them, pack them. No threads of its own.

`tokenizers` uses all cores by itself; `tiktoken` is given the rows one by one. It has no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from case import Case, NotOffered, Packer, Pair, Stream
from encoders import Tiktoken, encoder

ROWS = 256
"""Documents of a call to the tokenizer."""


def opened_files(case: Case) -> Iterator[Any]:
    if not case.remote:
        yield from case.files()
        return
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem()
    for name in sorted(hub.glob(f"{case.source.removeprefix('hf://')}/**/*.parquet")):
        with hub.open(name) as file:
            yield file


def stream(case: Case) -> Stream:
    if case.shuffle:
        raise NotOffered("a plain loop does not shuffle")
    encode = Tiktoken(case.vocabulary) if case.variant == "tiktoken" else encoder(case)

    def batches() -> Iterator[Pair]:
        packer = Packer()
        for file in opened_files(case):
            for table in pq.ParquetFile(file).iter_batches(ROWS, columns=["text"]):
                yield from packer.add(encode(table.column(0)))

    return Stream(batches())

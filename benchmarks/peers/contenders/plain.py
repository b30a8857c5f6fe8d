"""The loop that everybody writes first: read a batch of rows, tokenize it, pack it. No threads of its own.

`tokenizers` uses all cores by itself; `tiktoken` is given the rows one by one.
State: none that could be saved: who resumes such a loop starts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from case import Case, NotOffered
from encoders import Tiktoken, encoder
from packing import Packer, Pair

ROWS = 256
"""Of a call to the tokenizer."""


class Plain:
    """A generator, and nothing ahead of it."""

    def __init__(self, case: Case) -> None:
        if case.shuffle:
            raise NotOffered("a plain loop does not shuffle")
        self._case = case
        self._encode = Tiktoken(case.vocabulary) if case.variant == "tiktoken" else encoder(case)
        self._batches = self._run()

    def _tables(self) -> Iterator[Any]:
        if "://" not in self._case.source:
            for file in self._case.files():
                yield from pq.ParquetFile(file).iter_batches(ROWS, columns=["text"])
            return
        from huggingface_hub import HfFileSystem

        far = HfFileSystem()
        for name in sorted(far.glob(f"{self._case.source.removeprefix('hf://')}/**/*.parquet")):
            with far.open(name) as opened:
                yield from pq.ParquetFile(opened).iter_batches(ROWS, columns=["text"])

    def _run(self) -> Iterator[Pair]:
        packer = Packer()
        for table in self._tables():
            yield from packer.add(self._encode(table.column(0)))

    def __next__(self) -> Pair:
        return next(self._batches)

    def state(self) -> Any:
        return None

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]


def stream(case: Case) -> Plain:
    """Start it."""
    return Plain(case)

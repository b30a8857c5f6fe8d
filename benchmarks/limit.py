"""References for loaders: decode + tokenize alone, and PyTorch's `DataLoader`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, SEQ_LEN


class DecodeAndTokenize:
    """Row groups of Parquet files through gigatoken on threads; the ids are only counted.

    Each thread has its own tokenizer, so a second pass is warm.
    """

    def __init__(self, files: Sequence[Path], vocabulary: str, workers: int) -> None:
        import pyarrow.compute  # noqa: F401 (else the first cast imports it)

        self._vocabulary = vocabulary
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(workers)
        self._chunks: list[Callable[[], Any]] = []
        for file in files:
            self._chunks += _row_groups(file)

    def counts(self) -> Iterator[int]:
        """Yield the number of ids of each chunk of one pass."""
        return self._pool.map(self._encode, self._chunks)

    def _encode(self, read: Callable[[], Any]) -> int:
        import awkward
        import gigatoken

        if not hasattr(self._own, "tokenizer"):
            self._own.tokenizer = gigatoken.Tokenizer(self._vocabulary)
        encoded = self._own.tokenizer.encode_batch(awkward.from_arrow(read()), parallel=False)
        return len(encoded.layout.content.data)

    def close(self) -> None:
        """Cancel pending tasks, and join the threads."""
        self._pool.shutdown(cancel_futures=True)


def _row_groups(path: Path) -> list[Callable[[], Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(group: int) -> Any:
        file = pq.ParquetFile(path, memory_map=True)
        table = file.read_row_group(group, columns=["text"], use_threads=False)
        return table.column("text").cast(pa.large_string())

    return [partial(read, group) for group in range(pq.read_metadata(path).num_row_groups)]


class MemoryMapRows:
    """A map-style dataset as in nanoGPT: each sample is a slice of the memory map."""

    def __init__(self, path: Path) -> None:
        import numpy as np
        import torch

        self._ids = np.memmap(path, np.uint16, "r")
        self._int64, self._tensor = np.int64, torch.from_numpy

    def __len__(self) -> int:
        return (len(self._ids) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._ids[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].astype(self._int64)
        return self._tensor(row[:-1]), self._tensor(row[1:])


def torch_batches(data: Any, workers: int, batch_size: int = BATCH_SIZE) -> Iterator[Any]:
    """Yield batches of PyTorch's DataLoader for endless epochs, with persistent workers."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        data, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        yield from loader

"""The limit of a text loader: decode and tokenize on N threads, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any


class DecodeAndTokenize:
    """Row groups of Parquet files through gigatoken; the ids are only counted.

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
        """Cancel what has not begun, and join the threads."""
        self._pool.shutdown(cancel_futures=True)


def _row_groups(path: Path) -> list[Callable[[], Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(group: int) -> Any:
        file = pq.ParquetFile(path, memory_map=True)
        table = file.read_row_group(group, columns=["text"], use_threads=False)
        return table.column("text").cast(pa.large_string())

    return [partial(read, group) for group in range(pq.read_metadata(path).num_row_groups)]

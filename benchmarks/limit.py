"""What no loader of text can avoid: decode and tokenize, and nothing else.

In:    a corpus, and how many threads.
Out:   the seconds that it takes.
Where: a contender's own process.
State: tokenizers, one for each thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import Kind
from corpora import Corpus

BLOCK_BYTES = 4 << 20


Chunk = Callable[[], Any]
"""Reads the texts of one chunk."""


class Limit:
    """Decode and gigatoken alone, on N threads."""

    def __init__(
        self, corpus: Corpus, kind: Kind, workers: int, copies: int, passes: int, warm: bool
    ) -> None:
        import awkward
        import gigatoken
        import pyarrow.compute  # noqa: F401 (else the first cast imports it, within the clock)

        load: Callable[[], Any] = partial(gigatoken.Tokenizer, str(corpus.tokenizer))
        self._from_arrow = awkward.from_arrow
        self._workers = workers
        self._passes = passes
        folder = corpus.copies(copies, kind)
        files = sorted(folder.iterdir())
        # For each thread the same list of chunks, read through files of its own.
        self._chunks: list[list[Chunk]] = [
            [
                chunk
                for file in files
                for chunk in (_row_groups(file) if kind == "parquet" else _blocks(file))
            ]
            for _ in range(workers)
        ]
        self._instances: list[Any] = [load() for _ in range(workers)]
        texts = self._from_arrow(corpus.texts() if warm else one_word())
        for instance in self._instances:
            instance.encode_batch(texts, parallel=False)

    def measure(self) -> dict[str, Any]:
        numbers = itertools.count()  # its next() is atomic
        total = len(self._chunks[0])
        results: list[tuple[int, float, float]] = []

        def work(i: int) -> None:
            instance = self._instances[i]
            ids = 0
            decode = tokenize = 0.0
            while (n := next(numbers)) < total * self._passes:
                a = time.thread_time()
                texts = self._chunks[i][n % total]()
                b = time.thread_time()
                encoded = instance.encode_batch(self._from_arrow(texts), parallel=False).layout
                ids += len(encoded.content.data)
                decode, tokenize = decode + b - a, tokenize + time.thread_time() - b
            results.append((ids, decode, tokenize))

        seconds = run_threads([partial(work, i) for i in range(self._workers)])
        if len(results) < self._workers:
            raise RuntimeError("a thread of the limit failed; see its error above")
        ids, decode, tokenize = (sum(values) for values in zip(*results, strict=True))
        return {"seconds": seconds, "ids": ids, "cpu": {"decode": decode, "tokenize": tokenize}}


def one_word() -> Any:
    """A text that leaves a tokenizer's cache cold, long enough for calls to overlap: it has all imports made."""
    import pyarrow as pa

    return pa.array(["the " * 1_000_000], pa.large_string())


def run_threads(functions: list[Callable[[], None]]) -> float:
    """Run each on a thread of its own; the seconds until all are done."""
    threads = [threading.Thread(target=function) for function in functions]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def _row_groups(path: Path) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True)

    def read(i: int) -> Any:
        return (
            file.read_row_group(i, columns=["text"], use_threads=False)
            .column("text")
            .cast(pa.large_string())
        )

    return (partial(read, i) for i in range(file.num_row_groups))


def _blocks(path: Path) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.json as pj

    file = open(path, "rb")  # noqa: SIM115 (open as long as the process)
    fd = file.fileno()
    parse = pj.ParseOptions(
        explicit_schema=pa.schema([("text", pa.string())]), unexpected_field_behavior="ignore"
    )

    def read(lo: int, hi: int, held: Any = file) -> Any:
        block = os.pread(fd, hi - lo, lo)
        options = pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
        table = pj.read_json(pa.BufferReader(block), read_options=options, parse_options=parse)
        return table.column("text").cast(pa.large_string())

    cuts = [0]
    while cuts[-1] < path.stat().st_size:
        file.seek(min(cuts[-1] + BLOCK_BYTES, path.stat().st_size))
        file.readline()
        cuts.append(file.tell())
    return (partial(read, lo, hi) for lo, hi in itertools.pairwise(cuts))

"""What no loader can avoid, and nothing else: the yardsticks.

"text":  row groups decoded and tokenized by gigatoken on as many threads, each with an instance and files of its own;
         the ids are counted and thrown away, and a batch is an empty one for every 16,384 of them.
"copy":  from a file of ids in the page cache, the order known: one gather and two copies that widen, for each batch.
         With "copy torch" they are wrapped as tensors.
"list", "deque": batches that were made beforehand, taken from a list, which needs no Python, or from a deque by an iterator
         written in Python that does nothing else. For a consumer that waits.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from case import BATCH_SIZE, SEQ_LEN, Case, NotOffered

TOKENS = "tokens.bin"
READY = 256
"""Batches that were made beforehand: more than a consumer that waits takes."""


class DecodeAndTokenize:
    """Threads that never wait for each other."""

    def __init__(self, case: Case) -> None:
        import awkward
        import gigatoken
        import pyarrow as pa
        import pyarrow.parquet as pq

        files = case.files()
        groups = [
            (f, g)
            for f, file in enumerate(files)
            for g in range(pq.ParquetFile(file).num_row_groups)
        ]
        self._made: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._ids, self._next, self._left, self._ready = 0, iter(groups), case.workers, 0
        self._empty = np.zeros((BATCH_SIZE, SEQ_LEN), np.int64)

        def work() -> None:
            instance = gigatoken.Tokenizer(case.vocabulary)
            opened = [pq.ParquetFile(file) for file in files]
            while True:
                with self._counting:
                    f, g = next(self._next, (-1, -1))
                if f < 0:
                    break
                column = (
                    opened[f].read_row_group(g, columns=["text"], use_threads=False).column("text")
                )
                texts = awkward.from_arrow(column.cast(pa.large_string()))
                self._count(len(instance.encode_batch(texts, parallel=False).layout.content.data))
            with self._counting:
                self._left -= 1
                if not self._left:
                    self._made.put(None)

        self._threads = [threading.Thread(target=work) for _ in range(case.workers)]
        for thread in self._threads:
            thread.start()

    def _count(self, ids: int) -> None:
        size = BATCH_SIZE * SEQ_LEN
        with self._counting:
            self._made.put((self._ids + ids) // size - self._ids // size)
            self._ids += ids

    def __next__(self) -> tuple[Any, Any]:
        while not self._ready:
            made = self._made.get()
            if made is None:
                raise StopIteration
            self._ready = made
        self._ready -= 1
        return self._empty, self._empty

    def state(self) -> Any:
        return None

    def close(self) -> None:
        with self._counting:
            self._next = iter(())
        for thread in self._threads:
            thread.join()


class GatherAndCopy:
    """A loop."""

    def __init__(self, case: Case) -> None:
        ids = np.memmap(Path(case.prepared) / TOKENS, np.uint16, "r")
        batches = (len(ids) - 1) // (BATCH_SIZE * SEQ_LEN)
        shape, strides = (batches * BATCH_SIZE, SEQ_LEN + 1), (2 * SEQ_LEN, 2)
        # A plain array: np.memmap runs Python whenever it is indexed.
        self._rows = np.lib.stride_tricks.as_strided(
            np.asarray(ids), shape, strides, writeable=False
        )
        order = np.arange(len(self._rows))
        if case.shuffle:
            order = np.random.default_rng(0).permutation(order)
        self._order = itertools.chain.from_iterable(
            itertools.repeat(list(order.reshape(-1, BATCH_SIZE)), case.passes)
        )
        self._wrap: Any = None
        if "torch" in case.variant:
            import torch

            self._wrap = torch.from_numpy

    def __next__(self) -> tuple[Any, Any]:
        gathered = self._rows[next(self._order)]
        inputs, targets = gathered[:, :-1].astype(np.int64), gathered[:, 1:].astype(np.int64)
        return (self._wrap(inputs), self._wrap(targets)) if self._wrap else (inputs, targets)

    def state(self) -> Any:
        return None

    def close(self) -> None:
        pass


class Ready:
    """Batches that only have to be handed out."""

    def __init__(self, case: Case) -> None:
        ids = np.arange(BATCH_SIZE * SEQ_LEN).reshape(BATCH_SIZE, SEQ_LEN)
        made = [(ids + number, ids + number + 1) for number in range(READY)]
        self._batches: Iterator[tuple[Any, Any]] = (
            iter(made) if case.variant == "list" else Popping(made)
        )

    def __next__(self) -> tuple[Any, Any]:
        inputs, targets = next(self._batches)
        return inputs, targets

    def state(self) -> Any:
        return None

    def close(self) -> None:
        pass


class Popping:
    """The least that an iterator in Python can do."""

    def __init__(self, made: list[tuple[Any, Any]]) -> None:
        self._made = deque(made)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        return self._made.popleft()


def stream(case: Case) -> Any:
    """Start it."""
    if case.state:
        raise NotOffered("a yardstick has no state")
    if case.variant in ("list", "deque"):
        return Ready(case)
    return DecodeAndTokenize(case) if case.variant == "text" else GatherAndCopy(case)

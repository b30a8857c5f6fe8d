"""Data that a test can hold back, and loaders of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock import AsyncDataLoader
from penstock.encode.batch import Batch
from penstock.types import Shard

WAIT_S = 30.0
"""How long a test waits for an event that must occur."""


class Numbers:
    """Rows that hold their own number. From `wall` on they wait for `opened`, or are a fault."""

    def __init__(
        self, length: int = 1000, wall: int | None = None, fault: Exception | None = None
    ) -> None:
        self.length, self.wall, self.fault = length, wall, fault
        self.opened = threading.Event()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
        if self.wall is not None and row >= self.wall and not self.opened.is_set():
            if self.fault is not None:
                raise self.fault
            assert self.opened.wait(WAIT_S)
        return np.array([row, row + 1])


def loader(data: Any, rank: int = 0, world: int = 1, **more: Any) -> AsyncDataLoader:
    settings: dict[str, Any] = {"shuffle": False, "n_workers": 1} | more
    return AsyncDataLoader(data, 2, shard=Shard(world, rank), **settings)


def rows(batches: Sequence[Batch]) -> list[int]:
    """Return the numbers of the rows in batches; of synthetic ones, the negative step."""
    return [
        int(np.ravel(row)[0])
        for batch in batches
        for row in (batch.inputs if batch.data is None else batch.data)
    ]

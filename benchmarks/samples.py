"""Map-style data to measure with: samples that wait, samples that take the GIL, rows that are there already.

In:    how long a sample takes, or how many rows there are.
Out:   datasets.
Where: the contenders' own processes, and their workers.
State: none but the rows.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from rounds import count

Kind = Literal["waits", "works"]


FLAT_IDS = 128


NULL_ROWS = 20_000


def loops_per_s() -> float:
    """How far `count` comes in a second."""
    n, took = 100_000, []
    for _ in range(9):
        begun = time.perf_counter()
        count(n)
        took.append(time.perf_counter() - begun)
    return n / min(took)


class Slow:
    """Samples that take a while, one by one."""

    def __init__(self, length: int, seconds: float, loops: int) -> None:
        import numpy as np

        self._length, self._seconds, self._loops = length, seconds, loops
        self._row = np.arange(FLAT_IDS)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        self.take(1)
        return self._row

    def take(self, samples: int) -> None:
        if self._loops:
            count(self._loops * samples)
        else:
            time.sleep(self._seconds * samples)


class SlowBatches(Slow):
    """All samples of a batch by one request, so that a wait is as long as it should be."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.take(len(indices))
        return [self._row for _ in indices]


def slow(
    kind: Kind, seconds: float, rate: float, length: int = 1 << 20, batches: bool = False
) -> Any:
    """Samples of so many seconds each."""
    loops = max(1, round(seconds * rate)) if kind == "works" else 0
    return (SlowBatches if batches else Slow)(length, seconds, loops)


class Rows:
    """A list of rows for PyTorch: what Penstock makes of a row of ids by itself."""

    def __init__(self, rows: list[Any]) -> None:
        import torch

        self._rows, self._tensor = rows, torch.from_numpy

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return self._tensor(row[:-1]), self._tensor(row[1:])


class Ids:
    """One array of ids in memory, in the way of a file of them: a batch is one gather."""

    def __init__(self, ids: Any, seq_len: int) -> None:
        import numpy as np

        shape = ((len(ids) - 1) // seq_len, seq_len + 1)
        strides = (seq_len * ids.itemsize, ids.itemsize)
        self._rows = np.lib.stride_tricks.as_strided(ids, shape, strides, writeable=False)
        self.seq_len, self.dtype = seq_len, ids.dtype
        self._none = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def __getitems__(self, indices: Any) -> Any:
        return self._rows[indices]

    def boundaries(self, indices: Any) -> tuple[Any, Any]:
        """Where documents begin inside of the rows: nowhere."""
        return self._none, self._none


class WidenedIds:
    """The same for PyTorch: a slice for each sample."""

    def __init__(self, ids: Any, seq_len: int) -> None:
        import torch

        self._ids, self._seq_len, self._tensor = ids, seq_len, torch.from_numpy

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Any:
        at, n = index * self._seq_len, self._seq_len
        inputs, targets = self._ids[at : at + n], self._ids[at + 1 : at + n + 1]
        return self._tensor(inputs.astype("int64")), self._tensor(targets.astype("int64"))

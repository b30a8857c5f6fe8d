"""Rows of packed ids for contenders that leave packing to their users: the least that numpy can do it with.

In:    flat arrays of ids, documents already followed by end-of-text.
Out:   inputs and targets of (16, 1024) ids, int64. The last id of a row opens the next: no id is lost.
Where: the process that calls it.
State: the ids that have not filled a batch yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from case import BATCH_SIZE, SEQ_LEN

Ids = npt.NDArray[np.generic]
Pair = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Packer:
    """Concatenates ids and cuts batches."""

    NEEDED = BATCH_SIZE * SEQ_LEN + 1

    def __init__(self, rest: Ids | None = None) -> None:
        self._pieces: list[Ids] = [] if rest is None else [rest]
        self._held = sum(len(piece) for piece in self._pieces)

    def add(self, ids: Ids) -> Iterator[Pair]:
        """The batches that are complete with these."""
        self._pieces.append(ids)
        self._held += len(ids)
        if self._held < self.NEEDED:
            return
        flat = np.concatenate(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        at = 0
        while len(flat) - at >= self.NEEDED:
            batch = cut(flat[at : at + self.NEEDED])
            at += self.NEEDED - 1
            self._pieces, self._held = (
                [flat[at:]],
                len(flat) - at,
            )  # before it is given: `rest` may be asked for then
            yield batch

    def rest(self) -> Ids:
        """What has not filled a batch: what a checkpoint has to hold."""
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, np.uint16)


def cut(flat: Ids) -> Pair:
    """A batch from 16 * 1024 + 1 ids."""
    shape = BATCH_SIZE, SEQ_LEN
    return flat[:-1].astype(np.int64).reshape(shape), flat[1:].astype(np.int64).reshape(shape)

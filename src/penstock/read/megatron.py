"""Where Megatron's documents begin: its .idx, mapped.

In:    the path of a .bin, and what its .idx says of itself.
Out:   the bounds of documents in stretches of ids.
Where: any thread or process.
State: the map.
Cost:  a binary search for each question; nothing is read that is not asked for.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import numpy as np

from penstock.errors import CorruptFile, NoData
from penstock.order.shuffle import I64

HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type of an id, sequences, entries of the index of documents."""


class MegatronIndex:
    """Where Megatron's documents begin.

    The index knows at which byte each sequence begins, and with which sequence each document does. It
    stays on disk, where its numbers lie across the bounds of machine words: numpy's own search would
    copy all of them into memory first.
    """

    def __init__(
        self, path: str, size: int, *, itemsize: int, sequences: int, documents: int
    ) -> None:
        self.path, self.sequences, self.itemsize = index_path(path), sequences, itemsize
        data = map_file(self.path, size)
        at = HEADER.size
        self.sizes = np.frombuffer(data, "<i4", sequences, at)
        self.pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
        self.firsts = np.frombuffer(data, "<i8", documents, at + 12 * sequences)

    def end(self) -> int:
        """The bytes of the file that it describes."""
        if self.pointers[0] != 0 or self.firsts[0] != 0 or self.firsts[-1] != self.sequences:
            raise CorruptFile(
                f"{self.path}: its documents do not begin and end with its sequences. Write it anew."
            )
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.itemsize

    def boundaries(self, begins: I64, length: int) -> tuple[I64, I64]:
        """Row and column of the documents that begin inside of the rows at `begins`, not at their first id."""
        after = np.concatenate([begins * self.itemsize + 1, (begins + length) * self.itemsize])
        first, last = np.split(_count_below(self.firsts, _count_below(self.pointers, after)), 2)
        counts = np.maximum(last - first, 0)
        row = np.repeat(np.arange(begins.size), counts)
        document = np.arange(row.size) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        column = self._starts(document) - begins[row]
        wrong = (last < first) | (self.firsts[last] > self.sequences)
        if wrong.any() or (column.size and not 0 < column.min() <= column.max() < length):
            raise CorruptFile(
                f"{self.path}: documents do not lie in the order of their numbers. Write the file anew."
            )
        # Documents without a token begin where the next one does; the place counts once.
        new = np.ones(row.size, np.bool_)
        new[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
        return row[new], column[new]

    def documents_at(self, tokens: I64) -> tuple[I64, I64]:
        """The numbers of the documents that these tokens belong to, and where they begin."""
        sequence = _count_below(self.pointers, tokens * self.itemsize + 1) - 1
        document = _count_below(self.firsts, sequence + 1) - 1
        return document, self._starts(document)

    def _starts(self, documents: I64) -> I64:
        first = self.firsts[documents]
        if first.size and not 0 <= first.min() <= first.max() < self.sequences:
            raise CorruptFile(
                f"{self.path}: a document begins beyond its {self.sequences} sequences. Write it anew."
            )
        starts: I64 = self.pointers[first] // self.itemsize
        return starts


def _count_below(numbers: I64, values: I64) -> I64:
    """How many of the ascending `numbers` are below each value."""
    count, left = np.zeros(values.shape, np.int64), len(numbers)
    while left > 1:
        half = left // 2
        count += (numbers[count + (half - 1)] < values) * half
        left -= half
    return count + (numbers[count] < values)


def map_file(path: str, size: int) -> mmap.mmap:
    """Map a file that had `size` bytes when it was looked at."""
    try:
        with open(path, "rb") as file:
            # Reading beyond the end of a mapped file kills the process, so nothing is mapped on trust.
            if (now := os.fstat(file.fileno()).st_size) != size:
                raise CorruptFile(
                    f"{path} changed while in use: it had {size} bytes, it has {now}. Start a new run."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise NoData(
            f"{path} is gone: it was there when the dataset was made (looked from {Path.cwd()})"
        ) from None


def index_path(path: str) -> str:
    return os.path.splitext(path)[0] + ".idx"

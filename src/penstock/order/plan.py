"""Deal the chunks of an epoch to lanes.

In:    the list of files (names, sizes, kinds) and, one group at a time, their chunks.
Out:   for each lane and epoch a list of groups of files, and the order of a group's chunks.
Where: the producer thread, and the cache's writer, which asks when a file is needed again.
State: none but the order of all files in the last epochs; a place in the plan is (epoch, group, index).
Cost:  memory for the list of files only. A group's footers are read when it is needed. One sort of all files.

Many files are dealt whole, so that a lane opens only its own. Few are dealt by chunk, so that no lane is left without
data; where even chunks are fewer than lanes they are split by rows. In between, files are dealt whole to teams of lanes,
and their chunks among the lanes of a team, so that no lane has to look into all files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.order.shuffle import I64, permutation
from penstock.types import ChunkRef, FileRef

FILES_PER_LANE = 8
"""From this many files a lane on, whole files are dealt: the lanes then differ by an eighth at most."""
CHUNKS_PER_LANE = 4
"""Chunks are split until each lane has this many."""
FILES_PER_GROUP = 8
"""Files whose chunks are shuffled together. Larger groups mix better and open more files at once."""

FILES_SHARED = 64
"""Up to so many files are shared by all lanes. With more, lanes are put into teams."""
EPOCHS = 2
"""Epochs whose order of files is kept: the one that is read, and the next."""

_FILES, _CHUNKS = 1, 2  # what a permutation is of, so that two of them never share a key


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The order in which each lane reads the files."""

    files: tuple[FileRef, ...]
    lanes: int
    shuffle: bool
    seed: int
    whole_files: bool = field(init=False)
    """Whether files are dealt whole, rather than chunk by chunk."""
    teams: int = field(init=False)
    """Lane l is of team l mod teams. One team of all lanes, or one for each lane, or what divides them."""
    _orders: dict[int, I64] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Several readers of one compressed file all have to decompress it, so such files are
        # dealt whole as soon as there is one for each lane.
        enough = 1 if any(f.open_ended for f in self.files) else FILES_PER_LANE
        object.__setattr__(self, "whole_files", len(self.files) >= enough * self.lanes)
        most = len(self.files) // enough
        teams = self.lanes if self.whole_files else 1
        if not self.whole_files and len(self.files) > FILES_SHARED:
            teams = max(n for n in range(1, most + 1) if self.lanes % n == 0)
        object.__setattr__(self, "teams", teams)

    def groups(self, lane: int, epoch: int) -> list[tuple[int, ...]]:
        """The lane's groups of files (as indices into `files`), in reading order."""
        order = self._order(epoch)
        own = order[lane % self.teams :: self.teams].tolist()
        if not self.whole_files:
            return self._cut(own, len(own))
        if not self.shuffle:
            return self._cut(own, 1)
        return self._cut(own, FILES_PER_GROUP, growing=epoch == 0)

    def _order(self, epoch: int) -> I64:
        """All files in the order of an epoch. A rank that holds many lanes works it out once, not once for each."""
        order = self._orders.get(epoch)
        if order is None:
            n = len(self.files)
            order = permutation(n, self.seed, epoch, _FILES) if self.shuffle else np.arange(n)
            if len(self._orders) >= EPOCHS:
                self._orders.clear()  # two threads that do so at once only work something out twice
            self._orders[epoch] = order
        return order

    def _cut(self, order: list[int], size: int, *, growing: bool = False) -> list[tuple[int, ...]]:
        """Cut a list of files into groups; a file of unknown length is a group of its own."""
        groups: list[tuple[int, ...]] = []
        group: list[int] = []
        target = 1 if growing else size
        for index in order:
            if self.files[index].open_ended:
                groups += [tuple(group)] if group else []
                groups.append((index,))
                group = []
                continue
            group.append(index)
            if len(group) == target:
                groups.append(tuple(group))
                group = []
                target = min(size, 2 * target)
        return [*groups, tuple(group)] if group else groups

    def order(
        self, lane: int, epoch: int, group: tuple[int, ...], chunks: Sequence[Sequence[ChunkRef]]
    ) -> list[ChunkRef]:
        """The lane's chunks of a group, given the chunks of each of its files."""
        refs = [ref for of_file in chunks for ref in of_file]
        if not self.whole_files:
            refs = self._split(refs)
        if self.shuffle:
            key = (self.seed, epoch, _CHUNKS, *group)
            refs = [refs[i] for i in permutation(len(refs), *key).tolist()]
        return refs if self.whole_files else refs[lane // self.teams :: self.lanes // self.teams]

    def _split(self, refs: list[ChunkRef]) -> list[ChunkRef]:
        wanted = CHUNKS_PER_LANE * (self.lanes // self.teams)
        if self.lanes == self.teams or not refs or len(refs) >= wanted:
            return refs
        by = -(-wanted // len(refs))
        return [
            replace(ref, part=ref.part * by + i, parts=ref.parts * by, nbytes=ref.nbytes // by)
            for ref in refs
            for i in range(by)
        ]

    def open_ended(self, lane: int, file: FileRef, index: int, chunk_bytes: int) -> ChunkRef:
        """The lane's `index`-th chunk of a file whose end is not known."""
        number = (
            index if self.whole_files else index * (self.lanes // self.teams) + lane // self.teams
        )
        return ChunkRef(file, number, chunk_bytes, reader=lane)

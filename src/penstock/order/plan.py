"""Assign the chunks of an epoch to lanes, balanced by bytes.

A pure function of the file list, the seed and the number of lanes. With many files, each file is
assigned to one lane, so that a lane opens only its own files. With fewer than `FILES_PER_LANE`
files per lane, lanes form teams: files are assigned to teams, and the chunks of a file to the lanes
of its team. A file that is large compared to a team's share is assigned to all lanes, chunk by chunk.
If there are too few chunks, they are split by rows.

A lane reads one group of files after another; the chunks of a group are shuffled together. The
footers of a group are read when it is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.order.shuffle import I64, mix, permutation
from penstock.types import ChunkRef, FileRef, KiB

FILES_PER_LANE = 8
"""Files are assigned whole if there are at least this many per lane."""
CHUNKS_PER_LANE = 4
"""Shared chunks are split until each lane has about this many."""
FILES_PER_GROUP = 8
"""Files whose chunks are shuffled together. Larger groups mix better and open more files at once."""
FIRST_PARTS = (1, 3, 4)
"""The first chunk of a lane is divided in these proportions. The first batch waits only for the
small part, while other workers make the rest."""
FIRST_BYTES = 256 * KiB
"""A first chunk smaller than this is not divided."""
ALL = -1
"""The team of a file that is assigned to all lanes."""

_FILES, _CHUNKS, _SHARED = 1, 2, 3  # keys that keep different permutations independent


class EpochDeal(NamedTuple):
    """The order of all files in an epoch, the team of each file, and each team's share in files
    that are assigned to all lanes: larger for a team whose own files have fewer bytes."""

    order: I64
    teams: list[int]
    shares: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The order in which each lane reads the files."""

    files: tuple[FileRef, ...]
    lanes: int
    shuffle: bool
    seed: int
    teams: int = field(init=False)
    """Lane l belongs to team l mod teams. A divisor of `lanes`."""
    _deals: dict[int, EpochDeal] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        # Every reader of a compressed file must decompress all of it, so such files are assigned
        # whole if there is at least one per lane.
        needed = 1 if any(file.sequential for file in self.files) else FILES_PER_LANE
        most = max(1, len(self.files) // needed)
        teams = max(n for n in range(1, self.lanes + 1) if self.lanes % n == 0 and n <= most)
        object.__setattr__(self, "teams", teams)

    def groups(self, lane: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the lane's groups of files (indices into `files`), in reading order."""
        order, teams, _ = self._deal(epoch)
        team = lane % self.teams
        own = [file for file in order.tolist() if teams[file] in (team, ALL)]
        groups: list[tuple[int, ...]] = []
        group: list[int] = []
        # In the first epoch, groups grow, so that the first batch waits for one footer only.
        size = 1 if epoch == 0 or not self.shuffle else FILES_PER_GROUP
        for file in own:
            if self.files[file].sequential:  # a separate group, because its chunks are unknown
                groups += [tuple(group)] if group else []
                groups.append((file,))
                group = []
                continue
            group.append(file)
            if len(group) == size:
                groups.append(tuple(group))
                group = []
                size = min(2 * size, FILES_PER_GROUP) if self.shuffle else 1
        return [*groups, tuple(group)] if group else groups

    def chunks(
        self,
        lane: int,
        epoch: int,
        number: int,
        group: tuple[int, ...],
        chunks: Sequence[Sequence[ChunkRef]],
    ) -> list[ChunkRef] | None:
        """Return the lane's chunks in its `number`-th group, given the chunks of each file.

        Return None for a file that can only be read in order.
        """
        if self.files[group[0]].sequential:
            return None
        refs: list[ChunkRef] = []
        for file, of_file in zip(group, chunks, strict=True):
            refs += self._own_chunks(lane, epoch, file, of_file)
        if self.shuffle:
            order = permutation(len(refs), self.seed, epoch, _CHUNKS, lane, number)
            refs = [refs[i] for i in order.tolist()]
        if epoch == number == 0 and refs and refs[0].nbytes >= FIRST_BYTES:
            refs[:1] = refs[0].divided(FIRST_PARTS)
        return refs

    def next_chunk(self, lane: int, epoch: int, file: int, index: int, nbytes: int) -> ChunkRef:
        """Return the lane's `index`-th chunk of a file that can only be read in order."""
        place, sharers = self._sharers(lane, self._deal(epoch).teams[file])
        return ChunkRef(self.files[file], index * sharers + place, nbytes, lane=lane)

    def balance(self) -> float:
        """Return the bytes of the smallest lane as a share of the mean."""
        deal = self._deal(0)
        loads = [0.0] * self.teams
        for file, team in zip(self.files, deal.teams, strict=True):
            if team == ALL:
                loads = [
                    load + share * file.size for load, share in zip(loads, deal.shares, strict=True)
                ]
            else:
                loads[team] += file.size
        return min(loads) * self.teams / sum(loads) if sum(loads) else 1.0

    def _deal(self, epoch: int) -> EpochDeal:
        deal = self._deals.get(epoch)
        if deal is None:
            n = len(self.files)
            order = permutation(n, self.seed, epoch, _FILES) if self.shuffle else np.arange(n)
            deal = self._assign(order, epoch)
            while len(self._deals) > 2:  # keep the first, the current and the next epoch
                self._deals.pop(max(e for e in self._deals if e > 0))
            self._deals[epoch] = deal
        return deal

    def _assign(self, order: I64, epoch: int) -> EpochDeal:
        """Assign each file to a team: the largest file first, to the team with the fewest bytes."""
        sizes = np.array([file.size for file in self.files], np.int64)
        share = int(sizes.sum()) / self.teams
        teams = [0 if self.lanes == 1 else ALL] * len(self.files)
        ranks = permutation(self.teams, self.seed, epoch, _SHARED) if self.shuffle else None
        loads = [(0, t if ranks is None else int(ranks[t]), t) for t in range(self.teams)]
        heapq.heapify(loads)
        for file in order[np.argsort(-sizes[order], kind="stable")].tolist():
            size = int(sizes[file])
            limit = share if self.files[file].sequential else share / FILES_PER_LANE
            if self.teams > 1 and size <= limit:
                load, rank, team = heapq.heappop(loads)
                heapq.heappush(loads, (load + size, rank, team))
                teams[file] = team
        missing = np.zeros(self.teams)
        for load, _, team in loads:
            missing[team] = max(0.0, share - load)
        total = missing.sum()
        shares = missing / total if total else np.full(self.teams, 1 / self.teams)
        return EpochDeal(order, teams, shares.tolist())

    def _sharers(self, lane: int, team: int) -> tuple[int, int]:
        """Return the lane's index among the lanes that share a file, and their number."""
        if team == ALL:
            return lane, self.lanes
        return lane // self.teams, self.lanes // self.teams

    def _own_chunks(
        self, lane: int, epoch: int, file: int, refs: Sequence[ChunkRef]
    ) -> Sequence[ChunkRef]:
        teams = self._deal(epoch).teams
        place, sharers = self._sharers(lane, teams[file])
        if sharers == 1 or not refs:
            return refs
        together = sum(team == teams[file] for team in teams)
        by = -(-CHUNKS_PER_LANE * sharers // (together * len(refs)))
        if by > 1:
            refs = [part for ref in refs for part in ref.divided([1] * by)]
        order = np.arange(len(refs))
        if self.shuffle:
            order = permutation(len(refs), self.seed, epoch, _SHARED, file)
        # Each lane gets an interval of the order, from a start that differs between files, so that
        # a rounded-up chunk does not always go to the same lane.
        begin = mix(self.seed, epoch, _SHARED, file) / 2**64
        points = (np.arange(len(refs)) + 0.5) / len(refs) + begin
        ends = np.cumsum(self._lane_shares(epoch, teams[file]))
        ends[-1] = 1.0
        own = np.searchsorted(ends, points % 1.0, side="right") == place
        return [refs[i] for i in order[own].tolist()]

    def _lane_shares(self, epoch: int, team: int) -> list[float]:
        """Return the share of each lane in a file that it reads."""
        n = self.lanes // self.teams
        if team != ALL:
            return [1 / n] * n
        shares = self._deal(epoch).shares
        return [shares[lane % self.teams] / n for lane in range(self.lanes)]

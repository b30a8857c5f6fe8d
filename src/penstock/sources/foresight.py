"""When a run will need a token chunk again: the plan knows.

In:    the name of a file in the cache, and a chunk's number.
Out:   a number that is larger the later the chunk is needed; None for what is not this run's.
Where: the cache's writer thread, while the producer goes on: what it sees may be a moment old, which
       costs at most a chunk that could have been kept.
State: the place of each file in the epochs looked at last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.lane import Lane
from penstock.order.plan import Plan
from penstock.types import ChunkRef, FileRef

GROUP, EPOCH = 1e6, 1e12
"""Steps between the chunks of two groups, and between two epochs."""


class Foresight:
    """The plan of a run, asked from the cache's side."""

    def __init__(
        self, plan: Plan, lanes: Sequence[Lane], file_hash: Callable[[FileRef], str]
    ) -> None:
        self._plan = plan
        self._lanes = lanes
        self._file_hash = file_hash
        self._by_hash: dict[str, int] | None = None
        self._places: dict[tuple[int, int], dict[int, int]] = {}

    def __call__(self, file: str, index: int) -> float | None:
        if self._by_hash is None:
            self._by_hash = {self._file_hash(ref): i for i, ref in enumerate(self._plan.files)}
        number = self._by_hash.get(file)
        if number is None:
            return None
        soonest = [
            when for lane in self._lanes if (when := self._in_lane(lane, number, index)) is not None
        ]
        return min(soonest, default=None)

    def _in_lane(self, lane: Lane, file: int, index: int) -> float | None:
        now = lane.standing()
        soon = _position(lane.under_way(), self._plan.files[file], index)
        if soon is not None:
            return soon - GROUP
        group = self._groups(now.lane, now.epoch).get(file)
        if group is not None and group > now.group:
            return group * GROUP + index
        if group == now.group:
            at = _position(now.refs, self._plan.files[file], index)
            if at is None and not self._plan.whole_files and now.refs is not None:
                return None  # dealt to another lane
            if at is not None and at >= now.at:
                return now.group * GROUP + at
        later = self._groups(now.lane, now.epoch + 1).get(file)
        return None if later is None else EPOCH + later * GROUP + index

    def _groups(self, lane: int, epoch: int) -> dict[int, int]:
        """The group of each file of a lane in an epoch."""
        known = self._places.get((lane, epoch))
        if known is None:
            groups = self._plan.groups(lane, epoch)
            known = {file: number for number, group in enumerate(groups) for file in group}
            if len(self._places) > 4 * len(self._lanes):
                self._places.clear()
            self._places[lane, epoch] = known
        return known


def _position(refs: list[ChunkRef] | None, file: FileRef, index: int) -> int | None:
    """The last place of a chunk in the order of its group: its parts come one after another or apart."""
    if refs is None:
        return None
    return next(
        (
            i
            for i in range(len(refs) - 1, -1, -1)
            if refs[i].index == index and refs[i].file is file
        ),
        None,
    )

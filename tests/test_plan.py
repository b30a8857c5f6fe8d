"""The plan deals every chunk of an epoch to exactly one lane, and lanes get equal bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.order.plan import FIRST_BYTES, Plan
from penstock.types import ChunkRef, FileRef

SIZES = {
    "one": [100],
    "few": [100, 90, 110],
    "even": [100] * 64,
    "one large": [100] * 63 + [2000],
    "many sizes": [10 * n + 7 for n in range(200)],
    "fewer than lanes": [100, 5],
}


def files_of(kind: str) -> tuple[FileRef, ...]:
    scale = 1000
    return tuple(
        FileRef(f"/d/{i}.parquet", f"{i}.parquet", scale * n, "parquet")
        for i, n in enumerate(SIZES[kind])
    )


def chunks_of(file: FileRef) -> list[ChunkRef]:
    return [ChunkRef(file, i, 1000) for i in range(file.size // 1000)]


def dealt(plan: Plan, lane: int, epoch: int) -> list[ChunkRef]:
    """Return the lane's chunks of an epoch, in order."""
    out: list[ChunkRef] = []
    for number, group in enumerate(plan.groups(lane, epoch)):
        chunks = [chunks_of(plan.files[i]) for i in group]
        out += plan.chunks(lane, epoch, number, group, chunks)
    return out


def portions(refs: list[ChunkRef]) -> Counter[tuple[str, int, int]]:
    """Count how often each of 840 portions of each chunk is read: parts divide it evenly."""
    found: Counter[tuple[str, int, int]] = Counter()
    for ref in refs:
        found.update((ref.file.name, ref.index, row) for row in range(*ref.bounds(840)))
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lanes", [1, 2, 6, 16])
@pytest.mark.parametrize("kind", ["one", "few", "fewer than lanes", "even"])
def test_every_chunk_is_dealt_exactly_once_in_every_epoch(
    kind: str, lanes: int, shuffle: bool
) -> None:
    plan = Plan(files=files_of(kind), lanes=lanes, shuffle=shuffle, seed=3)
    for epoch in (0, 1):
        found = portions([ref for lane in range(lanes) for ref in dealt(plan, lane, epoch)])
        assert set(found.values()) == {1}
        assert len(found) == 840 * sum(file.size // 1000 for file in plan.files)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lanes", [2, 8, 16])
@pytest.mark.parametrize("kind", ["even", "one large", "many sizes"])
def test_lanes_get_equal_bytes(kind: str, lanes: int, shuffle: bool) -> None:
    plan = Plan(files=files_of(kind), lanes=lanes, shuffle=shuffle, seed=3)
    for epoch in (0, 1):
        loads = [sum(ref.nbytes for ref in dealt(plan, lane, epoch)) for lane in range(lanes)]
        assert max(loads) - min(loads) <= 0.05 * sum(loads) / lanes
    assert plan.balance() >= 0.95


def test_a_lane_opens_only_its_own_files_when_there_are_many() -> None:
    plan = Plan(files=files_of("even"), lanes=8, shuffle=True, seed=3)
    opened = [{i for group in plan.groups(lane, 0) for i in group} for lane in range(8)]
    assert sum(map(len, opened)) == 64
    assert set.union(*opened) == set(range(64))


def test_one_lane_without_shuffle_reads_in_listing_order() -> None:
    plan = Plan(files=files_of("few"), lanes=1, shuffle=False, seed=3)
    order = [(ref.file.name, ref.index) for ref in dealt(plan, 0, 0)]
    assert order == [(f.name, c.index) for f in plan.files for c in chunks_of(f)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        plan = Plan(files=files_of("even"), lanes=2, shuffle=True, seed=seed)
        return [(ref.file.name, ref.index) for ref in dealt(plan, 1, epoch)]

    assert order(3, 1) == order(3, 1)
    assert len({tuple(order(seed, epoch)) for seed in (3, 4) for epoch in (1, 2)}) == 4


def test_the_first_chunk_of_a_lane_is_divided_so_that_the_first_batch_waits_for_a_small_part() -> (
    None
):
    file = FileRef("/d/a.parquet", "a.parquet", 10 * FIRST_BYTES, "parquet")
    plan = Plan(files=(file,), lanes=1, shuffle=False, seed=0)
    chunks = [[ChunkRef(file, i, FIRST_BYTES) for i in range(3)]]
    refs = plan.chunks(0, 0, 0, (0,), chunks)
    assert [ref.index for ref in refs] == [0, 0, 0, 1, 2]
    assert refs[0].nbytes == FIRST_BYTES // 8
    assert [ref.bounds(80) for ref in refs[:3]] == [(0, 10), (10, 40), (40, 80)]
    assert len(plan.chunks(0, 1, 0, (0,), chunks)) == 3


def test_the_plan_does_not_depend_on_where_the_data_lies(tmp_path: Path) -> None:
    moved = tuple(
        FileRef(str(tmp_path / file.name), file.name, file.size, "parquet")
        for file in files_of("many sizes")
    )
    plans = [
        Plan(files=files, lanes=4, shuffle=True, seed=3)
        for files in (files_of("many sizes"), moved)
    ]
    assert plans[0].groups(2, 1) == plans[1].groups(2, 1)

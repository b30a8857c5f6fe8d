"""Plan and shuffle: pure functions, so properties say all there is to say."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order.plan import CHUNKS_PER_LANE, FILES_PER_LANE, FILES_SHARED, Plan
from penstock.order.shuffle import mix, mix_array, permutation, window_chunks
from penstock.types import ChunkRef, FileRef, Shard

counts = st.lists(st.integers(0, 6), min_size=1, max_size=40)


def make_plan(n: int, lanes: int, shuffle: bool, seed: int = 1, compressed: bool = False) -> Plan:
    codec = "gz" if compressed else ""
    files = tuple(FileRef(f"{i}.jsonl", f"{i}.jsonl", 100, "jsonl", codec) for i in range(n))  # type: ignore[arg-type]
    return Plan(files=files, lanes=lanes, shuffle=shuffle, seed=seed)


def lane_chunks(
    plan: Plan, chunks: list[int], lane: int, epoch: int
) -> list[tuple[str, int, int, int]]:
    refs = [[ChunkRef(f, i, 10) for i in range(n)] for f, n in zip(plan.files, chunks, strict=True)]
    out: list[tuple[str, int, int, int]] = []
    for group in plan.groups(lane, epoch):
        ordered = plan.order(lane, epoch, group, [refs[i] for i in group])
        out += [(ref.file.path, ref.index, ref.part, ref.parts) for ref in ordered]
    return out


@given(
    chunks=counts,
    lanes=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 1 << 64),
)
def test_lanes_share_all_chunks_and_none_is_read_twice(
    chunks: list[int], lanes: int, shuffle: bool, epoch: int, seed: int
) -> None:
    plan = make_plan(len(chunks), lanes, shuffle, seed)
    dealt = list(
        chain.from_iterable(lane_chunks(plan, chunks, lane, epoch) for lane in range(lanes))
    )
    assert len(set(dealt)) == len(dealt)
    whole: dict[tuple[str, int], set[int]] = {}
    for path, index, part, parts in dealt:
        assert 0 <= part < parts
        whole.setdefault((path, index), set()).add(part)
    assert sorted(whole) == sorted(
        (f.path, i) for f, n in zip(plan.files, chunks, strict=True) for i in range(n)
    )
    assert {parts for *_, parts in dealt} <= {1} or len({parts for *_, parts in dealt}) == 1
    assert all(len(parts) == dealt[0][3] for parts in whole.values())


@given(
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    lanes=st.integers(1, 16),
    shuffle=st.booleans(),
)
def test_no_lane_is_left_without_a_chunk(chunks: list[int], lanes: int, shuffle: bool) -> None:
    plan = make_plan(len(chunks), lanes, shuffle)
    sizes = [len(lane_chunks(plan, chunks, lane, 0)) for lane in range(lanes)]
    assert min(sizes) >= 1
    if not plan.whole_files and lanes > 1:
        assert min(sizes) >= CHUNKS_PER_LANE
        assert max(sizes) - min(sizes) <= 1


@given(n=st.integers(1, 60), lanes=st.integers(1, 6))
def test_files_keep_their_order_without_shuffling(n: int, lanes: int) -> None:
    plan = make_plan(n, lanes, shuffle=False)
    for lane in range(lanes):
        files = [i for group in plan.groups(lane, 3) for i in group]
        assert files == sorted(files)


def test_a_single_lane_without_shuffling_reads_as_listed() -> None:
    plan = make_plan(30, 1, shuffle=False)
    assert [x[:2] for x in lane_chunks(plan, [2] * 30, 0, 0)] == [
        (f"{i}.jsonl", k) for i in range(30) for k in range(2)
    ]


def test_many_files_are_dealt_whole_and_opened_a_few_at_a_time() -> None:
    plan = make_plan(5000, 4, shuffle=True)
    groups = plan.groups(2, 0)
    assert [len(g) for g in groups[:5]] == [1, 2, 4, 8, 8]
    assert max(len(g) for g in groups) == 8
    assert plan.whole_files
    assert not make_plan(FILES_PER_LANE * 4 - 1, 4, shuffle=True).whole_files


@settings(max_examples=40)
@given(
    n=st.integers(FILES_SHARED + 1, 300),
    lanes=st.integers(1, 200),
    shuffle=st.booleans(),
    compressed=st.booleans(),
)
def test_lanes_of_a_team_share_its_files_and_teams_share_all(
    n: int, lanes: int, shuffle: bool, compressed: bool
) -> None:
    plan = make_plan(n, lanes, shuffle, compressed=compressed)
    if compressed:  # chunks are counted on while they are read
        seen = [
            (file, plan.open_ended(lane, plan.files[file], i, 10).index)
            for lane in range(lanes)
            for (file,) in plan.groups(lane, 0)
            for i in range(3)
        ]
        assert len(set(seen)) == len(seen)
        assert {file for file, _ in seen} == set(range(n))
        return
    dealt = [lane_chunks(plan, [3] * n, lane, 0) for lane in range(lanes)]
    chunks = list(chain.from_iterable(dealt))
    assert len(set(chunks)) == len(chunks)
    assert {(path, index) for path, index, *_ in chunks} == {
        (f.path, i) for f in plan.files for i in range(3)
    }
    assert min(map(len, dealt)) >= 1


def test_a_lane_looks_into_a_few_files_only_however_many_lanes_there_are() -> None:
    for lanes, most in ((64, 40), (1024, 10), (4096, 10)):
        plan = make_plan(2400, lanes, shuffle=True)
        for lane in (0, 1, lanes - 1):
            assert sum(len(group) for group in plan.groups(lane, 0)) <= most
    prime = make_plan(2400, 1021, shuffle=True)  # which nothing divides: one team of all
    assert sum(len(group) for group in prime.groups(0, 0)) == 2400


def test_a_file_of_unknown_length_is_a_group_of_its_own() -> None:
    plan = make_plan(6, 2, shuffle=True, compressed=True)
    assert plan.whole_files
    assert all(len(group) == 1 for group in plan.groups(0, 0))


def test_epochs_differ_and_repeat_exactly() -> None:
    plan = make_plan(3, 1, shuffle=True)
    epochs = [lane_chunks(plan, [9, 9, 9], 0, epoch) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]


@given(n=st.integers(0, 500), key=st.lists(st.integers(-(1 << 63), 1 << 64), max_size=4))
def test_permutation_is_a_bijection(n: int, key: list[int]) -> None:
    assert sorted(permutation(n, *key).tolist()) == list(range(n))


@given(key=st.integers(0, 1 << 64), values=st.lists(st.integers(0, (1 << 63) - 1), max_size=20))
def test_hashing_at_once_equals_hashing_one_by_one(key: int, values: list[int]) -> None:
    assert mix_array(key, np.array(values, np.int64)).tolist() == [mix(key, v) for v in values]


def test_the_order_never_changes_between_releases() -> None:
    # A saved run continues only if these stay what they are.
    assert permutation(8, 42, 0, 1).tolist() == [2, 7, 3, 0, 4, 1, 5, 6]
    assert mix(1, 2, 3) == 7702586659592502839


def test_windows_grow_in_the_first_epoch_only() -> None:
    assert [window_chunks(0, i, 10) for i in range(6)] == [1, 2, 4, 8, 10, 10]
    assert [window_chunks(1, i, 10) for i in range(3)] == [10, 10, 10]
    assert [window_chunks(0, i, 1) for i in range(3)] == [1, 1, 1]
    assert window_chunks(0, 10**9, 16) == 16


@given(items=st.lists(st.integers()), mod=st.integers(1, 7))
def test_shards_of_a_list_are_disjoint_and_complete(items: list[int], mod: int) -> None:
    parts = [Shard(mod, rem).select(items) for rem in range(mod)]
    assert [parts[i % mod][i // mod] for i in range(len(items))] == items
    assert sum(map(len, parts)) == len(items)

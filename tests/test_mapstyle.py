"""Map-style data: ranks, collating, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import AsyncDataLoader, ConfigError, Shard, StateError
from penstock.encode.collate import pad_with
from penstock.errors import SourceError


class Numbers:
    """Sample i is a row of i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return np.full(4, index)


def loader_of(data: Any, batch_size: int = 4, **how: Any) -> AsyncDataLoader:
    return AsyncDataLoader(data, batch_size, **{"n_workers": 1, **how})


def firsts(loader: AsyncDataLoader) -> Iterator[list[int]]:
    """Yield the numbers of the samples of each batch."""
    for batch in loader:
        yield np.asarray(batch.inputs)[:, 0].tolist()


# Ranks


@given(
    length=st.integers(1, 60), world=st.integers(1, 5), size=st.integers(1, 7), epochs=st.integers(1, 3),
    drop_last=st.booleans(), shuffle=st.booleans(),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_all_ranks_get_equally_many_full_batches_and_together_every_sample(
    length: int, world: int, size: int, epochs: int, drop_last: bool, shuffle: bool
) -> None:
    batches = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world):
            patch.setenv("WORLD_SIZE", str(world))
            patch.setenv("RANK", str(rank))
            how = {"epochs": epochs, "drop_last": drop_last, "shuffle": shuffle}
            loader = loader_of(Numbers(length), size, n_workers=0, **how)
            steps = len(loader)
            if not steps:
                with pytest.raises(SourceError):
                    next(loader)
                return
            batches.append(list(firsts(loader)))
            assert len(batches[-1]) == steps
            loader.shutdown()
    total = length * epochs
    rows = [row for turn in zip(*batches, strict=True) for batch in turn for row in batch]
    if world == 1:
        assert len(rows) == (total - total % size if drop_last else total)
    else:
        assert all(len(batch) == size for one in batches for batch in one)
    counts = Counter(rows)
    if not drop_last:
        assert set(counts) == set(range(length))
        # The first rows of the pass fill up the last batch.
        assert epochs <= min(counts.values())
        assert max(counts.values()) <= epochs + -(-(len(rows) - total) // length)
    else:
        assert max(counts.values()) <= epochs


@pytest.mark.parametrize("length", [8, 9, 13, 16])
def test_a_shard_given_by_hand_runs_to_its_own_end(length: int) -> None:
    seen: Counter[int] = Counter()
    for r in range(4):
        with loader_of(Numbers(length), 2, epochs=1, shard=Shard(4, r)) as loader:
            batches = list(firsts(loader))
            assert len(batches) == len(loader), f"shard {r}"
        seen.update(row for batch in batches for row in batch)
    assert seen == Counter(range(length))


def test_an_endless_stream_has_no_length() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(loader_of(Numbers(9)))


def test_a_state_of_a_dataset_of_another_length_is_refused() -> None:
    state = loader_of(Numbers(100)).state_dict()
    with pytest.raises(StateError, match="length was 100, is 99"):
        loader_of(Numbers(99)).load_state_dict(state)


# Collating


def one(data: Any, **how: Any) -> Any:
    with loader_of(
        data, **{"batch_size": len(data), "shuffle": False, "epochs": 1, "drop_last": False, **how}
    ) as loader:
        return next(loader)


def test_rows_of_ids_become_inputs_and_targets() -> None:
    for row in ([1, 2, 3], np.array([1, 2, 3], np.uint16), torch.tensor([1, 2, 3])):
        batch = one([row, row])
        inputs, targets = batch.inputs, batch.targets
        assert inputs.tolist() == [[1, 2], [1, 2]]
        assert targets.tolist() == [[2, 3], [2, 3]]
        assert inputs.dtype == targets.dtype == torch.int64


def test_ragged_rows_are_padded() -> None:
    batch = one([[1, 2, 3, 4], [5, 6]], collate=pad_with(9))
    assert batch.inputs.tolist() == [[1, 2, 3], [5, 9, 9]]
    assert batch.targets.tolist() == [[2, 3, 4], [6, -100, -100]]
    with pytest.raises(ConfigError, match="pad_with"):
        one([[1, 2, 3, 4], [5, 6]])


def test_mappings_are_collated_by_field() -> None:
    fields = ("input_ids", "labels", "attention_mask", "x", "s")
    values = [
        ([1, 2, 3], [1, -100, 3], [1, 1, 1], {"y": 1.5}, "a"),
        ([4], [4], [1], {"y": 2}, "b"),
    ]
    samples = [dict(zip(fields, each, strict=True)) for each in values]
    batch = one(samples, collate=pad_with(7))
    assert batch.inputs.tolist() == batch["input_ids"].tolist() == [[1, 2, 3], [4, 7, 7]]
    assert batch.targets.tolist() == [[1, -100, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["x"]["y"].tolist() == [1.5, 2.0]
    assert batch["s"] == ["a", "b"]


def test_pairs_are_inputs_and_targets_as_tensors() -> None:
    batch = one([(torch.ones(2, 3), 1), (torch.zeros(2, 3), 0)])
    assert batch.inputs.shape == (2, 2, 3)
    assert batch.targets.tolist() == [1, 0]
    batch = one([("a", 1), ("b", 0)])
    assert isinstance(batch.targets, torch.Tensor)


def test_the_rng_of_preprocess_depends_on_sample_epoch_and_seed() -> None:
    def draw(sample: Any, rng: np.random.Generator) -> Any:
        return np.array([sample[0], rng.integers(1 << 40), 0])

    def drawn(**how: Any) -> list[set[tuple[int, ...]]]:
        with loader_of(Numbers(20), preprocess=draw, epochs=1, **how) as loader:
            return [{tuple(row) for b in loader for row in b.inputs.tolist()} for _ in range(2)]

    first, second = drawn()
    assert len({number for _, number in first | second}) == 40
    assert drawn(batch_size=5, n_workers=3, shuffle=False) == [first, second]
    assert drawn(seed=1)[0] != first


# Errors


def failing(sample: Any) -> Any:
    if sample[0] == 350:
        raise LookupError("no such sample")
    return sample


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        return failing(super().__getitem__(index))


class FailingAtOnce(Failing):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


def failing_collate(samples: Any) -> Any:
    return np.stack([failing(sample) for sample in samples])


FAULTS = [
    (Failing(400), {}, "__getitem__ of Failing, sample 350"),
    (FailingAtOnce(400), {}, "__getitems__ of FailingAtOnce, samples 348, 349, 350, 351"),
    (Numbers(400), {"preprocess": failing}, "preprocess, sample 350"),
    (Numbers(400), {"collate": failing_collate}, "collate, of samples 348, 349, 350, 351"),
]


@pytest.mark.parametrize(("data", "how", "note"), FAULTS)
def test_an_error_comes_after_exactly_the_batches_before_it_and_names_the_sample(
    data: Any, how: Any, note: str
) -> None:
    seen: list[list[int]] = []
    with (
        loader_of(data, shuffle=False, n_workers=3, prefetch_size=16, **how) as loader,
        pytest.raises(LookupError, match="no such sample") as caught,
    ):
        seen.extend(firsts(loader))
    assert any(note in n for n in caught.value.__notes__), caught.value.__notes__
    assert np.concatenate(seen).tolist() == list(range(348))


def test_an_empty_dataset_is_refused() -> None:
    for data in (Numbers(0), []):
        with pytest.raises(SourceError):
            loader_of(data)


def test_too_few_samples_for_a_batch_are_refused_where_the_last_is_dropped() -> None:
    with pytest.raises(SourceError, match="drop_last=False"):
        loader_of(Numbers(3), epochs=1, drop_last=True).start()

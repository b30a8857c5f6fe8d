"""Mixtures: shares, weights that change, parts that end, and where rows come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import (
    AsyncDataLoader,
    ConfigError,
    Mixture,
    StateError,
    SyntheticDataset,
    TextDataset,
)
from tests import contracts
from tests.kinds import FILES

SEQ = 8


class Part(SyntheticDataset):
    """Rows that say which part and sample they are: every id is `1000 * part + sample`."""

    def __init__(self, part: int, length: int) -> None:
        super().__init__(1 << 16, SEQ, length, seed=part)

    def __getitems__(self, indices: Any) -> Any:
        ids = 1000 * self.seed + np.asarray(indices)
        return np.repeat(ids[:, None], SEQ + 1, 1).astype(np.uint16)


def stream(part: int, length: int) -> Any:
    """The same as ids: each document fills a row but for the id that opens the next."""
    source = [np.full(SEQ, 1000 * part + index) for index in range(length)]
    return TextDataset.from_iterable(
        source, tokenizer=None, seq_len=SEQ, chunk_docs=2, name=f"stream{part}"
    )


def mixture(*parts: tuple[Any, float], **more: Any) -> Mixture:
    return Mixture({f"p{i}": part for i, part in enumerate(parts)}, **more)


def loader_of(mixed: Mixture, **how: Any) -> AsyncDataLoader:
    return AsyncDataLoader(mixed, **{"batch_size": 4, "n_workers": 1, "seed": 2, **how})


def firsts(loader: AsyncDataLoader, n: int) -> list[int]:
    """The first id of each row of the next `n` batches."""
    return [first for b in contracts.batches_of(loader, n) for first in b.inputs[:, 0].tolist()]


def parts_of(loader: AsyncDataLoader, n: int) -> list[int]:
    return [first // 1000 for first in firsts(loader, n)]


# Which part a row comes from


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda w: sum(w) > 1e-3))
@settings(max_examples=40, deadline=None)
def test_every_part_is_within_a_row_of_its_share_at_every_moment(weights: list[float]) -> None:
    mixed = mixture(*((Part(i, 900), weight) for i, weight in enumerate(weights)))
    with loader_of(mixed, n_workers=0, batch_size=100) as loader:
        parts = np.array(parts_of(loader, 8))
    counts = np.cumsum(parts[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, len(parts) + 1)[:, None] * (np.array(weights) / sum(weights))
    assert np.abs(counts - shares).max() < 1 + 1e-6
    assert not set(parts.tolist()) & {i for i, weight in enumerate(weights) if not weight}


WRONG = (-1.0, float("nan"), float("inf"), "1", True, None, 1j)


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1e308, 1e308), *((w, 1.0) for w in WRONG)])
def test_invalid_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError):
        mixture(*((Part(i, 5), weight) for i, weight in enumerate(weights)))


@pytest.mark.parametrize("weights", [{"p0": 1.0}, {"p0": 1.0, "p1": 1.0, "p2": 1.0}])
def test_new_weights_need_every_part_and_no_other(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        loader_of(mixture((Part(0, 5), 1), (Part(1, 5), 1))).set_weights(weights)


# Weights that change


def changing(step: int | None, at: int, **how: Any) -> contracts.Make:
    """Loaders that change weights once `at` batches have been handed out; one that resumes later
    has it in its state."""

    def make(**more: Any) -> AsyncDataLoader:
        mixed = mixture((Part(0, 300), 0.8), (stream(1, 300), 0.2))
        loader = loader_of(mixed, **{"lanes": 4, **how, **more})
        take = loader.next_batch

        def next_batch(timeout: float | None = None) -> Any:
            if loader.state_dict()["batch"] == at and len(loader.state_dict()["weights"]) == 1:
                loader.set_weights({"p0": 0.1, "p1": 0.9}, step=step)
            return take(timeout)

        loader.next_batch = next_batch  # type: ignore[method-assign]
        return loader

    return make


@pytest.mark.parametrize("n_workers", [0, 2])
def test_new_weights_hold_from_the_next_batch_or_a_planned_step_on(n_workers: int) -> None:
    with loader_of(mixture((Part(0, 300), 1), (Part(1, 300), 0)), n_workers=n_workers) as loader:
        assert parts_of(loader, 2) == [0] * 8
        loader.set_weights({"p0": 0, "p1": 1}, step=5)
        loader.set_weights({"p0": 1, "p1": 1}, step=7)
        assert parts_of(loader, 3) == [0] * 12
        assert parts_of(loader, 2) == [1] * 8
        assert sorted(parts_of(loader, 3)) == [0] * 6 + [1] * 6
        loader.set_weights({"p0": 1, "p1": 0})
        assert parts_of(loader, 5) == [0] * 20


def test_a_change_of_weights_loses_and_repeats_no_row_of_a_part() -> None:
    with loader_of(mixture((Part(0, 300), 1), (stream(1, 300), 1)), shuffle=False) as loader:
        seen = firsts(loader, 7)
        loader.set_weights({"p0": 1, "p1": 3})
        seen += firsts(loader, 7)
    for part in (0, 1):
        numbers = [n - 1000 * part for n in seen if n // 1000 == part]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("step", [None, 9])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_resume_before_or_after_a_change_gives_the_same_stream(
    step: int | None, lanes: int
) -> None:
    make = changing(step, 6, lanes=lanes, batch_size=5)
    contracts.resumes_everywhere(make, n=20)
    contracts.resumes_repeatedly(make, n=30, steps=[5, 1, 1, 1, 1, 1, 1, 1, 18])


def test_weights_planned_beyond_a_pass_hold_in_the_next_and_its_state_loads() -> None:
    def make(**how: Any) -> AsyncDataLoader:
        mixed = mixture((Part(0, 7), 0.5), (Part(1, 8), 0.5), on_end="stop")
        return loader_of(mixed, batch_size=1, epochs=1, lanes=2, n_workers=0)

    with make() as loader:
        next(loader)
        loader.set_weights({"p0": 0.9, "p1": 0.1}, step=30)
        assert 1 + sum(1 for _ in loader) < 30
        batches = list(loader)
    with make() as loader:
        loader.load_state_dict(batches[0].state_dict())
        assert contracts.take(loader, 2) == [contracts.digest(batch) for batch in batches[1:3]]


# Parts that end


def test_restart_repeats_a_part_in_a_new_order_and_leaves_none_of_it_out() -> None:
    with loader_of(mixture((Part(0, 8), 1), (Part(1, 1000), 1)), shuffle=True) as loader:
        seen = [n for n in firsts(loader, 16) if n < 1000]
    rounds = [seen[i : i + 8] for i in range(0, 32, 8)]
    assert all(sorted(one) == list(range(8)) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_epochs_are_refused_if_parts_restart() -> None:
    with pytest.raises(ConfigError, match="on_end"):
        loader_of(mixture((Part(0, 8), 1), (Part(1, 8), 1)), epochs=1)


def test_an_epoch_that_stops_ends_with_its_first_part_and_the_next_one_follows() -> None:
    mixed = mixture((Part(0, 4), 1), (Part(1, 6), 1), on_end="stop")
    with loader_of(mixed, batch_size=1) as loader:
        batches = list(contracts.batches_of(loader, 40))
    epochs = [batch.epoch for batch in batches]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 3
    for epoch in range(3):
        seen = [int(batch.inputs[0, 0]) for batch in batches if batch.epoch == epoch]
        assert 7 <= len(seen) == len(set(seen)) <= 9
        assert {0, 1, 2, 3} <= set(seen)


# Errors, and where rows come from


@pytest.mark.parametrize(
    "parts",
    [{}, [], {"a": 1}, {"a": (1,)}, {1: (Part(0, 5), 1)}, {"a": (mixture((Part(0, 5), 1)), 1)}],
)
def test_what_is_not_a_mixture_is_refused(parts: Any) -> None:
    with pytest.raises(ConfigError):
        Mixture(parts)


def test_parts_need_one_seq_len() -> None:
    short, long = (SyntheticDataset(seq_len=n, num_samples=9) for n in (8, 16))
    with pytest.raises(ConfigError, match="seq_len"):
        AsyncDataLoader(Mixture({"a": (short, 1), "b": (long, 1)}), 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_stats_count_the_rows_of_each_part_that_were_handed_out(workers: int) -> None:
    with loader_of(mixture((Part(0, 70), 3), (stream(1, 90), 1)), n_workers=workers) as loader:
        firsts(loader, 10)
        loader.shutdown()
        firsts(loader, 10)
        assert loader.stats().parts == {"p0": 60, "p1": 20}


def test_a_state_with_weights_that_do_not_fit_is_refused() -> None:
    def make() -> AsyncDataLoader:
        return loader_of(mixture((Part(0, 70), 3), (Part(1, 90), 1)), n_workers=0)

    with make() as loader:
        contracts.take(loader, 3)
        state = loader.state_dict()
    unit = sum(state["weights"][0][1])
    half = unit // 2
    wrong = [(0, [unit]), (0, [half, half, 0]), (5, [half, half]), (0, [0, 0]), (0, [1, 1])]
    for weights in ([], *([list(each)] for each in wrong)):
        with pytest.raises(StateError):
            make().load_state_dict(state | {"weights": weights})


# New parts


def test_a_new_part_may_join_on_resume(corpus: Path) -> None:
    def make(*names: str, weights: Sequence[float]) -> AsyncDataLoader:
        parts = {
            name: (TextDataset(corpus / FILES[name], tokenizer="byte", seq_len=64), weight)
            for name, weight in zip(names, weights, strict=True)
        }
        return AsyncDataLoader(Mixture(parts), 8, shuffle=True, seed=1, n_workers=1)

    with make("parquet", "jsonl", weights=(0.5, 0.5)) as loader:
        contracts.take(loader, 10)
        state = loader.state_dict()

    def extended() -> AsyncDataLoader:
        return make("parquet", "jsonl", "many", weights=(0.4, 0.4, 0.2))

    with pytest.raises(StateError, match="weights are not those of 3 parts"):
        extended().load_state_dict(state)
    with extended() as loader:
        loader.load_state_dict(state, extend=True)
        batches = list(contracts.batches_of(loader, 20))
        assert loader.stats().parts["many"] > 0
    with extended() as loader:
        loader.load_state_dict(batches[6].state_dict())  # the change is part of the state
        assert contracts.take(loader, 13) == [contracts.digest(each) for each in batches[7:]]
    with pytest.raises(StateError, match="same ones first"):
        make("many", "parquet", weights=(1, 1)).load_state_dict(state, extend=True)
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
    with pytest.raises(ConfigError, match="for a Mixture"):
        AsyncDataLoader(data, 8).load_state_dict(state, extend=True)

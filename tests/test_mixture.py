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
from penstock.order.mixture_weights import UNIT, Chooser, whole_weights
from tests import contracts
from tests.kinds import FILES

SEQ = 8


class Part:
    """Rows that say which part and sample they are: every id is `1000 * part + sample`."""

    def __init__(self, part: int, length: int) -> None:
        self.part, self.length = part, length

    def __len__(self) -> int:
        return self.length

    seq_len, dtype = SEQ, np.dtype(np.uint16)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__(np.array([index]))[0]

    def __getitems__(self, indices: Any) -> Any:
        return np.repeat(1000 * self.part + indices[:, None], SEQ + 1, 1).astype(np.uint16)

    def boundaries(self, indices: Any) -> Any:
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def data_id(self) -> dict[str, Any]:
        return {"part": self.part}

    def settings_id(self) -> dict[str, Any]:
        return {}


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
@settings(max_examples=60, deadline=None)
def test_every_part_is_within_a_row_of_its_share_at_every_moment(weights: list[float]) -> None:
    names = [str(i) for i in range(len(weights))]
    whole = whole_weights(dict(zip(names, weights, strict=True)), names)
    assert sum(whole) == UNIT
    parts = Chooser(((0, whole),), 0, [0] * len(whole)).parts(np.arange(3000))
    counts = np.cumsum(parts[:, None] == np.arange(len(whole)), axis=0)
    shares = np.arange(1, len(parts) + 1)[:, None] * (np.array(whole) / UNIT)
    assert np.abs(counts - shares).max() < 1 + 1e-6
    assert not set(parts.tolist()) & {i for i, w in enumerate(whole) if not w}


@pytest.mark.parametrize(
    "weights",
    [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1e308, "b": 1e308}, {"a": 0.0, "b": 0.0}]
    + [{"a": wrong, "b": 1.0} for wrong in (-1.0, float("nan"), float("inf"), "1", True, None, 1j)],
)
def test_weights_that_are_none_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError):
        whole_weights(weights, ["a", "b"])


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


# Parts that end


def test_restart_repeats_a_part_in_a_new_order_and_leaves_none_of_it_out() -> None:
    with loader_of(mixture((Part(0, 8), 1), (Part(1, 1000), 1)), shuffle=True) as loader:
        seen = [n for n in firsts(loader, 16) if n < 1000]
    rounds = [seen[i : i + 8] for i in range(0, 32, 8)]
    assert all(sorted(one) == list(range(8)) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_epochs_of_parts_that_are_restarted_for_ever_are_refused() -> None:
    with pytest.raises(ConfigError, match="on_end"):
        loader_of(mixture((Part(0, 8), 1), (Part(1, 8), 1)), epochs=1)


def test_an_endless_mixture_begins_its_next_epoch_where_one_ended() -> None:
    mixed = mixture((Part(0, 4), 1), (Part(1, 6), 1), on_end="stop")
    with loader_of(mixed, batch_size=1) as loader:
        batches = list(contracts.batches_of(loader, 40))
    epochs = [batch.epoch for batch in batches]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 3
    for epoch in range(3):
        seen = [int(batch.inputs[0, 0]) for batch in batches if batch.epoch == epoch]
        assert len(seen) == len(set(seen))
        assert {0, 1, 2, 3} <= set(seen)


# Errors, and where rows come from


@pytest.mark.parametrize(
    "parts",
    [{}, [], {"a": 1}, {"a": (1,)}, {1: (Part(0, 5), 1)}, {"a": (mixture((Part(0, 5), 1)), 1)}],
)
def test_what_is_no_mixture_is_refused(parts: Any) -> None:
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


def test_a_state_that_has_other_weights_than_parts_is_refused() -> None:
    def make() -> AsyncDataLoader:
        return loader_of(mixture((Part(0, 70), 3), (Part(1, 90), 1)), n_workers=0)

    with make() as loader:
        contracts.take(loader, 3)
        state = loader.state_dict()
    half = UNIT // 2
    wrong = [(0, [UNIT]), (0, [half, half, 0]), (5, [half, half]), (0, [0, 0]), (0, [1, 1])]
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

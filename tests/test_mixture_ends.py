"""Where a part of a mixture ends: places, changes of weights, ranks and lanes around it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, Mixture, TextDataset
from tests import contracts
from tests.test_mixture import Part, firsts, loader_of, mixture, stream

WAYS: list[dict[str, Any]] = [
    {"n_workers": 0},
    {"n_workers": 1, "prefetch_size": 1},
    {"n_workers": 1, "prefetch_size": 3},
    {"n_workers": 2, "prefetch_size": 16},
]
"""Ways to read ahead: not at all, by a batch, by some, and to the end."""


def mixed(on_end: Any, second: Any = None) -> Mixture:
    """Parts of which one ends soon, and within a pass all that have weight do with `leave`."""
    return mixture((Part(0, 5), 1), (second or stream(1, 12), 1), (Part(2, 9), 0), on_end=on_end)


def saved(loader: AsyncDataLoader) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def rest(loader: AsyncDataLoader) -> list[int]:
    return firsts(loader, 1000)


# Places and changes of weights


@pytest.mark.parametrize("epochs", [None, 1, 2])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("on_end", ["stop", "leave"])
def test_a_state_is_the_same_however_far_is_read_ahead(
    on_end: Any, lanes: int, epochs: int | None
) -> None:
    def states(way: dict[str, Any]) -> list[Any]:
        # Rows that can be addressed: text has two ways to write the same place.
        with loader_of(
            mixed(on_end, Part(1, 12)), batch_size=1, lanes=lanes, epochs=epochs, **way
        ) as loader:
            out = [saved(loader)]
            while len(out) < 60 and loader.next_batch(timeout=30) is not None:
                out.append(saved(loader))
            return [*out, saved(loader)]

    alone = states(WAYS[0])
    for way in WAYS[1:]:
        assert states(way) == alone, way


# The end of a finite stream


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_end", ["stop", "leave"])
def test_a_state_at_the_end_gives_nothing_and_then_the_next_pass(
    on_end: Any, way: dict[str, Any], batch_size: int
) -> None:
    def make(**more: Any) -> AsyncDataLoader:
        return loader_of(
            mixed(on_end), **{"batch_size": batch_size, "lanes": 2, "epochs": 2, **way, **more}
        )

    with make() as loader:
        assert len(rest(loader)) > 10
        state = saved(loader)
        second = [contracts.digest(batch) for batch in loader]
    assert second
    for more in ({}, {"n_workers": 0}):
        with make(**more) as loader:
            loader.load_state_dict(state)
            assert [batch.index for batch in loader] == []
            assert saved(loader) == state
            assert [contracts.digest(batch) for batch in loader] == second


# Ranks


def over_ranks(
    world: int, batches: int, monkeypatch: pytest.MonkeyPatch, on_end: Any
) -> list[list[int]]:
    """The rows of all ranks in their global order, as ranks see them that `torchrun` has started."""
    texts = [f"document {i} " * 3 for i in range(20)]
    columns = []
    for rank in range(world):
        text = TextDataset.from_iterable(
            texts, tokenizer="byte", seq_len=8, chunk_docs=2, name="texts"
        )
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        with loader_of(
            mixture((text, 1), (Part(1, 200), 1), on_end=on_end), lanes=2, batch_size=4 // world
        ) as loader:
            rows = np.concatenate([np.asarray(next(loader).targets) for _ in range(batches)])
        columns.append(rows.tolist())
    return [row for turn in zip(*columns, strict=True) for row in turn]


@pytest.mark.parametrize("on_end", ["restart", "stop", "leave"])
def test_the_end_of_a_part_is_the_same_for_any_number_of_ranks(
    on_end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = over_ranks(1, 100, monkeypatch, on_end)
    assert over_ranks(2, 100, monkeypatch, on_end) == one
    assert any(-100 in row for row in one) == (
        on_end != "restart"
    )  # the last row of a part that ends is filled up


# Lanes that end before others

"""Where a part of a mixture ends: places, changes of weights, ranks and lanes around it."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("on_end", ["stop", "leave"])
def test_a_stream_after_other_weights_is_the_same_however_far_was_read_ahead(
    on_end: Any, lanes: int
) -> None:
    def changed(at: int, weights: tuple[int, ...], way: dict[str, Any]) -> list[Any]:
        with loader_of(mixed(on_end), batch_size=1, lanes=lanes, shuffle=True, **way) as loader:
            out: list[Any] = firsts(loader, at)
            loader.set_weights({f"p{i}": weight for i, weight in enumerate(weights)})
            for _ in range(25):
                out += [
                    place[:5] for place in saved(loader)["at"].values()
                ]  # all but the places of the parts
                out += firsts(loader, 1)
            return out

    for at in range(6, 22):
        for weights in ((0, 0, 1), (1, 0, 1)):
            alone = changed(at, weights, WAYS[0])
            assert changed(at, weights, WAYS[-1]) == alone, (at, weights)


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_change_with_the_row_at_which_a_part_ends_lose_nothing(
    way: dict[str, Any],
) -> None:
    parts = mixture((Part(0, 4), 1), (Part(1, 30), 0), on_end="leave")
    with loader_of(parts, batch_size=1, epochs=1, **way) as loader:
        assert sorted(firsts(loader, 4)) == [0, 1, 2, 3]
        loader.set_weights({"p0": 1, "p1": 1})
        assert sorted(rest(loader)) == list(range(1000, 1030))


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


@pytest.mark.parametrize("epochs", [None, 1])
def test_a_state_of_a_release_that_saved_places_after_an_end_goes_on_as_it_did(
    epochs: int | None,
) -> None:
    def make() -> AsyncDataLoader:
        return loader_of(
            mixture((Part(0, 4), 1), (Part(1, 30), 1), on_end="stop"),
            batch_size=1,
            epochs=epochs,
            shuffle=False,
        )

    with make() as loader:
        given = firsts(loader, 8)
        state = saved(loader)
        following = firsts(loader, 10)
    assert [n for n in given if n < 1000] == [
        0,
        1,
        2,
        3,
    ]  # the next one is wanted with the row after these
    assert len(following) == (10 if epochs is None else 0)
    old = copy.deepcopy(state)
    old["at"]["0"] = [1, 8, state["at"]["0"][2], [0, 0], [0, 0], [[1, 0], [1, 0]]]
    with make() as loader:
        loader.load_state_dict(old)
        assert firsts(loader, 10) == following


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


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_last_row_of_a_part_is_given_whatever_happens_to_the_last_batch(
    drop_last: bool,
) -> None:
    text = TextDataset.from_iterable(["a" * 20], tokenizer="byte", seq_len=8, name="text")
    with loader_of(
        mixture((text, 1), (Part(1, 20), 1), on_end="leave"), epochs=1, drop_last=drop_last
    ) as loader:
        rows = [row for batch in loader for row in np.asarray(batch.inputs).tolist()]
    assert sum(row.count(ord("a")) for row in rows) == 20
    assert len(rows) == (20 if drop_last else 23)


# Lanes that end before others


def uneven() -> Mixture:
    """Lane 0 gets the short documents, and ends long before lane 1."""
    texts = ["a" * 20, "b" * 900] * 2
    text = TextDataset.from_iterable(texts, tokenizer="byte", seq_len=8, chunk_docs=1, name="text")
    return Mixture({"text": (text, 1), "rows": (Part(1, 200), 1)}, on_end="stop", seq_len=8)


@pytest.mark.parametrize("way", WAYS)
def test_weights_may_change_again_and_again_after_a_lane_has_ended(way: dict[str, Any]) -> None:
    def make(**more: Any) -> AsyncDataLoader:
        return loader_of(uneven(), **{"batch_size": 2, "lanes": 2, "epochs": 1, **more})

    with make(n_workers=0) as loader:
        contracts.take(loader, 20)
        states = []
        for step in range(4):
            loader.set_weights({"text": 1 + step, "rows": 1})
            states.append(saved(loader))
            contracts.take(loader, 1)
        following = contracts.take(loader, 100)
    behind, ahead = (states[-1]["at"][lane][1] for lane in "01")
    assert behind + 4 < ahead
    assert max(len(state["weights"]) for state in states) <= 3, (
        "a state holds no weights that no lane needs"
    )
    with make(**way) as loader:
        loader.load_state_dict(states[-1])
        contracts.take(loader, 1)
        assert contracts.take(loader, 100) == following

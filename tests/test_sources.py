"""The contracts over every kind of data, and states that do not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    AsyncDataLoader,
    ConfigError,
    Mixture,
    StateError,
    SyntheticDataset,
    TextDataset,
    TokenFileDataset,
)
from penstock.errors import SourceError, StateFormat, StateMismatch
from penstock.sources.samples import batched
from tests import contracts

SEQ = 16


class Rows:
    """Rows of ids, one by one."""

    def __init__(self, length: int = 130, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return np.arange(SEQ + 1) + 20 * (index + self.first)


class RowsAtOnce(Rows):
    """Only ever asked for several."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a dataset with __getitems__ is asked for a batch at once")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(type(index) is int for index in indices)
        return [Rows.__getitem__(self, index) for index in indices]


class Tensors(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.arange(SEQ + 1) + 20 * index


class Pairs(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 2), float(index)), torch.tensor(index)


def noisy(sample: Any, rng: np.random.Generator) -> Any:
    return sample + rng.integers(0, 1000)


@batched
def noisy_batch(samples: list[Any], rng: np.random.Generator) -> list[Any]:
    assert isinstance(samples, list)
    return [sample + rng.integers(0, 1000) for sample in samples]


def columns(samples: list[Any]) -> Any:
    return {
        "sum": np.array([s.sum() for s in samples]),
        "all": [torch.as_tensor(s) for s in samples],
        "n": len(samples),
    }


def documents() -> Iterator[str]:
    for i in range(90):
        yield f"document {i} " * (i % 5 + 1)


def ids() -> Iterator[Any]:
    for i in range(120):
        yield np.arange(i % 9) + 100 * i


def samples() -> Iterator[Any]:
    for i in range(130):
        yield {"input_ids": np.arange(SEQ) + i, "labels": np.arange(SEQ) - i}


class Stateful:
    """An iterable that knows how to go on, as those of torchdata do: a state is for the next `iter`."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._items = list(make())
        self._at = self._start = 0
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        self._at, self._start = self._start, 0
        while self._at < len(self._items):
            self._at += 1
            self.read += 1
            yield self._items[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["at"]


class Iterated:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def second_field(sample: Any, rng: np.random.Generator) -> Any:
    return sample["labels"] + rng.integers(0, 99)


def stream(source: Any, **more: Any) -> Any:
    return TextDataset.from_iterable(
        source,
        **{
            "tokenizer": "byte",
            "seq_len": SEQ,
            "chunk_docs": 8,
            "name": "stream",
            "shuffle_chunks": 3,
        }
        | more,
    )


def hub_stream() -> Any:
    """A stream of `datasets` over a table in three shards."""
    import datasets

    return datasets.Dataset.from_dict({"text": list(documents())}).to_iterable_dataset(num_shards=3)


def hub_generator() -> Any:
    import datasets

    return datasets.IterableDataset.from_generator(hub_documents)


def hub_documents() -> Iterator[dict[str, str]]:
    for text in documents():
        yield {"text": text}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (np.arange(130 * SEQ + 1) % 5000).astype(np.uint16).tofile(folder / "ids.bin")
    (folder / "text.txt").write_text("\n\n".join(documents()))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf"))
    import datasets

    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "hf-datasets"
    )
    datasets.disable_progress_bars()


def mixture(folder: Path, on_end: Any) -> Mixture:
    text = TextDataset(
        folder / "text.txt", tokenizer="byte", seq_len=SEQ, separator="\n\n", chunk_bytes=1024
    )
    return Mixture(
        {
            "text": (text, 0.4),
            "tokens": (TokenFileDataset.from_binary_file(folder / "ids.bin", seq_len=SEQ), 0.3),
            "made": (SyntheticDataset(seq_len=SEQ, num_samples=40, vocab_size=300), 0.1),
            "own": (Rows(50), 0.1),
            "stream": (stream(documents), 0.1),
        },
        on_end=on_end,
    )


ADDRESSABLE: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "tokens": (
        lambda folder: TokenFileDataset.from_binary_file(folder / "ids.bin", seq_len=SEQ),
        {},
    ),
    "synthetic": (lambda _: SyntheticDataset(seq_len=SEQ, num_samples=130, vocab_size=300), {}),
    "rows": (lambda _: Rows(), {}),
    "rows in order": (lambda _: Rows(), {"shuffle": False}),
    "rows at once": (lambda _: RowsAtOnce(), {}),
    "array": (lambda _: np.arange(130 * 17).reshape(130, 17), {}),
    "preprocess": (lambda _: Rows(), {"preprocess": noisy}),
    "tensors": (lambda _: Tensors(), {}),
    "pairs": (lambda _: Pairs(), {}),
}
WHOLE_BATCHES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "batched": (lambda _: RowsAtOnce(), {"preprocess": noisy_batch}),
    "collate": (lambda _: Rows(), {"collate": columns}),
}
STREAMS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "function": (lambda _: stream(documents), {}),
    "function, shuffled": (lambda _: stream(documents), {"shuffle": True}),
    "list": (lambda _: stream(list(documents())), {}),
    "stateful": (lambda _: stream(Stateful(documents)), {}),
    "stateful, shuffled": (lambda _: stream(Stateful(documents)), {"shuffle": True}),
    "hub": (lambda _: stream(hub_stream()), {}),
    "hub generator": (lambda _: stream(hub_generator()), {}),
    "ids": (lambda _: stream(ids, tokenizer=None), {}),
    "best fit": (
        lambda _: stream(documents, packing="best_fit", positions=True),
        {"shuffle": True},
    ),
}
SAMPLES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "samples": (lambda _: samples, {}),
    "stateful samples": (lambda _: Stateful(samples), {}),
    "list of samples, iterated": (
        lambda _: Iterated(list(samples())),
        {"preprocess": second_field},
    ),
}
MIXTURES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "restart": (lambda folder: mixture(folder, "restart"), {}),
    "restart, shuffled": (lambda folder: mixture(folder, "restart"), {"shuffle": True}),
    "stop": (lambda folder: mixture(folder, "stop"), {}),
}
KINDS = ADDRESSABLE | WHOLE_BATCHES | STREAMS | SAMPLES | MIXTURES


def maker(kind: str, folder: Path, **fixed: Any) -> contracts.Make:
    """Builds loaders of one stream; each reads a dataset of its own, as after a restart of the program."""
    build, about = KINDS[kind]

    def make(**how: Any) -> AsyncDataLoader:
        defaults = {"batch_size": 4, "seed": 3, "n_workers": 2}
        return AsyncDataLoader(build(folder), **{**defaults, **about, **fixed, **how})

    return make


# States that do not fit


JUNK = (
    -1,
    0,
    1,
    3,
    10**6,
    2**62,
    2**63 - 1,
    2**63,
    10**30,
    1.5,
    True,
    None,
    "x",
    [],
    {},
    [1],
    [[0, [1]]],
    {"taken": "x"},
)


def places_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a state that decides where the stream goes on."""
    if path:
        yield path
    inside = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    for key, value in inside:
        # What a source of the user's says of itself, only that source can judge.
        if key != "state" and (
            path or key in ("row", "batch", "first", "lanes", "at", "weights", "source")
        ):
            yield from places_in(value, (*path, key))


def damaged(state: Any, rng: random.Random) -> tuple[Any, str]:
    state = json.loads(json.dumps(state))
    path = rng.choice(list(places_in(state)))
    node = state
    for key in path[:-1]:
        node = node[key]
    if rng.random() < 0.3:
        del node[path[-1]]
        return state, f"without {path}"
    node[path[-1]] = rng.choice(JUNK)
    return state, f"{path} is {node[path[-1]]!r}"


FUZZED = (
    "rows",
    "tokens",
    "function",
    "stateful",
    "best fit",
    "hub",
    "samples",
    "stateful samples",
    "restart",
    "stop",
)


@pytest.mark.parametrize("kind", FUZZED)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_damaged_state_is_refused_or_gives_batches(kind: str, folder: Path) -> None:
    make = maker(kind, folder, n_workers=0)
    with make() as loader:
        contracts.take(loader, 11)
        state = loader.state_dict()
    wrong: dict[str, str] = {}
    for seed in range(100):
        broken, how = damaged(state, random.Random(seed))
        loader = make()
        try:
            loader.load_state_dict(broken)
            loader.next_batch(timeout=10)
        except (StateError, SourceError):
            pass
        except Exception as error:
            wrong[how] = f"{type(error).__name__}: {error}"
        finally:
            loader.shutdown()
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("one", ["rows", "tokens", "function", "samples", "restart"])
def test_a_state_of_another_kind_of_data_is_refused(one: str, folder: Path) -> None:
    with maker(one, folder)() as loader:
        contracts.take(loader, 2)
        state = loader.state_dict()
    for other in KINDS:
        if other.split(",")[0] not in (
            one,
            "rows in order",
            "preprocess",
            "collate",
            "ids",
            "best fit",
        ):
            with maker(other, folder)() as loader:
                if loader.state_dict()["data"] != state["data"]:
                    with pytest.raises((StateMismatch, StateFormat)):
                        loader.load_state_dict(state)


# What is no data


def test_texts_are_refused_with_advice_how_to_tokenize_them() -> None:
    for texts in (["a", "b"], ("a", "b")):
        with pytest.raises(ConfigError, match=r"TextDataset\.from_iterable"):
            AsyncDataLoader(texts, 2)
    for texts in (documents, Iterated(list(documents()))):
        with (
            AsyncDataLoader(texts, 2, n_workers=1) as loader,
            pytest.raises(ConfigError, match=r"TextDataset\.from_iter"),
        ):
            next(loader)


@pytest.mark.parametrize("texts", [["ab", "cd", "ef"], Iterated(["ab", "cd", "ef"])])
def test_texts_are_taken_by_whoever_brings_a_preprocess_of_his_own(texts: Any) -> None:
    def encode(text: str) -> Any:
        return np.frombuffer(text.encode(), np.uint8)

    with AsyncDataLoader(
        texts, 3, shuffle=False, epochs=1, n_workers=1, preprocess=encode
    ) as loader:
        assert next(loader).inputs.tolist() == [[97], [99], [101]]


@pytest.mark.parametrize("data", ["a path", b"bytes", {"a": 1}, 5, None, object()])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="dataset"):
        AsyncDataLoader(data, 2)


def test_an_iterable_of_samples_is_not_shuffled() -> None:
    with pytest.raises(ConfigError, match="shuffle"):
        AsyncDataLoader(samples, 2, shuffle=True).start()

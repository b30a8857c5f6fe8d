"""The contracts over every kind of data, and states that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import (
    AsyncDataLoader,
    ConfigError,
)

SEQ = 16


def documents() -> Iterator[str]:
    for i in range(90):
        yield f"document {i} " * (i % 5 + 1)


def samples() -> Iterator[Any]:
    for i in range(130):
        yield {"input_ids": np.arange(SEQ) + i, "labels": np.arange(SEQ) - i}


class Iterated:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf"))
    import datasets

    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "hf-datasets"
    )
    datasets.disable_progress_bars()


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

"""Iterables: what a resume costs, one-shot iterators, failures, and what is not data."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock import AsyncDataLoader, ConfigError, TextDataset
from penstock.errors import SourceError
from tests import contracts
from tests.kinds import Stateful

SEQ = 8
REPLAY = re.compile(r"has no usable state_dict: .* first (\d+) items .* in [\d.]+ s")


class Source:
    """Counts what is read of it."""

    def __init__(self, length: int = 100) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            self.read += 1
            yield self.item(index)

    def item(self, index: int) -> Any:
        return np.full(SEQ + 1, index)


class Documents(Source):
    """Each document fills a row, but for the id that opens the next."""

    def item(self, index: int) -> Any:
        return np.full(SEQ, index)


class WithState(Stateful):
    """Keeps its own position, and counts what is read of it."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.reads += 1
            yield item


def text(source: Any, **more: Any) -> Any:
    return TextDataset.from_iterable(
        source, **{"tokenizer": None, "seq_len": SEQ, "chunk_docs": 4, "name": "it"} | more
    )


def samples_loader(source: Any, **how: Any) -> AsyncDataLoader:
    return AsyncDataLoader(source, **{"batch_size": 4, "n_workers": 1, "prefetch_size": 2, **how})


def text_loader(source: Any, **how: Any) -> AsyncDataLoader:
    return samples_loader(text(source), **how)


Make = Callable[..., AsyncDataLoader]
PATHS = pytest.mark.parametrize(
    ("loader_of", "kind"), [(samples_loader, Source), (text_loader, Documents)]
)


def firsts(loader: AsyncDataLoader, n: int) -> list[int]:
    return [first for b in contracts.batches_of(loader, n) for first in b.inputs[:, 0].tolist()]


# What a resume costs


@PATHS
def test_a_resume_replays_a_source_without_state_and_warns_once(
    loader_of: Make, kind: type[Source], caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of(kind()) as loader:
        assert firsts(loader, 10) == list(range(40))
        state = loader.state_dict()
    assert not caplog.records
    again = kind()
    with caplog.at_level(logging.WARNING, "penstock"), loader_of(again) as loader:
        loader.load_state_dict(state)
        assert firsts(loader, 5) == list(range(40, 60))
    (warned,) = (REPLAY.search(record.getMessage()) for record in caplog.records)
    assert warned is not None
    assert 36 <= int(warned[1]) <= 40
    assert again.read >= 60


@PATHS
def test_a_resume_uses_the_state_of_a_source_that_has_one(
    loader_of: Make, kind: type[Source], caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of(WithState(list(kind()))) as loader:
        firsts(loader, 20)
        state = loader.state_dict()
    again = WithState(list(kind()))
    loader = loader_of(again)
    loader.load_state_dict(state)
    with loader:
        assert firsts(loader, 1) == list(range(80, 84))
    assert 4 <= again.reads < 80  # those read ahead, and not the 80 before
    assert not caplog.records


def test_a_state_that_cannot_be_saved_is_replaced_by_a_replay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(WithState):
        def state_dict(self) -> Any:
            return super().state_dict() | {"of": object()}

    with samples_loader(Odd(list(Source()))) as loader:
        firsts(loader, 10)
        state = loader.state_dict()
    with samples_loader(Odd(list(Source()))) as loader:
        loader.load_state_dict(state)
        assert firsts(loader, 2) == list(range(40, 48))
    assert "no usable state_dict" in caplog.text


def test_an_iterable_that_ends_before_the_state_is_refused() -> None:
    with samples_loader(Source(100)) as loader:
        firsts(loader, 10)
        state = loader.state_dict()
    with samples_loader(Source(30)) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SourceError, match="30 items"):
            firsts(loader, 1)


def test_set_epoch_is_called_on_a_source_that_has_it() -> None:
    class WithEpoch(Source):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def item(self, index: int) -> Any:
            return np.full(SEQ + 1, 100 * self.epoch + index)

    def make(**how: Any) -> AsyncDataLoader:
        return samples_loader(WithEpoch(10), **how)

    with make(batch_size=10) as loader:
        assert firsts(loader, 3) == [100 * epoch + i for epoch in range(3) for i in range(10)]
    contracts.resumes_everywhere(make, n=12)


# Iterators


@PATHS
@pytest.mark.parametrize("again", ["epoch", "pass", "shutdown"])
def test_an_iterator_is_read_once_and_refuses_rather_than_lose_items(
    loader_of: Make, kind: type[Source], again: str
) -> None:
    with loader_of(iter(kind(20)), epochs=1 if again == "pass" else None) as loader:
        if again == "pass":
            assert len(list(loader)) >= 4
        else:
            assert firsts(loader, 2) == list(range(8))
        if again == "shutdown":
            loader.shutdown()
        with pytest.raises(ConfigError, match="iterator, which can be read once"):
            list(loader)


@PATHS
def test_a_new_iterator_resumes_from_a_state(loader_of: Make, kind: type[Source]) -> None:
    with loader_of(iter(kind())) as loader:
        firsts(loader, 5)
        state = loader.state_dict()
    loader = loader_of(iter(kind()))
    loader.load_state_dict(state)
    with loader:
        assert firsts(loader, 2) == list(range(20, 28))


# Failures


@PATHS
def test_an_iterable_that_gives_nothing_is_refused(loader_of: Make, kind: type[Source]) -> None:
    for how in ({"n_workers": 0}, {"epochs": 1}):
        with loader_of(kind(0), **how) as loader, pytest.raises(SourceError):
            firsts(loader, 1)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_stop_iteration_in_preprocess_is_an_error_and_not_the_end(n_workers: int) -> None:
    def stops(sample: Any) -> Any:
        if sample[0] == 10:
            next(iter(()))
        return sample

    with (
        samples_loader(Source(), preprocess=stops, epochs=1, n_workers=n_workers) as loader,
        pytest.raises(RuntimeError),
    ):
        list(loader)


@pytest.mark.parametrize(
    "document", [{"other": "x"}, 5, 1.5, np.zeros((2, 2)), np.array([-1]), np.array([2**40]), b"x"]
)
def test_an_invalid_document_is_refused_with_its_number(document: Any) -> None:
    def documents() -> Iterator[Any]:
        yield np.arange(5)
        yield document

    with samples_loader(text(documents)) as loader, pytest.raises(SourceError) as caught:
        firsts(loader, 1)
    assert any("document" in note for note in caught.value.__notes__)


def test_text_needs_a_tokenizer_and_ids_do_not_mix_with_it() -> None:
    with samples_loader(text(["a", "b"])) as loader, pytest.raises(SourceError, match="tokenizer"):
        firsts(loader, 1)
    for separator in ({"eos": 5}, {"bos": "x"}):
        with pytest.raises(ConfigError, match="need a tokenizer"):
            text([np.arange(3)], **separator)
    mixed = text(["a", np.arange(3)], tokenizer="byte")
    with samples_loader(mixed) as loader, pytest.raises(SourceError, match="one or the other"):
        firsts(loader, 1)


def test_empty_documents_and_none_are_left_out() -> None:
    for source, tokenizer in (
        ([None, "", "abcdefghi" * 3], "byte"),
        ([None, [], np.arange(30)], None),
    ):
        with samples_loader(text(source, tokenizer=tokenizer), batch_size=1) as loader:
            assert len(firsts(loader, 3)) == 3


# What is not data


@pytest.mark.parametrize("data", ["a path", b"bytes", {"a": 1}, 5, None, object()])
def test_what_is_not_data_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="dataset"):
        AsyncDataLoader(data, 2)
    with pytest.raises(ConfigError, match="source"):
        text(data)


def test_texts_are_refused_as_samples_unless_preprocess_makes_ids_of_them() -> None:
    def encode(text: str) -> Any:
        return np.frombuffer(text.encode(), np.uint8)

    texts = ["ab", "cd", "ef"]
    for data in (texts, lambda: iter(texts)):
        with (
            pytest.raises(ConfigError, match=r"TextDataset\.from_iterable"),
            samples_loader(data) as loader,
        ):
            next(loader)
        with samples_loader(data, batch_size=3, shuffle=False, preprocess=encode) as loader:
            assert next(loader).inputs.tolist() == [[97], [99], [101]]


def test_an_iterable_of_samples_is_not_shuffled() -> None:
    with pytest.raises(ConfigError, match="shuffle"):
        samples_loader(Source(), shuffle=True).start()


# Datasets of other libraries


def test_a_torch_iterable_dataset_that_has_a_length_is_iterated() -> None:
    class Sized(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 12

        def __iter__(self) -> Iterator[Any]:
            yield from Source(12)

    with samples_loader(Sized(), epochs=1) as loader:
        assert firsts(loader, 100) == list(range(12))


def test_a_shuffled_stream_of_datasets_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    def make(**how: Any) -> AsyncDataLoader:
        table = datasets.Dataset.from_dict(
            {"text": [list(range(8 * i, 8 * i + 8)) for i in range(60)]}
        )
        return samples_loader(
            text(table.to_iterable_dataset().shuffle(seed=1, buffer_size=10)), epochs=1, **how
        )

    contracts.resumes_everywhere(make, n=10)

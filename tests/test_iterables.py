"""Iterables: what a resume costs, one-shot iterators, failures, and sources of odd shapes."""

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

SEQ = 8
REPLAY = re.compile(r"has no usable state_dict: .* first (\d+) items .* in [\d.]+ s")


class Source:
    """Counts what is read of it."""

    def __init__(self, length: int = 100, fails_at: int | None = None) -> None:
        self.length, self.fails_at = length, fails_at
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            if index == self.fails_at:
                raise OSError("the connection is gone")
            self.read += 1
            yield self.item(index)

    def item(self, index: int) -> Any:
        return np.full(SEQ + 1, index)


class Documents(Source):
    """Each document fills a row, but for the id that opens the next."""

    def item(self, index: int) -> Any:
        return np.full(SEQ, index)


class WithState:
    """Keeps its own position: an iterator goes on from there."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reads = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.source.length:
            self.at += 1
            self.reads += 1
            yield self.source.item(self.at - 1)
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


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
def test_a_resume_replays_a_source_without_state_and_says_so_once(
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
    (told,) = (REPLAY.search(record.getMessage()) for record in caplog.records)
    assert told is not None
    assert 36 <= int(told[1]) <= 40
    assert again.read >= 60


@PATHS
def test_a_resume_uses_the_state_of_a_source_that_has_one(
    loader_of: Make, kind: type[Source], caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of(WithState(kind())) as loader:
        firsts(loader, 20)
        state = loader.state_dict()
    again = WithState(kind())
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
            return {"at": self.at, "of": object()}

    with samples_loader(Odd(Source())) as loader:
        firsts(loader, 10)
        state = loader.state_dict()
    with samples_loader(Odd(Source())) as loader:
        loader.load_state_dict(state)
        assert firsts(loader, 2) == list(range(40, 48))
    assert "no usable state_dict" in caplog.text


def test_a_shorter_iterable_than_the_state_was_made_with_is_told_apart() -> None:
    with samples_loader(Source(100)) as loader:
        firsts(loader, 10)
        state = loader.state_dict()
    with samples_loader(Source(30)) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SourceError, match="30 items"):
            firsts(loader, 1)


def test_the_epoch_is_told_to_a_source_that_wants_to_know_it() -> None:
    class Told(Source):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def item(self, index: int) -> Any:
            return np.full(SEQ + 1, 100 * self.epoch + index)

    def make(**how: Any) -> AsyncDataLoader:
        return samples_loader(Told(10), **how)

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
def test_a_new_iterator_goes_on_from_a_state(loader_of: Make, kind: type[Source]) -> None:
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
def test_stop_iteration_in_preprocess_does_not_end_the_stream_in_silence(n_workers: int) -> None:
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
def test_a_document_that_is_none_is_refused_with_its_number(document: Any) -> None:
    def documents() -> Iterator[Any]:
        yield np.arange(5)
        yield document

    with samples_loader(text(documents)) as loader, pytest.raises(SourceError) as caught:
        firsts(loader, 1)
    assert any("document" in note for note in caught.value.__notes__)


def test_text_needs_a_tokenizer_and_ids_do_not_mix_with_it() -> None:
    with samples_loader(text(["a", "b"])) as loader, pytest.raises(SourceError, match="tokenizer"):
        firsts(loader, 1)
    mixed = text(["a", np.arange(3)], tokenizer="byte")
    with samples_loader(mixed) as loader, pytest.raises(SourceError, match="one or the other"):
        firsts(loader, 1)


def test_empty_documents_and_none_are_left_out_of_text_and_of_ids() -> None:
    for source, tokenizer in (
        ([None, "", "abcdefghi" * 3], "byte"),
        ([None, [], np.arange(30)], None),
    ):
        with samples_loader(text(source, tokenizer=tokenizer), batch_size=1) as loader:
            assert len(firsts(loader, 3)) == 3


@pytest.mark.parametrize("source", ["text", b"bytes", {"a": 1}, 5, None])
def test_what_is_no_iterable_of_documents_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="source"):
        TextDataset.from_iterable(source, tokenizer="byte", seq_len=4)


# Ranks, lanes and the rest


def test_a_torch_iterable_dataset_that_has_a_length_is_iterated() -> None:
    class Sized(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 12

        def __iter__(self) -> Iterator[Any]:
            yield from Source(12)

    with samples_loader(Sized(), epochs=1) as loader:
        assert firsts(loader, 100) == list(range(12))


def test_a_shuffled_hub_stream_loses_no_document_over_a_resume(
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

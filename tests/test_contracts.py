"""The contracts over sources, packings and shuffles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, Shard, TextDataset
from tests import contracts
from tests.corpus import texts

SOURCES = {
    "parquet": "parquet",
    "jsonl": "docs.jsonl",
    "gz": "docs.jsonl.gz",
    "text": "docs.txt",
    "many": "many",
}
PACKINGS = ("concat", "bos", "best_fit")


def maker(
    corpus: Path, source: str, packing: str = "concat", shuffle: bool = False, **fixed: Any
) -> contracts.Make:
    """Builds loaders of one stream."""
    about = {
        "chunk_bytes": 4096,
        "shuffle_chunks": 4,
        "seq_len": 64,
        "tokenizer": str(corpus / "tokenizer.json"),
    }
    loader = {"batch_size": 8, "seed": 5, "n_workers": 2}
    for name in [
        name
        for name in fixed
        if name
        in (
            "seq_len",
            "tokenizer",
            "positions",
            "doc_batch",
            "split",
            "skip",
            "shuffle_chunks",
            "chunk_bytes",
            "val_fraction",
        )
    ]:
        about[name] = fixed.pop(name)
    separator = "\0\0" if source == "text" else None
    data = TextDataset(corpus / SOURCES[source], packing=packing, separator=separator, **about)

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(data, shuffle=shuffle, **{**loader, **fixed, **how})

    return make


matrix = pytest.mark.parametrize(
    ("source", "packing", "shuffle"),
    [
        # Packing knows nothing of where text comes from: all pairs of the two are left to `make test-slow`.
        pytest.param(
            source,
            packing,
            shuffle,
            marks=[] if packing == "concat" or source == "parquet" else [pytest.mark.slow],
        )
        for source in SOURCES
        for packing in PACKINGS
        for shuffle in (False, True)
    ],
)


@matrix
def test_every_batch_of_two_epochs_resumes_exactly(
    corpus: Path, source: str, packing: str, shuffle: bool
) -> None:
    contracts.resumes_everywhere(
        maker(corpus, source, packing, shuffle, epochs=2, seq_len=256), n=1000, every=3
    )


@matrix
def test_resuming_many_times_in_a_row_gives_the_whole_stream(
    corpus: Path, source: str, packing: str, shuffle: bool
) -> None:
    make = maker(corpus, source, packing, shuffle)
    contracts.resumes_repeatedly(make, n=48, steps=[0, 1, 1, 2, 3, 1, 17, 1, 1, 16, 5])


@matrix
def test_the_stream_is_the_same_however_it_is_run(
    corpus: Path, source: str, packing: str, shuffle: bool
) -> None:
    make = maker(corpus, source, packing, shuffle)
    ways = [{"n_workers": 0, "prefetch_size": 1}]
    ways += [
        {"n_workers": w, "prefetch_size": p} for w, p in ((1, 1), (1, 16), (2, 3), (3, 8), (8, 2))
    ]
    contracts.same_for_any(make, 40, ways)


@matrix
def test_the_global_stream_is_the_same_for_any_world_size(
    corpus: Path, source: str, packing: str, shuffle: bool
) -> None:
    make = maker(corpus, source, packing, shuffle, lanes=8, n_workers=1, seq_len=32)
    contracts.same_for_any_world(make, batches=3, global_batch=16, worlds=(8, 4, 1, 2))


@pytest.mark.parametrize("source", SOURCES)
def test_restoring_at_every_single_batch_of_an_epoch(corpus: Path, source: str) -> None:
    contracts.resumes_everywhere(
        maker(corpus, source, "concat", True, epochs=1, seq_len=512), n=1000
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_positions_resume_with_the_ids(corpus: Path, packing: str) -> None:
    contracts.resumes_everywhere(
        maker(corpus, "parquet", packing, True, positions=True, epochs=1), n=60, every=7
    )


@pytest.mark.parametrize("source", SOURCES)
def test_shutdown_and_restart_lose_nothing(corpus: Path, source: str) -> None:
    contracts.closes_cleanly(maker(corpus, source, shuffle=True))


@pytest.mark.parametrize("doc_batch", [1, 2, 7, 1000])
def test_documents_tokenized_at_once_do_not_change_the_stream(corpus: Path, doc_batch: int) -> None:
    whole = contracts.ledger(maker(corpus, "parquet"), 60)
    assert contracts.ledger(maker(corpus, "parquet", doc_batch=doc_batch), 60) == whole


def test_lanes_that_do_not_divide_the_batch_keep_the_stream(corpus: Path) -> None:
    make = maker(corpus, "parquet", shuffle=True, lanes=6)
    contracts.same_for_any_world(make, batches=5, global_batch=6, worlds=(1, 2, 3, 6))
    contracts.resumes_everywhere(
        maker(corpus, "parquet", shuffle=True, lanes=6, batch_size=5), n=40, every=3
    )


def stream_of(make: contracts.Make, **how: Any) -> list[int]:
    """The ids of a finite concat stream, padding left out: all inputs, and the last target."""
    ids: list[int] = []
    last = 0
    with make(epochs=1, drop_last=False, batch_size=1, **how) as loader:
        for batch in loader:
            real = int((np.asarray(batch.targets) != -100).sum())
            ids += np.asarray(batch.inputs)[0, :real].tolist()
            last = int(np.asarray(batch.targets)[0, real - 1])
    return [*ids, last]


def reference_ids(corpus: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    return [[*tokenizer.encode(text).ids, eos] for text in texts() if text]


@pytest.mark.parametrize("source", ["parquet", "jsonl", "gz", "text"])
def test_concat_gives_every_token_of_every_document_once_and_in_order(
    corpus: Path, source: str
) -> None:
    expected = [id for document in reference_ids(corpus) for id in document]
    assert stream_of(maker(corpus, source)) == expected


def documents_of(ids: list[int], eos: int) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    at = 0
    while at < len(ids):
        end = ids.index(eos, at) + 1
        out.append(tuple(ids[at:end]))
        at = end
    return out


@pytest.mark.parametrize("source", SOURCES)
def test_shuffled_concat_gives_the_same_documents_in_another_order(
    corpus: Path, source: str
) -> None:
    reference = [tuple(document) for document in reference_ids(corpus)]
    ids = stream_of(maker(corpus, source, shuffle=True))
    shuffled = documents_of(ids, reference[0][-1])
    assert sorted(shuffled) == sorted(reference)
    assert shuffled != reference


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_shards_are_disjoint_and_complete(corpus: Path, source: str, world: int) -> None:
    reference = [tuple(document) for document in reference_ids(corpus)]
    make = maker(corpus, source, shuffle=True)
    found: list[tuple[int, ...]] = []
    for rank in range(world):
        found += documents_of(stream_of(make, shard=Shard(world, rank)), reference[0][-1])
    assert sorted(found) == sorted(reference)


def test_each_epoch_has_an_order_of_its_own(corpus: Path) -> None:
    make = maker(corpus, "parquet", shuffle=True, epochs=1, batch_size=1, seq_len=64)
    with make() as loader:
        first = [contracts.digest(b) for b in loader]
        second = [contracts.digest(b) for b in loader]
    assert first != second
    assert len(first) == len(second)


def test_another_seed_gives_another_order(corpus: Path) -> None:
    make = maker(corpus, "parquet", shuffle=True)
    assert contracts.ledger(make, 20, seed=1) != contracts.ledger(make, 20, seed=2)


@pytest.mark.slow
@matrix
def test_every_single_batch_resumes_with_every_source_packing_and_order(
    corpus: Path, source: str, packing: str, shuffle: bool
) -> None:
    contracts.resumes_everywhere(
        maker(corpus, source, packing, shuffle, epochs=2, seq_len=128), n=400
    )

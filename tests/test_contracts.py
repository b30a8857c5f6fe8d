"""The contracts on every kind of data, packing and order."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, Mixture, Shard, SyntheticDataset, TextDataset
from penstock.errors import CorruptFile, SourceError
from tests import contracts
from tests.kinds import (
    EOS,
    FILES,
    ITERATED,
    KINDS,
    MIXED,
    MIXTURES,
    PACKINGS,
    PROCESSED,
    ROW_NUMBERS,
    SEQ,
    SLOW,
    TEXT,
    Kind,
    Samples,
    documents,
)


def each(kinds: dict[str, Kind], only: Callable[[Kind], bool] = lambda kind: True) -> Any:
    """Run a test on every one of these kinds."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
            for name, kind in kinds.items()
            if only(kind)
        ],
    )


# The same stream, however it is run


@each(KINDS)
def test_same_for_any_worker_count(kind: Kind, corpus: Path) -> None:
    contracts.same_for_any(kind.maker(corpus), 40)


@pytest.mark.parametrize("name", ["many concat shuffled", "synthetic"])
def test_every_combination_of_workers_and_prefetch_runs(name: str, corpus: Path) -> None:
    ways = [{"n_workers": n, "prefetch_size": size} for n in (1, 2, 5, 12) for size in (1, 4, 8)]
    contracts.same_for_any(KINDS[name].maker(corpus, epochs=1), 60, ways)


ON_PROCESSES = (
    "parquet concat shuffled, gz concat, iterable best_fit shuffled, samples shuffled, "
    "iterated samples, mixture restart shuffled"
)


@pytest.mark.parametrize("name", ON_PROCESSES.split(", "))
def test_processes_give_the_stream_of_threads(name: str, corpus: Path) -> None:
    contracts.same_for_any(KINDS[name].maker(corpus), 20, contracts.PROCESSES)


@each(TEXT | MIXTURES)
def test_same_for_any_world_size(kind: Kind, corpus: Path) -> None:
    make = kind.maker(corpus, n_workers=1, lanes=kind.lanes)
    contracts.same_for_any_world_size(make, batches=12, global_batch=8, worlds=(4, 1, 2))


@each(ROW_NUMBERS | ITERATED | {"preprocessed": PROCESSED["preprocessed"]})
def test_rows_are_the_same_for_any_world_size(kind: Kind, corpus: Path) -> None:
    make = kind.maker(corpus, n_workers=1)
    contracts.same_for_any_world_size(make, batches=3, global_batch=30, worlds=(5, 1, 2, 3))


def test_lanes_that_do_not_divide_the_batch_keep_the_stream(corpus: Path) -> None:
    make = KINDS["parquet concat shuffled"].maker(corpus, lanes=6)
    contracts.same_for_any_world_size(make, batches=5, global_batch=6, worlds=(1, 2, 3, 6))


# Resuming


@each(KINDS)
def test_resumes_everywhere(kind: Kind, corpus: Path) -> None:
    make = kind.maker(corpus, batch_size=16, **kind.finite())
    contracts.resumes_everywhere(
        make, n=80, every=1 if kind.rows else 2, tail=4, state_bytes=kind.state_bytes
    )


@each(KINDS)
def test_resumes_repeatedly(kind: Kind, corpus: Path) -> None:
    contracts.resumes_repeatedly(
        kind.maker(corpus), n=48, steps=[0, 1, 1, 2, 3, 1, 17, 1, 1, 16, 5]
    )


@each(TEXT | MIXTURES)
def test_several_lanes_resume(kind: Kind, corpus: Path) -> None:
    make = kind.maker(corpus, lanes=kind.lanes, batch_size=5, seed=1)
    contracts.resumes_everywhere(make, n=60, every=9, tail=10, state_bytes=4096)


# What the stream is made of


@each(KINDS, only=lambda kind: kind.read is not None)
def test_provenance_names_the_rows(kind: Kind, corpus: Path) -> None:
    assert kind.read is not None
    contracts.provenance_names_the_rows(kind.maker(corpus), 60, partial(kind.read, corpus))


@each({name: kind for name, kind in TEXT.items() if "concat" in name})
def test_finite_pass_uses_every_document_once(kind: Kind, corpus: Path) -> None:
    contracts.finite_pass_uses_every_document_once(kind.maker(corpus), documents(), EOS)


@each(TEXT)
def test_finite_pass_names_every_document(kind: Kind, corpus: Path) -> None:
    assert kind.read is not None
    contracts.finite_pass_names_every_document(
        kind.maker(corpus), documents(), partial(kind.read, corpus)
    )


@each(KINDS, only=lambda kind: kind.rows is not None)
def test_finite_pass_gives_every_row_once(kind: Kind, corpus: Path) -> None:
    assert kind.rows is not None
    rows = contracts.finite_rows(kind.maker(corpus))
    assert Counter(map(tuple, rows)) == Counter(map(tuple, kind.rows()))


@pytest.mark.parametrize("source", ["parquet", "jsonl", "gz", "txt", "iterable"])
def test_concat_cuts_the_documents_in_order_into_rows_that_overlap_by_one(
    corpus: Path, source: str
) -> None:
    ids = [id for document in documents() for id in document]
    expected = [ids[at : at + SEQ + 1] for at in range(0, len(ids) - 1, SEQ)]
    assert contracts.finite_rows(TEXT[f"{source} concat"].maker(corpus)) == expected


@pytest.mark.parametrize("shuffle", ["", " shuffled"])
def test_best_fit_cuts_only_long_documents_and_bos_begins_rows_with_one(
    corpus: Path, shuffle: str
) -> None:
    kind = TEXT[f"parquet best_fit{shuffle}"]
    assert kind.read is not None
    with kind.maker(corpus, epochs=1, drop_last=False)() as loader:
        spans = [span for batch in loader for row in batch.provenance() for span in row]
    assert len(spans) > len(documents())
    for span in spans:
        length = len(kind.read(corpus, span))
        assert length > SEQ + 1 or span.tokens == (0, length)
    with TEXT[f"parquet bos{shuffle}"].maker(corpus, epochs=1)() as loader:
        assert {row[0].tokens[0] for batch in loader for row in batch.provenance()} == {0}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_file_without_text_leaves_the_others_whole(tmp_path: Path, packing: str) -> None:
    text = "all of this"
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "b.jsonl").write_text(f'{{"text": "{text}"}}\n')
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=32, packing=packing)
    with AsyncDataLoader(data, 1, epochs=1) as loader:
        [batch] = loader
    assert data.decode(batch.inputs[0, : len(text)]) == text


@pytest.mark.parametrize("packing", PACKINGS)
def test_positions_count_from_the_start_of_each_document_or_row(corpus: Path, packing: str) -> None:
    data = TextDataset(
        corpus / "parquet", tokenizer="byte", seq_len=SEQ, packing=packing, positions=True
    )
    with AsyncDataLoader(data, 4, shuffle=True, epochs=1) as loader:
        for batch in loader:
            expected = np.zeros((len(batch.inputs), SEQ), np.int64)
            for row, spans in zip(expected, batch.provenance(), strict=True):
                starts = {0, *(span.at[0] for span in spans), spans[-1].at[1]}
                for column in range(1, SEQ):
                    row[column] = 0 if column in starts else row[column - 1] + 1
            flat = expected.reshape(-1)
            assert np.array_equal(np.asarray(batch.positions), expected)
            assert batch.cu_seqlens.tolist() == [*np.flatnonzero(flat == 0).tolist(), flat.size]


@pytest.mark.parametrize("source", [*FILES, "iterable"])
@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_disjoint_and_complete(corpus: Path, source: str, world: int) -> None:
    kind = TEXT[f"{source} concat shuffled"]
    assert kind.read is not None
    found: list[list[int]] = []
    for rank in range(world):
        make = kind.maker(corpus, shard=Shard(world, rank), epochs=1, drop_last=False)
        with make() as loader:
            spans = {s.address: s for b in loader for row in b.provenance() for s in row}
        found += [kind.read(corpus, span) for span in spans.values()]
    assert sorted(found) == sorted(documents())


@pytest.mark.parametrize("name", ["parquet concat", "iterable concat", "samples", "tokens"])
def test_each_epoch_and_each_seed_has_an_order_of_its_own_if_shuffled(
    corpus: Path, name: str
) -> None:
    def passes(shuffled: str, seed: int = 1) -> list[list[bytes]]:
        with KINDS[name + shuffled].maker(corpus, epochs=1, seed=seed)() as loader:
            return [[np.asarray(batch.inputs).tobytes() for batch in loader] for _ in range(2)]

    plain, plain_again = passes("")
    first, second = passes(" shuffled")
    assert plain == plain_again
    assert len(first) == len(second)
    assert len({tuple(one) for one in (plain, first, second, passes(" shuffled", 2)[0])}) == 4


@each(MIXTURES)
def test_a_mixture_gives_each_part_its_share(kind: Kind, corpus: Path) -> None:
    with kind.maker(corpus)() as loader:
        contracts.take(loader, 60)
        parts = loader.stats().parts
    assert sum(parts.values()) == 480
    for name, weight in MIXED.items():
        assert abs(parts[name] - weight * 480) <= 2, parts


# Stats


@each(KINDS, only=lambda kind: not kind.endless)
def test_stats_add_up(kind: Kind, corpus: Path) -> None:
    contracts.stats_add_up(kind.maker(corpus), documents() if kind.text else None)


# Errors


def broken_parquet(folder: Path) -> Any:
    """Three files, the second one with damaged pages."""
    for name in "abc":
        table = pa.table({"text": [f"{name} {row} " * 9 for row in range(40)]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=10, compression="snappy")
    damaged = bytearray((folder / "b.parquet").read_bytes())
    damaged[4:400] = b"\xff" * 396
    (folder / "b.parquet").write_bytes(damaged)
    return TextDataset(folder, tokenizer="byte", seq_len=16)


def broken_jsonl(folder: Path) -> Any:
    """A line in the middle that is not JSON."""
    lines = [json.dumps({"text": f"line {row} " * 9}) for row in range(200)]
    lines[150] = '{"text": '
    (folder / "a.jsonl").write_text("\n".join(lines))
    return TextDataset(folder / "a.jsonl", tokenizer="byte", seq_len=16, chunk_bytes=1024)


def broken_iterable(_: Path) -> Any:
    def source() -> Iterator[str]:
        yield from (f"item {row} " * 9 for row in range(150))
        raise KeyError("from the user's iterable")

    return TextDataset.from_iterable(source, tokenizer="byte", seq_len=16, chunk_docs=4, name="i")


class BrokenSamples(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 77:
            raise KeyError("from the user's dataset")
        return super().__getitem__(index)


def broken_mixture(folder: Path) -> Any:
    made = SyntheticDataset(seq_len=16, num_samples=500, vocab_size=EOS + 1)
    return Mixture({"text": (broken_parquet(folder), 0.5), "made": (made, 0.5)})


BROKEN: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "parquet": (broken_parquet, CorruptFile),
    "jsonl": (broken_jsonl, SourceError),
    "iterable": (broken_iterable, KeyError),
    "samples": (lambda _: BrokenSamples(), KeyError),
    "samples shuffled": (lambda _: BrokenSamples(), KeyError),
    "iterated samples": (lambda _: lambda: iter(BrokenSamples()), KeyError),
    "mixture": (broken_mixture, CorruptFile),
}


@pytest.mark.parametrize("name", BROKEN)
def test_error_comes_after_the_batches_before_it(name: str, tmp_path: Path) -> None:
    build, error = BROKEN[name]
    data = build(tmp_path)

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(data, 4, shuffle=name.endswith("shuffled"), **how)

    contracts.error_comes_after_the_batches_before_it(make, error, 1, contracts.WORKER_COUNTS)


# Shutdown


@each(KINDS)
def test_closes_cleanly(kind: Kind, corpus: Path) -> None:
    contracts.closes_cleanly(kind.maker(corpus))


@pytest.mark.parametrize("name", ["parquet concat shuffled", "samples shuffled"])
def test_processes_close_cleanly(name: str, corpus: Path) -> None:
    contracts.closes_cleanly(KINDS[name].maker(corpus, workers="process", n_workers=1), rounds=2)


# The order, which releases must not change by accident

GOLDEN: dict[bool, str] = {
    False: "ebc65ac3 561648ea 4c2b364f a7036fa9 bbe35478 c862328f db909608 23815d85",
    True: "120147aa e6230b4c 0cdfcd05 f3613239 798612ce 260c1454 252d1a21 8135fa19",
}


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_a_fixed_corpus_is_the_same_in_every_release(
    tmp_path: Path, shuffle: bool
) -> None:
    for number in range(6):
        texts = [f"file {number} document {row} " * (1 + row % 3) for row in range(20)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{number}.parquet", row_group_size=5)
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=64, shuffle_chunks=4)
    with AsyncDataLoader(data, 8, shuffle=shuffle, seed=3, lanes=2) as loader:
        batch = next(loader)
    rows = np.concatenate([batch.inputs, batch.targets], axis=1).astype("<i8")
    found = [hashlib.sha256(row.tobytes()).hexdigest()[:8] for row in rows]
    assert " ".join(found) == GOLDEN[shuffle]

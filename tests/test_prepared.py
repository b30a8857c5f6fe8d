"""Prepared corpora: shuffled as a whole, with a known length, and damage that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, ConfigError, Mixture, PreparedDataset, Shard, TextDataset
from penstock.errors import CorruptFile, SourceError, StateError
from penstock.order.shuffle import spread
from penstock.prepare import prepare
from penstock.read.token_store import TokenStore
from penstock.types import Span
from penstock.watch.loader_stats import SourceChunks, shuffle_quality

DOCUMENTS, WORDS = 1200, 600


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 40 blocks in 4 entries: 1200 documents of about 2 kB."""
    folder = tmp_path_factory.mktemp("blocks")
    words = [f"{i} " * WORDS for i in range(DOCUMENTS)]
    pq.write_table(pa.table({"text": words}), folder / "a.parquet", row_group_size=DOCUMENTS // 4)
    done = prepare(folder / "a.parquet", tokenizer="byte", out=folder / "out")
    assert done.complete
    return folder / "out"


def documents_of(batch: Any) -> set[tuple[int, int]]:
    return {(span.row_group, span.row) for row in batch.provenance() for span in row}


def test_the_shuffle_is_global_and_every_document_is_seen_once_an_epoch(blocks: Path) -> None:
    seen: dict[int, list[tuple[int | None, int]]] = {0: [], 1: []}
    data = PreparedDataset(blocks, seq_len=512)
    with AsyncDataLoader(data, 64, shuffle=True, epochs=2, drop_last=False) as loader:
        for batch in loader:
            spans = [span for row in batch.provenance() for span in row]
            if batch.index == 60:  # after the first, small windows
                assert {span.row_group for span in spans} == {0, 1, 2, 3}
            seen[batch.epoch] += [
                (s.row_group, s.row) for s in spans if s.tokens[0] == 0 and s.at[0] < 512
            ]
    for order in seen.values():
        assert len(set(order)) >= DOCUMENTS - 64  # a batch may span both epochs
    assert len(seen[0] + seen[1]) == 2 * DOCUMENTS
    assert seen[0] != seen[1]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("how", [{"lanes": 1}, {"lanes": 3}, {"shard": Shard(2, 1)}])
def test_the_length_is_known(
    blocks: Path, shuffle: bool, drop_last: bool, how: dict[str, Any]
) -> None:
    how = how | {"shuffle": shuffle, "drop_last": drop_last}
    loader = AsyncDataLoader(PreparedDataset(blocks, seq_len=500), 7, epochs=2, **how)
    expected = len(loader)
    with loader:
        assert sum(1 for _ in loader) == expected


def test_a_length_that_is_not_known_is_a_type_error(blocks: Path) -> None:
    with pytest.raises(TypeError, match="no len"):
        len(AsyncDataLoader(PreparedDataset(blocks, seq_len=500), 7))
    with pytest.raises(TypeError, match="unknown length"):
        len(AsyncDataLoader(PreparedDataset(blocks, seq_len=500, packing="best_fit"), 7, epochs=1))


def test_a_rank_reads_only_its_own_blocks(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, read, original = PreparedDataset(blocks, seq_len=500), [], TokenStore.read_blocks

    def record(store: TokenStore, name: str, some: Any) -> Any:
        read.extend((name, block.offset) for block in some)
        return original(store, name, some)

    monkeypatch.setattr(TokenStore, "read_blocks", record)
    for rank in (0, 1):
        with AsyncDataLoader(data, 8, epochs=1, shuffle=True, shard=Shard(2, rank)) as loader:
            list(loader)
    assert len(read) == len(set(read)) == len(data.manifest.offsets)


def test_a_damaged_entry_is_named(tmp_path: Path, corpus: Path) -> None:
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    entry = sorted(tmp_path.glob("??/*.arrows"))[3]
    good = entry.read_bytes()
    data = PreparedDataset(tmp_path, seq_len=128)
    for content in (good[:-200] + b"!" + good[-199:], good[: len(good) // 2]):
        entry.write_bytes(content)
        with (
            AsyncDataLoader(data, 4, epochs=1, shuffle=True) as loader,
            pytest.raises(CorruptFile, match=entry.name),
        ):
            list(loader)
    entry.unlink()
    with (
        AsyncDataLoader(data, 4, epochs=1) as loader,
        pytest.raises(CorruptFile, match=rf"{entry.name} is missing"),
    ):
        list(loader)


def test_skipped_documents_are_left_out(blocks: Path) -> None:
    with AsyncDataLoader(PreparedDataset(blocks, seq_len=512), 8) as loader:
        first = next(loader)
    span = first.provenance()[0][0]
    data = PreparedDataset(blocks, seq_len=512, skip=[span])
    with AsyncDataLoader(data, 8, epochs=1) as loader:
        for batch in loader:
            assert (span.row_group, span.row) not in documents_of(batch)
    with pytest.raises(ConfigError, match="skip"):
        PreparedDataset(blocks, seq_len=512, skip=["nonsense"])
    with pytest.raises(ConfigError, match="max_length=…: use seq_len=…"):
        PreparedDataset(blocks, max_length=512)


def test_a_state_of_another_corpus_is_refused(blocks: Path, tmp_path: Path, corpus: Path) -> None:
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    state = AsyncDataLoader(PreparedDataset(blocks, seq_len=512), 8).state_dict()
    with pytest.raises(StateError):
        AsyncDataLoader(PreparedDataset(tmp_path, seq_len=512), 8).load_state_dict(state)


def test_too_few_blocks_for_the_lanes_is_an_error(blocks: Path) -> None:
    loader = AsyncDataLoader(PreparedDataset(blocks, seq_len=512), 64, lanes=64)
    with loader, pytest.raises(SourceError, match="fewer lanes"):
        next(loader)


def test_a_mixture_takes_prepared_corpora(blocks: Path, tmp_path: Path, corpus: Path) -> None:
    prepare(corpus / "parquet", tokenizer="byte", out=tmp_path)
    parts = {
        "blocks": (PreparedDataset(blocks, seq_len=256), 0.5),
        "corpus": (PreparedDataset(tmp_path, seq_len=256), 0.5),
    }
    with AsyncDataLoader(Mixture(parts), 8, shuffle=True) as loader:
        ids = np.concatenate([np.asarray(next(loader).inputs).ravel() for _ in range(20)])
        stats = loader.stats()
    assert len(ids) == 20 * 8 * 256
    assert min(stats.parts.values()) > 0


def test_a_settings_file_names_a_prepared_corpus(blocks: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\nkind = "prepared"\npath = "{blocks}"\nseq_len = 64\n[loader]\nbatch_size = 2\n'
    )
    with AsyncDataLoader.from_config(tmp_path / "run.toml") as loader:
        assert tuple(next(loader).inputs.shape) == (2, 64)


def test_stats_say_how_well_a_batch_is_mixed(tmp_path: Path) -> None:
    texts = [f"document {i} " * 40 for i in range(4000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=20)
    prepare(tmp_path / "a.parquet", tokenizer="byte", out=tmp_path / "out")
    text = TextDataset(tmp_path / "a.parquet", tokenizer="byte", seq_len=256)
    quality = []
    for data, shuffle in (
        (PreparedDataset(tmp_path / "out", seq_len=256), True),
        (text, True),
        (text, False),
    ):
        with AsyncDataLoader(data, 64, shuffle=shuffle) as loader:
            for _ in range(180):  # in the second epoch, where windows are full
                next(loader)
            quality.append(loader.stats().shuffle_quality)
    prepared, windows, none = quality
    assert none is None
    assert (windows or 1) < 0.7
    assert (prepared or 0) > 0.95


@pytest.mark.parametrize(
    ("ranks", "counts"), [(1, np.arange(1, 101)), (8, np.full(100, 640))]
)  # fmt: skip
def test_a_uniform_order_has_quality_one(ranks: int, counts: Any) -> None:
    """Also if chunks have different numbers of documents, and if one rank stands for several."""
    of_chunk = np.repeat(np.arange(100), counts)
    chunks, rng, found = SourceChunks(counts, 0, parts=64), np.random.default_rng(0), []
    for _ in range(200):
        taken = rng.choice(len(of_chunk), 40, replace=False)
        row = [Span("a", int(of_chunk[at]), None, int(at), (0, 1), (0, 1)) for at in taken]
        found.append(shuffle_quality([row], chunks, ranks))
    assert np.mean(found) == pytest.approx(1, abs=0.02)


def test_documents_of_a_chunk_are_spread_over_the_window() -> None:
    counts = np.array([30, 60, 0, 10])
    order = spread(counts, 1, 2)
    assert sorted(order) == [*range(100)]
    of_chunk = np.repeat(np.arange(4), counts)[order]
    assert all(set(of_chunk[at : at + 20]) == {0, 1, 3} for at in range(0, 100, 20))
    assert order.tolist() != spread(counts, 1, 3).tolist()

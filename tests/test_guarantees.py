"""Even use of uneven files, several consumers, and clear refusals."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import (
    AsyncDataLoader,
    ConfigError,
    Mixture,
    PenstockError,
    Shard,
    SyntheticDataset,
    TextDataset,
)
from tests import contracts
from tests.corpus import train_vocabulary

EOS = 256


def write_parquet(path: Path, texts: list[str], group: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path, row_group_size=group)


# Uneven files


def test_documents_of_uneven_files_are_used_equally_often(tmp_path: Path) -> None:
    total = documents = 0
    for number in range(64):
        count = 160 if number == 17 else 8
        noise = random.Random(number)
        texts = [noise.randbytes(40).hex() for _ in range(count)]
        write_parquet(tmp_path / f"{number:02}.parquet", texts, group=4)
        documents += count
        total += sum(len(text) + 1 for text in texts)
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=64, shuffle_chunks=4)
    # In the middle of a pass, so that a small lead of one lane is not one more pass.
    batches = int(3.5 * total / 64 / 8)
    starts: Counter[Any] = Counter()
    with AsyncDataLoader(data, 8, shuffle=True, lanes=8) as loader:
        for batch in contracts.batches_of(loader, batches):
            for spans in batch.provenance():
                # The last id of a row opens the next one: a document that begins there counts once.
                starts.update(s.address for s in spans if s.tokens[0] == 0 and s.at[0] < 64)
        balance = loader.stats().lane_balance
    assert balance is not None
    assert balance >= 0.95
    assert len(starts) == documents
    assert max(starts.values()) - min(starts.values()) <= 1


@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_finite_pass_of_two_ranks_uses_nearly_all_documents(
    tmp_path: Path, lanes: int, shuffle: bool
) -> None:
    rng = random.Random(3)
    documents = 0
    for number in range(32):
        count = 2 * rng.randint(1, 45)
        texts = ["x" * rng.randint(20, 200) for _ in range(count)]
        write_parquet(tmp_path / f"{number:02}.parquet", texts, group=2)
        documents += count
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=64, shuffle_chunks=4)
    ranks = []
    for rank in range(2):
        with AsyncDataLoader(
            data, 4, shuffle=shuffle, lanes=lanes, epochs=1, shard=Shard(2, rank)
        ) as loader:
            ranks.append([{s.address for row in b.provenance() for s in row} for b in loader])
    together = min(map(len, ranks))
    used = {address for rank in ranks for batch in rank[:together] for address in batch}
    assert len(used) >= 0.95 * documents


# Files of ranks, and the first chunk


def test_a_rank_opens_only_its_own_files(tmp_path: Path) -> None:
    for number in range(16):
        write_parquet(tmp_path / f"{number:02}.parquet", [f"{number:02} " * 30] * 8, group=4)
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=64)

    def files() -> set[str]:
        with AsyncDataLoader(data, 4, shuffle=True, epochs=1, shard=Shard(2, 0)) as loader:
            return {span.file for batch in loader for row in batch.provenance() for span in row}

    own = files()
    assert len(own) == 8
    for path in tmp_path.iterdir():
        if path.name not in own:
            path.unlink()
    assert files() == own


def test_the_first_chunk_is_divided_so_that_the_first_batch_waits_for_a_small_part(
    tmp_path: Path,
) -> None:
    texts = [random.Random(row).randbytes(500).hex() for row in range(1600)]
    write_parquet(tmp_path / "a.parquet", texts, group=800)
    rows: list[int] = []

    def count(table: Any) -> Any:
        rows.append(len(table))
        return table["text"]

    data = TextDataset(tmp_path, tokenizer="byte", seq_len=64, transform=("count", count))
    with AsyncDataLoader(data, 4, epochs=1, n_workers=0) as loader:
        next(loader)
        assert max(rows) < 200
        list(loader)
    assert sum(rows) >= 1600


# Several consumers


@pytest.mark.parametrize("n_workers", [0, 2])
def test_two_threads_that_share_a_loader_get_each_batch_once(corpus: Path, n_workers: int) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32)

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(data, 4, epochs=1, n_workers=n_workers, **how)

    whole = contracts.ledger(make, 1_000)
    got: list[str] = []
    begin = threading.Barrier(2)

    def consume(loader: AsyncDataLoader) -> None:
        begin.wait(20)
        while (batch := loader.next_batch(timeout=20)) is not None:
            got.append(contracts.digest(batch))

    with make() as loader:
        threads = [threading.Thread(target=consume, args=(loader,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(got) == sorted(whole)


# Refusals


def test_a_mixture_of_different_vocabularies_is_refused(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    train_vocabulary(other, size=300)

    def part(tokenizer: Path | str) -> Any:
        return TextDataset(corpus / "parquet", tokenizer=str(tokenizer), seq_len=32), 0.5

    for one, two in (("byte", other), (corpus / "tokenizer.json", other)):
        with pytest.raises(ConfigError, match=r"tokenizer|vocabular"):
            AsyncDataLoader(Mixture({"one": part(one), "two": part(two)}), 2)


def test_two_columns_of_the_text_fields_name_are_refused_with_the_file(tmp_path: Path) -> None:
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"])]
    pq.write_table(pa.table(columns, names=["text", "text"]), tmp_path / "twice.parquet")
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=2)
    with (
        AsyncDataLoader(data, 1, epochs=1) as loader,
        pytest.raises(PenstockError, match=r"twice\.parquet"),
    ):
        list(loader)


def test_a_skipped_address_that_cannot_exist_is_refused(corpus: Path) -> None:
    skip = [("gone.parquet", 0, 0)]
    with pytest.raises(ConfigError, match=r"skip: .*gone\.parquet"):
        TextDataset(corpus / "parquet", tokenizer="byte", seq_len=8, skip=skip)


def test_a_damaged_tokenizer_is_refused_with_the_file(corpus: Path, tmp_path: Path) -> None:
    whole, path = (corpus / "tokenizer.json").read_bytes(), tmp_path / "tokenizer.json"
    for damaged in (whole[: len(whole) // 2], b"\xff\x00" * 500):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            TextDataset(corpus / "parquet", tokenizer=str(path), seq_len=32)


# What a mixture looks like


def test_a_mixture_shows_itself_as_a_tree_with_weights(corpus: Path) -> None:
    text = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32)
    made = SyntheticDataset(seq_len=32, vocab_size=EOS + 1)
    title, web, other = repr(Mixture({"web": (text, 0.7), "made": (made, 0.3)})).splitlines()
    assert title.startswith("Mixture")
    assert all(word in web for word in ("web", "70.00%", "TextDataset"))
    assert all(word in other for word in ("made", "30.00%", "SyntheticDataset"))

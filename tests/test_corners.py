"""Corners of the stream that once were wrong."""

from __future__ import annotations

import gc
import gzip
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, ConfigError, Shard, TextDataset
from penstock.errors import CorruptFile, StateMismatch
from penstock.read.storage import CompressedFile
from tests import contracts


def write(path: Path, n: int, words: int = 40) -> Path:
    lines = (json.dumps({"text": f"{i} " * words}) for i in range(n))
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def text(path: Any, **about: Any) -> TextDataset:
    return TextDataset(path, **({"tokenizer": "byte", "seq_len": 64} | about))


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_rank_has_its_share_of_a_file_smaller_than_a_chunk(
    tmp_path: Path, shuffle: bool
) -> None:
    data = text(write(tmp_path / "small.jsonl", 1500))
    shares = []
    for rank in range(8):
        with AsyncDataLoader(data, 1, shard=Shard(8, rank), shuffle=shuffle, epochs=1) as loader:
            shares.append(sum(batch.tokens for batch in loader))
    assert min(shares) > 0.5 * max(shares)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_compressed_files_of_one_lane_each_are_decompressed_once(
    tmp_path: Path, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        write(tmp_path / f"{i}.jsonl.gz", 3000)
    opened = []
    real = CompressedFile._rewind
    monkeypatch.setattr(CompressedFile, "_rewind", lambda self: (opened.append(self), real(self)))
    with AsyncDataLoader(
        text(tmp_path, chunk_bytes=32768), 4, lanes=lanes, n_workers=2, epochs=1
    ) as loader:
        assert sum(1 for _ in loader) > 0
    assert len(opened) == 8


def test_shutdown_ends_a_decompression_that_would_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl.gz", 20_000, words=200)
    passed = threading.Event()
    go_on = threading.Event()
    real = CompressedFile._decompress

    def decompress(self: CompressedFile) -> bytes:
        passed.set()
        go_on.wait(30)
        return real(self)

    monkeypatch.setattr(CompressedFile, "_decompress", decompress)
    loader = AsyncDataLoader(text(path), 4, n_workers=1).start()
    assert passed.wait(30)
    closing = threading.Thread(target=loader.shutdown)
    closing.start()
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()


def test_a_collection_on_a_worker_thread_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl.gz", 3000)
    entered, dropped = threading.Event(), threading.Event()
    real = CompressedFile._decompress

    def decompress(self: CompressedFile) -> bytes:
        entered.set()
        dropped.wait(30)
        gc.collect()
        return real(self)

    monkeypatch.setattr(CompressedFile, "_decompress", decompress)
    loader = AsyncDataLoader(text(path), 4, n_workers=1)
    loader.cycle = loader  # type: ignore[attr-defined]
    loader.start()
    threads = [t for t in threading.enumerate() if t.name.startswith("penstock-")]
    assert entered.wait(30)
    del loader
    dropped.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_lack_of_file_handles_is_no_damage_to_skip(tmp_path: Path) -> None:
    table = pa.table({"text": [f"document {i}" * 20 for i in range(200)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    data = text(tmp_path / "a.parquet", on_bad_record="skip")
    with AsyncDataLoader(data, 1, n_workers=0) as loader:
        next(loader)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            with pytest.raises(OSError, match="Too many open files"):
                contracts.take(loader, 1000)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert loader.stats().bad == {}


def test_files_of_one_name_in_many_folders_are_split_each_on_its_own(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}").mkdir()
        (tmp_path / f"{i:03}" / "text.txt").write_text(f"text number {i}")
    counts = []
    for split in ("train", "val"):
        with AsyncDataLoader(text(tmp_path, split=split, val_fraction=0.5), 1, epochs=1) as loader:
            assert list(loader)
            counts.append(loader.stats().documents)
    assert sum(counts) == 200
    assert min(counts) > 60


def test_the_epoch_of_a_batch_does_not_depend_on_how_many_are_made_at_once(tmp_path: Path) -> None:
    data = text(write(tmp_path / "a.jsonl", 300))
    epochs = []
    for prefetch in (1, 2, 16):
        with AsyncDataLoader(data, 1, lanes=3, shuffle=True, prefetch_size=prefetch) as loader:
            epochs.append([next(loader).epoch for _ in range(2000)])
    assert epochs[0] == epochs[1] == epochs[2]
    assert epochs[0][-1] > 0


def test_the_index_goes_on_in_the_second_pass(tmp_path: Path) -> None:
    with AsyncDataLoader(text(write(tmp_path / "a.jsonl", 50)), 4, epochs=1) as loader:
        first = [batch.index for batch in loader]
        second = [batch.index for batch in loader]
    assert first + second == list(range(2 * len(first)))


def test_a_file_read_as_another_format_is_other_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 50)
    with AsyncDataLoader(text(path), 4) as loader:
        next(loader)
        state = loader.state_dict()
    with pytest.raises(StateMismatch, match="the data changed"):
        AsyncDataLoader(text(path, format="text"), 4).load_state_dict(state)


def test_everything_before_a_damaged_file_is_given_out_however_it_is_run(tmp_path: Path) -> None:
    for i in range(10):
        table = pa.table({"text": [f"{i} {k} " * 30 for k in range(60)]})
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=10)
    broken = tmp_path / "6.parquet"
    broken.write_bytes(broken.read_bytes()[:-20])
    ledgers = []
    for n_workers, prefetch in ((0, 1), (1, 1), (2, 16), (4, 3)):
        with AsyncDataLoader(
            text(tmp_path), 3, n_workers=n_workers, prefetch_size=prefetch
        ) as loader:
            got: list[str] = []
            with pytest.raises(CorruptFile, match=r"6\.parquet"):
                got.extend(contracts.digest(batch) for batch in loader)
        ledgers.append(got)
    assert ledgers[0]
    assert all(ledger == ledgers[0] for ledger in ledgers)


@pytest.mark.parametrize("packing", ["concat", "bos", "best_fit"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_everything_before_a_bad_record_is_given_out_however_it_is_run(
    tmp_path: Path, packing: str, lanes: int
) -> None:
    path = write(tmp_path / "a.jsonl", 900)
    path.write_bytes(path.read_bytes() + b"\nnot json")
    ledgers = []
    for n_workers, prefetch in ((0, 1), (2, 1), (2, 16)):
        data = text(path, packing=packing, chunk_bytes=8192)
        with AsyncDataLoader(
            data, 2, lanes=lanes, n_workers=n_workers, prefetch_size=prefetch
        ) as loader:
            got: list[str] = []
            with pytest.raises(Exception, match="not JSON"):
                got.extend(contracts.digest(batch) for batch in loader)
        ledgers.append(got)
    assert ledgers[0]
    assert all(ledger == ledgers[0] for ledger in ledgers)


def test_a_lane_without_a_chunk_is_no_fault_where_others_have_some(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", 50)
    (tmp_path / "b.jsonl").write_bytes(b"")
    with AsyncDataLoader(text(tmp_path), 4, lanes=2, epochs=1) as loader:
        assert sum(1 for _ in loader) > 0
        assert loader.stats().documents == 50


def test_ids_beyond_65535_are_not_cut_even_where_the_vocabulary_is_small() -> None:
    from penstock.encode.tokenizer import load_tokenizer
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 70_000, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    loaded = load_tokenizer(tokenizer, eos=1)
    assert (loaded.size, loaded.dtype) == (70_001, np.dtype(np.uint32))


def test_a_vocabulary_by_another_name_goes_on(corpus: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 50)
    (tmp_path / "other.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    with AsyncDataLoader(text(path, tokenizer=str(corpus / "tokenizer.json")), 4) as loader:
        next(loader)
        state = loader.state_dict()
    AsyncDataLoader(text(path, tokenizer=str(tmp_path / "other.json")), 4).load_state_dict(state)


def test_an_interrupted_loader_without_threads_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = text(write(tmp_path / "a.jsonl", 300), chunk_bytes=4096)
    whole = contracts.ledger(lambda **_: AsyncDataLoader(data, 2, n_workers=0), 150)
    from penstock.encode.tokenizer import Tokenizer

    real, calls = Tokenizer.encode, iter(range(10**6))

    def encode(tokenizer: Tokenizer, *args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(tokenizer, *args)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with AsyncDataLoader(data, 2, n_workers=0) as loader:
        got: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            got.extend(contracts.digest(batch) for batch in loader)
        assert 0 < len(got) < 150
        assert got + contracts.take(loader, 150 - len(got)) == whole


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"val_fraction": "0.1"}, "val_fraction='0.1'"),
        ({"separator": 5}, "separator=5"),
        ({"eos": 1.5}, "eos=1.5"),
        ({"text_field": 3}, "text_field=3"),
        ({"skip": [("elsewhere.jsonl", None, 0)]}, "skip: 'elsewhere.jsonl'"),
        ({"skip": [5]}, "skip: not an address"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(
    tmp_path: Path, wrong: dict[str, Any], says: str
) -> None:
    path = write(tmp_path / "a.jsonl", 5)
    with pytest.raises(ConfigError) as caught:
        text(path, **wrong)
    assert says in str(caught.value)


def test_arguments_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    data = text(write(tmp_path / "a.jsonl", 5))
    with pytest.raises(ConfigError, match="no path"):
        text(None)
    for wrong in ({"shard": (2, 0)}, {"shuffle": "no"}, {"lanes": 3, "shard": Shard(2, 0)}):
        with pytest.raises(ConfigError):
            AsyncDataLoader(data, 4, **wrong)  # type: ignore[arg-type]
    AsyncDataLoader(data, np.int64(4))  # type: ignore[arg-type]

"""Corners of the stream that once were wrong."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, TextDataset
from penstock.read.storage import CompressedFile


def write(path: Path, n: int, words: int = 40) -> Path:
    lines = (json.dumps({"text": f"{i} " * words}) for i in range(n))
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def text(path: Any, **about: Any) -> TextDataset:
    return TextDataset(path, **({"tokenizer": "byte", "seq_len": 64} | about))


def test_shutdown_ends_a_decompression_that_would_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl.gz", 20_000, words=200)
    passed = threading.Event()
    go_on = threading.Event()
    real = CompressedFile._advance

    def advance(self: CompressedFile) -> None:
        passed.set()
        go_on.wait(30)
        real(self)

    monkeypatch.setattr(CompressedFile, "_advance", advance)
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
    real = CompressedFile._advance

    def advance(self: CompressedFile) -> None:
        entered.set()
        dropped.wait(30)
        gc.collect()
        real(self)

    monkeypatch.setattr(CompressedFile, "_advance", advance)
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


def test_ids_beyond_65535_are_not_cut_even_where_the_vocabulary_is_small() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from penstock.encode.tokenizer import load_tokenizer

    tokenizer = Tokenizer(models.WordLevel({"a": 70_000, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    loaded = load_tokenizer(tokenizer, eos=1)
    assert (loaded.vocab_size, loaded.dtype) == (70_001, np.dtype(np.uint32))


def test_a_vocabulary_by_another_name_goes_on(corpus: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 50)
    (tmp_path / "other.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    with AsyncDataLoader(text(path, tokenizer=str(corpus / "tokenizer.json")), 4) as loader:
        next(loader)
        state = loader.state_dict()
    AsyncDataLoader(text(path, tokenizer=str(tmp_path / "other.json")), 4).load_state_dict(state)

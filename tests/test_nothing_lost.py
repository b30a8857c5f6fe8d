"""Files that vanish, shrink or change are errors or other data, never lost or stale text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock import (
    AsyncDataLoader,
    Batch,
    RemoteOptions,
    TextDataset,
)
from penstock.encode.tokenizer import load_tokenizer
from penstock.errors import SourceError
from tests.servers import FileServer


def write(path: Path, texts: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def text_of(batches: Iterable[Batch]) -> str:
    """Return the text of byte tokens, without separators."""
    return "".join(
        bytes(int(i) for i in row if i < 256).decode() for batch in batches for row in batch.inputs
    )


# Files


@pytest.mark.parametrize("cache", [False, True])
def test_a_file_that_is_gone_is_an_error(
    tmp_path: Path, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    files = [
        write(tmp_path / "in" / f"{n}.jsonl", (f"{n} {i} " + "x" * 60 for i in range(40)))
        for n in range(6)
    ]
    data = TextDataset(tmp_path / "in", tokenizer="byte", seq_len=64, cache=cache, chunk_bytes=1024)
    files[3].unlink()
    with (
        AsyncDataLoader(data, 4, epochs=1, n_workers=2, shuffle=False) as loader,
        pytest.raises(FileNotFoundError),
    ):
        list(loader)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", ["y" * 50] * 400)
    data = TextDataset(path, tokenizer="byte", seq_len=50, chunk_bytes=1024)
    size = path.stat().st_size
    os.truncate(path, size // 3 // 63 * 63)
    with (
        AsyncDataLoader(data, 4, epochs=1, n_workers=1) as loader,
        pytest.raises(SourceError, match=f"it was {size} bytes long when it was listed"),
    ):
        list(loader)


# Cached tokens


def first_text(url: str) -> tuple[str, int]:
    data = TextDataset(url, tokenizer="byte", seq_len=8)
    with AsyncDataLoader(data, 1, epochs=1, n_workers=1) as loader:
        text = text_of(loader)
        return text[:5], loader.stats().cache_hits


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.txt"])
@pytest.mark.parametrize("dates", [True, False])
def test_without_etags_other_content_of_the_same_size_is_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dates: bool, name: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / name
    kept = []
    versions = [("right", 1_700_000_000), ("right", 1_700_000_000), ("wrong", 1_700_000_100)]
    with FileServer(etags=False, dates=dates) as server:
        for word, at in versions:
            if name == "docs.txt":
                path.write_text(word * 50)
            else:
                write(path, [f"{word} {i:03}" for i in range(50)])
            os.utime(path, (at, at))
            server.put(name, path)
            text, hits = first_text(server.url_of(name))
            assert text == word
            kept.append(hits > 0)
    assert kept == [False, dates, False], "tokens are cached under the date of their file"


def test_a_file_whose_date_changes_during_a_run_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "docs.jsonl", (f"right {i:05}" for i in range(2000)))
    with FileServer(etags=False) as server:
        server.put("docs.jsonl", path)
        about = {"seq_len": 8, "chunk_bytes": 4096, "remote": RemoteOptions(retry_budget=2.0)}
        data = TextDataset(server.url_of("docs.jsonl"), tokenizer="byte", **about)
        with AsyncDataLoader(data, 1, epochs=1, n_workers=0) as loader:
            next(loader)
            os.utime(path, (1_700_000_000, 1_700_000_000))
            server.put("docs.jsonl", path)
            changed = r"its date was .* it is Tue, 14 Nov 2023 22:13:20 GMT"
            with pytest.raises(SourceError, match=changed):
                list(loader)


def test_another_engine_does_not_take_cached_tokens(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    kept = []
    for engine in ("tokenizers", "tokenizers", "gigatoken"):
        tokenizer = load_tokenizer(corpus / "tokenizer.json", engine=engine)  # type: ignore[arg-type]
        data = TextDataset(corpus / "docs.jsonl", tokenizer=tokenizer, seq_len=64, cache=True)
        with AsyncDataLoader(data, 4, epochs=1) as loader:
            list(loader)
            kept.append(loader.stats().cache_hits > 0)
    assert kept == [False, True, False]

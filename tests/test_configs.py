"""Every file in configs/ runs as it stands, and so does every preset by its name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, TextDataset
from penstock.settings import PRESETS, load, without_comments
from tests.corpus import texts

CONFIGS = sorted((Path(__file__).parent.parent / "configs").iterdir())


@pytest.fixture(autouse=True)
def no_settings_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)


def tables(path: Path) -> dict[str, Any]:
    text = path.read_text()
    read: dict[str, Any] = (
        tomllib.loads(text) if path.suffix == ".toml" else json.loads(without_comments(text))
    )
    return read


def data_for(path: Path, folder: Path) -> TextDataset | None:
    """Data for a file that names none."""
    if "data" in tables(path):
        return None
    (folder / "docs.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts() * 10)
    )
    return TextDataset(folder / "docs.jsonl", tokenizer="byte", seq_len=64)


def first(path: Path, data: TextDataset | None, n: int = 4, **overrides: Any) -> list[Any]:
    with AsyncDataLoader.from_config(path, data, **overrides) as loader:
        return [next(loader) for _ in range(n)]


def test_the_files_that_documents_name_are_there() -> None:
    names = {path.name for path in CONFIGS}
    assert names >= {"penstock.toml", "test_async_loader.toml", "autoregressive_training.json"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_loader_made_from_the_file_gives_the_batches_it_describes(
    path: Path, tmp_path: Path
) -> None:
    written = tables(path)
    settings = written.get("loader", {}) | written.get("training", {})
    data = data_for(path, tmp_path)
    seq_len = written["data"]["seq_len"] if data is None else data.seq_len
    for batch in first(path, data):
        assert batch.inputs.shape == batch.targets.shape == (settings["batch_size"], seq_len)
        assert batch.inputs.min() >= 0
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_whole_pass_over_the_files_data_ends(path: Path, tmp_path: Path) -> None:
    with AsyncDataLoader.from_config(path, data_for(path, tmp_path), epochs=1) as loader:
        batches = sum(1 for _ in loader)
        assert batches > 4
        assert next(loader, None) is None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_preset_runs_and_gives_the_same_batches(
    path: Path, preset: str, tmp_path: Path
) -> None:
    settings = load(path, preset=preset)
    assert (settings["n_workers"], settings["prefetch_size"]) == PRESETS[preset]
    data = data_for(path, tmp_path)
    plain = first(path, data, n=8, prefetch=False)
    for batch, expected in zip(first(path, data, n=8, preset=preset), plain, strict=True):
        np.testing.assert_array_equal(batch.inputs, expected.inputs)
        np.testing.assert_array_equal(batch.targets, expected.targets)

"""What the surroundings say, and what commands make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import cgroup_cores
from penstock.errors import ConfigError
from penstock.tools.data_choice import DataOptions, choose_data


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_quota_nothing_bounds_the_cores(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path) is None
    for text in ("max 100000\n", "nonsense\n"):
        written(tmp_path, cpu__max=text)
        assert cgroup_cores(tmp_path) is None


def test_the_quota_of_a_container_bounds_the_cores(tmp_path: Path) -> None:
    written(tmp_path, cpu__max="250000 100000\n")
    assert cgroup_cores(tmp_path) == 2.5


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    written(tmp_path / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cgroup_cores(tmp_path) is None
    written(tmp_path / "cpu", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    assert cgroup_cores(tmp_path) == 3.0


def test_settings_of_the_environment_apply_to_data_given_by_address(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_FWE_Q", "5")
    monkeypatch.setenv("NSA_FWE_DOC_BATCH", "7")
    monkeypatch.setenv("PENSTOCK_N_WORKERS", "1")
    url = str(corpus / "docs.jsonl")
    choice = choose_data(DataOptions(set=["n_workers=2"], seq_len=64), url)
    names = ("prefetch_size", "n_workers", "batch_size")
    assert [choice.arguments[name] for name in names] == [5, 2, 16]
    dataset = choice.make()
    assert (dataset.seq_len, dataset.remote.doc_batch) == (64, 7)
    monkeypatch.setenv("PENSTOCK_PREFETCH_SIZ", "5")
    with pytest.raises(ConfigError, match="PENSTOCK_PREFETCH_SIZ"):
        choose_data(DataOptions(), url)

"""Settings that come from the environment: the quota of a container, and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import cgroup_cores
from penstock.errors import ConfigError
from penstock.tools.data_choice import DataOptions, choose_data


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "nonsense\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
    ],
)
def test_the_quota_of_a_container_bounds_the_cores(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_cores(tmp_path) == cores


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

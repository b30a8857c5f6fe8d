"""What the surroundings say, and what commands make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.described import addressed
from penstock.config import cgroup_cores
from penstock.errors import ConfigError


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def told(folder: Path, *lines: str) -> Path:
    path = folder / "own"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_without_a_quota_nothing_bounds_the_cores(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path / "own", tmp_path / "mounted") is None
    written(tmp_path / "mounted", cpu__max="max 100000\n")
    assert cgroup_cores(told(tmp_path, "0::/"), tmp_path / "mounted") is None


def test_a_quota_of_the_group_or_of_one_around_it_bounds_the_cores(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    own = told(tmp_path, "0::/job/step/task")
    written(mounted / "job" / "step" / "task", cpu__max="max 100000\n")
    written(mounted / "job", cpu__max="250000 100000\n")
    assert cgroup_cores(own, mounted) == 2.5
    written(mounted / "job" / "step" / "task", cpu__max="150000 100000\n")
    assert cgroup_cores(own, mounted) == 1.5


def test_in_a_container_that_sees_only_its_own_mount_the_root_counts(tmp_path: Path) -> None:
    written(tmp_path / "mounted", cpu__max="400000 100000\n")
    assert cgroup_cores(told(tmp_path, "0::/docker/of/the/host"), tmp_path / "mounted") == 4.0


@pytest.mark.parametrize("controllers", ["cpu,cpuacct", "cpu"])
def test_the_first_version_of_cgroups_is_asked_too(tmp_path: Path, controllers: str) -> None:
    mounted = tmp_path / "mounted"
    own = told(tmp_path, "5:memory:/job", f"4:{controllers}:/job", "0::/")
    written(mounted / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cgroup_cores(own, mounted) is None
    written(mounted / "cpu" / "job", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    assert cgroup_cores(own, mounted) == 3.0


def test_what_cannot_be_read_bounds_nothing(tmp_path: Path) -> None:
    written(tmp_path / "mounted", cpu__max="nonsense\n")
    assert cgroup_cores(told(tmp_path, "not a line of its"), tmp_path / "mounted") is None


def test_a_command_that_is_given_an_address_heeds_the_environment(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_FWE_Q", "5")
    monkeypatch.setenv("NSA_FWE_DOC_BATCH", "7")
    monkeypatch.setenv("PENSTOCK_N_WORKERS", "1")
    dataset, arguments = addressed(str(corpus / "docs.jsonl"), {"seq_len": 64}, {"n_workers": 2})
    assert (arguments["prefetch_size"], arguments["n_workers"], arguments["batch_size"]) == (
        5,
        2,
        16,
    )
    assert (dataset.options.seq_len, dataset.options.doc_batch) == (64, 7)
    monkeypatch.setenv("PENSTOCK_PREFETCH_SIZ", "5")
    with pytest.raises(ConfigError, match="PENSTOCK_PREFETCH_SIZ"):
        addressed(str(corpus / "docs.jsonl"), {}, {})

"""A folder is all of its files: none is left out without a word, none is read twice."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import ConfigError, TextDataset
from penstock.errors import SourceError
from penstock.read.listing import list_files

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that another user can look into."""
    made = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def as_another() -> Iterator[None]:
    """For root, who may read everything, somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield
    if root:
        os.seteuid(0)


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
    return path


def names(source: Path) -> list[str]:
    return [file.name for file in list_files(str(source), whole=False)]


def test_a_folder_that_cannot_be_listed_is_an_error(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    for name in "abc":
        write(folder / "data" / name / "x.txt")
    assert names(folder / "data") == ["a/x.txt", "b/x.txt", "c/x.txt"]
    (folder / "data" / "b").chmod(0)
    request.getfixturevalue("as_another")
    with pytest.raises(SourceError, match=r"data/b: its files cannot be listed: Permission denied"):
        names(folder / "data")


def test_folders_that_links_lead_to_are_read_as_a_glob_reads_them(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "deep" / "z.txt")
    write(tmp_path / "data" / "y.txt")
    (tmp_path / "data" / "link").symlink_to("../elsewhere")
    found = names(tmp_path / "data")
    assert found == ["link/deep/z.txt", "y.txt"]
    assert found == names(tmp_path / "data" / "**" / "*.txt")


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").symlink_to("gone.txt")
    with pytest.raises(SourceError, match=r"x\.txt is a link to nothing"):
        names(tmp_path)


@pytest.mark.parametrize("source", ["", ["", "x.txt"]])
def test_an_empty_address_is_not_the_folder_we_are_in(
    source: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.txt")
    with pytest.raises(ConfigError, match="urls must be a path"):
        TextDataset(source, tokenizer="byte", seq_len=8)

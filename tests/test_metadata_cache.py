"""The metadata cache: entries are whole or missing, and bounded in size."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.read.metadata_cache import MetadataCache


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_an_entry_that_was_cut_or_flipped_anywhere_is_ignored(tmp_path: Path) -> None:
    cache = MetadataCache(tmp_path)
    cache.put("things", "key", b"some\nbytes")
    assert MetadataCache(tmp_path).get("things", "key") == b"some\nbytes"
    assert cache.get("others", "key") is None
    (path,) = files(tmp_path)
    good = path.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    for bad in [good[:n] for n in range(len(good))] + flipped + [good + b"x"]:
        path.write_bytes(bad)
        assert cache.get("things", "key") is None


def test_a_disk_that_takes_nothing_costs_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = MetadataCache(tmp_path / "file")
    for i in range(3):
        cache.put("things", str(i), b"made")
        assert cache.get("things", str(i)) is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(tmp_path / "file") in warning


def test_the_cache_is_bounded_and_loses_its_oldest_first(tmp_path: Path) -> None:
    cache = MetadataCache(tmp_path, max_bytes=100_000)
    for i in range(400):
        cache.put("things", str(i), b"x" * 900)
    left = [i for i in range(400) if cache.get("things", str(i)) is not None]
    # It is looked at now and then only, so some more may have come since.
    assert sum(path.stat().st_size for path in files(tmp_path)) < 300_000
    assert left == list(range(400 - len(left), 400))

"""Real text that every machine has: Python's standard library and documentation.

Written to the cache as a Parquet file on first use, which takes a few seconds.
"""

from __future__ import annotations

import os
import platform
import secrets
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.config import cache_dir

ROW_GROUP = 256
SKIPPED = {"site-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


def documents() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each document, in a fixed order."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topics/{name}", text
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder) / name
                try:
                    yield str(path.relative_to(root)), path.read_text("utf-8")
                except (OSError, UnicodeDecodeError):
                    continue  # a few sources are deliberately in other encodings


def write_stdlib(folder: Path | None = None) -> Path:
    """Return the Parquet file with these documents. Write it on first use."""
    folder = folder or cache_dir() / "stdlib"
    path = folder / f"python-{platform.python_version()}.parquet"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    names, texts = zip(*documents(), strict=True)
    half_done = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    pq.write_table(
        pa.table({"name": names, "text": texts}), half_done, row_group_size=ROW_GROUP, compression="zstd",
        write_page_checksum=True,
    )  # fmt: skip
    os.replace(half_done, path)
    return path

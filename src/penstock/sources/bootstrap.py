"""Write the first bytes of a source's text to a local file, from which a run can start at once.

In:    paths or addresses, the file to write, and how many bytes.
Out:   JSONL, a document a line in the order of the source; or the same texts as Parquet.
Where: the calling thread writes. Fetch threads and workers are some chunks ahead of it.
State: beside the file: PATH.partial, and PATH.progress.json, which says how much of it counts and which
       document comes next. A run that was killed goes on from there, to the same bytes.
Cost:  a flush to disk every few megabytes. A refresh takes room for the old file beside the new one:
       what is appended to a file that others read is seen in halves, and left so by a kill.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from penstock.config import default_workers, whole_number
from penstock.dataset import TextDataset
from penstock.errors import ConfigError, NoData, SourceChanged
from penstock.feed.pool import Lazy, Task, ThreadPool
from penstock.read.attempt import Remote
from penstock.read.manifest import each
from penstock.read.reader import MAX_CHUNK_BYTES
from penstock.read.storage import Bytes
from penstock.sources.text_work import TextWork
from penstock.types import Bad, ChunkRef, FileRef, MiB

log = logging.getLogger("penstock")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
I64 = np.ndarray[Any, np.dtype[np.int64]]

VERSION = 1
COMMIT_BYTES, COMMIT_S = 4 * MiB, 1.0
"""What was written is made safe after so many bytes, and after so long: as much is read again after a kill."""
AHEAD_BYTES = 128 * MiB
"""Text that may be read ahead of the one that is written, one chunk at the least."""
GROUP_BYTES = 8 * MiB
"""Text in a row group, where Parquet is written."""

ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
CONTROL = re.compile(rb"[\x00-\x1f]")
BETWEEN = b"\xff"
"""A byte that no UTF-8 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is."""

    bytes: int
    goal: int
    documents: int
    began: int
    """Bytes that were there when this run began."""
    file: str
    """What is read, by its name in the listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """What there is now."""

    path: Path
    bytes: int
    """Of JSONL; also where that was made into Parquet."""
    documents: int
    bad: Mapping[str, int]
    """Records that were left out, by reason."""
    already: bool
    """It was all there before."""
    exhausted: bool
    """The source has no more text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a file has, and which document comes next."""

    goal: int
    file: int = 0
    chunk: int = 0
    document: int = 0
    bytes: int = 0
    documents: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    exhausted: bool = False
    size: int | None = None
    """Of the finished file, once it is known."""

    @property
    def complete(self) -> bool:
        return self.exhausted or self.bytes >= self.goal


def bootstrap(
    urls: Paths,
    out: str | os.PathLike[str],
    max_bytes: int,
    *,
    config: str | None = None,
    text_field: str = "text",
    remote: Remote | dict[str, Any] | None = None,
    refresh: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Bootstrapped:
    """Write documents until the file has `max_bytes` bytes, the last line counted whole.

    Called again after a kill, it goes on. `refresh`: a finished file may be extended, by as much as is
    missing; until that is done, others read the old one.
    """
    place = Place(out)
    goal = whole_number("max_bytes", max_bytes, 1)
    if refresh and place.parquet:
        raise ConfigError(f"{place.out}: only JSONL can be extended. Write another file, or one that ends in .jsonl")
    place.out.parent.mkdir(parents=True, exist_ok=True)
    with place.locked():
        run = Run(place, goal, _arguments(urls, config, text_field), refresh, progress)
        at_hand = run.at_hand()
        if at_hand is not None:
            return at_hand
        data = TextDataset(
            urls, tokenizer="byte", seq_len=1, text_field=text_field, config=config, remote=remote,
            on_bad_record="skip", cache=False,
        )  # fmt: skip
        return run.write(data)


def check_ending(out: str | os.PathLike[str]) -> None:
    """Whether a file of this name can be written."""
    if Path(out).suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{os.fspath(out)}: needs a name that ends in .jsonl or .parquet, which says what is written")


def _arguments(urls: Paths, config: str | None, text_field: str) -> dict[str, Any]:
    """What it was asked for, without anything that must not be seen."""
    sources = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    shown = [_shown(os.fspath(source)) for source in sources]
    whole = all(before == after for _, before, after in shown)
    return {"urls": [after for *_, after in shown], "whole": whole, "config": config, "text_field": text_field}


def _shown(url: str) -> tuple[str, str, str]:
    if url.partition("://")[0].lower() in ("http", "https"):
        parts = urlsplit(url)
        return url, url, parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    path = url if "://" in url or url.isidentifier() and not os.path.lexists(url) else os.path.abspath(url)
    return url, path, path

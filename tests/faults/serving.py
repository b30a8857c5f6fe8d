"""What the tests of remote faults share: texts in every format, servers that have them, and runs with short deadlines."""

from __future__ import annotations

import gzip
import io
import json
import pydoc_data.topics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import AsyncDataLoader, PenstockError, RemoteOptions, Stats, TextDataset
from penstock.types import KiB
from tests.contracts import take
from tests.reading import limited
from tests.servers import HubServer

QUICK = RemoteOptions(
    connect_timeout=1,
    request_timeout=3,
    stall_timeout=0.5,
    retry_budget=5,
    metadata_budget=5,
    backoff=0.02,
    retry_after_cap=0.2,
    fetches=4,  # few, so that a run has something left to fetch when a fault comes in its middle
)
IMPATIENT = replace(
    QUICK, request_timeout=2, stall_timeout=0.25, retry_budget=0.4, metadata_budget=0.4
)
"""For what never succeeds."""
CALM = replace(
    QUICK,
    connect_timeout=20,
    request_timeout=30,
    stall_timeout=20,
    retry_budget=30,
    metadata_budget=30,
)
"""For faults that are answers: a busy machine's pauses are none, and are not counted as such."""
DEADLINE_S = 40.0
"""No run of these tests may take longer until it has ended or failed, however busy the machine; budgets are shorter."""

FORMS = ("parquet", "docs.jsonl", "docs.jsonl.gz", "docs.jsonl.zst", "texts")
"""What may be asked for in the repository; each has documents enough for several requests."""
CHOSEN = "parquet/a.parquet"
CARD = f"---\nconfigs:\n- config_name: default\n  data_files: {CHOSEN}\n---\nText for tests.\n"
"""Whoever does not read the card reads other files."""


@cache
def documents() -> tuple[str, ...]:
    """Pages of real text, some 300 kB."""
    pages = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return tuple(page[:6000] for page in pages if page)[:90]


def parquet(texts: list[str] | tuple[str, ...], rows: int = 8, **options: Any) -> bytes:
    """A Parquet file with page checksums, nothing compressed, and a column that nobody wants."""
    table = pa.table({"id": range(len(texts)), "text": list(texts)})
    sink = io.BytesIO()
    settings = {
        "compression": "none",
        "use_dictionary": False,
        "write_page_checksum": True,
    } | options
    pq.write_table(table, sink, row_group_size=rows, **settings)
    return sink.getvalue()


@cache
def content() -> dict[str, bytes]:
    """The files of the repository by name: the first Parquet file is too large to be fetched with its footer."""
    texts = documents()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    files = {
        "parquet/a.parquet": parquet(texts * 2),
        "parquet/b.parquet": parquet(texts[::-1][:20], rows=5),
        "docs.jsonl": lines,
        "docs.jsonl.gz": gzip.compress(lines, 1, mtime=0),
        "docs.jsonl.zst": pa.compress(lines, "zstd", asbytes=True),
    }
    return files | {f"texts/{i:02}.txt": text.encode() for i, text in enumerate(texts[:8])}


def write(folder: Path) -> Path:
    """The same files on disk."""
    for name, data in content().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def dataset(url: Any, **data: Any) -> TextDataset:
    settings: dict[str, Any] = {
        "tokenizer": "byte", "seq_len": 256, "chunk_bytes": 64 * KiB, "remote": QUICK, "cache": False,
    }  # fmt: skip
    return limited(url, **settings | data)


def loader_of(data: TextDataset, **how: Any) -> AsyncDataLoader:
    settings = {"batch_size": 8, "shuffle": True, "seed": 5, "epochs": 1, "n_workers": 2}
    return AsyncDataLoader(data, **settings | how)


@dataclass
class Outcome:
    """How a run ended."""

    ledger: list[str] = field(default_factory=list)
    stats: Stats | None = None
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def faults(self) -> dict[str, int]:
        assert self.stats is not None
        return self.stats.faults


def run(
    url: Any,
    how: dict[str, Any] | None = None,
    at: dict[int, Callable[[], Any]] | None = None,
    **data: Any,
) -> Outcome:
    """Read everything, whatever happens. `at` says what to do after which batch."""
    began = time.monotonic()
    out = Outcome()
    try:
        with loader_of(dataset(url, **data), **how or {}) as loader:
            try:
                for number in sorted(at or {}):
                    out.ledger += take(loader, number - len(out.ledger))
                    assert at is not None
                    at[number]()
                out.ledger += take(loader, 10**6)
            finally:
                out.stats = loader.stats()
    except PenstockError as error:
        out.error = error
    out.seconds = time.monotonic() - began
    return out


def repository(hub: HubServer, name: str = "org/name", **more: Any) -> Any:
    return hub.add(name, content(), card=CARD, **more)


def hf(form: str, revision: str = "") -> str:
    return f"hf://datasets/org/name{revision}/{form}"

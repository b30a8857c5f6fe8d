"""Text to train on, on disk and on a Hub."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults.serving import documents
from tests.servers import HubServer
from tests.train.runs import write_texts


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 300 kB of real text."""
    return write_texts(tmp_path_factory.mktemp("docs") / "docs.jsonl", documents())


def serve(hub: HubServer) -> HubServer:
    """Put FineWeb-Edu's repository on a Hub, in small."""
    texts = documents()
    files = {}
    for n in range(3):
        sink = io.BytesIO()
        pq.write_table(pa.table({"text": texts[n::3]}), sink, row_group_size=10)
        files[f"data/{n:03}.parquet"] = sink.getvalue()
    hub.add("HuggingFaceFW/fineweb-edu", files)
    return hub


@pytest.fixture(scope="session")
def fineweb() -> Iterator[HubServer]:
    with HubServer() as hub:
        yield serve(hub)

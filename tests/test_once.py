"""Where a file is: asked for once, however many begin with it at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import AsyncDataLoader, RemoteOptions, TextDataset
from penstock.read import once
from penstock.read.once import Once
from tests.servers import HubServer

PATH = "hf://datasets/org/name/a"


def test_who_comes_while_another_asks_gets_his_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "WAIT_S", 60.0)
    asking = Once()
    known: dict[str, str] = {}
    told: list[str | None] = []
    assert asking.wait(PATH, lambda: known.get(PATH)) is None
    others = [
        threading.Thread(target=lambda: told.append(asking.wait(PATH, lambda: known.get(PATH))))
        for _ in range(8)
    ]
    for other in others:
        other.start()
    assert asking.wait("hf://another", lambda: None) is None, "another file is another matter"
    known[PATH] = "there"
    asking.done(PATH)
    for other in others:
        other.join(30)
    assert told == ["there"] * 8


def test_when_the_first_one_fails_the_next_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "WAIT_S", 60.0)
    asking = Once()
    told: list[None] = []
    asking.wait(PATH, lambda: None)
    other = threading.Thread(target=lambda: told.append(asking.wait(PATH, lambda: None)))
    other.start()
    asking.done(PATH)
    other.join(30)
    assert told == [None]


def test_a_run_that_knows_the_footers_asks_once_where_each_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "WAIT_S", 60.0)
    table = pa.table({"text": [f"document {i} " * 40 for i in range(4000)]})
    pq.write_table(
        table, tmp_path / "a.parquet", row_group_size=1000, compression="none", use_dictionary=False
    )
    how: dict[str, Any] = {"shuffle": False, "n_workers": 2, "epochs": 1}
    with HubServer(latency_s=0.05) as hub:
        content = (tmp_path / "a.parquet").read_bytes()
        hub.add("org/name", {f"{name}.parquet": content for name in "abc"})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        streams = []
        for eos in (0, 1):
            hub.clear_log()
            # Another tokenizer's tokens are of no use, and the listing and the footers are.
            data = TextDataset(
                "hf://datasets/org/name",
                tokenizer="byte",
                seq_len=64,
                eos=eos,
                remote=RemoteOptions(fetches=16),
            )
            with AsyncDataLoader(data, 8, **how) as loader:
                streams.append(sum(1 for _ in loader))
            resolved = [request for request in hub.log if "resolve" in request.path.split("/")]
        assert len(resolved) == 3
    assert streams[0] == streams[1]

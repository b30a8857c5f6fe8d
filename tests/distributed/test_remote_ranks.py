"""Real ranks whose rank 0 lists the data for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.reading import write_jsonl
from tests.servers import Fault, HubServer

# What it shows is shown in one process, or by other ranks, in `make test`.
pytestmark = pytest.mark.slow

WORKER = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from penstock import AsyncDataLoader, RemoteOptions, TextDataset
from tests.contracts import digest
out, mode = Path(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()
if mode == "hosts":  # as on two hosts: nothing on disk is shared
    os.environ["PENSTOCK_CACHE"] += f"-{rank}"
result = {}
try:
    quick = RemoteOptions(metadata_budget=3, retry_budget=5, backoff=0.05, share_listing=True)
    where = "hf://datasets/org/name"
    if mode == "disk":  # as if a file had come while the ranks were listing
        where = [out / "a.jsonl", out / "b.jsonl"][:rank + 1]
    data = TextDataset(where, tokenizer="byte", seq_len=64, remote=quick)
    result["files"] = [file.name for file in data.files]
    with AsyncDataLoader(data, 4, shuffle=True, seed=1, lanes=2, epochs=1, n_workers=1) as loader:
        result["batches"] = [digest(batch) for batch in loader]
except Exception as error:
    result["error"] = f"{type(error).__name__}: {error}"
(out / f"{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
"""


@pytest.fixture
def hub(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with HubServer(latency_s=0.05) as hub:
        hub.add("org/name", {p.name: p for p in (corpus / "parquet").iterdir()})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
        yield hub


def run(out: Path, mode: str) -> list[dict[str, Any]]:
    return run_ranks(WORKER, out, out, mode)


def api_requests(hub: HubServer) -> list[str]:
    return [request.path for request in hub.log if request.path.startswith("/api/")]


def test_rank_0_lists_for_ranks_on_other_hosts(hub: HubServer, tmp_path: Path) -> None:
    shared = run(tmp_path, "hosts")
    assert "error" not in shared[0] | shared[1]
    assert len(shared[0]["batches"]) == len(shared[1]["batches"]) > 5
    paths = api_requests(hub)
    assert len([path for path in paths if "/tree/" in path]) == 1
    assert len([path for path in paths if "/revision/" in path]) == 1


def test_what_fails_on_rank_0_fails_on_all_with_its_reason(hub: HubServer, tmp_path: Path) -> None:
    headers = {"X-Error-Code": "RepoNotFound"}
    hub.fault(Fault("status", path="/api/*", times=None, code=404, headers=headers))
    results = run(tmp_path, "fails")
    assert "SourceError" in results[0]["error"]
    assert "rank 0 could not list the data" in results[1]["error"]
    assert "SourceError" in results[1]["error"]


def test_rank_0_lists_a_shared_disk_for_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i} " * 40 for i in range(200)])
    results = run(tmp_path, "disk")
    assert "error" not in results[0] | results[1]
    assert results[0]["files"] == results[1]["files"] == ["a.jsonl"]

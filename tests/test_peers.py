"""The peers' benchmark: every contender that runs in this environment does the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def work(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Some hundred kilobytes of Parquet, and a vocabulary that has an end-of-text."""
    folder = tmp_path_factory.mktemp("peers")
    pages = [text for _, text in sorted(topics.topics.items()) if text][:60]
    for number, part in enumerate((pages[::2], pages[1::2])):
        pq.write_table(pa.table({"text": part}), folder / f"{number}.parquet", row_group_size=10)
    return {"source": str(folder), "vocabulary": str(corpus / "tokenizer.json")}


def contend(
    what: str, case: dict[str, Any], *options: str, code: int = 0
) -> dict[str, dict[str, Any]]:
    """Run a contender; return its lines by their kind."""
    command = [sys.executable, str(PEERS / "contend.py"), what, json.dumps(case), *options]
    done = subprocess.run(command, input="end\n", capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr[-2000:]
    return {line["what"]: line for line in map(json.loads, done.stdout.splitlines())}


CONTENDERS: dict[str, dict[str, Any]] = {
    "Penstock": {"contender": "ours"},
    "plain": {"contender": "plain"},
    "plain + gigatoken": {"contender": "plain", "tokenizer": "ours"},
    "tiktoken": {"contender": "plain", "variant": "tiktoken"},
    "datasets": {"contender": "hf_streaming", "workers": 1},
    "DataLoader": {"contender": "torch_loader", "workers": 1},
    "nodes": {"contender": "torchdata_nodes"},
}
IMPORT_TORCH = ("datasets", "DataLoader", "nodes")


def parameters(*names: str) -> list[Any]:
    """Mark contenders that import torch in every process as slow."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow) if n in IMPORT_TORCH else n for n in names]


@pytest.fixture(scope="module")
def expected(work: dict[str, str]) -> list[str]:
    """The stream, by the plainest loop."""
    digests: list[str] = contend("follow", work | CONTENDERS["plain"])["done"]["digests"]
    assert len(digests) > 3
    return digests


@pytest.mark.parametrize("name", parameters(*CONTENDERS))
def test_contenders_give_the_same_batches(
    name: str, work: dict[str, str], expected: list[str]
) -> None:
    lines = contend("follow", work | CONTENDERS[name])
    digests = lines["done"]["digests"]
    assert lines["first"]["at"] > 0
    assert digests[: len(expected)] == expected[: len(digests)]
    assert len(digests) >= len(expected) - 1


@pytest.mark.slow
def test_a_prepared_corpus_gives_the_same_batches(
    work: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    case = work | {"contender": "ours", "variant": "prepared", "prepared": str(tmp_path)}
    contend("prepare", case)
    assert contend("follow", case)["done"]["digests"] == expected


@pytest.mark.parametrize("name", parameters("Penstock", "DataLoader", "nodes"))
def test_a_contender_resumes_where_its_state_was_taken(
    name: str, work: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    case, saved = work | CONTENDERS[name], str(tmp_path / "state")
    contend("follow", case, "--batches", "3", "--save-at", "2", "--save-to", saved)
    lines = contend("follow", case | {"state": saved}, "--batches", "1")
    assert lines["done"]["digests"] == expected[2:3]


def test_what_a_contender_does_not_offer_is_not_an_error(
    work: dict[str, str], tmp_path: Path
) -> None:
    case = work | CONTENDERS["plain"]
    lines = contend("follow", case, "--save-at", "1", "--save-to", str(tmp_path / "state"))
    assert lines["not offered"]["why"] == "it has no state"
    assert "not offered" in contend("drain", case | {"shuffle": True})


def test_a_contender_that_fails_reports_the_error(work: dict[str, str]) -> None:
    case = work | {"contender": "ours", "source": "/nowhere"}
    assert contend("drain", case, code=1)["error"]["kind"] == "SourceError"


@pytest.mark.slow
def test_the_benchmark_installs_environments_runs_and_writes_its_page() -> None:
    """Real environments, from the package index: minutes."""
    only = ["--only", "plain loop, tokenizers", "--repeats", "1"]
    command = [sys.executable, str(PEERS), "--quick", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = (ROOT / "benchmarks" / "results" / "peers.md").read_text()
    for name in (
        "Penstock",
        "plain loop, tokenizers + gigatoken",
        "limit: decode + gigatoken alone",
    ):
        assert f"| {name} |" in page

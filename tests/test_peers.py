"""The peers' benchmark: every contender that can run in this environment does the same work."""

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
TOKENS = 16 * 1024


@pytest.fixture(scope="module")
def work(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Some hundred kilobytes of Parquet, and a vocabulary that has an end-of-text."""
    folder = tmp_path_factory.mktemp("peers")
    pages = [text for _, text in sorted(topics.topics.items()) if text][:60]
    for number, part in enumerate((pages[::2], pages[1::2])):
        pq.write_table(pa.table({"text": part}), folder / f"{number}.parquet", row_group_size=10)
    return {"source": str(folder), "vocabulary": str(corpus / "tokenizer.json")}


def contend(what: str, case: dict[str, Any], *options: str) -> dict[str, Any]:
    """The last word of a contender, and its first."""
    command = [sys.executable, str(PEERS / "contend.py"), what, json.dumps(case), *options]
    done = subprocess.run(command, input="end\n", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["what"]: line for line in told} | {"last": told[-1]}


CONTENDERS = {
    "Penstock": {"contender": "ours"},
    "plain": {"contender": "plain", "tokenizer": "own"},
    "plain + gigatoken": {"contender": "plain", "tokenizer": "ours"},
    "tiktoken": {"contender": "plain", "variant": "tiktoken"},
    "datasets": {"contender": "hf_streaming", "workers": 1},
    "DataLoader": {"contender": "torch_loader", "variant": "stateful", "workers": 1},
    "nodes": {"contender": "torchdata_nodes"},
}


@pytest.fixture(scope="module")
def expected(work: dict[str, str]) -> list[str]:
    """The stream, as the plainest of loops has it."""
    digests: list[str] = contend("follow", work | CONTENDERS["plain"])["last"]["digests"]
    assert len(digests) > 3
    return digests


SLOW = ("datasets", "DataLoader", "nodes")  # they import torch in every process


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in CONTENDERS
        if name != "plain"
    ],
)
def test_contenders_give_the_same_batches(
    name: str, work: dict[str, str], expected: list[str]
) -> None:
    told = contend("follow", work | CONTENDERS[name])
    assert told["first"]["at"] > 0
    assert told["last"]["digests"][: len(expected)] == expected[: len(told["last"]["digests"])]
    assert len(told["last"]["digests"]) >= len(expected) - 1


def test_a_contender_resumes_where_its_state_was_taken(
    work: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    case = work | CONTENDERS["Penstock"]
    saved = str(tmp_path / "state")
    contend("follow", case, "--batches", "3", "--save-at", "2", "--save-to", saved)
    told = contend("follow", case | {"state": saved}, "--batches", "2")
    assert told["last"]["digests"] == expected[2:4]


def test_what_a_contender_does_not_offer_is_said_and_not_an_error(
    work: dict[str, str], tmp_path: Path
) -> None:
    case = work | CONTENDERS["plain"]
    told = contend("follow", case, "--save-at", "1", "--save-to", str(tmp_path / "state"))
    assert told["last"] == {"what": "not offered", "why": "it has no state"}
    assert contend("drain", case | {"shuffle": True})["last"]["what"] == "not offered"


@pytest.mark.slow
def test_yardsticks_do_the_same_amount_of_work(
    work: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    text = contend("drain", work | {"contender": "limits", "variant": "text"})["done"]
    assert 0.9 * len(expected) <= text["batches"] <= len(expected)  # it counts no separators
    case = work | {"prepared": str(tmp_path), "tokenizer": "none"}
    contend("prepare", case | {"contender": "ours"})
    copy = contend(
        "drain", case | {"contender": "limits", "variant": "copy", "shuffle": True, "passes": 2}
    )["done"]
    assert copy["batches"] == 2 * len(expected)
    assert copy["tokens"] == (copy["batches"] - 1) * TOKENS
    ours = contend(
        "drain", case | {"contender": "ours", "variant": "tokens", "shuffle": True, "passes": 2}
    )["done"]
    assert ours["batches"] == copy["batches"]


@pytest.mark.parametrize(
    "case",
    [
        CONTENDERS["Penstock"],
        {"contender": "limits", "variant": "list"},
        {"contender": "limits", "variant": "deque"},
    ],
    ids=["Penstock", "list", "deque"],
)
def test_a_consumer_that_waits_is_told_how_long_next_took(
    work: dict[str, str], case: dict[str, str]
) -> None:
    told = contend("pace", work | case, "--batches", "8", "--pause-s", "0.01")["done"]
    assert len(told["fetches"]) == 8 - 2
    assert 0 < sum(told["fetches"]) < told["seconds"]
    assert told["seconds"] > 6 * 0.01


def test_a_contender_that_fails_says_why(work: dict[str, str]) -> None:
    command = [sys.executable, str(PEERS / "contend.py"), "drain"]
    command.append(json.dumps(work | {"contender": "ours", "source": "/nowhere"}))
    done = subprocess.run(command, input="end\n", capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["kind"] == "NoData"


@pytest.mark.slow
def test_the_benchmark_installs_environments_runs_and_writes_its_page(tmp_path: Path) -> None:
    """Real environments, from the package index: minutes."""
    results = ROOT / "benchmarks" / "results"
    command = [
        sys.executable,
        str(PEERS),
        "--quick",
        "--only",
        "plain loop, tokenizers",
        "--repeats",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = (results / "peers.md").read_text()
    for name in ("Penstock", "plain loop, tokenizers + gigatoken", "limit: bare gather and copy"):
        assert f"| {name} |" in page
    assert (results / "peers.svg").stat().st_size > 10_000

"""Real ranks under torchrun, over gloo on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, ConfigError, TextDataset
from tests.distributed.launch import run_ranks

WORKER = """
import json, sys
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from penstock import AsyncDataLoader, TextDataset
from tests.contracts import digest
corpus, out, modes = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
if modes != ["launcher"]:
    dist.init_process_group("gloo")
failing = False

def fail(table):
    global failing
    if failing and 21 in table["id"].to_pylist():
        failing = mode == "fails"
        raise ZeroDivisionError("on one rank only")
    return table["text"]

def stream(mode, result):
    global failing
    failing = mode in ("fails", "recovers") and dist.get_rank() == 1
    epochs, limit = (None, 20) if mode == "launcher" else (1, 10_000)
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64, transform=("fail", fail))
    with AsyncDataLoader(data, 4, shuffle=True, seed=1, lanes=4, epochs=epochs, n_workers=1) as loader:
        shard = loader.inspect()[1].shard
        result["rank"], result["world"] = shard.rem, shard.mod
        while len(result["batches"]) < limit:
            try:
                batch = loader.next_batch()
            except Exception as error:
                if mode != "recovers":
                    raise
                result["met"] = type(error).__name__
                if shard.rem == 1:
                    loader.shutdown()  # its own stream has failed, and starts again
                continue
            if batch is None:
                break
            result["batches"].append(digest(batch))

results = {}
for mode in modes:
    result = results[mode] = {"batches": []}
    try:
        stream(mode, result)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
(out / f"{result['rank']}.json").write_text(json.dumps(results))
if dist.is_initialized():
    dist.destroy_process_group()
"""

Results = dict[str, list[dict[str, Any]]]


def run(corpus: Path, out: Path, *modes: str) -> Results:
    """Return, for each mode, the result of each rank."""
    ranks = run_ranks(WORKER, out, corpus, out, *modes)
    return {mode: [rank[mode] for rank in ranks] for mode in modes}


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(corpus, tmp_path_factory.mktemp("ranks"), "finite", "fails", "recovers")


def test_ranks_end_a_finite_stream_after_as_many_batches_each_its_own(results: Results) -> None:
    first, second = results["finite"]
    assert [(r["rank"], r["world"]) for r in (first, second)] == [(0, 2), (1, 2)]
    assert len(first["batches"]) == len(second["batches"]) > 10
    assert not set(first["batches"]) & set(second["batches"])


def test_a_fault_on_one_rank_ends_in_a_clear_error_on_all(results: Results) -> None:
    first, second = results["fails"]
    assert "PeerFailed: rank 1 of 2 failed to get its batch" in first["error"]
    assert "ZeroDivisionError: on one rank only" in second["error"]


def test_ranks_that_continue_after_a_fault_of_one_of_them_miss_nothing(results: Results) -> None:
    recovered = results["recovers"]
    assert [r["met"] for r in recovered] == ["PeerFailed", "ZeroDivisionError"]
    assert [r["batches"] for r in recovered] == [r["batches"] for r in results["finite"]]


@pytest.mark.slow
def test_a_rank_gets_its_shard_from_the_launcher(corpus: Path, tmp_path: Path) -> None:
    results = run(corpus, tmp_path, "launcher")["launcher"]
    assert [r["rank"] for r in results] == [0, 1]
    assert not set(results[0]["batches"]) & set(results[1]["batches"])


def test_a_finite_stream_on_ranks_that_cannot_agree_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
        AsyncDataLoader(data, 4, epochs=1).start()
    with pytest.raises(ConfigError, match="drop_last=False with epochs=1 on 2 ranks"):
        AsyncDataLoader(data, 4, epochs=1, drop_last=False)

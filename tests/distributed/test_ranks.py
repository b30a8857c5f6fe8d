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
corpus, out, mode = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
if mode != "launcher":
    dist.init_process_group("gloo")
data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
result = {}
try:
    if mode in ("fails", "recovers") and dist.get_rank() == 1:
        from penstock.encode.tokenizer import Tokenizer
        real, failed = Tokenizer.encode, []
        def encode(self, ref, *args):
            if ref.index == 3 and not (mode == "recovers" and failed):
                failed.append(ref)
                raise ZeroDivisionError("on one rank only")
            return real(self, ref, *args)
        Tokenizer.encode = encode
    epochs = None if mode == "launcher" else 1
    with AsyncDataLoader(data, 4, shuffle=True, seed=1, lanes=4, epochs=epochs, n_workers=1) as loader:
        result["rank"], result["world"] = loader._options.shard.rem, loader._options.shard.mod
        result["batches"] = []
        while len(result["batches"]) < (20 if mode == "launcher" else 10_000):
            try:
                batch = loader.next_batch()
            except Exception as error:
                if mode != "recovers":
                    raise
                result["met"] = type(error).__name__
                if dist.get_rank() == 1:
                    loader.shutdown()  # whose own stream has failed, and begins anew
                continue
            if batch is None:
                break
            result["batches"].append(digest(batch))
except Exception as error:
    result["error"] = f"{type(error).__name__}: {error}"
(out / f"{result['rank']}.json").write_text(json.dumps(result))
if dist.is_initialized():
    dist.destroy_process_group()
"""


def run(corpus: Path, out: Path, mode: str) -> list[dict[str, Any]]:
    return run_ranks(WORKER, out, corpus, out, mode)


def test_ranks_end_a_finite_stream_with_equally_many_batches_each_its_own(
    corpus: Path, tmp_path: Path
) -> None:
    results = run(corpus, tmp_path, "finite")
    assert [(r["rank"], r["world"]) for r in results] == [(0, 2), (1, 2)]
    assert len(results[0]["batches"]) == len(results[1]["batches"]) > 10
    assert not set(results[0]["batches"]) & set(results[1]["batches"])


def test_a_fault_on_one_rank_ends_in_a_clear_error_on_all(corpus: Path, tmp_path: Path) -> None:
    results = run(corpus, tmp_path, "fails")
    assert "PeerFailed: rank 1 of 2 failed to get its batch" in results[0]["error"]
    assert "ZeroDivisionError: on one rank only" in results[1]["error"]


def test_ranks_that_go_on_after_a_fault_of_one_of_them_miss_nothing(
    corpus: Path, tmp_path: Path
) -> None:
    for mode in ("finite", "recovers"):
        (tmp_path / mode).mkdir()
    expected, results = (run(corpus, tmp_path / mode, mode) for mode in ("finite", "recovers"))
    assert [r["met"] for r in results] == ["PeerFailed", "ZeroDivisionError"]
    assert [r["batches"] for r in results] == [r["batches"] for r in expected]


@pytest.mark.slow
def test_the_launcher_alone_tells_a_rank_its_shard(corpus: Path, tmp_path: Path) -> None:
    results = run(corpus, tmp_path, "launcher")
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

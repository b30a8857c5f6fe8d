"""What two real processes exchange besides training, until one of them hangs, and then dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.distributed.launch import free_ports

WORKER = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from penstock import Shard
from penstock.feed.collectives import MAX_TEXT, GlooRanks, RankAgreement, from_rank_0

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, done = dist.get_rank(), out / "done"
ranks, hasty, agreement = GlooRanks(60), GlooRanks(2), RankAgreement(Shard(2, rank))
said = {"gather": ranks.gather([rank, -(1 << 62), 3])}
for name, mine in {
    "empty": ["", ""], "half": ["", "only one of them"], "unicode": ["é 你好 🙂 \\0", "x"],
    "long": ["🙂" * (2 * MAX_TEXT), "b" * (2 * MAX_TEXT)],
}.items():
    said[name] = ranks.gather_texts(mine[rank])
said["shared"] = [from_rank_0(lambda: b"listing %d" % rank).decode() for _ in range(3)]
said["next"] = agreement.next(lambda: "batch")

def failure(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if rank == 0:
    said["hangs"] = failure(lambda: hasty.gather([rank]))
    done.touch()
else:
    while not done.exists():
        time.sleep(0.05)
said["after"] = ranks.gather([rank])
(out / f"{rank}.json").write_text(json.dumps(said))
if rank == 1:
    os._exit(9)
said["dies"] = failure(lambda: agreement.next(lambda: "batch"))
said["own"] = failure(lambda: agreement.next(lambda: 1 / 0))
(out / "0.json").write_text(json.dumps(said))
os._exit(0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes recorded. The second one exits with code 9."""
    out = tmp_path_factory.mktemp("ranks")
    (out / "worker.py").write_text(WORKER)
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore::FutureWarning"}
    processes = []
    for rank in "01":
        env = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, str(out / "worker.py"), str(out)]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 9], errors
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_get_the_integers_and_texts_of_all(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["gather"] == [[0, -(1 << 62), 3], [1, -(1 << 62), 3]]
        assert each["empty"] == ["", ""]
        assert each["half"] == ["", "only one of them"]
        assert each["unicode"] == ["é 你好 🙂 \0", "x"]
        assert each["long"] == ["🙂" * 4000, "b" * 4000]
        assert each["shared"] == ["listing 0"] * 3
        assert each["next"] == "batch"


def test_a_rank_that_hangs_is_given_up_and_other_groups_still_work(
    said: list[dict[str, Any]],
) -> None:
    assert said[0]["hangs"].startswith(
        "PeerFailed: rank 0 of 2 could not reach the other ranks within 2 s: "
        "one of them has exited or hangs"
    )
    assert said[0]["after"] == said[1]["after"] == [[0], [1]]


def test_a_rank_that_died_is_reported_before_the_deadline_but_not_instead_of_an_own_error(
    said: list[dict[str, Any]],
) -> None:
    gone = "PeerFailed: rank 0 of 2 could not reach the other ranks within 300 s"
    assert said[0]["dies"].startswith(gone)
    assert said[0]["own"] == "ZeroDivisionError: division by zero"

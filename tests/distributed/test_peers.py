"""What two real processes tell each other besides training, until one of them hangs, and then dies."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import free_ports

WORKER = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from penstock.errors import PeerFailed
from penstock.feed.collectives import MAX_TEXT, GlooRanks

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, done = dist.get_rank(), out / "done"
ranks, hasty = GlooRanks(60), GlooRanks(2)
told = {"gather": ranks.gather([rank, -(1 << 62), 3])}
for name, mine in {
    "empty": ["", ""], "half": ["", "only one of them"], "unicode": ["é 你好 🙂 \\0", "x"],
    "long": ["🙂" * (2 * MAX_TEXT), "b" * (2 * MAX_TEXT)],
}.items():
    told[name] = ranks.gather_texts(mine[rank])

def failure(each):
    began = time.monotonic()
    try:
        each.gather([rank])
    except PeerFailed as error:
        return str(error), time.monotonic() - began
    return "", 0.0

if rank == 0:
    told["hangs"] = failure(hasty)
    done.touch()
else:
    while not done.exists():
        time.sleep(0.05)
told["after"] = ranks.gather([rank])
(out / f"{rank}.json").write_text(json.dumps(told))
if rank == 1:
    os._exit(9)
told["dies"] = failure(ranks)
(out / "0.json").write_text(json.dumps(told))
os._exit(0)
"""


AGREEING = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from penstock import Shard
from penstock.feed.collectives import RankAgreement, from_rank_0

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = len(_world.pg_map)
told = {"shared": [from_rank_0(lambda: b"listing %d" % rank).decode() for _ in range(3)]}
told["groups"] = len(_world.pg_map) - groups
agreement = RankAgreement(Shard(2, rank))
told["next"] = agreement.next(lambda: "batch")

def failure(take):
    try:
        return agreement.next(take)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

(out / f"{rank}.json").write_text(json.dumps(told))
if rank == 1:
    os._exit(9)
told["dies"] = failure(lambda: "batch")
told["own"] = failure(lambda: 1 / 0)
(out / "0.json").write_text(json.dumps(told))
os._exit(0)
"""


def run(out: Path, code: str) -> list[dict[str, Any]]:
    """What two processes write down. The second one ends with code 9."""
    script = out / "worker.py"
    script.write_text(code)
    (port,) = free_ports(1)
    processes = []
    for rank in range(2):
        variables = f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} MASTER_ADDR=127.0.0.1 MASTER_PORT={port}".split()
        command = ["env", *variables, "GLOO_SOCKET_IFNAME=lo", "PYTHONWARNINGS=ignore::FutureWarning",
                   sys.executable, str(script), str(out)]  # fmt: skip
        with (out / f"{rank}.err").open("w") as errors:
            processes.append(subprocess.Popen(command, stderr=errors))
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=100)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 9], [(out / f"{rank}.err").read_text() for rank in range(2)]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes told each other, until one hangs and then dies."""
    return run(tmp_path_factory.mktemp("ranks"), WORKER)


def test_all_ranks_hear_all_integers_in_the_order_of_ranks(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert each["gather"] == [[0, -(1 << 62), 3], [1, -(1 << 62), 3]]


def test_all_ranks_hear_all_texts_as_they_were_told(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert each["empty"] == ["", ""]
        assert each["half"] == ["", "only one of them"]
        assert each["unicode"] == ["é 你好 🙂 \0", "x"]
        assert each["long"] == ["🙂" * 4000, "b" * 4000]


def test_a_rank_that_hangs_is_given_up_after_the_deadline_and_others_groups_live_on(
    told: list[dict[str, Any]],
) -> None:
    message, seconds = told[0]["hangs"]
    assert message.startswith(
        "rank 0 of 2 could not reach the other ranks within 2 s: one of them has ended or hangs"
    )
    assert seconds >= 1.9
    assert told[0]["after"] == told[1]["after"] == [[0], [1]]


def test_a_rank_that_died_is_noticed_before_the_deadline(told: list[dict[str, Any]]) -> None:
    message, seconds = told[0]["dies"]
    assert message.startswith("rank 0 of 2 could not reach the other ranks")
    assert seconds < 60


def test_ranks_that_agree_on_batches_say_who_is_gone_and_never_in_the_place_of_their_own_error(
    tmp_path: Path,
) -> None:
    told = run(tmp_path, AGREEING)
    assert [each["shared"] for each in told] == [["listing 0"] * 3] * 2
    assert [each["next"] for each in told] == ["batch", "batch"]
    assert [each["groups"] for each in told] == [0, 0]
    assert told[0]["dies"].startswith(
        "PeerFailed: rank 0 of 2 could not reach the other ranks within 300 s"
    )
    assert told[0]["own"] == "ZeroDivisionError: division by zero"

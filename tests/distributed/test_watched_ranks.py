"""Two real ranks, one of them slow, as whoever watches the run sees them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import cli

# What it shows is shown in one process, or by other ranks, in `make test`.
pytestmark = pytest.mark.slow

DELAY_S = 0.25
"""For each chunk of the slow rank: far longer than a collective takes, even on a machine that is busy with other things."""

WORKER = """
import json, sys, threading
from pathlib import Path
import torch
import torch.distributed as dist
from penstock import AsyncDataLoader, TextDataset
from penstock.encode.tokenizer import Tokenizer
from penstock.watch.heartbeat import Heartbeat

corpus, out, delay_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    real, slow = Tokenizer.encode, threading.Event()
    def encode(self, *args):
        slow.wait(delay_s)
        return real(self, *args)
    Tokenizer.encode = encode
data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)
loader = AsyncDataLoader(data, 16, shuffle=True, seed=1, lanes=2, epochs=1, n_workers=1, prefetch_size=2)
steps = 0
with loader, Heartbeat(out, observed=loader.telemetry, every_s=0.1) as heartbeat:
    for epoch in range(4):  # waits of its start alone would not be those of its steady state
        for batch in loader:
            steps += 1
            heartbeat.progress(steps, loss=1.0 / steps)
    stats = loader.stats()
facts = {"steps": steps, "tokens": stats.tokens, "wait_s": stats.wait_s, "by_stage": stats.wait_by_stage}
(out / f"{rank}.json").write_text(json.dumps(facts))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the heartbeats of two ranks, and what their loaders said of themselves."""
    out = tmp_path_factory.mktemp("ranks")
    script = out / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               "--nproc_per_node=2", str(script), str(corpus), str(out), str(DELAY_S)]  # fmt: skip
    environment = os.environ | {"PENSTOCK_CACHE": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def facts(run: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"{rank}.json").read_text())
    return found


def test_a_wait_for_the_other_rank_is_charged_to_ranks_and_not_to_data(run: Path) -> None:
    fast, slow = facts(run, 0)["by_stage"], facts(run, 1)["by_stage"]
    assert fast["ranks"] > 0.5 * sum(fast.values())
    assert slow["tokenize"] > 0.5 * sum(slow.values())
    assert fast["ranks"] > slow.get("ranks", 0.0)
    for rank in (0, 1):
        told = facts(run, rank)
        assert sum(told["by_stage"].values()) == pytest.approx(told["wait_s"], rel=1e-6)


def test_report_blames_the_rank_that_is_slow(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    told = tmp_path / "report.json"
    done = CliRunner().invoke(
        cli, ["report", str(run), "-o", str(tmp_path / "r.html"), "--json", str(told)]
    )
    assert done.exit_code == 0, done.output
    numbers = json.loads(told.read_text())
    assert [one["rank"] for one in numbers["ranks"]] == [0, 1]
    fast, slow = numbers["ranks"]
    own = [
        sum(s for stage, s in facts(run, rank)["by_stage"].items() if stage != "ranks")
        for rank in (0, 1)
    ]
    assert own[1] > 2 * own[0], own
    own_waits = {stage: pct for stage, pct in slow["waits_pct"].items() if stage != "ranks"}
    assert max(own_waits, key=own_waits.__getitem__) == "tokenize"
    assert max(fast["waits_pct"], key=fast["waits_pct"].__getitem__) == "ranks"
    assert (fast["tokens"], slow["tokens"]) == (facts(run, 0)["tokens"], facts(run, 1)["tokens"])


def test_watch_and_health_tell_the_ranks_apart(run: Path) -> None:
    watched = CliRunner().invoke(cli, ["watch", "--once", str(run)])
    assert watched.exit_code == 0, watched.output
    rows = watched.output.splitlines()
    for rank in (0, 1):
        assert any(row.startswith(f"rank {rank}  step {facts(run, rank)['steps']}") for row in rows)
    verdict = next(row for row in rows if row.startswith("verdict:"))
    assert re.match(r"verdict: input-bound \d+ %: tokenize ", verdict)  # the slow one's own words
    judged = CliRunner().invoke(cli, ["health", str(run), "--json"])
    assert judged.exit_code == 0, judged.output
    assert [one["rank"] for one in json.loads(judged.output)["ranks"]] == [0, 1]

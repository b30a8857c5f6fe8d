"""Checkpoints of two real ranks, in DDP and in FSDP2: they load on one rank, on two, in either form; a fault is shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.train import checkpoint
from tests.test_checkpoint import Run

# What it shows is shown in one process, or by other ranks, in `make test`.
pytestmark = pytest.mark.slow

WORKER = """
import json, resource, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
out = Path(sys.argv[2])
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from penstock.feed.collectives import GlooRanks
from penstock.train import checkpoint
from penstock.train.checkpoint import set_rng_state
from tests.test_checkpoint import Run, visible

torch.set_num_threads(1)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = GlooRanks(deadline_s=60)

def fsdp(net):
    fully_shard(net.hidden)
    return fully_shard(net)

FORMS = {"ddp": DDP, "fsdp": fsdp}
result = {"facts": {}, "loaded": {}, "losses": {}}

for form, wrap in FORMS.items():
    run = Run(wrap)
    torch.manual_seed(20 + rank)
    run.train(3)
    run.save(out / form, 3, ranks, form=form)
    result["facts"][form] = run.facts()
    losses = run.train(3)
    run = Run(wrap)
    found = run.load(out / form, ranks)
    set_rng_state(found.ranks[rank]["rng"])
    result["losses"][form] = losses, run.train(3)

for origin in ("plain", *FORMS):
    for form, wrap in FORMS.items():
        run = Run(wrap)
        run.load(out / origin, ranks)
        result["loaded"][f"{origin} in {form}"] = run.facts()
"""

FAULTS = """
place = out / "faults"
small, big, other = Run(DDP), Run(DDP, width=600), Run(fsdp, width=48)
for run in (small, big):
    run.train(1)
small.save(place, 1, ranks)

def fault(name, work):
    try:
        work()
        told = "no error"
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    ranks.gather([0])
    result[name] = told, visible(place)
    ranks.gather([0])

limits = resource.getrlimit(resource.RLIMIT_FSIZE)
for culprit in (0, 1):
    if rank == culprit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    fault(f"disk of rank {culprit}", lambda: big.save(place, 2, ranks))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if rank == culprit:
        (out / f"file{culprit}").touch()
    ranks.gather([0])
    # A rank that sees another disk than the others.
    elsewhere = out / f"file{culprit}" / "checkpoints" if rank == culprit else place
    fault(f"folder of rank {culprit}", lambda: small.save(elsewhere, 2, ranks))
fault("model", lambda: other.load(place, ranks))
fault("after all", lambda: small.save(place, 2, ranks))
"""


END = """
(out / f"{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(out: Path) -> dict[str, str]:
    """A checkpoint of a single rank, and what it is of."""
    run = Run()
    run.train(4)
    run.save(out / "plain", 4)
    return run.facts()


@pytest.fixture(scope="module")
def results(out: Path, alone: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank saw. One launch for all: most of its time goes into imports."""
    script = out / "worker.py"
    script.write_text(WORKER + FAULTS + END)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               "--nproc_per_node=2", str(script), str(Path(__file__).parents[2]), str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    files = [out / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_a_checkpoint_resumes_bit_by_bit_and_loads_on_any_number_of_ranks_in_any_form(
    results: list[dict[str, Any]], out: Path, alone: dict[str, str], form: str
) -> None:
    for result in results:
        losses, again = result["losses"][form]
        assert again == losses
        assert result["loaded"][f"plain in {form}"] == alone
        for origin in ("ddp", "fsdp"):
            assert result["loaded"][f"{origin} in {form}"] == results[0]["facts"][origin]
    assert results[0]["losses"][form] != results[1]["losses"][form]
    run = Run()
    found = run.load(out / form)
    assert (found.step, found.settings) == (3, {"form": form})
    assert [own["data"]["rank"] for own in found.ranks] == [0, 1]
    assert run.facts() == results[0]["facts"][form]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fault", ["disk", "folder"])
def test_a_fault_on_one_rank_is_the_same_error_on_both_and_leaves_nothing_behind(
    results: list[dict[str, Any]], fault: str, culprit: int
) -> None:
    reasons = []
    for result in results:
        told, left = result[f"{fault} of rank {culprit}"]
        assert told.startswith("SaveFailed: step 2 could not be saved in ")
        assert left == ["step-00000001"]
        reasons.append(told.partition("could not be saved in ")[2].partition(": ")[2])
        assert result["model"][0].startswith("StateError: ")
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith(f"rank {culprit}: ")


def test_after_faults_the_ranks_save_as_before(results: list[dict[str, Any]], out: Path) -> None:
    for result in results:
        assert result["after all"] == ["no error", ["step-00000001", "step-00000002"]]
    one = checkpoint.newest(out / "faults")
    assert one is not None
    assert (one.step, len(one.ranks)) == (2, 2)

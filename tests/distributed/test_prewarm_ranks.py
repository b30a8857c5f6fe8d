"""A prewarm on two real ranks, in DDP and in FSDP2, leaves no trace on either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

WORKER = """
import json, sys, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from penstock import ConfigError
from penstock.train.prewarm import prewarm
sys.path.insert(0, sys.argv[1])
from tests.test_prewarm import Net, picture, seed

out = Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(10 + rank)
IDS = torch.randint(0, 23, (12, 3, 6), generator=generator)
DATA = [(rows[:, :-1], rows[:, 1:]) for rows in IDS]

def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

def make_net():
    net = Net()
    del net.unused  # DDP expects a gradient of every parameter
    net.frozen = nn.Identity()
    return net

def ddp(**options):
    net = make_net()
    return net, DDP(net, **options)

def fsdp():
    net = make_net()
    for layer in (net.embedding, net.hidden, net.out):
        fully_shard(layer)
    fully_shard(net)
    return net, net

def compiled():
    net, model = ddp()
    return net, torch.compile(model, backend="eager")

def stay(model, last):
    if hasattr(model, "no_sync"):
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)

def train(wrap, make, *, accumulate=1, before=None):
    seed()
    torch.manual_seed(5 + rank)
    net, model = wrap()
    optimizer = make(net.parameters())
    if before is not None:
        before(model, optimizer)
    for i in range(5):
        for j in range(accumulate):
            stay(model, j == accumulate - 1)
            loss_of(model, DATA[i * accumulate + j]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return picture(net, optimizer)

def differences(one, other):
    return [name for name in one | other if one.get(name) != other.get(name)]

ADAMW = lambda p: torch.optim.AdamW(p, lr=0.01)
FUSED = lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)
MOMENTUM = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
checks = {}
notes = {}

def both(name, wrap, make, accumulate, **options):
    def warm(model, optimizer):
        done = prewarm(model, optimizer, DATA[0], accumulate=accumulate, **options)
        notes[name] = [done.passes, done.state_bytes, done.skipped]
        if isinstance(model, DDP):
            notes[name] += [model.require_forward_param_sync]
    checks[name] = lambda: differences(
        train(wrap, make, accumulate=accumulate), train(wrap, make, accumulate=accumulate, before=warm))

both("ddp adamw accumulated", ddp, ADAMW, 2)
both("ddp momentum in buckets", lambda: ddp(gradient_as_bucket_view=True), MOMENTUM, 2)
both("ddp compiled", compiled, ADAMW, 1)
both("ddp static", lambda: ddp(static_graph=True), ADAMW, 1)
both("fsdp adamw", fsdp, ADAMW, 1)
both("fsdp fused accumulated", fsdp, FUSED, 2)
both("fsdp momentum", fsdp, MOMENTUM, 1)

def old_gradients():
    torch.manual_seed(5)
    net, model = ddp(gradient_as_bucket_view=True)
    loss_of(model, DATA[1]).backward()
    optimizer = ADAMW(net.parameters())
    before = picture(net, optimizer)
    prewarm(model, optimizer, DATA[0])
    return [name for name in differences(before, picture(net, optimizer)) if not name.startswith(("state", "draws"))]

checks["gradients in buckets"] = old_gradients

def refused(make):
    try:
        model = make()
        prewarm(model, None, DATA[0])
    except ConfigError as error:
        return str(error)

checks["refused static"] = lambda: refused(lambda: ddp(static_graph=True)[1])
checks["old fsdp"] = lambda: refused(lambda: FullyShardedDataParallel(make_net(), device_id=torch.device("cpu")))

result = {}
for name in sys.argv[3:] or list(checks):
    check = checks[name]
    try:
        result[name] = check()
    except Exception:
        result[name] = traceback.format_exc()
(out / f"{rank}.json").write_text(json.dumps({"checks": result, "notes": notes}))
dist.destroy_process_group()
"""


def run(out: Path, world: int, *checks: str) -> list[dict[str, Any]]:
    script = out / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
               f"--nproc_per_node={world}", str(script), str(ROOT), str(out), *checks]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    results = [out / f"{rank}.json" for rank in range(world)]
    assert all(path.exists() for path in results), done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in results]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("prewarm"), 2)


@pytest.mark.parametrize(
    "name",
    [
        "ddp adamw accumulated", "ddp momentum in buckets", "ddp compiled", "ddp static", "fsdp adamw",
        "fsdp fused accumulated", "fsdp momentum",
    ],
)  # fmt: skip
def test_five_steps_on_two_ranks_are_those_without_a_prewarm(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["checks"][name] == []
        _, state_bytes, skipped = rank["notes"][name][:3]
        assert state_bytes > 0
        assert skipped == {}


def test_gradients_in_buckets_are_restored_and_flat_parameters_refused(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["checks"]["gradients in buckets"] == []
        assert "its flat parameters (use fully_shard)" in rank["checks"]["old fsdp"]


def test_on_three_ranks_buckets_are_not_built_and_no_bit_changes(tmp_path: Path) -> None:
    for rank in run(tmp_path, 3, "ddp adamw accumulated", "refused static"):
        assert rank["checks"]["ddp adamw accumulated"] == []
        passes, _, skipped, synced = rank["notes"]["ddp adamw accumulated"]
        assert (passes, list(skipped), synced) == (2, ["DDP buckets"], True)
        assert "static_graph=True" in rank["checks"]["refused static"]

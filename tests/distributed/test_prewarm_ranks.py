"""A prewarm on two real ranks, in DDP and in FSDP2, leaves no trace on either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WORKER = """
import json, os, sys, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from penstock import ConfigError
from penstock.train.prewarm import prewarm

out = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(10 + rank)
IDS = torch.randint(0, 23, (12, 3, 6), generator=generator)
DATA = [(rows[:, :-1], rows[:, 1:]) for rows in IDS]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(23, 8), nn.Linear(8, 8)
        self.norm, self.dropout, self.out = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 23)

    def forward(self, inputs):
        x = torch.relu(self.hidden(self.embedding(inputs)))
        x = self.norm(x.transpose(1, 2).contiguous()).transpose(1, 2)
        return self.out(self.dropout(x))

def bits(value):
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().contiguous().flatten().view(torch.uint8).tolist()
    return repr(value)

def picture(net, optimizer):
    facts = {name: bits(p) for name, p in net.named_parameters()}
    facts |= {f"buffer {name}": bits(b) for name, b in net.named_buffers()}
    facts |= {f"gradient {name}": bits(p.grad) for name, p in net.named_parameters()}
    for i, p in enumerate(net.parameters()):
        facts |= {f"state {i} {key}": bits(value) for key, value in optimizer.state.get(p, {}).items()}
    facts["draws"] = bits(torch.rand(3))
    return facts

def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

def ddp(**options):
    net = Net()
    return net, DDP(net, **options)

def fsdp():
    net = Net()
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

both("ddp adamw", ddp, ADAMW, 1)
both("ddp adamw accumulated", ddp, ADAMW, 2)
both("ddp momentum in buckets", lambda: ddp(gradient_as_bucket_view=True), MOMENTUM, 2)
both("ddp compiled", compiled, ADAMW, 1)
both("ddp with unused", lambda: ddp(find_unused_parameters=True), ADAMW, 1)
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
checks["old fsdp"] = lambda: refused(lambda: FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))

result = {}
wanted = sys.argv[2:] or list(checks)
for name in wanted:
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
               f"--nproc_per_node={world}", str(script), str(out), *checks]  # fmt: skip
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
        "ddp adamw", "ddp adamw accumulated", "ddp momentum in buckets", "ddp compiled",
        "ddp with unused", "ddp static", "fsdp adamw", "fsdp fused accumulated", "fsdp momentum",
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


def test_gradients_that_lie_in_buckets_are_there_again(ranks: list[dict[str, Any]]) -> None:
    assert [rank["checks"]["gradients in buckets"] for rank in ranks] == [[], []]


def test_flat_parameters_are_refused_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "its flat parameters (use fully_shard)" in rank["checks"]["old fsdp"]


def test_on_three_ranks_buckets_are_not_built_and_no_bit_changes(tmp_path: Path) -> None:
    for rank in run(tmp_path, 3, "ddp adamw accumulated", "refused static"):
        assert rank["checks"]["ddp adamw accumulated"] == []
        passes, _, skipped, synced = rank["notes"]["ddp adamw accumulated"]
        assert (passes, list(skipped), synced) == (2, ["DDP buckets"], True)
        assert "static_graph=True" in rank["checks"]["refused static"]

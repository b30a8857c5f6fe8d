"""A checkpoint is whole or not there, is found by itself, and continues bit by bit."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, StateFormat, StateMismatch
from penstock.feed.collectives import Ranks
from penstock.train import saved
from penstock.train.checkpoint import Checkpoints, SaveFailed, rng_state, set_rng_state
from penstock.train.saved import Saved

ROOT = Path(__file__).parents[1]
WIDTH = 16


class Net(nn.Module):
    """Small, with all that makes a resume hard: dropout, a buffer, and two layers that share their weights."""

    seen: torch.Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(23, width), nn.Linear(width, width)
        self.dropout, self.out = nn.Dropout(0.3), nn.Linear(width, 23, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        out: torch.Tensor = self.out(self.dropout(torch.relu(self.hidden(self.embedding(ids)))))
        return out


class Run:
    """A model in training. `model` is what is called, the net or what wraps it."""

    def __init__(
        self, wrap: Callable[[nn.Module], nn.Module] = lambda net: net, width: int = WIDTH
    ) -> None:
        torch.manual_seed(5)
        self.net = Net(width)
        self.model = wrap(self.net)
        decayed = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 / (1 + step) ** 0.5
        )

    def train(self, steps: int) -> list[str]:
        """The losses, as exact as they are. Every source of random numbers takes part."""
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 23, (3, 6))
            ids[0, 0], ids[1, 0] = random.randrange(23), int(np.random.randint(23))
            loss = nn.functional.cross_entropy(
                self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        return losses

    def save(self, checkpoints: Checkpoints, step: int, **settings: Any) -> Path:
        own, extra = (
            {"rng": rng_state(), "rank": checkpoints.ranks.rank},
            {"scheduler": self.scheduler},
        )
        return checkpoints.save(step, self.model, self.optimizer, extra, own, settings)

    def load(self, checkpoints: Checkpoints, one: Saved) -> None:
        checkpoints.load(one, self.model, self.optimizer, {"scheduler": self.scheduler})

    def facts(self) -> dict[str, str]:
        """Everything that a resume has to bring back, each value as a digest of its bits. All ranks call this."""
        found = {f"parameter {name}": digest(p) for name, p in self.net.named_parameters()}
        found |= {f"buffer {name}": digest(b) for name, b in self.net.named_buffers()}
        for name, p in self.net.named_parameters():
            found |= {
                f"{key} of {name}": digest(value)
                for key, value in self.optimizer.state.get(p, {}).items()
            }
        for i, group in enumerate(self.optimizer.param_groups):
            found |= {
                f"{key} of group {i}": repr(value)
                for key, value in group.items()
                if key != "params"
            }
        found |= {
            f"scheduler {key}": repr(value) for key, value in self.scheduler.state_dict().items()
        }
        return found


def digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()}"


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def resume(folder: str) -> None:
    """What a process does that knows nothing but the folder: load the newest, train five steps, tell the losses."""
    checkpoints = Checkpoints(folder, Ranks())
    found = checkpoints.newest()
    assert found is not None
    run = Run()
    run.load(checkpoints, found)
    facts = run.facts()
    set_rng_state(found.ranks[0]["rng"])
    print(json.dumps([facts, run.train(5)]))


def python(code: str, *args: str) -> str:
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}",
        *args,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", Ranks())


@pytest.fixture
def two(checkpoints: Checkpoints) -> Checkpoints:
    """A folder with steps 1 and 2."""
    run = Run()
    for step in (1, 2):
        run.train(1)
        run.save(checkpoints, step, of=step)
    return checkpoints


def found(checkpoints: Checkpoints) -> Saved:
    one = saved.newest(checkpoints.folder)
    assert one is not None
    return one


def test_a_process_that_resumes_trains_on_bit_by_bit(checkpoints: Checkpoints) -> None:
    seed(1)
    run = Run()
    run.train(5)
    run.save(checkpoints, 5)
    facts = run.facts()
    losses = run.train(5)
    seed(99)
    facts_again, losses_again = json.loads(
        python(
            "from tests.test_checkpoint import resume; resume(sys.argv[1])", str(checkpoints.folder)
        )
    )
    assert facts_again == facts
    assert losses_again == losses
    assert len(set(losses)) == 5


@pytest.mark.parametrize("steps", [0, 3])
def test_saving_changes_nothing_in_the_run_that_is_saved(
    checkpoints: Checkpoints, steps: int
) -> None:
    losses = []
    for save in (False, True):
        seed(1)
        run = Run()
        run.train(steps)
        before = run.facts()
        if save:
            run.save(checkpoints, steps)
        assert run.facts() == before
        losses.append(run.train(3))
    assert losses[0] == losses[1]


def test_newest_tells_what_was_saved(two: Checkpoints) -> None:
    one = two.newest()
    assert one is not None
    assert (one.folder, one.step, one.world_size) == (two.folder / "step-00000002", 2, 1)
    assert one.settings == {"of": 2}
    assert one.ranks[0]["rank"] == 0
    files = visible(one.folder)
    assert files == [".metadata", "__0_0.distcp", "meta.json", "rank-0.json"]
    meta = json.loads((one.folder / "meta.json").read_text())
    assert sorted(meta["files"]) == [name for name in files if name != "meta.json"]


def test_without_checkpoints_there_is_no_newest(checkpoints: Checkpoints) -> None:
    assert saved.newest(checkpoints.folder) is None
    checkpoints.folder.mkdir()
    assert checkpoints.newest() is None


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # In the middle of a number or of a tensor: a place that no parser would notice.
    at = (
        data.find(b'"step": ') + 8
        if path.suffix == ".json" and b'"step": ' in data
        else len(data) // 2
    )
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["meta.json", "rank-0.json", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_newest_takes_the_one_before_a_damaged_one_and_says_why(
    two: Checkpoints, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(two.folder / "step-00000002" / name)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert found(two).step == 1
    (record,) = caplog.records
    assert record.name == "penstock"
    assert "step-00000002 is not a checkpoint that can be loaded" in record.getMessage()
    assert name in record.getMessage()
    with pytest.raises(StateFormat, match=rf"step-00000002 .*{name}.*Give the path of another one"):
        saved.load(two.folder / "step-00000002")


def test_a_path_that_is_no_checkpoint_is_refused(two: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(StateFormat, match="there is no such folder"):
        saved.load(two.folder / "step-00000007")
    with pytest.raises(StateFormat, match=r"meta\.json cannot be read"):
        saved.load(two.folder)
    (tmp_path / "file").touch()
    with pytest.raises(StateFormat, match="cannot be searched for checkpoints"):
        saved.newest(tmp_path / "file")
    with pytest.raises(StateFormat, match="cannot be searched for checkpoints"):
        Checkpoints(tmp_path / "file", Ranks()).newest()


def test_only_the_newest_are_kept(checkpoints: Checkpoints) -> None:
    run = Run()
    for step in range(1, 6):
        run.save(checkpoints, step)
    assert visible(checkpoints.folder) == [f"step-{step:08d}" for step in (3, 4, 5)]
    saved.prune(checkpoints.folder, 1)
    assert visible(checkpoints.folder) == ["step-00000005"]
    saved.prune(checkpoints.folder, 1)
    assert visible(checkpoints.folder) == ["step-00000005"]
    for bad in (0, -1):
        with pytest.raises(ConfigError, match="at least one"):
            saved.prune(checkpoints.folder, bad)
        with pytest.raises(ConfigError, match="at least one"):
            Checkpoints(checkpoints.folder, Ranks(), keep=bad)


KILLED = """
import os, random, signal, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from penstock.feed.collectives import Ranks
from penstock.train import saved
from penstock.train.checkpoint import Checkpoints
from tests.test_checkpoint import Run, visible

folder = Path(sys.argv[1])
run = Run()
run.train(1)
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}

def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

def fresh(keep=2):
    for path in folder.iterdir() if folder.exists() else ():
        saved.discard(path)
    return Checkpoints(folder, Ranks(), keep=keep)

# Before each thing that a save does to the disk, in turn: until a save was not killed.
def killed_at_each(step, keep, before):
    deaths = 0
    while True:
        checkpoints = fresh(keep)
        for one in before:
            run.save(checkpoints, one)
        def work():
            left = deaths
            def hook(event, args):
                nonlocal left
                if event in EVENTS:
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
            sys.addaudithook(hook)
            run.save(checkpoints, step)
        status = os.waitpid(child(work), 0)[1]
        found = saved.newest(folder)
        assert found is not None and found.step in (before[-1], step), (deaths, found)
        for name in visible(folder):
            if not name.startswith("."):
                saved.load(folder / name)
        run.save(checkpoints, 99)
        assert saved.newest(folder).step == 99
        assert not [name for name in visible(folder) if name.startswith(".")], visible(folder)
        if status == 0:
            return deaths
        assert os.WTERMSIG(status) == signal.SIGKILL
        deaths += 1

print(killed_at_each(3, 1, [1, 2]), killed_at_each(2, 2, [2]))

# And at any moment.
checkpoints = fresh()
run.save(checkpoints, 1)
last = 1
moments = random.Random(7)
for _ in range(5):
    reader, writer = os.pipe()
    def work():
        for step in range(last + 1, last + 10_000):
            run.save(checkpoints, step)
            os.write(writer, b"%d\\n" % step)
    pid = child(work)
    os.close(writer)
    done = int(os.read(reader, 100).split()[-1])
    time.sleep(moments.random() * 0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    done = max([done, *map(int, os.read(reader, 1 << 16).split())])
    os.close(reader)
    found = saved.newest(folder)
    assert found is not None and found.step in (done, done + 1), (done, found)
    last = found.step
"""


@pytest.mark.slow
def test_killed_at_any_moment_a_save_leaves_a_good_newest(tmp_path: Path) -> None:
    deaths = python(KILLED, str(tmp_path / "checkpoints")).split()
    assert all(int(count) > 20 for count in deaths), deaths


def refuses(checkpoints: Checkpoints, run: Run, match: str) -> None:
    """A save fails, says so, leaves nothing behind and takes nothing away."""
    before = visible(checkpoints.folder)
    with pytest.raises(SaveFailed, match=match):
        run.save(checkpoints, 7)
    assert visible(checkpoints.folder) == before
    assert found(checkpoints).step == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_ends_in_an_error_that_says_so(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "checkpoints", Ranks())
    run = Run()
    for step in (1, 2):
        run.save(checkpoints, step)
    refuses(checkpoints, Run(width=500), "No space left on device.*has room")


def test_a_checkpoint_of_another_model_is_refused(two: Checkpoints) -> None:
    deeper, bare = Run(), Run()
    deeper.net.more = nn.Linear(2, 2)
    with pytest.raises(
        StateMismatch, match=r"model\.more\.weight is not in the checkpoint.*meta\.json"
    ):
        deeper.load(two, found(two))
    with pytest.raises(
        StateMismatch, match=r"extra\.scheduler\..* is only in the checkpoint.* and \d+ more"
    ):
        two.load(found(two), bare.model, bare.optimizer, {})
    del bare.net.hidden
    with pytest.raises(StateMismatch, match=r"model\.hidden\.weight is only in the checkpoint"):
        two.load(
            found(two),
            bare.model,
            torch.optim.AdamW(bare.model.parameters()),
            {"scheduler": bare.scheduler},
        )
    wider, other = Run(width=2 * WIDTH), Run()
    with pytest.raises(
        StateMismatch,
        match=r"hidden\.weight was saved as torch\.float32 \(16, 16\) and is .*\(32, 32\)",
    ):
        wider.load(two, found(two))
    other.net.to(torch.float64)
    with pytest.raises(
        StateMismatch, match=r"was saved as torch\.float32 .* and is torch\.float64"
    ):
        other.load(two, found(two))

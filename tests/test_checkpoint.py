"""A checkpoint is complete or not there, is found by itself, and continues bit by bit."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import StateError
from penstock.feed.collectives import Ranks
from penstock.train import checkpoint
from penstock.train.checkpoint import Checkpoints, Saved, SaveFailed, rng_state, set_rng_state

ROOT = Path(__file__).parents[1]
WIDTH = 16


class Net(nn.Module):
    """Small, with what makes a resume hard: dropout, a buffer, and layers that share weights."""

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
    """A model in training. `model` is what is called: the net, or what wraps it."""

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
        """Return the exact losses."""
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 23, (3, 6))
            loss = nn.functional.cross_entropy(
                self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        return losses

    def checkpoints(self, folder: Path, ranks: Ranks | None = None, keep: int = 3) -> Checkpoints:
        return Checkpoints(
            folder, ranks or Ranks(), keep, self.model, self.optimizer, self.scheduler
        )

    def save(
        self, folder: Path, step: int, ranks: Ranks | None = None, keep: int = 3, **settings: Any
    ) -> Path:
        own = {"rng": rng_state(), "data": {"rank": 0 if ranks is None else ranks.rank}}
        return self.checkpoints(folder, ranks, keep).save(step, own, settings)

    def load(self, folder: Path, ranks: Ranks | None = None) -> Saved:
        saved = checkpoint.newest(folder)
        assert saved is not None
        self.checkpoints(folder, ranks).load(saved)
        return saved

    def facts(self) -> dict[str, str]:
        """Return a digest of everything that a resume brings back. All ranks call this."""
        found = {f"parameter {name}": digest(p) for name, p in self.net.named_parameters()}
        found |= {f"buffer {name}": digest(b) for name, b in self.net.named_buffers()}
        for name, p in self.net.named_parameters():
            state = self.optimizer.state.get(p, {})
            found |= {f"{key} of {name}": digest(value) for key, value in state.items()}
        for i, group in enumerate(self.optimizer.param_groups):
            values = {key: value for key, value in group.items() if key != "params"}
            found |= {f"{key} of group {i}": repr(value) for key, value in values.items()}
        schedule = self.scheduler.state_dict().items()
        return found | {f"scheduler {key}": repr(value) for key, value in schedule}


def digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    bits = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    return f"{whole.dtype} {tuple(whole.shape)} {bits}"


def resume(folder: str) -> None:
    """Load the newest checkpoint, as a process that knows only the folder, and train five steps."""
    run = Run()
    saved = run.load(Path(folder))
    facts = run.facts()
    set_rng_state(saved.ranks[0]["rng"])
    print(json.dumps([facts, run.train(5)]))


def python(code: str, *args: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    command = [sys.executable, "-W", "error", "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def two(folder: Path) -> Path:
    """A folder with steps 1 and 2."""
    run = Run()
    for step in (1, 2):
        run.train(1)
        run.save(folder, step, of=step)
    return folder


def newest_step(folder: Path) -> int:
    found = checkpoint.newest(folder)
    assert found is not None
    return found.step


def test_a_process_that_resumes_trains_on_bit_by_bit(folder: Path) -> None:
    torch.manual_seed(1)
    run = Run()
    run.train(5)
    run.save(folder, 5)
    facts = run.facts()
    losses = run.train(5)
    code = "from tests.test_checkpoint import resume; resume(sys.argv[1])"
    assert json.loads(python(code, str(folder))) == [facts, losses]
    assert len(set(losses)) == 5


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["meta.json", "rank-0.json", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_newest_takes_the_one_before_an_incomplete_one_and_says_why(
    two: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(two / "step-00000002" / name)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert newest_step(two) == 1
    (record,) = caplog.records
    assert "step-00000002 is not a complete checkpoint" in record.getMessage()
    with pytest.raises(StateError, match=r"step-00000002 is not a complete .*Name another one"):
        checkpoint.read(two / "step-00000002")
    shutil.rmtree(two / "step-00000001")
    with pytest.raises(StateError, match="has checkpoints, but none is complete"):
        checkpoint.newest(two)


def test_only_the_newest_are_kept(folder: Path) -> None:
    run = Run()
    run.train(1)
    for step in range(1, 6):
        run.save(folder, step)
    assert visible(folder) == [f"step-{step:08d}" for step in (3, 4, 5)]


def test_after_going_back_the_newest_is_the_one_saved_last(folder: Path) -> None:
    run = Run()
    run.train(1)
    for step in (6, 9):
        run.save(folder, step)
    again = run.save(folder, 6)
    assert again.name == "step-00000006.2"
    found = checkpoint.newest(folder)
    assert found is not None
    assert (found.folder, found.step) == (again, 6)


def test_checkpoints_of_an_earlier_run_are_moved_aside(two: Path) -> None:
    run = Run()
    run.train(1)
    for number in (1, 2):
        assert checkpoint.set_aside(two) == two.with_name(f"checkpoints.{number}")
        assert checkpoint.newest(two) is None
        run.save(two, 5)
    assert visible(two.with_name("checkpoints.1")) == ["step-00000001", "step-00000002"]


KILLED = """
import os, shutil, signal
from pathlib import Path
import torch
torch.set_num_threads(1)
from penstock.train import checkpoint
from tests.test_checkpoint import Run, visible

folder = Path(sys.argv[1])
run = Run()
run.train(1)
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}

# Before each thing that a save does to the disk, in turn: until a save was not killed.
def killed_at_each(step, keep, before):
    deaths = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        for one in before:
            run.save(folder, one, keep=keep)
        pid = os.fork()
        if pid == 0:
            def hook(event, args):
                if event in EVENTS:
                    if hook.left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    hook.left -= 1
            hook.left = deaths
            sys.addaudithook(hook)
            run.save(folder, step, keep=keep)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        found = checkpoint.newest(folder)
        assert found is not None and found.step in (before[-1], step), (deaths, found)
        for name in visible(folder):
            if not name.startswith("."):
                checkpoint.read(folder / name)
        run.save(folder, 99)
        assert checkpoint.newest(folder).step == 99
        assert not [name for name in visible(folder) if name.startswith(".")], visible(folder)
        if status == 0:
            return deaths
        assert os.WTERMSIG(status) == signal.SIGKILL
        deaths += 1

print(killed_at_each(3, 1, [1, 2]), killed_at_each(2, 2, [2]))
"""


@pytest.mark.slow
def test_killed_at_any_moment_a_save_leaves_a_complete_newest(tmp_path: Path) -> None:
    deaths = python(KILLED, str(tmp_path / "checkpoints")).split()
    assert all(int(count) > 20 for count in deaths), deaths


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    for width, step in ((WIDTH, 1), (500, 7)):
        run = Run(width=width)
        run.train(1)
        if step == 1:
            run.save(folder, step)
    with pytest.raises(SaveFailed, match=r"step 7 could not be saved in .*has room"):
        run.save(folder, 7)
    assert visible(folder) == ["step-00000001"]


def test_a_checkpoint_of_another_model_is_refused(two: Path) -> None:
    deeper = Run()
    deeper.net.more = nn.Linear(2, 2)
    for run in (Run(width=2 * WIDTH), deeper):
        with pytest.raises(StateError, match=r"step-00000002 does not fit this run: .*"):
            run.load(two)

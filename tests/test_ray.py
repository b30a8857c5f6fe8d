"""Preparing on a real Ray cluster on this machine, and training under Ray Train.

Ray runs in processes of its own: it warns while it is imported, and writes to the home folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import AsyncDataLoader, PreparedDataset
from penstock.prepare import prepare
from tests.test_prepare import files_of

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

ROOT = Path(__file__).parent.parent
PREPARE = """
import sys, time
from penstock.prepare import prepare

PAUSE = float(sys.argv[3])

def slow(table):
    time.sleep(PAUSE)
    return table["text"]

done = prepare(sys.argv[1], tokenizer="byte", out=sys.argv[2], chunk_bytes=8192, workers=2,
               engine=sys.argv[4], transform=("slow-1", slow))
print(done.complete, done.already)
"""


def environment(home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return os.environ | {"HOME": str(home), "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment(tmp_path / "home"), capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_ray_writes_the_bytes_that_one_machine_writes(corpus: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    prepare(corpus / "many", tokenizer="byte", out=here)
    line = ["-m", "penstock.cli.main", "prepare", str(corpus / "many"), "--out", str(there)]
    done = run(tmp_path, *line, "--engine", "ray", "--workers", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
    assert files_of(there) == files_of(here)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_in_the_source_ends_the_job_with_that_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nnot json\n')
    line = ["-m", "penstock.cli.main", "prepare", str(tmp_path / "a.jsonl")]
    done = run(tmp_path, *line, "--out", str(tmp_path / "out"), "--engine", "ray")
    assert done.returncode == 1
    assert "a.jsonl, byte 17: not JSON" in done.stderr


def command(tmp_path: Path, out: Path, pause: str, engine: str) -> list[str]:
    return [str(tmp_path / "script.py"), str(tmp_path / "docs.jsonl"), str(out), pause, engine]


def started(tmp_path: Path, out: Path) -> subprocess.Popen[str]:
    """Start a slow run, and return once it has written some entries."""
    lines = [json.dumps({"text": f"document {i} " * 60}) for i in range(400)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    (tmp_path / "script.py").write_text(PREPARE)
    process = subprocess.Popen(
        [sys.executable, *command(tmp_path, out, "0.3", "ray")],
        env=environment(tmp_path / "home"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while len(list(out.glob("??/*.arrows"))) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def expected(tmp_path: Path) -> dict[str, bytes]:
    done = run(tmp_path, *command(tmp_path, tmp_path / "expected", "0", "local"))
    assert done.returncode == 0, done.stderr
    return files_of(tmp_path / "expected")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    process = started(tmp_path, tmp_path / "out")
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "ray::Worker" in " ".join(child.cmdline()[:1])]
    workers[0].kill()
    output, _ = process.communicate(timeout=200)
    assert output.splitlines()[-1] == "True 0"
    assert files_of(tmp_path / "out") == expected(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_driver_that_is_killed_continues_when_it_is_started_again(tmp_path: Path) -> None:
    process = started(tmp_path, tmp_path / "out")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:  # agents of Ray's that outlive its driver
        child.kill()
    again = run(tmp_path, *command(tmp_path, tmp_path / "out", "0", "ray"))
    complete, already = again.stdout.splitlines()[-1].split()
    assert complete == "True"
    assert int(already) >= 4
    assert files_of(tmp_path / "out") == expected(tmp_path)


TRAIN = """
import json, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

corpus, folder, workers, resume = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]

def loop():
    import json, os
    import ray.train
    from penstock import AsyncDataLoader, PreparedDataset

    data = PreparedDataset(corpus, seq_len=64)
    rank = ray.train.get_context().get_world_rank()
    with AsyncDataLoader(data, 4 // workers, shuffle=True, seed=1, lanes=4, n_workers=1) as loader:
        if resume:
            names = [f"{folder}/state{n}.json" for n in range(int(resume[0]))]
            loader.load_state_dict([json.load(open(name)) for name in names])
        rows = [next(loader).inputs.tolist() for _ in range(10)]
        json.dump(loader.state_dict(), open(f"{folder}/state{rank}.json", "w"))
    json.dump(rows, open(f"{folder}/rows{workers}-{rank}.json", "w"))

scaling = ScalingConfig(num_workers=workers, use_gpu=False, resources_per_worker={"CPU": 1})
TorchTrainer(loop, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_train_gives_each_worker_its_shard_and_resumes_on_another_number(
    corpus: Path, tmp_path: Path
) -> None:
    prepare(corpus / "many", tokenizer="byte", out=tmp_path / "out")
    (tmp_path / "train.py").write_text(TRAIN)
    for workers, resume in ((2, ()), (1, ("2",))):
        how = [str(tmp_path / "train.py"), str(tmp_path / "out"), str(tmp_path), str(workers)]
        done = run(tmp_path, *how, *resume)
        assert done.returncode == 0, done.stderr[-2000:]

    def rows(workers: int, rank: int) -> Any:
        return json.loads((tmp_path / f"rows{workers}-{rank}.json").read_text())

    got = []
    for first, second in zip(rows(2, 0), rows(2, 1), strict=True):
        got.append([first[0], second[0], first[1], second[1]])
    got += rows(1, 0)
    data = PreparedDataset(tmp_path / "out", seq_len=64)
    with AsyncDataLoader(data, 4, shuffle=True, seed=1, lanes=4) as loader:
        assert got == [next(loader).inputs.tolist() for _ in range(20)]

"""The commands that runbooks know, as they stand there, against a Hub on loopback."""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.serving import documents
from tests.servers import HubServer
from tests.train.runs import ROOT, SMALL, Run, environment, here

# The first test that needs a run waits for it: processes that import torch, side by side with other tests.
pytestmark = pytest.mark.timeout(300)

SINGLE = (
    "NSA_FWE_WARMUP_BATCHES=16 NSA_FWE_WARMUP_TIMEOUT=30 PYTHONPATH=. "
    "python scripts/train_showcase.py --dataset fineweb_edu --ddp 0 --steps 50"
)
SHARDED = (
    "NSA_FWE_WARMUP_BATCHES=16 NSA_FWE_WARMUP_TIMEOUT=30 "
    "torchrun --nproc_per_node=2 scripts/train_showcase_fsdp.py --dataset fineweb_edu"
)
LOCAL = (
    "PYTHONPATH=. python -u scripts/train_showcase.py --dataset fineweb_edu_local "
    "--local-path /data/fwe_bootstrap.jsonl --ddp 0 --steps 200"
)
SMOKE = (
    "python scripts/automation/fwe_smoke.py --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte"
)
BOOTSTRAP = (
    "python scripts/automation/fwe_bootstrap.py --out /data/fwe_bootstrap.jsonl --bytes 5368709120"
)

METRICS = (
    r"^Metrics:\n  Loss: \d+\.\d{3}\n  Avg tokens/sec: \d+\.\d\n  Batch size: %d\n  Data wait: \d+\.\d%%\n"
    r"  Elapsed: \d+m \d+s\n"
)
EVERY = ("ts", "iso", "mono", "pid", "rank", "step", "msg")
PROGRESS = {
    "loss", "toks_per_s", "dt_fetch_s", "dt_fetch_last", "data_wait_pct", "queue_depth", "grad_norm", "rss_bytes",
}  # fmt: skip
ROLLING = {"fetch_p50_ms", "fetch_p95_ms"}
"""Over steps after the first, so a step comes before them that has none."""
PARTS = {"import", "list", "open", "fetch", "decode", "tokenize", "pack"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the project's scripts, and where it does no harm to leave artifacts."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return folder


def shell(command: str, root: Path, hub: HubServer, cache: str = "cache") -> Run:
    """A line as it is typed at a prompt."""
    variables = environment(root / cache, HF_ENDPOINT=hub.endpoint, HF_HOME=str(root / "home"))
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("/data/", f"{root}/data/")],
        cwd=root, env=variables, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    return Run(root / "artifacts" / "train_showcase", done.returncode, done.stdout, done.stderr)


def keep(run: Run, name: str) -> Run:
    """The next command writes to the same folder."""
    run.out = run.good().out.rename(run.out.with_name(name))
    return run


@pytest.fixture(scope="module")
def single(root: Path, fineweb: HubServer) -> Run:
    return keep(shell(SINGLE + " --seq-len 64 --batch 2", root, fineweb), "single")


@pytest.fixture(scope="module")
def sharded(root: Path, fineweb: HubServer) -> Run:
    shorter = "torchrun --standalone --local-addr 127.0.0.1"
    command = SHARDED.replace("torchrun", shorter) + " --seq-len 64 --batch 2 --steps 6"
    return keep(shell(command, root, fineweb), "sharded")


@pytest.fixture(scope="module")
def bootstrapped(root: Path, fineweb: HubServer) -> Run:
    return shell(BOOTSTRAP, root, fineweb)


def test_a_single_process_trains_on_fineweb_edu(single: Run) -> None:
    assert list(single.losses()) == list(range(1, 51))
    assert re.search(
        r"^\[train\] first FineWeb-Edu batch fetched in \d+\.\d\ds$", single.said, re.MULTILINE
    )
    assert re.search(METRICS % 2, single.said, re.MULTILINE)
    assert re.search(
        r"^\[train\] warmup: 16 of 16 batches ready in \d+ ms$", single.said, re.MULTILINE
    )
    assert single.errors == ""
    assert single.saved().step == 50


def test_heartbeat_of_the_first_batch_the_warmup_and_every_step(single: Run) -> None:
    (ready,), (warmup,) = single.of("fineweb_loader_ready"), single.of("fineweb_loader_warmup")
    assert f"first FineWeb-Edu batch fetched in {ready['dt']:.2f}s" in single.said
    assert ready["parts"].keys() >= PARTS
    assert (warmup["requested"], warmup["filled"], warmup["fetch_warmup_batches"]) == (16, 16, 16)
    assert warmup["fetch_warmup_wait_ms"] == warmup["wait_ms"] >= 0
    for line in single.of("progress"):
        assert line.keys() >= (PROGRESS | ROLLING if line["step"] > 2 else PROGRESS)
        assert math.isfinite(line["loss"])
        assert line["dt_fetch_s"] == line["dt_fetch_last"] >= 0
        assert 0 <= line["data_wait_pct"] <= 100


@pytest.mark.slow
def test_two_ranks_share_a_model_and_each_has_a_heartbeat(sharded: Run) -> None:
    assert list(sharded.losses(0)) == [1, 2, 3, 4, 5, 6]
    assert sharded.losses(1) == sharded.losses(0)
    for rank in (0, 1):
        assert {line["rank"] for line in sharded.lines(rank)} == {rank}
        assert sharded.of("boot", rank)[0]["world_size"] == 2
        assert sharded.of("boot", rank)[0]["settings"]["fsdp"] is True
        assert len(sharded.of("fineweb_loader_ready", rank)) == 1
        assert sharded.of("fineweb_loader_warmup", rank)[0]["filled"] == 16
        assert sharded.of("progress", rank)[-1].keys() >= PROGRESS | ROLLING
    # One of them speaks for both.
    assert len(re.findall("first FineWeb-Edu batch fetched in", sharded.said)) == 1
    assert re.search(METRICS % 4, sharded.said, re.MULTILINE)
    assert len(sharded.saved().ranks) == 2


def test_text_is_staged_on_local_disk(bootstrapped: Run, root: Path) -> None:
    path = root / "data" / "fwe_bootstrap.jsonl"
    written = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert sorted(written) == sorted(documents())
    assert bootstrapped.good().said.splitlines()[-1] == f"wrote bytes: {path.stat().st_size}"


@pytest.mark.slow
def test_a_run_begins_on_the_local_text_without_a_server(
    bootstrapped: Run, root: Path, fineweb: HubServer
) -> None:
    bootstrapped.good()
    fineweb.clear_log()
    run = keep(shell(LOCAL + " --seq-len 32 --batch 2", root, fineweb, "empty"), "local")
    assert fineweb.log == []
    assert list(run.losses()) == list(range(1, 201))
    assert "first FineWeb-Edu batch fetched in" in run.said
    assert len(run.of("fineweb_loader_ready")) == 1
    assert re.search(METRICS % 2, run.said, re.MULTILINE)


def test_the_smoke_test_passes(root: Path, fineweb: HubServer) -> None:
    done = shell(SMOKE, root, fineweb).good()
    assert re.match(r"\[smoke\]\[OK\] first batch in \d+\.\d\ds\n", done.said)


# Further options


def script(tmp_path: Path, hub: HubServer, *arguments: Any) -> Run:
    """scripts/train_showcase.py in this process."""
    out = tmp_path / "out"
    line = ["train_showcase.py", *map(str, arguments), *SMALL, "--out", str(out)]

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", line)
            runpy.run_path(str(ROOT / "scripts" / "train_showcase.py"), run_name="__main__")

    return here(run, out, HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"))


@pytest.mark.parametrize(
    "spelled", [("--synthetic-on-fail", "1"), ("--synthetic-on-fail",)], ids=" ".join
)
def test_options_against_faults_harm_no_run_without_them(
    spelled: tuple[str, ...], tmp_path: Path, fineweb: HubServer
) -> None:
    words = "--dataset fineweb_edu --ddp 0 --loader-timeout 60 --steps 3"
    run = script(tmp_path, fineweb, *words.split(), *spelled).good()
    assert list(run.losses()) == [1, 2, 3]
    settings = run.of("boot")[0]["settings"]
    assert (settings["loader_timeout"], settings["synthetic_on_fail"]) == (60.0, True)
    assert not run.of("fallback")
    assert not any(line.get("synthetic") for line in run.of("progress"))


def test_made_up_data_needs_nothing_and_resumes(tmp_path: Path, fineweb: HubServer) -> None:
    fineweb.clear_log()
    first = script(tmp_path, fineweb, "--dataset", "synthetic", "--steps", "3").good()
    assert list(first.losses()) == [1, 2, 3]
    assert first.of("loader_ready")  # the prefix is FineWeb-Edu's only for FineWeb-Edu
    more = script(tmp_path, fineweb, "--dataset", "synthetic", "--steps", "5", "--resume").good()
    assert list(more.losses()) == [4, 5]
    assert fineweb.log == []


# Buckets

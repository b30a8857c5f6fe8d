"""A real training run, watched: loader, telemetry, heartbeat and the commands that read it, together."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from penstock import AsyncDataLoader, Mixture, TextDataset
from penstock.cli.main import cli
from penstock.encode.tokenizer import Tokenizer
from penstock.feed.warmup import Warmup
from penstock.watch import percent
from penstock.watch.heartbeat import Heartbeat
from penstock.watch.heartbeat_reader import read_heartbeat
from penstock.watch.loader_stats import Stats
from penstock.watch.stage_timer import STAGES
from penstock.watch.telemetry import Telemetry

torch = pytest.importorskip("torch")

STEPS, EVERY = 150, 50
STALL_S = 0.2
LONGEST_S = 60.0
"""A gate that nobody opens is a failure, and not a hang."""


class Listened(Telemetry):
    """The real one, which also lets a test wait for an event."""

    def __init__(self, msg: str, **how: Any) -> None:
        self._msg = msg
        self.told = threading.Event()
        super().__init__(**how)

    def event(self, msg: str, **fields: Any) -> None:
        super().event(msg, **fields)
        if msg == self._msg:
            self.told.set()


@dataclass
class Run:
    """What the trainer knows of its own run."""

    folder: Path
    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    begun: float = 0.0
    paused_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    warmup: Warmup | None = None
    stats: Stats | None = None
    error: str = ""

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def counted(self) -> Stats:
        assert self.stats is not None
        return self.stats

    def lines(self, *msgs: str) -> list[dict[str, Any]]:
        found = read_heartbeat(self.folder / "heartbeat_rank0.jsonl")
        lines = [line for line in found if not msgs or line["msg"] in msgs]
        return lines


def text(corpus: Path) -> TextDataset:
    return TextDataset(corpus / "parquet", tokenizer="byte", seq_len=64)


def ask(*args: Any) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model, trained on text that stalls once and is bad at the end, with an evaluation now and then."""
    found = Run(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more of them only wait for each other here
        try:
            train(found, corpus, patch)
        finally:
            torch.set_num_threads(threads)
    return found


def train(run: Run, corpus: Path, patch: pytest.MonkeyPatch) -> None:
    telemetry = Listened("stall")
    telemetry.stall_s = STALL_S
    real, broken, chunks = Tokenizer.encode, threading.Event(), iter(range(1_000_000))

    def encode(self: Any, ref: Any, *args: Any) -> Any:
        if next(chunks) == 12:
            assert telemetry.told.wait(LONGEST_S)  # the trainer runs dry, and somebody notices
        if broken.is_set():
            raise ValueError("a bad text")
        return real(self, ref, *args)

    patch.setattr(Tokenizer, "encode", encode)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(260, 16), torch.nn.Linear(16, 260))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AsyncDataLoader(text(corpus), 4, shuffle=True, seed=1, n_workers=1, prefetch_size=2)
    loader.observe(telemetry)
    beating = Heartbeat(
        run.folder,
        observed=loader.telemetry,
        prefix="fineweb_loader_",
        every_s=0.05,
        settings={"lr": 0.1},
    )
    try:
        with loader, beating:
            run.warmup = loader.warmup(2, timeout=LONGEST_S)
            run.begun = time.perf_counter()
            for batch in loader:
                optimizer.zero_grad()
                logits = model(batch.inputs.long())
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch.targets.long().flatten()
                )
                loss.backward()
                optimizer.step()
                run.losses.append(loss.item())
                run.tokens += batch.inputs.numel()
                beating.progress(run.steps, loss=loss, lr=0.1)
                run.wall_s = time.perf_counter() - run.begun
                run.stats = loader.stats()
                if run.steps % EVERY == 0 and run.steps < STEPS:
                    began = time.perf_counter()
                    with loader.pause("eval"):
                        threading.Event().wait(0.05)
                    run.paused_s.append(time.perf_counter() - began)
                if run.steps == STEPS:
                    broken.set()
    except ValueError as error:
        run.error = str(error)


# What is in the file


def test_the_file_has_everything_that_happened_and_every_line_is_whole(run: Run) -> None:
    assert run.error == "a bad text"
    assert run.steps >= STEPS
    lines = run.lines()
    assert lines[0]["msg"] == "boot"
    assert lines[-1]["msg"] == "shutdown"
    count = Counter(line["msg"] for line in lines)
    assert count["progress"] == run.steps
    assert count["pause"] == len(run.paused_s) == 2
    once = {f"fineweb_loader_{name}" for name in ("ready", "warmup", "error")}
    assert {count[name] for name in once | {"boot", "shutdown"}} == {1}
    assert count["stall"] >= 1
    assert count["beat"] >= 2
    for line in lines:
        assert line["pid"] == os.getpid()
        assert line["rank"] == 0
        assert 0 <= line["step"] <= run.steps
        assert datetime.fromisoformat(line["iso"]).timestamp() == pytest.approx(
            line["ts"], abs=2e-3
        )
    assert lines[0]["settings"] == {"lr": 0.1}
    assert lines[0]["world_size"] == 1
    assert {"python", "penstock", "torch"} <= lines[0]["versions"].keys()


def test_waits_steps_and_pauses_add_up_to_what_the_trainer_measured(run: Run) -> None:
    steps, stats = run.lines("progress"), run.counted
    assert sum(line["dt_fetch_s"] for line in steps) == pytest.approx(
        stats.wait_s, abs=1e-6 * (run.steps + 1)
    )
    by_stage: Counter[str] = Counter()
    for line in steps:
        by_stage.update(line["wait_by_stage"])
    for stage, seconds in by_stage.items():
        assert seconds == pytest.approx(stats.wait_by_stage[stage], abs=1e-6 * (run.steps + 1))
    paused = sum(line.get("paused", {}).get("eval", 0.0) for line in steps)
    assert paused == pytest.approx(stats.paused_s["eval"], abs=1e-4)
    assert paused == pytest.approx(sum(line["seconds"] for line in run.lines("pause")), abs=1e-4)
    assert paused <= sum(run.paused_s)
    total = sum(line["dt_step_s"] for line in steps) + paused
    # Between `progress` and the next step there is next to nothing here; how much is the machine's affair.
    assert 0.6 * run.wall_s <= total <= run.wall_s + 1e-3
    assert stats.wall_s <= run.wall_s - paused + 1e-3


def test_the_stall_is_told_with_its_stage_and_file_while_it_lasts_and_after_it(run: Run) -> None:
    for line in run.lines("stall"):
        assert line["stage"] == "tokenize"
        assert ".parquet, row group" in line["where"]
        assert line["wait_s"] >= STALL_S
        assert "tokenize" in line["verdict"]
    waiting = [line["waiting"] for line in run.lines("beat") if "waiting" in line]
    assert any(
        one["stage"] == "tokenize" and ".parquet" in one["where"] and one["for_s"] > 0
        for one in waiting
    )
    longest = max(run.lines("progress"), key=lambda line: float(line["dt_fetch_s"]))
    assert longest["dt_fetch_s"] >= STALL_S
    assert longest["wait_by_stage"]["tokenize"] > 0.5 * longest["dt_fetch_s"]


def test_the_start_the_warmup_the_error_and_the_end_are_told(run: Run) -> None:
    names = ("fineweb_loader_warmup", "fineweb_loader_ready", "fineweb_loader_error", "shutdown")
    warmup, ready, error, end = (run.lines(name)[0] for name in names)
    assert run.warmup is not None
    assert warmup["requested"] == warmup["filled"] == warmup["fetch_warmup_batches"] == 2
    assert warmup["wait_ms"] == warmup["fetch_warmup_wait_ms"]
    assert warmup["wait_ms"] == pytest.approx(run.warmup.wait_ms, abs=1e-3)
    marks = [ready["reached"][name] for name in ("first_bytes", "first_tokens", "first_batch")]
    assert marks == sorted(marks)
    assert ready["dt"] > 0
    assert all(seconds >= 0 for seconds in ready["parts"].values())
    assert error["error"] == "ValueError: a bad text"
    assert error["stage"] == "tokenize"
    assert ".parquet, row group" in error["where"]
    assert end["reason"] == "ValueError: a bad text"
    assert end["steps"] == run.steps
    assert end["verdict"]
    assert 0 <= end["data_wait_pct"] <= 100


# What the commands make of it


def test_watch_shows_the_last_step_and_what_happened(run: Run) -> None:
    done = ask("watch", "--once", run.folder)
    assert done.exit_code == 0, done.output
    last = run.lines("progress")[-1]
    row = next(row for row in done.output.splitlines() if row.startswith("rank 0"))
    assert f"step {run.steps}  loss {run.losses[-1]:.4f}" in row
    assert "ended: ValueError: a bad text" in row
    assert f"data wait {percent(last['data_wait_pct'])}" in row
    assert "loader_error: error ValueError: a bad text" in done.output


def test_report_agrees_with_the_file_and_the_loader(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page, told = tmp_path / "report.html", tmp_path / "report.json"
    done = ask("report", run.folder, "-o", page, "--json", told)
    assert done.exit_code == 0, done.output
    assert "1 error" in done.output
    assert page.stat().st_size > 100_000
    numbers = json.loads(told.read_text())
    rank = numbers["ranks"][0]
    steps = run.lines("progress")
    assert (rank["steps"], rank["tokens"]) == (run.steps, run.tokens)
    assert rank["ended"] == "ValueError: a bad text"
    assert rank["wall_s"] == pytest.approx(sum(line["dt_step_s"] for line in steps))
    assert sum(rank["waits_pct"].values()) == pytest.approx(rank["data_wait_pct"], rel=0.01)
    assert rank["last_loss"] == pytest.approx(run.losses[-1])
    assert rank["events"]["pause"] == 2
    assert rank["events"]["stall"] >= 1
    assert (numbers["skipped_lines"], rank["dropped_lines"]) == (0, 0)


def test_health_judges_by_the_limits_it_is_given(run: Run) -> None:
    at_once = ("--grace-steps", 1, "--for-s", 0.001, "--json")
    too_much = ask("health", run.folder, "--min-tokens-per-s", 1e15, *at_once)
    assert too_much.exit_code == 1, too_much.output
    (rank,) = json.loads(too_much.output)["ranks"]
    assert (rank["status"], rank["step"]) == ("fail", run.steps)
    assert any("tokens/s, limit" in reason for reason in rank["reasons"])
    assert ask("health", run.folder / "elsewhere").exit_code == 2


# Every kind of loader


class Squares:
    """Addressable data."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return {"x": np.full(8, i * i)}


MAKE: dict[str, Callable[[Path], AsyncDataLoader]] = {
    "no workers": lambda corpus: AsyncDataLoader(text(corpus), 4, n_workers=0),
    "processes": lambda corpus: AsyncDataLoader(text(corpus), 4, n_workers=1, workers="process"),
    "a mixture": lambda corpus: AsyncDataLoader(
        Mixture(
            {
                "a": (text(corpus), 0.7),
                "b": (TextDataset(corpus / "docs.jsonl", tokenizer="byte", seq_len=64), 0.3),
            }
        ),
        4,
        n_workers=2,
    ),
    "map-style": lambda corpus: AsyncDataLoader(Squares(), 4, n_workers=2),
    "an iterable": lambda corpus: AsyncDataLoader(
        ({"x": np.full(8, i)} for i in range(200)), 4, n_workers=1
    ),
    "autotune": lambda corpus: AsyncDataLoader(text(corpus), 4, n_workers=1, prefetch_size="auto"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_every_kind_of_loader_can_be_watched(kind: str, corpus: Path, tmp_path: Path) -> None:
    loader = MAKE[kind](corpus)
    with loader, Heartbeat(tmp_path, observed=loader.telemetry, every_s=0.02) as beating:
        for step in range(1, 31):
            assert loader.next_batch(timeout=LONGEST_S) is not None
            beating.progress(step, loss=1 / step)
        stats = loader.stats()
    assert beating.counts() == dict.fromkeys(beating.counts(), 0)
    lines = list(read_heartbeat(tmp_path / "heartbeat_rank0.jsonl"))
    steps = [line for line in lines if line["msg"] == "progress"]
    assert steps[-1]["tokens_total"] == stats.tokens > 0
    assert len(steps) == stats.batches == 30
    assert sum(stats.wait_by_stage.values()) == pytest.approx(stats.wait_s, rel=1e-6)
    assert stats.wait_by_stage.keys() <= set(STAGES)
    assert 0 < stats.wait_s <= stats.wall_s
    for line in steps:
        assert 0 <= line["dt_fetch_s"] <= line["dt_step_s"] + 1e-6
        assert 0 <= line["data_wait_pct"] <= 100.01
        assert sum(line["wait_by_stage"].values()) == pytest.approx(line["dt_fetch_s"], abs=1e-5)
    assert len([line for line in lines if line["msg"] == "loader_ready"]) == 1
    assert ask("watch", "--once", tmp_path).exit_code == 0
    assert ask("health", tmp_path).exit_code == 0


def test_training_and_validation_are_measured_apart(corpus: Path) -> None:
    train = AsyncDataLoader(text(corpus), 4, n_workers=1)
    valid = AsyncDataLoader(
        TextDataset(corpus / "docs.jsonl", tokenizer="byte", seq_len=64), 8, n_workers=1, epochs=1
    )
    with train, valid:
        for step in range(1, 21):
            next(train)
            if step % 10 == 0:
                with train.pause("eval"):
                    evaluated = sum(batch.tokens for batch in valid)
        next(train)
        ours, theirs = train.stats(), valid.stats()
    assert ours.tokens == 21 * 256
    assert theirs.tokens == 2 * evaluated > 0
    assert ours.paused_s.keys() == {"eval"}
    assert not theirs.paused_s
    assert theirs.wait_s <= ours.paused_s["eval"]
    assert ours.wait_s <= ours.wall_s

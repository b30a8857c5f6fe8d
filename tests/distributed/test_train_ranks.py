"""The trainer on two real ranks: it trains as one process would, stops and resumes as one, on any number of ranks."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from penstock.train import checkpoint
from penstock.train.data import TrainData
from penstock.train.options import resolve
from penstock.watch.telemetry import Telemetry
from tests.distributed.launch import (
    SHOWCASE,
    SMALL,
    Ran,
    Run,
    bounded,
    places,
    positions,
    session,
    torchrun,
)

# Many runs are made for the first test that needs one of them.
pytestmark = pytest.mark.timeout(600)

CLOSE = {"rel": 2e-5, "abs": 1e-6}
"""Sums in another order: floating-point numbers that are otherwise the same."""
STOP_AT, KILL_AT = 5, 6

SIGNALLED = f"""
import os, signal, sys
sys.argv[0] = {str(SHOWCASE)!r}
number, at, *sys.argv[1:] = sys.argv[1:]
from penstock.train.loop import Trainer
real, count = Trainer.step, 0
def step(self, batches):
    global count
    count += 1
    if os.environ["RANK"] == "1" and count == int(at):
        os.kill(os.getpid(), int(number))
    return real(self, batches)
Trainer.step = step
from penstock.cli.train import main
main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def uneven(place: Path) -> Path:
    """Text of which one rank has more than the other."""
    folder = place / "uneven"
    folder.mkdir()
    for n, lines in enumerate((9, 40)):
        (folder / f"{n}.jsonl").write_text(
            "".join(json.dumps({"text": f"{n} {i} " * 20}) + "\n" for i in range(lines))
        )
    return folder


def usual(corpus: Path, *more: str) -> list[str]:
    # A rate that rises all the time does not depend on where a run is to end.
    return ["--dataset", str(corpus / "many"), *SMALL, "--lr-warmup", "1000", *more]


EVAL = ("--eval-every", "2", "--val-fraction", "0.3")


@pytest.fixture(scope="module")
def two(corpus: Path, place: Path, uneven: Path) -> dict[str, Ran]:
    """Runs of two ranks."""

    def steps(count: int, *more: str) -> list[str]:
        return usual(corpus, "--steps", str(count), *more)

    warm = {"NSA_FWE_WARMUP_BATCHES": "4"}
    local = ["--dataset", "fineweb_edu_local", "--local-path", str(corpus / "docs.jsonl")]
    runs = [
        Run("ddp", steps(12, "--save-every", "4", "--keep", "9", "--global-batch", "4")),
        Run("fsdp", steps(12, "--save-every", "4", "--keep", "9", "--fsdp")),
        Run("ddp prewarmed", steps(4, "--prewarm")),
        Run("fsdp prewarmed", steps(4, "--prewarm", "--fsdp")),
        Run("accumulated", steps(4, "--global-batch", "8")),
        Run("accumulated fsdp", steps(4, "--global-batch", "8", "--fsdp")),
        Run("evaluated", steps(4, *EVAL, "--eval-batches", "3")),
        Run("warm", [*local, *SMALL, "--steps", "2"], environment=[warm]),
        Run("finite", ["--dataset", str(uneven), *SMALL, "--set", "epochs=1"]),
        Run("elastic", steps(4, "--global-batch", "4")),
        Run("changing 1", steps(4), out="changing"),
        Run("changing 2", steps(8, "--resume", "--fsdp"), out="changing"),
        Run("changing 3", steps(12, "--resume"), out="changing"),
    ]
    return session(place / "two", runs, timeout_s=300)


@pytest.fixture(scope="module")
def one(corpus: Path, place: Path, two: dict[str, Ran]) -> dict[str, Ran]:
    """Runs of a single process, one of which goes on from two ranks."""

    def steps(count: int, *more: str) -> list[str]:
        return usual(corpus, "--steps", str(count), *more)

    lanes = ("--set", "lanes=2")
    runs = [
        Run("single", steps(12, "--global-batch", "4", *lanes)),
        Run("single accumulated", steps(4, "--global-batch", "8", *lanes)),
        Run(
            "single evaluated",
            steps(4, *EVAL, "--eval-batches", "3", "--global-batch", "4", *lanes),
        ),
        Run("elastic 2", steps(8, "--resume", "--global-batch", "4"), out="elastic"),
        Run("ddp of one", steps(4, "--ddp", "1", "--global-batch", "4", *lanes)),
        Run("fsdp of one", steps(4, "--fsdp", "--global-batch", "4", *lanes)),
    ]
    return session(place / "one", runs, ranks=0)


def signalled(
    corpus: Path, place: Path, number: int, at: int
) -> tuple[CompletedProcess[str], Path]:
    """A run of which rank 1 gets a signal in the middle of a step."""
    out = place / f"signal-{number}"
    script = place / f"signalled-{number}.py"
    script.write_text(SIGNALLED)
    words = f"--steps 100000 --save-every 4 --collective-timeout 20 --out {out}"
    return bounded(torchrun(script, str(number), str(at), *usual(corpus, *words.split()))), out


@pytest.fixture(scope="module")
def terminated(corpus: Path, place: Path) -> tuple[CompletedProcess[str], Path]:
    return signalled(corpus, place, signal.SIGTERM, STOP_AT)


@pytest.fixture(scope="module")
def killed(corpus: Path, place: Path) -> tuple[CompletedProcess[str], Path]:
    return signalled(corpus, place, signal.SIGKILL, KILL_AT)


@pytest.fixture(scope="module")
def stopped_at(terminated: Any, killed: Any) -> list[int]:
    """Where the interrupted runs had come to, before they are resumed."""
    steps = []
    for _, out in (terminated, killed):
        found = checkpoint.newest(out / "checkpoints")
        assert found is not None
        steps.append(found.step)
    return steps


@pytest.fixture(scope="module")
def again(corpus: Path, place: Path, one: dict[str, Ran], stopped_at: list[int]) -> dict[str, Ran]:
    """Two ranks go on: after a single process, and after signals."""
    more = usual(corpus, "--steps", "12", "--resume")
    runs = [
        Run("elastic 3", [*more, "--global-batch", "4"], out="elastic"),
        Run("after SIGTERM", more, out=f"signal-{signal.SIGTERM:d}"),
        Run("after SIGKILL", more, out=f"signal-{signal.SIGKILL:d}"),
    ]
    return session(place / "again", runs)


def succeeded(runs: dict[str, Ran], *names: str) -> list[Ran]:
    for name in names:
        assert set(runs[name].codes) == {0}, runs[name].told
    return [runs[name] for name in names]


@pytest.mark.parametrize(
    ("several", "alone"),
    [("ddp", "single"), ("fsdp", "single"), ("accumulated", "single accumulated"),
     ("accumulated fsdp", "single accumulated")],
)  # fmt: skip
def test_two_ranks_train_as_one_process_with_the_same_global_batch(
    two: dict[str, Ran], one: dict[str, Ran], several: str, alone: str
) -> None:
    (left,), (right,) = succeeded(two, several), succeeded(one, alone)
    assert len(left.losses()) == (12 if alone == "single" else 4)
    assert left.losses() == pytest.approx(right.losses(), **CLOSE)
    assert left.losses(1) == left.losses(0)
    norms = [
        {line["step"]: line["grad_norm"] for line in run.of("progress")} for run in (left, right)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_ranks_share_the_rows_of_one_process_and_no_row_twice(
    corpus: Path, two: dict[str, Ran], one: dict[str, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(world: int, rank: int, batches: int) -> tuple[list[Any], dict[str, Any]]:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("RANK", str(rank))
        given = {"dataset": str(corpus / "many"), "seq_len": 64, "batch": 2}
        options, resolved = resolve(None, given, overrides={"lanes": "2"})
        loader = TrainData(options, resolved).loader(Telemetry(), None)
        rows: list[Any] = []
        try:
            for _ in range(batches):
                batch = loader.next_batch(timeout=30)
                assert batch is not None
                # Spans share their ends: the last id of a row opens the next.
                rows += [tuple(row) for row in batch.inputs.tolist()]
            return rows, loader.state_dict()
        finally:
            loader.shutdown()

    first, second, whole = read(2, 0, 12), read(2, 1, 12), read(1, 0, 24)
    assert not set(first[0]) & set(second[0])
    assert sorted(first[0] + second[0]) == sorted(whole[0])
    assert two["ddp"].positions() == two["fsdp"].positions() == [first[1], second[1]]
    assert one["single"].positions() == [whole[1]]


def test_each_rank_warms_up_by_itself(two: dict[str, Ran]) -> None:
    (run,) = succeeded(two, "warm")
    for rank in (0, 1):
        assert [line["requested"] for line in run.of("fineweb_loader_warmup", rank)] == [4]
        assert len(run.losses(rank)) == 2


@pytest.mark.slow
def test_ranks_come_and_go_and_train_as_if_they_had_stayed(
    two: dict[str, Ran], one: dict[str, Ran], again: dict[str, Ran]
) -> None:
    (whole, first), (second,), (third,) = (
        succeeded(two, "ddp", "elastic"), succeeded(one, "elastic 2"), succeeded(again, "elastic 3")
    )  # fmt: skip
    assert [len(run.losses()) for run in (first, second, third)] == [4, 4, 4]
    together = first.losses() | second.losses() | third.losses()
    assert together == pytest.approx(whole.losses(), **CLOSE)
    for step, ranks in ((4, 2), (8, 1), (12, 2)):
        name = f"step-{step:08}"
        now, then = (checkpoint.read(run.folder / "checkpoints" / name) for run in (third, whole))
        assert (len(now.ranks), len(then.ranks)) == (ranks, 2)
        assert places(positions(now)) == places(positions(then))


def test_a_run_may_change_between_ddp_and_fsdp(two: dict[str, Ran]) -> None:
    whole, *parts = succeeded(two, "ddp", "changing 1", "changing 2", "changing 3")
    together = {step: loss for part in parts for step, loss in part.losses().items()}
    assert len(together) == 12
    assert together == pytest.approx(whole.losses(), **CLOSE)
    assert parts[0].losses() == {step: whole.losses()[step] for step in range(1, 5)}
    assert parts[2].positions() == whole.positions()


@pytest.mark.slow
def test_a_sigterm_to_one_rank_saves_on_all_and_ends_well(
    terminated: tuple[CompletedProcess[str], Path],
    stopped_at: list[int],
    two: dict[str, Ran],
    again: dict[str, Ran],
) -> None:
    done, _ = terminated
    assert done.returncode == 0, done.stderr[-3000:]
    assert stopped_at[0] == STOP_AT
    assert (
        f"stopped by another rank at step {STOP_AT}: saved; continue with --resume" in done.stdout
    )
    whole, resumed = two["ddp"], succeeded(again, "after SIGTERM")[0]
    assert resumed.losses() == {
        step: loss for step, loss in whole.losses().items() if step > STOP_AT
    }
    assert resumed.positions() == whole.positions()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_a_resume_is_exact(
    killed: tuple[CompletedProcess[str], Path],
    stopped_at: list[int],
    two: dict[str, Ran],
    again: dict[str, Ran],
) -> None:
    done, _ = killed
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert re.search(
        r"^penstock: .*rank 0 of 2 .*one of them has exited or hangs", done.stderr, re.MULTILINE
    ), done.stderr
    assert stopped_at[1] == 4
    whole, resumed = two["ddp"], succeeded(again, "after SIGKILL")[0]
    assert resumed.losses() == {step: loss for step, loss in whole.losses().items() if step > 4}
    assert resumed.positions() == whole.positions()


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_one_process_without_a_launcher_trains_alike_in_any_form(
    one: dict[str, Ran], form: str
) -> None:
    single, run = succeeded(one, "single", f"{form} of one")
    assert f"1 rank ({form})" in run.told[0]
    assert run.losses() == pytest.approx(
        {step: single.losses()[step] for step in range(1, 5)}, **CLOSE
    )


def test_ranks_with_unequal_data_end_at_the_same_step(two: dict[str, Ran]) -> None:
    (run,) = succeeded(two, "finite")
    ends = [max(run.losses(rank)) for rank in (0, 1)]
    assert ends[0] == ends[1] > 2
    assert f"the data ends after step {ends[0]}" in run.told[0]
    assert [state["batch"] for state in run.positions()] == [ends[0], ends[0]]


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_a_prewarm_changes_no_bit_of_what_follows(two: dict[str, Ran], form: str) -> None:
    cold, warm = succeeded(two, form, f"{form} prewarmed")
    assert len(warm.of("prewarm", 0)) == len(warm.of("prewarm", 1)) == 1
    assert warm.losses() == {step: cold.losses()[step] for step in range(1, 5)}
    early = checkpoint.read(cold.folder / "checkpoints" / "step-00000004")
    assert warm.positions() == positions(early)


def test_ranks_evaluate_to_the_loss_that_one_process_has(
    two: dict[str, Ran], one: dict[str, Ran]
) -> None:
    (several,), (alone,) = succeeded(two, "evaluated"), succeeded(one, "single evaluated")
    losses = [
        [(line["step"], line["loss"]) for line in several.of("eval", rank)] for rank in (0, 1)
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == [2, 4]
    expected = [line["loss"] for line in alone.of("eval")]
    assert [loss for _, loss in losses[0]] == pytest.approx(expected, **CLOSE)
    assert several.losses() == pytest.approx(alone.losses(), **CLOSE)

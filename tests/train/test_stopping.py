"""Runs that are killed, told to stop, or left without data: what they save, and how they go on."""

from __future__ import annotations

import random
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Fault, HubServer
from tests.train.conftest import serve
from tests.train.runs import SMALL, Child, Run, train

STEPS = 36
SEED = 4


@pytest.fixture(scope="module")
def whole(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to."""
    return train(tmp_path_factory.mktemp("whole") / "out", *command(docs)).good()


def command(docs: Path, *more: Any) -> tuple[Any, ...]:
    # Dropout, because random numbers have to go on where they were.
    return ("--dataset", docs, *SMALL, "--steps", STEPS, "--save-every", 3, "--dropout", 0.1, *more)


def endless(docs: Path, *more: Any) -> tuple[Any, ...]:
    """A run that does not end by itself before it is told to, however late that is on a busy machine."""
    # A rate that rises all the time does not depend on where a run is to end.
    return command(docs, "--steps", 100_000, "--lr-warmup", 100_000, *more)


def since(run: Run, step: int) -> dict[int, str]:
    return {number: loss for number, loss in run.losses().items() if number > step}


def copy(run: Run, to: Path) -> Path:
    """The same run's folder, to do something else with."""
    shutil.copytree(run.out, to)
    return to


# Killed


@pytest.mark.slow
def test_killed_again_and_again_a_run_goes_on_as_if_nothing_had_happened(
    whole: Run, docs: Path, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    out, at = tmp_path / "out", 0
    for resume in ((), ("--resume",)):
        kill_at = at + rng.randrange(5, 14)
        child = Child(out, *command(docs, *resume)).until(f"step {kill_at}/")
        run = child.send(signal.SIGKILL).end()
        assert run.code == -signal.SIGKILL
        told = run.losses()
        # The heartbeat is written by a thread of its own: of the last steps it may not have told.
        assert told == {
            step: loss for step, loss in whole.losses().items() if at < step <= at + len(told)
        }
        at = run.saved().step
        assert at % 3 == 0
        assert kill_at - 3 <= at
    last = train(out, *command(docs, "--resume")).good()
    assert f"resumed from {out}/checkpoints/step-{at:08}, step {at}\n" in last.said
    assert last.losses() == since(whole, at)
    assert last.position() == whole.position()


@pytest.mark.parametrize(
    "how", [("--prewarm",), ("--set", "prefetch=off"), ("--set", "n_workers=0")], ids=" ".join
)
def test_what_feeds_a_run_may_change_when_it_is_resumed(
    whole: Run, docs: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    named = whole.out / "checkpoints" / f"step-{STEPS - 6:08}"
    run = train(tmp_path / "out", *command(docs, "--resume", named, *how)).good()
    assert run.losses() == since(whole, STEPS - 6)
    assert run.position() == whole.position()


@pytest.fixture(scope="module")
def third(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of few steps, with checkpoints of steps 3, 6 and 9."""
    out = tmp_path_factory.mktemp("third") / "out"
    return train(out, "--dataset", docs, *SMALL, "--steps", 9, "--save-every", 3).good()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (("--seq-len", 64), "seq_len"),
        (("--size", "mini"), "'size': 'toy'"),
        (("--packing", "best_fit"), "packing"),
        (("--seed", 9), "seed"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_another_run_than_the_saved_one_is_refused_in_one_line(
    docs: Path, tmp_path: Path, third: Run, how: tuple[Any, ...], words: str
) -> None:
    out = copy(third, tmp_path / "out")
    run = train(out, "--dataset", docs, *SMALL, "--steps", 12, *how, "--resume")
    assert run.code == 1
    assert run.losses() == {}
    assert len(run.errors.splitlines()) == 1
    assert words in run.errors
    assert run.saved().step == 9


def test_without_room_for_checkpoints_training_goes_on_and_the_end_says_so(
    docs: Path, tmp_path: Path, third: Run
) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def no_folder(_: str) -> None:
        (out / "checkpoints").write_text("a file where the folder should be")

    on = {"step 1/": no_folder}
    run = train(out, "--dataset", docs, *SMALL, "--steps", 9, "--save-every", 3, on=on)
    assert run.code == 1
    assert run.losses() == third.losses()
    assert [line["step"] for line in run.of("save_failed")] == [3, 6, 9, 9]
    assert "WARNING: not saved: " in run.said
    assert str(out / "checkpoints") in run.of("save_failed")[0]["error"]
    assert not run.of("saved")


# Told to stop


def test_told_to_stop_it_saves_the_step_it_is_at_and_goes_on_from_there(
    docs: Path, tmp_path: Path
) -> None:
    run = Child(tmp_path / "out", *endless(docs)).until("step 8/").send(signal.SIGTERM).end().good()
    last = list(run.losses())[-1]
    assert run.saved().step == last
    assert f"stopped by SIGTERM at step {last}: saved; continue with --resume\n" in run.said
    assert "Metrics:" in run.said
    assert run.of("shutdown")[0]["reason"] == "stopped"
    rest = train(run.out, *endless(docs, "--steps", last + 4, "--resume")).good()
    plain = train(tmp_path / "plain" / "out", *endless(docs, "--steps", last + 4)).good()
    assert list(rest.losses()) == list(range(last + 1, last + 5))
    assert rest.losses() == since(plain, last)


def test_interrupted_it_saves_and_says_so_by_its_exit_code(docs: Path, tmp_path: Path) -> None:
    run = Child(tmp_path / "out", *endless(docs)).until("step 8/").send(signal.SIGINT).end()
    assert run.code == 130, run.errors
    assert run.errors == ""
    assert run.saved().step == list(run.losses())[-1]


@pytest.fixture
def silent() -> Iterator[HubServer]:
    """A Hub that takes every request and answers none."""
    with HubServer() as hub:
        hub.fault(Fault("silence", method="*", times=None))
        yield serve(hub)


def test_told_to_stop_while_it_waits_for_a_source_that_hangs_it_ends(
    silent: HubServer, tmp_path: Path
) -> None:
    how = ("--dataset", "fineweb_edu", *SMALL, "--loader-timeout", 60, "--grace", 20)
    child = Child(tmp_path / "out", *how, HF_ENDPOINT=silent.endpoint).until("toy model")
    run = child.send(signal.SIGTERM).end().good()
    assert run.losses() == {}
    assert run.errors == ""
    assert "saved" not in run.said
    assert not (run.out / "checkpoints").exists()


# Without data


@pytest.fixture
def port() -> int:
    """A port where nobody listens, as yet."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        number: int = reserved.getsockname()[1]
    return number


@pytest.mark.slow
def test_without_a_server_it_ends_with_one_clear_line(port: int, tmp_path: Path) -> None:
    how = ("--dataset", "fineweb_edu", *SMALL, "--steps", 5, "--loader-timeout", 2)
    run = Child(tmp_path / "out", *how, HF_ENDPOINT=f"http://127.0.0.1:{port}").end()
    assert run.code == 1
    assert run.losses() == {}
    *before, last = run.errors.splitlines()
    assert last.startswith("penstock: no data: no batch within 2 s")
    assert "Check that the server can be reached, or allow more time" in last
    # The heartbeat's own word of it may come before the end or not.
    assert all(
        "Connection refused; next attempt" in line or line.startswith("health: fail")
        for line in before
    ), before


LOCAL = ("--dataset", "fineweb_edu_local", "--local-path", "/nowhere/docs.jsonl")


@pytest.mark.parametrize(
    ("how", "msg", "words"),
    [
        (LOCAL, "fineweb_loader_error", "/nowhere/docs.jsonl"),
        (("--text-field", "body"), "loader_error", "body"),
        (("--tokenizer", "/nowhere/x.json"), "loader_error", "the vocabulary could not be loaded"),
    ],
    ids=["opening", "reading", "vocabulary"],
)
def test_a_mistake_is_an_error_and_no_reason_for_synthetic_data(
    docs: Path, tmp_path: Path, how: tuple[str, ...], msg: str, words: str
) -> None:
    given = how if "--dataset" in how else ("--dataset", str(docs), *how)
    run = train(tmp_path / "out", *given, *SMALL, "--steps", 3, "--synthetic-on-fail")
    assert run.code == 1, run.said
    assert len(run.errors.splitlines()) == 1
    assert words in run.errors
    assert run.losses() == {}
    (error,) = run.of(msg)
    assert error.keys() >= {"error", "stage", "where"}
    assert words in error["error"]

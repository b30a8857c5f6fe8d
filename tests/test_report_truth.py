"""A report says of a run what is true of it: of all its ranks, of no other run, of its loss and its data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.watch.page.numbers import rank_numbers
from penstock.watch.page.plots import rank_figures
from penstock.watch.page.run import read_run
from penstock.watch.report import Report, report

STILL_GOING = "There is no shutdown line"


def line(step: int, rank: int = 0, msg: str = "progress", **fields: Any) -> dict[str, Any]:
    known = {
        "ts": 1.79e9 + step,
        "iso": "",
        "mono": float(step),
        "pid": 1,
        "rank": rank,
        "step": step,
        "msg": msg,
    }
    if msg == "progress":
        known |= {"dt_step_s": 0.25, "dt_fetch_s": 0.01, "tokens": 1000, "loss": 2.0}
    return known | fields


def written(folder: Path, lines: list[dict[str, Any]], rank: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"heartbeat_rank{rank}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def one(folder: Path, *lines: dict[str, Any]) -> tuple[Report, dict[str, Any]]:
    """The report on a run of one rank, and what it says of that."""
    made = report(written(folder, list(lines)))
    (rank,) = made.numbers["ranks"]
    return made, rank


def warned(made: Report) -> list[str]:
    return [said for said in made.numbers["warnings"] if not said.startswith(STILL_GOING)]


def loss_caption(folder: Path) -> str:
    (rank,) = read_run([folder]).ranks
    return str(rank_figures(rank, rank_numbers(rank))["loss"]["alt"])


# Ranks


def ranks(
    folder: Path, those: range | tuple[int, ...], world: int, begin: int = 0, **fields: Any
) -> None:
    for rank in those:
        lines = [line(begin, rank, "boot", world_size=world, **fields)]
        lines += [line(step, rank) for step in range(begin + 1, begin + 100)]
        lines.append(line(begin + 100, rank, "shutdown", reason="done"))
        path = folder / f"heartbeat_rank{rank}.jsonl"
        before = path.read_text() if path.exists() else ""
        folder.mkdir(exist_ok=True)
        path.write_text(before + "".join(json.dumps(one) + "\n" for one in lines))


def test_ranks_that_left_no_heartbeat_are_named(tmp_path: Path) -> None:
    ranks(tmp_path, (0, 5), 8)
    made = report(tmp_path)
    assert (len(made.numbers["ranks"]), made.numbers["ranks_expected"]) == (2, 8)
    said = "6 of 8 ranks left no heartbeat here: 1, 2, 3, 4, 6, 7. What is said here is of those that did."
    assert made.numbers["warnings"] == [said]
    assert said in made.summary
    assert "2 of 8 ranks" in made.html


def test_a_run_of_which_all_ranks_are_there_is_not_blamed(tmp_path: Path) -> None:
    ranks(tmp_path, range(4), 4)
    made = report(tmp_path)
    assert (made.numbers["warnings"], made.numbers["ranks_expected"]) == ([], 4)


def test_a_run_that_went_on_with_fewer_ranks_has_as_many_as_it_has_now(tmp_path: Path) -> None:
    ranks(tmp_path, range(4), 8)
    assert report(tmp_path).numbers["ranks_expected"] == 8
    ranks(tmp_path, range(2), 2, begin=100, resumed=True)
    made = report(tmp_path)
    assert made.numbers["ranks_expected"] == 2
    assert not any("left no heartbeat" in said for said in made.numbers["warnings"])


@pytest.mark.parametrize("strange", [None, "many", -3, 0, 1e300, True, [8]])
def test_a_number_of_ranks_that_cannot_be_is_not_known(tmp_path: Path, strange: Any) -> None:
    made, _ = one(tmp_path, line(0, msg="boot", world_size=strange), line(1))
    assert made.numbers["ranks_expected"] is None


def test_of_very_many_missing_ranks_a_few_are_named(tmp_path: Path) -> None:
    made, _ = one(tmp_path, line(0, msg="boot", world_size=4096), line(1))
    assert warned(made)[0].startswith("4,095 of 4,096 ranks left no heartbeat here: 1, 2, 3,")
    assert "12 and 4,083 more." in warned(made)[0]


# Runs


def trouble(**fields: Any) -> list[dict[str, Any]]:
    """A run that ended before its first step."""
    return [
        line(0, msg="boot", **fields),
        line(0, msg="loader_error", error="403 forbidden"),
        line(0, msg="fallback", to="synthetic", reason="x"),
        line(0, msg="shutdown", reason="error"),
    ]


def run(begin: int = 1, **fields: Any) -> list[dict[str, Any]]:
    return [
        line(begin - 1, msg="boot", **fields),
        *(line(step) for step in range(begin, begin + 99)),
        line(begin + 98, msg="shutdown", reason="done"),
    ]


def test_a_run_is_not_blamed_for_an_earlier_one_without_a_step(tmp_path: Path) -> None:
    made, rank = one(tmp_path, *trouble(), *run())
    assert (rank["events"], rank["earlier_runs"], rank["sessions"]) == (
        {"boot": 1, "shutdown": 1},
        1,
        1,
    )
    assert warned(made) == [
        "One earlier run wrote to the same file; this report leaves what they wrote out."
    ]


def test_nor_for_several_that_came_after_one_with_steps(tmp_path: Path) -> None:
    _, rank = one(tmp_path, *run(), *trouble(), *trouble(), *run())
    assert (rank["events"], rank["earlier_runs"], rank["steps"]) == (
        {"boot": 1, "shutdown": 1},
        3,
        99,
    )


def test_what_a_run_met_before_its_first_step_is_its_own(tmp_path: Path) -> None:
    _, rank = one(tmp_path, *trouble(), *run(resumed=True))
    assert (rank["earlier_runs"], rank["events"]["error"]) == (0, 1)
    _, rank = one(tmp_path, *run(), *trouble(), *run(100))
    assert (rank["earlier_runs"], rank["events"]["error"], rank["sessions"]) == (0, 1, 3)


# The loss


def losses(bad: set[int], n: int = 99, word: str = "nan") -> list[dict[str, Any]]:
    return [line(step, loss=word if step in bad else 2.0) for step in range(1, n + 1)]


@pytest.mark.parametrize(
    ("bad", "told", "caption"),
    [
        (
            {10},
            "The loss was not a finite number at step 10; it is finite again.",
            "It is not finite at step 10.",
        ),
        (
            {10, 20, 21},
            "The loss was not a finite number at 3 steps, first at step 10; it is finite again.",
            "It is not finite at 3 steps, first at step 10.",
        ),
        (
            set(range(60, 100)),
            "The loss is not a finite number from step 60 on.",
            "It is not finite from step 60 on.",
        ),
        (
            {10, 98, 99},
            "The loss is not a finite number at 3 steps, first at step 10, and from step 98 on.",
            "It is not finite at 3 steps, first at step 10, and from step 98 on.",
        ),
    ],
)
def test_where_the_loss_is_not_finite_is_told_as_it_is(
    tmp_path: Path, bad: set[int], told: str, caption: str
) -> None:
    made, rank = one(tmp_path, *losses(bad))
    assert (rank["loss_not_finite"], rank["loss_not_finite_steps"]) == (min(bad), len(bad))
    assert warned(made) == [told]
    assert loss_caption(tmp_path).endswith(caption)


def test_a_loss_that_was_redone_after_a_resume_counts_as_it_is_now(tmp_path: Path) -> None:
    begun = [line(0, msg="boot"), *losses(set(range(60, 80)), 79)]
    made, rank = one(
        tmp_path,
        *begun,
        line(50, msg="boot", resumed=True),
        *(line(step) for step in range(51, 200)),
    )
    assert (rank["loss_not_finite"], rank["loss_not_finite_steps"], warned(made)) == (None, 0, [])
    assert "finite from" not in loss_caption(tmp_path)
    made, rank = one(
        tmp_path,
        *begun,
        line(69, msg="boot", resumed=True),
        *(line(step) for step in range(70, 200)),
    )
    assert (rank["loss_not_finite"], rank["loss_not_finite_steps"]) == (60, 10)
    assert rank["loss_not_finite_from"] is None


@pytest.mark.parametrize("loss", [5e18, -5e18, 1e300, 1.7e308])
def test_a_loss_is_a_number_however_large(tmp_path: Path, loss: float) -> None:
    made, rank = one(tmp_path, *(line(step, loss=loss) for step in range(1, 50)))
    assert (rank["last_loss"], rank["loss_not_finite"], warned(made)) == (loss, None, [])
    assert f"{loss:.4g}" in loss_caption(tmp_path)


def test_a_word_that_is_no_number_is_no_loss(tmp_path: Path) -> None:
    made, rank = one(tmp_path, *(line(step, loss="not yet") for step in range(1, 50)))
    assert (rank["last_loss"], rank["loss_not_finite"], warned(made)) == (None, None, [])


# Data


def test_the_way_back_to_data_is_not_told_as_a_fallback(tmp_path: Path) -> None:
    steps = [line(step) for step in range(1, 50)]
    made, rank = one(tmp_path, *steps, line(50, msg="fallback", to="data", reason="flows again"))
    assert (rank["fell_back"], rank["events"]) == (False, {"fallback": 1})
    assert warned(made) == [
        "It came back from synthetic data; since when it had that is not recorded."
    ]
    away = line(49, msg="fallback", to="synthetic", reason="no batch")
    made, rank = one(
        tmp_path, *steps, away, line(50, msg="fallback", to="data", reason="flows again")
    )
    assert rank["fell_back"] is True
    assert warned(made) == ["It fell back to synthetic data; see the events."]


# Plots


def test_a_name_in_a_caption_is_shown_as_it_is(tmp_path: Path) -> None:
    ready = line(0, msg="loader_ready", dt=1.0, ledger={'open "a" & <b>': 1.0})
    path = written(tmp_path, [line(0, msg="boot"), ready, line(1)])
    (rank,) = read_run([path]).ranks
    ledger = rank_figures(rank, rank_numbers(rank))["ledger"]
    assert 'the longest part was open "a" & <b>, 1 s.' in ledger["alt"]  # the page sets it as text
    assert ledger["data"][0]["y"] == ["open &quot;a&quot; &amp; &lt;b&gt;"]  # plotly reads tags


@pytest.mark.parametrize("capacity", [1e-320, 1e-9, 0, -1])
def test_a_queue_that_cannot_be_is_not_drawn_as_a_share(tmp_path: Path, capacity: float) -> None:
    written(tmp_path, [line(step, queue_depth=3, queue_capacity=capacity) for step in range(1, 60)])
    (rank,) = read_run([tmp_path]).ranks
    queue = rank_figures(rank, rank_numbers(rank))["queue"]
    assert queue["layout"]["yaxis"]["title"]["text"] == "batches ready"


# The command


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("latin-1", "node?1 \xe9"), ("ascii", None), ("utf-8", "node\u20261 \xe9")],
)
def test_what_an_output_has_no_character_for_does_not_end_the_command(
    tmp_path: Path, encoding: str, shown: str | None
) -> None:
    words = "fetch on node\u20261 \xe9"
    path = written(tmp_path, [*run()[:-1], line(99, msg="shutdown", reason="done", verdict=words)])
    for command in (
        ["report", str(path), "-o", str(tmp_path / "page.html")],
        ["watch", str(path), "--once"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *command],
            capture_output=True,
            timeout=120,
            check=False,
            env={"PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)},
        )
        assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode("latin-1")
        if shown is not None:
            assert shown in done.stdout.decode(encoding)

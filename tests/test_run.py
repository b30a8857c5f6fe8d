"""A run's heartbeats as data: columns, attempts, ranks, and one answer about its steady state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, SourceError
from penstock.watch.health import judge_rank
from penstock.watch.run import LiveView, Run, read_run
from penstock.watch.steady_state import analyze_steps
from tests.recorded import Recording, lines, write_run


def progress(step: int, **fields: Any) -> dict[str, Any]:
    known = {"ts": 1e9 + step, "iso": "", "mono": 50.0 + step, "pid": 1, "rank": 0, "step": step}
    return known | {"msg": "progress"} | fields


def run_of(*told: dict[str, Any]) -> Run:
    run = Run()
    for line in told:
        run.add(line)
    return run


def test_columns_have_a_number_for_each_step_and_nan_where_it_is_missing() -> None:
    run = run_of(
        progress(1, loss=3.0, dt_step_s=2.0),
        progress(2, loss="nan", wait_by_stage={"fetch": 0.25}),
        progress(3, loss=2.0, paused={"eval": 0.25}),
    )
    rank = run.first
    assert rank.steps.tolist() == [1, 2, 3]
    assert rank.column("loss").tolist() == [3.0, math.inf, 2.0]
    assert rank.column("dt_step_s").tolist() == [2.0, 1.0, 0.75]  # by the clock, without pauses
    np.testing.assert_equal(rank.column("wait_by_stage/fetch"), [math.nan, 0.25, math.nan])
    assert np.isnan(rank.column("unknown")).all()
    assert (rank.latest("loss"), rank.latest("unknown")) == (2.0, None)


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=240, resumed_at=150))
    rank = read_run([tmp_path]).first
    assert rank.steps.tolist() == list(range(1, 241))
    assert [attempt.start for attempt in rank.attempts] == [0, 150]
    assert rank.boot["resumed"] is True
    assert rank.analysis().first_step == 151


def test_a_new_run_in_the_file_of_an_old_one_stands_alone() -> None:
    boot = {**progress(0), "msg": "boot"}
    run = run_of(boot, progress(1), progress(2), boot | {"host": "b"}, progress(1, loss=1.0))
    rank = run.first
    assert (len(rank), len(rank.attempts)) == (1, 1)
    assert [event["msg"] for event in rank.events] == ["boot"]
    assert rank.boot["host"] == "b"


def test_lines_added_one_by_one_give_the_same_as_the_files(tmp_path: Path) -> None:
    recording = Recording(steps=120, ranks=2, stalls=(40,))
    write_run(tmp_path, recording)
    read = read_run([tmp_path])
    added = run_of(*(line for rank in range(2) for line in lines(recording, rank)))
    assert list(read.ranks) == [0, 1]
    for rank in (0, 1):
        np.testing.assert_equal(read.ranks[rank].column("loss"), added.ranks[rank].column("loss"))
        assert read.ranks[rank].events == added.ranks[rank].events
    assert read.analysis() == added.analysis()


def test_rotated_and_torn_files_are_read_whole(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, Recording(steps=60, torn=2))
    text = path.read_bytes().splitlines(keepends=True)
    path.with_name(f"{path.name}.1").write_bytes(b"".join(text[:50]))
    path.write_bytes(b"".join(text[50:]))
    run = read_run([path])
    assert (len(run.first), run.skipped) == (60, 3)


@pytest.mark.parametrize(
    "recording",
    [
        *(Recording(steps=steps) for steps in (20, 38, 44, 47, 240)),
        Recording(steps=240, ranks=4),
        Recording(steps=240, slower_from=170),
        Recording(steps=240, resumed_at=150),
    ],
    ids=lambda recording: f"{recording.steps}-{recording.ranks}",
)
def test_trainer_watch_health_and_json_agree_on_the_steady_state(recording: Recording) -> None:
    told = [line for rank in range(recording.ranks) for line in lines(recording, rank)]
    run = run_of(*told)
    found = run.analysis()
    rank = run.first
    start = rank.attempts[-1].start
    columns = (
        rank.column(name)[start:] for name in ("dt_step_s", "tokens", "dt_fetch_s", "compiles")
    )
    trainer = analyze_steps(*columns, first_step=int(rank.steps[start]))
    assert trainer.scaled(recording.ranks) == found
    assert found.headline() in LiveView(run).title()
    assert json.loads(json.dumps(found.as_dict()))["steady_step"] == found.steady_step
    verdict = judge_rank(line for line in told if line["rank"] == 0)
    assert verdict.grace == (found.onset is None)


def test_the_rate_of_a_run_is_that_of_all_its_ranks() -> None:
    one, four = (
        run_of(*(line for rank in range(ranks) for line in lines(Recording(ranks=ranks), rank)))
        for ranks in (1, 4)
    )
    assert (four.world_size, four.missing()) == (4, "")
    rates = [run.analysis().tokens_per_s for run in (one, four)]
    assert None not in rates
    assert rates[1] == pytest.approx(4 * (rates[0] or 0.0), rel=0.05)
    del four.ranks[2]
    assert four.missing() == "1 of 4 ranks left no heartbeat here: 2"


def test_files_that_are_not_one_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        read_run([tmp_path / "nowhere"])
    for name in "ab":
        write_run(tmp_path / name, Recording(steps=3))
    with pytest.raises(ConfigError, match="both of rank 0"):
        read_run([tmp_path / "a", tmp_path / "b"])

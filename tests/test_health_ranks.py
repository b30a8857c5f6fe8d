"""`penstock health` on a folder is about a run, and a run is all of its ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from penstock.watch.line import encode
from tests import commands

SAID = "6 of 8 ranks left no heartbeat here: 1, 2, 3, 4, 6, 7"


def run_health(*args: str | Path) -> commands.Done:
    return commands.run("health", *args)


def line(step: int, rank: int, msg: str = "progress", age_s: float = 1.0, **fields: Any) -> bytes:
    known = {
        "ts": time.time() - age_s,
        "iso": "",
        "mono": float(step),
        "pid": 1,
        "rank": rank,
        "step": step,
    }
    return encode(known | {"msg": msg, "dt_step_s": 0.25, "tokens": 1000, "loss": 2.0} | fields)


def written(
    folder: Path, ranks: range | tuple[int, ...], world: int | None, **how: Any
) -> list[Path]:
    """Ranks that have begun with so many, after what is in their files already."""
    paths = [folder / f"heartbeat_rank{rank}.jsonl" for rank in ranks]
    for rank, path in zip(ranks, paths, strict=True):
        with path.open("ab") as file:
            file.write(line(0, rank, "boot", world_size=world, **how))
            file.writelines(line(step, rank, **how) for step in range(1, 20))
    return paths


def test_a_folder_without_some_ranks_cannot_be_judged(tmp_path: Path) -> None:
    written(tmp_path, (0, 5), 8)
    done = run_health(tmp_path)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (2, "cannot tell")
    assert done.stderr.splitlines() == [f"cannot tell: {SAID}"]
    told = json.loads(run_health(tmp_path, "--json").stdout)
    assert (told["verdict"], told["exit_code"], told["unknown"]) == ("unknown", 2, [SAID])
    assert [rank["world_size"] for rank in told["ranks"]] == [8, 8]


def test_a_rank_that_is_not_well_outweighs_those_that_are_missing(tmp_path: Path) -> None:
    written(tmp_path, (0, 5), 8, loss="nan")
    done = run_health(tmp_path)
    assert done.exit_code == 1
    assert SAID in done.stderr


def test_a_run_that_went_on_with_fewer_ranks_is_not_blamed_for_those_it_had(tmp_path: Path) -> None:
    written(tmp_path, range(2), 8, age_s=5.0)
    assert run_health(tmp_path).exit_code == 2
    written(tmp_path, range(1), 1, resumed=True)
    assert run_health(tmp_path).exit_code == 0


def test_the_ranks_of_a_long_run_are_known_from_the_start_of_its_file(tmp_path: Path) -> None:
    (path,) = written(tmp_path, (0,), 4)
    with path.open("ab") as file:
        file.writelines(line(step, 0, text="x" * 100_000) for step in range(20, 220))
    assert path.stat().st_size > 18 * 2**20
    done = run_health(tmp_path)
    assert (done.exit_code, done.stderr) == (
        2,
        "cannot tell: 3 of 4 ranks left no heartbeat here: 1, 2, 3\n",
    )

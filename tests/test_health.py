"""The health gate: no alarm before a run is warm, one in the stated time after it goes wrong; and its command."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.watch.health import HealthGate, Limits, RankHealth, judge_rank
from penstock.watch.heartbeat import encode, iso
from tests import commands

STEP_S = 0.5
TOKENS = 4096
RATE = TOKENS / STEP_S
LIMITS = Limits(min_tokens_per_s=0.7 * RATE, max_data_wait_pct=10.0, max_fetch_p95_ms=200.0)
START = 1_790_000_000.0


class Run:
    """Lines as a run would write them: each step takes so long, and something may happen at it."""

    def __init__(self, seed: int = 0, *, pid: int = 100, begin: float = 0.0) -> None:
        self._random = random.Random(seed)
        self.mono = 1000.0 + begin
        self.pid = pid
        self.step = 0
        self.compiles = 0

    def line(self, msg: str, **fields: Any) -> dict[str, Any]:
        ts = START + self.mono
        first = {
            "ts": ts,
            "iso": iso(ts),
            "mono": self.mono,
            "pid": self.pid,
            "rank": 0,
            "step": self.step,
            "msg": msg,
        }
        return first | fields

    def steps(
        self,
        n: int,
        times: float | Callable[[int], float] = 1.0,
        *,
        wait: float = 0.01,
        compiling: bool = False,
        **more: Any,
    ) -> Iterator[dict[str, Any]]:
        """`times`: how much longer than a steady step; `wait`: the share of a step that is waiting for data."""
        for i in range(n):
            longer = times(i) if callable(times) else times
            dt = STEP_S * longer * self._random.uniform(0.95, 1.05)
            self.mono += dt
            self.step += 1
            self.compiles += compiling
            fields = {
                "loss": 2.0,
                "tokens": TOKENS,
                "dt_step_s": dt,
                "dt_fetch_s": wait * dt,
                "compiles": self.compiles,
            }
            yield self.line("progress", **(fields | more))

    def warm_up(self) -> Iterator[dict[str, Any]]:
        yield self.line("boot")
        yield from self.steps(5, 60.0, compiling=True)
        yield from self.steps(10, lambda i: 2.0 - i / 10)
        yield from self.steps(60)


def fed(gate: HealthGate, lines: Iterator[dict[str, Any]]) -> list[RankHealth]:
    """The verdict after each line."""
    verdicts = []
    for line in lines:
        gate.add(line)
        verdicts.append(gate.verdict())
    return verdicts


def first_fail(run: Run, verdicts: list[RankHealth], lines: list[dict[str, Any]]) -> float | None:
    return next(
        (line["mono"] for line, v in zip(lines, verdicts, strict=True) if v.status == "fail"), None
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_alarm_during_compile_steps_at_the_start_and_in_the_middle(seed: int) -> None:
    run, gate = Run(seed), HealthGate(LIMITS)
    lines = [*run.warm_up(), *run.steps(200)]
    lines += [
        *run.steps(4, 60.0, compiling=True),
        *run.steps(200),
        *run.steps(1, 60.0, compiling=True),
        *run.steps(100),
    ]
    verdicts = fed(gate, iter(lines))
    assert {verdict.status for verdict in verdicts} == {"ok"}
    changes = [(a.grace, b.grace) for a, b in pairwise(verdicts) if a.grace != b.grace]
    assert changes == [(True, False), (False, True)] * 2 + [(True, False)]
    events = [(msg, fields.get("grace")) for _, _, msg, fields in gate.take_events()]
    assert events.count(("steady_state", None)) == 3
    assert [grace for msg, grace in events if msg == "health"] == [False, True] * 2 + [False]


@pytest.mark.parametrize("slower", [1.5, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_injected_slow_down_is_an_alarm_within_the_stated_time(seed: int, slower: float) -> None:
    run, gate = Run(seed), HealthGate(LIMITS)
    assert {verdict.status for verdict in fed(gate, iter([*run.warm_up(), *run.steps(200)]))} == {
        "ok"
    }
    begun = run.mono
    lines = list(run.steps(100, slower))
    at = first_fail(run, fed(gate, iter(lines)), lines)
    step_s = STEP_S * slower * 1.05
    stated = max(LIMITS.for_s, (LIMITS.for_steps + 1) * step_s) + step_s + LIMITS.for_s / 30
    assert at is not None
    assert at - begun <= stated
    assert "tokens/s" in gate.verdict().reasons[0]
    assert "judged over 30 s and at least 10 steps" in gate.verdict().reasons[0]
    assert gate.take_events()[-1][3]["status"] == "fail"
    verdicts = fed(gate, run.steps(200))
    assert verdicts[-1].status == "ok"
    back = [b.status for a, b in pairwise(verdicts) if a.status != b.status]
    assert back == ["ok"]  # once, not to and fro


def test_data_wait_and_fetch_are_judged_each_by_its_own_limit() -> None:
    for limits, reason in [
        (Limits(max_data_wait_pct=10.0), "data wait 30.0 %, limit 10;"),
        (Limits(max_fetch_p95_ms=100.0), "ms, limit 100;"),
    ]:
        run, gate = Run(), HealthGate(limits)
        assert {
            verdict.status for verdict in fed(gate, iter([*run.warm_up(), *run.steps(100)]))
        } == {"ok"}
        assert fed(gate, run.steps(100, wait=0.3))[-1].status == "fail"
        assert reason in gate.verdict().reasons[0]


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", float("nan")])
def test_a_loss_that_is_not_finite_fails_at_once_in_the_grace_period_too(loss: Any) -> None:
    run, gate = Run(), HealthGate(LIMITS)
    fed(gate, iter([run.line("boot"), *run.steps(3), *run.steps(1, loss=loss)]))
    verdict = gate.verdict()
    assert (verdict.status, verdict.grace) == ("fail", True)
    assert "since step 4" in verdict.reasons[0]
    assert (
        judge_rank(
            [run.line("boot"), *run.steps(1, loss=loss)], limits=Limits(finite_loss=False)
        ).status
        == "ok"
    )
    assert fed(gate, run.steps(1))[-1].status == "ok"


def test_age_is_judged_while_a_run_goes_on_and_not_when_it_has_ended() -> None:
    run = Run()
    lines = [*run.warm_up(), run.line("beat", since_step_s=1.0)]
    now = START + run.mono
    assert judge_rank(lines, now + 59).status == "ok"
    old = judge_rank(lines, now + 3600)
    assert (old.status, old.age_s) == ("fail", 3600)
    assert "no sign of life for 3,600 s, limit 60 s" in old.reasons[0]
    ended = judge_rank([*lines, run.line("shutdown", reason="end")], now + 3600)
    assert (ended.status, ended.ended) == ("ok", "end")
    assert judge_rank(lines, now - 100).age_s == 0  # the clocks of two hosts


def test_synthetic_data_is_a_warning_and_an_error_of_the_loader_a_failure() -> None:
    run = Run()
    lines = [*run.warm_up(), run.line("fallback", to="synthetic", reason="timeout"), *run.steps(1)]
    assert judge_rank(lines).status == "warn"
    assert "synthetic data since step 75: timeout" in judge_rank(lines).reasons[0]
    assert judge_rank([*lines, run.line("fallback", to="data", reason="")]).status == "ok"
    failed = judge_rank(
        [*run.warm_up(), run.line("fineweb_loader_error", stage="fetch", error="503")]
    )
    assert (failed.status, failed.reasons) == ("fail", ("the loader failed at fetch: 503",))


def test_fields_of_any_kind_do_not_break_the_gate() -> None:
    run, gate = Run(), HealthGate(LIMITS)
    names = ("dt_step_s", "tokens", "compiles", "paused", "dt_fetch_s", "world_size")
    values: list[Any] = [None, "x", -1, 1e400, True, [], {}, 10**400]
    for value in values:
        gate.add(run.line("boot", **dict.fromkeys(names, value)))
        gate.add(run.line("progress", **dict.fromkeys(names, value)))
        gate.add(run.line("beat", since_step_s=value))
    assert gate.verdict(1.0).status == "ok"


@pytest.mark.parametrize(
    "wrong", [{"min_tokens_per_s": -1.0}, {"for_steps": 0}, {"grace_s": None}], ids=str
)
def test_limits_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


# The command


def run_health(*args: str | Path) -> commands.Done:
    return commands.run("health", *args)


def written(
    folder: Path, lines: list[dict[str, Any]], rank: int = 0, *, age_s: float = 5.0
) -> Path:
    """A file whose last line is so old."""
    shift = time.time() - age_s - lines[-1]["ts"]
    path = folder / f"heartbeat_rank{rank}.jsonl"
    path.write_bytes(
        b"".join(encode(line | {"ts": line["ts"] + shift, "rank": rank}) for line in lines)
    )
    return path


def test_a_run_that_is_well_gives_0_and_one_that_is_not_1(tmp_path: Path) -> None:
    run = Run()
    lines = [*run.warm_up(), *run.steps(100)]
    written(tmp_path, lines)
    path = written(tmp_path, lines, 1)
    done = run_health(
        tmp_path, "--min-tokens-per-s", "1000", "--max-data-wait", "5", "--max-fetch-p95-ms", "100"
    )
    assert done.exit_code == 0, done.output
    rows = done.stdout.splitlines()
    assert [row.split(":")[0] for row in rows] == ["rank 0", "rank 1", "healthy"]
    assert "data wait 1.0 %" in rows[0]
    path.write_bytes(path.read_bytes() + b'{"ts": 17')
    done = run_health(tmp_path / "heartbeat*.jsonl", "--min-tokens-per-s", "1000000")
    assert done.exit_code == 1
    assert "limit 1,000,000" in done.stdout
    assert done.stdout.splitlines()[-1] == "unhealthy: 2 of 2 ranks"


def test_a_run_that_ended_too_early_for_its_limits_says_so(tmp_path: Path) -> None:
    run = Run()
    lines = [*run.warm_up(), *run.steps(2), run.line("shutdown", reason="end")]
    written(tmp_path, lines)
    done = run_health(tmp_path, "--min-tokens-per-s", "1000000")
    assert done.exit_code == 0, done.output
    assert "too short to judge" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1] == "healthy, but too short to judge"


def test_a_dead_run_gives_1_and_an_ended_one_0(tmp_path: Path) -> None:
    run = Run()
    lines = [*run.warm_up()]
    written(tmp_path, lines, age_s=500)
    assert run_health(tmp_path).exit_code == 1
    assert run_health(tmp_path, "--max-age", "1000").exit_code == 0
    written(tmp_path, [*lines, run.line("shutdown", reason="end")], age_s=500)
    done = run_health(tmp_path)
    assert (done.exit_code, "ended: end" in done.stdout) == (0, True)


def test_a_run_whose_data_failed_before_its_first_step_is_unwell(tmp_path: Path) -> None:
    run = Run()
    failed = run.line("fineweb_loader_error", error="SourceError: no files", stage="open", where="")
    written(tmp_path, [run.line("boot"), failed, run.line("shutdown", reason="error")])
    done = run_health(tmp_path)
    assert done.exit_code == 1
    assert "the loader failed at open: SourceError: no files" in done.stdout


def test_json_has_the_same(tmp_path: Path) -> None:
    run = Run()
    written(tmp_path, [*run.warm_up(), *run.steps(100)])
    done = run_health(tmp_path, "--json", "--min-tokens-per-s", "1e9")
    told = json.loads(done.stdout)
    assert (told["verdict"], told["exit_code"], done.exit_code) == ("fail", 1, 1)
    (rank,) = told["ranks"]
    assert (rank["rank"], rank["status"], rank["step"], rank["grace"]) == (0, "fail", 175, False)
    assert rank["tokens_per_s"] == pytest.approx(RATE, rel=0.05)
    assert json.loads(run_health(tmp_path / "none", "--json").stdout)["verdict"] == "unknown"


# A folder holds a run, and a run is all of its ranks


def started(folder: Path, ranks: Sequence[int], world: int, **fields: Any) -> list[Path]:
    """Append a start of these ranks to their files."""
    paths = [folder / f"heartbeat_rank{rank}.jsonl" for rank in ranks]
    for rank, path in zip(ranks, paths, strict=True):
        run = Run()
        run.mono = time.time() - START - 20
        lines = [run.line("boot", world_size=world), *run.steps(19, **fields)]
        with path.open("ab") as file:
            file.writelines(encode(line | {"rank": rank}) for line in lines)
    return paths


def test_a_folder_without_some_ranks_cannot_be_judged(tmp_path: Path) -> None:
    missing = "6 of 8 ranks left no heartbeat here: 1, 2, 3, 4, 6, 7"
    started(tmp_path, (0, 5), 8)
    done = run_health(tmp_path)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (2, "cannot tell")
    assert done.stderr.splitlines() == [f"cannot tell: {missing}"]
    assert json.loads(run_health(tmp_path, "--json").stdout)["unknown"] == [missing]
    started(tmp_path, (0, 5), 8, loss="nan")
    done = run_health(tmp_path)
    assert (done.exit_code, missing in done.stderr) == (1, True)


def test_a_run_that_continues_with_fewer_ranks_does_not_miss_the_others(tmp_path: Path) -> None:
    started(tmp_path, range(2), 8)
    assert run_health(tmp_path).exit_code == 2
    started(tmp_path, range(1), 1)
    assert run_health(tmp_path).exit_code == 0


def test_the_ranks_of_a_long_run_are_known_from_the_start_of_its_file(tmp_path: Path) -> None:
    [path] = started(tmp_path, (0,), 4)
    last = path.read_bytes().splitlines(keepends=True)[-1]
    path.write_bytes(path.read_bytes() + 50_000 * last)
    assert path.stat().st_size > 8 * 2**20
    assert "3 of 4 ranks left no heartbeat here: 1, 2, 3" in run_health(tmp_path).stderr

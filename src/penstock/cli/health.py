"""`penstock health`: whether a run is well, for people, scripts and CI."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from penstock.cli.failure import show
from penstock.cli.given import AsJson
from penstock.errors import ConfigError, PenstockError
from penstock.types import MiB

if TYPE_CHECKING:
    from penstock.watch.health import Limits, Verdict

LAST_BYTES = 16 * MiB
"""Some 25,000 steps: how a run is now does not depend on what was before them, and all of it would take a while."""
WELL, UNWELL, UNKNOWN = 0, 1, 2


def health(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HEARTBEAT",
            help="Files, globs or folders.",
            show_default="artifacts/train_showcase",
        ),
    ] = None,
    min_tokens_per_s: Annotated[
        float | None, typer.Option(metavar="N", help="Tokens a second, of each rank.")
    ] = None,
    max_data_wait: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Time spent waiting for data.")
    ] = None,
    max_fetch_p95_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Of the time in next().")
    ] = None,
    max_age: Annotated[
        float, typer.Option(metavar="SECONDS", help="Since the last sign of life, unless ended.")
    ] = 60.0,
    max_step: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Without a finished step.")
    ] = None,
    for_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Limits are judged on the last so many.")
    ] = 30.0,
    for_steps: Annotated[
        int, typer.Option(metavar="N", help="And on at least so many steps.")
    ] = 10,
    grace_s: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="The longest grace period, from its first step."),
    ] = 600.0,
    grace_steps: Annotated[int, typer.Option(metavar="N", help="The same in steps.")] = 1000,
    ignore_loss: Annotated[
        bool, typer.Option("--ignore-loss", help="A loss may be NaN or infinite.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Judge a running or ended run by its heartbeats.

    Exit code 0: well, or warming up. 1: not well. 2: cannot tell, because there is no file, or no step in one, or in a folder not one for each rank.
    """
    from penstock.watch.health import Limits

    try:
        limits = Limits(
            min_tokens_per_s=min_tokens_per_s,
            max_data_wait_pct=max_data_wait,
            max_fetch_p95_ms=max_fetch_p95_ms,
            max_heartbeat_age_s=max_age,
            max_step_s=max_step,
            finite_loss=not ignore_loss,
            for_s=for_s,
            for_steps=for_steps,
            grace_s=grace_s,
            grace_steps=grace_steps,
        )
    except ConfigError as error:
        show(context, error)
        _finish([], [str(error)], as_json)
    _finish(*_look(context, files, limits), as_json)


def _look(
    context: typer.Context, files: list[str] | None, limits: Limits
) -> tuple[list[tuple[Path, Verdict]], list[str]]:
    """A verdict for each file, and what could not be read."""
    from penstock.watch.health import judge
    from penstock.watch.heartbeat_reader import FOLDER, expand, read_heartbeat

    patterns = files or [str(FOLDER)]
    unknown = [f"{pattern}: no heartbeat there" for pattern in patterns if not expand([pattern])]
    found = []
    for path in expand(patterns):
        try:
            verdict = judge(read_heartbeat(path, LAST_BYTES), time.time(), limits)
            if not verdict.known:  # hours of beats, perhaps, since the last step
                verdict = judge(read_heartbeat(path), time.time(), limits)
            found.append((path, verdict))
        except (PenstockError, OSError) as error:
            show(context, error)
            unknown.append(
                f"{path}: {error.strerror if isinstance(error, OSError) and error.strerror else error}"
            )
    unknown += [f"{path}: no step in it yet" for path, verdict in found if not verdict.known]
    # Who names files asks about those. Who names a folder asks about a run.
    lacking = (
        _missing(found) if any(Path(pattern).expanduser().is_dir() for pattern in patterns) else ""
    )
    return found, [*unknown, *([lacking] if lacking else [])]


def _missing(found: list[tuple[Path, Verdict]]) -> str:
    """Which ranks of the run left no heartbeat, by the account of the rank that spoke last: others may be of a start
    that had more ranks."""
    from penstock.watch.world import last_boot, missing, world_size

    heard = [(verdict.age_s, path, verdict) for path, verdict in found if verdict.age_s is not None]
    if not heard:
        return ""
    _, path, latest = min(heard, key=lambda one: one[0])
    expected = latest.world_size
    if expected is None and (boot := last_boot(path)) is not None:  # it is long ago
        expected = world_size(boot)
    return missing(expected, {verdict.rank for _, verdict in found if verdict.rank is not None})


def _finish(found: list[tuple[Path, Verdict]], unknown: list[str], as_json: bool) -> NoReturn:
    failed = [verdict for _, verdict in found if verdict.status == "fail" and verdict.known]
    code = UNWELL if failed else UNKNOWN if unknown or not found else WELL
    if as_json:
        ranks: list[dict[str, Any]] = [
            {"file": str(path)} | verdict.as_dict() for path, verdict in found
        ]
        word = {WELL: "ok", UNWELL: "fail", UNKNOWN: "unknown"}[code]
        typer.echo(
            json.dumps(
                {"verdict": word, "exit_code": code, "unknown": unknown, "ranks": ranks}, indent=2
            )
        )
        raise typer.Exit(code)
    for path, verdict in found:
        typer.echo(_row(path, verdict))
    for text in unknown:
        typer.echo(f"cannot tell: {text}", err=True)
    typer.echo(_sum(found, failed, code))
    raise typer.Exit(code)


def _row(path: Path, verdict: Verdict) -> str:
    numbers = [f"step {verdict.step}"]
    if verdict.tokens_per_s is not None:
        numbers.append(f"{verdict.tokens_per_s:,.0f} tokens/s")
    if verdict.data_wait_pct is not None:
        numbers.append(f"data wait {verdict.data_wait_pct:.1f} %")
    if verdict.fetch_p95_ms is not None:
        numbers.append(f"fetch p95 {verdict.fetch_p95_ms:.1f} ms")
    if verdict.ended is not None:
        numbers.append(f"ended: {verdict.ended}")
    elif verdict.age_s is not None:
        numbers.append(f"{verdict.age_s:,.0f} s ago")
    rank = path.name if verdict.rank is None else f"rank {verdict.rank}"
    return f"{rank}: {verdict.status if verdict.known else 'unknown'}: {', '.join(numbers)}: {'; '.join(verdict.reasons)}"


def _sum(found: list[tuple[Path, Verdict]], failed: list[Verdict], code: int) -> str:
    if code == UNWELL:
        return f"unhealthy: {len(failed)} of {len(found)} ranks"
    if code == UNKNOWN:
        return "cannot tell"
    if any(verdict.grace for _, verdict in found):
        return "healthy so far: warming up"
    return (
        "healthy"
        if all(verdict.status == "ok" for _, verdict in found)
        else "healthy, with warnings"
    )

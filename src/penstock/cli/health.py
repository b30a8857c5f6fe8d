"""`penstock health`: judge a run by its heartbeats, for people, scripts and CI."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from penstock.cli.failure import one_line, show
from penstock.cli.given import AsJson
from penstock.errors import ConfigError


def option(metavar: str, text: str, **more: Any) -> Any:
    """Return an option with a value."""
    return typer.Option(metavar=metavar, help=text, **more)


HEARTBEATS = typer.Argument(
    metavar="HEARTBEAT", help="Files, globs or folders.", show_default="artifacts/train_showcase"
)


def health(
    context: typer.Context,
    files: Annotated[list[str] | None, HEARTBEATS] = None,
    min_tokens_per_s: Annotated[float | None, option("N", "Minimum rate of each rank.")] = None,
    max_data_wait: Annotated[
        float | None, option("PERCENT", "Maximum share of time spent waiting for data.")
    ] = None,
    max_fetch_p95_ms: Annotated[
        float | None, option("MS", "Maximum 95th percentile of the time in next().")
    ] = None,
    max_age: Annotated[
        float, option("SECONDS", "Maximum time since the last line of a run that has not ended.")
    ] = 60.0,
    max_step: Annotated[
        float | None, option("SECONDS", "Maximum time without a finished step.")
    ] = None,
    for_s: Annotated[float, option("SECONDS", "Average over this time.")] = 30.0,
    for_steps: Annotated[int, option("N", "Average over at least this many steps.")] = 10,
    grace_s: Annotated[float, option("SECONDS", "Longest grace period during warmup.")] = 600.0,
    grace_steps: Annotated[int, option("N", "The same in steps.")] = 1000,
    ignore_loss: Annotated[
        bool, typer.Option("--ignore-loss", help="Accept a loss that is NaN or infinite.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Judge a running or ended run by its heartbeats.

    Exit code 0: well, or warming up. 1: not well. 2: cannot tell, because
    a file or a step is missing, or a folder lacks some ranks of the run.
    """
    from penstock.watch.health import Limits, RunHealth, judge_run
    from penstock.watch.heartbeat_reader import FOLDER

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
        found = judge_run(files or [FOLDER], time.time(), limits)
    except ConfigError as error:
        show(context, error)
        found = RunHealth({}, [one_line(error)])
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
        raise typer.Exit(found.exit_code)
    for verdict in found.verdicts.values():
        typer.echo(verdict.line())
    for text in found.unknown:
        typer.echo(f"cannot tell: {text}", err=True)
    typer.echo(found.summary())
    raise typer.Exit(found.exit_code)

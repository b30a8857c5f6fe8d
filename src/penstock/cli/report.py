"""`penstock report`: what a run's heartbeats say, as a page for the browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError, PenstockError


def report(
    heartbeats: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HEARTBEAT",
            help="Files, globs or folders of one run.",
            show_default="artifacts/train_showcase",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Two runs side by side: give two files, folders or quoted patterns."
        ),
    ] = False,
    numbers: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Also write the numbers as JSON; - prints them."
        ),
    ] = None,
) -> None:
    """Make a page that says whether data holds a run back.

    By what, too, and since when it is steady. The page is one file that opens from disk and requests nothing. The run need not have ended. Exit code 1: an error.
    """
    from penstock.watch import report as reports
    from penstock.watch.heartbeat_reader import FOLDER

    given = heartbeats or []
    if compare:
        if len(given) != 2:
            raise ConfigError(
                f"--compare needs two runs, got {len(given)}: give two files, two folders, or two patterns in quotes, "
                "so that the shell leaves them alone"
            )
        made = reports.compare(given[0], given[1])
    else:
        made = reports.report(*(given or [str(FOLDER)]))
    path = made.write(out)
    said = json.dumps(made.numbers, indent=2)
    # With - the numbers are all of the output, so that it can be piped.
    typer.echo(f"{made.summary}\nreport: {path}", err=numbers == "-")
    if numbers == "-":
        typer.echo(said)
    elif numbers is not None:
        _write(Path(numbers).expanduser(), said + "\n")


def _write(path: Path, said: str) -> None:
    from penstock.config import write_atomically

    try:
        write_atomically(path, said)
    except OSError as error:
        raise PenstockError(
            f"{path}: the numbers cannot be written: {error.strerror or error}"
        ) from error

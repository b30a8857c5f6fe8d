"""`penstock report`: the heartbeats of a run as a page for the browser, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.health import HEARTBEATS

OUT = typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
JSON = typer.Option(
    "--json",
    metavar="FILE|-",
    help="Also write the numbers as JSON; - prints them, without a page.",
)


def report(
    files: Annotated[list[str] | None, HEARTBEATS] = None,
    out: Annotated[Path, OUT] = Path("report.html"),
    numbers: Annotated[str | None, JSON] = None,
) -> None:
    """Write a page that shows what a run waits for.

    The page is one file that opens from disk and requests nothing.
    The run need not have ended. Exit code 1: an error.
    """
    from penstock.watch.heartbeat_reader import FOLDER
    from penstock.watch.report import report, write_text

    made = report(*(files or [str(FOLDER)]))
    text = json.dumps(made.numbers, indent=2)
    if numbers == "-":
        typer.echo(text)
        return
    path = made.write(out)
    if numbers is not None:
        write_text(Path(numbers).expanduser(), text + "\n")
    typer.echo(f"{made.summary}\nreport: {path}")

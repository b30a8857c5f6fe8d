"""`penstock report`: show the heartbeats of a run as an HTML page or as JSON."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY
from pathlib import Path

from penstock.config import write_atomically
from penstock.options import options
from penstock.watch.heartbeat_reader import FOLDER


@options
class ReportOptions:
    """Options of `penstock report`.

    files: Heartbeat files, globs or folders. Defaults to artifacts/train_showcase.
    out: The page to write.
    json: Also write the numbers as JSON to this file; - prints them, without a page.
    """

    files: list[str] | None = None
    _: KW_ONLY
    out: Path = Path("report.html")
    json: str | None = None


def report(given: ReportOptions) -> None:
    """Write a page that shows what a run waits for.

    The page is one file that opens from disk and requests nothing.
    The run need not have ended. Exit code 1: an error.
    """
    from penstock.watch.report import report

    made = report(*(given.files or [str(FOLDER)]))
    text = json.dumps(made.numbers, indent=2)
    if given.json == "-":
        print(text)
        return
    path = made.write(given.out)
    if given.json is not None:
        write_atomically(Path(given.json).expanduser(), text + "\n")
    print(f"{made.summary}\nreport: {path}")

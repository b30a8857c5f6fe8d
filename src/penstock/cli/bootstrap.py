"""`penstock bootstrap`: a local file of text, from which a run can start at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import complete
from penstock.cli.given import CardConfig

if TYPE_CHECKING:
    from penstock.tools.bootstrap import Bootstrapped, Progress

SAY_EVERY_S = 5.0
"""Time between two lines of progress without a terminal."""


def bootstrap(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="The file to write; it ends in .jsonl."),
    ],
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="hf://…, s3://…, https://…, a short name or a path.",
            show_default="fineweb_edu",
            autocompletion=complete.address,
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option("--bytes", metavar="SIZE", help="How much to write: 5GB, 100MiB or a number."),
    ] = "5GiB",
    config: CardConfig = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="The column or field with the text.")
    ] = "text",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Extend a finished file to this size.")
    ] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Go on in the background; see PATH.log.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Write the first bytes of a source's text to a local file.

    Killed at any moment and run again, it continues, and ends with the same bytes. Exit code 1: an error.
    """
    from penstock.cli.config import size_in_bytes
    from penstock.tools.bootstrap import bootstrap as write
    from penstock.tools.bootstrap import check_name

    goal = size_in_bytes(size, "--bytes")
    check_name(out)
    sources = urls or ["fineweb_edu"]
    if background:
        _detach(
            sources, out, goal, config, text_field, ["--refresh"] * refresh + ["--quiet"] * quiet
        )
        return
    show = _Silence() if quiet else _Bar() if sys.stderr.isatty() else _Plain()
    began = time.monotonic()
    try:
        with show:
            done = write(
                sources, out, goal, remote={"config": config}, text_field=text_field, refresh=refresh, progress=show.show
            )  # fmt: skip
    except KeyboardInterrupt as error:
        for note in getattr(error, "__notes__", ()):  # what is safe, and how to continue
            typer.echo(note, err=True)
        raise
    if not quiet:
        typer.echo(_summary(done, goal, time.monotonic() - began), err=True)
    typer.echo(f"wrote bytes: {done.bytes}")


def main() -> None:
    """Run this command alone, for scripts/automation/fwe_bootstrap.py and for the background."""
    from penstock.cli.main import app

    app(["bootstrap", *sys.argv[1:]])


def _detach(
    urls: list[str], out: Path, goal: int, config: str | None, text_field: str, flags: list[str]
) -> None:
    """Run the command in a process that outlives this one and its terminal."""
    import penstock
    from penstock.config import environment

    arguments = ["--out", str(out), "--bytes", str(goal), "--text-field", text_field, *flags]
    arguments += ["--config", config] if config is not None else []
    # The same package, wherever this process found it.
    folders = [str(Path(penstock.__file__).parent.parent), environment().get("PYTHONPATH", "")]
    out.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{out}.log")
    with open(log, "ab") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.bootstrap", *arguments, "--", *urls],
            env={**environment(), "PYTHONPATH": os.pathsep.join(filter(None, folders))},
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    typer.echo(f"process {child.pid} writes {out}; what it says is in {log}", err=True)
    typer.echo(child.pid)
    child.returncode = 0  # it outlives this process, so a missing wait is not a mistake


def _summary(done: Bootstrapped, goal: int, seconds: float) -> str:
    text = f"{done.path}: {done.bytes / 1e6:.1f} MB in {done.documents} documents"
    text += ", all there already" if done.already else f", after {seconds:.1f} s"
    if done.exhausted and done.bytes < goal:
        text += f"; the source has no more, {goal / 1e6:.1f} MB were asked for"
    if done.bad:
        reasons = ", ".join(f"{reason} {n}" for reason, n in done.bad.items())
        text += f"; {sum(done.bad.values())} records were left out ({reasons})"
    return text


class _Silence:
    """No progress."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, now: Progress) -> None:
        return


class _Plain(_Silence):
    """Progress without a terminal."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()
        self._first = True

    def show(self, now: Progress) -> None:
        if self._first and now.began:
            typer.echo(f"goes on after {now.began / 1e6:.1f} MB that were there", err=True)
        self._first = False
        at = time.monotonic()
        if at - self._said < SAY_EVERY_S:
            return
        self._said = at
        rate = (now.bytes - now.began) / (at - self._began)
        left = max(0, now.goal - now.bytes) / rate if rate else 0.0
        to_go = f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
        text = f"{now.bytes / 1e6:.0f} of {now.goal / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, {to_go} to go ({now.file})"
        typer.echo(text, err=True)


class _Bar(_Silence):
    """Progress on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )  # fmt: skip
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._task: Any = None

    def __enter__(self) -> Any:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: Progress) -> None:
        if self._task is None:
            # Bytes of earlier runs must not count in the speed of this one.
            self._task = self._bar.add_task("", total=now.goal, completed=now.began)
        self._bar.update(self._task, completed=min(now.bytes, now.goal), description=now.file)


if __name__ == "__main__":
    main()

"""`penstock bootstrap`: a local file of text, from which a run can start at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.given import CardConfig, progress, size_in_bytes

if TYPE_CHECKING:
    from penstock.tools.bootstrap import Bootstrapped, Progress


def bootstrap(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The .jsonl file to write.")
    ],
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="hf://…, s3://…, https://…, a short name or a path.",
            show_default="fineweb_edu",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Size to write: 5GB, 100MiB, a number.")
    ] = "5GiB",
    config: CardConfig = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="Column or field with the text.")
    ] = "text",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Extend a finished file to this size.")
    ] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Run in the background and log to FILE.log.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Write the first bytes of a source's text to a local file.

    If it is killed, run it again: it continues and ends with the same bytes. Exit code 1: an error.
    """
    from penstock.tools.bootstrap import bootstrap as write
    from penstock.tools.bootstrap import check_name

    goal = size_in_bytes(size, "--bytes")
    check_name(out)
    sources = urls or ["fineweb_edu"]
    if background:
        arguments = ["--out", str(out), "--bytes", str(goal), "--text-field", text_field]
        arguments += ["--refresh"] * refresh + ["--quiet"] * quiet
        arguments += ["--config", config] if config is not None else []
        _start_in_background(out, [*arguments, "--", *sources])
        return
    began = time.monotonic()
    try:
        with progress(quiet) as show:
            more: dict[str, Any] = {
                "text_field": text_field,
                "refresh": refresh,
                "remote": {"config": config},
            }
            done = write(
                sources,
                out,
                goal,
                progress=lambda now: show(
                    now.bytes, now.goal, _describe(now, time.monotonic() - began)
                ),
                **more,
            )
    except KeyboardInterrupt as error:
        for note in getattr(error, "__notes__", ()):  # what is safe, and how to continue
            typer.echo(note, err=True)
        raise
    if not quiet:
        typer.echo(_summary(done, goal, time.monotonic() - began), err=True)
    typer.echo(f"wrote bytes: {done.bytes}")


def _start_in_background(out: Path, arguments: list[str]) -> None:
    """Run the command in a process that outlives this one and its terminal."""
    import penstock
    from penstock.config import environment

    # The same package, wherever this process found it.
    folders = [str(Path(penstock.__file__).parent.parent), environment().get("PYTHONPATH", "")]
    out.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{out}.log")
    with open(log, "ab") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "bootstrap", *arguments],
            env={**environment(), "PYTHONPATH": os.pathsep.join(filter(None, folders))},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    typer.echo(f"process {child.pid} writes {out} and logs to {log}", err=True)
    typer.echo(child.pid)
    child.returncode = 0  # it outlives this process, so not waiting for it is no mistake


def _summary(done: Bootstrapped, goal: int, seconds: float) -> str:
    text = f"{done.path}: {done.bytes / 1e6:.1f} MB in {done.documents} documents"
    text += ", complete already" if done.already else f", after {seconds:.1f} s"
    if done.exhausted and done.bytes < goal:
        text += f"; the source has no more, {goal / 1e6:.1f} MB were asked for"
    if done.bad:
        reasons = ", ".join(f"{reason} {n}" for reason, n in done.bad.items())
        text += f"; {sum(done.bad.values())} records were skipped ({reasons})"
    return text


def _describe(now: Progress, seconds: float) -> str:
    speed = (now.bytes - now.began) / seconds if seconds else 0.0
    left_s = max(0, now.goal - now.bytes) / speed if speed else 0.0
    return (
        f"{now.bytes / 1e6:.0f} of {now.goal / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s, "
        f"{left_s:.0f} s left ({now.file})"
    )

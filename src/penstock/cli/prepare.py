"""`penstock prepare`: tokenize a corpus once."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.given import AsJson, CardConfig, Split, TextField, Tokenizer
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.prepare import Prepared

SAY_EVERY_S = 10.0
"""Time between two lines of progress without a terminal."""


def prepare(
    source: Annotated[
        list[str], typer.Argument(help="hf://…, s3://…, https://…, a short name or a path.")
    ],
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="PLACE", help="A folder, or s3://…, gs://…, az://…."),
    ],
    tokenizer: Tokenizer = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="TEXT",
            help="Rows to keep: 'score >= 3'. Repeated: all have to hold.",
        ),
    ] = None,
    text_field: TextField = None,
    split: Split = None,
    config: CardConfig = None,
    on_bad_record: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="raise, skip or quarantine:FILE.", show_default="raise"),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="local or ray.")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A Ray cluster.", show_default="RAY_ADDRESS, or this machine"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Cores to use.", show_default="all", min=1)
    ] = None,
    part: Annotated[
        str | None,
        typer.Option("--slice", metavar="I/N", help="Make part I of N, from 0 on: for job arrays."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a corpus once, for PreparedDataset.

    Run again, it makes what is missing. Exit code 1: an error.
    """
    from penstock.prepare import prepare as run

    chosen: Any = engine
    text = {
        "filter": filters or None, "text_field": text_field, "split": split,
        "on_bad_record": on_bad_record, "remote": {"config": config} if config else None,
    }  # fmt: skip
    with _Bar() if sys.stderr.isatty() else _Lines() as show:
        done = run(
            source[0] if len(source) == 1 else source, tokenizer=tokenizer or "byte", out=out,
            workers=workers, engine=chosen, slice=_slice(part), ray_address=ray_address,
            progress=show.show, **{name: value for name, value in text.items() if value is not None},
        )  # fmt: skip
    typer.echo(json.dumps(asdict(done), indent=2) if as_json else _summary(done))


def _slice(part: str | None) -> tuple[int, int] | None:
    if part is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if match is None:
        raise ConfigError(f"--slice {part}: must be I/N, such as 0/16")
    return int(match[1]), int(match[2])


def _summary(done: Prepared) -> str:
    lines = [
        f"documents  {done.documents:,}",
        f"tokens     {done.tokens:,} in {done.bytes / 1e6:,.1f} MB",
    ]
    if done.lengths:
        shown = ", ".join(f"{name} {n:,}" for name, n in done.lengths.items())
        lines.append(f"lengths    {shown} tokens")
    if done.filtered:
        lines.append(f"filtered   {done.filtered:,}")
    if done.bad:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in done.bad.items())
        lines.append(f"rejected   {sum(done.bad.values()):,} ({reasons})")
    rate = done.written / done.seconds if done.seconds else 0.0
    lines.append(
        f"time       {_time(done.seconds)}, {rate / 1e6:.2f} million tokens/s; "
        f"{done.already} of {done.chunks} chunks were there"
    )
    if done.complete:
        lines.append(f"read it    PreparedDataset({done.path!r}, seq_len=1024)")
    else:
        lines.append(
            "This part is done. The last part to end, or a run without --slice, completes it."
        )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _left(done: Prepared) -> str:
    made = done.chunks_done - done.already
    left = (done.chunks - done.chunks_done) * done.seconds / made if made else 0.0
    rate = done.written / done.seconds / 1e6 if done.seconds else 0.0
    return f"{rate:.2f} million tokens/s, {_time(left)} left"


class _Lines:
    """Progress without a terminal."""

    def __enter__(self) -> _Lines:
        self._said = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, done: Prepared) -> None:
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            typer.echo(f"{done.chunks_done} of {done.chunks} chunks, {_left(done)}", err=True)


class _Bar:
    """Progress on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("chunks, {task.fields[left]}"))
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=None, left="listing")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, done: Prepared) -> None:
        self._progress.update(
            self._task, total=done.chunks, completed=done.chunks_done, left=_left(done)
        )

"""`penstock stage`: fill the token cache before a run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.loader import AsyncDataLoader
    from penstock.stage import Staged

SAY_EVERY_S = 5.0
"""Without a terminal, a line so often."""


def stage(
    url: Annotated[str | None, typer.Argument(help="hf://…, s3://…, https://…, a short name or a path.")] = None,
    size: Annotated[str, typer.Option("--bytes", help="Disk to fill with tokens, such as 5GB.")] = "5GB",
    settings: Annotated[
        Path | None, typer.Option("--settings", help="A TOML or JSON file with the run's data and settings.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="As for the run.")] = "byte",
    config: Annotated[str | None, typer.Option(help="A configuration of the dataset's card.")] = None,
    text_field: Annotated[str, typer.Option(help="As for the run.")] = "text",
    split: Annotated[str | None, typer.Option(help="train or val, as for the run.")] = None,
    shuffle: Annotated[bool, typer.Option(help="As for the run.")] = False,
    seed: Annotated[int, typer.Option(help="As for the run.")] = 0,
    lanes: Annotated[int, typer.Option(help="As for the run: by default its world size.", min=1)] = 1,
    workers: Annotated[int | None, typer.Option(help="Worker threads; default: the cores at hand.", min=0)] = None,
) -> None:
    """Fill the token cache in the order in which a run with these settings will need it.

    The run then starts without network, and goes on with the rest: the same stream.
    """
    from penstock.loader import AsyncDataLoader
    from penstock.stage import stage as fill
    from penstock.types import Shard
    from penstock.values import read_size

    try:
        goal = read_size(size)
    except (ValueError, TypeError, LookupError, ArithmeticError):
        raise ConfigError(f"--bytes {size}: needs a number of bytes, or a size such as 5GB or 500MiB") from None
    alone = Shard(1, 0)
    if settings is not None:
        if url is not None:
            raise ConfigError("give an address or --settings, not both: the file names the data")
        loader = AsyncDataLoader.from_config(settings, shard=alone, lanes=lanes)
    elif url is None:
        raise ConfigError("what to stage? Give an address, or --settings FILE")
    else:
        from penstock.dataset import TextDataset

        chosen: Any = split
        data = TextDataset(
            url, tokenizer=tokenizer, seq_len=1024, text_field=text_field, split=chosen, config=config, cache=True
        )
        loader = AsyncDataLoader(data, 1, shuffle, seed, workers, output="numpy", shard=alone, lanes=lanes)
    show = _Bar(goal) if sys.stderr.isatty() else _Lines(goal)
    with show:
        done = fill(loader, goal, show.show)
    _tell(loader, done)


def _tell(loader: AsyncDataLoader, done: Staged) -> None:
    from penstock.sources.files import TextSource

    typer.echo(
        f"staged {done.bytes / 1e6:.1f} MB of tokens in {done.chunks} chunks ({done.already} were there) in "
        f"{done.seconds:.1f} s, {done.fetched_bytes / 1e6:.1f} MB fetched"
        + ("; that is a whole epoch" if done.complete else "")
    )
    source = loader.lay_open()[0]
    path = source.files[0].path if isinstance(source, TextSource) else ""
    if path.startswith("hf://"):
        revision = path.partition("@")[2].partition("/")[0]
        typer.echo(f"a run that names the commit (…@{revision}) needs no request to begin")


def _eta(goal: int, done: Staged) -> str:
    if not done.bytes or not done.seconds:
        return "?"
    left = max(0.0, (goal - done.bytes) * done.seconds / done.bytes)
    return f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"


class _Lines:
    """Progress without a terminal."""

    def __init__(self, goal: int) -> None:
        self._goal = goal
        self._said = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, done: Staged) -> None:
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            rate = done.bytes / done.seconds / 1e6 if done.seconds else 0.0
            line = (
                f"{done.bytes / 1e6:.0f} of {self._goal / 1e6:.0f} MB, {rate:.1f} MB/s, {_eta(self._goal, done)} to go"
            )
            typer.echo(line, err=True)


class _Bar:
    """Progress on a terminal."""

    def __init__(self, goal: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (BarColumn(24), DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.fields[eta]} to go"))
        self._goal = goal
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=goal, eta="?")

    def __enter__(self) -> _Bar:
        self._progress.__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        self._progress.__exit__(*what)

    def show(self, done: Staged) -> None:
        self._progress.update(self._task, completed=done.bytes, eta=_eta(self._goal, done))

"""`penstock stage`: fill the token cache before a run."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import complete
from penstock.cli.given import (
    AS,
    CardConfig,
    SettingsFile,
    Shuffle,
    Split,
    TextField,
    Tokenizer,
    Workers,
)
from penstock.errors import ConfigError
from penstock.watch.page.units import size as shown_size

if TYPE_CHECKING:
    from penstock.tools.stage import Staged

SAY_EVERY_S = 5.0
"""Time between two lines of progress without a terminal."""


def stage(
    url: Annotated[
        str | None,
        typer.Argument(
            help="hf://…, s3://…, https://…, a short name or a path.",
            autocompletion=complete.address,
        ),
    ] = None,
    size: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Disk to fill with tokens, such as 5GB.")
    ] = "5GB",
    settings: SettingsFile = None,
    tokenizer: Tokenizer = None,
    config: CardConfig = None,
    text_field: TextField = None,
    split: Split = None,
    shuffle: Shuffle = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help=AS, min=0, show_default="0")] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="As for the run: by default its world size.", min=1, show_default="1"
        ),
    ] = None,
    workers: Workers = None,
) -> None:
    """Fill the token cache in the order a run will need it.

    A run with these settings then starts without network, and continues with the rest: the same stream. Exit code 1: an error.
    """
    from penstock.cli.config import size_in_bytes
    from penstock.loader import AsyncDataLoader
    from penstock.tools.data_choice import SETTINGS_FILES, choose_data
    from penstock.tools.stage import stage as fill

    goal = size_in_bytes(size, "--bytes")
    if config is not None and config.lower().endswith(SETTINGS_FILES):
        raise ConfigError(
            f"--config {config}: names a configuration of the dataset's card; use --settings FILE"
        )
    if (url is None) == (settings is None):
        raise ConfigError("what to stage? Give an address, or --settings FILE which names the data")
    choice = choose_data(
        url, settings_file=settings,
        overrides={"shuffle": shuffle, "seed": seed, "lanes": lanes, "n_workers": workers},
        tokenizer=tokenizer, config=config, text_field=text_field, split=split, cache=True if url else None,
    )  # fmt: skip
    dataset = choice.make()
    show = _Bar(goal) if sys.stderr.isatty() else _Lines(goal)
    with show:
        done = fill(AsyncDataLoader(dataset, **choice.arguments), goal, show.show)
    if not done.chunks and not done.complete:
        raise ConfigError(
            f"--bytes {size}: the first chunk takes {shown_size(done.next_bytes)} of tokens, so none counts as staged. "
            f"Use --bytes {done.next_bytes} or more."
        )
    typer.echo(
        f"staged {done.bytes / 1e6:.1f} MB of tokens in {done.chunks} chunk{'s' * (done.chunks != 1)} "
        f"({done.already} {'was' if done.already == 1 else 'were'} there) in "
        f"{done.seconds:.1f} s, {done.fetched_bytes / 1e6:.1f} MB fetched"
        + ("; that is a whole epoch" if done.complete else "")
    )
    path = dataset.files[0].path
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
            line = f"{done.bytes / 1e6:.0f} of {self._goal / 1e6:.0f} MB, {rate:.1f} MB/s, {_eta(self._goal, done)} to go"
            typer.echo(line, err=True)


class _Bar:
    """Progress on a terminal."""

    def __init__(self, goal: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        columns = (
            BarColumn(24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[eta]} to go"),
        )
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

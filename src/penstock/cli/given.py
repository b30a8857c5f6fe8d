"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError

LINE_EVERY_S = 10.0


def option(*names: str, help: str, shown: str | None = None, **more: Any) -> Any:
    """Describe an option. `shown` is its default for the help text, if the run decides it."""
    metavar = more.pop("metavar", "N")
    return typer.Option(*names, metavar=metavar, help=help, show_default=shown or False, **more)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Batch = Annotated[int | None, option("--batch", "--batch-size", help="Rows in a batch.", min=1)]
CardConfig = Annotated[
    str | None,
    option(
        "--dataset-config",
        "--config",
        metavar="NAME",
        help="A configuration from the dataset's card on the Hub.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    option("--set", metavar="KEY=VALUE", help="A loader setting, such as n_workers=2. Repeatable."),
]
Preset = Annotated[
    str | None, option("--preset", metavar="NAME", help="Workers and prefetch by name.")
]
SeqLen = Annotated[int | None, option("--seq-len", help="Tokens in a row.", shown="1024")]
SettingsFile = Annotated[
    Path | None, option("--settings", metavar="FILE", help="The run's settings, in TOML or JSON.")
]
Shuffle = Annotated[bool | None, typer.Option("--shuffle/--no-shuffle", help="Shuffle the data.")]
Split = Annotated[str | None, option("--split", metavar="NAME", help="train or val.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE|URL", help="Settings of a run (run.toml), or hf://…, s3://…, a path, stdlib."
    ),
]
TextField = Annotated[
    str | None,
    option("--text-field", metavar="NAME", help="Column or field with the text.", shown="text"),
]
Tokenizer = Annotated[
    str | None,
    option("--tokenizer", metavar="NAME", help="byte, gpt2, a file or a Hub name.", shown="byte"),
]
Workers = Annotated[
    int | None, option("--workers", help="Worker threads.", shown="one per core", min=0)
]


def pair(text: str) -> tuple[str, str]:
    """Split `--set KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"command line --set {text}: must be KEY=VALUE")
    return key.strip(), value


def overrides(set_: list[str] | None, **options: int | None) -> dict[str, str]:
    """Return the settings given with --set, and those that have an option of their own."""
    settings = dict(pair(text) for text in set_ or ())
    for name, value in options.items():
        if value is not None and settings.setdefault(name, str(value)) != str(value):
            option_name = "batch" if name == "batch_size" else name
            raise ConfigError(
                f"--{option_name} {value} and --set {name}={settings[name]}: keep one of them"
            )
    return settings


def size_in_bytes(text: str, option_name: str) -> int:
    """Return a size such as 512MiB in bytes."""
    from penstock.options import read_size

    try:
        size = read_size(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"{option_name} {text}: must be bytes ≥ 1, or a size such as 512MiB")
    return size


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Give a function that shows what is done, of how much, and a text beside it: as a bar on a
    terminal, else as a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console, shown = Console(stderr=True), time.monotonic()
    columns = BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, text: str) -> None:
            nonlocal shown
            bar.update(task, completed=done, total=total, description=text)
            if not quiet and not console.is_terminal and time.monotonic() - shown >= LINE_EVERY_S:
                shown = time.monotonic()
                typer.echo(text, err=True)

        yield show


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the loader's warnings: one that is drained as fast as possible never keeps up."""
    log = logging.getLogger("penstock")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)

"""`penstock cache`: what the token cache holds, whether it is sound, and how to be rid of it."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.given import AsJson
from penstock.errors import ConfigError, CorruptFile, PenstockError
from penstock.watch.page.units import size

if TYPE_CHECKING:
    from penstock.read.cache import Entry

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SHOWN = 20

cache = typer.Typer(help="Look at, check or empty the token cache.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="FOLDER",
        help="The cache folder.",
        show_default="PENSTOCK_CACHE, or ~/.cache/penstock",
    ),
]


@cache.command()
def info(folder: Folder = None, as_json: AsJson = False) -> None:
    """Show how much there is, of what, and when it was used."""
    from penstock.read.cache import entries

    folder = _folder(folder)
    with _told(folder):
        found = list(entries(folder))
    files = _by_file(found)
    if as_json:
        summary = _totals(found) | {"folder": str(folder), "files": files}
        typer.echo(json.dumps(summary, indent=2))
        return
    _print(folder, found, files)


@cache.command()
def verify(
    folder: Folder = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what is damaged; it is made again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything and compare checksums.

    Exit code 1: there is damage that was not deleted.
    """
    from penstock.read.cache import verify as verify_all

    folder = _folder(folder)
    with _told(folder):
        result = verify_all(folder, delete)
    if as_json:
        damaged = [{"path": str(path), "why": why} for path, why in result.damaged]
        typer.echo(
            json.dumps(
                {"entries": result.entries, "bytes": result.bytes, "damaged": damaged}, indent=2
            )
        )
    else:
        for _, why in result.damaged:
            typer.echo(f"damaged: {why}")
        outcome = f"{len(result.damaged)} damaged" + (
            ", deleted" if delete and result.damaged else ""
        )
        typer.echo(f"{folder}: {result.entries} entries, {size(result.bytes)}, {outcome}")
    if result.damaged and not delete:
        raise typer.Exit(1)


@cache.command()
def clear(
    folder: Folder = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only what was not used for this long: 7d, 12h.")
    ] = "0",
    everything: Annotated[
        bool, typer.Option("--all", help="Also what is known of remote files, and locks.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove token chunks.

    A run that uses them goes on, and makes them again when it needs them again.
    """
    from penstock.read.cache import clear as clear_all
    from penstock.read.cache import entries

    folder = _folder(folder)
    age_s = _seconds(older_than)
    if not yes and sys.stdin.isatty():
        going = [entry for entry in entries(folder) if entry.used <= time.time() - age_s]
        typer.confirm(
            f"Remove {len(going)} entries, {size(_bytes(going))}, from {folder}?", abort=True
        )
    with _told(folder):
        n, freed = clear_all(folder, age_s, everything)
    typer.echo(f"{folder}: removed {n} files, {size(freed)}")


def _folder(given: Path | None) -> Path:
    """The folder to look at. One that was named has to be there: a mistyped one would pass as sound."""
    from penstock.config import cache_dir

    if given is None:
        return cache_dir()  # which is not there before the first chunk is kept
    folder = given.expanduser()
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"--dir {folder}: there is no such folder. Name another; without --dir it is {cache_dir()}."
        ) from None
    return folder


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the disk refuses is one line, not a traceback."""
    try:
        yield
    except OSError as error:
        raise PenstockError(f"the cache in {folder}: {error}") from error


def _seconds(age: str) -> float:
    written = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)", age.strip())
    if written is None:
        raise ConfigError(f"--older-than {age}: needs a number and a unit: 90s, 30m, 12h, 7d, 2w")
    number, unit = written.groups()
    return float(number) * UNITS[unit or "s"]


def _by_file(found: list[Entry]) -> list[dict[str, Any]]:
    """Totals for each source file, the largest first."""
    groups: dict[str, list[Entry]] = {}
    for entry in found:
        groups.setdefault(entry.file, []).append(entry)
    files = [{"file": _name(group)} | _totals(group) for group in groups.values()]
    return sorted(files, key=lambda file: (-file["bytes"], file["file"]))


def _totals(found: list[Entry]) -> dict[str, Any]:
    used = [entry.used for entry in found]
    return {
        "entries": len(found),
        "bytes": _bytes(found),
        "oldest_use": min(used, default=None),
        "newest_use": max(used, default=None),
    }


def _name(group: list[Entry]) -> str:
    """The source file's own name, from the first of its entries that can be read."""
    from penstock.read.cache import describe

    for entry in group:
        try:
            return describe(entry.path).file_id.partition("\n")[
                0
            ]  # its content is identified by the rest
        except (CorruptFile, OSError):
            continue  # `verify` is the command that tells
    return f"unreadable ({group[0].file})"


def _print(folder: Path, found: list[Entry], files: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # for grep: a line is a file, however long its name
    console.print(Text(f"folder   {folder}"))
    console.print(Text(f"entries  {len(found)}, {size(_bytes(found))}"))
    if not found:
        return
    used = [entry.used for entry in found]
    console.print(Text(f"used     {_ago(min(used))} (oldest), {_ago(max(used))} (newest)"))
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for title in ("file", "chunks", "size", "last used"):
        table.add_column(title, overflow="fold", justify="left" if title == "file" else "right")
    for file in files[:SHOWN]:
        table.add_row(
            Text(file["file"]), str(file["entries"]), size(file["bytes"]), _ago(file["newest_use"])
        )
    console.print(table)
    if len(files) > SHOWN:
        console.print(Text(f"and {len(files) - SHOWN} more files; all of them with --json"))


def _bytes(found: list[Entry]) -> int:
    return sum(entry.size for entry in found)


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    unit = next((unit for unit in "dhm" if seconds >= UNITS[unit]), "s")
    return f"{seconds / UNITS[unit]:.0f} {unit} ago"

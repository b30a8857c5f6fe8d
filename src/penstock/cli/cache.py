"""`penstock cache`: show, verify or clear the token cache."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.given import AsJson
from penstock.errors import ConfigError, PenstockError
from penstock.watch.units import size

if TYPE_CHECKING:
    from penstock.read.token_store import TokenStore

DAY = 86400
METADATA = ("metadata",)
"""Folders beside the tokens: what is known of remote files."""

cache = typer.Typer(
    help="Show, verify or clear the token cache or a prepared corpus.", no_args_is_help=True
)

Folder = Annotated[
    Path | None, typer.Option("--dir", help="The cache folder, or that of a prepared corpus.")
]
Age = Annotated[str, typer.Option(metavar="AGE", help="Only what was not used for this long: 7d.")]
Everything = Annotated[bool, typer.Option("--all", help="Also what is known of remote files.")]
Delete = Annotated[bool, typer.Option("--delete", help="Remove what is damaged.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@cache.command()
def info(folder: Folder = None, as_json: AsJson = False) -> None:
    """Show how much there is, and when it was used last."""
    with _opened(folder) as store:
        found = list(store.list())
    total, used = sum(entry.size for entry in found), max((e.used for e in found), default=0.0)
    report = {"folder": store.place, "entries": len(found), "bytes": total, "used": used}
    days = f", used {(time.time() - used) / DAY:.1f} days ago" if found else ""
    line = f"{store.place}: {len(found)} entries, {size(total)}{days}"
    typer.echo(json.dumps(report, indent=2) if as_json else line)


@cache.command()
def verify(folder: Folder = None, delete: Delete = False, as_json: AsJson = False) -> None:
    """Read everything and compare checksums.

    Exit code 1: there is damage that was not deleted.
    """
    with _opened(folder) as store:
        damaged = [*store.verify(), *_missing(store)]
        if delete and damaged:
            store.remove([name for name, _ in damaged])
    report = {"folder": store.place, "damaged": dict(damaged)}
    lines = [*(why for _, why in damaged), f"{store.place}: {len(damaged)} damaged"]
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(lines))
    if damaged and not delete:
        raise typer.Exit(1)


@cache.command()
def clear(
    folder: Folder = None, older_than: Age = "0d", everything: Everything = False, yes: Yes = False
) -> None:
    """Remove token chunks.

    A run that uses them continues, and makes them again when it needs them. Exit code 2: there is no
    terminal to ask on, and no --yes.
    """
    try:
        before = time.time() - DAY * float(older_than.removesuffix("d"))
    except ValueError:
        raise ConfigError(f"--older-than {older_than}: needs a number of days: 7d") from None
    with _opened(folder) as store:
        going = [entry for entry in store.list() if entry.used <= before]
        total = size(sum(entry.size for entry in going))
        question = f"Remove {len(going)} entries, {total}, from {store.place}?"
        if not yes and not sys.stdin.isatty():
            typer.echo(f"{question} There is no terminal to ask on: add --yes.", err=True)
            raise typer.Exit(2)
        if not yes:
            typer.confirm(question, abort=True)
        if going:
            # A corpus without some of its entries is unfinished: its manifest goes first.
            store.remove(["manifest.json", "entries.arrow", *(entry.name for entry in going)])
        for name in METADATA if everything else ():
            if (known := Path(store.place).parent / name).is_dir():
                shutil.rmtree(known)
    typer.echo(f"{store.place}: removed {len(going)} entries, {total}")


@contextlib.contextmanager
def _opened(given: Path | None) -> Iterator[TokenStore]:
    """Open the cache. An error of the disk becomes one line."""
    from penstock.config import cache_dir
    from penstock.read.token_store import TokenStore

    folder = cache_dir() if given is None else given.expanduser()
    if given is not None and not folder.is_dir():
        raise ConfigError(
            f"--dir {folder}: there is no such folder. By default it is {cache_dir()}."
        )
    prepared = (folder / "plan.json").exists()
    try:
        yield TokenStore(folder if prepared else folder / "tokens")
    except OSError as error:
        raise PenstockError(f"the cache in {folder}: {error}") from error


def _missing(store: TokenStore) -> list[tuple[str, str]]:
    """Return the entries that the manifest of a prepared corpus names and that do not exist."""
    from penstock.errors import SourceError
    from penstock.prepare.manifest import read_manifest

    try:
        names = read_manifest(store).names.to_pylist()
    except SourceError:  # a cache, or a corpus that is not finished
        return []
    found = {entry.name for entry in store.list()}
    return [(name, f"{store.place}/{name} is missing") for name in names if name not in found]

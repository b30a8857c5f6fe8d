"""`penstock cache`: show, verify or clear the token cache."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.filesize import decimal as size

from penstock.cli.command import command, print_json
from penstock.errors import ConfigError
from penstock.options import option, options

if TYPE_CHECKING:
    from penstock.read.token_store import TokenStore

DAY = 86400

cache = typer.Typer(help="Show, verify or clear the token cache or a prepared corpus.")


@options
class Folder:
    """The cache to use.

    dir: The cache folder, or that of a prepared corpus. Defaults to the token cache.
    json: Print JSON.
    """

    _: KW_ONLY
    dir: Path | None = None
    json: bool = False

    def print(self, text: str, **values: Any) -> None:
        """Print a text, or values as JSON."""
        print_json(values) if self.json else print(text)

    def open(self) -> TokenStore:
        """Open the cache."""
        from penstock.config import cache_dir
        from penstock.read.token_store import TokenStore

        folder = self.dir or cache_dir()
        if self.dir is not None and not folder.is_dir():
            raise ConfigError(f"--dir {folder}: there is no such folder")
        is_prepared = (folder / "plan.json").exists()
        return TokenStore(folder if is_prepared else folder / "tokens")


@options
class VerifyOptions:
    """Options of `penstock cache verify`.

    delete: Remove damaged entries.
    """

    _: KW_ONLY
    delete: bool = False


@options
class ClearOptions:
    """Options of `penstock cache clear`.

    older_than: Only entries unused for this many days, such as 7d.
    all: Also remove cached listings and footers of remote files.
    yes: Do not ask for confirmation.
    """

    _: KW_ONLY
    older_than: str = option(default="0d", pattern=r"\d+(\.\d+)?d?")
    all: bool = False
    yes: bool = False


@cache.command()
@command
def info(folder: Folder) -> None:
    """Show the number and size of entries, and the time of last use."""
    store = folder.open()
    found = list(store.list())
    total, used = sum(entry.size for entry in found), max((e.used for e in found), default=0.0)
    days = f", used {(time.time() - used) / DAY:.1f} days ago" if found else ""
    text = f"{store.place}: {len(found)} entries, {size(total)}{days}"
    folder.print(text, folder=store.place, entries=len(found), bytes=total, used=used)


@cache.command()
@command
def verify(folder: Folder, given: VerifyOptions) -> int:
    """Read all entries and verify their checksums.

    Exit code 1: there are damaged entries that were not deleted.
    """
    from penstock.prepare.manifest import missing_entries

    store = folder.open()
    damaged = dict(store.verify()) | missing_entries(store)
    if given.delete and damaged:
        store.remove(list(damaged))
    lines = [*damaged.values(), f"{store.place}: {len(damaged)} damaged"]
    folder.print("\n".join(lines), folder=store.place, damaged=damaged)
    return 1 if damaged and not given.delete else 0


@cache.command()
@command
def clear(folder: Folder, given: ClearOptions) -> int:
    """Remove token chunks.

    A running run continues, and makes them again when needed. Exit code 2: confirmation needs a
    terminal, or --yes.
    """
    before = time.time() - DAY * float(given.older_than.removesuffix("d"))
    store = folder.open()
    going = [entry for entry in store.list() if entry.used <= before]
    total = sum(entry.size for entry in going)
    what = f"{len(going)} entries, {size(total)}"
    question = f"Remove {what}, from {store.place}?"
    if not given.yes:
        if not sys.stdin.isatty():
            print(f"{question} There is no terminal to ask on: add --yes.", file=sys.stderr)
            return 2
        typer.confirm(question, abort=True)
    if going:
        # A corpus with missing entries is unfinished, so its manifest is removed first.
        store.remove(["manifest.json", "entries.arrow", *(entry.name for entry in going)])
    metadata = Path(store.place).parent / "metadata"  # metadata of remote files
    if given.all and metadata.is_dir():
        shutil.rmtree(metadata)
    text = f"{store.place}: removed {what}"
    folder.print(text, folder=store.place, entries=len(going), bytes=total)
    return 0

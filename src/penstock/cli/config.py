"""`penstock config`: the settings that apply here, and where each one came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.given import AsJson, Overrides, Preset, overrides
from penstock.types import shown_address

if TYPE_CHECKING:
    from penstock.settings import DatasetConfig, Settings

FILE_FROM = {
    "given": "as given",
    "PENSTOCK_CONFIG": "named by PENSTOCK_CONFIG",
    "found": "found in this folder",
}


def config(
    file: Annotated[
        Path | None,
        typer.Argument(help="A TOML or JSON file; default: PENSTOCK_CONFIG, or ./penstock.toml."),
    ] = None,
    set_: Overrides = None,
    preset: Preset = None,
    as_json: AsJson = False,
) -> None:
    """Show each setting, its value, and where the value came from.

    Exit code 1: a setting is invalid; the message says which, where it is written, and what would
    be valid.
    """
    from penstock.settings import load

    settings = load(file, overrides=overrides(set_), preset=preset, origin="command line --set ")
    if as_json:
        typer.echo(json.dumps(_as_json(settings), indent=2, default=str))
    else:
        _print(settings)


def _as_json(settings: Settings) -> dict[str, Any]:
    return {
        "file": None if settings.file is None else str(settings.file),
        "file_from": settings.file_from or None,
        "preset": settings["preset"],
        "settings": {
            name: {"value": _shown(settings[name]), "source": source}
            for name, source in settings.sources.items()
        },
        "data": None if settings.data is None else _shown(asdict(settings.data)),
    }


def _shown(value: Any) -> Any:
    """Return a value without the secrets in its addresses: it may be pasted into an issue."""
    if isinstance(value, str):
        return shown_address(value)
    if isinstance(value, Mapping):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return value


def _print(settings: Settings) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.settings import SETTINGS

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # for grep: one line a setting, however long
    file = settings.file
    console.print(
        Text("no file" if file is None else f"file {file}, {FILE_FROM[settings.file_from]}")
    )
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for title in ("setting", "value", "source"):
        table.add_column(title, overflow="fold")
    for name, source in settings.sources.items():
        row = name, shown_address(SETTINGS[name].show(settings[name])), source
        table.add_row(*map(Text, row), style="dim" if source == "default" else None)
    if settings.data is not None:
        for row in _rows(settings.data, "data"):
            table.add_row(*map(Text, row))
    console.print(table)


def _rows(data: DatasetConfig, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the data, one row a parameter."""
    yield f"{name}.kind", data.kind, data.where
    for key, value in _shown(data.parameters).items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield f"{name}.{key}", text, data.where
    for part, (table, weight) in data.parts.items():
        yield f"{name}.{part}.weight", str(weight), table.where
        yield from _rows(table, f"{name}.{part}")

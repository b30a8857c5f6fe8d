"""`penstock config`: the settings that hold here, and where each one came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.given import AsJson, Overrides, Preset
from penstock.errors import ConfigError
from penstock.types import shown_address

if TYPE_CHECKING:
    from penstock.dataset_config import DatasetConfig
    from penstock.settings import Settings


def config(
    file: Annotated[
        Path | None,
        typer.Argument(help="A TOML or JSON file; default: PENSTOCK_CONFIG, or ./penstock.toml."),
    ] = None,
    set_: Overrides = None,
    preset: Preset = None,
    as_json: AsJson = False,
) -> None:
    """Show each setting, its value, and where that came from.

    Exit code 1: one does not fit, and the line says which, where it is written, and what would fit.
    """
    from penstock.settings import load

    resolved = load(file, overrides=overrides(set_), preset=preset, origin="command line --set ")
    if as_json:
        typer.echo(json.dumps(_as_json(resolved), indent=2, default=str))
    else:
        _print(resolved)


def pair(written: str) -> tuple[str, str]:
    """A setting and its value, from `--set KEY=VALUE`."""
    key, equals, value = written.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"command line --set {written}: must be KEY=VALUE")
    return key.strip(), value


def size_in_bytes(text: str, option: str) -> int:
    """Return a size such as 512MiB in bytes, or raise ConfigError that names the option."""
    from penstock.options import read_size

    try:
        size = read_size(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"{option} {text}: must be bytes ≥ 1, or a size such as 512MiB")
    return size


def overrides(set_: list[str] | None, **options: int | None) -> dict[str, str]:
    """The settings of `--set`, and those that have an option of their own."""
    said = dict(pair(one) for one in set_ or ())
    for name, value in options.items():
        if value is not None and said.setdefault(name, str(value)) != str(value):
            option = "batch" if name == "batch_size" else name
            raise ConfigError(f"--{option} {value} and --set {name}={said[name]}: keep one of them")
    return said


def _as_json(resolved: Settings) -> dict[str, Any]:
    return {
        "file": None if resolved.file is None else str(resolved.file),
        "file_from": resolved.file_from or None,
        "preset": resolved["preset"],
        "settings": {
            name: {"value": _shown(resolved[name]), "source": source}
            for name, source in resolved.sources.items()
        },
        "data": None if resolved.data is None else _shown(asdict(resolved.data)),
    }


def _shown(value: Any) -> Any:
    """A value without what may be secret of the addresses in it: what is printed here is pasted into issues and logs."""
    if isinstance(value, str):
        return shown_address(value)
    if isinstance(value, Mapping):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return value


def _print(resolved: Settings) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.settings import SETTINGS

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # for grep: a line is a setting, however long its path
    said_by = {
        "given": "as given",
        "PENSTOCK_CONFIG": "named by PENSTOCK_CONFIG",
        "found": "found in this folder",
    }
    console.print(
        Text(
            "no file"
            if resolved.file is None
            else f"file {resolved.file}, {said_by[resolved.file_from]}"
        )
    )
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for title in ("setting", "value", "source"):
        table.add_column(title, overflow="fold")
    for name, source in resolved.sources.items():
        shown = shown_address(SETTINGS[name].show(resolved[name]))
        table.add_row(
            Text(name), Text(shown), Text(source), style="dim" if source == "default" else None
        )
    if resolved.data is not None:
        for row in _rows(resolved.data, "data"):
            table.add_row(*map(Text, row))
    console.print(table)


def _rows(data: DatasetConfig, name: str) -> Iterator[tuple[str, str, str]]:
    """The data, a line a parameter. Paths are shown as they will be opened, addresses without their secrets."""
    yield f"{name}.kind", data.kind, data.where
    for key, value in _shown(data.parameters).items():
        yield (
            f"{name}.{key}",
            value if isinstance(value, str) else json.dumps(value, default=str),
            data.where,
        )
    for part, (table, weight) in data.parts.items():
        yield f"{name}.{part}.weight", str(weight), table.where
        yield from _rows(table, f"{name}.{part}")

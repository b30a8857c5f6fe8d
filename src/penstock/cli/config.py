"""`penstock config`: show the effective settings and their sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.command import print_json
from penstock.options import options
from penstock.settings import SETTINGS
from penstock.tools.data_choice import SettingsOptions
from penstock.types import shown_address

if TYPE_CHECKING:
    from penstock.settings import DatasetConfig


@options
class ConfigOptions:
    """Options of `penstock config`.

    file: A TOML or JSON file. Defaults to PENSTOCK_CONFIG, or ./penstock.toml.
    json: Print JSON.
    """

    file: Path | None = None
    _: KW_ONLY
    json: bool = False


def config(given: ConfigOptions, chosen: SettingsOptions) -> None:
    """Show each setting with its value and source.

    Exit code 1: a setting is invalid; the message names it, its source and the valid values.
    """
    settings = chosen.load(given.file)
    file, data = settings.file, settings.data
    if given.json:
        values = {
            name: {"value": _shown(settings[name]), "source": source}
            for name, source in settings.sources.items()
        }
        about = {"file": file, "file_from": settings.file_from or None}
        about["preset"] = settings["preset"]
        data_shown = None if data is None else _shown(asdict(data))
        print_json({**about, "settings": values, "data": data_shown})
        return
    rows = [("setting", "value", "source")]
    for name, source in settings.sources.items():
        rows.append((name, shown_address(SETTINGS[name].show(settings[name])), source))
    rows += [] if data is None else _rows(data, "data")
    names, values_, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    print("no file" if file is None else f"file {file} ({settings.file_from})")
    for name, value, source in rows:
        print(f"{name:<{names}}  {value:<{values_}}  {source}")


def _shown(value: Any) -> Any:
    """Return a value without the secrets in its addresses, so that the output can be shared."""
    if isinstance(value, str):
        return shown_address(value)
    if isinstance(value, Mapping):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return value


def _rows(data: DatasetConfig, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the data, one row per parameter."""
    yield f"{name}.kind", data.kind, data.where
    for key, value in _shown(data.parameters).items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield f"{name}.{key}", text, data.where
    for part, (table, weight) in data.parts.items():
        yield f"{name}.{part}.weight", str(weight), table.where
        yield from _rows(table, f"{name}.{part}")

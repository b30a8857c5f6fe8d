"""The [data] table of a configuration file: which dataset to read.

A table names a `kind` and that dataset's own parameters, or has a table for each part of a mixture.
The parameters are those of the dataset's signature. Paths are relative to the file's folder; parts of
a mixture inherit the parameters above them that fit.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.options import TextOptions, options_of
from penstock.settings import TEXT_SETTINGS, ConfigFile, unknown

KINDS = {
    "text": ("penstock.dataset", "TextDataset"),
    "tokens": ("penstock.read.tokens", "TokenFileDataset.from_binary_file"),
    "synthetic": ("penstock.read.synthetic", "SyntheticDataset"),
}
VOCABULARY_FILES = (".json", ".tiktoken", ".model")
QUARANTINE = "quarantine:"


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset that a file describes, or the parts of a mixture."""

    kind: str
    """"text", "tokens", "synthetic" or "mixture"."""
    where: str
    parameters: Mapping[str, Any]
    parts: Mapping[str, tuple[DatasetConfig, float]] = field(default_factory=dict)

    def build(self, text_arguments: Mapping[str, Any]) -> Any:
        """Make the dataset. `text_arguments` are added to text datasets."""
        arguments = dict(self.parameters)
        make = _maker(self.kind)
        if self.kind == "text":
            arguments |= text_arguments
        try:
            if self.kind != "mixture":
                return make(**arguments)
            parts = {name: (one.build(text_arguments), w) for name, (one, w) in self.parts.items()}
            return make(parts, **arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def read_data(file: ConfigFile) -> DatasetConfig:
    """Check the table [data] against the datasets' parameters."""
    table = file.table("data") or {}
    if "mixture" in table:
        return _read_mixture(file, table)
    if "on_end" in table:
        raise ConfigError(f"{file.where('data', 'on_end')}: needs a table data.mixture")
    return _read_single(file, "data", table)


def _read_single(file: ConfigFile, name: str, table: Mapping[str, Any]) -> DatasetConfig:
    kind = table.get("kind")
    known = _parameters(file, name, kind)
    written = {key: value for key, value in table.items() if key != "kind"}
    for key in written:
        if key in TEXT_SETTINGS:
            raise ConfigError(f"{file.where(name, key)}: is a setting; put it into [loader]")
        if key not in known:
            raise unknown(file.where(name, key), key, ["kind", *known])
    required = [key for key, each in known.items() if each.default is each.empty]
    if missing := [key for key in required if key not in written]:
        raise ConfigError(f"{file.where(name)}: kind = {kind!r} needs {' and '.join(missing)}")
    parameters = {
        key: _value(file.path.parent.absolute(), key, value, file.where(name, key))
        for key, value in written.items()
    }
    return DatasetConfig(kind=str(kind), where=file.where(name), parameters=parameters)


def _read_mixture(file: ConfigFile, table: Mapping[str, Any]) -> DatasetConfig:
    tables = table["mixture"]
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(f"{file.where('data', 'mixture')}: must have a table for each part")
    shared = {key: value for key, value in table.items() if key not in ("mixture", "on_end")}
    if shared.get("kind") == "mixture":
        del shared["kind"]
    parts: dict[str, tuple[DatasetConfig, float]] = {}
    unused = shared.keys() - {"kind"}
    for part, own in tables.items():
        name = f"data.mixture.{part}"
        weight = own.get("weight")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight < 0:
            raise ConfigError(f"{file.where(name, 'weight')} = {weight!r}: must be a number ≥ 0")
        known = _parameters(file, name, (shared | own).get("kind"))
        inherited = {key: value for key, value in shared.items() if key in {*known, "kind"}}
        unused -= inherited.keys()
        own = {key: value for key, value in own.items() if key != "weight"}
        parts[part] = (_read_single(file, name, inherited | own), float(weight))
    for key in sorted(unused):
        raise unknown(
            file.where("data", key), key, ["kind", "on_end", *_parameters(file, "data", "text")]
        )
    ends = {"on_end": table["on_end"]} if "on_end" in table else {}
    return DatasetConfig(kind="mixture", where=file.where("data"), parameters=ends, parts=parts)


def _maker(kind: str) -> Callable[..., Any]:
    module, name = {**KINDS, "mixture": ("penstock.sources.mixture", "Mixture")}[kind]
    maker: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return maker


def _parameters(file: ConfigFile, name: str, kind: Any) -> dict[str, inspect.Parameter]:
    """Return what a dataset of this kind takes, without the settings of a run."""
    if not isinstance(kind, str) or kind not in KINDS:
        kinds = ", ".join(map(repr, KINDS))
        raise ConfigError(
            f"{file.where(name, 'kind')} = {kind!r}: must be one of {kinds}; a mixture has a table "
            "data.mixture.… for each part"
        )
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: each
        for name, each in inspect.signature(_maker(kind)).parameters.items()
        if each.kind not in variable and name not in TEXT_SETTINGS
    }


def _value(folder: Path, key: str, value: Any, where: str) -> Any:
    if key in ("urls", "path"):
        many = isinstance(value, list)
        return [_beside(folder, one) for one in value] if many else _beside(folder, value)
    if not isinstance(value, str):
        return value
    if key == "on_bad_record" and value.startswith(QUARANTINE):
        return QUARANTINE + _beside(folder, value.removeprefix(QUARANTINE))
    if key == "tokenizer":
        # A Hub name may look like a path, so only an existing or an unmistakable path is one.
        is_path = value.endswith(VOCABULARY_FILES) or value.startswith((".", "~"))
        is_path = is_path or (value != "byte" and (folder / value).exists())
        return _beside(folder, value) if is_path else value
    option = options_of(TextOptions).get(key)
    return value if option is None else option.read(value, where)


def _beside(folder: Path, value: Any) -> Any:
    """Resolve a path against the file's folder. URLs and short names of Hub datasets stay."""
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = folder / Path(value).expanduser()
    if value.isidentifier() and not path.exists():
        from penstock.read.hub import SHORT_NAMES

        if value in SHORT_NAMES:
            return value
    return str(path)

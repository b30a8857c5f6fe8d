"""The [data] table of a configuration file: which dataset to read.

A table names a `kind` and that dataset's own parameters, or has a table for each part of a mixture.
The parameters are those of the dataset's signature, which checks the values. Paths are relative to
the file's folder; parts of a mixture inherit the parameters above them that fit.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.options import RemoteOptions
from penstock.settings import TEXT_SETTINGS, ConfigFile, unknown

KINDS = {
    "text": ("penstock.dataset", "TextDataset"),
    "tokens": ("penstock.read.token_files", "TokenFileDataset.from_binary_file"),
    "prepared": ("penstock.sources.prepared", "PreparedDataset"),
    "synthetic": ("penstock.read.synthetic", "SyntheticDataset"),
    "mixture": ("penstock.sources.mixture", "Mixture"),
}
VOCABULARY_FILES = (".json", ".tiktoken", ".model")
QUARANTINE = "quarantine:"


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset that a file describes, or the parts of a mixture."""

    kind: str
    """"text", "prepared", "tokens", "synthetic" or "mixture"."""
    where: str
    parameters: Mapping[str, Any]
    parts: Mapping[str, tuple[DatasetConfig, Any]] = field(default_factory=dict)
    """Parts of a mixture with their weights."""

    def build(self, text_arguments: Mapping[str, Any]) -> Any:
        """Make the dataset. `text_arguments` are added to text datasets."""
        arguments = dict(self.parameters)
        if self.kind == "text":
            arguments = merge_text(arguments, text_arguments)
        if self.kind == "mixture":
            arguments["parts"] = {
                name: (part.build(text_arguments), weight)
                for name, (part, weight) in self.parts.items()
            }
        try:
            return _maker(self.kind)(**arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def merge_text(parameters: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of a text dataset with others added, some of them to its `remote`."""
    merged = {**parameters, **more}
    names = ("config", *TEXT_SETTINGS)
    remote = {name: merged.pop(name) for name in names if merged.get(name) is not None}
    if remote:
        merged["remote"] = replace(RemoteOptions.of(merged.get("remote")), **remote)
    return {name: value for name, value in merged.items() if name not in names}


def read_data(file: ConfigFile) -> DatasetConfig:
    """Check the names in the table [data] against the datasets' parameters."""
    shared = dict(file.table("data") or {})
    if "mixture" not in shared:
        return _read_table(file, "data", shared)
    tables = shared.pop("mixture")
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(f"{file.where('data', 'mixture')}: must have a table for each part")
    parameters = {"on_end": shared.pop("on_end")} if "on_end" in shared else {}
    parts: dict[str, tuple[DatasetConfig, Any]] = {}
    used = {"kind", "on_end"}
    for part, own in tables.items():
        name = f"data.mixture.{part}"
        known = _parameters(file, name, (shared | own).get("kind")).keys() | {"kind"}
        used |= known
        inherited = {key: value for key, value in shared.items() if key in known}
        own = {key: value for key, value in own.items() if key != "weight"}
        parts[part] = (_read_table(file, name, inherited | own), tables[part].get("weight"))
    for key in shared.keys() - used:
        raise unknown(file.where("data", key), key, used)
    where = file.where("data")
    return DatasetConfig(kind="mixture", where=where, parameters=parameters, parts=parts)


def _read_table(file: ConfigFile, name: str, table: Mapping[str, Any]) -> DatasetConfig:
    kind = table.get("kind")
    known = _parameters(file, name, kind)
    written = {key: value for key, value in table.items() if key != "kind"}
    for key in written:
        if key not in known:
            raise unknown(file.where(name, key), key, ["kind", *known])
    required = [key for key, each in known.items() if each.default is each.empty]
    if missing := [key for key in required if key not in written]:
        raise ConfigError(f"{file.where(name)}: kind = {kind!r} needs {' and '.join(missing)}")
    folder = file.path.parent.absolute()
    parameters = {key: _resolve(folder, key, value) for key, value in written.items()}
    return DatasetConfig(kind=str(kind), where=file.where(name), parameters=parameters)


def _maker(kind: str) -> Callable[..., Any]:
    module, name = KINDS[kind]
    maker: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return maker


def _parameters(file: ConfigFile, name: str, kind: Any) -> dict[str, inspect.Parameter]:
    """Return what a dataset of this kind takes, without the settings of a run."""
    kinds = [each for each in KINDS if each != "mixture"]
    if kind not in kinds:
        raise ConfigError(
            f"{file.where(name, 'kind')} = {kind!r}: must be one of {', '.join(map(repr, kinds))}; "
            "a mixture has a table data.mixture.… for each part"
        )
    taken = dict(inspect.signature(_maker(kind)).parameters)
    return taken


def _resolve(folder: Path, key: str, value: Any) -> Any:
    """Resolve a parameter that is a path against the file's folder."""
    if key in ("urls", "path", "store"):
        many = isinstance(value, list)
        return [_beside(folder, one) for one in value] if many else _beside(folder, value)
    if key == "on_bad_record" and str(value).startswith(QUARANTINE):
        return QUARANTINE + _beside(folder, value.removeprefix(QUARANTINE))
    if key == "tokenizer" and isinstance(value, str) and value != "byte":
        # A Hub name may look like a path, so only an existing or an unmistakable path is one.
        is_path = value.endswith(VOCABULARY_FILES) or value.startswith((".", "~"))
        return _beside(folder, value) if is_path or (folder / value).exists() else value
    return value


def _beside(folder: Path, value: Any) -> Any:
    """Resolve a path against the file's folder. URLs and short names of Hub datasets stay."""
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = folder / Path(value).expanduser()
    if value.isidentifier() and not path.exists():
        from penstock.read.hub import SHORT_NAMES

        return value if value in SHORT_NAMES else str(path)
    return str(path)

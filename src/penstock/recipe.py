"""The `data` table of a file: which dataset to read.

In:    `[data]` with a `kind` and that dataset's own parameters, or with a table for each part of a mixture.
Out:   a `DataTable` that has been checked, and the dataset it describes.
Where: the thread that creates a loader.
State: none.

Which parameters there are is asked of the dataset itself, so a new one is known here at once. Paths
are relative to the file's folder; parts of a mixture inherit what stands above them.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.dialects import ConfigFile, unknown
from penstock.errors import ConfigError
from penstock.values import Said, choice, number, read_size

MAKERS = {
    "text": ("penstock.dataset", "TextDataset"),
    "tokens": ("penstock.read.tokens", "TokenFileDataset.from_binary_file"),
    "synthetic": ("penstock.read.synthetic", "SyntheticDataset"),
}
PATHS = {"urls", "path", "quarantine"}
VOCABULARY_FILES = (".json", ".tiktoken", ".model")


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """What a file says of the data: one dataset, or the parts of a mixture."""

    kind: str
    """"text", "tokens", "synthetic" or "mixture"."""
    where: str
    parameters: Mapping[str, Any]
    parts: Mapping[str, tuple[DataTable, float]] = field(default_factory=dict)


def read_data(file: ConfigFile) -> DataTable | None:
    """The data that a file names, checked against what the datasets take."""
    table = file.table("data")
    if table is None:
        return None
    _no_settings(file, "data", table)
    if "mixture" in table:
        return _mixture(file, table)
    if "on_end" in table:
        raise ConfigError(
            f"{file.where('data', 'on_end')}: is for a mixture, and there is no data.mixture"
        )
    return _single(file, "data", table)


def _single(file: ConfigFile, name: str, table: Mapping[str, Any]) -> DataTable:
    kind = _kind(file, name, table)
    known = _parameters(kind)
    written = {key: value for key, value in table.items() if key != "kind"}
    for key in written:
        if key not in known:
            raise unknown(file.where(name, key), key, ["kind", *known])
    missing = [
        key for key, each in known.items() if each.default is each.empty and key not in written
    ]
    if missing:
        raise ConfigError(f"{file.where(name)}: kind = {kind!r} needs {' and '.join(missing)}")
    parameters = {key: _value(file, name, key, value) for key, value in written.items()}
    return DataTable(kind=kind, where=file.where(name), parameters=parameters)


def _mixture(file: ConfigFile, table: Mapping[str, Any]) -> DataTable:
    tables = table["mixture"]
    if (
        not isinstance(tables, dict)
        or not tables
        or not all(isinstance(part, dict) for part in tables.values())
    ):
        raise ConfigError(
            f"{file.where('data', 'mixture')}: needs a table for each part, with its weight"
        )
    shared = {key: value for key, value in table.items() if key not in ("mixture", "on_end")}
    if shared.get("kind") == "mixture":
        del shared["kind"]
    parts: dict[str, tuple[DataTable, float]] = {}
    taken: set[str] = {"kind"}
    for part, own in tables.items():
        name = f"data.mixture.{part}"
        _no_settings(file, name, own)
        if "weight" not in own:
            raise ConfigError(f"{file.where(name)}: needs a weight")
        weight = number().parse(Said("weight", own["weight"], file.where(name, "weight")))
        kind = _kind(file, name, shared | own)
        # A byte vocabulary that the text parts share is of no use to a part that is made up.
        fitting = {
            key: value for key, value in shared.items() if key == "kind" or key in _parameters(kind)
        }
        taken |= fitting.keys()
        rest = {key: value for key, value in own.items() if key != "weight"}
        parts[part] = (_single(file, name, fitting | rest), weight)
    for key in sorted(shared.keys() - taken):
        known = {"kind", "on_end"}.union(*(_parameters(part.kind) for part, _ in parts.values()))
        raise unknown(file.where("data", key), key, known)
    ends = {"on_end": table["on_end"]} if "on_end" in table else {}
    return DataTable(kind="mixture", where=file.where("data"), parameters=ends, parts=parts)


def _no_settings(file: ConfigFile, name: str, table: Mapping[str, Any]) -> None:
    """`doc_batch` never changes the stream, so it is how to run and not what to read."""
    if "doc_batch" in table:
        raise ConfigError(f"{file.where(name, 'doc_batch')}: is a setting; put it into loader")


def _kind(file: ConfigFile, name: str, table: Mapping[str, Any]) -> str:
    kinds = choice(*MAKERS, hint="; a mixture has a table data.mixture.… for each part")
    if "kind" not in table:
        raise ConfigError(f"{file.where(name)}: needs a kind, {kinds.needs}")
    kind: str = kinds.parse(Said("kind", table["kind"], file.where(name, "kind")))
    return kind


def _maker(kind: str) -> Callable[..., Any]:
    module, name = MAKERS[kind]
    maker: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return maker


def _parameters(kind: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(_maker(kind)).parameters
    return {
        name: each
        for name, each in parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL) and name != "doc_batch"
    }


def _value(file: ConfigFile, table: str, key: str, value: Any) -> Any:
    folder = file.path.parent.absolute()
    if key in PATHS:
        return (
            [_beside(folder, one) for one in value]
            if isinstance(value, list)
            else _beside(folder, value)
        )
    if key == "tokenizer" and isinstance(value, str):
        # A Hub name may look like a path, so only what is there, or can be nothing else, is one.
        is_path = (
            value.endswith(VOCABULARY_FILES)
            or value.startswith((".", "~"))
            or (folder / value).exists()
        )
        return _beside(folder, value) if is_path and value != "byte" else value
    if key.endswith("_bytes") and isinstance(value, str):
        try:
            return read_size(value)
        except (ValueError, TypeError, LookupError, ArithmeticError):
            raise ConfigError(
                f"{file.where(table, key)} = {value!r}: needs bytes, or a size such as 4MiB"
            ) from None
    return value


def _beside(folder: Path, value: Any) -> Any:
    """A path as seen from the file's folder; addresses with a scheme, and names that stand for one, stay."""
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = folder / Path(value).expanduser()
    if value.isidentifier() and not path.exists():
        from penstock.read.hub import SHORT_NAMES

        if value in SHORT_NAMES:
            return value
    return str(path)


def build_dataset(data: DataTable, *, doc_batch: int | None = None) -> Any:
    """The dataset that a table describes. `doc_batch` is the setting, for text."""
    arguments = dict(data.parameters)
    given: tuple[Any, ...] = ()
    if data.kind == "mixture":
        make = importlib.import_module("penstock.sources.mixture").Mixture
        parts = data.parts.items()
        given = (
            {
                name: (build_dataset(part, doc_batch=doc_batch), weight)
                for name, (part, weight) in parts
            },
        )
    else:
        make = _maker(data.kind)
        if data.kind == "text" and doc_batch is not None:
            arguments["doc_batch"] = doc_batch
    try:
        return make(*given, **arguments)
    except ConfigError as error:
        raise ConfigError(f"{data.where}: {error}") from error

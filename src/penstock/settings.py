"""Settings of a run, from the command line, the environment and a configuration file.

Precedence: command line > environment > file > default. A preset ranks just below what its own
source sets explicitly. The settings are the options of `LoaderOptions` that can be written as text,
two of `TextOptions`, and the three below; names used by other projects are aliases.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import config
from penstock.errors import ConfigError
from penstock.options import LoaderOptions, Option, RemoteOptions, option, options, options_of

if TYPE_CHECKING:
    from penstock.dataset_config import DatasetConfig

PRESETS = {
    "balanced": (2, 3),
    "high-performance": (4, 5),
    "memory-constrained": (1, 2),
    "A": (8, 16),
    "B": (4, 8),
    "C": (12, 8),
}
"""n_workers and prefetch_size by name."""

ALIASES = {
    "use_async_loader": "prefetch",
    "async_n_workers": "n_workers",
    "num_workers": "n_workers",
    "async_prefetch_size": "prefetch_size",
    "prefetch_batches": "prefetch_size",
    "num_epochs": "epochs",
}
NSA_FWE = {
    "NSA_FWE_PREFETCH": "prefetch",
    "NSA_FWE_Q": "prefetch_size",
    "NSA_FWE_DOC_BATCH": "doc_batch",
    "NSA_FWE_REPORT_DOCS": "report_docs",
    "NSA_FWE_WARMUP_BATCHES": "warmup_batches",
    "NSA_FWE_WARMUP_TIMEOUT": "warmup_timeout",
}
TABLES = ("loader", "training", "data", "train", "preset")
"""What Penstock reads of a file; `penstock train` reads [train]. Other tables are ignored."""
DEFAULT_FILE = "penstock.toml"


@options
class RunSettings:
    """Settings that are not an option of the loader or of a dataset.

    prefetch: Off: the synchronous path (n_workers=0). The same batches, each made inside `next()`.
    learning_rate: For the trainer; the loader ignores it.
    preset: n_workers and prefetch_size by name.
    """

    prefetch: bool = True
    learning_rate: float | None = option(default=None, minimum=0)
    preset: str | None = option(default=None, pattern="|".join(PRESETS))


TEXT_SETTINGS = ("doc_batch", "report_docs")
"""Options of `RemoteOptions` that are settings of a run."""
NOT_SETTINGS = ("shard", "preprocess", "collate", "device_preprocess")
"""Loader arguments that cannot be written as text."""

SETTINGS: dict[str, Option] = {
    **{name: each for name, each in options_of(LoaderOptions).items() if name not in NOT_SETTINGS},
    **{name: options_of(RemoteOptions)[name] for name in TEXT_SETTINGS},
    **options_of(RunSettings),
}
NAMES = {**{name: name for name in SETTINGS}, **ALIASES}
"""The setting that each name means, in files and on the command line."""
VARIABLES = {f"PENSTOCK_{key.upper()}": name for key, name in NAMES.items()} | NSA_FWE
"""The same for the environment."""


class RawSetting(NamedTuple):
    """A setting as it was written."""

    name: str
    value: Any
    where: str
    """Its source and its name there, such as "environment NSA_FWE_Q"."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked settings, and where each value came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    """"command line --x", "environment X", "file x.toml [loader] x", "preset x" or "default"."""
    file: Path | None
    file_from: str
    """Why this file: "given", "PENSTOCK_CONFIG", "found", or "" without a file."""
    data: DatasetConfig | None
    """The dataset that the file describes."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def loader_arguments(self, batch_size: int | None = None) -> dict[str, Any]:
        """Return keyword arguments of `AsyncDataLoader`; `batch_size` is used if none is set."""
        arguments = {name: self[name] for name in options_of(LoaderOptions) if name in SETTINGS}
        arguments["batch_size"] = self["batch_size"] or batch_size
        if arguments["batch_size"] is None:
            raise ConfigError(
                "batch_size is not set: write it in the file, in PENSTOCK_BATCH_SIZE, or pass it"
            )
        if not self["prefetch"]:
            arguments["n_workers"] = 0
        return arguments

    def text_arguments(self) -> dict[str, Any]:
        """Return the `RemoteOptions` of a `TextDataset` that are settings."""
        return {name: self[name] for name in TEXT_SETTINGS}


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    preset: str | None = None,
    origin: str = "command line --",
) -> Settings:
    """Read the settings from all sources.

    path: the file. Defaults to PENSTOCK_CONFIG, then to penstock.toml in the working directory.
    overrides: values by setting, which rank first; None is ignored. environment: defaults to the
    process's own. origin: what messages write before the name of an override.
    """
    environment = config.environment() if environment is None else environment
    given = from_source(overrides or {}, NAMES, origin)
    given += from_source({"preset": preset}, NAMES, "command line --")
    ours = {name for name in environment if name.startswith(("PENSTOCK_", "NSA_FWE_"))}
    variables = {name: environment[name] or None for name in sorted(ours - config.OTHER_VARIABLES)}
    where, file_from = _find_file(path, environment)
    file = ConfigFile(Path(), {}) if where is None else read_file(where)
    chosen = {name: RawSetting(name, each.default, "default") for name, each in SETTINGS.items()}
    chosen["batch_size"] = RawSetting("batch_size", None, "default")
    for layer in (_from_file(file), from_source(variables, VARIABLES, "environment "), given):
        read = each_once(layer, SETTINGS)
        if "preset" in read:
            name = read["preset"].value
            for setting, value in zip(("n_workers", "prefetch_size"), PRESETS[name], strict=True):
                chosen[setting] = RawSetting(setting, value, f"preset {name}")
        chosen |= read
    data = None
    if file.table("data") is not None:
        from penstock.dataset_config import read_data

        data = read_data(file)
    return Settings(
        values={name: one.value for name, one in chosen.items()},
        sources={name: one.where for name, one in chosen.items()},
        file=where,
        file_from=file_from,
        data=data,
    )


def build(
    path: str | os.PathLike[str] | None = None,
    dataset: Any = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    batch_size: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return a dataset and the keyword arguments of its loader, for `AsyncDataLoader.from_config`."""
    given = dict(overrides or {})
    passed_on = {name: given.pop(name) for name in NOT_SETTINGS if name in given}
    settings = load(path, overrides=given, origin="argument ")
    arguments = settings.loader_arguments(batch_size) | passed_on
    if dataset is None:
        if settings.data is None:
            raise ConfigError(
                f"no data: {settings.file or 'no file'} has a table [data], and no dataset was given"
            )
        dataset = settings.data.build(settings.text_arguments())
    return dataset, arguments


def _find_file(
    path: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> tuple[Path | None, str]:
    if path is not None:
        return Path(path), "given"
    if named := environment.get("PENSTOCK_CONFIG"):
        return Path(named).expanduser(), "PENSTOCK_CONFIG"
    found = Path(DEFAULT_FILE)
    return (found, "found") if found.exists() else (None, "")


# Names and values


def unknown(where: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest known one."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return ConfigError(f"{where}: unknown; did you mean {near[0]}?")
    return ConfigError(f"{where}: unknown; known are {', '.join(known)}")


def from_source(
    written: Mapping[str, Any], names: Mapping[str, str], origin: str
) -> list[RawSetting]:
    """Return what a source sets, under the settings' own names; None sets nothing."""
    found = []
    for key, value in written.items():
        name = names.get(key) or names.get(key.replace("-", "_"))
        if name is None:
            raise unknown(origin + key, key, names)
        if value is not None:
            found.append(RawSetting(name, value, origin + key))
    return found


def each_once(found: Iterable[RawSetting], known: Mapping[str, Option]) -> dict[str, RawSetting]:
    """Check the settings of one source. Two different values for one setting are an error."""
    read: dict[str, RawSetting] = {}
    for one in found:
        value = known[one.name].read(one.value, one.where)
        first = read.setdefault(one.name, one._replace(value=value))
        if first.value != value:
            raise ConfigError(
                f"{first.where} = {first.value!r} and {one.where} = {one.value!r} both set "
                f"{one.name}: keep one of them"
            )
    return read


# Files


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed configuration file."""

    path: Path
    tables: dict[str, Any]

    def where(self, table: str, key: str = "") -> str:
        """Name a place in the file, in the file's own notation."""
        return (self.prefix(table) + key).rstrip(" .")

    def prefix(self, table: str) -> str:
        """Return what `where` writes before a key."""
        if table:
            table = f"[{table}] " if self.path.suffix == ".toml" else f"{table}."
        return f"file {self.path} {table}"

    def table(self, name: str) -> dict[str, Any] | None:
        """Return a table, or None if the file does not have it."""
        table = self.tables.get(name)
        if table is not None and not isinstance(table, dict):
            raise ConfigError(f"{self.where('', name)} = {table!r}: must be a table")
        return table


def read_file(path: Path) -> ConfigFile:
    """Read a TOML file, or a JSON file that may have `//` comments."""
    if path.suffix not in (".toml", ".json", ".jsonc"):
        raise ConfigError(f"file {path}: the name must end in .toml or .json")
    try:
        text = path.read_text("utf-8-sig")
        is_toml = path.suffix == ".toml"
        tables = tomllib.loads(text) if is_toml else json.loads(without_comments(text))
    except OSError as error:
        raise ConfigError(f"file {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"file {path}: is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(tables, dict):
        raise ConfigError(f"file {path}: must be an object")
    return ConfigFile(path, tables)


STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')


def without_comments(text: str) -> str:
    """Blank out `//` comments; lines and columns stay where they are."""
    return STRING_OR_COMMENT.sub(
        lambda match: match[0] if match[0][0] == '"' else " " * len(match[0]), text
    )


def _from_file(file: ConfigFile) -> list[RawSetting]:
    """Return the settings of [loader] and [training], and a `preset` above both."""
    for key in file.tables.keys() - TABLES:
        if key in NAMES and not isinstance(file.tables[key], dict):
            raise ConfigError(f"{file.where('', key)}: must be in a table; put it into [loader]")
        if difflib.get_close_matches(key, TABLES, n=1, cutoff=0.85):
            raise unknown(file.where("", key), key, TABLES)
    found = from_source({"preset": file.tables.get("preset")}, NAMES, file.prefix(""))
    for table in ("loader", "training"):
        found += from_source(file.table(table) or {}, NAMES, file.prefix(table))
    return found

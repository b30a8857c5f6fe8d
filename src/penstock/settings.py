"""Read settings from the command line, the environment and a file; build a dataset and a run.

Precedence: command line > environment > file > default. A preset ranks just below the explicit
settings of its own source. The settings are the options of `LoaderOptions` that can be written as
text, two of `RemoteOptions`, and the three of `RunSettings`. Names used by other projects are
aliases. The [data] table of a file describes a dataset. `resolve_options` adds the defaults that
depend on data, rank and machine.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock import config
from penstock.errors import ConfigError, missing_extra, unknown
from penstock.feed.affinity import resolve
from penstock.options import LoaderOptions, Option, RemoteOptions, option, options, options_of

if TYPE_CHECKING:
    from penstock.sources.base import RunContext, Source

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
NSA_FWE = ("prefetch", "doc_batch", "report_docs", "warmup_batches", "warmup_timeout")
"""Settings that the environment may also set as NSA_FWE_ and the upper-case name."""
TABLES = ("loader", "training", "data", "train", "preset")
"""The top-level keys to read from a file; `penstock train` reads [train]. Others are ignored."""
DEFAULT_FILE = "penstock.toml"


@options
class RunSettings:
    """Settings that are not an option of the loader or of a dataset.

    prefetch: If off, `next()` makes each batch itself (n_workers=0). The batches are the same.
    learning_rate: For the trainer; the loader ignores it.
    preset: n_workers and prefetch_size by name.
    """

    prefetch: bool = True
    learning_rate: float | None = option(default=None, minimum=0)
    preset: str | None = option(default=None, pattern="|".join(PRESETS))


TEXT_SETTINGS = ("doc_batch", "report_docs")
"""Options of `RemoteOptions` that are also settings."""
NOT_SETTINGS = ("shard", "preprocess", "collate", "device_preprocess")
"""Loader arguments that cannot be written as text."""

SETTINGS: dict[str, Option] = {
    **{name: each for name, each in options_of(LoaderOptions).items() if name not in NOT_SETTINGS},
    **{name: options_of(RemoteOptions)[name] for name in TEXT_SETTINGS},
    **options_of(RunSettings),
}
NAMES = {**{name: name for name in SETTINGS}, **ALIASES}
"""The setting for each name in files and on the command line."""
VARIABLES = {f"PENSTOCK_{key.upper()}": name for key, name in NAMES.items()}
VARIABLES |= {f"NSA_FWE_{name.upper()}": name for name in NSA_FWE} | {"NSA_FWE_Q": "prefetch_size"}
"""The setting for each environment variable."""


class RawSetting(NamedTuple):
    """A value and its source."""

    value: Any
    where: str
    """The source and the name used there, such as "environment NSA_FWE_Q"."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked settings, with the source of each value."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    """"command line --x", "environment X", "file x.toml [loader] x", "preset x" or "default"."""
    file: Path | None
    file_from: str
    """How the file was chosen: "given", "PENSTOCK_CONFIG", "found", or "" without a file."""
    data: DatasetConfig | None
    """The dataset that the file describes."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def loader_arguments(self, batch_size: int | None = None) -> dict[str, Any]:
        """Return the arguments of `AsyncDataLoader`. `batch_size` applies if none is set."""
        arguments = {name: self[name] for name in options_of(LoaderOptions) if name in SETTINGS}
        arguments["batch_size"] = self["batch_size"] or batch_size
        if not self["prefetch"]:
            arguments["n_workers"] = 0
        return arguments

    def text_arguments(self) -> dict[str, Any]:
        """Return the `RemoteOptions` among the settings, for a `TextDataset`."""
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
    overrides: values by setting, with the highest precedence; None is ignored. environment:
    defaults to that of the process. origin: the prefix of an override's name in messages.
    """
    environment = config.environment() if environment is None else environment
    ours = {name for name in environment if name.startswith(("PENSTOCK_", "NSA_FWE_"))}
    variables = {name: environment[name] or None for name in sorted(ours - config.OTHER_VARIABLES)}
    named = environment.get("PENSTOCK_CONFIG")
    found = DEFAULT_FILE if os.path.exists(DEFAULT_FILE) else ""
    file_from = "given" if path else "PENSTOCK_CONFIG" if named else "found" if found else ""
    where = Path(path or named or found).expanduser()
    file = read_file(where) if file_from else ConfigFile(where, {})
    given = read_source(overrides or {}, NAMES, origin)
    layers = (
        _from_file(file),
        read_source(variables, VARIABLES, "environment "),
        read_source({"preset": preset}, NAMES, "command line --", into=given),
    )
    chosen = {name: RawSetting(each.default, "default") for name, each in SETTINGS.items()}
    chosen["batch_size"] = RawSetting(None, "default")
    for layer in layers:
        if "preset" in layer:
            name = layer["preset"].value
            for setting, value in zip(("n_workers", "prefetch_size"), PRESETS[name], strict=True):
                chosen[setting] = RawSetting(value, f"preset {name}")
        chosen |= layer
    return Settings(
        values={name: one.value for name, one in chosen.items()},
        sources={name: one.where for name, one in chosen.items()},
        file=file.path if file_from else None,
        file_from=file_from,
        data=None if file.table("data") is None else read_data(file),
    )


def build(path: Any, dataset: Any, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a dataset and the keyword arguments of its loader, for `AsyncDataLoader.from_config`."""
    given = {name: value for name, value in overrides.items() if name not in NOT_SETTINGS}
    settings = load(path, overrides=given, origin="argument ")
    arguments = settings.loader_arguments()
    arguments |= {name: overrides[name] for name in NOT_SETTINGS if name in overrides}
    if dataset is None:
        if settings.data is None:
            raise ConfigError(
                f"no data: {settings.file or 'no file'} has no table [data], and no dataset was given"
            )
        dataset = settings.data.build(settings.text_arguments())
    return dataset, arguments


# Names and values


def read_source(
    written: Mapping[str, Any],
    names: Mapping[str, str],
    origin: str,
    known: Mapping[str, Option] = SETTINGS,
    into: Mapping[str, RawSetting] | None = None,
) -> dict[str, RawSetting]:
    """Return the checked settings of a source under their canonical names; None sets nothing.

    into: settings already read from the same source. Two different values for one are an error.
    """
    read = dict(into or {})
    for key, value in written.items():
        name = names.get(key) or names.get(key.replace("-", "_"))
        if name is None:
            raise unknown(origin + key, key, names)
        if value is None:
            continue
        one = RawSetting(known[name].read(value, origin + key), origin + key)
        first = read.setdefault(name, one)
        if first.value != one.value:
            raise ConfigError(
                f"{first.where} = {first.value!r} and {one.where} = {value!r} both set {name}: keep "
                "one of them"
            )
    return read


# Files


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed configuration file."""

    path: Path
    tables: dict[str, Any]

    def where(self, table: str, key: str = "") -> str:
        """Return a description of a place in the file, for messages."""
        return " ".join(filter(None, ["file", str(self.path), table and f"[{table}]", key]))

    def table(self, name: str) -> dict[str, Any] | None:
        """Return a table, or None if the file does not have it."""
        table = self.tables.get(name)
        if table is not None and not isinstance(table, dict):
            raise ConfigError(f"{self.where('', name)} = {table!r}: must be a table")
        return table


def read_file(path: Path) -> ConfigFile:
    """Read a TOML file, or a JSON file that may have `//` comments."""
    import tomllib

    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text("utf-8-sig")
        tables = tomllib.loads(text) if kind == "TOML" else json.loads(without_comments(text))
    except OSError as error:
        raise ConfigError(f"file {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"file {path}: is not valid {kind}: {error}") from None
    if not isinstance(tables, dict):
        raise ConfigError(f"file {path}: must be an object")
    return ConfigFile(path, tables)


STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')


def without_comments(text: str) -> str:
    """Blank out `//` comments, preserving lines and columns."""
    return STRING_OR_COMMENT.sub(
        lambda match: match[0] if match[0][0] == '"' else " " * len(match[0]), text
    )


def _from_file(file: ConfigFile) -> dict[str, RawSetting]:
    """Return the settings of [loader] and [training], and the top-level `preset`."""
    for key in file.tables.keys() - TABLES:
        if key in NAMES or get_close_matches(key, TABLES, n=1, cutoff=0.85):
            raise ConfigError(f"{file.where('', key)}: not a table; known are {', '.join(TABLES)}")
    read = read_source({"preset": file.tables.get("preset")}, NAMES, file.where("") + " ")
    for table in ("loader", "training"):
        origin = file.where(table) + " "
        read = read_source(file.table(table) or {}, NAMES, origin, into=read)
    return read


# The dataset of a file

KINDS = {
    "text": "TextDataset",
    "tokens": "TokenFileDataset.from_binary_file",
    "prepared": "PreparedDataset",
    "synthetic": "SyntheticDataset",
}
"""The constructor for each kind of dataset. Its signature has the parameters."""
VOCABULARY_FILES = (".json", ".tiktoken", ".model")
QUARANTINE = "quarantine:"


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset described by a file, or the parts of a mixture."""

    kind: str
    """"text", "prepared", "tokens", "synthetic" or "mixture"."""
    where: str
    parameters: Mapping[str, Any]
    parts: Mapping[str, tuple[DatasetConfig, Any]] = field(default_factory=dict)
    """The parts of a mixture, with their weights."""

    def build(self, text_arguments: Mapping[str, Any]) -> Any:
        """Create the dataset. Text datasets also get `text_arguments`."""
        arguments = dict(self.parameters)
        if self.kind == "text":
            arguments = merge_text(arguments, text_arguments)
        try:
            if self.kind != "mixture":
                return _maker(self.kind)(**arguments)
            parts = {
                name: (part.build(text_arguments), weight)
                for name, (part, weight) in self.parts.items()
            }
            return penstock.Mixture(parts, **arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def merge_text(parameters: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a text dataset, merged with more; some of them go to `remote`."""
    merged = {**parameters, **more}
    remote = {name: merged.pop(name, None) for name in ("config", *TEXT_SETTINGS)}
    given = {name: value for name, value in remote.items() if value is not None}
    return merged | {"remote": replace(RemoteOptions.of(merged.get("remote")), **given)}


def read_data(file: ConfigFile) -> DatasetConfig:
    """Read the table [data], and check its names against the parameters of the datasets.

    Paths are relative to the file's folder. Parts of a mixture inherit the parameters they accept.
    """
    shared = dict(file.table("data") or {})
    tables = shared.pop("mixture", None)
    if tables is None:
        return _read_table(file, "data", shared, {})
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(f"{file.where('data', 'mixture')}: must have a table for each part")
    parameters = {"on_end": shared.pop("on_end")} if "on_end" in shared else {}
    weights = {part: own.pop("weight", None) for part, own in tables.items()}
    parts = {
        part: (_read_table(file, f"data.mixture.{part}", own, shared), weights[part])
        for part, own in tables.items()
    }
    used = {"kind"}.union(*(part.parameters for part, _ in parts.values()))
    for key in shared.keys() - used:
        raise unknown(file.where("data", key), key, used)
    where = file.where("data")
    return DatasetConfig(kind="mixture", where=where, parameters=parameters, parts=parts)


def _read_table(
    file: ConfigFile, name: str, own: Mapping[str, Any], shared: Mapping[str, Any]
) -> DatasetConfig:
    kind = own.get("kind", shared.get("kind"))
    known = _parameters(file, name, kind)
    inherited = {key: value for key, value in shared.items() if key in known}
    table = inherited | {key: value for key, value in own.items() if key != "kind"}
    for key in table.keys() - known:
        raise unknown(file.where(name, key), key, ["kind", *known])
    required = [key for key, each in known.items() if each.default is each.empty]
    if missing := [key for key in required if key not in table]:
        raise ConfigError(f"{file.where(name)}: kind = {kind!r} needs {' and '.join(missing)}")
    folder = file.path.parent.absolute()
    parameters = {key: _resolve(folder, key, value) for key, value in table.items()}
    return DatasetConfig(kind=kind, where=file.where(name), parameters=parameters)


def _maker(kind: str) -> Callable[..., Any]:
    maker: Callable[..., Any] = operator.attrgetter(KINDS[kind])(penstock)
    return maker


def _parameters(file: ConfigFile, name: str, kind: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a dataset of this kind."""
    if kind not in KINDS:
        raise ConfigError(
            f"{file.where(name, 'kind')} = {kind!r}: must be one of {', '.join(map(repr, KINDS))}; "
            "a mixture has a table data.mixture.… for each part"
        )
    return inspect.signature(_maker(kind)).parameters


def _resolve(folder: Path, key: str, value: Any) -> Any:
    """Resolve a parameter that is a path against the file's folder."""
    if key in ("urls", "path", "store"):
        many = isinstance(value, list)
        return [_beside(folder, one) for one in value] if many else _beside(folder, value)
    if key == "on_bad_record" and str(value).startswith(QUARANTINE):
        return QUARANTINE + _beside(folder, value.removeprefix(QUARANTINE))
    if key == "tokenizer" and isinstance(value, str) and value != "byte":
        # A Hub name may look like a path, so only existing or unmistakable paths are resolved.
        is_path = value.endswith(VOCABULARY_FILES) or value.startswith((".", "~"))
        return _beside(folder, value) if is_path or (folder / value).exists() else value
    return value


def _beside(folder: Path, value: Any) -> Any:
    """Resolve a path against the file's folder. Keep URLs and short names of Hub datasets."""
    from penstock.read.listing import SHORT_NAMES

    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = folder / Path(value).expanduser()
    return value if value in SHORT_NAMES and not path.exists() else str(path)


# Defaults that depend on data, rank and machine

PREFETCH_AT_FIRST = 8
"""The initial queue size for prefetch_size="auto"."""
DEVICE_BATCHES = 3
"""Batches on the device: the one in use and two in flight."""


def resolve_options(given: LoaderOptions, source: Source) -> RunContext:
    """Add the defaults that depend on data, rank and machine, and check the combination."""
    from penstock.sources.base import RunContext

    device = _device(given.device)
    if given.device_preprocess is not None and device is None:
        raise ConfigError("device_preprocess=…: needs device='cuda' or another device")
    alone, shard = given.shard is not None, given.shard or config.current_shard()
    cpus = resolve(given.cpus, given.numa_node)
    n_workers = given.n_workers
    if n_workers is None:
        n_workers = min(config.default_workers(), len(cpus or range(16)))
    prefetch = PREFETCH_AT_FIRST if given.prefetch_size == "auto" else given.prefetch_size
    warmup = 0 if given.warmup_batches == "auto" else given.warmup_batches
    batches = max(prefetch, warmup) + 1 + (DEVICE_BATCHES if device is not None else 0)
    queue_bytes = batches * given.batch_size * source.row_bytes()
    if queue_bytes >= given.memory_limit:
        raise ConfigError(
            f"memory_limit={given.memory_limit}: the {batches} batches in the queue and in use "
            f"take {queue_bytes} bytes. Raise it, or lower prefetch_size or batch_size."
        )
    several = shard.mod > 1 and not alone
    drop_last = several if given.drop_last is None else given.drop_last
    if several and not drop_last and given.epochs is not None and not source.even:
        raise ConfigError(
            f"drop_last=False with epochs={given.epochs} on {shard.mod} ranks: their last batches "
            "would differ in number and size. Use drop_last=True."
        )
    # If the size of a batch is unknown, queue and read-ahead get half each.
    queue_bytes = queue_bytes or given.memory_limit // 2
    return RunContext(
        shuffle=source.shuffles if given.shuffle is None else given.shuffle,
        seed=given.seed,
        batch_size=given.batch_size,
        drop_last=drop_last,
        epochs=given.epochs,
        shard=shard,
        alone=alone,
        n_workers=n_workers,
        workers=given.workers,
        cpus=cpus,
        prefetch_size=prefetch,
        row_bytes=source.row_bytes(),
        queue_bytes=queue_bytes,
        read_ahead_bytes=given.memory_limit - queue_bytes,
        tensors=importlib.util.find_spec("torch") is not None,
        device=device,
    )


def _device(device: Any) -> str | None:
    name = "cpu" if device is None else str(device)
    if name.partition(":")[0] == "cpu":
        return None
    if importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", f"device={name!r}", "torch")
    return name

"""How settings are written: their names in each dialect, and the files they stand in.

In:    a TOML or JSON file, environment variables, options.
Out:   `Said`: a setting, its value as written, and where it stands.
Where: the thread that creates a loader.
State: none.

Besides our own, the names are those of the FineWeb-Edu scripts (`NSA_FWE_…`) and of
the AsyncDataLoader guides (`training`, in TOML and in JSON).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.config import OTHER_VARIABLES
from penstock.errors import ConfigError
from penstock.values import Kind, Said

NSA_FWE = {
    "NSA_FWE_PREFETCH": "prefetch",
    "NSA_FWE_Q": "prefetch_size",
    "NSA_FWE_DOC_BATCH": "doc_batch",
    "NSA_FWE_REPORT_DOCS": "report_docs",
    "NSA_FWE_WARMUP_BATCHES": "warmup_batches",
    "NSA_FWE_WARMUP_TIMEOUT": "warmup_timeout",
}
"""The FineWeb-Edu scripts, in the environment."""

TRAINING = {
    "use_async_loader": "prefetch",
    "async_n_workers": "n_workers",
    "async_prefetch_size": "prefetch_size",
    "prefetch_batches": "prefetch_size",
    "num_workers": "n_workers",
}
"""The AsyncDataLoader guides, in a file's table `training`, beside our own names."""

EVERYWHERE = {"num_epochs": "epochs"}
"""Second names that hold in every dialect."""

TABLES = ("loader", "training", "data", "train")
"""The tables of a file that are ours; `train` is read by `penstock train` only. Others are left alone."""


# Names


def unknown(
    where: str, key: str, known: Collection[str], also: Mapping[str, str] | None = None
) -> ConfigError:
    """The error for a name nobody knows. `also` has names that other dialects use for the known ones."""
    if also and key in also:
        return ConfigError(f"{where}: unknown; here it is called {also[key]}")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return ConfigError(f"{where}: unknown; the nearest known name is {near[0]}")
    return ConfigError(f"{where}: unknown; known are {', '.join(sorted(known))}")


def from_options(options: Mapping[str, Any], names: Collection[str], origin: str) -> Iterator[Said]:
    """What options say. None is an option that was not given; hyphens are as good as underscores."""
    for key, value in options.items():
        if value is None:
            continue
        name, where = key.replace("-", "_"), origin.format(key)
        setting = EVERYWHERE.get(name, name)
        if setting not in names:
            raise unknown(where, name, [*names, *EVERYWHERE], TRAINING)
        yield Said(setting, value, where)


def from_environment(environment: Mapping[str, str], names: Collection[str]) -> Iterator[Said]:
    """What variables say, `PENSTOCK_…` before `NSA_FWE_…`. An empty variable says nothing."""
    ours = {_variable(name): name for name in names} | {
        _variable(key): name for key, name in EVERYWHERE.items()
    }
    known = ours | NSA_FWE
    for variable in sorted(environment, key=lambda name: (not name.startswith("PENSTOCK_"), name)):
        if not variable.startswith(("PENSTOCK_", "NSA_FWE_")) or variable in OTHER_VARIABLES:
            continue
        where = f"environment {variable}"
        if variable not in known:
            also = {
                key.replace("NSA_FWE_", "PENSTOCK_"): _variable(name)
                for key, name in NSA_FWE.items()
            }
            also |= {_variable(key): _variable(name) for key, name in TRAINING.items()}
            raise unknown(
                where,
                variable,
                NSA_FWE if variable.startswith("NSA") else {*ours, *OTHER_VARIABLES},
                also,
            )
        if environment[variable]:
            yield Said(known[variable], environment[variable], where)


def _variable(name: str) -> str:
    return f"PENSTOCK_{name.upper()}"


# Files


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file that has been read."""

    path: Path
    tables: dict[str, Any]

    def where(self, table: str, key: str = "") -> str:
        """A place in it, in the file's own notation."""
        if self.path.suffix == ".toml":
            place = f"[{table}] {key}".rstrip() if table else key
        else:
            place = f"{table}.{key}".strip(".")
        return f"file {self.path} {place}"

    def table(self, name: str) -> dict[str, Any] | None:
        """One of our tables, or None."""
        table = self.tables.get(name)
        if table is not None and not isinstance(table, dict):
            raise ConfigError(f"{self.where('', name)} = {table!r}: needs a table")
        return table


def read_file(path: Path, named_by: str = "") -> ConfigFile:
    """Read TOML or JSON, as the suffix says."""
    readers = {".toml": _toml, ".json": _json, ".jsonc": _json}
    if path.suffix not in readers:
        raise ConfigError(f"file {path}{named_by}: needs a name that ends in .toml or .json")
    try:
        written = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"file {path}{named_by}: is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"file {path}{named_by}: cannot be read: {error.strerror}") from None
    try:
        return ConfigFile(path, readers[path.suffix](written))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"file {path}: {error}") from None


def _toml(written: str) -> dict[str, Any]:
    try:
        return tomllib.loads(written)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML: {error}") from None


def _json(written: str) -> dict[str, Any]:
    try:
        value = json.loads(
            without_comments(written), object_pairs_hook=_no_key_twice, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"is JSON, but not an object: it is {type(value).__name__}")
    return value


_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')


def without_comments(written: str) -> str:
    """JSON with each `//` comment blanked out, so that lines and columns stay where they were."""
    return _STRING_OR_COMMENT.sub(
        lambda match: match[0] if match[0][0] == '"' else " " * len(match[0]), written
    )


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        raise ValueError(f"has the key {twice!r} twice in one object")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which is no JSON")


def from_file(file: ConfigFile, names: Collection[str]) -> Iterator[Said]:
    """What a file says in `[loader]`, in `[training]`, and as `preset` above both."""
    own = {name: name for name in names} | EVERYWHERE
    _no_stray_names(file, own)
    if "preset" in file.tables:
        yield Said("preset", file.tables["preset"], file.where("", "preset"))
    for table, known in (("loader", own), ("training", own | TRAINING)):
        for key, value in (file.table(table) or {}).items():
            if key not in known:
                raise unknown(file.where(table, key), key, known, TRAINING)
            yield Said(known[key], value, file.where(table, key))


def _no_stray_names(file: ConfigFile, own: Mapping[str, str]) -> None:
    """Other top-level names are the trainer's, unless they look like one of ours gone astray."""
    for key, value in file.tables.items():
        if key in TABLES or key == "preset":
            continue
        if (key in own or key in TRAINING) and not isinstance(value, dict):
            table = "loader" if key in own else "training"
            raise ConfigError(f"{file.where('', key)}: stands outside a table; put it into {table}")
        near = difflib.get_close_matches(key, (*TABLES, "preset"), n=1, cutoff=0.85)
        if near:
            raise unknown(file.where("", key), key, near)
    if file.tables and not {*TABLES, "preset"} & file.tables.keys():
        raise ConfigError(
            f"file {file.path}: has none of the tables {', '.join(TABLES)}, so nothing in it is for us"
        )


def each_once(
    said: Iterable[Said], kinds: Mapping[str, Kind], *, agreeing: bool = False
) -> dict[str, Said]:
    """One source's settings, read. A setting that is said twice is an error, unless `agreeing` values may be."""
    found: dict[str, Said] = {}
    written: dict[str, Any] = {}
    for one in said:
        value = kinds[one.setting].parse(one)
        first = found.get(one.setting)
        if first is None:
            found[one.setting], written[one.setting] = one._replace(value=value), one.value
        elif not agreeing or first.value != value:
            raise ConfigError(
                f"{first.where} = {written[one.setting]!r} and {one.where} = {one.value!r} are the same setting, "
                f"{one.setting}: keep one of them"
            )
    return found

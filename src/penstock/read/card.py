"""A dataset's card: which files its configurations consist of.

In:    the text of README.md, and the name of a configuration.
Out:   patterns of paths in the same repository; or, where the card says nothing, which of its files
       are the data.
Where: whichever thread lists files.
State: none.

A card is written by strangers. It can name paths in its own repository and nothing else; what it
costs to read one is bounded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.errors import ConfigError, MissingExtra, NoData, SourceError
from penstock.read.hub import Entry, sound
from penstock.read.manifest import classify, is_marker
from penstock.types import Format

MAX_DEPTH = 32
NO_DATA = frozenset(
    {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
)
"""Files about the data, by name."""
_TRAIN = re.compile(r"(?:^|[/._\-0-9])train(?:[/._\-0-9]|$)")

E = TypeVar("E", bound=Entry)


class Config(NamedTuple):
    """A configuration as its card gives it."""

    name: str
    default: bool
    folder: str
    """What the patterns are below; empty for the whole repository."""
    splits: dict[str, list[str]] | None
    """Patterns of each split; None where the card leaves it to the files' names."""


class Choice(NamedTuple):
    """What to read."""

    folder: str
    patterns: list[str] | None
    """Paths in the repository; None for the folder's data files, whichever they are."""


def configurations(text: str, where: str) -> list[Config]:
    """The configurations that a card names; none without a card."""
    head = _front_matter(text)
    if "configs" not in head:
        return []
    items = _load(head, where)
    if items is None:
        return []
    if not isinstance(items, list):
        raise _broken(where, "`configs` is no list")
    return [_config(item, where) for item in items]


def choose(configs: Sequence[Config], wanted: str | None, where: str) -> Choice:
    """The files of the configuration asked for, or of the default one."""
    if wanted is None:
        if not configs:
            return Choice("", None)
        config, split = _default(configs, where), None
    else:
        config, split = _named(configs, wanted, where)
    folder = "" if config.folder in ("", ".", "./") else _confined(config.folder, "", where)
    if config.splits is None:
        return Choice(folder, None)
    if split is None:
        if "train" not in config.splits and len(config.splits) > 1:
            raise ConfigError(
                f"{where}: configuration {config.name!r} has no split 'train'. Choose one: "
                + ", ".join(f"config={f'{config.name}/{name}'!r}" for name in config.splits)
            )
        split = "train" if "train" in config.splits else next(iter(config.splits))
    return Choice(folder, [_confined(pattern, folder, where) for pattern in config.splits[split]])


def _default(configs: Sequence[Config], where: str) -> Config:
    marked = [config for config in configs if config.default]
    named = [config for config in configs if config.name == "default"]
    for group in (marked, named, configs):
        if len(group) == 1:
            return group[0]
    raise ConfigError(
        f"{where}: has several configurations and no default one. Choose one: {_names(configs)}"
    )


def _named(configs: Sequence[Config], wanted: str, where: str) -> tuple[Config, str | None]:
    by_name = {config.name: config for config in configs}
    if wanted in by_name:
        return by_name[wanted], None
    name, _, split = wanted.rpartition("/")
    if name in by_name:
        splits = by_name[name].splits or {}
        if split in splits:
            return by_name[name], split
        raise ConfigError(
            f"{where}: configuration {name!r} has no split {split!r}; it has {', '.join(splits) or 'none'}"
        )
    if not configs:
        raise ConfigError(
            f"config={wanted!r}: {where} names no configurations. Leave config out, or name files: …/NAME/path-or-glob"
        )
    raise ConfigError(f"{where}: has no configuration {wanted!r}. It has {_names(configs)}")


def _names(configs: Sequence[Config]) -> str:
    return ", ".join(f"config={config.name!r}" for config in configs)


def data_files(entries: Iterable[E], where: str, format: Format | None) -> list[E]:
    """Which files of a repository are its data, where nobody says so: of one format, and for training."""
    rest = [e for e in entries if not is_marker(e.path) and not about_data(e.path)]
    for kind in ("parquet", "jsonl", "text"):
        found = [e for e in rest if _is(e.path, kind) and (format is None or format == kind)]
        training = [e for e in found if _TRAIN.search(e.path.lower())]
        if found:
            return training or found
    if format is not None and rest:
        return rest
    raise NoData(
        f"{where}: none of its files is Parquet, JSONL or text. Name some: …/NAME/path-or-glob"
    )


def _is(path: str, kind: str) -> bool:
    known = classify(path)
    return known is not None and known[0] == kind and not path.endswith(".py")


def about_data(path: str) -> bool:
    """Whether a file describes the data and is none itself."""
    return path.rpartition("/")[2] in NO_DATA


# The card's own form


def _front_matter(text: str) -> str:
    """The YAML between two lines of dashes, at the very beginning."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return ""
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    return "\n".join(lines[1:end]) if end is not None else ""


def _load(head: str, where: str) -> Any:
    """The value of `configs`. Nothing else is made into objects."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise MissingExtra("pyyaml", "reading a dataset card", "hf") from None
    loader_type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(head, Loader=loader_type):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > MAX_DEPTH:
                raise _broken(where, f"it is nested more than {MAX_DEPTH} deep")
        loader = loader_type(head)
        try:
            root = loader.get_single_node()
            for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
                if key.value == "configs":
                    _refuse_references(yaml, value, where)
                    return loader.construct_document(value)
        finally:
            loader.dispose()
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:
        raise _broken(where, " ".join(str(error).split())[:200]) from None
    return None


def _refuse_references(yaml: Any, root: Any, where: str) -> None:
    """A few lines of references to each other can stand for gigabytes."""
    seen: set[int] = set()
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            raise _broken(where, "references (*name) within `configs` are not read")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            nodes += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def _config(item: Any, where: str) -> Config:
    if not isinstance(item, dict):
        raise _broken(where, f"a configuration is {str(item)[:60]!r}")
    name, folder, files = (
        item.get("config_name", "default"),
        item.get("data_dir"),
        item.get("data_files"),
    )
    if not isinstance(name, str | int | float) or not isinstance(folder, str | None):
        raise _broken(
            where,
            f"a configuration is called {str(name)[:60]!r}, with the data_dir {str(folder)[:60]!r}",
        )
    return Config(
        str(name),
        item.get("default") is True,
        folder or "",
        None if files is None else _splits(files, where),
    )


def _splits(files: Any, where: str) -> dict[str, list[str]]:
    """Patterns by split, from any of the forms in which cards give them."""
    if isinstance(files, str):
        return {"train": [files]}
    if isinstance(files, dict):
        return {str(split): _patterns(value, where) for split, value in files.items()}
    if isinstance(files, list) and files and all(isinstance(item, dict) for item in files):
        out: dict[str, list[str]] = {}
        for item in files:
            out.setdefault(str(item.get("split", "train")), []).extend(
                _patterns(item.get("path"), where)
            )
        return out
    return {"train": _patterns(files, where)}


def _patterns(value: Any, where: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(item, str) for item in values)
    ):
        raise _broken(where, f"data_files has {str(value)[:60]!r} for a pattern")
    return values


def _confined(pattern: str, folder: str, where: str) -> str:
    """A pattern as a path in its own repository; anything else is refused before anything is asked for."""
    path = pattern.removeprefix("./").removesuffix("/")
    if path in ("", "."):
        return folder or "**"
    if "://" in pattern or not sound(path) or len(path) > 4096:
        raise ConfigError(
            f"{where}: its data_files name {pattern[:300]!r}. A card can name files of its own repository only; "
            "nothing was asked for there. If you trust that address, give it to TextDataset yourself."
        )
    return f"{folder}/{path}" if folder else path


def _broken(where: str, why: str) -> SourceError:
    return SourceError(
        f"{where} cannot be understood: {why}. Name the files instead: …/NAME/path-or-glob"
    )


__all__ = ["Choice", "Config", "about_data", "choose", "configurations", "data_files"]

"""Resolve the data that a command names, and the loader's settings, before anything is opened.

The data is a short name, an address or a path, or else what a settings file describes. Values
given on the command line override those of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import hub_endpoint
from penstock.errors import ConfigError
from penstock.recipe import DataTable, build_dataset
from penstock.settings import load, loader_arguments
from penstock.types import Shard, shown_address

LOCAL = "fineweb_edu_local"
"""The name for FineWeb-Edu from a file that `penstock bootstrap` wrote."""
SETTINGS_FILES = (".toml", ".json", ".jsonc")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """A dataset that can be made, and how to load it."""

    name: str
    """The name for messages, without secrets."""
    make: Callable[[], Any]
    """Makes the dataset: lists files and loads the vocabulary."""
    arguments: Mapping[str, Any]
    """Keyword arguments of `AsyncDataLoader`, for a single rank."""
    server: str
    """The server that the data comes from; empty for local data."""


def choose_data(
    dataset: str | None = None,
    *,
    default: str | None = None,
    local_path: Path | None = None,
    settings_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    batch_size: int = 1,
    token_cache: bool = True,
    **given: Any,
) -> DataChoice:
    """Choose the data by name, else the data of the settings file, else `default`.

    local_path: the file for `fineweb_edu_local`. settings_file, overrides, preset: as for
    `penstock.settings.load`. batch_size: used if none is set. token_cache: False turns the cache
    of tokens off. given: parameters of the dataset (tokenizer, seq_len, …); None means not given.
    """
    resolved = load(
        settings_file, overrides=overrides, preset=preset, origin="command line --set {}"
    )
    settings = resolved.settings
    if settings.batch_size is None:
        settings = replace(settings, batch_size=batch_size)
    arguments = loader_arguments(settings) | {"shard": Shard(1, 0)}
    given = {name: value for name, value in given.items() if value is not None}
    if local_path is not None:
        if dataset not in (None, LOCAL):
            raise ConfigError(f"--local-path {local_path}: only for --dataset {LOCAL}")
        dataset = LOCAL
    elif dataset == LOCAL and not os.path.exists(LOCAL):
        raise ConfigError(
            f"--dataset {LOCAL} needs --local-path FILE; `penstock bootstrap --out FILE` writes one"
        )
    if dataset is None and resolved.data is not None:
        table = _override(resolved.data, given)
        if not token_cache:
            table = _without_cache(table)
        return DataChoice(
            name=table.where,
            make=partial(build_dataset, table, doc_batch=settings.doc_batch),
            arguments=arguments,
            server=_server(table.parameters.get("urls")),
        )
    name = default if dataset is None else dataset
    if not name:
        where = (
            f"file {resolved.file} has no table data" if name is None else "the address is empty"
        )
        raise ConfigError(f"no data: {where}. Name an address, a path or a settings file.")
    given = {"tokenizer": "byte", "seq_len": 1024, "doc_batch": settings.doc_batch} | given
    if not token_cache:
        given["cache"] = False
    return DataChoice(
        name=shown_address(name) if local_path is None else f"{name} {local_path}",
        make=partial(_make, name, local_path, given),
        arguments=arguments,
        server=_server(name),
    )


def split_target(target: str) -> dict[str, Any]:
    """Return a command's FILE|URL argument as `settings_file` or `dataset` for `choose_data`."""
    if target.lower().endswith(SETTINGS_FILES) and "://" not in target:
        return {"settings_file": Path(target)}
    return {"dataset": target}


def text_path(name: str, local_path: Path | None) -> str | Path:
    """Return the address of the text that a name stands for. Writes the text of `stdlib` once."""
    if local_path is not None:
        return local_path
    if name == "stdlib" and not os.path.exists(name):
        from penstock.read.stdlib import write_stdlib

        return write_stdlib()
    return name


def _override(table: DataTable, given: Mapping[str, Any]) -> DataTable:
    """Replace parameters of a file's data by those of the command line."""
    for name in given:
        if table.kind == "mixture" or (table.kind != "text" and name != "seq_len"):
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option}: does not apply to {table.where}, which is of kind {table.kind}. "
                "Change it in the file, or name other data."
            )
    return replace(table, parameters={**table.parameters, **given})


def _without_cache(table: DataTable) -> DataTable:
    parts = {name: (_without_cache(part), weight) for name, (part, weight) in table.parts.items()}
    cache = {"cache": False} if table.kind == "text" else {}
    return replace(table, parameters={**table.parameters, **cache}, parts=parts)


def _make(name: str, local_path: Path | None, given: dict[str, Any]) -> Any:
    """Make the dataset that a name stands for. A file of that name takes precedence."""
    if name == "synthetic" and not os.path.exists(name):
        from penstock.encode.tokenizer import load_tokenizer
        from penstock.read.synthetic import SyntheticDataset

        return SyntheticDataset(load_tokenizer(given["tokenizer"]).vocab_size, given["seq_len"])
    from penstock.dataset import TextDataset

    return TextDataset(text_path(name, local_path), **given)


def _server(urls: Any) -> str:
    """Return the first server that the addresses name, without a login."""
    from penstock.read.hub import SHORT_NAMES

    for url in [urls] if isinstance(urls, str) else urls or ():
        if url.startswith("hf://") or (url in SHORT_NAMES and not os.path.exists(url)):
            return hub_endpoint()
        scheme, separator, rest = shown_address(url).partition("://")
        if separator:
            return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
    return ""

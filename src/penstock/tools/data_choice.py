"""Resolve the data that a command names, and the loader's settings, before anything is opened.

The data is a short name, an address or a path, or else what a settings file describes. Values
given on the command line override those of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.dataset_config import DatasetConfig, merge_text
from penstock.errors import ConfigError
from penstock.settings import load
from penstock.types import Shard, shown_address

LOCAL = "fineweb_edu_local"
"""The name for FineWeb-Edu from a file that `penstock bootstrap` wrote."""
ENTRIES = "entries.arrow"
"""The file that tells a prepared corpus from a folder of text."""
SETTINGS_FILES = (".toml", ".json", ".jsonc")


class DataChoice(NamedTuple):
    """A dataset that can be made, and how to load it."""

    name: str
    """The name for messages, without secrets."""
    make: Callable[[], Any]
    """Makes the dataset: lists files and loads the vocabulary."""
    arguments: Mapping[str, Any]
    """Keyword arguments of `AsyncDataLoader`, for a single rank."""


def choose_data(
    dataset: str | None = None,
    *,
    default: str | None = None,
    local_path: Path | None = None,
    settings_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    batch_size: int = 16,
    token_cache: bool = True,
    **given: Any,
) -> DataChoice:
    """Choose the data by name, else the data of the settings file, else `default`.

    local_path: the file for `fineweb_edu_local`. settings_file, overrides, preset: as for
    `penstock.settings.load`. batch_size: used if none is set. token_cache: False turns the cache
    of tokens off. given: parameters of the dataset (tokenizer, seq_len, …), and `config`, a
    configuration of its card; None means not given.
    """
    settings = load(settings_file, overrides=overrides, preset=preset, origin="command line --set ")
    arguments = settings.loader_arguments(batch_size) | {"shard": Shard(1, 0)}
    given = {name: value for name, value in given.items() if value is not None}
    if local_path is not None:
        if dataset not in (None, LOCAL):
            raise ConfigError(f"--local-path {local_path}: only for --dataset {LOCAL}")
        dataset = LOCAL
    elif dataset == LOCAL and not os.path.exists(LOCAL):
        raise ConfigError(
            f"--dataset {LOCAL} needs --local-path FILE; `penstock bootstrap --out FILE` writes one"
        )
    for_text = settings.text_arguments() | ({} if token_cache else {"cache": False})
    if dataset is None and settings.data is not None:
        data = _override(settings.data, given)
        return DataChoice(data.where, partial(data.build, for_text), arguments)
    name = default if dataset is None else dataset
    if not name:
        raise ConfigError("no data: name an address, a path or a settings file with [data]")
    parameters = merge_text({"tokenizer": "byte", "seq_len": 1024, **for_text}, given)
    shown = shown_address(name) if local_path is None else f"{name} {local_path}"
    return DataChoice(shown, partial(_make, name, local_path, parameters), arguments)


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
        from penstock.read.demo_corpus import write_stdlib

        return write_stdlib()
    return name


def _override(data: DatasetConfig, given: Mapping[str, Any]) -> DatasetConfig:
    """Replace parameters of a file's data by those of the command line."""
    for name in given:
        if data.kind == "mixture" or (data.kind != "text" and name != "seq_len"):
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option}: does not apply to {data.where}, which is of kind {data.kind}. "
                "Change it in the file, or name other data."
            )
    return replace(data, parameters=merge_text(data.parameters, given))


def _make(name: str, local_path: Path | None, parameters: dict[str, Any]) -> Any:
    """Make the dataset that a name stands for. A file of that name takes precedence."""
    if name == "synthetic" and not os.path.exists(name):
        from penstock.encode.tokenizer import load_tokenizer
        from penstock.read.synthetic import SyntheticDataset

        return SyntheticDataset(
            load_tokenizer(parameters["tokenizer"]).vocab_size, parameters["seq_len"]
        )
    if os.path.exists(os.path.join(name, ENTRIES)):
        from penstock.sources.prepared import PreparedDataset

        return PreparedDataset(name, seq_len=parameters["seq_len"])
    from penstock.dataset import TextDataset

    return TextDataset(text_path(name, local_path), **parameters)

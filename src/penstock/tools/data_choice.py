"""Resolve the data that a command names, and the loader's settings, before opening anything.

The data is a short name, an address or a path, or else the [data] of a settings file. Values on the
command line override those of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.options import option, options
from penstock.settings import DatasetConfig, Settings, load, merge_text
from penstock.types import Shard, shown_address

LOCAL = "fineweb_edu_local"
"""The name of FineWeb-Edu in a file written by `penstock bootstrap`."""
ENTRIES = "entries.arrow"
"""The file that distinguishes a prepared corpus from a folder of text."""
SETTINGS_FILES = (".toml", ".json", ".jsonc")


@options
class SettingsOptions:
    """Settings of the loader on the command line."""

    _: KW_ONLY
    preset: str | None = option(default=None, help="Workers and prefetch by name.")
    set: list[str] | None = option(
        default=None, help="A loader setting, such as n_workers=2. Repeatable."
    )

    def overrides(self) -> dict[str, str]:
        """Return the settings of `--set KEY=VALUE`."""
        pairs = [text.partition("=") for text in self.set or ()]
        for key, equals, value in pairs:
            if not equals or not key.strip():
                raise ConfigError(f"command line --set {key}{equals}{value}: must be KEY=VALUE")
        return {key.strip(): value for key, _, value in pairs}

    def load(self, file: Path | None, **own: int | None) -> Settings:
        """Read the settings. `own`: those with a separate option."""
        settings = self.overrides()
        for name, value in own.items():
            if value is not None and settings.setdefault(name, str(value)) != str(value):
                raise ConfigError(
                    f"{name} {value} and --set {name}={settings[name]}: give only one"
                )
        return load(file, overrides=settings, preset=self.preset, origin="command line --set ")


@options
class DataOptions(SettingsOptions):
    """Data, and how to load it.

    tokenizer: byte, gpt2, a file or a Hub name. Defaults to the settings file's, or byte.
    seq_len: Tokens per row. Defaults to the settings file's, or 1024.
    text_field: Column or field with the text. Defaults to the settings file's, or text.
    batch: Rows per batch.
    """

    _: KW_ONLY
    tokenizer: str | None = None
    seq_len: int | None = option(default=None, minimum=1)
    text_field: str | None = None
    batch: int | None = option(default=None, minimum=1)


class DataChoice(NamedTuple):
    """A dataset to create, and how to load it."""

    name: str
    """The name for messages, without secrets."""
    make: Callable[[], Any]
    """Creates the dataset: lists files and loads the vocabulary."""
    arguments: Mapping[str, Any]
    """Keyword arguments of `AsyncDataLoader`, for a single rank."""


def choose_data(
    given: DataOptions,
    dataset: str | None = None,
    *,
    default: str | None = None,
    local_path: Path | None = None,
    settings_file: Path | None = None,
    batch_size: int = 16,
    token_cache: bool = True,
    **own: int | None,
) -> DataChoice:
    """Choose the data by name, else the data of the settings file, else `default`.

    dataset: may also be a settings file. local_path: the file for `fineweb_edu_local`. batch_size:
    used if none is set. token_cache: False disables the token cache. own: settings.
    """
    if dataset and dataset.lower().endswith(SETTINGS_FILES) and "://" not in dataset:
        settings_file, dataset = Path(dataset), None
    settings = given.load(settings_file, batch_size=given.batch, **own)
    arguments = settings.loader_arguments(batch_size) | {"shard": Shard(1, 0)}
    described = {name: getattr(given, name) for name in ("tokenizer", "seq_len", "text_field")}
    described = {name: value for name, value in described.items() if value is not None}
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
        data = _override(settings.data, described)
        return DataChoice(data.where, partial(data.build, for_text), arguments)
    name = dataset or default
    if not name:
        raise ConfigError("no data: name an address, a path or a settings file with [data]")
    parameters = merge_text({"tokenizer": "byte", "seq_len": 1024, **for_text}, described)
    shown = shown_address(name) if local_path is None else f"{name} {local_path}"
    return DataChoice(shown, partial(_make, name, local_path, parameters), arguments)


def text_path(name: str, local_path: Path | None) -> str | Path:
    """Return the path or address of a named text. Writes the text of `stdlib` once."""
    if local_path is not None:
        return local_path
    if name == "stdlib" and not os.path.exists(name):
        from penstock.tools.demo_corpus import write_stdlib

        return write_stdlib()
    return name


def _override(data: DatasetConfig, given: Mapping[str, Any]) -> DatasetConfig:
    """Override parameters of a file's data with those of the command line."""
    for name in given:
        if data.kind == "mixture" or (data.kind != "text" and name != "seq_len"):
            raise ConfigError(
                f"--{name.replace('_', '-')}: does not apply to {data.where}, which is of kind "
                f"{data.kind}. Change it in the file, or name other data."
            )
    if data.kind == "text":
        return replace(data, parameters=merge_text(data.parameters, given))
    return replace(data, parameters={**data.parameters, **given})


def _make(name: str, local_path: Path | None, parameters: dict[str, Any]) -> Any:
    """Create the named dataset. A file of that name takes precedence."""
    if name == "synthetic" and not os.path.exists(name):
        from penstock.encode.tokenizer import load_tokenizer
        from penstock.read.token_files import SyntheticDataset

        vocab_size = load_tokenizer(parameters["tokenizer"]).vocab_size
        return SyntheticDataset(vocab_size, parameters["seq_len"])
    if os.path.exists(os.path.join(name, ENTRIES)):
        from penstock.sources.prepared import PreparedDataset

        return PreparedDataset(name, seq_len=parameters["seq_len"])
    from penstock.dataset import TextDataset

    return TextDataset(text_path(name, local_path), **parameters)

"""Which data a check reads, and how it is loaded.

In:    what the command line names; settings from a file and the environment.
Out:   a `Choice`: settings that have been checked, and a function that makes the dataset.
Where: the calling thread. Nothing is opened or listed before `make` is called.
State: none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import hub_endpoint
from penstock.dataset_config import DatasetConfig
from penstock.errors import ConfigError
from penstock.settings import Settings, load
from penstock.types import Shard, shown_address

LOCAL = "fineweb_edu_local"
"""FineWeb-Edu from a file that `penstock bootstrap` wrote."""
DEFAULTS = {"tokenizer": "byte", "seq_len": 1024}
TAKES = {
    "text": ("tokenizer", "seq_len", "text_field"),
    "tokens": ("seq_len",),
    "synthetic": ("seq_len",),
    "mixture": (),
}
"""What may be said of a file's data on the command line."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Data, and how it is loaded."""

    name: str
    """As it was named, for messages."""
    make: Callable[[], Any]
    """Lists the files and loads the vocabulary: it takes as long as a server takes."""
    settings: Settings
    batch_size: int
    """Used if none is set."""
    server: str = ""
    """Where it comes from, if not from disk."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of an `AsyncDataLoader` that reads alone, whatever a launcher set."""
        return self.settings.loader_arguments(self.batch_size) | {"shard": Shard(1, 0)}


def choose(
    dataset: str | None = None,
    *,
    default: str | None = None,
    local_path: Path | None = None,
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    batch_size: int = 1,
    **given: Any,
) -> Choice:
    """Data by its name, or else the data that the settings' file names, or else `default`.

    local_path: the file for `fineweb_edu_local`. config, overrides, preset: as for `penstock.settings.load`.
    batch_size: where none is set. given: tokenizer, seq_len and text_field; None is what was not said.
    """
    settings = load(config, overrides=overrides, preset=preset, origin="command line --set {}")
    said = {name: value for name, value in given.items() if value is not None}
    if local_path is not None:
        if dataset not in (None, LOCAL):
            raise ConfigError(
                f"--local-path {local_path} goes with --dataset {LOCAL}, and that is {dataset}"
            )
        dataset = LOCAL
    elif dataset == LOCAL and not os.path.exists(LOCAL):
        raise ConfigError(
            f"--dataset {LOCAL} needs --local-path FILE; `penstock bootstrap --out FILE` writes one"
        )
    if dataset is None and settings.data is not None:
        table = _changed(settings.data, said)
        make = partial(table.build, settings.text_arguments())
        return Choice(
            name=table.where,
            make=make,
            settings=settings,
            batch_size=batch_size,
            server=_server(table.parameters.get("urls")),
        )
    name = dataset if dataset is not None else default
    if name == "":
        raise ConfigError(
            "no data: the address is empty; a folder, also the one we are in, has a name such as ."
        )
    if name is None:
        raise ConfigError(
            f"no data: file {settings.file} has no table data; write one, or give an address"
        )
    shown = shown_address(name) if local_path is None else f"{name} {local_path}"
    make = partial(_named, name, local_path, DEFAULTS | settings.text_arguments() | said)
    return Choice(
        name=shown, make=make, settings=settings, batch_size=batch_size, server=_server(name)
    )


def _changed(table: DatasetConfig, said: Mapping[str, Any]) -> DatasetConfig:
    """A file's data, with what the command line says of it."""
    for name in said:
        if name not in TAKES[table.kind]:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option}: {table.where} is of kind {table.kind}, of which that cannot be said here. Leave it out or "
                "change it there, or name other data."
            )
    return replace(table, parameters={**table.parameters, **said})


def _named(name: str, local_path: Path | None, said: Mapping[str, Any]) -> Any:
    """The dataset that a name stands for. As with short names, a file of that name goes first."""
    from penstock.dataset import TextDataset

    if name == "synthetic" and not os.path.exists(name):
        from penstock.encode.tokenizer import load_tokenizer
        from penstock.read.synthetic import SyntheticDataset

        return SyntheticDataset(load_tokenizer(said["tokenizer"]).size, said["seq_len"])
    return TextDataset(text_of(name, local_path), **said)


def text_of(name: str, local_path: Path | None) -> str | Path:
    """Where the text is that a name stands for; the standard library's is written if it is not there yet."""
    if local_path is not None:
        return local_path
    if name == "stdlib" and not os.path.exists(name):
        from penstock.read.stdlib import write_stdlib

        return write_stdlib()
    return name


def _server(urls: Any) -> str:
    """The first server that these addresses name, without what is secret of an address."""
    from penstock.read.hub import SHORT_NAMES

    for url in [urls] if isinstance(urls, str) else urls or ():
        if url.startswith("hf://") or (url in SHORT_NAMES and not os.path.exists(url)):
            return hub_endpoint()
        scheme, there, rest = shown_address(url).partition("://")
        if there:
            return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
    return ""

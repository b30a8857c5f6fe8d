"""Data that a settings file or an address names, for commands that take either; and how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

FILES = (".toml", ".json", ".jsonc")
"""What a settings file's name ends with."""
BATCH = 16
"""Rows of a batch where nothing says how many,"""
SEQ_LEN = 1024
"""and ids of a row."""


def is_file(target: str) -> bool:
    """Whether that is a settings file, and not an address."""
    return target.lower().endswith(FILES) and "://" not in target


def described(
    file: str | Path, about: Mapping[str, Any], running: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The dataset of a file, and the arguments of its loader, for one reader alone.

    about: what the command line says of the data, which is the file's to say. running: what it says of the loader.
    """
    if about:
        named = ", ".join("--" + name.replace("_", "-") for name in about)
        raise ConfigError(f"{named}: the data is described in {file}; change it there")
    from penstock.settings import build
    from penstock.types import Shard

    return build(file, None, {**running, "shard": Shard(1, 0)}, batch_size=BATCH)


def addressed(
    url: str, about: Mapping[str, Any], running: Mapping[str, Any], **data: Any
) -> tuple[Any, dict[str, Any]]:
    """The text at an address, and the arguments of its loader, for one reader alone.

    about: what the command line says of the data, over `data`. running: what it says of the loader; for what it leaves
    out, the environment counts, and a settings file that lies here, as for a run.
    """
    from penstock.dataset import TextDataset
    from penstock.options import RemoteOptions
    from penstock.settings import load
    from penstock.types import Shard

    settings = load(None, overrides=running)
    arguments = settings.loader_arguments(BATCH) | {"shard": Shard(1, 0)}
    how = {"tokenizer": "byte", "seq_len": SEQ_LEN, **settings.text_arguments(), **data, **about}
    card = how.pop("config", None)
    how["remote"] = replace(RemoteOptions.of(how.get("remote")), config=card)
    return TextDataset(url, **how), arguments

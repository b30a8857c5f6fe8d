"""Data that a settings file describes, for commands that take such a file in the place of an address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

FILES = (".toml", ".json", ".jsonc")
"""What a settings file's name ends with."""
BATCH = 16
"""Rows of a batch where neither the file nor the command line says."""


def is_file(target: str) -> bool:
    """Whether that is a settings file, and not an address."""
    return target.lower().endswith(FILES) and "://" not in target


def described(file: str | Path, about: Mapping[str, Any], running: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset of a file, and the arguments of its loader, for one reader alone.

    about: what the command line says of the data, which is the file's to say. running: what it says of the loader.
    """
    if about:
        named = ", ".join("--" + name.replace("_", "-") for name in about)
        raise ConfigError(f"{named}: the data is described in {file}; change it there")
    from penstock.settings import build
    from penstock.types import Shard

    return build(file, None, {**running, "shard": Shard(1, 0)}, batch_size=BATCH)

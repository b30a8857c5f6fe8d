"""`penstock train`: train a small GPT. Its options are declared in `penstock.train.options`."""

from __future__ import annotations

import logging
import sys
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, TextIO

import typer

from penstock.cli.command import declare
from penstock.config import current_shard
from penstock.options import options
from penstock.tools.data_choice import SettingsOptions
from penstock.train.options import TrainOptions, resolve


@options
class ConfigOptions:
    """Settings of a run.

    config: A TOML or JSON file.
    """

    _: KW_ONLY
    config: Path | None = None


def train(**given: Any) -> None:
    """Train a small GPT: one process, DDP or FSDP2 under torchrun.

    --resume continues from the newest checkpoint. Loader settings come from --config, the
    environment and --set; `penstock config` lists them. Exit code 0: finished, or stopped by
    SIGTERM and saved. 1: an error. 130: Ctrl-C.
    """
    from penstock.train.run import train as run

    config, preset = given.pop("config"), given.pop("preset")
    overrides = SettingsOptions(set=given.pop("set") or None).overrides()
    chosen = resolve(config, given, overrides=overrides, preset=preset)
    log = logging.getLogger("penstock")
    if current_shard().rem == 0 and not log.hasHandlers():
        log.addHandler(_ConsoleHandler())
        log.setLevel(logging.INFO)
    raise typer.Exit(run(*chosen))


declare(train, ConfigOptions, SettingsOptions, TrainOptions)


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Shows log messages among the lines of the run, and warnings on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        from penstock.train.run import show

        if record.levelno < logging.WARNING:
            show(f"[train] {self.format(record)}")
        else:
            super().emit(record)


def main(*implied: str) -> None:
    """Run `penstock train` for the scripts. `implied`: options that a script adds."""
    from penstock.cli.main import app

    app(["train", *implied, *sys.argv[1:]])

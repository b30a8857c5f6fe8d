"""`penstock train`: train a small GPT. Its options are declared in `penstock.train.options`."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.given import pair
from penstock.config import current_shard
from penstock.options import Option
from penstock.train.options import OPTIONS, flag, resolve

SETTINGS = "Settings"


def train(**given: Any) -> None:
    """Train a small GPT: one process, DDP or FSDP2 under torchrun.

    --resume continues from the newest checkpoint. Settings of the loader come from --config, the
    environment and --set; `penstock config` lists them. Exit code 0: done, or stopped by SIGTERM and
    saved. 1: an error. 130: Ctrl-C.
    """
    from penstock.train.run import train as run

    config, preset, pairs = given.pop("config"), given.pop("preset"), given.pop("pairs")
    chosen = resolve(config, given, overrides=dict(map(pair, pairs or ())), preset=preset)
    log = logging.getLogger("penstock")
    if current_shard().rem == 0 and not log.hasHandlers():
        log.addHandler(_ConsoleHandler())
        log.setLevel(logging.INFO)
    raise typer.Exit(run(*chosen))


class _ConsoleHandler(logging.Handler):
    """Shows the loader's messages among the run's lines, and its warnings on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        from penstock.train.console import show

        try:
            if record.levelno < logging.WARNING:
                show(f"[train] {self.format(record)}")
            else:
                print(self.format(record), file=sys.stderr)
        except Exception:  # a console that has gone must not end the run
            self.handleError(record)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None
    )


def _of_option(option: Option) -> inspect.Parameter:
    default = int(option.default) if isinstance(option.default, bool) else option.default
    words = ("0", "1") if option.implied == "1" else option.words
    value = "|".join(words) or "VALUE"
    made = typer.Option(
        flag(option.name),
        help=option.help,
        rich_help_panel=option.group,
        show_default=False if default is None else str(default),
        metavar=f"[{value}]" if option.implied else value,
    )
    return _parameter(option.name, str | None, made)


def _setting(name: str, metavar: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=SETTINGS)


_SETS = "A loader setting, such as n_workers=2. Repeatable."
_PARAMETERS = [
    _parameter("config", Path | None, _setting("--config", "FILE", "A TOML or JSON file.")),
    _parameter("preset", str | None, _setting("--preset", "NAME", "Workers and prefetch by name.")),
    _parameter("pairs", list[str] | None, _setting("--set", "KEY=VALUE", _SETS)),
    *map(_of_option, OPTIONS.values()),
]  # fmt: skip
train.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
train.__annotations__ = {each.name: each.annotation for each in _PARAMETERS}


def main(*implied: str) -> None:
    """Run `penstock train` for the scripts. `implied`: options that a script stands for."""
    from penstock.cli.main import app

    app(["train", *implied, *sys.argv[1:]])

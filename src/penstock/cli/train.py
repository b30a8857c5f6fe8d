"""`penstock train`: the showcase, a real training run."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import complete
from penstock.cli.config import pair
from penstock.config import current_shard
from penstock.options import Option
from penstock.train.console import show
from penstock.train.options import OPTIONS, resolve, spelled

SETTINGS = "Settings"


def train(**given: Any) -> None:
    """Train a small GPT: alone or, under torchrun, DDP or FSDP2.

    A real run, to the end or until it is told to stop; --resume goes on from its newest checkpoint. What belongs to the loader comes from --config, the environment and --set: see docs/configuration.md.
    Exit code 0: done, or told to stop. 1: an error. 130: Ctrl-C.
    """
    from penstock.train.trainer import train as run

    config, preset, pairs = given.pop("config"), given.pop("preset"), given.pop("pairs")
    chosen = resolve(config, given, overrides=dict(pair(one) for one in pairs or ()), preset=preset)
    _show_log()
    raise typer.Exit(run(*chosen))


class _Log(logging.Handler):
    """Warnings to stderr, as without it; the rest among what the run says of itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno >= logging.WARNING:
                print(self.format(record), file=sys.stderr)
            else:
                show(f"[train] {self.format(record)}")
        except (
            Exception
        ):  # nobody reads it any more, say: that is no reason for whoever logs something to fail
            self.handleError(record)


def _show_log() -> None:
    """Show what the loader says of its work (`report_docs`, autotune), and not only its warnings: one rank for all."""
    log = logging.getLogger("penstock")
    if current_shard().rem == 0 and not log.hasHandlers():
        log.addHandler(_Log())
        log.setLevel(logging.INFO)


def _signature() -> inspect.Signature:
    """The options of a run, as typer wants to see them: they are described once, in `train.options`."""

    def keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=None
        )

    own = [
        keyword("config", Path | None, typer.Option("--config", metavar="FILE", help="A TOML or JSON file.", rich_help_panel=SETTINGS)),
        keyword("preset", str | None, typer.Option("--preset", metavar="NAME", help="Workers and prefetch by name.", rich_help_panel=SETTINGS, autocompletion=complete.presets)),
        keyword("pairs", list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the loader: --set n_workers=2. May be repeated.", rich_help_panel=SETTINGS, autocompletion=complete.settings)),
    ]  # fmt: skip
    rest = [
        keyword(
            each.name,
            str | None,
            typer.Option(
                f"--{spelled(each.name)}", help=each.help, rich_help_panel=each.group, show_default=_shown(each.default),
                metavar="[0|1]" if each.implied == "1" else "[VALUE]" if each.implied else "VALUE",
                autocompletion=_values(each),
            ),
        )
        for each in OPTIONS.values()
    ]  # fmt: skip
    return inspect.Signature([*own, *rest])


def _shown(default: Any) -> str | bool:
    if default is None:
        return False
    return str(int(default)) if isinstance(default, bool) else str(default)


def _values(option: Option) -> complete.Complete | None:
    """What a shell offers for an option, if it is one of a few things."""
    named = {
        "dataset": complete.data_names,
        "tokenizer": complete.among(("byte", "gpt2", "stdlib")),
        "device": complete.among(("auto", "cpu", "cuda")),
    }
    if option.name in named:
        return named[option.name]
    words = ("0", "1") if option.implied == "1" else option.words
    return complete.among(words) if words else None


train.__signature__ = _signature()  # type: ignore[attr-defined]
train.__annotations__ = {name: each.annotation for name, each in _signature().parameters.items()}


def main(*implied: str) -> None:
    """`penstock train`, for the scripts: `implied` are options that they stand for."""
    from penstock.cli.main import app

    app(["train", *implied, *sys.argv[1:]])

"""`penstock train`: the showcase, a real training run."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.config import pair
from penstock.train.options import OPTIONS, resolve


def train(**given: Any) -> None:
    """Train a small GPT on text: a real run, on one process or, under torchrun, with DDP or FSDP2.

    What belongs to the loader comes from --config, the environment and --set: see docs/configuration.md.
    """
    from penstock.train.trainer import train as run

    config, preset, pairs = given.pop("config"), given.pop("preset"), given.pop("pairs")
    raise typer.Exit(run(*resolve(config, given, overrides=dict(pair(one) for one in pairs or ()), preset=preset)))


def _signature() -> inspect.Signature:
    """The options of a run, as typer wants to see them: they are described once, in `train.options`."""

    def keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)

    own = [
        keyword("config", Annotated[Path | None, typer.Option("--config", help="A TOML or JSON file.", rich_help_panel="Settings")], None),
        keyword("preset", Annotated[str | None, typer.Option("--preset", help="Workers and prefetch by name.", rich_help_panel="Settings")], None),
        keyword("pairs", Annotated[list[str] | None, typer.Option("--set", help="A setting of the loader: --set n_workers=2.", rich_help_panel="Settings")], None),
    ]  # fmt: skip
    rest = [
        keyword(
            each.name,
            Annotated[
                str | None,
                typer.Option(
                    f"--{each.spelled}", help=each.help, rich_help_panel=each.group, show_default=_shown(each.default),
                    metavar="[0|1]" if each.implied == "1" else "[VALUE]" if each.implied else "VALUE",
                ),
            ],
            None,
        )
        for each in OPTIONS.values()
    ]  # fmt: skip
    return inspect.Signature([*own, *rest])


def _shown(default: Any) -> str | bool:
    return (
        False
        if default is None
        else {True: "1", False: "0"}.get(default, str(default))
        if isinstance(default, bool)
        else str(default)
    )


train.__signature__ = _signature()  # type: ignore[attr-defined]
train.__annotations__ = {name: each.annotation for name, each in _signature().parameters.items()}


def main(*implied: str) -> None:
    """`penstock train`, for the scripts: `implied` are options that they stand for."""
    from penstock.cli.main import app

    app(["train", *implied, *sys.argv[1:]])

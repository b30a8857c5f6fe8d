"""Turn functions whose parameters are options classes into commands; show progress.

Positional fields of the classes (see `penstock.options`) become arguments, keyword-only fields
options. Types, bounds, defaults and help come from the fields.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.options import Option, options_of
from penstock.train.options import flag

LINE_EVERY_S = 10.0
"""Interval of progress lines without a terminal."""
NAMES = {
    "batch": ("--batch", "--batch-size"),
    "card_config": ("--dataset-config", "--config"),
    "finite_loss": ("--finite-loss/--ignore-loss",),
    "max_data_wait_pct": ("--max-data-wait",),
    "max_heartbeat_age_s": ("--max-age",),
    "max_step_s": ("--max-step",),
    "out": ("--out", "-o"),
    "quiet": ("--quiet", "-q"),
    "yes": ("--yes", "-y"),
}
"""Options whose names are not derived from their fields."""
METAVARS: dict[Any, str] = {int: "N", float: "N", Path: "PATH"}


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Return a typer command for a function of options objects that returns an exit code."""
    classes = typing.get_type_hints(function)
    del classes["return"]

    def run(**given: Any) -> None:
        made = {name: _read(cls, given) for name, cls in classes.items()}
        if code := function(**made):
            raise typer.Exit(code)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    declare(run, *classes.values())
    return run


def declare(run: Callable[..., None], *classes: Any) -> None:
    """Add the options of classes to a function of keyword arguments, for typer. Values are text."""
    parameters = [
        _parameter(each, options_of(cls)[each.name]) for cls in classes for each in fields(cls)
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(run) or "")  # for any width


def _parameter(field: Field[Any], option: Option) -> inspect.Parameter:
    is_flag = option.hint is bool and option.implied is None
    is_list = any(typing.get_origin(kind) is list for kind in option.kinds)
    is_required = option.default is MISSING
    words = ("0", "1") if option.implied == "1" else option.words
    metavar = "|".join(words) or next((METAVARS[k] for k in option.kinds if k in METAVARS), "TEXT")
    metavar = f"[{metavar}]" if option.implied else metavar
    default = int(option.default) if isinstance(option.default, bool) else option.default
    known = "" if is_flag or is_required or default is None else option.show(default)
    about: dict[str, Any] = {
        "help": f"{option.help} Defaults to {known}." if known else option.help,
        "rich_help_panel": option.group or None,
        "show_default": False,
    }
    if field.kw_only:
        names = NAMES.get(option.name, (flag(option.name),))
        made = typer.Option(*names, metavar=None if is_flag else metavar, **about)
    else:
        made = typer.Argument(metavar=option.name.upper(), **about)
    kind: Any = bool if is_flag else list[str] if is_list else str
    default = option.default if is_flag else inspect.Parameter.empty if is_required else None
    kind = kind if default is not None else kind | None
    where = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option.name, where, annotation=Annotated[kind, made], default=default)


def _read(cls: Any, given: dict[str, Any]) -> Any:
    declared = options_of(cls)
    written = {name: given[name] for name in declared if given[name] not in (None, [])}
    return cls(**{name: declared[name].read(text, flag(name)) for name, text in written.items()})


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, default=str))


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows progress (done, total, text): as a bar on a terminal, else as a
    line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console, shown = Console(stderr=True), time.monotonic()
    columns = BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, text: str) -> None:
            nonlocal shown
            bar.update(task, completed=done, total=total, description=text)
            if not quiet and not console.is_terminal and time.monotonic() - shown >= LINE_EVERY_S:
                shown = time.monotonic()
                typer.echo(text, err=True)

        yield show


@contextmanager
def hidden_log() -> Iterator[list[logging.LogRecord]]:
    """Collect log messages instead of showing them, so that a failure prints one line."""
    log, handler = logging.getLogger("penstock"), BufferingHandler(10_000)
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield handler.buffer
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate

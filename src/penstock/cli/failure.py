"""How a command fails: one line on stderr, or the traceback with --debug, and an exit code."""

from __future__ import annotations

import traceback
from typing import NoReturn

import typer

from penstock.errors import PenstockError


def one_line(error: BaseException) -> str:
    """Return an error's message and notes without line breaks."""
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, PenstockError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{text}{notes}".split())


def show(context: typer.Context, error: BaseException) -> bool:
    """Print the traceback if --debug was given, and return True then."""
    if context.obj is not True:  # set by `main.options`
        return False
    traceback.print_exception(error)
    return True


def fail(context: typer.Context, error: BaseException, line: str, code: int) -> NoReturn:
    """End a command that has messages and exit codes of its own."""
    if not show(context, error) and line:
        typer.echo(line, err=True)
    raise typer.Exit(code) from error

"""How a command ends badly: one line on stderr, or with --debug the traceback, and an exit code."""

from __future__ import annotations

import traceback
from typing import NoReturn

import typer

from penstock.errors import PenstockError


def one_line(error: BaseException) -> str:
    """What an error says, and what was noted on its way, without line breaks."""
    said = str(error)
    if isinstance(error, OSError) and not isinstance(error, PenstockError) and error.strerror:
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{said}{notes}".split())


def show(context: typer.Context, error: BaseException) -> bool:
    """With --debug, show where an error came from. False without."""
    if context.obj is not True:  # see `main.options`
        return False
    traceback.print_exception(error)
    return True


def fail(context: typer.Context, error: BaseException, line: str, code: int) -> NoReturn:
    """End a command that has lines and exit codes of its own. An empty line says nothing: it is said already."""
    if not show(context, error) and line:
        typer.echo(line, err=True)
    raise typer.Exit(code) from error

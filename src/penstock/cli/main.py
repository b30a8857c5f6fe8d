"""`penstock`: the commands, and how their errors are shown."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.bootstrap import bootstrap
from penstock.cli.cache import cache
from penstock.cli.config import config
from penstock.cli.demo import demo
from penstock.cli.doctor import doctor
from penstock.cli.failure import one_line
from penstock.cli.health import health
from penstock.cli.prepare import prepare
from penstock.cli.report import report
from penstock.cli.smoke import smoke
from penstock.cli.train import train
from penstock.cli.verify_resume import verify_resume
from penstock.cli.watch import watch
from penstock.errors import PenstockError
from penstock.train.options import add_implied

FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit codes. The last two are what a shell reports for Ctrl-C and for `| head -1`."""

TRAINING, BEFORE, ON_DISK, WATCHING = "Train", "Before a run", "Data on disk", "Watch a run"

cli = typer.Typer(
    help="Feeds text to a training run, so that the accelerator never waits.",
    epilog="To see it work: penstock demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(command: Any, panel: str, example: str) -> None:
    cli.command(rich_help_panel=panel, epilog=f"Example: {example}")(command)


_add(demo, TRAINING, "penstock demo --steps 60")
_add(train, TRAINING, "penstock train --dataset stdlib --tokenizer stdlib --steps 200 --report")
_add(config, BEFORE, "penstock config run.toml --set prefetch_size=16")
_add(doctor, BEFORE, "penstock doctor run.toml --tokens-per-second 200000")
_add(smoke, BEFORE, "penstock smoke --dataset stdlib --timeout 20")
_add(verify_resume, BEFORE, "penstock verify-resume run.toml --points 3")
_add(bootstrap, ON_DISK, "penstock bootstrap fineweb_edu --out first.jsonl --bytes 500MB")
_add(prepare, ON_DISK, "penstock prepare fineweb_edu --tokenizer gpt2 --out tokens")
cli.add_typer(cache, name="cache", rich_help_panel=ON_DISK)
_add(watch, WATCHING, "penstock watch runs/7 --total-tokens 1e10")
_add(health, WATCHING, "penstock health runs/7 --max-data-wait 5")
_add(report, WATCHING, "penstock report runs/7 -o seven.html")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@cli.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options of all commands."""
    context.obj = debug


def app(arguments: list[str] | None = None) -> None:
    """Run the command line, and exit with its code.

    Our own errors and the system's are one line and exit code 1. Any other exception is a bug, and
    is raised.
    """
    given, debug = _arrange(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Data and file names may hold characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = cli(given, prog_name="penstock", standalone_mode=False)
    except SystemExit as end:
        # typer exits with 1 if the reader of a pipe has gone.
        sys.exit(BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code)
    except Exception as error:
        described = _describe(error)
        if described is None:
            raise
        line, code = described
        _flush()
        if debug:
            traceback.print_exception(error)
        elif line:
            print(line, file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _arrange(given: list[str]) -> tuple[list[str], bool]:
    """Move --debug to the front, and spell out the values that `train` lets one leave out."""
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]
    rest = [word for word in given[:end] if word != "--debug"] + given[end:]
    command = next((word for word in rest if not word.startswith("-")), "")
    return ["--debug"] * debug + (add_implied(rest) if command == "train" else rest), debug


def _describe(error: Exception) -> tuple[str, int] | None:
    """Return the message and the exit code for an error; None for an unexpected one."""
    if isinstance(error, PenstockError | OSError):
        return f"penstock: {one_line(error)}", FAILED
    if isinstance(error, typer.Abort):
        interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        return "penstock: aborted", INTERRUPTED if interrupted else FAILED
    # A usage error of typer, whose class has moved between its releases.
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been shown
            return "", MISUSED
        path = getattr(getattr(error, "ctx", None), "command_path", "penstock")
        text = " ".join(error.format_message().split()).rstrip(".")
        return f"{path}: {text}. See {path} --help.", MISUSED
    return None


def _flush() -> None:
    """Flush stdout; drop what cannot be written, or the interpreter would fail at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    app()

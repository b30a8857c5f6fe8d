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
from penstock.cli.report import report
from penstock.cli.smoke import smoke
from penstock.cli.stage import stage
from penstock.cli.trace import trace
from penstock.cli.train import train
from penstock.cli.verify_resume import verify_resume
from penstock.cli.watch import watch
from penstock.errors import PenstockError
from penstock.train.options import spell_out

FAILED, MISUSED, INTERRUPTED, GONE = 1, 2, 130, 141
"""An error; a command line that does not fit; and, as a shell has them, Ctrl-C and a reader that has gone (`| head -1`)."""

TRAINING, BEFORE, ON_DISK, WATCHING = "Train", "Before a run", "Data on disk", "Watch a run"

cli = typer.Typer(
    help="Feeds text to a training run, so that the accelerator never waits.",
    epilog="To see it work: penstock demo. What each command is for, with its exit codes: docs/cli.md.",
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
_add(stage, ON_DISK, "penstock stage fineweb_edu --tokenizer gpt2 --bytes 5GB")
cli.add_typer(cache, name="cache", rich_help_panel=ON_DISK)
_add(watch, WATCHING, "penstock watch runs/7 --total-tokens 10B")
_add(health, WATCHING, "penstock health runs/7 --max-data-wait 5")
_add(report, WATCHING, "penstock report runs/7 -o seven.html")
_add(trace, WATCHING, "penstock trace run.toml -o trace.json")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@cli.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the traceback of an error; before or after the command."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options of all commands."""
    context.obj = debug


def app(arguments: list[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code.

    An error of ours, or of the system, is one line and exit code 1. Any other exception is a defect, and raised.
    """
    given, debug = _arranged(sys.argv[1:] if arguments is None else arguments)
    _write_anything()
    try:
        code = cli(given, prog_name="penstock", standalone_mode=False)
    except SystemExit as end:
        # typer's own code for a reader that has gone is 1, which means something else for some commands.
        sys.exit(GONE if isinstance(end.__context__, BrokenPipeError) else end.code)
    except Exception as error:
        told = _told(error)
        if told is None:
            raise
        line, code = told
        _end_output()
        if debug:
            traceback.print_exception(error)
        elif line:
            print(line, file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _write_anything() -> None:
    """A character that the output has no code for becomes a question mark: it must not end a command.

    Data, hosts and file names have any. Python does as much for stderr by itself.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (
        out.errors == "strict" or not out.encoding.lower().startswith("utf")
    ):
        out.reconfigure(errors="replace")


def _arranged(given: list[str]) -> tuple[list[str], bool]:
    """The command line with --debug in front, wherever it stood, and with each value that may be left out."""
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]
    rest = [word for word in given[:end] if word != "--debug"] + given[end:]
    command = next((word for word in rest if not word.startswith("-")), "")
    return ["--debug"] * debug + (spell_out(rest) if command == "train" else rest), debug


def _told(error: Exception) -> tuple[str, int] | None:
    """What to say of an error, and the exit code; None for one that nobody expects."""
    if isinstance(error, PenstockError | OSError):
        return f"penstock: {one_line(error)}", FAILED
    if isinstance(error, typer.Abort):
        return "penstock: aborted", INTERRUPTED if isinstance(
            error.__cause__, KeyboardInterrupt
        ) else FAILED
    # typer's exceptions for a command line that does not fit have had several homes.
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":  # it is shown by now
            return "", MISUSED
        path = getattr(getattr(error, "ctx", None), "command_path", "penstock")
        said = " ".join(error.format_message().split()).rstrip(".")
        return f"{path}: {said}. See {path} --help.", MISUSED
    return None


def _end_output() -> None:
    """What cannot be written is dropped: the end of the interpreter would try again, and fail with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    app()

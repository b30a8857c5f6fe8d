"""`penstock`: the list of commands, and error output."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.bootstrap import bootstrap
from penstock.cli.cache import cache
from penstock.cli.command import command
from penstock.cli.config import config
from penstock.cli.demo import demo
from penstock.cli.doctor import doctor
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
"""Exit codes. The last two are those of a shell for Ctrl-C and for `| head -1`."""
CANNOT_TELL = ("doctor", "health", "smoke", "verify-resume")
"""Commands whose exit code 1 is a result. Their errors print one line and exit with 2."""

TRAINING, BEFORE, ON_DISK, WATCHING = "Train", "Before a run", "Data on disk", "Watch a run"
COMMANDS = [
    (command(demo), TRAINING, "demo --steps 60"),
    (train, TRAINING, "train --dataset stdlib --tokenizer stdlib --steps 200 --report"),
    (command(config), BEFORE, "config run.toml --set prefetch_size=16"),
    (command(doctor), BEFORE, "doctor run.toml --tokens-per-second 200000"),
    (command(smoke), BEFORE, "smoke --dataset stdlib --timeout 20"),
    (command(verify_resume), BEFORE, "verify-resume run.toml --points 3"),
    (command(bootstrap), ON_DISK, "bootstrap fineweb_edu --out first.jsonl --bytes 500MB"),
    (command(prepare), ON_DISK, "prepare fineweb_edu --tokenizer gpt2 --out tokens"),
    (command(watch), WATCHING, "watch runs/7 --total-tokens 1e10"),
    (command(health), WATCHING, "health runs/7 --max-data-wait 5"),
    (command(report), WATCHING, "report runs/7 -o seven.html"),
]

cli = typer.Typer(
    help="Feeds text to a training run, so that the accelerator does not wait.",
    epilog="To see it work: penstock demo",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for run, panel, example in COMMANDS:
    cli.command(rich_help_panel=panel, epilog=f"Example: penstock {example}")(run)
cli.add_typer(cache, name="cache", rich_help_panel=ON_DISK)


@cli.callback(invoke_without_command=True)
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Options of all commands."""
    if version:
        print(f"penstock {__version__}")
        raise typer.Exit


def app(arguments: list[str] | None = None) -> None:
    """Run the command line, and exit with its code.

    Errors of Penstock and of the system print one line and exit with 1. Any other exception is a
    bug and is raised.
    """
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]
    given = [word for word in given[:end] if word != "--debug"] + given[end:]
    name = next((word for word in given if not word.startswith("-")), "")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Data and file names may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        given = add_implied(given) if name == "train" else given
        code = cli(given or ["--help"], prog_name="penstock", standalone_mode=False)
    except SystemExit as exit:
        # typer exits with 1 if the reader of a pipe has exited.
        sys.exit(BROKEN_PIPE if isinstance(exit.__context__, BrokenPipeError) else exit.code)
    except Exception as error:
        line, code = _describe(error, name)
        _flush()
        traceback.print_exception(error) if debug else print(line, file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _describe(error: Exception, name: str) -> tuple[str, int]:
    """Return the message and the exit code for an error. Raise an unexpected one."""
    if isinstance(error, typer.Abort):
        interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        return f"penstock: aborted{_notes(error.__cause__)}", INTERRUPTED if interrupted else FAILED
    # A usage error of typer, whose class differs between its releases.
    if hasattr(error, "format_message"):
        path = getattr(getattr(error, "ctx", None), "command_path", "penstock")
        text = " ".join(error.format_message().split()).rstrip(".")
        return f"{path}: {text}. See {path} --help.", MISUSED
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, PenstockError) and error.strerror:
        name_of = error.filename2 or error.filename  # for a rename, the new name
        text = f"{name_of}: {error.strerror}" if name_of else error.strerror
    elif not isinstance(error, PenstockError):
        if name not in CANNOT_TELL:
            raise error
        text = f"{type(error).__name__}: {text}"
    prefix = "[smoke][FAIL]" if name == "smoke" else "penstock:"
    line = " ".join(f"{prefix} {text}{_notes(error)}".split())
    return line, 2 if name in CANNOT_TELL else FAILED


def _notes(error: BaseException | None) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _flush() -> None:
    """Flush stdout. If that fails, discard the output, so that the exit does not fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    app()

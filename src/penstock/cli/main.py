"""`penstock`: the commands, and how their errors are shown."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.bootstrap import bootstrap
from penstock.cli.cache import cache
from penstock.cli.config import config
from penstock.cli.demo import demo
from penstock.cli.doctor import doctor
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

cli = typer.Typer(
    help="Feeds text to a training run, so that the accelerator never waits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli.command()(demo)
cli.command()(train)
cli.command()(config)
cli.command()(stage)
cli.command()(bootstrap)
cli.command()(doctor)
cli.command()(smoke)
cli.command()(verify_resume)
cli.command()(watch)
cli.command()(report)
cli.command()(health)
cli.command()(trace)
cli.add_typer(cache, name="cache")

_debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@cli.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands."""
    global _debug
    _debug = debug


def app(arguments: list[str] | None = None) -> None:
    """Run the command line. An error of ours is one line and exit code 1."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        cli(spell_out(given) if "train" in given else given)
    except PenstockError as error:
        if _debug:
            raise
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    app()

"""`penstock smoke`: does a run with these settings get its first batch?"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from penstock.cli import complete
from penstock.cli.failure import fail, one_line
from penstock.cli.given import Overrides, Preset, SeqLen, TextField, Tokenizer
from penstock.errors import ConfigError, LoaderTimeout, PenstockError

FAILED = 2
LONGEST_S = 10_000_000


def smoke(
    context: typer.Context,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|URL|PATH",
            help="fineweb_edu, fineweb_edu_local, stdlib, synthetic, hf://…, a path.",
            show_default="fineweb_edu",
            autocompletion=complete.data_names,
        ),
    ] = None,
    local_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file for fineweb_edu_local.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings, in TOML or JSON.")
    ] = None,
    seq_len: SeqLen = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Rows of a batch.", min=1, show_default="1")
    ] = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For everything, the listing too.")
    ] = 60.0,
    set_: Overrides = None,
    preset: Preset = None,
) -> None:
    """Get one batch the way a run does, with workers and prefetch.

    Exit code 0: the batch is there. 2: it is not, and one line on stderr says why. Settings come from the command line, the environment and the file, in
    this order.
    """
    begun, name = perf_counter(), dataset or "settings"
    with _last_message() as message:
        try:
            if not 0 < timeout <= LONGEST_S:
                raise ConfigError(
                    f"--timeout {timeout:g}: needs seconds, more than 0 and at most {LONGEST_S:,}"
                )
            # Imported here: a missing library is a failure like any other.
            from penstock.cli.config import overrides
            from penstock.tools.data_choice import choose_data
            from penstock.tools.smoke import smoke as check

            choice = choose_data(
                dataset, default="fineweb_edu", batch_size=1, local_path=local_path, settings_file=config,
                overrides=overrides(set_, batch_size=batch), preset=preset, tokenizer=tokenizer, seq_len=seq_len, text_field=text_field,
            )  # fmt: skip
            name = choice.name
            report = check(choice, timeout)
        except Exception as error:  # any failure is one line and one exit code
            kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
            text = f"{name}, after {perf_counter() - begun:.1f} s: {kind}{one_line(error)}"
            if isinstance(error, LoaderTimeout) and message.text:
                text += f" Last message: {' '.join(message.text.split())}"
            fail(context, error, f"[smoke][FAIL] {text}", FAILED)
    typer.echo(report)


def main() -> None:
    """Run this command alone, for scripts/automation/fwe_smoke.py."""
    from penstock.cli.main import app

    app(["smoke", *sys.argv[1:]])


class _LastMessage(logging.Handler):
    """Keeps the last log message: it may say why a server was asked again."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextmanager
def _last_message() -> Iterator[_LastMessage]:
    """Keep log messages off the console, so that a failure is one line."""
    log, handler = logging.getLogger("penstock"), _LastMessage(logging.INFO)
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


if __name__ == "__main__":
    main()

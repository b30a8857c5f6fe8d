"""`penstock smoke`: does a run with these settings get its first batch?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from penstock.cli.failure import fail, one_line
from penstock.cli.given import Overrides, Preset, SeqLen, TextField, Tokenizer, option, overrides
from penstock.errors import ConfigError, LoaderTimeout, PenstockError

FAILED = 2
LONGEST_S = 10_000_000


def smoke(
    context: typer.Context,
    dataset: Annotated[
        str | None,
        option(
            metavar="NAME|URL|PATH",
            help="fineweb_edu, fineweb_edu_local, stdlib, synthetic, hf://…, or a path.",
            shown="fineweb_edu",
        ),
    ] = None,
    local_path: Annotated[
        Path | None, option(metavar="FILE", help="The file for fineweb_edu_local.")
    ] = None,
    config: Annotated[
        Path | None, option(metavar="FILE", help="The run's settings, in TOML or JSON.")
    ] = None,
    seq_len: SeqLen = None,
    batch: Annotated[int | None, option(help="Rows in a batch.", shown="1", min=1)] = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Limit for everything, listing included.")
    ] = 60.0,
    set_: Overrides = None,
    preset: Preset = None,
) -> None:
    """Fetch one batch as a run would, with workers and prefetch.

    Exit code 0: the batch arrived. 2: it did not, and one line on stderr says why. Settings come
    from the command line, then the environment, then the file.
    """
    begun, name = perf_counter(), dataset or "settings"
    with _messages() as messages:
        try:
            if not 0 < timeout <= LONGEST_S:
                raise ConfigError(f"--timeout {timeout:g}: must be > 0 and ≤ {LONGEST_S:,} seconds")
            # Imported here: a missing library is a failure like any other.
            from penstock.tools.data_choice import choose_data
            from penstock.tools.smoke import smoke as check

            choice = choose_data(
                dataset,
                default="fineweb_edu",
                batch_size=1,
                local_path=local_path,
                settings_file=config,
                overrides=overrides(set_, batch_size=batch),
                preset=preset,
                tokenizer=tokenizer,
                seq_len=seq_len,
                text_field=text_field,
            )
            name = choice.name
            report = check(choice, timeout)
        except Exception as error:  # any failure is one line and one exit code
            kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
            text = f"{name}, after {perf_counter() - begun:.1f} s: {kind}{one_line(error)}"
            if isinstance(error, LoaderTimeout) and messages:
                text += f" Last message: {' '.join(messages[-1].getMessage().split())}"
            fail(context, error, f"[smoke][FAIL] {text}", FAILED)
    typer.echo(report)


@contextmanager
def _messages() -> Iterator[list[logging.LogRecord]]:
    """Collect log messages instead of showing them, so that a failure is one line. The last one
    may say why a server was asked again."""
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

"""`penstock doctor`: can this machine feed a run, and what limits it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.failure import fail, one_line
from penstock.cli.given import (
    AsJson,
    Batch,
    Overrides,
    SeqLen,
    Target,
    TextField,
    Tokenizer,
    option,
    overrides,
    without_warnings,
)
from penstock.errors import PenstockError

FAILED = 2


def doctor(
    context: typer.Context,
    target: Target,
    tokenizer: Tokenizer = None,
    seq_len: SeqLen = None,
    batch: Batch = None,
    text_field: TextField = None,
    set_: Overrides = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Seconds to run after the first batch.")
    ] = 5.0,
    tokens_per_second: Annotated[
        float | None, option(help="The rate that the trainer needs.")
    ] = None,
    trace: Annotated[
        Path | None, option(metavar="FILE", help="Also write a trace for Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the loader for a few seconds: is it fast enough?

    Exit code 0: a trainer at N tokens per second would wait for less than 5 % of its time, or no
    rate was given. 1: it would wait longer. 2: the data cannot be read, or an argument is
    invalid. The token cache is neither read nor written.
    """
    from penstock.tools.data_choice import choose_data, split_target
    from penstock.tools.doctor import diagnose

    try:
        with without_warnings():
            choice = choose_data(
                **split_target(target),
                overrides=overrides(set_, batch_size=batch),
                token_cache=False,
                tokenizer=tokenizer,
                seq_len=seq_len,
                text_field=text_field,
            )
            more: dict[str, Any] = {
                "seconds": seconds,
                "tokens_per_second": tokens_per_second,
                "trace": trace,
            }
            diagnosis = diagnose(choice.make(), **more, **choice.arguments)
    except (PenstockError, OSError) as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        if as_json:
            typer.echo(json.dumps({"error": text, "exit_code": FAILED}, indent=2))
        fail(context, error, "" if as_json else f"penstock doctor: {text}", FAILED)
    typer.echo(json.dumps(diagnosis.as_dict(), indent=2) if as_json else diagnosis.as_text())
    raise typer.Exit(diagnosis.exit_code)

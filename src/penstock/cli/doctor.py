"""`penstock doctor`: can this machine feed a run, and what limits it?"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import complete
from penstock.cli.failure import fail, one_line
from penstock.cli.given import (
    AS,
    AsJson,
    Batch,
    CardConfig,
    SeqLen,
    Shuffle,
    Split,
    TextField,
    Tokenizer,
    Workers,
)
from penstock.errors import PenstockError
from penstock.train.options import OPTIONS

FAILED = 2
PACKINGS = OPTIONS["packing"].words


def doctor(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help="A run's settings, run.toml; or hf://…, s3://…, https://…, a path, stdlib.",
            autocompletion=complete.address,
        ),
    ],
    tokenizer: Tokenizer = None,
    seq_len: SeqLen = None,
    batch_size: Batch = None,
    packing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=AS, show_default="concat", autocompletion=complete.among(PACKINGS)
        ),
    ] = None,
    text_field: TextField = None,
    config: CardConfig = None,
    split: Split = None,
    shuffle: Shuffle = None,
    workers: Workers = None,
    prefetch_size: Annotated[
        int | None, typer.Option(metavar="N", help=AS, show_default="8")
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="How long to run after the first batch.")
    ] = 5.0,
    tokens_per_second: Annotated[
        float | None, typer.Option(metavar="N", help="The rate that the trainer needs.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace of the run, for Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the loader for some seconds: is it fast enough?

    Exit code 0: a trainer at N tokens per second would wait for less than 5 % of its time, or no N was given. 1: it would wait for longer.
    2: the data cannot be read, or an argument is invalid. The token cache is neither read nor written.
    """
    from penstock.tools.data_choice import choose_data, split_target
    from penstock.tools.doctor import diagnose

    overrides = {
        "batch_size": batch_size, "shuffle": shuffle, "n_workers": workers, "prefetch_size": prefetch_size,
    }  # fmt: skip
    log = logging.getLogger("penstock")
    level = log.level
    log.setLevel(logging.ERROR)  # a drained loader warns all the time that it does not keep up
    try:
        choice = choose_data(
            **split_target(target), overrides=overrides, token_cache=False,
            tokenizer=tokenizer, seq_len=seq_len, packing=packing, text_field=text_field, config=config, split=split,
        )  # fmt: skip
        diagnosis = diagnose(
            choice.make(),
            seconds=seconds,
            tokens_per_second=tokens_per_second,
            trace=trace,
            **choice.arguments,
        )
    except (PenstockError, OSError) as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        if as_json:
            typer.echo(json.dumps({"error": text, "exit_code": FAILED}, indent=2))
        fail(context, error, "" if as_json else f"penstock doctor: {text}", FAILED)
    finally:
        log.setLevel(level)
    typer.echo(json.dumps(diagnosis.as_dict(), indent=2) if as_json else diagnosis.as_text())
    raise typer.Exit(diagnosis.exit_code)

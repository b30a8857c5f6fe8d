"""`penstock verify-resume`: does a run on this data resume exactly?"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from penstock.cli import complete
from penstock.cli.config import overrides
from penstock.cli.failure import fail, one_line
from penstock.cli.given import Overrides, SeqLen, TextField, Tokenizer

DIFFERENT, FAILED = 1, 2


def verify_resume(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help="A run's settings, run.toml; or hf://…, s3://…, a path, stdlib.",
            autocompletion=complete.address,
        ),
    ],
    batches: Annotated[
        int, typer.Option(metavar="N", help="Batches of the stream to compare.", min=2)
    ] = 64,
    points: Annotated[int, typer.Option(metavar="N", help="Places to resume at.", min=1)] = 5,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Which places; not the seed of the run.", min=0)
    ] = 0,
    tokenizer: Tokenizer = None,
    seq_len: SeqLen = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Rows of a batch of all ranks.", min=1, show_default="8"),
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(metavar="N", help="As for the run.", min=1, show_default="4")
    ] = None,
    text_field: TextField = None,
    set_: Overrides = None,
) -> None:
    """Resume in many ways, and compare every row of the stream.

    At random places, twice in a row, and with other numbers of workers and ranks. Exit code 0: always the same stream. 1: not always; the trial, the
    first batch that differs and the origin of its row are named. 2: it could not be tried. Ranks are simulated in this process, one after the other.
    """
    from penstock.tools.data_choice import choose_data, split_target
    from penstock.tools.verify_resume import verify_resume as verify

    log = logging.getLogger("penstock")
    level = log.level
    log.setLevel(logging.ERROR)  # a drained loader warns all the time that it does not keep up
    try:
        choice = choose_data(
            **split_target(target), overrides=overrides(set_, batch_size=batch, lanes=lanes), batch_size=8,
            tokenizer=tokenizer, seq_len=seq_len, text_field=text_field,
        )  # fmt: skip
        same = verify(
            choice.make, choice.arguments, batches=batches, points=points, seed=seed, say=typer.echo
        )
    except BrokenPipeError:
        raise
    except Exception as error:  # exit code 1 means a difference and nothing else
        text = f"could not be tried: {type(error).__name__}: {one_line(error)}"
        fail(context, error, f"penstock verify-resume: {text}", FAILED)
    finally:
        log.setLevel(level)
    raise typer.Exit(0 if same else DIFFERENT)

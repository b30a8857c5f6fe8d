"""`penstock verify-resume`: does a run on this data resume exactly?"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.failure import fail, one_line
from penstock.cli.given import (
    Overrides,
    SeqLen,
    Target,
    TextField,
    Tokenizer,
    option,
    overrides,
    without_warnings,
)

SAME, DIFFERENT, FAILED = 0, 1, 2


def verify_resume(
    context: typer.Context,
    target: Target,
    batches: Annotated[int, typer.Option(metavar="N", help="Batches to compare.", min=2)] = 64,
    points: Annotated[int, typer.Option(metavar="N", help="Places to resume at.", min=1)] = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the places.", min=0)] = 0,
    tokenizer: Tokenizer = None,
    seq_len: SeqLen = None,
    batch: Annotated[
        int | None, option("--batch", help="Rows in a batch of all ranks.", shown="8", min=1)
    ] = None,
    lanes: Annotated[int | None, option("--lanes", help="Lanes.", shown="4", min=1)] = None,
    text_field: TextField = None,
    set_: Overrides = None,
) -> None:
    """Check that a run resumes exactly.

    Resumes at random places, twice in a row, and with other numbers of workers and ranks, and
    compares every row. Exit code 0: the stream was always the same. 1: it differed; the first
    difference is shown. 2: the check could not run.
    """
    from penstock.tools.data_choice import choose_data, split_target
    from penstock.tools.verify_resume import verify_resume as verify

    try:
        with without_warnings():
            choice = choose_data(
                **split_target(target),
                overrides=overrides(set_, batch_size=batch, lanes=lanes),
                batch_size=8,
                tokenizer=tokenizer,
                seq_len=seq_len,
                text_field=text_field,
            )
            same = verify(
                choice.make,
                choice.arguments,
                batches=batches,
                points=points,
                seed=seed,
                say=typer.echo,
            )
    except BrokenPipeError:
        raise
    except Exception as error:  # exit code 1 means a difference and nothing else
        text = f"could not run: {type(error).__name__}: {one_line(error)}"
        fail(context, error, f"penstock verify-resume: {text}", FAILED)
    raise typer.Exit(SAME if same else DIFFERENT)

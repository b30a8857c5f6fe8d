"""`penstock verify-resume`: proof, on data of one's own, that a run goes on exactly where it stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import complete
from penstock.cli.config import overrides
from penstock.cli.described import is_file
from penstock.cli.failure import fail, one_line
from penstock.cli.given import Overrides, SeqLen, TextField, Tokenizer

if TYPE_CHECKING:
    from penstock.verify.resume import Reference, Trial, Verification

DIFFERS, UNTRIED = 1, 2


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
    """Resume in many ways: is it always the same stream?

    At random places, twice in a row, and with other workers and ranks. Exit code 0: always. 1: not always; the trial, the first batch that differs and where its row came from are named.
    2: it could not be tried. Ranks are simulated in this process, one after the other.
    """
    from penstock.verify.choice import choose
    from penstock.verify.resume import Verification

    from_file = is_file(target)
    try:
        with _quiet():
            choice = choose(
                None if from_file else target, config=Path(target) if from_file else None,
                overrides=overrides(set_, batch_size=batch, lanes=lanes), batch_size=8,
                tokenizer=tokenizer, seq_len=seq_len, text_field=text_field,
            )  # fmt: skip
            begun = perf_counter()
            tried = Verification(
                choice.make, choice.arguments(), batches=batches, points=points, seed=seed
            )
            for line in _introduce(tried.reference, batches):
                typer.echo(line)
            different = _try_all(tried)
    except BrokenPipeError:  # nobody reads on
        raise
    except Exception as error:  # exit code 1 is for a difference, and for nothing else
        text = f"could not be tried: {type(error).__name__}: {one_line(error)}"
        fail(context, error, f"penstock verify-resume: {text}", UNTRIED)
    typer.echo(f"sha256       {tried.reference.stream.digest()}")
    typer.echo(f"verdict      {_verdict(different)}, after {perf_counter() - begun:.1f} s")
    raise typer.Exit(DIFFERS if different[0] else 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """A loader that is drained says all the time that it does not keep up."""
    log = logging.getLogger("penstock")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _introduce(reference: Reference, asked: int) -> Iterator[str]:
    stream, count = reference.stream, len(reference.stream.batches)
    epochs = f"epochs 0 to {stream.epoch}" if stream.epoch else "epoch 0"
    several = "s" * (reference.lanes > 1)
    ranks = f"{reference.lanes} lane{several}, for rank{several} {', '.join(map(str, reference.worlds))}"
    yield f"reference    {count} batches of {reference.batch_size} rows, {epochs}; {ranks}"
    if stream.ended:
        yield f"note         the data ends there: {asked} batches were asked for, and all there is is compared"
    if reference.even < count:
        compared = (
            f"over the first {reference.even} batches only" if reference.even > 1 else "not at all"
        )
        yield f"note         how it ends depends on the number of ranks: others than 1 are compared {compared}"
    if reference.fewer:
        yield f"note         more lanes, and so more ranks, cannot be tried: {reference.fewer}"
    elif reference.lanes == 1:
        yield "note         1 lane is for 1 rank only: others are not tried. Use --lanes 4, here and in the run"
    yield f"points       after batch {', '.join(map(str, reference.points))}"


def _try_all(tried: Verification) -> tuple[int, int]:
    """How many trials differ, of how many."""
    different = count = 0
    for trial in tried.trials():
        typer.echo(_line(trial))
        different += trial.difference is not None
        count += 1
    return different, count


def _line(trial: Trial) -> str:
    if trial.difference is not None:
        return f"DIFFERENT    {trial.name}: {trial.difference}"
    return f"same         {trial.name:<50} {trial.batches:>4} batch{'es' * (trial.batches != 1)}"


def _verdict(different: tuple[int, int]) -> str:
    n, count = different
    return (
        f"{n} of {count} trials gave another stream"
        if n
        else f"all {count} trials gave the same stream"
    )

"""`penstock trace`: what every thread of a loader does, as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import complete
from penstock.cli.given import Batch, SeqLen, Shuffle, TextField, Tokenizer, Workers
from penstock.errors import ConfigError, NoData

if TYPE_CHECKING:
    from penstock.loader import AsyncDataLoader

LONGEST_STEP_MS = 60_000.0
"""A longer step is a slip of the hand: a few of them would show nothing but waiting."""


def _step_ms(given: float) -> float:
    if not 0 <= given <= LONGEST_STEP_MS:  # nor NaN, which a range lets pass
        raise typer.BadParameter(f"{given:g}: needs milliseconds, 0 to {LONGEST_STEP_MS:,.0f}.")
    return given


def trace(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|URL",
            autocompletion=complete.address,
            help="A run's settings, run.toml; or hf://…, s3://…, https://…, a path; with --merge, a trace.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The trace to write.")
    ] = Path("trace.json"),
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to record.", min=1)] = 200,
    step_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", help="How long the stand-in for a training step takes.", callback=_step_ms
        ),
    ] = 10.0,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--settings",
            "--config",
            metavar="FILE",
            help="A TOML or JSON file with the run's data and settings.",
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    seq_len: SeqLen = None,
    batch_size: Batch = None,
    text_field: TextField = None,
    shuffle: Shuffle = None,
    workers: Workers = None,
    max_segments: Annotated[
        int, typer.Option(metavar="N", help="What is kept of the threads' work, the latest.", min=1)
    ] = 200_000,
    merge: Annotated[
        Path | None,
        typer.Option(
            "--merge",
            metavar="PROFILE",
            help="Put a trace, given first, beside one of torch.profiler.",
        ),
    ] = None,
) -> None:
    """Record what each thread does, for Perfetto.

    A pause stands in for training. To see a real run, put `with Recorder(loader) as recorder:` around it, and merge that with torch.profiler's trace
    of the same steps: `penstock trace trace.json --merge profile.json -o both.json`. Exit code 1: an error.
    """
    from penstock.loader import AsyncDataLoader
    from penstock.tools.data_choice import choose_data, split_target
    from penstock.watch.trace import Recorder
    from penstock.watch.trace import merge as put_together

    if merge is not None:
        if url is None or settings is not None:
            raise ConfigError(
                "--merge needs two traces: penstock trace trace.json --merge profile.json -o both.json"
            )
        _tell(put_together(url, merge, out))
        return
    if (url is None) == (settings is None):
        raise ConfigError(
            "what to trace? Give an address, or a settings file, which names the data"
        )
    target = {"settings_file": settings} if url is None else split_target(url)
    choice = choose_data(
        **target, overrides={"batch_size": batch_size, "shuffle": shuffle, "n_workers": workers},
        tokenizer=tokenizer, seq_len=seq_len, text_field=text_field,
    )  # fmt: skip
    loader = AsyncDataLoader(choice.make(), **choice.arguments)
    with Recorder(loader, max_segments) as recorder, loader:
        done = _run(loader, recorder.sample, steps, step_ms / 1e3)
        verdict = loader.telemetry.verdict().line if done > 1 else "one step says nothing"
    path = recorder.save(out)
    typer.echo(f"{done} step{'s' * (done != 1)}: {verdict}")
    _tell(path)


def _run(loader: AsyncDataLoader, sample: Callable[[], None], steps: int, step_s: float) -> int:
    for step in range(steps):
        if loader.next_batch() is None:
            if step == 0:
                raise NoData("the data has not a single batch in it")
            return step
        sample()
        time.sleep(step_s)  # the stand-in for an accelerator at work
    return steps


def _tell(path: Path) -> None:
    typer.echo(f"trace: {path} ({path.stat().st_size / 1e3:,.0f} kB)")
    typer.echo(
        "open it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere, or in chrome://tracing"
    )

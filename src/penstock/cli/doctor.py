"""`penstock doctor`: whether this machine can feed a run, and what would have to be different."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import complete
from penstock.cli.described import addressed, described, is_file
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
from penstock.watch.page.units import size

if TYPE_CHECKING:
    from penstock.doctor.examine import Diagnosis
    from penstock.doctor.trial import Alone
    from penstock.doctor.what_if import WhatIf

UNREADABLE = 2
PACKINGS = OPTIONS["packing"].words


def doctor(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help="A run's settings, run.toml; or hf://…, s3://…, https://…, a path.",
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
        float,
        typer.Option(metavar="S", help="To run the whole for; each stage alone gets a quarter."),
    ] = 5.0,
    tokens_per_second: Annotated[
        float | None, typer.Option(metavar="N", help="What the trainer could take.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="cached or synthetic: measure what that would gain.",
            autocompletion=complete.among(("cached", "synthetic")),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try the pipeline out: each stage alone, then all of it.

    Exit code 0: it can feed N tokens a second with a data wait below 5 %, or no N was given. 1: it cannot.
    2: the data cannot be read, or the arguments do not fit. The token cache is neither read nor written.
    """
    from penstock.doctor.examine import examine

    said: dict[str, Any] = {
        "tokenizer": tokenizer, "seq_len": seq_len, "packing": packing, "text_field": text_field, "config": config,
        "split": split,
    }  # fmt: skip
    options = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "n_workers": workers,
        "prefetch_size": prefetch_size,
    }
    log = logging.getLogger("penstock")
    level = log.level
    # A loader that is drained says all the time that it does not keep up; records left out are in the table.
    log.setLevel(logging.ERROR)
    try:
        dataset, arguments = _data(
            target, said, {name: value for name, value in options.items() if value is not None}
        )
        question: Any = what_if
        diagnosis = examine(
            dataset,
            seconds=seconds,
            tokens_per_second=tokens_per_second,
            what_if=question,
            say=_say(),
            **arguments,
        )
    except (PenstockError, OSError) as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        if as_json:
            typer.echo(json.dumps({"error": text, "exit_code": UNREADABLE}, indent=2))
        fail(context, error, "" if as_json else f"penstock doctor: {text}", UNREADABLE)
    finally:
        log.setLevel(level)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        for line in _lines(diagnosis):
            typer.echo(line)
    raise typer.Exit(diagnosis.exit_code)


def _data(target: str, said: dict[str, Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A dataset, and how to load it."""
    given = {name: value for name, value in said.items() if value is not None}
    if is_file(target):
        return described(target, given, options)
    from penstock.doctor import examine
    from penstock.options import RemoteOptions

    # The listing comes before the examination, which has this patience with all that follows.
    return addressed(
        target, given, options, remote=RemoteOptions(metadata_budget=examine.PATIENCE_S)
    )


def _say() -> Callable[[str], None]:
    """On a terminal, what is being done; it disappears again."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda what: typer.echo(f"\r\x1b[Ktrying {what} …", nl=False, err=True)


def _lines(found: Diagnosis) -> Iterator[str]:
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", nl=False, err=True)
    if found.files is not None and found.bytes is not None:
        listed = (
            ""
            if found.listing_s is None
            else f"; listed, and the vocabulary loaded, in {found.listing_s:.2f} s"
        )
        yield _row(
            "data", f"{found.files:,} file{'s' * (found.files != 1)}, {size(found.bytes)}{listed}"
        )
    if found.alone is not None:
        yield from _alone(found.alone)
    memory = found.memory
    parts = {
        "queue": memory.queue_bytes,
        "window": memory.window_bytes,
        "read-ahead": memory.read_ahead_bytes,
    }
    told = ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n is not None)
    yield _row(
        "memory",
        f"{told}; memory_limit {size(memory.limit_bytes)}; the process grew {size(memory.grown_bytes)}",
    )
    yield _row("first batch", f"{found.first_batch_s:.2f} s")
    if found.bad:
        yield _row("left out", ", ".join(f"{n} {reason}" for reason, n in found.bad.items()))
    yield _row("altogether", f"limited by {found.limited_by}", found.tokens_per_s)
    yield _row("", f"waits charged to {_shares(found)}")
    if found.data_wait is not None and found.wanted_tokens_per_s is not None:
        yield _row(
            "wanted",
            f"data wait {_percent(found.data_wait)}: {found.band}",
            found.wanted_tokens_per_s,
        )
        if found.advice:
            yield _row("", found.advice)
    if found.what_if is not None:
        yield from _what_if(found.what_if)
    if found.load is not None and found.load > found.cores:
        yield _row(
            "note",
            f"{found.load:.1f} threads wanted the {found.cores} cores before this began: all rates are low",
        )
    if found.cores_short:
        yield _row(
            "note",
            f"{found.cores_used:.1f} of {found.cores} cores were used: waits are for a core as much as for data",
        )
    yield ""
    yield "# settings that suit this"
    yield from found.recommended.lines()


def _alone(alone: Alone) -> Iterator[str]:
    limit = alone.ceilings()
    if alone.footer_ms is not None:
        yield _row("footer", f"{alone.footer_ms:.1f} ms each")
    yield _row("alone", "", "tokens/s at most")
    if alone.remote and alone.fetch_bytes_per_s and alone.in_flight_bytes_per_s:
        one, many = _rate(alone.fetch_bytes_per_s), _rate(alone.in_flight_bytes_per_s)
        yield _row(
            "  fetch", f"{one} one at a time, {many} with {alone.in_flight}", limit.get("fetch")
        )
        took = f"p50 {alone.fetch_p50_ms:.0f}, p95 {alone.fetch_p95_ms:.0f} ms"
        yield _row("", f"a chunk takes {took}, {alone.first_byte_ms:.0f} to the first byte")
    elif alone.fetch_bytes_per_s:
        yield _row(
            "  fetch",
            f"{_rate(alone.fetch_bytes_per_s)} from disk or its cache",
            limit.get("fetch"),
        )
    yield _row(
        "  decode", f"{_rate(alone.decode_bytes_per_s)} of text by one worker", limit["decode"]
    )
    both = f", {_rate(alone.workers_bytes_per_s)} by {alone.workers}" if alone.workers > 1 else ""
    yield _row(
        "  tokenize",
        f"{_rate(alone.tokenize_bytes_per_s)} of text by one worker{both}",
        limit["tokenize"],
    )
    yield _row(
        "  pack",
        f"cropped {_percent(alone.cropped_share)}, padded {_percent(alone.padded_share)}",
        limit["pack"],
    )
    yield _row("  batch", "", limit["batch"])
    yield _row(
        "text", f"{alone.bytes_per_token:.2f} bytes a token; chunks of {size(alone.chunk_bytes)}"
    )


def _what_if(found: WhatIf) -> Iterator[str]:
    yield _row("as it is", f"data wait {_percent(found.data_wait)}", found.tokens_per_s)
    yield _row(
        f"if {found.question}", f"data wait {_percent(found.if_data_wait)}", found.if_tokens_per_s
    )
    yield _row(
        "",
        f"{_percent(found.disappears)} of the time disappears, {_percent(found.attributed)} was charged to what is "
        f"left out: {found.apart:.1f} points apart",
    )


def _shares(found: Diagnosis) -> str:
    told = [(stage, share) for stage, share in found.shares.items() if share >= 0.05]
    return ", ".join(f"{stage} {_percent(share)}" for stage, share in told) or "none"


def _row(name: str, text: str, rate: float | str | None = None) -> str:
    told = rate if isinstance(rate, str) else _tokens(rate) if rate is not None else ""
    return f"{name:<12} {text:<58} {told:>16}".rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tokens(rate: float) -> str:
    return f"{rate / 1e6:,.2f} M" if rate >= 1e6 else f"{rate:,.0f}"


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"

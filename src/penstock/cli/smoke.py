"""`penstock smoke`: does a run with these settings get its first batch?"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import complete
from penstock.cli.failure import fail
from penstock.cli.given import Overrides, Preset, SeqLen, TextField, Tokenizer
from penstock.errors import ConfigError, LoaderTimeout, PenstockError

if TYPE_CHECKING:
    from penstock.verify.smoke import Smoke

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
    """Get one batch the way a run does.

    With listing, threads, prefetch and all. Exit code 0: it is there. 2: it is not, and one line on stderr says why. Settings come from the command line, the
    environment and the file, in this order.
    """
    begun, name = perf_counter(), dataset or "settings"
    with _last_word() as word:
        try:
            if not 0 < timeout <= LONGEST_S:
                raise ConfigError(
                    f"--timeout {timeout:g}: needs seconds, more than 0 and at most {LONGEST_S:,}"
                )
            # Imported here: a library that is missing is a failure like any other.
            from penstock.cli.config import overrides
            from penstock.verify.choice import choose
            from penstock.verify.smoke import smoke as check

            choice = choose(
                dataset, default="fineweb_edu", local_path=local_path, config=config,
                overrides=overrides(set_, batch_size=batch), preset=preset, tokenizer=tokenizer, seq_len=seq_len, text_field=text_field,
            )  # fmt: skip
            name = choice.name
            seen = check(choice, timeout, begun)
        except Exception as error:  # whatever it is, a runbook reads one line and one exit code
            said = (
                f" Last heard: {word.text}"
                if isinstance(error, LoaderTimeout) and word.text
                else ""
            )
            text = f"{name}, after {perf_counter() - begun:.1f} s: {_why(error)}{said}"
            fail(context, error, f"[smoke][FAIL] {' '.join(text.split())}", FAILED)
    for line in _lines(name, seen):
        typer.echo(line)


def main() -> None:
    """This command by itself, for the script of its name."""
    from penstock.cli.main import app

    app(["smoke", *sys.argv[1:]])


class _LastWord(logging.Handler):
    """Keeps what the log said last: why a server was asked again, for one."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextmanager
def _last_word() -> Iterator[_LastWord]:
    """A failure is one line: what the log says on the way to it is kept, and not shown."""
    log, word = logging.getLogger("penstock"), _LastWord(logging.INFO)
    before = log.level, log.propagate
    log.addHandler(word)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield word
    finally:
        log.removeHandler(word)
        log.setLevel(before[0])
        log.propagate = before[1]


def _why(error: Exception) -> str:
    text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    return text + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _lines(name: str, seen: Smoke) -> Iterator[str]:
    yield f"[smoke][OK] first batch in {seen.first_batch_s:.2f}s"
    yield _row("data", f"{name}: {seen.data}")
    yield _row("batch", f"{' x '.join(map(str, seen.shape))} {seen.dtype}, {seen.tokens:,} tokens")
    depth, capacity = seen.queue
    yield _row(
        "queue",
        f"{depth} ready behind it; prefetch keeps {capacity}"
        if capacity
        else "none: prefetch is off",
    )
    if seen.warmup is not None:
        yield _row(
            "warmup",
            f"{seen.warmup.filled} of {seen.warmup.requested} batches in {seen.warmup.wait_ms / 1e3:.2f} s",
        )
    yield _row("ledger", "seconds since the process began")
    for entry, seconds in seen.ledger.items():
        yield f"  {entry.replace('_', ' '):<12} {seconds:8.3f}"
    spent = sorted(seen.spent.items(), key=lambda item: -item[1])
    yield _row("spent", ", ".join(f"{part} {seconds:.3f}" for part, seconds in spent))


def _row(name: str, text: str) -> str:
    return f"{name:<12} {text}"


if __name__ == "__main__":
    main()

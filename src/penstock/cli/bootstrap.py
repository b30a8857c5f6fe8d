"""`penstock bootstrap`: a local file of text, from which a run can start at once."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.command import progress
from penstock.options import option, options
from penstock.types import GiB

if TYPE_CHECKING:
    from penstock.tools.bootstrap import Bootstrapped, Progress


@options
class BootstrapOptions:
    """What to write.

    urls: hf://…, s3://…, https://…, a short name or a path. Defaults to fineweb_edu.
    out: The .jsonl file to write.
    bytes: Size to write: 5GB, 100MiB, a number.
    card_config: A configuration from the dataset's card on the Hub.
    text_field: Column or field with the text.
    refresh: Extend a finished file to this size.
    background: Run in the background and log to FILE.log.
    quiet: Show no progress.
    """

    urls: list[str] | None = None
    _: KW_ONLY
    out: Path
    bytes: int = option(default=5 * GiB, minimum=1, size=True)
    card_config: str | None = None
    text_field: str = "text"
    refresh: bool = False
    background: bool = False
    quiet: bool = False


def bootstrap(given: BootstrapOptions) -> None:
    """Write the first bytes of a source's text to a local file.

    If it is killed, run it again: it continues and ends with the same bytes. Exit code 1: an error.
    """
    from penstock.tools.bootstrap import bootstrap as write
    from penstock.tools.bootstrap import check_name

    check_name(given.out)
    if given.background and _detach(given.out):
        return
    began = time.monotonic()
    try:
        with progress(given.quiet) as show:
            done = write(
                given.urls or ["fineweb_edu"], given.out, given.bytes,
                text_field=given.text_field, refresh=given.refresh,
                remote={"config": given.card_config},
                progress=lambda now: show(now.bytes, now.goal, _describe(now, began)),
            )  # fmt: skip
    except KeyboardInterrupt as error:
        for note in getattr(error, "__notes__", ()):  # what is safe, and how to continue
            print(note, file=sys.stderr)
        raise
    if not given.quiet:
        print(_summary(done, given.bytes, time.monotonic() - began), file=sys.stderr)
    print(f"wrote bytes: {done.bytes}")


def _detach(out: Path) -> bool:
    """Go on in a process that outlives this one and its terminal. Return False there."""
    log = Path(f"{out}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        print(f"process {pid} writes {out} and logs to {log}", file=sys.stderr)
        print(pid)
        return True
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(log, "ab") as sink:
        for descriptor, file in enumerate((nothing, sink, sink)):
            os.dup2(file.fileno(), descriptor)
    return False


def _summary(done: Bootstrapped, goal: int, seconds: float) -> str:
    text = f"{done.path}: {done.bytes / 1e6:.1f} MB in {done.documents} documents"
    text += ", complete already" if done.already else f", after {seconds:.1f} s"
    if done.exhausted and done.bytes < goal:
        text += f"; the source has no more, {goal / 1e6:.1f} MB were asked for"
    if done.bad:
        reasons = ", ".join(f"{reason} {n}" for reason, n in done.bad.items())
        text += f"; {sum(done.bad.values())} records were skipped ({reasons})"
    return text


def _describe(now: Progress, began: float) -> str:
    speed = (now.bytes - now.began) / max(1e-9, time.monotonic() - began)
    left_s = (now.goal - now.bytes) / speed if speed else 0.0
    return (
        f"{now.bytes / 1e6:.0f} of {now.goal / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s, "
        f"{left_s:.0f} s left ({now.file})"
    )

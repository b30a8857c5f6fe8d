"""`penstock bootstrap`: write a local file of text, so that a run can start at once."""

from __future__ import annotations

import os
import sys
from dataclasses import KW_ONLY
from pathlib import Path

from penstock.cli.command import progress
from penstock.options import option, options
from penstock.types import GiB


@options
class BootstrapOptions:
    """Options of `penstock bootstrap`.

    urls: hf://…, s3://…, https://…, a short name or a path. Defaults to fineweb_edu.
    out: The .jsonl file to write.
    bytes: Size to write, such as 5GB, 100MiB or a number.
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

    After a kill, run it again: it continues and ends with the same bytes. Exit code 1: an error.
    """
    from penstock.tools.bootstrap import bootstrap as write
    from penstock.tools.bootstrap import check_name

    check_name(given.out)
    if given.background and _detach(given.out):
        return
    with progress(given.quiet) as show:
        done = write(
            given.urls or ["fineweb_edu"], given.out, given.bytes, text_field=given.text_field,
            refresh=given.refresh, remote={"config": given.card_config},
            progress=lambda now: show(now.bytes, now.goal, now.as_text()),
        )  # fmt: skip
    if not given.quiet:
        print(done.as_text(), file=sys.stderr)
    print(f"wrote bytes: {done.bytes}")


def _detach(out: Path) -> bool:
    """Continue in a child process that outlives this terminal. Return False in the child."""
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

"""`penstock health`: judge a run by its heartbeats, for terminals, scripts and CI."""

from __future__ import annotations

import sys
import time
from dataclasses import KW_ONLY

from penstock.cli.command import print_json
from penstock.options import options
from penstock.watch.health import Limits
from penstock.watch.heartbeat_reader import FOLDER


@options
class HealthOptions:
    """Options of `penstock health`.

    files: Heartbeat files, globs or folders. Defaults to artifacts/train_showcase.
    json: Print JSON.
    """

    files: list[str] | None = None
    _: KW_ONLY
    json: bool = False


def health(given: HealthOptions, limits: Limits) -> int:
    """Judge a running or ended run by its heartbeats.

    Exit code 0: healthy, or warming up. 1: unhealthy. 2: cannot tell, because
    a file or a step is missing, or a folder lacks some ranks of the run.
    """
    from penstock.watch.health import judge_run

    found = judge_run(given.files or [FOLDER], time.time(), limits)
    if given.json:
        print_json(found.as_dict())
    else:
        for verdict in found.verdicts.values():
            print(verdict.line())
        for text in found.unknown:
            print(f"cannot tell: {text}", file=sys.stderr)
        print(found.summary())
    return found.exit_code

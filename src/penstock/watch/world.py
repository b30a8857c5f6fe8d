"""How many ranks a run has by its own account, and which of them left no heartbeat.

In:    `boot` lines, and the ranks whose files were found.
Out:   a number of ranks; a sentence on those that are missing.
Where: any reader's thread.
State: none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.watch.heartbeat_reader import parts
from penstock.watch.line import MAX_LINE_BYTES, Line, decode
from penstock.watch.view.fields import whole

MOST_RANKS = 10_000_000
"""More is no count."""
NAMED = 12
"""Ranks that are named one by one."""


def world_size(boot: Mapping[str, Any]) -> int | None:
    """The ranks of the run, as its `boot` line has them."""
    found = whole(boot.get("world_size"))
    return found if found is not None and 1 <= found <= MOST_RANKS else None


def missing(expected: int | None, there: Collection[int]) -> str:
    """Which ranks of those expected left no heartbeat, in words; nothing if all of them did."""
    lacking = 0 if expected is None else expected - len({rank for rank in there if rank < expected})
    if expected is None or not lacking:
        return ""
    named = list(islice((rank for rank in range(expected) if rank not in there), NAMED))
    more = f" and {lacking - len(named):,} more" if lacking > len(named) else ""
    return f"{lacking:,} of {expected:,} ranks left no heartbeat here: {', '.join(map(str, named))}{more}"


def last_boot(path: Path) -> Line | None:
    """The newest `boot` line of a rank. Others are not parsed: a long run has a hundred thousand of them in a file."""
    for part in reversed(parts(path)):
        found = None
        try:
            file = part.open("rb")
        except FileNotFoundError:  # renamed just now
            continue
        with file:
            while line := file.readline(MAX_LINE_BYTES):
                if b'"boot"' in line and (one := decode(line)) is not None and one["msg"] == "boot":
                    found = one
        if found is not None:
            return found
    return None

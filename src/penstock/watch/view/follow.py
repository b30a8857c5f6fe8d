"""Follow the heartbeat files of a run, those included that are not there yet.

In:    names, globs and folders.
Out:   the lines that have come since the last look.
Where: the watcher's thread, which decides when to look.
State: a `Tail` for each file; what could not be read, and why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import PenstockError
from penstock.watch.heartbeat_reader import Tail, expand
from penstock.watch.line import Line
from penstock.watch.view.fields import text

LOOK_S = 2.0
"""How often new files are looked for; a listing may be slow on a shared disk."""


class Follower:
    """All heartbeats of a run."""

    def __init__(self, patterns: Sequence[str | os.PathLike[str]]) -> None:
        self._patterns = [os.fspath(pattern) for pattern in patterns]
        self._tails: dict[Path, Tail] = {}
        self._problems: dict[Path, str] = {}
        self._looked: float | None = None

    @property
    def files(self) -> list[Path]:
        """The files that were found so far."""
        return list(self._tails)

    @property
    def behind(self) -> bool:
        """Whether the last look has left lines for the next one: a long history comes in pieces."""
        return any(tail.behind for tail in self._tails.values())

    def poll(self) -> list[Line]:
        """What has come."""
        now = time.monotonic()
        if not self._tails or self._looked is None or now - self._looked >= LOOK_S:
            self._looked = now
            for path in expand(self._patterns):
                self._tails.setdefault(path, Tail(path))
        lines: list[Line] = []
        for path, tail in self._tails.items():
            try:
                lines += tail.poll()
            except (
                OSError,
                PenstockError,
            ) as error:  # of one rank; the others are still worth seeing
                self._problems[path] = str(error)
            else:
                self._problems.pop(path, None)
        return lines

    def notes(self) -> list[str]:
        """What somebody who watches should know of the files."""
        notes = [text(f"cannot read {path}: {why}") for path, why in self._problems.items()]
        if not self._tails:
            notes.append(text(f"waiting for {', '.join(self._patterns)}: nothing there yet"))
        skipped = sum(tail.skipped for tail in self._tails.values())
        if skipped:
            notes.append(
                f"{skipped} line{'s' * (skipped != 1)} skipped: cut off, or not a heartbeat's"
            )
        return notes

"""Lines of a heartbeat out of pieces of its file.

In:    bytes as they were read, cut anywhere.
Out:   the lines that are whole and ours.
Where: the reader's thread.
State: the beginning of a line, and a count of what was left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.watch.line import MAX_LINE_BYTES, Line, decode


@dataclass(slots=True)
class Skipped:
    """What a reader left out."""

    torn: int = 0
    """Lines that are no JSON: cut off, mostly."""
    foreign: int = 0
    """JSON, but not a heartbeat's line."""
    long: int = 0
    """Lines of more than `MAX_LINE_BYTES`."""

    @property
    def total(self) -> int:
        return self.torn + self.foreign + self.long


class Splitter:
    """Lines from pieces of a file, with at most one line in memory."""

    def __init__(self, skipped: Skipped) -> None:
        self._skipped = skipped
        self._begun = b""
        self._too_long = False

    def feed(self, piece: bytes) -> Iterator[Line]:
        head, newline, rest = piece.partition(b"\n")
        if not newline:
            self._begin(head)
            return
        self._begin(head)
        yield from self.end()
        *whole, begun = rest.split(b"\n")
        for line in whole:
            yield from self._take(line)
        self._begin(begun)

    def end(self) -> Iterator[Line]:
        """The line is over, or the file is."""
        line, self._begun = self._begun, b""
        if self._too_long:
            self._too_long = False
            self._skipped.long += 1
        else:
            yield from self._take(line)

    def forget(self) -> None:
        """Whatever was begun will not be ended."""
        self._skipped.torn += bool(self._begun) or self._too_long
        self._begun, self._too_long = b"", False

    def _begin(self, piece: bytes) -> None:
        if not self._too_long:
            self._begun += piece
        if len(self._begun) > MAX_LINE_BYTES:
            self._begun, self._too_long = b"", True

    def _take(self, line: bytes) -> Iterator[Line]:
        if len(line) > MAX_LINE_BYTES:
            self._skipped.long += 1
        elif (found := decode(line)) is not None:
            yield found
        elif line.strip():
            foreign = line.lstrip()[:1] == b"{" and line.rstrip()[-1:] == b"}"
            self._skipped.foreign += foreign
            self._skipped.torn += not foreign

"""Read heartbeat files: all at once, or while they grow.

A heartbeat is `heartbeat_rank{N}.jsonl` and its rotated parts, `….jsonl.1` (the newest) to
`….jsonl.N`. Lines that are cut off, too long or not a heartbeat's are skipped and counted.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import dropwhile
from pathlib import Path
from typing import BinaryIO

from penstock.errors import SourceError
from penstock.types import MiB
from penstock.watch.line import MAX_LINE_BYTES, Line, decode

FOLDER = Path("artifacts/train_showcase")
"""The default folder of a run."""
PATTERN = "heartbeat_rank*.jsonl"
POLL_BYTES = 16 * MiB
"""Read in one poll, so that a long history does not delay the first screen."""
LIST_S = 2.0
"""Seconds between two searches for new files; listing may be slow on a shared disk."""
HINT = "Has the run started, and does it write there?"
_PART = re.compile(r"(.+\.jsonl)\.([1-9][0-9]{0,3})")


def parts(path: Path) -> list[Path]:
    """Return the file and its rotated parts, those that exist, oldest first."""
    names = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
    rotated = [part for name in names if (part := _PART.fullmatch(name)) and part[1] == path.name]
    older = sorted((int(part[2]) for part in rotated), reverse=True)
    found = [path.with_name(f"{path.name}.{number}") for number in older]
    return [*found, path] if path.is_file() else found


def expand(patterns: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the heartbeat files that names, globs and folders match, sorted by rank.

    A rotated part stands for its file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        names = path.glob(PATTERN + "*") if path.is_dir() else map(Path, glob.glob(str(path)))
        matched = {_file_of(name) for name in names if name.is_file()}
        if not matched and parts(_file_of(path)):
            matched = {_file_of(path)}
        found |= matched
    # Numbers compare as numbers, so that rank 10 comes after rank 9.
    return sorted(found, key=lambda path: (len(path.name), str(path)))


def _file_of(part: Path) -> Path:
    rotated = _PART.fullmatch(part.name)
    return part if rotated is None else part.with_name(rotated[1])


class Tail:
    """Follows the heartbeat of one rank through rotations.

    Holds no file open between two polls. Lines that are rotated away and deleted between two polls
    are not seen.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _file_of(Path(path).expanduser())
        self.skipped = 0
        """Lines that were cut off or not a heartbeat's."""
        self.behind = False
        """True if the last poll left lines for the next one."""
        self._inode, self._offset = -1, 0
        """The file that was read last, which a rotation renames, and how far it was read."""

    def poll(self, max_bytes: int = POLL_BYTES, *, end: bool = False) -> list[Line]:
        """Return the lines since the last poll; with `end` also a last one without a newline."""
        lines: list[Line] = []
        with ExitStack() as stack:
            files = self._open(stack)
            if self._inode not in files:
                self._inode, self._offset = next(iter(files), -1), 0
            for inode, file in dropwhile(lambda item: item[0] != self._inode, files.items()):
                if inode != self._inode or file.seek(0, os.SEEK_END) < self._offset:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                text = file.read(max_bytes)
                max_bytes -= len(text)
                text += file.readline() if not max_bytes else b""
                if not end and inode == [*files][-1]:  # the last line may be incomplete
                    text = text[: text.rfind(b"\n") + 1]
                self._offset += len(text)
                lines += self.decode_all(text.split(b"\n"))
                if not max_bytes:
                    break
        self.behind = not max_bytes
        return lines

    def _open(self, stack: ExitStack) -> dict[int, BinaryIO]:
        """Open the files to read, oldest first, by inode."""
        found: dict[int, BinaryIO] = {}
        # Newest first: a rotation meanwhile makes a file appear twice, but never hides one.
        for part in reversed(parts(self.path)):
            with suppress(FileNotFoundError):
                file = stack.enter_context(part.open("rb"))
                found.setdefault(os.fstat(file.fileno()).st_ino, file)
        return dict(reversed(found.items()))

    def decode_all(self, texts: Sequence[bytes]) -> list[Line]:
        """Return the valid lines, and count the others."""
        texts = [text for text in texts if text.strip()]
        found = [decode(text) for text in texts if len(text) <= MAX_LINE_BYTES]
        lines = [line for line in found if line is not None]
        self.skipped += len(texts) - len(lines)
        return lines


class Heartbeats(list[Line]):
    """The recorded lines of one rank, oldest first."""

    skipped = 0

    def of(self, *msgs: str) -> list[Line]:
        """Return the lines with one of these messages."""
        return [line for line in self if line["msg"] in msgs]


def read_heartbeat(path: str | os.PathLike[str], last_bytes: int | None = None) -> Heartbeats:
    """Return the heartbeat of one rank; with `last_bytes` its boot line and the last lines."""
    tail = Tail(path)
    found = parts(tail.path)
    if not found:
        raise SourceError(f"{tail.path}: no heartbeat there. {HINT}")
    lines = Heartbeats()
    if last_bytes is not None:
        text = b"".join(part.read_bytes() for part in found[-2:])  # each begins with a boot line
        lines += tail.decode_all([text.split(b"\n", 1)[0], *text[-last_bytes:].split(b"\n")[1:]])
    else:
        lines += tail.poll(end=True)
        while tail.behind:
            lines += tail.poll(end=True)
    lines.skipped = tail.skipped
    return lines


class Follower:
    """Follows all heartbeats of a run, including files that do not exist yet."""

    def __init__(self, patterns: Sequence[str | os.PathLike[str]]) -> None:
        self._patterns = [os.fspath(pattern) for pattern in patterns]
        self._listed = -LIST_S
        self.tails: dict[Path, Tail] = {}

    @property
    def behind(self) -> bool:
        """True if the last poll left lines for the next one."""
        return any(tail.behind for tail in self.tails.values())

    def poll(self) -> list[Line]:
        """Return the lines that were added since the last poll, of all ranks."""
        if not self.tails or time.monotonic() - self._listed >= LIST_S:
            self._listed = time.monotonic()
            for path in expand(self._patterns):
                self.tails.setdefault(path, Tail(path))
        lines: list[Line] = []
        for tail in self.tails.values():
            lines += tail.poll()
        return lines

    def notes(self) -> list[str]:
        """Return what a reader should know about the files."""
        notes = [] if self.tails else [f"waiting for {', '.join(self._patterns)}"]
        if skipped := sum(tail.skipped for tail in self.tails.values()):
            notes.append(f"skipped {skipped} lines that are cut off or not a heartbeat's")
        return notes


def missing_ranks(world_size: int | None, there: Collection[int | None]) -> str:
    """Say which ranks of a run left no heartbeat; empty if none is missing."""
    absent = [rank for rank in range(world_size or 0) if rank not in there]
    if not absent:
        return ""
    return f"{len(absent):,} of {world_size:,} ranks left no heartbeat here: {listed(absent)}"


def listed(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks, of many only the first."""
    more = f" and {len(ranks) - 12:,} more" if len(ranks) > 12 else ""
    return ", ".join(map(str, ranks[:12])) + more

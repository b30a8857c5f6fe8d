"""Read heartbeat files: all at once, or while they grow.

A heartbeat is `heartbeat_rank{N}.jsonl` and its rotated parts, `….jsonl.1` (the newest) to
`….jsonl.N`. Readers need nothing from the run but these files. Lines that are cut off, too long or
not a heartbeat's are skipped and counted. Files are read a megabyte at a time.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.errors import NoData
from penstock.types import MiB
from penstock.watch.line import MAX_LINE_BYTES, Line, decode

FOLDER = Path("artifacts/train_showcase")
"""The default folder of a run."""
PATTERN = "heartbeat_rank*.jsonl"
CHUNK = MiB
HEAD_BYTES = 256
"""A file is recognised by its first bytes after a rename: they hold the time of its first line."""
OPEN_ATTEMPTS = 5
_PART = re.compile(r"(.+\.jsonl)\.([1-9][0-9]{0,3})")


class LineSplitter:
    """Turns pieces of a file into lines. Holds at most one line in memory."""

    def __init__(self) -> None:
        self.skipped = 0
        self._begun = b""

    def feed(self, piece: bytes) -> Iterator[Line]:
        """Yield the lines that this piece completes."""
        *ended, begun = piece.split(b"\n")
        for line in ended:
            yield from self._take(self._begun + line)
            self._begun = b""
        # One byte more than allowed is enough to know that the line is too long.
        self._begun = (self._begun + begun)[: MAX_LINE_BYTES + 1]

    def end(self) -> Iterator[Line]:
        """Yield the last line of a file that does not end with a newline, if it is complete."""
        line, self._begun = self._begun, b""
        yield from self._take(line)

    def _take(self, line: bytes) -> Iterator[Line]:
        found = decode(line) if len(line) <= MAX_LINE_BYTES else None
        if found is not None:
            yield found
        elif line.strip():
            self.skipped += 1


def parts(path: Path) -> list[Path]:
    """Return the file and its rotated parts, those that exist, oldest first."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    numbers = [0] if path.name in names else []
    rotated = (_PART.fullmatch(name) for name in names)
    numbers += [int(part[2]) for part in rotated if part and part[1] == path.name]
    return [
        path.with_name(f"{path.name}.{number}") if number else path
        for number in sorted(numbers, reverse=True)
    ]


def expand(patterns: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the heartbeat files that names, globs and folders match, sorted by rank.

    A rotated part stands for its file. Files that do not exist yet are not included.
    """
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found.update(_file_of(part) for part in path.glob(PATTERN + "*"))
        elif path.exists() or parts(path):
            found.add(_file_of(path))
        else:
            names = glob.glob(str(path), recursive=True)
            found.update(_file_of(Path(name)) for name in names if not os.path.isdir(name))
    return sorted(found, key=lambda path: (str(path.parent), _numeric(path.name)))


def _file_of(part: Path) -> Path:
    rotated = _PART.fullmatch(part.name)
    return part if rotated is None else part.with_name(rotated[1])


def _numeric(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts rank 10 after rank 9."""
    words = re.split(r"([0-9]{1,9})", name)
    return [(int(word), "") if word.isdecimal() else (0, word) for word in words]


def _open(path: Path) -> BinaryIO:
    # O_NONBLOCK: opening a named pipe without a writer would block.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = open(fd, "rb", buffering=0)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise NoData(f"{path} is a pipe, a folder or a device: a heartbeat needs a regular file")
    return file


@contextmanager
def _opened(path: Path) -> Iterator[list[BinaryIO]]:
    """Open the file and its parts, oldest first, as they are between two rotations."""
    for attempt in range(OPEN_ATTEMPTS):
        with ExitStack() as stack:
            try:
                files = [stack.enter_context(_open(part)) for part in parts(path)]
                now = [os.stat(part) for part in parts(path)]
            except FileNotFoundError:  # renamed after it was listed
                continue
            then = [os.fstat(file.fileno()) for file in files]
            if attempt == OPEN_ATTEMPTS - 1 or [s.st_ino for s in then] == [s.st_ino for s in now]:
                yield files
                return
    yield []


class Heartbeats:
    """The recorded lines of one rank, oldest first.

    Iterating reads the files each time; `lines` reads them once and keeps them in memory.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.skipped = 0
        """Lines that the last pass skipped."""
        self._last_bytes = last_bytes
        self._lines: list[Line] | None = None

    @property
    def lines(self) -> list[Line]:
        """All lines, as a list."""
        if self._lines is None:
            self._lines = list(self._read())
        return self._lines

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines) if self._lines is not None else self._read()

    def __len__(self) -> int:
        return len(self.lines)

    def of(self, *msgs: str) -> list[Line]:
        """Return the lines with one of these messages."""
        return [line for line in self if line["msg"] in msgs]

    def last_run(self) -> list[Line]:
        """Return the lines since the process that wrote last was started."""
        starts = [
            number
            for number, line in enumerate(self.lines)
            if line["msg"] == "boot" and not line.get("rotated")
        ]
        return self.lines[starts[-1] if starts else 0 :]

    def _read(self) -> Iterator[Line]:
        splitter = LineSplitter()
        with _opened(self.path) as files:
            sizes = [os.fstat(file.fileno()).st_size for file in files]
            before = 0 if self._last_bytes is None else sum(sizes) - self._last_bytes
            for file, size in zip(files, sizes, strict=True):
                if before > 0:
                    _seek_to_line(file, min(before, size))
                    before -= size
                while piece := file.read(CHUNK):
                    yield from splitter.feed(piece)
                yield from splitter.end()
                self.skipped = splitter.skipped
        self.skipped = splitter.skipped


def _seek_to_line(file: BinaryIO, offset: int) -> None:
    """Seek to the first line that begins at the offset or after it."""
    position = max(0, offset - 1)
    file.seek(position)
    while piece := file.read(CHUNK):
        newline = piece.find(b"\n")
        if newline >= 0:
            file.seek(position + newline + 1)
            return
        position += len(piece)


def read_heartbeat(path: str | os.PathLike[str], last_bytes: int | None = None) -> Heartbeats:
    """Return the heartbeat of one rank, or only the lines in its last `last_bytes` bytes."""
    file = _file_of(Path(path).expanduser())
    if not parts(file):
        raise NoData(f"{file}: no such heartbeat. Has the run started, and does it write there?")
    return Heartbeats(file, last_bytes)


class Tail:
    """Follows the heartbeat of one rank through rotations. No line is lost or returned twice.

    Holds no file open between two polls, so it can follow any number of ranks. Lines that are
    rotated away and deleted between two polls are not seen.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _file_of(Path(path).expanduser())
        self.behind = False
        """True if the last poll stopped at `max_bytes`."""
        self._head = b""
        self._offset = 0
        self._mtime = 0
        self._splitter = LineSplitter()

    @property
    def skipped(self) -> int:
        """Lines that were skipped so far."""
        return self._splitter.skipped

    def poll(self, max_bytes: int = 16 * MiB) -> list[Line]:
        """Return the lines that were added since the last poll."""
        found: list[Line] = []
        left = self._poll_newest(found, max_bytes)
        if left is None:
            left = self._poll_all(found, max_bytes)
        self.behind = left <= 0
        return found

    def _poll_newest(self, found: list[Line], max_bytes: int) -> int | None:
        """Read on in the newest file if that is the current one. Avoids listing the folder."""
        try:
            with _open(self.path) as file:
                return self._read(file, found, max_bytes) if self._is_current(file) else None
        except FileNotFoundError:
            return None

    def _poll_all(self, found: list[Line], max_bytes: int) -> int:
        with _opened(self.path) as opened:
            files = [file for file in opened if os.fstat(file.fileno()).st_size]
            current = next((n for n, file in enumerate(files) if self._is_current(file)), None)
            if current is None:  # deleted: what was written since then is new
                files = [f for f in files if os.fstat(f.fileno()).st_mtime_ns >= self._mtime]
            else:
                max_bytes = self._read(files[current], found, max_bytes)
                files = files[current + 1 :]
            for file in files:
                if max_bytes <= 0:
                    break
                found += self._splitter.end()
                self._head, self._offset = b"", 0
                max_bytes = self._read(file, found, max_bytes)
        return max_bytes

    def _is_current(self, file: BinaryIO) -> bool:
        size = os.fstat(file.fileno()).st_size
        return 0 < self._offset <= size and file.read(len(self._head)) == self._head

    def _read(self, file: BinaryIO, found: list[Line], max_bytes: int) -> int:
        """Read from the offset on. Return how many of `max_bytes` are left."""
        file.seek(self._offset)
        while max_bytes > 0 and (piece := file.read(min(CHUNK, max_bytes))):
            if self._offset < HEAD_BYTES:
                self._head = (self._head + piece)[:HEAD_BYTES]
            self._offset += len(piece)
            max_bytes -= len(piece)
            found += self._splitter.feed(piece)
        self._mtime = os.fstat(file.fileno()).st_mtime_ns
        return max_bytes

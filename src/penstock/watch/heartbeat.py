"""The heartbeat's file: read back, and followed while it grows.

In:    `heartbeat_rank{N}.jsonl` and its rotated parts `….jsonl.1`, `….jsonl.2`, …
Out:   its lines as dictionaries, oldest first.
Where: any thread; a reader beside the run needs nothing from it but the file.
State: a reader counts what it left out; a `Tail` also keeps where it is in which file, and the beginning of a line.
Cost:  a file is read once, a megabyte at a time, however large it is.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.errors import NoData
from penstock.types import MiB
from penstock.watch.line import Line
from penstock.watch.split import Skipped, Splitter

FOLDER = Path("artifacts/train_showcase")
"""Where a run writes its heartbeats, unless told otherwise."""
PATTERN = "heartbeat_rank*.jsonl"
_CHUNK = MiB
_TRIES = 5
_REMEMBERED = 256
"""Bytes before its place that a `Tail` without an open file knows it by: lines have their time in them."""
_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_PART = re.compile(r"(.+\.jsonl)\.[1-9][0-9]{0,3}")


def parts(path: Path) -> list[Path]:
    """The file and its rotated parts, oldest first, of those that are there."""
    found = []
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    for name in names:
        number = name.removeprefix(f"{path.name}.")
        if name == path.name:
            found.append((0, path))
        elif number != name and _NUMBER.fullmatch(number):
            found.append((int(number), path.parent / name))
    return [part for _, part in sorted(found, reverse=True)]


def expand(patterns: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The heartbeat files that names, globs and folders stand for, by rank. Rotated parts count as their file.

    What is not there yet is not among them, so somebody who waits for a run asks again.
    """
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found.update(_file_of(part) for part in path.glob(PATTERN + "*"))
        elif path.exists() or parts(path):
            found.add(_file_of(path))
        else:
            found.update(
                _file_of(Path(name))
                for name in glob.glob(str(path), recursive=True)
                if not os.path.isdir(name)
            )
    return sorted(found, key=lambda path: (str(path.parent), _in_order(path.name)))


def _file_of(part: Path) -> Path:
    rotated = _PART.fullmatch(part.name)
    return part if rotated is None else part.with_name(rotated[1])


def _in_order(name: str) -> list[tuple[int, str]]:
    """Rank 10 comes after rank 9."""
    return [
        (int(run), "") if run.isdecimal() else (0, run) for run in re.split(r"([0-9]{1,9})", name)
    ]


class Heartbeats:
    """What one rank has recorded, its rotated parts first.

    Going over it reads the files then and there, a piece at a time; `lines` keeps them all.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self._last_bytes = last_bytes
        self.left_out = Skipped()
        """What the last pass over the files left out."""
        self._lines: list[Line] | None = None

    @property
    def skipped(self) -> int:
        return self.left_out.total

    @property
    def lines(self) -> list[Line]:
        if self._lines is None:
            self._lines = list(self._read())
        return self._lines

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines) if self._lines is not None else self._read()

    def __len__(self) -> int:
        return len(self.lines)

    def of(self, *msgs: str) -> list[Line]:
        """The lines of these kinds."""
        return [line for line in self if line["msg"] in msgs]

    def last_run(self) -> list[Line]:
        """The lines since the process that wrote last was started."""
        return self.lines[begin_of_last_run(self.lines) :]

    def _read(self) -> Iterator[Line]:
        self.left_out = skipped = Skipped()
        fds = _open_all(self.path)
        try:
            before = (
                0
                if self._last_bytes is None
                else sum(os.fstat(fd).st_size for fd in fds) - self._last_bytes
            )
            for fd in fds:
                lines = Splitter(skipped)
                if before > 0:
                    size = os.fstat(fd).st_size
                    _skip_to_line(fd, min(before, size))
                    before -= size
                while piece := os.read(fd, _CHUNK):
                    yield from lines.feed(piece)
                yield from lines.end()
        finally:
            _close(fds)


def _skip_to_line(fd: int, offset: int) -> None:
    """Go to where the first line begins from there on, or to the end."""
    at = max(0, offset - 1)
    while piece := os.pread(fd, _CHUNK, at):
        newline = piece.find(b"\n")
        if newline >= 0:
            at += newline + 1
            break
        at += len(piece)
    os.lseek(fd, at, os.SEEK_SET)


def begin_of_last_run(lines: list[Line]) -> int:
    """Where the last `boot` is that is not the repeated one of a rotated file."""
    starts = (
        n
        for n in range(len(lines) - 1, -1, -1)
        if lines[n]["msg"] == "boot" and not lines[n].get("rotated")
    )
    return next(starts, 0)


def read_heartbeat(path: str | os.PathLike[str], last_bytes: int | None = None) -> Heartbeats:
    """The heartbeat of one rank: its file and that file's rotated parts, or only the lines in the last bytes of them."""
    file = _file_of(Path(path).expanduser())
    if not parts(file):
        raise NoData(
            f"{file}: there is no such heartbeat. Has the run started, and does it write there?"
        )
    return Heartbeats(file, last_bytes)


def _open(path: Path) -> int:
    # Without O_NONBLOCK a named pipe that nobody writes to would hold the reader for ever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NoData(
            f"{path} is no file but a pipe, a folder or a device: a heartbeat cannot be read back from it"
        )
    return fd


def _open_all(path: Path) -> list[int]:
    """The parts of one moment: a rotation in between would hide one of them, so then it begins again."""
    for attempt in range(_TRIES):
        fds: list[int] = []
        try:
            for part in parts(path):
                fds.append(_open(part))  # noqa: PERF401 - what was opened must be known if the next one fails
            if (
                _identities(path) == [_identity(os.fstat(fd)) for fd in fds]
                or attempt == _TRIES - 1
            ):
                return fds
        except FileNotFoundError:
            pass  # renamed between the list and the opening
        except BaseException:
            _close(fds)
            raise
        _close(fds)
    return []


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _identities(path: Path) -> list[tuple[int, int]]:
    return [_identity(os.stat(part)) for part in parts(path)]


class Tail:
    """Follows the heartbeat of one rank while it grows, through rotations: no line is lost or given twice.

    The caller decides when to look: `poll` gives what has come since the last time.
    """

    def __init__(self, path: str | os.PathLike[str], *, hold: bool = True) -> None:
        """`hold`: keep the file open between two looks. Without, any number of ranks can be followed, but what is written
        to a file and deleted with it between two looks is not seen."""
        self.path = _file_of(Path(path).expanduser())
        self.left_out = Skipped()
        self.truncated = 0
        """How often the file was cut short by somebody, and was begun again."""
        self.behind = False
        """Whether the last `poll` gave as much as it may at once: there may be more."""
        self._hold = hold
        self._fd: int | None = None
        self._file: os.stat_result | None = None
        """The file that it is in, as it was at the last look."""
        self._offset = 0
        self._before = b""
        """What stands right before its place."""
        self._lines = Splitter(self.left_out)

    @property
    def skipped(self) -> int:
        return self.left_out.total

    def poll(self, max_bytes: int = 16 * MiB) -> list[Line]:
        """The lines that have come, and none while there is no file. At most about so many bytes of them at once."""
        found: list[Line] = []
        self.behind = False
        try:
            while max_bytes > 0 and (self._fd is not None or self._open_again(found)):
                n = self._read_into(found, max_bytes)
                max_bytes -= n
                if not n and not self._open_next(found):
                    break
        finally:
            if not self._hold:
                self._let_go()
        self.behind = max_bytes <= 0
        return found

    def close(self) -> None:
        """Let go of the file; the next `poll` would begin with the oldest part again."""
        self._let_go()
        self._file, self._offset, self._before = None, 0, b""
        self._lines = Splitter(self.left_out)  # what was begun would be read again

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _read_into(self, found: list[Line], max_bytes: int) -> int:
        assert self._fd is not None
        self._file = os.fstat(self._fd)
        if self._file.st_size < self._offset:
            self._lines.forget()
            self._offset, self._before = 0, b""
            self.truncated += 1
        piece = os.pread(self._fd, min(_CHUNK, max_bytes), self._offset)
        self._offset += len(piece)
        self._before = (self._before + piece[-_REMEMBERED:])[-_REMEMBERED:]
        found += self._lines.feed(piece)
        return len(piece)

    def _open_again(self, found: list[Line]) -> bool:
        """Go on in the file that was let go of, whatever its name is by now; else with what came after it."""
        if self._file is None:
            return self._open_next(found)
        if self._is_mine(self.path):  # mostly so, and a folder of many ranks takes long to list
            return True
        for _ in range(_TRIES):
            files = parts(self.path)
            if any(
                map(self._is_mine, reversed(files))
            ):  # the newest first: a rotation moves ours away from there
                return True
            if files == parts(self.path):
                return self._open_next(found)
        return False  # it is being rotated again and again; the next poll finds it

    def _is_mine(self, file: Path) -> bool:
        """Open a file if it is the one that was let go of. The number of one that was deleted may be another's by now."""
        try:
            fd = _open(file)
        except FileNotFoundError:
            return False
        at = self._offset - len(self._before)
        if self._same(os.fstat(fd)) and os.pread(fd, len(self._before), at) == self._before:
            self._fd = fd
            return True
        os.close(fd)
        return False

    def _is_newest(self) -> bool:
        """Whether its file still has its name, so that no other follows it."""
        try:
            return self._same(os.stat(self.path))
        except FileNotFoundError:
            return False

    def _same(self, other: os.stat_result) -> bool:
        return self._file is not None and _identity(self._file) == _identity(other)

    def _open_next(self, found: list[Line]) -> bool:
        """Go on with the part that follows the one that was read to its end, if there is one by now."""
        try:
            if self._fd is not None and self._is_newest():
                return False
            listed = _identities(self.path)
            files = parts(self.path)
            if len(files) != len(listed) or listed != _identities(self.path):
                return False  # a rotation is under way; the next poll finds it done
            following = self._following(files, listed)
            if following is None:
                return False
            fd = _open(following)
        except FileNotFoundError:
            return False
        if _identity(os.fstat(fd)) != listed[files.index(following)]:
            os.close(fd)
            return False
        if self._fd is not None:
            # It may have grown between the last look at it and its rotation.
            while self._read_into(found, _CHUNK):
                pass
        elif self._same(os.fstat(fd)):
            self.truncated += 1
        found += self._lines.end()
        self.close()
        self._fd, self._file = fd, os.fstat(fd)
        return True

    def _following(self, files: list[Path], listed: list[tuple[int, int]]) -> Path | None:
        if self._file is None:
            return files[0] if files else None
        if self._fd is not None and _identity(self._file) in listed:
            n = listed.index(_identity(self._file)) + 1
            return files[n] if n < len(files) else None
        # Ours is gone: so many rotations ago, or deleted. What was written to after it is new.
        newer = (file for file in files if os.stat(file).st_mtime_ns >= self._file.st_mtime_ns)
        return next(newer, None)

"""Read heartbeat files, at once or while they grow.

A heartbeat is `heartbeat_rank{N}.jsonl` and its rotated parts, `….jsonl.1` (the newest) to
`….jsonl.N`. Truncated, overlong and invalid lines are skipped and counted.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import SourceError
from penstock.types import MiB

Line = dict[str, Any]
Event = tuple[float, float, str, dict[str, Any]]
"""Unix time, monotonic time, message and fields of a future line."""

FOLDER = Path("artifacts/train_showcase")
"""The default folder of a run."""
PATTERN = "heartbeat_rank*.jsonl"
HINT = "Has the run started, and does it write there?"
MAX_LINE_BYTES = MiB
"""Longer lines are skipped."""
MAX_SECONDS = 2e11
"""The largest valid Unix time, in the year 8307."""
NOT_METRICS = frozenset(("ts", "mono", "pid", "rank", "step"))
_PART = re.compile(r"(.+\.jsonl)\.([1-9][0-9]{0,3})")


def parts(path: Path) -> list[Path]:
    """Return the existing file and rotated parts, oldest first."""
    names = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
    rotated = [part for name in names if (part := _PART.fullmatch(name)) and part[1] == path.name]
    older = sorted((int(part[2]) for part in rotated), reverse=True)
    found = [path.with_name(f"{path.name}.{number}") for number in older]
    return [*found, path] if path.is_file() else found


def expand(patterns: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the heartbeat files that match names, globs and folders, sorted by rank.

    A rotated part matches its file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        names = path.glob(PATTERN + "*") if path.is_dir() else map(Path, glob.glob(str(path)))
        matched = {_file_of(name) for name in names if name.is_file()}
        if not matched and parts(_file_of(path)):
            matched = {_file_of(path)}
        found |= matched
    # Sorted by length first, so that rank 10 comes after rank 9.
    return sorted(found, key=lambda path: (len(path.name), str(path)))


def _file_of(part: Path) -> Path:
    rotated = _PART.fullmatch(part.name)
    return part if rotated is None else part.with_name(rotated[1])


class Tail:
    """Follows the heartbeat of one rank through rotations.

    Keeps no file open between polls. Lines in a rotated part that is deleted between two polls are
    lost.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _file_of(Path(path).expanduser())
        self.skipped = 0
        """Truncated or invalid lines."""
        self._inode, self._offset = -1, 0
        """The inode of the last file, because a rotation renames it, and the offset in it."""

    def poll(self, *, end: bool = False) -> Iterator[Line]:
        """Yield the lines since the last poll; with `end`, also a last line without a newline."""
        with ExitStack() as stack:
            files = self._open(stack)
            if self._inode not in files:  # a rotation may be in progress
                files = self._open(stack) or files
            if self._inode not in files:
                self._inode, self._offset = next(iter(files), -1), 0
            for inode, file in dropwhile(lambda item: item[0] != self._inode, files.items()):
                if inode != self._inode or file.seek(0, os.SEEK_END) < self._offset:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                for text in file:
                    if not (end or text.endswith(b"\n")) and inode == [*files][-1]:
                        break  # the rest of the line is not written yet
                    self._offset += len(text)
                    yield from self.decode_all([text])

    def _open(self, stack: ExitStack) -> dict[int, BinaryIO]:
        """Open the files to read, oldest first, by inode."""
        found: dict[int, BinaryIO] = {}
        # Newest first: a concurrent rotation may make a file appear twice, but never hides one.
        for part in reversed(parts(self.path)):
            with suppress(FileNotFoundError):
                file = stack.enter_context(part.open("rb"))
                found.setdefault(os.fstat(file.fileno()).st_ino, file)
        return dict(reversed(found.items()))

    def decode_all(self, texts: Sequence[bytes]) -> list[Line]:
        """Return the valid lines. Count the others as skipped."""
        texts = [text for text in texts if text.strip()]
        found = [decode(text) for text in texts if len(text) <= MAX_LINE_BYTES]
        lines = [line for line in found if line is not None]
        self.skipped += len(texts) - len(lines)
        return lines


def read_heartbeat(path: str | os.PathLike[str], last_bytes: int | None = None) -> list[Line]:
    """Return the heartbeat of one rank; with `last_bytes`, its boot line and the last lines."""
    tail = Tail(path)
    found = parts(tail.path)
    if not found:
        raise SourceError(f"{tail.path}: no heartbeat there. {HINT}")
    if last_bytes is None:
        return list(tail.poll(end=True))
    text = b"".join(part.read_bytes() for part in found[-2:])  # each begins with a boot line
    return tail.decode_all([text.split(b"\n", 1)[0], *text[-last_bytes:].split(b"\n")[1:]])


class Follower:
    """Follows all heartbeats of a run, including files that do not exist yet."""

    def __init__(self, patterns: Sequence[str | os.PathLike[str]]) -> None:
        self._patterns = [os.fspath(pattern) for pattern in patterns]
        self.tails: dict[Path, Tail] = {}

    def poll(self) -> Iterator[Line]:
        """Yield new lines of all ranks since the last poll."""
        for path in expand(self._patterns):
            self.tails.setdefault(path, Tail(path))
        for tail in self.tails.values():
            yield from tail.poll()

    def notes(self) -> list[str]:
        """Return notes on missing files and skipped lines."""
        notes = [] if self.tails else [f"waiting for {', '.join(self._patterns)}"]
        if skipped := sum(tail.skipped for tail in self.tails.values()):
            notes.append(f"skipped {skipped} truncated or invalid lines")
        return notes


def missing_ranks(world_size: int | None, there: Collection[int | None]) -> str:
    """Describe which ranks of a run left no heartbeat; empty if none is missing."""
    absent = [rank for rank in range(world_size or 0) if rank not in there]
    if not absent:
        return ""
    return f"{len(absent):,} of {world_size:,} ranks left no heartbeat here: {listed(absent)}"


def listed(ranks: Sequence[int]) -> str:
    """Return the ranks as text, at most the first 12."""
    more = f" and {len(ranks) - 12:,} more" if len(ranks) > 12 else ""
    return ", ".join(map(str, ranks[:12])) + more


# Lines


def kind(line: Mapping[str, Any]) -> str:
    """Return the message without the data's prefix: `fineweb_loader_ready` is `loader_ready`."""
    return str(line["msg"]).removeprefix("fineweb_")


def number(value: Any) -> float | None:
    """Return a finite number, or None for any other value."""
    if type(value) not in (int, float) or not abs(value) < 1e300:
        return None
    return float(value)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line: nested ones as `outer/inner`, a non-finite loss as a float."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name not in NOT_METRICS and (known := number(value)) is not None:
            found[name] = known
        elif isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif name == "loss" and value in ("nan", "inf", "-inf"):
            found[name] = float(value)
    return found


def decode(line: bytes) -> Line | None:
    """Return the fields of a line, or None if it is not a complete heartbeat line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_heartbeat(found) else None


def _is_heartbeat(line: Line) -> bool:
    counts = [line.get(name) for name in ("pid", "rank", "step")]
    times = [line.get(name) for name in ("ts", "mono")]
    return (
        all(isinstance(line.get(name), str) for name in ("msg", "iso"))
        and all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(at, int | float) and 0 <= at < MAX_SECONDS for at in times)
    )


def step_seconds(line: Mapping[str, Any], previous_mono: float | None) -> float | None:
    """Return the recorded time of a step, or else the time since the last line without pauses."""
    dt = number(line.get("dt_step_s"))
    if dt is None and previous_mono is not None:
        pauses = numbers({"paused": line.get("paused")})
        dt = line["mono"] - previous_mono - sum(pauses.values())
    return dt if dt is not None and 0 <= dt < 1e9 else None

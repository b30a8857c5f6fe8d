"""A file that is made bit by bit, and what stands beside it so that a kill at any moment costs little.

In:    lines for PATH.partial, and how far they go.
Out:   PATH: JSONL, or Parquet made of it in one go; put in its place whole.
Where: the thread that writes.
State: PATH.partial; PATH.progress.json, which says how much of it counts and which document comes next,
       and the same of PATH itself once it is there; PATH.lock, which has the writer's process id.

A line counts once it is on disk and the progress file says so. What else a kill left is cut off, written
again under the same name, or found to be finished: never added to.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.types import MiB

log = logging.getLogger("penstock")

VERSION = 1
GROUP_BYTES = 8 * MiB
"""Lines in a row group of Parquet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a file has, and which document comes next."""

    goal: int
    next: tuple[int, int, int] = (0, 0, 0)
    """File, chunk and document, each by its number."""
    bytes: int = 0
    documents: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    exhausted: bool = False
    """There is no next document."""
    size: int | None = None
    """Of the finished file, once it is known."""

    @property
    def complete(self) -> bool:
        return self.exhausted or self.bytes >= self.goal


class Place:
    """Where a file is made."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.parquet = out.suffix == ".parquet"
        self.partial = Path(f"{out}.partial")
        self.source: dict[str, Any] = {}
        """What it is made of."""
        self.done: Point | None = None
        """Of the file itself, where it is there."""
        self.doing: Point | None = None
        """Of the partial one."""
        self._sidecar = Path(f"{out}.progress.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from the same file. The kernel's lock ends with its holder, however that ends."""
        path = Path(f"{self.out}.lock")
        while (fd := _lock(path)) is None:
            continue  # its last holder removed it in between
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def load(self) -> None:
        """What earlier runs left, also if they were killed between two steps."""
        try:
            saved = json.loads(self._sidecar.read_bytes())
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']!r}")
            self.source = dict(saved["source"])
            self.done, self.doing = (
                Point(**p) if (p := saved[key]) else None for key in ("done", "doing")
            )
        except FileNotFoundError:
            pass  # nothing was begun
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._sidecar} is not what was written there ({error}). "
                f"To start anew, delete it, {self.partial} and {self.out}."
            ) from error
        self._find_out()

    def _find_out(self) -> None:
        """Compare what was saved with the files that are there."""
        doing = self.doing
        size = self.out.stat().st_size if self.out.exists() else None
        if doing is not None and doing.size is not None and doing.size == size:
            # Killed after the last step but one. A partial file beside it means, for JSONL, that this is the old one.
            if self.parquet or not self.partial.exists():
                self.save(done=doing, doing=None)
        elif not self.partial.exists():
            self.doing = None
        if size is None:
            self.done = None
        elif self.done is None:
            raise ConfigError(
                f"{self.out} is there, and no bootstrap made it. Move it away, or name another file."
            )
        elif self.done.size != size:
            raise ConfigError(
                f"{self.out} was changed after it was finished: it had {self.done.size} bytes, it has {size}. "
                f"{self.start_anew}"
            )

    @property
    def start_anew(self) -> str:
        """For messages: what to do if all else fails."""
        there = [
            str(path)
            for path, point in ((self.out, self.done), (self.partial, self.doing))
            if point is not None
        ]
        return f"To start anew, delete {' and '.join(there)}."

    def save(self, *, done: Point | None, doing: Point | None) -> None:
        """Make progress count."""
        self.done, self.doing = done, doing
        points = {"done": done and asdict(done), "doing": doing and asdict(doing)}
        text = json.dumps({"version": VERSION, "source": self.source, **points})
        # Not under a random name: each kill would leave one behind.
        new = Path(f"{self._sidecar}.new")
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._sidecar)

    def begin(self, goal: int) -> None:
        """A partial file with nothing in it, or with all that the finished one has."""
        with _new(self.partial) as sink:
            if self.done is not None:
                with open(self.out, "rb") as source:
                    _copy(source, sink, self.done.bytes)
        self._sync_folder()
        start = Point(goal=goal) if self.done is None else replace(self.done, goal=goal, size=None)
        self.save(done=self.done, doing=start)

    def go_on(self, goal: int) -> None:
        """The partial file of an earlier run, cut to what counts."""
        assert self.doing is not None
        have = self.doing.bytes
        size = self.partial.stat().st_size
        if size < have:
            raise ConfigError(
                f"{self.partial} had {have} bytes, and has {size} now. {self.start_anew}"
            )
        if goal <= have and not (self.doing.complete and goal == self.doing.goal):
            raise ConfigError(
                f"{self.partial} has {have} bytes already, so {goal} are too few. {self.start_anew}"
            )
        self.doing = replace(self.doing, goal=goal, size=None)
        os.truncate(self.partial, have)

    def finish(self) -> None:
        """Put the file into its place, now that everything is in the partial one."""
        assert self.doing is not None
        new, size = self.partial, self.doing.bytes
        if self.parquet:
            new = Path(f"{self.out}.new")
            size = write_parquet(self.partial, new)
        self.save(done=self.done, doing=replace(self.doing, size=size))
        os.replace(new, self.out)
        self._sync_folder()
        self.save(done=self.doing, doing=None)

    def tidy(self) -> None:
        """Remove what nobody needs: a refresh that was hardly begun, or the lines that Parquet was made of."""
        if self.doing is None:
            self.partial.unlink(missing_ok=True)

    def _sync_folder(self) -> None:
        fd = os.open(self.out.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _lock(path: Path) -> int | None:
    """A lock on a file that is still there; None if it is to be tried again."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise ConfigError(
                f"{str(path).removesuffix('.lock')} is being written by process {holder or '(just starting)'}. "
                "Wait for it, end it, or name another file."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            log.warning(
                "%s: this disk has no locks; see that nobody else writes the same file", path
            )
        if not path.exists() or not os.path.samestat(os.fstat(fd), path.stat()):
            os.close(fd)
            return None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _new(path: Path) -> Iterator[BinaryIO]:
    """A file to be written from its beginning. Removed if that fails: a full disk needs the room."""
    with open(path, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def _copy(source: BinaryIO, sink: BinaryIO, length: int) -> None:
    """Copy a file. Some disks need only note that the two share their blocks."""
    left = length
    try:
        while left and hasattr(os, "copy_file_range"):
            if not (n := os.copy_file_range(source.fileno(), sink.fileno(), left)):
                break
            left -= n
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise
    shutil.copyfileobj(source, sink, MiB)  # goes on where that stopped


def write_parquet(lines: Path, out: Path) -> int:
    """The texts of a JSONL file as Parquet: the same bytes for the same lines. Gives its size."""
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    with open(lines, "rb") as source, _new(out) as sink:
        writer = pq.ParquetWriter(
            sink, schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        with writer:
            while group := source.readlines(GROUP_BYTES):
                texts = [json.loads(line)["text"] for line in group]
                writer.write_batch(
                    pa.record_batch([pa.array(texts, pa.string())], schema), len(texts)
                )
        return int(sink.tell())

"""The file that a heartbeat writes to, on a disk that may be full, slow, dead or gone.

In:    whole lines.
Out:   the lines in `heartbeat_rank{N}.jsonl`, each by one `write` to a file opened for appending, so that a process
       that is killed leaves at most one line cut off; rotated when it is large.
Where: the heartbeat's thread, and only there: opening a file can take as long as a dead server likes.
State: the open file, its size, the rest of a line that the disk took only half of, and when to try again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from penstock.watch.heartbeat import parts

log = logging.getLogger("penstock")

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 10.0


class BeatFile:
    """Where lines go. Nothing here raises because of the disk: what cannot be written is told by False."""

    def __init__(self, path: Path, max_bytes: int, keep: int, boot: Callable[[], bytes]) -> None:
        self.path = path
        self.lost = 0
        """Lines that were begun and could not be ended."""
        self.failures = 0
        self._max_bytes = max_bytes
        self._keep = keep
        self._boot = boot
        self._fd: int | None = None
        self._regular = False
        self._size = 0
        self._limit = max_bytes
        self._boot_end = 0
        self._rest = b""
        self._torn = False
        self._fresh = True
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._said: set[int | None] = set()
        self._failing = self._refused = False

    @property
    def in_trouble(self) -> bool:
        """Whether the last line could not be written."""
        return self._failing or self._refused

    def write(self, line: bytes, *, now: bool = False) -> bool:
        """Write a line. False: it could not be, and should be offered again; `now` tries even if it is too early."""
        if not now and time.monotonic() < self._retry_at:
            return False
        try:
            if self._fd is None:
                self._open()
            if self._rest and not self._finish():
                self._refused = True
                return False
            if (
                self._regular
                and self._boot_end < self._size
                and self._size + len(line) > self._limit
            ):
                self._try_to_rotate()
            done = self._put(line)
        except OSError as error:
            self._failed(error)
            return False
        self._refused = not done
        if done and self._failing:
            self._failing, self._retry_s, self._retry_at = False, FIRST_RETRY_S, 0.0
            log.info("heartbeat: %s can be written again", self.path)
        return done

    def check(self) -> None:
        """Notice that the file was deleted or replaced, and begin a new one with the next line."""
        if self._fd is None:
            return
        try:
            here, there = os.fstat(self._fd), os.stat(self.path)
            gone = (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
        except OSError:
            gone = True
        if gone:
            self.close()

    def close(self) -> None:
        """Let go of the file. A line that is half written stays so, and the next one begins after a newline."""
        if self._rest:
            self._rest = b""
            self.lost += 1
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)  # a network's disk may say only now what it did not take
            except OSError as error:
                self._failed(error)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A named pipe that nobody reads must refuse at once, and one whose reader sleeps must not hold us.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(self.path, flags, 0o644)
        self._fd = fd
        found = os.fstat(fd)
        self._regular = stat.S_ISREG(found.st_mode)
        self._size = found.st_size if self._regular else 0
        self._limit = self._max_bytes
        if self._regular and self._fresh and not self._alone(fd):
            log.warning(
                "heartbeat: somebody else writes to %s too, and no reader can tell the two apart: give each run a folder "
                "of its own", self.path,
            )  # fmt: skip
        self._torn = self._size > 0 and self._last_byte() != b"\n"
        # The first boot line comes through the queue like every other one; a file begun later repeats it.
        if not self._size and not self._fresh:
            self._put(self._boot())
        self._boot_end = self._size
        self._fresh = False

    @staticmethod
    def _alone(fd: int) -> bool:
        """Whether nobody else has the file open to write heartbeats to it, as far as its disk can tell."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a disk without locks
        return True

    def _last_byte(self) -> bytes:
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, 1, self._size - 1)
        finally:
            os.close(fd)

    def _put(self, line: bytes) -> bool:
        assert self._fd is not None
        if self._torn:
            line = b"\n" + line
        try:
            n = os.write(self._fd, line)
        except BlockingIOError:
            self._say(errno.EAGAIN, "nobody reads what is written to it")
            return False
        self._size += n
        self._torn = False
        self._rest = line[n:]
        # Taken, if only in part: the rest is ours to bring there before anything else.
        if self._rest:
            self._finish()
        return True

    def _finish(self) -> bool:
        assert self._fd is not None
        try:
            n = os.write(self._fd, self._rest)
        except BlockingIOError:
            return False
        except OSError as error:
            self._failed(error)
            return False
        self._size += n
        self._rest = self._rest[n:]
        return not self._rest

    def _try_to_rotate(self) -> None:
        try:
            self._rotate()
        except OSError as error:
            # A folder that lets nothing be renamed is no reason to record nothing: the file goes on growing.
            self.failures += 1
            self._say(error.errno, f"it is large and cannot be renamed: {error.strerror}")
            if self._fd is None:
                self._open()
            self._limit = self._size + self._max_bytes

    def _rotate(self) -> None:
        """Give the file the number 1, and those that have one the next; begin a new one."""
        self.close()
        numbered = [part for part in parts(self.path) if part != self.path]
        for part in numbered:  # oldest first
            number = int(part.name.rpartition(".")[2])
            if number >= self._keep:
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()
            else:
                part.rename(self._part(number + 1))
        if self._keep:
            self.path.rename(self._part(1))
        else:
            self.path.unlink()
        self._open()

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._failing = True
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(LAST_RETRY_S, self._retry_s * 2)
        self._say(error.errno, error.strerror or str(error))
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            # Of no use any more, perhaps; of a full disk the open file is the one thing that is left.
            self.close()

    def _say(self, number: int | None, why: str) -> None:
        """Each reason once: a disk that comes and goes would fill the log."""
        if number in self._said:
            return
        self._said.add(number)
        log.warning(
            "heartbeat: %s cannot be written (%s). The run goes on; lines wait, the oldest are dropped and counted, "
            "and it is tried again.",
            self.path,
            why,
        )

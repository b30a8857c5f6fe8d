"""Who stays in the token cache when there is no room for all.

In:    the size of an entry to be written, and when the run needs which.
Out:   a temporary file for it, after others had to go; or nothing, if it is the one to go.
Where: the thread that writes, one at a time in a process; many processes at once.
State: the bytes in use, in tokens/.lock, where all processes share one account of them; and in memory
       who may have to go, as of the last scan.
Cost:  a scan looks at every entry (about 10 µs each), and is made once in as many writes as a 64th of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.read.cache_file import TEMPORARY, Entry, Key, as_entry, listing

When = Callable[[str, int], float | None]

LIVE_S = 3600.0
"""An entry used within this time may belong to a run that is going on."""
SCAN_PUTS = 64
LOCK = ".lock"
DIGITS = 20
"""The account is a line of this many digits."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class Room:
    """Who stays when there is no room for all. Used by one thread at a time.

    The bytes in use stand in the lock file, so that processes share one account of them. It is
    raised before a file is made and lowered after one is removed, so it may be too high after a
    crash, never too low; a scan puts it right.
    """

    def __init__(self, tokens: Path, max_bytes: int) -> None:
        self._tokens = tokens
        self._max_bytes = max_bytes
        self.kinds: set[str] = set()
        self.when: When | None = None
        self._attempts = 0
        """Since the last scan."""
        self._known = -1
        """Entries seen by the last scan; -1 before the first."""
        self._idle: deque[Entry] = deque()
        self._later: list[tuple[float, Entry]] = []

    def reserve(self, key: Key, size: int) -> tuple[BinaryIO | None, int]:
        """A temporary file with room for `size` bytes, or None; and how many entries had to go for it."""
        self.kinds.add(key.kind)
        if size > self._max_bytes:
            return None, 0
        evicted = 0
        with alone(self._tokens) as lock:
            self._attempts += 1
            used = _read_used(lock)
            if (
                used is None
                or self._known < 0
                or self._attempts > max(SCAN_PUTS, self._known // SCAN_PUTS)
            ):
                used = self._scan()
            if used + size > self._max_bytes:
                # In a large folder a scan takes longer than making a chunk: not before each.
                if self._attempts > self._known // SCAN_PUTS:
                    used = self._scan()
                for entry in self._victims(key):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.where)
                        used -= entry.size
                        evicted += 1
                    if used + size <= self._max_bytes:
                        break
            fits = used + size <= self._max_bytes
            _write_used(lock, used + size if fits else used)
            return (_temporary(self._tokens / key.file[:2], size) if fits else None), evicted

    def settle(self, temporary: str, path: Path, size: int) -> bool:
        """Give a file that is written its name; False if another process was first.

        A scan is kept out, which might see neither of the two.
        """
        with alone(self._tokens) as lock:
            if path.exists():  # another process made the same entry meanwhile, and one is enough
                os.unlink(temporary)
                used = _read_used(lock)
                if used is not None:
                    _write_used(lock, max(0, used - size))
                return False
            os.replace(temporary, path)
            return True

    def add(self, entry: Entry) -> None:
        """Remember an entry just made, as one that may have to go."""
        when = self._needed(entry)
        if when is not None:
            heapq.heappush(self._later, (-when, entry))

    def _victims(self, key: Key) -> Iterator[Entry]:
        """First what no run seems to use, the oldest first; then what is needed later than the new one, the latest first."""
        recent = time.time() - LIVE_S
        while self._idle:
            entry = self._idle.popleft()
            with contextlib.suppress(FileNotFoundError):
                if os.stat(entry.where).st_mtime < recent:  # not used since the scan
                    yield entry
        own = None if self.when is None else self.when(key.file, key.index)
        own = math.inf if own is None else own
        while self._later:
            entry = self._later[0][-1]
            when = self._needed(entry)
            if when is not None and when <= own:
                return
            heapq.heappop(self._later)
            if when is not None:
                yield entry

    def _needed(self, entry: Entry) -> float | None:
        """When this run needs an entry next."""
        if self.when is None or entry.digest[:8] not in self.kinds:
            return None
        return self.when(entry.file, entry.chunk)

    def _scan(self) -> int:
        """Look at all entries, remove what dead processes left, and give the bytes in use."""
        used, self._known, self._attempts = 0, 0, 0
        self._later, idle = [], []
        recent = time.time() - LIVE_S
        for item, status in listing(self._tokens):
            entry = as_entry(item, status)
            if entry is None:
                if item.name.startswith(TEMPORARY) and not remove_if_left(
                    item.path, status.st_mtime < recent
                ):
                    used += status.st_size
                continue
            used += status.st_size
            self._known += 1
            when = self._needed(entry)
            if when is not None:
                self._later.append((-when, entry))
            elif entry.used < recent:
                idle.append(entry)
        heapq.heapify(self._later)
        self._idle = deque(sorted(idle, key=lambda entry: entry.used))
        return used


@contextlib.contextmanager
def alone(tokens: Path) -> Iterator[int]:
    """Keep the other processes out. A holder that dies lets go; where locks are not supported, nobody waits."""
    tokens.mkdir(parents=True, exist_ok=True)
    lock = os.open(tokens / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _lock(file: int, how: int) -> bool:
    """Whether locks are supported here: then this file is locked."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _read_used(lock: int) -> int | None:
    """The bytes in use by the account, or None if it does not say."""
    written = os.pread(lock, DIGITS + 1, 0)
    return int(written) if written[:DIGITS].isdigit() and written[DIGITS:] == b"\n" else None


def _write_used(lock: int, used: int) -> None:
    os.pwrite(lock, b"%0*d\n" % (DIGITS, used), 0)


def _temporary(folder: Path, size: int) -> BinaryIO:
    """A new file of that size, so that a scan counts it in full, locked while it is written."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    file = open(path, "xb")  # noqa: SIM115
    try:
        _lock(file.fileno(), fcntl.LOCK_EX)
        os.truncate(file.fileno(), size)
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):  # a disk that fails here too: the next scan removes it
            os.unlink(path)
        raise
    return file


def remove_if_left(path: str, old: bool) -> bool:
    """Remove a temporary file that nobody writes any more: its lock is free, or it is an hour old."""
    try:
        with open(path, "rb") as file:
            try:
                # A shared lock is enough to find out, and on NFS all that a file may have that is only read.
                left = _lock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                left = False
        if left or old:
            os.unlink(path)
    except FileNotFoundError:
        return True
    return left or old

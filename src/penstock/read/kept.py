"""Small things kept on disk: revisions, listings, cards, footers. Made once for all processes of a host.

In:    a kind, a key, and how to make the bytes.
Out:   the bytes, from disk where they are there and sound.
Where: any thread of any process of the host; also of other hosts, if the disk is shared.
State: in the folder: <kind>/<2 hex>/<32 hex of the key>, and locks/<stripe>. Nothing in memory.
Cost:  `get` one read and a checksum; `put` one write and a sync.

A lock is the kernel's, on an open file: it ends with its holder, however that ends, and a lock file
that lies around means nothing. Locks only save work. Who cannot have one, or waited long enough for
one whose holder is stuck, goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.types import MiB

log = logging.getLogger("penstock")

STRIPES = 64
"""Lock files. Two keys that share one wait for each other now and then, which costs little."""
TRIM = 64
"""One in so many keys has its kind's size looked at when it is put."""
TORN_S = 3600.0
"""A temporary file older than this was left behind by a process that died."""
MARK = b"penstock-kept-1"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.002, 0.05
TEMPORARY = ".tmp-"


class Kept:
    """What is kept in one folder. Nothing is opened or made before the first use."""

    def __init__(self, folder: Path, *, max_bytes: int = 256 * MiB) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        """Disk that one kind may take. When full, the oldest entries are dropped first."""
        self._told: set[str] = set()
        self._holding = threading.local()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.folder, self.max_bytes)

    def get(self, kind: str, key: str, *, since: float | None = None) -> bytes | None:
        """What was put under a key; with `since` (as `time.time()` has it), only if that was later."""
        path = self._path(kind, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell_once("read", f"{path}: cannot be read ({error}); it is fetched again.")
            return None
        head, newline, data = content.partition(b"\n")
        mark, _, rest = head.partition(b" ")
        digest, _, at = rest.partition(b" ")
        if not newline or mark != MARK or digest != _digest(kind, key, at, data):
            log.info("%s is damaged; it is removed and fetched again", path)
            # On a disk that cannot be written it stays, and is refused again.
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        # What is of later than now was put by a host whose clock is ahead: nobody knows how old it is.
        return data if since is None or since <= float(at) <= time.time() else None

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep something. A disk that does not take it costs one warning, and never the run."""
        path = self._path(kind, key)
        at = b"%.6f" % time.time()
        name = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
            # Not a temporary file of the library's, which nobody but its owner may read, whatever the umask says.
            with open(
                os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb"
            ) as file:
                name = aside
                file.write(b" ".join((MARK, _digest(kind, key, at, data), at)) + b"\n")
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
            name = None
            if int(path.name[-4:], 16) % TRIM == 0:
                self._trim(kind)
        except OSError as error:
            self._tell_once(
                "write",
                f"{self.folder}: cannot be written ({error}); what is fetched is not kept there.",
            )
        finally:
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name)

    def once(
        self,
        kind: str,
        key: str,
        make: Callable[[], bytes],
        wait_s: float,
        *,
        since: float | None = None,
        stop: threading.Event | None = None,
    ) -> bytes:
        """What is kept under a key; if nothing is, it is made, by one process of the host at a time.

        The others wait for that one, `wait_s` at most, or until `stop` is set. With `since`, only
        what was put after that time will do: for what changes, so that those who ask together get
        one answer and those who ask later a new one.
        """
        if (data := self.get(kind, key, since=since)) is not None:
            return data
        with self._lock(self._path(kind, key).name, wait_s, stop or threading.Event()):
            if (data := self.get(kind, key, since=since)) is not None:
                return data
            data = make()
            self.put(kind, key, data)
            return data

    # Locks

    @contextlib.contextmanager
    def _lock(self, name: str, wait_s: float, stop: threading.Event) -> Iterator[None]:
        """Hold the lock of a name, or give up waiting for it.

        A thread holds one lock at most: what is made within a `once` takes no second one, so no two
        can ever wait for each other. Threads of one process exclude each other like processes do,
        because each opens the file for itself.
        """
        if getattr(self._holding, "any", False):
            yield
            return
        fd = self._open_lock(int(name[:8], 16) % STRIPES)
        try:
            held = fd is not None and self._wait(fd, wait_s, stop)
            self._holding.any = held
            yield
        finally:
            self._holding.any = False
            if fd is not None:
                os.close(fd)

    def _open_lock(self, stripe: int) -> int | None:
        path = self.folder / "locks" / f"{stripe:02}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._no_locks(error)
            return None

    def _wait(self, fd: int, wait_s: float, stop: threading.Event) -> bool:
        deadline = time.monotonic() + wait_s
        pause = FIRST_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or stop.wait(min(pause, left)):
                    log.info(
                        "%s: another process holds a lock for longer than %.1f s; going on without",
                        self.folder,
                        wait_s,
                    )
                    return False
                pause = min(2 * pause, LONGEST_WAIT_S)
            except OSError as error:
                self._no_locks(error)
                return False

    def _no_locks(self, error: OSError) -> None:
        if "locks" not in self._told:
            self._told.add("locks")
            log.info(
                "%s: no locks there (%s); processes may fetch the same things at once",
                self.folder,
                error,
            )

    # Disk

    def _path(self, kind: str, key: str) -> Path:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return self.folder / kind / name[:2] / name

    def _trim(self, kind: str) -> None:
        """Drop the oldest of a kind until it is well within its bounds."""
        found: list[tuple[float, int, str]] = []
        now = time.time()
        for parent, _, names in os.walk(self.folder / kind):
            for name in names:
                path = os.path.join(parent, name)
                try:
                    stat = os.stat(path)
                except FileNotFoundError:
                    continue  # dropped by another process meanwhile
                if name.startswith(TEMPORARY):
                    if now - stat.st_mtime > TORN_S:
                        _remove(path)
                    continue
                found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self.max_bytes:
            return
        for _, size, path in sorted(found):
            _remove(path)
            total -= size
            if total <= self.max_bytes * 3 // 4:  # some room, or the next would find it full again
                return

    def _tell_once(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            log.warning(text)


def _reopen(folder: Path, max_bytes: int) -> Kept:
    return Kept(folder, max_bytes=max_bytes)


def _digest(kind: str, key: str, at: bytes, data: bytes) -> bytes:
    """Of the content, and of where it belongs: a file in another's place is damage too."""
    where = f"{kind}\0{key}\0".encode("utf-8", "surrogatepass")
    return hashlib.sha256(where + at + b"\0" + data).hexdigest().encode()


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


__all__ = ["Kept"]

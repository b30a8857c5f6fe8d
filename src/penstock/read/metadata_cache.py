"""Listings, cards and footers, kept on disk for later runs.

Files are metadata/<kind>/<32 hex of the key>, each with a checksum, written under a temporary name
and renamed. On a disk that cannot be written the work is done again, and the run continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from penstock.types import MiB

log = logging.getLogger("penstock")

TRIM = 64
"""One in this many writes looks at the size of the cache."""


class MetadataCache:
    """Small values in one folder. Nothing is opened before the first use."""

    def __init__(self, folder: Path, *, max_bytes: int = 512 * MiB) -> None:
        self.folder = Path(folder) / "metadata"
        self.max_bytes = max_bytes
        """Disk space. The oldest entries are dropped."""
        self._warned = False

    def get(self, kind: str, key: str) -> bytes | None:
        """Return what was put under a key, or None."""
        path = self._path(kind, key)
        try:
            digest, _, data = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        return data if digest == _digest(kind, key, data) else None

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep a value. A disk that does not take it costs one warning."""
        path = self._path(kind, key)
        temporary = path.with_name(f".tmp-{os.urandom(8).hex()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(_digest(kind, key, data) + b"\n" + data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            if int(path.name[-4:], 16) % TRIM == 0:
                self._trim()
        except OSError as error:
            self._warn_once(error)

    def once(self, kind: str, key: str, make: Callable[[], bytes]) -> bytes:
        """Return what is kept under a key, else make it and keep it."""
        data = self.get(kind, key)
        if data is None:
            data = make()
            self.put(kind, key, data)
        return data

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / hashlib.sha256(_bytes(key)).hexdigest()[:32]

    def _trim(self) -> None:
        """Drop the oldest files, also those half written, until a quarter of the space is free."""
        found: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # dropped by another process
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        goal = self.max_bytes * 3 // 4 if total > self.max_bytes else total
        for _, size, path in sorted(found):
            if total <= goal:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s cannot be used (%s); nothing is kept there.", self.folder, error)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(kind: str, key: str, data: bytes) -> bytes:
    """Return a digest of the content and of where it belongs."""
    return hashlib.sha256(_bytes(f"{kind}\0{key}\0") + data).hexdigest().encode()

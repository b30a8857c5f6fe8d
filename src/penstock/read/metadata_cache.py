"""Listings, cards and footers, kept on disk for later runs.

Files are metadata/<kind>/<32 hex of the key>, each with a checksum, written under a temporary name
and renamed. On a disk that cannot be written the work is done again, and the run continues.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from pathlib import Path

from penstock.config import write_atomically
from penstock.types import MiB

log = logging.getLogger("penstock")

TRIM = 32
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
        try:
            digest, _, data = self._path(kind, key).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        return data if digest == _digest(kind, key, data) else None

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep a value. A disk that does not take it costs one warning."""
        path = self._path(kind, key)
        try:
            write_atomically(path, [_digest(kind, key, data), b"\n", data])
            if int(path.name[-4:], 16) % TRIM == 0:
                self._trim()
        except OSError as error:
            self._warn_once(error)

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / _digest("", key, b"").decode()[:32]

    def _trim(self) -> None:
        """Drop the oldest files, also those half written, until a quarter of the space is free."""
        found: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("*/*"):
            with suppress(FileNotFoundError):  # dropped by another process
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        excess = sum(size for _, size, _ in found) - self.max_bytes
        if excess > 0:
            excess += self.max_bytes // 4
            for _, size, path in sorted(found):
                if excess > 0:
                    path.unlink(missing_ok=True)
                    excess -= size

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s cannot be used (%s); nothing is kept there.", self.folder, error)


def _digest(kind: str, key: str, data: bytes) -> bytes:
    """Return a digest of the content and of where it belongs."""
    where = f"{kind}\0{key}\0".encode("utf-8", "surrogatepass")
    return hashlib.sha256(where + data).hexdigest().encode()

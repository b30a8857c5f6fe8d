"""What a server serves: bytes in memory or a file on disk, sent in pieces, never copied as a whole.

In:    `bytes`, or the `Path` of a file of any size.
Out:   its size, its digests, and any span of it piece by piece.
Where: any thread.
State: digests, once worked out. The same bytes object under many names is one `Content` (see `Shelf`).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.types import MiB

Source = bytes | Path
"""How a file's content may be given."""
Buffer = bytes | bytearray | memoryview


class Content:
    """Bytes in memory, or a file as it was when it was handed in."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._sha256 = ""
        self._version = ""
        if isinstance(source, bytes):
            self.size = len(source)
            self.modified = time.time()
        else:
            status = source.stat()
            self.size = status.st_size
            self.modified = status.st_mtime
            self._version = f"{status.st_mtime_ns:x}-{status.st_size:x}"

    def pieces(self, lo: int, hi: int, step: int) -> Iterator[Buffer]:
        """The bytes [lo, hi), at most `step` at a time."""
        if isinstance(self._source, bytes):
            view = memoryview(self._source)
            for start in range(lo, hi, step):
                yield view[start : min(start + step, hi)]
            return
        # Opened for each answer: thousands of files would not fit into a process's open files.
        handle = os.open(self._source, os.O_RDONLY)
        try:
            while lo < hi:
                piece = os.pread(handle, min(step, hi - lo), lo)
                if not piece:
                    raise EOFError(
                        f"{self._source} is shorter than the {self.size:,} bytes it had when it was added"
                    )
                lo += len(piece)
                yield piece
        finally:
            os.close(handle)

    def read(self, lo: int, hi: int) -> bytes:
        return b"".join(self.pieces(lo, hi, MiB))

    @property
    def version(self) -> str:
        """Another one for other content. Of a file it is made of time and size, as web servers do: quick for any size."""
        return self._version or self.sha256[:32]

    @property
    def sha256(self) -> str:
        """The digest of all of it, worked out once."""
        with self._lock:
            if not self._sha256:
                digest = hashlib.sha256()
                for piece in self.pieces(0, self.size, MiB):
                    digest.update(piece)
                self._sha256 = digest.hexdigest()
            return self._sha256

    @property
    def git_sha1(self) -> str:
        """The name that git gives to it as a blob."""
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        for piece in self.pieces(0, self.size, MiB):
            digest.update(piece)
        return digest.hexdigest()


class Flipped(Content):
    """Another content with some of its bits turned over."""

    def __init__(self, content: Content, flips: Mapping[int, int]) -> None:
        """`flips` maps a position to the bits to turn over in that byte."""
        self._content = content
        self._flips = flips
        self.size = content.size
        self.modified = content.modified

    def pieces(self, lo: int, hi: int, step: int) -> Iterator[Buffer]:
        for piece in self._content.pieces(lo, hi, step):
            here = [at for at in self._flips if lo <= at < lo + len(piece)]
            changed = bytearray(piece) if here else piece
            for at in here:
                assert isinstance(changed, bytearray)
                changed[at - lo] ^= self._flips[at]
            lo += len(piece)
            yield changed


class Shelf:
    """Makes one `Content` of each bytes object and of each version of a file, however often it is given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], tuple[Source, Content]] = {}

    def content(self, source: Source) -> Content:
        if isinstance(source, bytes):
            # The bytes are kept beside their id, so that the id is not given to another object.
            key: tuple[Any, ...] = (id(source),)
        else:
            key = (str(source), source.stat().st_size, source.stat().st_mtime_ns)
        with self._lock:
            if key not in self._known:
                self._known[key] = (source, Content(source))
            return self._known[key][1]

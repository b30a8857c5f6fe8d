"""A file's decompressed bytes from its beginning on, here or elsewhere.

In:    a `FileRef`.
Out:   a stream of its text.
Where: any worker thread; a remote file's blocks are fetched by fetch threads, a few ahead.
State: the blocks under way.
"""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any, cast

from penstock.types import FileRef, MiB

if TYPE_CHECKING:
    from penstock.read.remote import RemoteFiles

STREAM_BLOCK = 4 * MiB
STREAM_AHEAD = 4
"""A remote file that can only be read forwards is fetched so many blocks ahead."""


class RangeStream(io.RawIOBase):
    """A remote file from its beginning on, a few blocks fetched ahead of whoever reads."""

    def __init__(self, file: FileRef, remote: RemoteFiles) -> None:
        self._file = file
        self._remote = remote
        self._ahead: deque[Future[bytearray] | int] = deque()
        self._asked = 0
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not len(self._block):
            self._block = memoryview(self._next())
        n = min(len(buffer), len(self._block))
        buffer[:n] = self._block[:n]
        self._block = self._block[n:]
        return n

    def _next(self) -> bytes | bytearray:
        while self._asked < self._file.size and len(self._ahead) < STREAM_AHEAD:
            start, self._asked = self._asked, self._asked + self._length(self._asked)
            self._ahead.append(self._remote.ahead(self._file, start, self._length(start)) or start)
        if not self._ahead:
            return b""
        first = self._ahead.popleft()
        return (
            self._remote.read(self._file, first, self._length(first))
            if isinstance(first, int)
            else first.result()
        )

    def _length(self, start: int) -> int:
        return min(STREAM_BLOCK, self._file.size - start)


def open_stream(file: FileRef, remote: RemoteFiles | None = None) -> IO[bytes]:
    """The file's decompressed bytes, in order."""
    source: Any = file.path
    if file.remote:
        assert remote is not None
        source = io.BufferedReader(RangeStream(file, remote), STREAM_BLOCK)
    return cast(IO[bytes], _decompressed(source, file))


def _decompressed(source: Any, file: FileRef) -> Any:
    if file.codec == "gz":
        import gzip

        return gzip.open(source, "rb")
    if file.codec == "bz2":
        import bz2

        return bz2.open(source, "rb")
    if file.codec == "xz":
        import lzma

        return lzma.open(source, "rb")
    if file.codec == "zst":
        import pyarrow as pa

        if file.remote:
            return pa.CompressedInputStream(pa.PythonFile(source, mode="r"), "zstd")
        return pa.input_stream(source, compression="zstd", buffer_size=0)
    return source if file.remote else open(source, "rb")

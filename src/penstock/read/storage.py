"""Read byte ranges of a file, on disk or remote, compressed or not.

The I/O pool fetches remote ranges ahead (see `Reader.fetch`). A compressed file has one
decompressor, which reads it in order; reading an earlier part restarts from the beginning, because
these formats have no random access.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, cast

from penstock.errors import CorruptFile, LoaderClosed, SourceError
from penstock.types import FileRef, KiB, MiB
from penstock.watch.stage_timer import Clock, NullClock

if TYPE_CHECKING:
    from penstock.read.remote_files import RemoteFiles

Bytes = bytes | bytearray

STEP = 16 * KiB
"""Bytes to decompress at once. A step that fails loses its intact bytes too."""
STREAM_BLOCK, STREAM_AHEAD = 4 * MiB, 4
"""A compressed remote file is fetched in blocks of this size, this many ahead."""


DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)


def is_damage(error: Exception) -> bool:
    """Return True if an exception is caused by the bytes of a file, not by the machine.

    A failing disk or a lack of memory must not count as bad data: with on_bad_record="skip" the
    stream would depend on the machine.
    """
    return not isinstance(error, MemoryError) and getattr(error, "errno", None) is None


class FetchedFile:
    """Fetched parts of a remote file. Fetches any other part when it is read."""

    broken: CorruptFile | None = None

    def __init__(
        self, file: FileRef, remote: RemoteFiles, parts: Sequence[tuple[int, Bytes]]
    ) -> None:
        self._file, self._remote, self._parts = file, remote, parts

    def read(self, start: int, length: int) -> bytes:
        end = min(start + length, self._file.size)
        for first, data in self._parts:
            if first <= start and end <= first + len(data):
                return bytes(memoryview(data)[start - first : end - first])
        return bytes(self._remote.read(self._file, start, end - start)) if start < end else b""


class PlainFile:
    """An uncompressed file on disk."""

    broken: CorruptFile | None = None

    def __init__(self, file: FileRef, clock: Clock | None = None) -> None:
        self.path, self._size = file.path, file.size
        self._clock = clock or NullClock()

    def read(self, start: int, length: int) -> bytes:
        with self._clock.stage("fetch", self.path) as timeline:
            data = self._read(start, length)
        timeline.count("fetch", 1, len(data))
        return data

    def _read(self, start: int, length: int) -> bytes:
        with open(self.path, "rb") as file:
            # A truncated file would look like the end of the file.
            if (size := os.fstat(file.fileno()).st_size) < self._size:
                change = f"it was {self._size} bytes long when it was listed, it is {size}"
                raise SourceError(f"{self.path} changed: {change}. Restore it, or start a new run.")
            file.seek(start)
            return file.read(length)


class CompressedFile:
    """A compressed file, read in order. Keeps the last decompressed bytes."""

    def __init__(
        self, file: FileRef, keep_bytes: int, closing: threading.Event, remote: RemoteFiles | None
    ) -> None:
        self._file, self._keep_bytes, self._remote = file, keep_bytes, remote
        self._closing = closing
        self._lock = threading.Lock()
        self._stream: IO[bytes] | None = None
        self._start, self._data, self._ended = 0, bytearray(), False
        self.broken: CorruptFile | None = None
        """The error at which the file ends early, if it does."""

    def read(self, start: int, length: int) -> bytes:
        with self._lock:
            if self._stream is None or start < self._start:
                self._close_stream()
                self._stream = open_stream(self._file, self._remote)
            while not self._ended and self._start + len(self._data) < start + length:
                if self._closing.is_set():
                    raise LoaderClosed("the loader was shut down")
                self._advance()
                old = min(len(self._data), max(0, start - self._keep_bytes - self._start))
                del self._data[:old]
                self._start += old
            at = start - self._start
            return bytes(memoryview(self._data)[at : at + length])

    def _advance(self) -> None:
        """Decompress the next step."""
        part = b""
        try:
            if self._file.size == 0:
                raise EOFError("a compressed file is never empty")
            part = self._stream.read1(STEP)  # type: ignore[union-attr]
        except Exception as error:
            if not isinstance(error, DAMAGE) or not is_damage(error):
                self._close_stream()  # its position is unknown
                raise
            # The bytes before the damage are intact; the file ends here.
            place = f"past byte {self._start + len(self._data)} of its text"
            self.broken = CorruptFile(
                f"{self._file.path} cannot be decompressed {place}: {error}. "
                "It is damaged or was cut short: fetch it again, or leave it out."
            )
        self._data += part
        self._ended = not part

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._start, self._ended = None, 0, False
        self._data.clear()

    def close(self) -> None:
        with self._lock:
            self._close_stream()


AnyFile = PlainFile | CompressedFile | FetchedFile


class RangeStream(io.RawIOBase):
    """A remote file read from the beginning, fetched a few blocks ahead."""

    def __init__(self, file: FileRef, remote: RemoteFiles) -> None:
        starts = range(0, file.size, STREAM_BLOCK)
        lengths = (min(STREAM_BLOCK, file.size - start) for start in starts)
        self._begin = map(partial(remote.ahead, file), starts, lengths)
        self._ahead: deque[Callable[[], bytearray]] = deque()
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not len(self._block):
            self._ahead.extend(islice(self._begin, STREAM_AHEAD - len(self._ahead)))
            self._block = memoryview(self._ahead.popleft()() if self._ahead else b"")
        n = min(len(buffer), len(self._block))
        buffer[:n] = self._block[:n]
        self._block = self._block[n:]
        return n


def open_stream(file: FileRef, remote: RemoteFiles | None = None) -> IO[bytes]:
    """Open a file as a stream of decompressed bytes."""
    source: Any = file.path
    if file.remote:
        assert remote is not None
        source = io.BufferedReader(RangeStream(file, remote), STREAM_BLOCK)
    if file.codec == "zst":
        import pyarrow as pa

        raw = pa.PythonFile(source, mode="r") if file.remote else pa.OSFile(source)
        return cast(IO[bytes], pa.CompressedInputStream(raw, "zstd"))
    opener: Any = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[file.codec]
    return cast(IO[bytes], opener(source, "rb"))

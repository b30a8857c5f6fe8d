"""Bytes of a file by position: on disk or remote, compressed or not.

Remote ranges are fetched ahead by the I/O pool (see `Reader.fetch`). A compressed file has one
decompressor, which passes over the file once; a read of an earlier part starts again from the
beginning, because these formats have no random access.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, cast

from penstock.errors import CorruptFile, LoaderClosed, SourceError
from penstock.types import FileRef, KiB, MiB
from penstock.watch.stage_timer import Clock, NullClock

if TYPE_CHECKING:
    from penstock.read.remote_files import RemoteFiles

Bytes = bytes | bytearray

BLOCK = MiB
STEP = 16 * KiB
STREAM_BLOCK = 4 * MiB
STREAM_AHEAD = 4
"""Blocks of a compressed remote file that are fetched ahead."""


class BombError(CorruptFile):
    """A compressed file expands beyond its limit."""

    reason = "bomb"


def is_damage(error: Exception) -> bool:
    """Return True if an exception is about the bytes of a file, not about the machine.

    A failing disk or a lack of memory must not pass for bad data: with on_bad_record="skip" the
    stream would depend on the machine.
    """
    return not isinstance(error, MemoryError) and getattr(error, "errno", None) is None


class FetchedFile:
    """Parts of a remote file that were fetched. Any other part is fetched when it is read."""

    broken: CorruptFile | None = None

    def __init__(
        self, file: FileRef, remote: RemoteFiles, parts: Sequence[tuple[int, Bytes]]
    ) -> None:
        self._file, self._remote, self._parts = file, remote, parts

    def read(self, start: int, length: int) -> bytes:
        end = min(start + length, self._file.size)
        out: list[Bytes | memoryview] = []
        while start < end:
            for first, data in self._parts:
                if first <= start < first + len(data):
                    out.append(memoryview(data)[start - first : end - first])
                    break
            else:
                following = [first for first, _ in self._parts if first > start]
                out.append(self._remote.read(self._file, start, min([*following, end]) - start))
            start += len(out[-1])
        return b"".join(out)


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
        with open(self.path, "rb", buffering=0) as file:
            if (size := os.fstat(file.fileno()).st_size) < self._size:
                # The missing part would pass for the end of the file.
                raise SourceError(
                    f"{self.path} changed: it was {self._size} bytes long when it was listed, it "
                    f"is {size}. Restore the file, or start a new run."
                )
            file.seek(start)
            data = file.read(length) or b""
            while len(data) < length and (more := file.read(length - len(data))):
                data += more  # one read gives 2 GiB at most
        return data


class CompressedFile:
    """A compressed file, read forwards. The blocks passed last are kept."""

    def __init__(
        self,
        file: FileRef,
        keep_bytes: int,
        max_bytes: int,
        closing: threading.Event,
        remote: RemoteFiles | None = None,
    ) -> None:
        self._file, self._remote, self._closing = file, remote, closing
        self._keep = max(4, -(-keep_bytes // BLOCK))
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._stream: IO[bytes] | None = None
        self._next = 0
        self._end: int | None = None
        self.broken: CorruptFile | None = None
        """Why the file ends early, if it does."""

    def read(self, start: int, length: int) -> bytes:
        first, last = start // BLOCK, (start + length - 1) // BLOCK
        parts = []
        for number in range(first, last + 1):
            block = self._block(number)
            lo = start - number * BLOCK if number == first else 0
            parts.append(block[lo : start + length - number * BLOCK])
            if len(block) < BLOCK:
                break
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        with self._lock:
            if self._end is not None and number > self._end:
                return b""
            if (known := self._blocks.get(number)) is not None:
                return known
            if self._stream is None or number < self._next:
                self._rewind()
            while self._next <= number and (self._end is None or self._next <= self._end):
                if self._closing.is_set():
                    raise LoaderClosed("the loader was shut down")
                try:
                    self._advance()
                except BaseException:
                    self._close_stream()  # it stands somewhere within a block
                    raise
            return self._blocks.get(number, b"")

    def _advance(self) -> None:
        """Decompress the next block."""
        assert self._stream is not None
        parts: list[bytes] = []
        have, start = 0, self._next * BLOCK
        try:
            if self._file.size == 0:
                raise EOFError("a compressed file is never empty")
            # In small steps: a step that fails loses what was sound in it.
            while have < BLOCK and (part := self._stream.read1(min(STEP, BLOCK - have))):  # type: ignore[attr-defined]
                parts.append(part)
                have += len(part)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            if not is_damage(error):
                raise
            # What came before the damage is sound, and the file ends here.
            self.broken = CorruptFile(
                f"{self._file.path} cannot be decompressed past byte {start + have} of its text: "
                f"{error}. It is damaged or was cut short: fetch it again, or leave it out."
            )
        if start + have > self._max_bytes:
            self.broken = BombError(
                f"{self._file.path}: {self._file.size} bytes decompress to more than "
                f"{self._max_bytes}. If this is honest data, store it with less compression."
            )
            parts, have = [], 0
        self._blocks[self._next] = b"".join(parts)
        if len(self._blocks) > self._keep:
            self._blocks.popitem(last=False)
        if have < BLOCK:
            self._end = self._next
        self._next += 1

    def _rewind(self) -> None:
        self._close_stream()
        self._stream = open_stream(self._file, self._remote)
        self._blocks.clear()
        self._next = 0

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        with self._lock:
            self._close_stream()
            self._blocks.clear()


AnyFile = PlainFile | CompressedFile | FetchedFile


class RangeStream(io.RawIOBase):
    """A remote file from its beginning on, fetched a few blocks ahead."""

    def __init__(self, file: FileRef, remote: RemoteFiles) -> None:
        self._file, self._remote = file, remote
        self._ahead: deque[Callable[[], bytearray]] = deque()
        self._asked = 0
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not len(self._block):
            while self._asked < self._file.size and len(self._ahead) < STREAM_AHEAD:
                length = min(STREAM_BLOCK, self._file.size - self._asked)
                self._ahead.append(self._remote.ahead(self._file, self._asked, length))
                self._asked += length
            self._block = memoryview(self._ahead.popleft()() if self._ahead else b"")
        n = min(len(buffer), len(self._block))
        buffer[:n] = self._block[:n]
        self._block = self._block[n:]
        return n


def open_stream(file: FileRef, remote: RemoteFiles | None = None) -> IO[bytes]:
    """Open the decompressed bytes of a file."""
    source: Any = file.path
    if file.remote:
        assert remote is not None
        source = io.BufferedReader(RangeStream(file, remote), STREAM_BLOCK)
    if file.codec == "zst":
        import pyarrow as pa

        if file.remote:
            zstd: Any = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), "zstd")
        else:
            zstd = pa.input_stream(source, compression="zstd", buffer_size=0)
        return cast(IO[bytes], zstd)
    opener: Any = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[file.codec]
    return cast(IO[bytes], opener(source, "rb"))


class Storage:
    """The open files of one dataset. Used by all worker threads at once."""

    def __init__(
        self,
        *,
        max_ratio: float,
        keep_bytes: int,
        remote: RemoteFiles | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.remote = remote
        self._clock = clock or NullClock()
        self._max_ratio, self._keep_bytes = max_ratio, keep_bytes
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._compressed: OrderedDict[tuple[str, int], CompressedFile] = OrderedDict()

    def max_bytes(self, file: FileRef) -> int:
        """Return how far a file may expand; small files have some leeway."""
        return int(self._max_ratio * file.size) + 64 * MiB

    def fetched(self, file: FileRef, parts: Sequence[tuple[int, Bytes]]) -> FetchedFile:
        """Return a remote file of which some parts were fetched."""
        assert self.remote is not None
        return FetchedFile(file, self.remote, parts)

    def plain(self, file: FileRef) -> PlainFile:
        """Return a file on disk, as it is."""
        return PlainFile(file, self._clock)

    def open(self, file: FileRef, reader: int, parts: Sequence[tuple[int, Bytes]] = ()) -> AnyFile:
        """Return a file for one reader (a lane): each has a decompressor of its own."""
        if not file.codec:
            return self.fetched(file, parts) if file.remote else self.plain(file)
        with self._lock:
            key = (file.path, reader)
            if key not in self._compressed:
                limit = self.max_bytes(file)
                self._compressed[key] = CompressedFile(
                    file, self._keep_bytes, limit, self._closing, self.remote
                )
                # A lane reads one file after another; two are open while it crosses over.
                for old in [k for k in self._compressed if k[1] == reader][:-2]:
                    self._compressed.pop(old).close()
            return self._compressed[key]

    def stop(self) -> None:
        """Have decompression stop at the next block, without waiting."""
        self._closing.set()

    def close(self) -> None:
        """Close all files, once nothing reads any more."""
        self.stop()
        for opened in self._compressed.values():
            opened.close()
        self._compressed.clear()

"""Bytes of a file by position, whether it is compressed or not.

In:    a `FileRef` and a range of (decompressed) bytes.
Out:   those bytes; fewer only at the end of the file.
Where: any worker thread.
State: for compressed files, one decompressor with the blocks it passed last, behind a lock.
       A reader that follows in order never decompresses anything twice. One that asks for
       something earlier starts over: no random access is to be had in these formats.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from typing import IO

from penstock.errors import CorruptFile, LoaderClosed
from penstock.types import FileRef, KiB, MiB

BLOCK = MiB
STEP = 16 * KiB


class BombError(CorruptFile):
    """More came out of a file than its size can honestly hold."""

    reason = "bomb"


def is_damage(error: Exception) -> bool:
    """Whether an exception speaks of the bytes of a file, rather than of the machine's own trouble.

    A disk that fails, a lack of memory or of file handles must not pass for bad data: with
    `on_bad_record="skip"` the stream would depend on the machine.
    """
    return not isinstance(error, MemoryError) and getattr(error, "errno", None) is None


def open_stream(file: FileRef) -> IO[bytes]:
    """The file's decompressed bytes, in order."""
    if file.codec == "gz":
        import gzip

        return gzip.open(file.path, "rb")  # type: ignore[return-value]
    if file.codec == "bz2":
        import bz2

        return bz2.open(file.path, "rb")
    if file.codec == "xz":
        import lzma

        return lzma.open(file.path, "rb")
    if file.codec == "zst":
        import pyarrow as pa

        stream: IO[bytes] = pa.input_stream(file.path, compression="zstd", buffer_size=0)
        return stream
    return open(file.path, "rb")


class PlainFile:
    """A file that is read where it lies."""

    broken: CorruptFile | None = None

    def __init__(self, file: FileRef) -> None:
        self.path = file.path

    def read(self, start: int, length: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            parts = []
            while length > 0:  # one pread gives 2 GiB at most
                part = os.pread(fd, min(length, 1 << 30), start)
                if not part:
                    break
                parts.append(part)
                start += len(part)
                length -= len(part)
        finally:
            os.close(fd)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class CompressedFile:
    """A compressed file, read forwards."""

    def __init__(self, file: FileRef, keep_bytes: int, max_bytes: int, closing: threading.Event) -> None:
        self._file = file
        self._closing = closing
        self._keep = max(4, -(-keep_bytes // BLOCK))
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._stream: IO[bytes] | None = None
        self._next = 0
        self._end: int | None = None
        self.broken: CorruptFile | None = None
        """Why the file ends where it does, if that is not its true end."""
        self.restarts = 0

    def read(self, start: int, length: int) -> bytes:
        first, last = start // BLOCK, (start + length - 1) // BLOCK
        parts = []
        for number in range(first, last + 1):
            block = self._block(number)
            lo = start - number * BLOCK if number == first else 0
            parts.append(block[lo : start + length - number * BLOCK])
            if len(block) < BLOCK:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, number: int) -> bytes:
        with self._lock:
            if self._end is not None and number > self._end:
                return b""
            if (known := self._blocks.get(number)) is not None:
                return known
            if self._stream is None or number < self._next:
                self._rewind()
            while self._next <= number:
                _go_on(self._closing)
                block = self._decompress()
                self._blocks[self._next] = block
                if len(self._blocks) > self._keep:
                    self._blocks.popitem(last=False)
                if len(block) < BLOCK:
                    self._end = self._next
                    self._next += 1
                    break
                self._next += 1
            return self._blocks.get(number, b"")

    def _rewind(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self.restarts += 1
        self._stream = open_stream(self._file)
        self._blocks.clear()
        self._next = 0

    def _decompress(self) -> bytes:
        assert self._stream is not None
        parts: list[bytes] = []
        have = 0
        where = self._next * BLOCK
        try:
            if self._file.size == 0:
                raise EOFError("it is empty, which no compressed file is")
            # In small steps: one that fails gives nothing, not even what was sound in it.
            while have < BLOCK and (part := self._stream.read1(min(STEP, BLOCK - have))):  # type: ignore[attr-defined]
                parts.append(part)
                have += len(part)
        except (OSError, EOFError, ValueError, _zlib_error(), _lzma_error()) as error:
            if not is_damage(error):
                raise
            # What came before the damage is sound, so it is given out and the file ends here.
            self.broken = CorruptFile(
                f"{self._file.path} cannot be decompressed past byte {where + have} of its text: {error}. "
                "It is damaged or was cut short: fetch it again, or leave it out."
            )
        if where + have > self._max_bytes:
            self.broken = BombError(
                f"{self._file.path}: {self._file.size} bytes decompress to more than {self._max_bytes}. "
                "If this is honest data, raise max_ratio."
            )
            return b""
        return b"".join(parts)

    def close(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.close()
            self._stream = None
            self._blocks.clear()


def _zlib_error() -> type[Exception]:
    import zlib

    return zlib.error


def _lzma_error() -> type[Exception]:
    import lzma

    return lzma.LZMAError


class Storage:
    """The open files of one dataset. Used by all worker threads at once."""

    def __init__(self, *, max_ratio: float, keep_bytes: int) -> None:
        self._max_ratio = max_ratio
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._compressed: OrderedDict[tuple[str, int], CompressedFile] = OrderedDict()
        self._spooling = threading.Lock()
        self._spooled: dict[str, str] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def max_bytes(self, file: FileRef) -> int:
        """What may come out of a file before it counts as a bomb; small files are given some room."""
        return int(self._max_ratio * file.size) + 64 * MiB

    def open(self, file: FileRef, reader: int) -> PlainFile | CompressedFile:
        if not file.codec:
            return PlainFile(file)
        with self._lock:
            key = (file.path, reader)
            opened = self._compressed.get(key)
            if opened is None:
                opened = CompressedFile(file, self._keep_bytes, self.max_bytes(file), self._closing)
                self._compressed[key] = opened
                same_reader = [k for k in self._compressed if k[1] == reader]
                # A lane reads one file after another; two are open while it crosses over.
                for old in same_reader[:-2]:
                    self._compressed.pop(old).close()
            return opened

    def spool(self, file: FileRef) -> str:
        """The path of a decompressed copy on disk, for formats that need random access."""
        with self._spooling:
            known = self._spooled.get(file.path)
            if known is not None:
                return known
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
            target = os.path.join(self._folder.name, f"{len(self._spooled)}.{file.format}")
            limit = self.max_bytes(file)
            try:
                with open_stream(file) as source, open(target, "wb") as sink:
                    _copy(source, sink, limit, file, self._closing)
            except (OSError, EOFError, _zlib_error(), _lzma_error()) as error:
                if not is_damage(error):
                    raise
                raise CorruptFile(f"{file.path} cannot be decompressed: {error}") from error
            self._spooled[file.path] = target
            return target

    def stop(self) -> None:
        """Have whoever is decompressing stop at the next block. Waits for nobody."""
        self._closing.set()

    def close(self) -> None:
        """Close all files. To be called when nobody reads any more."""
        self.stop()
        for opened in self._compressed.values():
            opened.close()
        self._compressed.clear()
        self._spooled.clear()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None


def _go_on(closing: threading.Event) -> None:
    if closing.is_set():
        raise LoaderClosed("the loader was shut down")


def _copy(source: IO[bytes], sink: IO[bytes], limit: int, file: FileRef, closing: threading.Event) -> None:
    written = 0
    while part := source.read(BLOCK):
        _go_on(closing)
        written += len(part)
        if written > limit:
            raise BombError(
                f"{file.path}: {file.size} bytes decompress to more than {limit}. If this is honest data, raise max_ratio."
            )
        sink.write(part)


__all__ = ["BombError", "CompressedFile", "PlainFile", "Storage", "open_stream"]

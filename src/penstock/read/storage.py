"""Bytes of a file by position, whether it is compressed or not, here or elsewhere.

In:    a `FileRef` and a range of (decompressed) bytes.
Out:   those bytes; fewer only at the end of the file.
Where: any worker thread; what is remote is fetched beforehand by fetch threads (see `Reader.fetch`).
State: for compressed files, one decompressor with the blocks it passed last, behind a lock.
       A reader that follows in order never decompresses anything twice. One that asks for
       something earlier starts over: no random access is to be had in these formats.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from penstock.errors import CorruptFile, LoaderClosed, SourceChanged
from penstock.read.forwards import open_stream
from penstock.types import FileRef, KiB, MiB
from penstock.watch.stage_timer import Clock, NullClock

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from penstock.read.remote import RemoteFiles

Bytes = bytes | bytearray

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


class FetchedFile:
    """Parts of a remote file that are here already. What else is asked for is fetched then."""

    broken: CorruptFile | None = None

    def __init__(
        self, file: FileRef, remote: RemoteFiles, parts: Sequence[tuple[int, Bytes]]
    ) -> None:
        self._file = file
        self._remote = remote
        self._parts = parts

    def read(self, start: int, length: int) -> bytes:
        length = max(0, min(length, self._file.size - start))
        out: list[bytes] = []
        while length > 0:
            for first, data in self._parts:
                if first <= start < first + len(data):
                    found = memoryview(data)[start - first : start - first + length]
                    break
            else:
                # Up to the next part that is here, or to the end.
                gap = min([first - start for first, _ in self._parts if first > start] + [length])
                found = memoryview(self._remote.read(self._file, start, gap))
            out.append(bytes(found))
            start += len(found)
            length -= len(found)
        return out[0] if len(out) == 1 else b"".join(out)


class PlainFile:
    """A file that is read where it lies."""

    broken: CorruptFile | None = None

    def __init__(self, file: FileRef, clock: Clock | None = None) -> None:
        self.path, self._size = file.path, file.size
        self._clock = clock or NullClock()

    def read(self, start: int, length: int) -> bytes:
        with self._clock.stage("fetch", self.path) as track:
            data = self._read(start, length)
        track.count("fetch", 1, len(data))
        return data

    def _read(self, start: int, length: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            if (size := os.fstat(fd).st_size) < self._size:
                # What is gone would pass for the end of the file.
                raise SourceChanged(
                    f"{self.path} changed: it was {self._size} bytes long when it was listed, it is {size}. Restore the file, "
                    "or start a new run."
                )
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

    def __init__(
        self,
        file: FileRef,
        keep_bytes: int,
        max_bytes: int,
        closing: threading.Event,
        remote: RemoteFiles | None = None,
    ) -> None:
        self._file = file
        self._remote = remote
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
        self._doubted = False
        self._sums: dict[int, int] = {}

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
                try:
                    block = self._decompress()
                    if self.broken is not None and self._remote is not None and not self._doubted:
                        # What came over the network is fetched a second time before it is believed.
                        self._doubted, self.broken = True, None
                        self._rewind()
                        continue
                    self._compare(block)
                except BaseException:
                    # The stream stands somewhere in a block whose beginning is lost: whoever comes next starts over.
                    self._let_go()
                    raise
                self._blocks[self._next] = block
                if len(self._blocks) > self._keep:
                    self._blocks.popitem(last=False)
                if len(block) < BLOCK:
                    self._end = self._next
                    self._next += 1
                    break
                self._next += 1
            return self._blocks.get(number, b"")

    def _compare(self, block: bytes) -> None:
        """A block that is read again must be what it was: the first may have been used already."""
        if self._remote is not None and self._sums.setdefault(
            self._next, zlib.crc32(block)
        ) != zlib.crc32(block):
            raise CorruptFile(
                f"{self._file.path}: its text near byte {self._next * BLOCK} came differently when it was fetched again, and "
                "may have been used. Resume from a checkpoint taken before; use https, or a copy on disk."
            )

    def _rewind(self) -> None:
        if self._stream is not None:
            self._let_go()
            self.restarts += 1
        self._stream = open_stream(self._file, self._remote)
        self._blocks.clear()
        self._next = 0

    def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

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
        except (OSError, EOFError, ValueError, zlib.error, _lzma_error()) as error:
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
                "If this is honest data, store it with less compression."
            )
            return b""
        return b"".join(parts)

    def close(self) -> None:
        with self._lock:
            self._let_go()
            self._blocks.clear()


def _lzma_error() -> type[Exception]:
    import lzma

    return lzma.LZMAError


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
        self._max_ratio = max_ratio
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._compressed: OrderedDict[tuple[str, int], CompressedFile] = OrderedDict()
        self._spooling = threading.Lock()
        self._spooled: dict[str, str] = {}
        self._folder: TemporaryDirectory[str] | None = None

    def max_bytes(self, file: FileRef) -> int:
        """What may come out of a file before it counts as a bomb; small files are given some room."""
        return int(self._max_ratio * file.size) + 64 * MiB

    def fetched(self, file: FileRef, parts: Sequence[tuple[int, Bytes]]) -> FetchedFile:
        """A remote file of which some parts are here."""
        assert self.remote is not None
        return FetchedFile(file, self.remote, parts)

    def plain(self, file: FileRef) -> PlainFile:
        """A file on disk, as it is."""
        return PlainFile(file, self._clock)

    def open(self, file: FileRef, reader: int, parts: Sequence[tuple[int, Bytes]] = ()) -> AnyFile:
        if not file.codec:
            return self.fetched(file, parts) if file.remote else self.plain(file)
        with self._lock:
            key = (file.path, reader)
            opened = self._compressed.get(key)
            if opened is None:
                opened = CompressedFile(
                    file, self._keep_bytes, self.max_bytes(file), self._closing, self.remote
                )
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
                from tempfile import TemporaryDirectory

                self._folder = TemporaryDirectory(prefix="penstock-")
            target = os.path.join(self._folder.name, f"{len(self._spooled)}.{file.format}")
            limit = self.max_bytes(file)
            try:
                with open_stream(file, self.remote) as source, open(target, "wb") as sink:
                    _copy(source, sink, limit, file, self._closing)
            except (OSError, EOFError, zlib.error, _lzma_error()) as error:
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


AnyFile = PlainFile | CompressedFile | FetchedFile


def _go_on(closing: threading.Event) -> None:
    if closing.is_set():
        raise LoaderClosed("the loader was shut down")


def _copy(
    source: IO[bytes], sink: IO[bytes], limit: int, file: FileRef, closing: threading.Event
) -> None:
    written = 0
    while part := source.read(BLOCK):
        _go_on(closing)
        written += len(part)
        if written > limit:
            raise BombError(
                f"{file.path}: {file.size} bytes decompress to more than {limit}. If this is honest data, store it with less compression."
            )
        sink.write(part)


__all__ = ["AnyFile", "BombError", "CompressedFile", "FetchedFile", "PlainFile", "Storage"]

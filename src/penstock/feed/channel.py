"""Messages between a process and its worker process.

In:    any object that can be pickled.
Out:   the same, in the other process. Large arrays (numpy, Arrow, torch) are not sent but shared:
       they are written once to memory that has no name, and the receiver's arrays are views of it.
Where: the worker's thread in the parent, the main thread in the child.
State: none. Memory goes back when the last array over it does; a process that is killed leaves nothing.
Cost:  one copy of what is large. A message is read whole or not at all: one that is cut off means
       that the other side is gone.
"""

from __future__ import annotations

import array
import contextlib
import copyreg
import ctypes
import errno
import functools
import io
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

SHARED_BYTES = 64 << 10
"""Buffers from this size on are shared; below it, to send them is cheaper than to map them."""
ALIGN = 64
MAGIC = b"pstk"
HEADER = struct.Struct("<4sIQ")  # the magic, the number of shared buffers, the bytes that follow
CAN_SHARE = hasattr(socket, "AF_UNIX") and hasattr(socket.socket, "sendmsg")
CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

Ready = Callable[[bool], None]
"""Waits until the socket can be written (True) or read (False), or raises."""

loads = ForkingPickler.loads


class Broken(Exception):
    """The other side is gone, or sent something that is no message."""


class SharedEnd:
    """One end of a socket over which shared memory can be passed. Blocks, unless `ready` is given."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_blocking(self, blocking: bool) -> None:
        self._socket.setblocking(blocking)

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Close it for the other side too, whoever else may hold a copy of this end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, message: Any, ready: Ready | None = None) -> None:
        """What cannot be pickled raises before anything is sent."""
        pickled, buffers = dump(message, SHARED_BYTES)
        fd = None
        if buffers:
            try:
                fd = share(buffers)
            except OSError:  # no memory to share, or no descriptor left: then it is sent
                pickled, buffers = dump(message, None)
        try:
            sizes = struct.pack(f"<{len(buffers)}Q", *(b.nbytes for b in buffers))
            header = HEADER.pack(MAGIC, len(buffers), len(sizes) + pickled.nbytes)
            self._write([memoryview(header + sizes), pickled], fd, ready)
        except OSError as error:
            raise Broken(str(error)) from error
        finally:
            if fd is not None:
                os.close(fd)

    def _write(self, parts: list[memoryview], fd: int | None, ready: Ready | None) -> None:
        passed = (
            [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        )
        while parts:
            try:
                sent = self._socket.sendmsg(parts, passed)
            except BlockingIOError:
                if ready is None:
                    raise
                ready(True)
                continue
            passed = []  # it went with the first byte
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts and sent:
                parts[0] = parts[0][sent:]

    def receive(self, ready: Ready | None = None) -> Any:
        """The next message. An error in unpickling it leaves the channel as it was: the next one can be read."""
        fds: list[int] = []
        try:
            try:
                header = self._read(HEADER.size, ready, fds)
                magic, n_buffers, n_bytes = HEADER.unpack(header)
                if magic != MAGIC:
                    raise Broken(f"{bytes(header[:4])!r} is not the beginning of a message")
                body = memoryview(self._read(n_bytes, ready, None))
            except OSError as error:
                raise Broken(str(error)) from error
            if n_buffers == 0:
                return loads(body)
            if not fds:
                raise OSError(
                    errno.EMFILE,
                    "a result could not be received: too many open files (see ulimit -n)",
                )
            sizes = struct.unpack_from(f"<{n_buffers}Q", body)
            return loads(body[8 * n_buffers :], buffers=mapped(fds[0], sizes))
        finally:
            for fd in fds:
                os.close(fd)

    def _read(self, n_bytes: int, ready: Ready | None, fds: list[int] | None) -> bytearray:
        """So many bytes, and any descriptor that comes with them."""
        read = bytearray(n_bytes)
        rest = memoryview(read)
        while rest:
            if ready is not None and fds is not None:
                ready(False)  # a header is always waited for
            try:
                if fds is not None:
                    n, passed, _, _ = self._socket.recvmsg_into(
                        [rest], socket.CMSG_SPACE(4), CLOSE_ON_EXEC
                    )
                    for level, kind, data in passed:
                        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                            fds.extend(array.array("i", data[: len(data) - len(data) % 4]))
                else:
                    n = self._socket.recv_into(rest)
            except BlockingIOError:
                if ready is None:
                    raise
                ready(False)
                continue
            if n == 0:
                raise Broken("the other side is gone")
            rest = rest[n:]
        return read


class PlainEnd:
    """One end of a pipe, where memory cannot be passed on (Windows): everything is sent."""

    def __init__(self, end: Connection) -> None:
        self.pipe = end

    def fileno(self) -> int:
        return self.pipe.fileno()

    def set_blocking(self, blocking: bool) -> None: ...

    def close(self) -> None:
        self.pipe.close()

    hang_up = close

    def send(self, message: Any, ready: Ready | None = None) -> None:
        pickled, _ = dump(message, None)
        try:
            self.pipe.send_bytes(pickled)
        except OSError as error:
            raise Broken(str(error)) from error

    def receive(self, ready: Ready | None = None) -> Any:
        if ready is not None:
            ready(False)
        try:
            read = self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise Broken(str(error)) from error
        return loads(read)


End = SharedEnd | PlainEnd


def make_ends() -> tuple[End, End]:
    """Two ends that are connected."""
    if CAN_SHARE:
        one, other = socket.socketpair()
        return SharedEnd(one), SharedEnd(other)
    left, right = Pipe(duplex=True)
    return PlainEnd(left), PlainEnd(right)


def dump(message: Any, shared_bytes: int | None) -> tuple[memoryview, list[memoryview]]:
    """A message pickled, without the buffers that are at least so large; those apart."""
    buffers: list[memoryview] = []

    def goes_along(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < (shared_bytes or sys.maxsize):
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    pickler = pickle.Pickler(
        stream, protocol=5, buffer_callback=None if shared_bytes is None else goes_along
    )
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor"):
        pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduce_tensor}
    pickler.dump(message)
    return stream.getbuffer(), buffers


def _reduce_tensor(tensor: Any) -> Any:
    """A plain CPU tensor goes as a numpy array, which can be shared; others as torch has it."""
    try:
        if type(tensor).__name__ == "Tensor" and not tensor.requires_grad:
            if str(tensor.dtype) == "torch.bfloat16":
                return _tensor, (tensor.view(sys.modules["torch"].int16).numpy(), "bfloat16")
            return _tensor, (tensor.numpy(), None)
    except (RuntimeError, TypeError, ValueError):
        pass
    return tensor.__reduce_ex__(5)


def _tensor(values: Any, dtype: str | None) -> Any:
    import torch

    tensor = torch.from_numpy(values)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


# Memory without a name


def _places(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Where each buffer begins, and how long it all is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGN) * ALIGN
    return starts, end


def share(buffers: list[memoryview]) -> int:
    """A descriptor of memory that holds the buffers. It has no name that could be left behind."""
    starts, total = _places(tuple(b.nbytes for b in buffers))
    fd = _memory()
    try:
        os.ftruncate(fd, total)
        for start, buffer in zip(starts, buffers, strict=True):
            done = 0
            while done < buffer.nbytes:
                done += os.pwrite(fd, buffer[done:], start + done)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("penstock", os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # forbidden by a sandbox
                raise
    fd, name = tempfile.mkstemp(prefix="penstock-")
    os.unlink(name)
    return fd


def mapped(fd: int, sizes: tuple[int, ...]) -> list[memoryview]:
    """The buffers of shared memory, writable. They keep it; the descriptor is not needed any longer."""
    import numpy as np

    starts, total = _places(sizes)
    if os.fstat(fd).st_size < total:
        raise Broken("shared memory is shorter than the message says")
    whole: Any = np.asarray(Map(fd, total))
    return [
        memoryview(whole[start : start + size]) for start, size in zip(starts, sizes, strict=True)
    ]


class Map:
    """Shared memory in this process. `mmap.mmap` would keep a descriptor for each that is alive:
    with a window of chunks in memory, more than many systems allow."""

    def __init__(self, fd: int, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        address = _libc().mmap(None, n_bytes, 1 | 2, 1, fd, 0)  # PROT_READ | PROT_WRITE, MAP_SHARED
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            self._address: int | None = None
            raise OSError(code, f"cannot map {n_bytes} bytes of a result: {os.strerror(code)}")
        self._address = address
        self._unmap = _libc().munmap
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._n_bytes)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,
    ]
    libc.munmap.restype = ctypes.c_int
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc

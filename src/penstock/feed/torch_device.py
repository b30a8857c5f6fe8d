"""The devices of PyTorch: the only file that calls CUDA.

In:    staging buffers and their layouts.
Out:   tensors on the device.
Where: the trainer's thread; how long a device waited is also asked for by the heartbeat's.
State: the side stream; events of steps that are not past yet.
Cost:  on CUDA one asynchronous copy of the narrow bytes, and a kernel or two for each field that is
       widened, all on the side stream. Elsewhere a plain copy, over before `send` returns.

torch.accelerator, torch.Stream and torch.Event say the same for other accelerators (XPU and the like);
they can take the place of torch.cuda here once somebody can run them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.feed.device import Array, Device, Landing, Layout

cuda: Any = torch.cuda  # its streams and events have no types

UNSIGNED = {"uint16": (torch.int16, 0xFFFF), "uint32": (torch.int32, 0xFFFF_FFFF)}
"""Types that torch hardly computes with: the signed type of the same bits, and the mask that undoes the sign."""

WIDENED = frozenset({"uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"})

PENDING = 64
"""Steps whose events are kept before those that are past are read. A host is rarely more than a few steps ahead."""


def open_device(name: str) -> Device[Any, Any]:
    """The device of that name; "cuda" is the current one of the calling thread."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # also finds out whether it is here
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(
            f"device={name!r} cannot be used: {reason}. Here are: {', '.join(available())}."
        ) from None
    if device.type != "cuda":
        return DirectDevice(device)
    return CudaDevice(
        torch.device("cuda", cuda.current_device() if device.index is None else device.index)
    )


def available() -> list[str]:
    """Names of the devices of this machine."""
    names = ["cpu", *(f"cuda:{i}" for i in range(cuda.device_count()))]
    names += ["mps"] if torch.backends.mps.is_available() else []
    names += (
        [f"xpu:{i}" for i in range(torch.xpu.device_count())] if torch.xpu.is_available() else []
    )
    return names


def widen(tensor: Tensor, dtype: str) -> Tensor:
    """The integers as int64, contiguous, in memory of their own. `dtype` is what numpy calls their type."""
    if dtype not in WIDENED:
        raise ConfigError(
            f"{dtype} cannot be widened to int64: it needs one of {', '.join(sorted(WIDENED))}"
        )
    signed, mask = UNSIGNED.get(dtype, (tensor.dtype, 0))
    wide = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
    wide.copy_(tensor.view(signed))
    return wide.bitwise_and_(mask) if mask else wide


class TorchLanding:
    """Fields in a buffer on the device."""

    def __init__(self, landed: Tensor, layout: Layout) -> None:
        self._landed = landed
        self._fields = {field.name: field for field in layout.fields}

    def __getitem__(self, name: str) -> Tensor:
        field = self._fields[name]
        part = self._landed[field.offset : field.offset + field.nbytes]
        return part.view(getattr(torch, field.dtype)).reshape(field.shape)

    def wide(self, name: str, where: Any = ...) -> Tensor:
        return widen(self[name][where], self._fields[name].dtype)


class HostMemory:
    """A staging buffer, as torch and as numpy see it."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.bytes: Array = self.tensor.numpy()


class CudaTicket:
    """A copy on the side stream, and the work that was queued behind it."""

    def __init__(self) -> None:
        self.copied = cuda.Event()
        self.ready = cuda.Event()
        self.tensors: list[Tensor] = []

    def done(self) -> bool:
        return bool(self.copied.query())

    def wait(self) -> None:
        self.copied.synchronize()


class CudaWaits:
    """How long the trainer's stream stood still between two steps, by events on it that are read once they are past.

    The host's time in `next` is an upper bound only: while it waits there, the device may still be busy with the
    step that was queued before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0
        # The trainer's thread and the heartbeat's both ask, and an event may be read once.
        self._lock = threading.Lock()

    def begin(self) -> None:
        self._begun = cuda.Event(enable_timing=True)
        self._begun.record(cuda.current_stream(self._device))

    def end(self) -> None:
        ended = cuda.Event(enable_timing=True)
        ended.record(cuda.current_stream(self._device))
        self._pending.append((self._begun, ended))
        if len(self._pending) > PENDING:  # nobody has asked for a while
            self.seconds()

    def seconds(self) -> float:
        with self._lock:
            while self._pending and self._pending[0][1].query():
                begun, ended = self._pending.popleft()
                self._seconds += begun.elapsed_time(ended) / 1e3
            return self._seconds


class CudaDevice:
    """Copies on a stream of its own.

    Everything is allocated on the side stream, so memory that was dropped is reused in that stream's
    order; only what the trainer gets has to be marked as used by the trainer's stream too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = cuda.Stream(device)
        self.waits = CudaWaits(device)
        self._first = True

    def staging(self, nbytes: int) -> HostMemory:
        with cuda.device(self._device):
            return HostMemory(nbytes, pinned=True)

    def send(
        self, staging: HostMemory, layout: Layout, then: Callable[[Landing], Iterable[Any]]
    ) -> CudaTicket:
        ticket = CudaTicket()
        with cuda.device(self._device):
            if self._first:
                # A hook may use constants that were made on the trainer's stream before the first batch.
                self._side.wait_stream(cuda.current_stream())
                self._first = False
            with cuda.stream(self._side):
                try:
                    landed = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
                    landed.copy_(staging.tensor[: layout.nbytes], non_blocking=True)
                    ticket.copied.record()
                    ticket.tensors = list(then(TorchLanding(landed, layout)))
                    ticket.ready.record()
                except BaseException:
                    self._side.synchronize()  # nobody would have a ticket to wait for
                    raise
        return ticket

    def hand_over(self, ticket: CudaTicket) -> None:
        trainer = cuda.current_stream(self._device)
        trainer.wait_event(ticket.ready)
        for tensor in ticket.tensors:
            if tensor.device == self._device:
                tensor.record_stream(trainer)
        ticket.tensors = []  # from now on they are the trainer's, and live as long as it holds them


class DirectTicket:
    """A copy that is over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class DirectDevice:
    """Copies at once, on the stream there is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def staging(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes, pinned=False)

    def send(
        self, staging: HostMemory, layout: Layout, then: Callable[[Landing], Iterable[Any]]
    ) -> DirectTicket:
        # A copy on the CPU too: staging is written again for a later batch.
        landed = staging.tensor[: layout.nbytes].to(self._device, copy=True)
        for _ in then(TorchLanding(landed, layout)):
            pass
        return DirectTicket()

    def hand_over(self, ticket: DirectTicket) -> None:
        pass

"""Copy batches to a device while the training step on an earlier batch runs.

Runs on the trainer's thread: `next` starts every copy. Keeps 2 batches in flight beyond the one in
use. Copies ids in their narrow type and widens them to int64 on the device. CUDA copies use a
separate stream (see `cuda`); every other device uses a plain `.to(device)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.encode.batch import Batch
from penstock.errors import ConfigError
from penstock.types import IGNORE
from penstock.watch.stage_timer import Clock

Array = np.ndarray[Any, Any]
Upload = Callable[[Tensor], Tensor]
Hook = Callable[[Batch], Batch | None]

IN_FLIGHT = 2
"""Batches on the device beyond the one in use. More would take device memory without benefit."""

SIGNED = {"uint16": (np.int16, 0xFFFF), "uint32": (np.int32, 0xFFFF_FFFF)}
"""For types with little torch support: a signed type of the same width, and a mask for its sign."""


class Copier:
    """Copies with `.to(device)` on the current stream. `CudaCopier` has its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_wait(self) -> None:
        """Record that the trainer requests a batch."""

    def stream(self) -> AbstractContextManager[Any]:
        """Make the copy stream current."""
        return nullcontext()

    def upload(self, tensor: Tensor) -> Tensor:
        """Start the copy of one tensor on the current stream."""
        return tensor.to(self._device)

    def mark(self) -> Any:
        """Return an event that occurs after all work queued on the copy stream so far."""

    def hand_over(self, event: Any, tensors: Iterable[Tensor]) -> None:
        """Make the trainer's stream, not the host, wait for the event before it uses the tensors."""

    def waited_s(self) -> float | None:
        """Return the time the device waited for batches, or None if it cannot be measured."""
        return None


def open_copier(name: str) -> Copier:
    """Return the copier for a device; "cuda" is the current CUDA device of the calling thread."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(
            f"device={name!r} cannot be used: {reason}. "
            f"CUDA devices on this machine: {torch.cuda.device_count()}."
        ) from None
    if device.type != "cuda":
        return Copier(device)
    from penstock.feed.cuda import CudaCopier

    return CudaCopier(device)


class DeviceFeed:
    """Returns batches on the device and starts the copies of the next ones."""

    def __init__(
        self,
        copier: Copier,
        take: Callable[[float | None], Batch | None],
        poll: Callable[[], Batch | None],
        hook: Hook | None,
        clock: Clock,
    ) -> None:
        """Copy nothing until the first `next`.

        take: returns the next batch within a timeout in seconds, or None at the end.
        poll: returns the next batch if it is ready, otherwise None.
        hook: changes a batch on the device, on the copy stream, or returns a replacement.
        """
        self._copier, self._take, self._poll = copier, take, poll
        self._hook, self._clock = hook, clock
        self._sent: deque[tuple[Batch, Any]] = deque()
        self._failed: BaseException | None = None

    def next(self, timeout: float | None = None) -> Batch | None:
        """Return the next batch, or None at the end. Waits only if no batch is in flight.

        An error in a later batch is raised after the batches before it have been returned, and by
        every later call. After a `LoaderTimeout`, call again: nothing is lost.
        """
        self._copier.begin_wait()
        if not self._sent:
            if self._failed is not None:
                raise self._failed
            if (taken := self._take(timeout)) is None:
                return None
            self._send(taken)
        self._top_up()
        batch, event = self._sent[0]
        self._copier.hand_over(event, tensors_of(batch))
        self._sent.popleft()
        return batch

    def waited_s(self) -> float | None:
        """Return the time the device waited for batches, or None if it cannot be measured."""
        return self._copier.waited_s()

    def close(self) -> None:
        """Drop the batches in flight. May be called again."""
        self._sent.clear()

    def _top_up(self) -> None:
        """Send batches that are ready. A later `next` raises their errors."""
        while self._failed is None and len(self._sent) <= IN_FLIGHT:
            try:
                if (batch := self._poll()) is None:
                    return
                self._send(batch)
            except Exception as error:
                self._failed = error

    def _send(self, batch: Batch) -> None:
        try:
            with self._clock.stage("copy") as track, self._copier.stream():
                nbytes = batch.nbytes
                to_device(batch, self._copier.upload)
                if self._hook is not None:
                    batch = _preprocessed(batch, self._hook)
                self._sent.append((batch, self._copier.mark()))
                track.count("copy", 1, nbytes)
        except BaseException as error:
            self._failed = error  # the batch is lost, so the stream cannot continue
            raise


def _preprocessed(batch: Batch, hook: Hook) -> Batch:
    try:
        made = hook(batch)
    except Exception as error:
        error.add_note("in stage copy, in device_preprocess")
        raise
    if made is None:
        return batch
    if not isinstance(made, Batch):
        raise ConfigError(
            f"device_preprocess returned {type(made).__name__}: it must return a Batch, "
            "or None to keep its argument"
        )
    made.take_place_of(batch)
    return made


def to_device(batch: Batch, upload: Upload) -> None:
    """Replace the arrays and tensors of a batch with tensors on the device."""
    if batch.narrow is not None:
        _widen(batch, batch.narrow, upload)
        batch.narrow = None
        return
    batch.to_torch()
    batch.change(lambda value: upload(value) if isinstance(value, Tensor) else value)


def _widen(batch: Batch, narrow: dict[str, Array], upload: Upload) -> None:
    """Make inputs and targets from rows of seq_len + 1 narrow ids."""
    width = narrow["ids"].shape[1]
    signed, mask = SIGNED.get(narrow["ids"].dtype.name, (None, None))
    ids = upload(_tensor(narrow["ids"], signed))
    batch.inputs, batch.targets = _int64(ids[:, :-1], mask), _int64(ids[:, 1:], mask)
    if "valid" in narrow:
        valid = upload(_tensor(narrow["valid"]))
        columns = torch.arange(1, width, device=valid.device)
        batch.targets.masked_fill_(columns >= valid[:, None], IGNORE)
    if "positions" in narrow:
        batch.positions = upload(_tensor(narrow["positions"]))
        batch.cu_seqlens = upload(_tensor(batch.cu_seqlens))


def _tensor(array: Array, view: Any = None) -> Tensor:
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    return torch.from_numpy(native if view is None else native.view(view))


def _int64(tensor: Tensor, mask: int | None) -> Tensor:
    wide = tensor.to(torch.int64, memory_format=torch.contiguous_format)
    return wide if mask is None else wide.bitwise_and_(mask)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return every tensor in a batch."""
    found: list[Tensor] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
        return value

    batch.change(collect)
    return found

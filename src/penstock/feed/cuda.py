"""Copy tensors to a CUDA device on a separate stream.

Tensors are allocated on the copy stream. `record_stream` keeps their memory until the trainer's
stream is done with them. Pinned staging memory comes from torch's caching host allocator, which
reuses a block only after the copies that read it. ROCm uses the same names in torch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.feed.device import Copier

cuda: Any = torch.cuda  # streams and events are untyped

MAX_PENDING = 64
"""Pairs of timing events to collect before reading those that have occurred."""


class CudaCopier(Copier):
    """Copies on a separate stream, and measures how long the device waited for them."""

    def __init__(self, device: torch.device) -> None:
        index = cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        self._stream = cuda.Stream(self._device)
        self._began = False
        self._wait_begun: Any = None
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited_s = 0.0
        self._lock = threading.Lock()  # the heartbeat thread calls waited_s too

    def begin_wait(self) -> None:
        """Mark the end of the step that was queued before this call."""
        if self._wait_begun is None:
            self._wait_begun = self._timestamp()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Make the copy stream current, on this device."""
        if not self._began:
            # device_preprocess may use tensors that the trainer's stream is still computing.
            self._stream.wait_stream(cuda.current_stream(self._device))
            self._began = True
        with cuda.stream(self._stream):
            yield

    def upload(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def mark(self) -> Any:
        event = cuda.Event()
        event.record(self._stream)
        return event

    def hand_over(self, event: Any, tensors: Iterable[Tensor]) -> None:
        """Make the trainer's stream wait for the event, and keep the tensors' memory for it."""
        trainer = cuda.current_stream(self._device)
        trainer.wait_event(event)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(trainer)
        self._waits.append((self._wait_begun, self._timestamp()))
        self._wait_begun = None
        if len(self._waits) > MAX_PENDING:
            self.waited_s()

    def waited_s(self) -> float:
        """Return the time that the trainer's stream was idle between steps.

        Does not wait for the device: events that have not occurred yet count in a later call.
        """
        with self._lock:
            while self._waits and self._waits[0][1].query():
                begun, ended = self._waits.popleft()
                self._waited_s += begun.elapsed_time(ended) / 1e3
            return self._waited_s

    def _timestamp(self) -> Any:
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._device))
        return event

"""One try at something remote: how long it may take, what it gave, why it failed.

In:    `RemoteOptions`, the user's limits.
Out:   an `Answer`, or a `Fault` with a reason that can be counted.
Where: fetch threads, and whichever thread lists files.
State: a `Patience` belongs to one attempt: when it began, and how fast bytes have been coming in.

Silence, a stall and a drip end alike: whatever the transport, fewer than `min_bytes_per_s` over
`stall_timeout` is too slow, and no attempt outlives `request_timeout`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.options import RemoteOptions


class Fault(Exception):
    """An attempt failed. `reason` is a short word to count by; `detail` has no secrets."""

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        retry_after: float | None = None,
        final: PenstockError | None = None,
        doubtful: bool = False,
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.retry_after = retry_after
        self.final = final
        """What to raise: trying again would not help."""
        self.doubtful = doubtful
        """Whether that is believed only once it was met several times: a proxy, a mirror or a portal may be at fault."""


class Answer(NamedTuple):
    """Bytes that came, and what was said of the file they are from."""

    data: bytes | bytearray | memoryview
    etag: str = ""
    total: int | None = None
    """The whole file's size."""


@dataclass(slots=True)
class Patience:
    """How long one attempt may still take. Used by the attempt's own thread, but for `cancel`."""

    limits: RemoteOptions
    deadline: float
    """In monotonic time, from whoever asks."""
    cancelled: bool = False
    began: float = field(default_factory=time.monotonic)
    _connect_by: float = 0.0
    _window: float = 0.0
    _bytes: int = 0
    _moved: float = 0.0
    """When the last of them came, or began to be due."""
    _on_cancel: Callable[[], None] | None = None
    # Reentrant, because a garbage collection may end the run on a thread that is in here.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.deadline = min(self.deadline, self.began + self.limits.request_timeout)
        self.connecting()
        self._window = self._moved = self.began

    def connecting(self) -> None:
        """A connection is begun: an attempt that is sent elsewhere makes several, each with its own time."""
        self._connect_by = min(self.deadline, time.monotonic() + self.limits.connect_timeout)

    def connect_s(self, shares: int = 1) -> float:
        """Seconds left for a connection, or for the next of several addresses that share them."""
        self.check()
        now = time.monotonic()
        if now >= self.deadline:
            raise self.ran_out()
        if now >= self._connect_by:
            raise Fault("connect", f"no connection after {now - self.began:.1f} s")
        return (self._connect_by - now) / shares

    def wait_s(self) -> float:
        """Seconds to wait for the next bytes."""
        now = time.monotonic()
        if now >= self.deadline:
            raise self.ran_out()
        # At least a moment: what has arrived is taken before anything is judged.
        return min(
            self.deadline - now,
            max(0.01, min(self._window, self._moved) + self.limits.stall_timeout - now),
        )

    def asked(self) -> None:
        """A request goes out, or the head of its answer is here: from now on bytes are due."""
        self._window = self._moved = time.monotonic()
        self._bytes = 0

    def moved(self, n: int) -> None:
        """Some bytes came in."""
        self._bytes += n
        self._moved = time.monotonic()
        self._judge("slow")

    def waited(self) -> None:
        """Nothing came for as long as `wait_s` said: a fault, unless enough came shortly before."""
        now = time.monotonic()
        if now >= self.deadline:
            raise self.ran_out()
        if now - self._moved >= self.limits.stall_timeout:  # however much came before that
            raise Fault("stall", f"0 bytes in {now - self._moved:.1f} s")
        self._judge("stall")

    def ran_out(self) -> Fault:
        """Too long without what was waited for."""
        now = time.monotonic()
        if now >= self.deadline:
            return Fault("deadline", f"not done after {now - self.began:.1f} s")
        return Fault("stall", f"{self._bytes} bytes in {now - self._window:.1f} s")

    def _judge(self, reason: str) -> None:
        now = time.monotonic()
        span = now - self._window
        if span < self.limits.stall_timeout:
            return
        if self._bytes < max(1.0, self.limits.min_bytes_per_s * span):
            raise Fault(reason, f"{self._bytes} bytes in {span:.1f} s")
        self._window, self._bytes = now, 0

    def check(self) -> None:
        """Whether somebody still waits for it."""
        if self.cancelled:
            raise Fault("cancelled", "nobody needs it any more")

    # From other threads

    def when_cancelled(self, wake: Callable[[], None] | None) -> None:
        """What wakes the attempt up from whatever it waits for. It must not wait itself."""
        with self._lock:
            self._on_cancel = wake
            if self.cancelled and wake is not None:
                wake()

    def cancel(self) -> None:
        """End the attempt: nobody needs it any more. Safe from any thread."""
        # Within the lock: once an attempt has taken its `wake` back, what that closes may be another's.
        with self._lock:
            self.cancelled = True
            if self._on_cancel is not None:
                self._on_cancel()


__all__ = ["Answer", "Fault", "Patience"]

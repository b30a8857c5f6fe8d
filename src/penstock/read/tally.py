"""What the network was asked for, and what came of it.

In:    each request, fault and pause, as it happens.
Out:   counts, for `stats` and the heartbeat.
Where: fetch threads add, anybody asks.
State: the counts, behind a lock.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """What the network was asked for. Shared by many threads."""

    requests: int = 0
    bytes: int = 0
    hedges: int = 0
    pause_s: float = 0.0
    connect_s: float = 0.0
    first_byte_s: float = 0.0
    body_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    """How long the last reads took, in seconds."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        *,
        requests: int = 0,
        bytes: int = 0,
        hedges: int = 0,
        pause_s: float = 0.0,
        fault: str = "",
    ) -> None:
        with self._lock:
            self.requests += requests
            self.bytes += bytes
            self.hedges += hedges
            self.pause_s += pause_s
            if fault:
                self.faults[fault] += 1

    def exchange(
        self, *, connect_s: float = 0.0, first_byte_s: float = 0.0, body_s: float = 0.0
    ) -> None:
        """A part of an exchange is over."""
        with self._lock:
            self.connect_s += connect_s
            self.first_byte_s += first_byte_s
            self.body_s += body_s

    def read(self, seconds: float) -> None:
        """A range has come."""
        with self._lock:
            self.recent.append(seconds)

    def times(self) -> dict[str, Any]:
        """Where fetches spend their time, added up over all threads, and how long the last ones took."""
        with self._lock:
            waits = sorted(self.recent)
            of = {f"p{p}_ms": round(1e3 * waits[min(len(waits) - 1, p * len(waits) // 100)], 3) if waits else 0.0
                  for p in (50, 95, 99)}  # fmt: skip
            return {
                "connect_s": round(self.connect_s, 6),
                "first_byte_s": round(self.first_byte_s, 6),
                "body_s": round(self.body_s, 6),
                "retry_s": round(self.pause_s, 6),
                **of,
                "requests": self.requests,
                "retries": self.faults.total(),
                "bytes": self.bytes,
            }

    def counts(self) -> dict[str, Any]:
        """Everything so far."""
        with self._lock:
            return {
                "requests": self.requests,
                "fetched_bytes": self.bytes,
                "hedges": self.hedges,
                "retry_wait_ms": round(1e3 * self.pause_s),
                **{f"fault {name}": n for name, n in self.faults.items()},
            }

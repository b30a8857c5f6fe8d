"""The shortest way from the queue to the trainer, for the usual case: batches stand ready.

In:    the queue of ready batches.
Out:   the next batch, or None where the long way has to be taken: none stands ready, or the stream is at its end.
Where: the trainer's thread.
State: none but the queue's. What is to be written down of a step is jotted down here and written when some have
       come together: after a step everything is out of the processor's caches, and it is code that has to
       be fetched back, not work, that `next()` would otherwise take most of its time for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter

import numpy as np

from penstock.encode.batch import Batch
from penstock.feed.prefetch import Prefetcher
from penstock.watch.telemetry import JOTTED, JOTTED_S, Telemetry


class _Forks:
    """Forks between the first process and this one. A forked child has a loader's batches and none of its threads."""

    count = 0

    @classmethod
    def add(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.add)  # os.getpid() at each batch would be a system call


class Quick:
    """Takes batches that stand ready."""

    def __init__(
        self, queue: Prefetcher[Batch], telemetry: Telemetry, low: Callable[[int], None], *, tensors: bool
    ) -> None:
        """`low` is told what is left in the queue while it is less than half full, and once when it no longer is."""
        self._queue = queue
        self._at_hand = queue.at_hand
        self._half = max(1, queue.capacity // 2)
        self._telemetry = telemetry
        self._jotted = telemetry.jotted
        self._low = low
        self._was_low = False
        self._tensors = tensors
        self._forks = _Forks.count

    def take(self) -> Batch | None:
        """A batch, at once or not at all. Whatever can be done without a call of Python's is."""
        begun = perf_counter()
        at_hand = self._at_hand
        left = len(at_hand) - 1
        if left <= self._half:
            self._queue.refill()
            left = len(at_hand) - 1
        if left < 0 or _Forks.count != self._forks:
            return None
        try:
            batch = at_hand.popleft()
        except IndexError:
            return None  # the queue was closed, by another thread
        if self._tensors and isinstance(batch.inputs, np.ndarray):
            batch.to_torch()
        low = left < self._half
        if low or self._was_low:
            self._was_low = low
            self._low(left)
        jotted = self._jotted
        now = self._queue.left_at = perf_counter()
        jotted.append((begun, now, batch._tokens, left))
        if len(jotted) >= JOTTED or now - jotted[0][0] > JOTTED_S:
            self._telemetry.settle()
        return batch

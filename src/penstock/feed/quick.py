"""The shortest way from the queue to the trainer, for the usual case: batches stand ready.

In:    the queue of ready batches.
Out:   the next batch, or None where the long way has to be taken: none stands ready or can be made without waiting, or
       the stream is at its end.
Where: the trainer's thread.
State: where the last batch came from; the rest is the queue's. What is to be written down of a step is jotted down here
       and written when some have come together: after a step everything is out of the processor's caches, and it is
       code that has to be fetched back, not work, that `next()` would otherwise take most of its time for.
"""

from __future__ import annotations

import os
from collections import deque
from time import perf_counter

import numpy as np

from penstock.encode.batch import Batch, Origin
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

    def __init__(self, queue: Prefetcher[Batch], telemetry: Telemetry, *, tensors: bool) -> None:
        self.origin: Origin | None = None
        """Of the last batch that was taken here, if it is the last one of all."""
        self.interrupted = False
        """Whether something like Ctrl-C came while a batch was taken: it may be lost."""
        self._queue = queue
        self._at_hand = queue.at_hand
        self._telemetry = telemetry
        self._jotted = telemetry.jotted
        self._tensors = tensors
        self._forks = _Forks.count

    def take(self) -> Batch | None:
        """A batch, at once or not at all. Whatever can be done without a call of Python's is."""
        begun = perf_counter()
        queue, at_hand = self._queue, self._at_hand
        try:
            if _Forks.count != self._forks:
                return None  # before anything is touched: a thread that is not here any more may have held its lock
            if len(at_hand) <= queue.look_at:
                queue.refill()
                if not at_hand:
                    queue.make_at_once(begun)
            try:
                batch = at_hand[0]
                if batch._left is not None:
                    batch.finish()
                at_hand.popleft()
            except IndexError:
                return None  # none stands ready, or another thread has closed the queue
            if self._tensors and isinstance(batch.inputs, np.ndarray):
                batch.to_torch()
            now = queue.left_at = perf_counter()
            jotted = self._jotted
            jotted.append((begun, now, batch._tokens, min(queue.room, queue.made - queue.moved + len(at_hand))))
            if len(jotted) >= JOTTED or now - jotted[0][0] > JOTTED_S:
                self._telemetry.settle()
            self.origin = batch._origin  # the last thing: a batch lost before that is given again
            return batch
        except Exception:
            raise
        except BaseException:  # Ctrl-C, anywhere: a batch may have been taken, and not handed out
            self.interrupted, self._at_hand = True, deque()
            raise

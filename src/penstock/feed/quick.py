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
from collections.abc import Callable
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


class Last:
    """What the short way leaves behind."""

    __slots__ = ("interrupted", "origin")

    def __init__(self) -> None:
        self.origin: Origin | None = None
        """Of the last batch that was taken this way, if it is the last one of all."""
        self.interrupted = False
        """Whether something like Ctrl-C came while a batch was taken: it may be lost."""


def shortcut(
    queue: Prefetcher[Batch], telemetry: Telemetry, last: Last, *, tensors: bool
) -> Callable[[], Batch | None]:
    """A function that takes a batch that stands ready, at once or not at all.

    A closure: what it needs lies together, and is not looked up by name in one object after the other.
    """
    at_hand, popleft, low, capacity = queue.at_hand, queue.at_hand.popleft, queue.low, queue.capacity
    jotted, jot, settle = telemetry.jotted, telemetry.jotted.append, telemetry.settle
    forks, now, due = _Forks.count, 0.0, 0.0

    def take() -> Batch | None:
        nonlocal forks, now, due
        begun = perf_counter()
        try:
            if _Forks.count != forks:
                return None  # before anything is touched: a thread that is not here any more may have held its lock
            if not at_hand:
                queue.left_at = max(queue.left_at, now)
                queue.make_at_once(begun)
            try:
                batch = at_hand[0]
                if batch._left is not None:
                    batch.finish()
                popleft()
            except IndexError:
                return None  # none stands ready, or another thread has closed the queue
            left = len(at_hand)
            if left < low:
                queue.attend()
            if tensors and isinstance(batch.inputs, np.ndarray):
                batch.to_torch()
            now = perf_counter()
            jot((begun, now, batch._tokens, left if left < capacity else capacity))
            if now > due or len(jotted) >= JOTTED:
                due = now + JOTTED_S
                settle()
            last.origin = batch._origin  # the last thing: a batch lost before that is given again
            return batch
        except Exception:
            raise
        except BaseException:  # Ctrl-C, anywhere: a batch may have been taken, and not handed out
            last.interrupted, forks = True, -1
            raise

    return take

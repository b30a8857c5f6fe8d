"""The shortest way from the queue to the trainer, for the usual case: batches stand ready.

In:    the queue of ready batches.
Out:   the next batch, or None where the long way has to be taken: none stands ready or can be made without waiting, or
       the stream is at its end.
Where: the trainer's thread; what it leaves behind is written down on the producer's.
State: which batches were taken and not written down yet; the rest is the queue's. After a step everything is out of the
       processor's caches, and it is memory that has to be fetched back, not work, that `next()` takes its time for: so the
       batch itself is not looked at, what is to be known of it was noted when it was put into the queue, and whatever is
       needed lies together.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from time import perf_counter
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, Origin
from penstock.feed.prefetch import Prefetcher
from penstock.watch.consumer import Ready
from penstock.watch.telemetry import Telemetry

JOTTED = 256
"""Batches that are taken this way before the trainer itself writes them down, where the producer has no time for it."""


Note = tuple[int, int, Origin | None]
"""What is to be known of a batch after it was taken: its index, its tokens, where it came from."""
note_of: Callable[[Batch], Note] = attrgetter("index", "_tokens", "_origin")
"""For the queue."""


def nothing_ready() -> Batch | None:
    """The short way where there is none."""
    return None


class Last:
    """What the short way leaves behind."""

    def __init__(self) -> None:
        self.jotted: list[tuple[float, float, int]] = []
        """Of each batch that was taken: when that began and ended, and how many were left in the queue."""
        self.interrupted = False
        """Whether something like Ctrl-C came while a batch was taken: it may be lost."""
        self.closed = False
        """Whether the short way is not to be gone any more."""
        self._notes: deque[Note] = deque()
        self._room = 0
        self.next = 0
        """The index of the first batch that was jotted down, or will be."""
        self.before: Origin | None = None
        """Of the batch before that one, if it was taken this way."""
        self._lock = (
            threading.RLock()
        )  # a signal's handler may ask for the state, wherever it comes in
        self._queue: Prefetcher[Batch] | None = None
        self._telemetry: Telemetry | None = None

    def follow(self, queue: Prefetcher[Batch], telemetry: Telemetry) -> None:
        """The batches of a queue are taken the short way from now on."""
        self._notes, self._room = queue.notes, queue.capacity
        self._queue, self._telemetry = queue, telemetry
        telemetry.jotted = self.written
        queue.meanwhile = self.meanwhile
        # No WeakSet: what it does when one of them goes may swallow a Ctrl-C.
        _FOLLOWING[:] = [ref for ref in _FOLLOWING if ref() is not None] + [weakref.ref(self)]

    def meanwhile(self) -> None:
        """Write down what was jotted down, on the producer's thread."""
        try:
            if self._telemetry is not None:
                self._telemetry.settle()
        except Exception:  # of somebody's log handler, say: that must not end the data
            traceback.print_exc()

    @property
    def origin(self) -> Origin | None:
        """Of the last batch that was taken this way, if it is the last one of all."""
        with self._lock:
            jotted = len(self.jotted)
            return (
                self.before
                if not jotted
                else self._notes[self.next + jotted - 1 - self._notes[0][0]][2]
            )

    def written(self, everything: bool) -> list[Ready]:
        """What was jotted down, to be written down; or all but the last, which says when a batch was last taken."""
        with self._lock:
            count = len(self.jotted) - (not everything)
            if count <= 0:
                return []
            jotted = self.jotted[:count]
            first = self.next - self._notes[0][0]
            notes = list(self._notes)[
                first : first + count
            ]  # made in one go: the producer may add to them meanwhile
            last, after = notes[-1][2], self.next + count
            # At once: nothing is called here, so no Ctrl-C comes in between.
            self.before = last
            self.next = after
            del self.jotted[:count]
            while self._notes and self._notes[0][0] < after:
                self._notes.popleft()
        room = self._room
        return [
            (begun, now, tokens, left if left < room else room)
            for (begun, now, left), (_, tokens, _) in zip(jotted, notes, strict=True)
        ]

    def close(self) -> None:
        """Have the long way taken from now on."""
        self.closed = True
        if self._queue is not None:
            self._queue.withdraw()

    def forked(self) -> None:
        """This is a child that has the batches and none of the threads, one of which may have held a lock."""
        self._lock = threading.RLock()
        if self._telemetry is not None:
            self._telemetry.unlock()
        self.close()


_FOLLOWING: list[weakref.ref[Last]] = []


def _forked() -> None:
    for ref in _FOLLOWING:
        last = ref()
        if last is not None:
            last.forked()


os.register_at_fork(
    after_in_child=_forked
)  # to look at each batch whether this is a child would take longer


def shortcut(
    queue: Prefetcher[Batch], telemetry: Telemetry, last: Last, *, tensors: bool
) -> Callable[[], Batch | None]:
    """A function that takes a batch that stands ready, at once or not at all."""
    last.follow(queue, telemetry)
    jotted = last.jotted
    elsewhere: deque[Batch] = deque()
    wrap: Callable[[Any], Any] | None = None
    if tensors:
        from torch import from_numpy as wrap

    def refill(begun: float) -> bool:
        """Make batches for somebody who only takes them, if that needs no waiting."""
        if last.closed:
            return False
        if jotted:
            queue.left_at = max(queue.left_at, jotted[-1][1])
        if len(jotted) >= JOTTED:
            telemetry.settle()
        queue.make_at_once(begun)
        return bool(queue.at_hand)

    # What it needs are defaults: these lie together, and are not looked up by name in one object after the other.
    def take(
        at_hand: deque[Batch] = queue.at_hand,
        pop: Callable[[], Batch] = queue.at_hand.popleft,
        jotted: list[tuple[float, float, int]] = last.jotted,
        clock: Callable[[], float] = perf_counter,
        low: int = queue.low,
        kind: type[Batch] = Batch,
        wrap: Callable[[Any], Any] | None = wrap,
    ) -> Batch | None:
        begun = clock()
        try:
            if not at_hand and not refill(begun):
                return None
            try:
                batch = pop()
            except IndexError:
                return None  # another thread has closed the queue
            if type(batch) is not kind:
                batch.finish(wrap)
            elif wrap is not None and isinstance(batch.inputs, np.ndarray):
                batch.to_torch()
            left = len(at_hand)
            if left < low:
                queue.attend()
            now = clock()
            # The last thing, and no call, after which a signal's handler might come in: a batch lost before that is given
            # again, and one that counts is on its way.
            jotted += ((begun, now, left),)
            return batch
        except BaseException:  # Ctrl-C, anywhere: a batch may have been taken, and not handed out
            # No calls here either: another Ctrl-C may be on its way.
            last.interrupted = last.closed = True
            queue.at_hand = elsewhere
            at_hand *= 0
            raise

    return take

"""The queue of ready batches, and the thread that fills it.

In:    a function that makes the next items, none at the end.
Out:   the items, in order; an exception where the function raised one.
Where: the function runs on the producer thread, `get` on the trainer's.
State: the items that wait, and one slot for each that may still be made. One buffer: a warmup adds
       slots for a while, and fills nothing else.
Cost:  two C-level queues; with a batch ready, `get` takes a few microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from penstock.errors import LoaderClosed, LoaderTimeout
from penstock.feed.pool import join_all

T = TypeVar("T")


WAKE_FOR = 4


class _End:
    """Follows the last item."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Keeps up to `capacity` items ready."""

    def __init__(self, produce: Callable[[], list[T]], capacity: int) -> None:
        self._produce = produce
        self._ready: SimpleQueue[T | _End] = SimpleQueue()
        self._slots: SimpleQueue[bool] = SimpleQueue()
        for _ in range(capacity):
            self._slots.put(True)
        self._capacity = capacity
        self._owed = 0
        self._surplus = 0
        self._end: _End | None = None
        self._stopped = False
        self._made = threading.Condition()
        self._waiting = False
        self._thread = threading.Thread(target=self._run, name="penstock-producer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        return max(0, self._ready.qsize() - (self._end is not None))

    def get(self, timeout: float | None = None) -> T | None:
        """The next item, or None at the end. The producer's exception is raised after its items."""
        try:
            item = self._ready.get(timeout=None if timeout is None else max(0.0, timeout))
        except Empty:
            raise LoaderTimeout(
                f"no batch within {timeout} s. Nothing is lost: ask again, or see where it is with stats()"
            ) from None
        if isinstance(item, _End):
            self._ready.put(item)  # for whoever asks again
            if item.error is not None:
                raise item.error
            return None
        if self._surplus > 0:
            self._surplus -= 1  # a slot that was lent for a warmup
        else:
            self._owed += 1
            # To wake the producer costs more than to take an item, so it is woken for several at
            # once while enough are ready.
            if self._owed >= min(WAKE_FOR, self._capacity // 2) or self._ready.qsize() <= self._capacity // 2:
                self._return_slots()
        return item

    def _return_slots(self) -> None:
        for _ in range(self._owed):
            self._slots.put(True)
        self._owed = 0

    def fill(self, items: int, timeout: float) -> int:
        """Wait until `items` are ready, or the end, a fault or the timeout comes first. Gives how many are."""
        deadline = time.monotonic() + timeout
        self._return_slots()
        extra = items - self._capacity - self._surplus
        for _ in range(extra):
            self._surplus += 1
            self._slots.put(True)
        with self._made:
            self._waiting = True
            try:
                while self.depth < items and self._end is None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._made.wait(left)
            finally:
                self._waiting = False
        self._take_back()
        return self.depth

    def _take_back(self) -> None:
        """Slots lent for a warmup that were not used are taken back; the others as their items go."""
        while self._surplus > 0:
            try:
                if not self._slots.get_nowait():
                    self._slots.put(False)  # it was the sign to stop
                    return
            except Empty:
                return
            self._surplus -= 1

    def stop(self) -> None:
        """Wake everybody who waits."""
        self._stopped = True
        self._slots.put(False)

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, and let go of the items."""
        joined = join_all([self._thread], timeout) if self._thread.ident is not None else True
        while joined and self._ready.qsize() > 0:
            self._ready.get_nowait()
        self._finish(LoaderClosed("the loader was shut down"))
        return joined

    def _run(self) -> None:
        try:
            while items := self._produce():
                for item in items:
                    if not self._slots.get() or self._stopped:
                        return
                    self._ready.put(item)
                    if self._waiting:
                        with self._made:
                            self._made.notify_all()
                del item, items  # while the next ones are made, these are the trainer's
            self._finish(None)
        except BaseException as error:  # it belongs to whoever calls get()
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self._end = _End(error)
        self._ready.put(self._end)
        with self._made:
            self._made.notify_all()

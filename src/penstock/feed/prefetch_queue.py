"""The bounded queue between the producer thread and the consumer.

The producer thread calls `produce` and appends; `get` pops. One condition guards all fields. The
queue stores the end of the stream, or the exception that ended it, and reports it after the items
before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import LoaderTimeout
from penstock.feed.affinity import pin
from penstock.feed.worker_pool import closed, join_all
from penstock.watch.stage_timer import OUT, WAIT, Clock

T = TypeVar("T")


class PrefetchQueue(Generic[T]):
    """Buffers up to `capacity` items."""

    def __init__(
        self,
        produce: Callable[[int], list[T]],
        capacity: int,
        *,
        clock: Clock,
        cpus: frozenset[int] | None,
        slots: Callable[[T], int],
        block: int = 1,
    ) -> None:
        """`produce(n)` returns up to n items, and none at the end. `slots` returns the share of the
        capacity that an item takes. Up to `block` items are made at once, even beyond the capacity,
        because waking a thread costs more than making a small item."""
        self._produce, self._slots, self._cpus, self._clock = produce, slots, cpus, clock
        self._block = block
        self._timeline = clock.new_timeline("penstock-producer")
        # Reentrant: garbage collection may close a loader on a thread that holds the lock.
        # Used directly, because Ctrl-C inside `Condition.__exit__` could leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[tuple[T, int]] = deque()
        self._used = 0
        self.capacity = self._limit = capacity
        self._low = capacity // 2
        """A full queue is refilled once it is half empty, so that threads seldom wake up."""
        self._blocked = self._ended = self._stopped = False
        self._error: BaseException | None = None
        self.first_made: float | None = None
        """The monotonic time at which the first item was ready."""
        self._thread = threading.Thread(target=self._run, name="penstock-producer", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """The number of buffered items, at most the capacity."""
        return min(len(self._items), self._limit)

    def get(self, timeout_s: float | None = None) -> T | None:
        """Return the next item, or None at the end. Raise the producer's exception after its items."""
        with self._lock:
            if not self._items and not self._waited(1, timeout_s):
                raise LoaderTimeout(
                    f"no batch within {timeout_s} s. Nothing is lost: ask again, or see where the "
                    "time goes with stats()."
                )
            if self._items:
                item, slots = self._items.popleft()
                self._used -= slots
                if self._blocked and self._used <= self._low:
                    self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            raise closed()

    def fill(self, items: int, timeout_s: float) -> int:
        """Wait until `items` are buffered, even beyond the capacity. Return their number."""
        with self._lock:
            self._limit = max(self.capacity, items)
            self._low = self._limit - 1
            self._changed.notify_all()
            self._waited(items, timeout_s)
            filled = self.depth
            self.resize(self.capacity)
            return filled

    def resize(self, capacity: int) -> None:
        with self._lock:
            self.capacity = self._limit = capacity
            self._low = capacity // 2
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the producer after its current item, and drop buffered items."""
        with self._lock:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        return join_all([self._thread], timeout_s)

    def _waited(self, items: int, timeout_s: float | None) -> bool:
        """Wait for items. Return False after a timeout, and True also at the end of the stream."""

        def there() -> bool:
            return len(self._items) >= items or self._ended or self._stopped

        if there():
            return True
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._clock.stage(WAIT, self._timeline):
            return self._changed.wait_for(there, timeout_s)

    # On the producer thread

    def _run(self) -> None:
        self._clock.adopt(self._timeline)
        try:
            pin(self._cpus)
            wanted = 1  # the first item does not wait for others
            while (made := self._produce(wanted)) and self._put(made):
                wanted = min(2 * wanted, self._block)
        except BaseException as error:  # raised by `get` after the items before it
            self._error = error
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def _put(self, made: list[T]) -> bool:
        """Wait for room and append items. Return False if the queue was stopped."""
        items = [(item, self._slots(item)) for item in made]
        with self._lock:
            if self.first_made is None:
                self.first_made = time.monotonic()
            if self._used >= self._limit:
                self._blocked = True
                with self._clock.stage(OUT):
                    self._changed.wait_for(lambda: self._used <= self._low or self._stopped)
                self._blocked = False
            if self._stopped:
                return False
            self._items.extend(items)
            self._used += sum(slots for _, slots in items)
            self._changed.notify_all()
        return True

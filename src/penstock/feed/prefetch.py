"""The queue of ready batches, and the thread that fills it.

In:    a function that makes the next items, none at the end.
Out:   the items, in order; an exception where the function raised one.
Where: the function runs on the producer thread, `get` on the trainer's. A trainer that does nothing but take items and
       finds none makes them itself: to be woken for each list takes longer than to make it.
State: the items that wait, and one slot for each that may still be made. One buffer: a warmup adds
       slots for a while, and fills nothing else.
Cost:  two C-level queues; with a batch ready, `get` takes a few microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from penstock.errors import LoaderClosed, LoaderTimeout
from penstock.feed.pin import pin
from penstock.feed.pool import join_all
from penstock.watch.spans import OUT, WAIT, Clock, Quiet

T = TypeVar("T")

EAGER_S = 200e-6
"""Whoever comes back sooner has nothing to do meanwhile that the producer could work beside."""
LEASE_S = 0.01
"""The producer goes on by itself when nobody has made items in its place for so long."""


class _End:
    """Follows the last item."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Keeps up to `capacity` items ready."""

    def __init__(
        self,
        produce: Callable[[], list[T]],
        capacity: int,
        cpus: frozenset[int] | None = None,
        weigh: Callable[[T], int] | None = None,
        clock: Clock | None = None,
        at_once: Callable[[], list[T]] | None = None,
    ) -> None:
        """`weigh` says how many slots an item takes, where they differ in size; by default one. `at_once` gives the next
        items if they can be made without waiting for anybody, else none."""
        self._clock = clock or Quiet()
        self._track = self._clock.new_track("penstock-producer")
        self._produce = produce
        self._cpus = cpus
        # Items travel in the lists in which they were made: to wake a thread costs more than to
        # hand something over, so it is done once for all of them.
        self._ready: SimpleQueue[list[T] | _End] = SimpleQueue()
        self.at_hand: deque[T] = deque()
        """Items that have left the queue and wait on this side of it: `get` takes them from there, or whoever may."""
        self._slots: SimpleQueue[bool] = SimpleQueue()
        for _ in range(capacity):
            self._slots.put(True)
        self.capacity = self.room = capacity
        """How many items may stand ready: `resize` changes it. And how many at most, with those of a warmup."""
        self._weigh = weigh
        self._weights: deque[int] = deque()
        self._blocked = False
        self.made = self.moved = 0
        """Items so far; of these, those that have left the queue for this side of it, or been taken."""
        self.look_at = 0
        """With no more items at hand than this, there is something for `refill` to do."""
        self._counted = self._owed = self._surplus = 0
        self.first_made: float | None = None
        """When the first item was ready, in monotonic time."""
        self._end: _End | None = None
        self._stopped = False
        self._making = threading.Lock()
        """Held from the making of items until they are handed over, so that they stay in order."""
        self._helps = weigh is None and cpus is None
        self._at_once = at_once
        self._turn = threading.Condition()
        self._lease = 0.0
        """Until then the producer leaves the making of items to whoever takes them."""
        self.left_at = 0.0
        """When the last item was taken."""
        self._filled = threading.Condition()
        self._waiting = False
        self._thread = threading.Thread(target=self._run, name="penstock-producer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        """Items that stand ready. Of those that were made at once there may be more: they are yet to be finished."""
        return min(self.room, self.made - self.moved + len(self.at_hand))

    def get(self, timeout: float | None = None) -> T | None:
        """The next item, or None at the end. The producer's exception is raised after its items."""
        if not self.at_hand:
            if self._weigh is not None:
                self._return_slots()  # a large item may need every one of them
            try:
                items = self._get(None if timeout is None else max(0.0, timeout))
            except Empty:
                raise LoaderTimeout(
                    f"no batch within {timeout} s. Nothing is lost: ask again, or see where it is with stats()"
                ) from None
            if isinstance(items, _End):
                if self._ready.empty():
                    self._ready.put(items)  # for whoever asks again
                if items.error is not None:
                    raise items.error
                return None
            self._move(items)
        try:
            item = self.at_hand.popleft()
        except IndexError:
            raise LoaderClosed("the loader was shut down, or another thread took the batch") from None
        self._give_back()
        self.left_at = perf_counter()
        return item

    def refill(self) -> None:
        """Bring over what stands ready, and give back the slots of what was taken, if they are worth waking anybody."""
        self._give_back()
        while self._ready.qsize() > 0:
            items = self._ready.get_nowait()
            if isinstance(items, _End):
                self._ready.put(items)  # for `get`
                return
            self._move(items)

    def _move(self, items: list[T]) -> None:
        self.at_hand.extend(items)
        self.moved += len(items)
        self._look_later()

    def _count(self) -> None:
        """The slots of items that were taken since the last time are owed, but for those lent for a warmup."""
        taken = self.moved - len(self.at_hand) - self._counted
        self._counted += taken
        weight = taken if self._weigh is None else sum(self._weights.popleft() for _ in range(taken))
        lent = min(weight, self._surplus)
        self._surplus -= lent
        self._owed += weight - lent
        self._look_later()

    def _look_later(self) -> None:
        """When enough of what is at hand has been taken for its slots to be worth giving back, or all of it."""
        self.look_at = max(0, self.moved - self._counted + self._owed - self._surplus - self.capacity // 2)

    def _get(self, timeout: float | None) -> list[T] | _End:
        try:
            return self._ready.get_nowait()
        except Empty:
            pass
        now = perf_counter()
        if self._helps and timeout is None and now - self.left_at < EAGER_S:
            self._lease = now + LEASE_S
            if self._making.acquire(blocking=False):
                try:
                    return self._make_here()
                finally:
                    self._making.release()
        elif self._lease:
            self._end_lease()
        with self._clock.stage(WAIT, self._track):
            return self._ready.get(timeout=timeout)

    def make_at_once(self, now: float) -> None:
        """Make items for somebody who only takes them and has none at hand, if that needs no waiting."""
        if not self._helps or self._at_once is None or now - self.left_at >= EAGER_S or not self._ready.empty():
            return
        if self._making.acquire(blocking=False):
            try:
                if self._end is None and self._ready.empty():
                    self._move(self._make_instead(self._at_once))
            finally:
                self._making.release()

    def _make_here(self) -> list[T] | _End:
        """What the producer would make next, by whoever wants it."""
        try:
            return self._ready.get_nowait()  # it came just now
        except Empty:
            return self._make_instead(self._produce) or self._end or self._finish(None)

    def _make_instead(self, produce: Callable[[], list[T]]) -> list[T]:
        """Make items in the producer's place. None are made where that fails: the end says why."""
        try:
            items = self._make(produce)
        except Exception as error:
            self._finish(error)
            return []
        except BaseException:  # Ctrl-C, anywhere: what is half done cannot be gone on with
            self.stop()
            raise
        if items:
            self.made += len(items)
            self._return_slots()
            # There are as many slots, but for those that a warmup gets back, and for items that take no room yet.
            self._surplus += len(items)
            self._take_back(len(items))
            self._lease = perf_counter() + LEASE_S
        return items

    def _end_lease(self) -> None:
        with self._turn:
            self._lease = 0.0
            self._turn.notify()

    def _give_back(self) -> None:
        # To wake the producer costs more than to take an item, and half of the queue is left to take while it makes
        # more: it is woken for several at once.
        self._count()
        if self._owed >= self.capacity // 2:
            self._return_slots()

    def _return_slots(self) -> None:
        self._count()
        for _ in range(self._owed):
            self._slots.put(True)
        self._owed = 0
        self._look_later()

    def fill(self, items: int, timeout: float) -> int:
        """Wait until `items` are ready, or the end, a fault or the timeout comes first. Gives how many are."""
        deadline = time.monotonic() + timeout
        self.room = max(self.capacity, items)
        self._end_lease()
        self._return_slots()
        for _ in range(items - self.capacity - self._surplus):
            self._surplus += 1
            self._slots.put(True)
        with self._filled:
            self._waiting = True
            try:
                # Large items may fill all slots before they are as many as was asked for.
                while self.depth < items and self._end is None and not (self._blocked and self._weigh is not None):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._filled.wait(left)
            finally:
                self._waiting = False
        self._take_back(self._surplus)
        return self.depth

    def resize(self, capacity: int) -> None:
        """Keep more or fewer items ready from now on. On the thread that takes them."""
        self._return_slots()  # of a small queue, these may be all there are
        change = capacity - self.capacity
        self.capacity = self.room = capacity
        if change > 0:
            back = min(change, self._surplus)
            self._surplus -= back
            for _ in range(change - back):
                self._slots.put(True)
        else:
            self._surplus -= change
            self._take_back(self._surplus)
        self._look_later()

    def _take_back(self, most: int) -> None:
        """Slots that were lent and not used are taken back, so many at most; the others as their items go."""
        while self._surplus > 0 and most > 0:
            try:
                if not self._slots.get_nowait():
                    self._slots.put(False)  # it was the sign to stop
                    return
            except Empty:
                return
            self._surplus -= 1
            most -= 1

    def stop(self) -> None:
        """Wake everybody who waits."""
        self._stopped = True
        self._slots.put(False)
        self._end_lease()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, and for whoever makes items in its place, and let go of the items."""
        deadline = time.monotonic() + timeout
        joined = join_all([self._thread], timeout) if self._thread.ident is not None else True
        if self._making.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._making.release()
        else:
            joined = False
        while joined and self._ready.qsize() > 0:
            self._ready.get_nowait()
        self.at_hand.clear()
        self._finish(LoaderClosed("the loader was shut down"))
        return joined

    def _run(self) -> None:
        try:
            if self._cpus is not None:
                pin(self._cpus)
            self._clock.adopt(self._track)
            while self._await_turn():
                with self._making:
                    if self._end is not None or self._stopped:
                        return
                    items = self._make(self._produce)
                    if not items:
                        self._finish(None)
                        return
                    if not self._hand_out(items):
                        return
                    del items  # while the next ones are made, these are the trainer's
        except BaseException as error:  # it belongs to whoever calls get()
            self._finish(error)

    def _await_turn(self) -> bool:
        """Wait until there is room for an item at least, and nobody else makes them. False if it is time to stop."""
        while True:
            if self._lease:
                with self._turn:
                    while (left := self._lease - perf_counter()) > 0 and not self._stopped:
                        self._turn.wait(left)
                    self._lease = 0.0
            if self._weigh is not None or not self._slot():
                return self._weigh is not None and not self._stopped
            if not self._lease:
                return True
            self._slots.put(True)  # somebody has begun to make items meanwhile, and needs it

    def _hand_out(self, items: list[T]) -> bool:
        """Hand items over as there is room for them. False if it is time to stop."""
        first = 0
        for i in range(len(items)):
            if self._stopped:
                return False
            if i > first and self._slots.qsize() < self._weight(items[i]):
                # No room for the next one: those that have theirs do not wait for it.
                self._hand_over(items[first:i])
                first = i
            if (i or self._weigh is not None) and not self._acquire(items[i]):
                return False
        self._hand_over(items[first:])
        return True

    def _make(self, produce: Callable[[], list[T]]) -> list[T]:
        with self._clock.stage("pack") as track:
            items = produce()
        track.count("batch", len(items))
        return items

    def _weight(self, item: T) -> int:
        return 1 if self._weigh is None else max(1, min(self._weigh(item), self.capacity))

    def _acquire(self, item: T) -> bool:
        """Wait for the slots that an item takes. False if it is time to stop."""
        weight = self._weight(item)
        if self._weigh is not None:
            self._weights.append(weight)
        for _ in range(weight):
            if self._weigh is not None and self._slots.empty():
                self._blocked = True
                self._wake()
            if not self._slot():
                return False
        self._blocked = False
        return True

    def _slot(self) -> bool:
        """Wait for a slot. False if it is time to stop."""
        try:
            return self._slots.get_nowait() and not self._stopped
        except Empty:
            pass
        with self._clock.stage(OUT):
            return self._slots.get() and not self._stopped

    def _hand_over(self, items: list[T]) -> None:
        if self.first_made is None:
            self.first_made = time.monotonic()
        self.made += len(items)
        self._ready.put(items)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            with self._filled:
                self._filled.notify_all()

    def _finish(self, error: BaseException | None) -> _End:
        end = self._end = _End(error)
        self._ready.put(end)
        with self._filled:
            self._filled.notify_all()
        return end

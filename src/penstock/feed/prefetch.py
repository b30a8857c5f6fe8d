"""The queue of ready batches, and the thread that fills it.

In:    a function that makes the next items, none at the end.
Out:   the items, in order; an exception where the function raised one.
Where: the function runs on the producer thread, `get` on the trainer's. A trainer that does nothing but take items and
       finds none makes them itself: to be woken for each list takes longer than to make it.
State: the items that stand ready. How many more may be made follows from their number: a warmup asks for more of them
       for a while, and fills nothing else.
Cost:  with a batch ready, `get` takes a few microseconds and wakes nobody: the producer looks by itself, about when
       half of the queue has been taken, and is woken only where it runs low sooner.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.errors import LoaderClosed, LoaderTimeout
from penstock.feed.affinity import pin
from penstock.feed.pool import join_all
from penstock.watch.spans import OUT, WAIT, Clock, Quiet

T = TypeVar("T")

EAGER_S = 200e-6
"""Whoever comes back sooner has nothing to do meanwhile that the producer could work beside."""
LEASE_S = 0.01
"""The producer goes on by itself when nobody has made items in its place for so long."""
NAP_S = (0.5e-3, 0.25)
"""The producer sleeps no shorter and no longer than this before it looks again."""


def _nothing() -> None:
    """Nothing to do meanwhile."""


class _End(NamedTuple):
    """Follows the last item."""

    error: BaseException | None


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
        note: Callable[[T], Any] | None = None,
    ) -> None:
        """`weigh` says how much room an item takes, where they differ in size; by default 1. `at_once` gives the next
        items if they can be made without waiting for anybody, else none. `note` says what is to be known of an item that
        has been taken, by whoever took it without a look at it."""
        self._clock = clock or Quiet()
        self._track = self._clock.new_track("penstock-producer")
        self._produce, self._at_once, self._note = produce, at_once, note
        self._cpus = cpus
        self.at_hand: deque[T] = deque()
        """Items that stand ready: `get` takes them from there, or whoever may."""
        self.notes: deque[Any] = deque()
        """Of the items at hand, and of those that were taken from there by others than `get`: these let go of them."""
        self.meanwhile: Callable[[], None] = _nothing
        """Done by the producer where it has made what is needed for a while."""
        self._bell: SimpleQueue[bool] = SimpleQueue()
        """Rung for whoever waits for an item."""
        self._wanted = False
        self._weigh = weigh
        self._weights: deque[int] = deque()
        """Of the items at hand, where they differ; for the producer."""
        self._blocked = False
        self._handed = self._seen = 0
        """Items that were put at hand so far; those that were taken, as far as the producer has noticed."""
        self.first_made: float | None = None
        """When the first item was ready, in monotonic time."""
        self._end: _End | None = None
        self._stopped = False
        self._making: Any = threading.RLock()
        """Held, once, while items are made, so that they stay in order. It knows whose it is: Ctrl-C may take and leave it."""
        self._helps = weigh is None and cpus is None
        self._turn = threading.Condition()
        self._asleep = False
        self._pace_s = 1e-3
        """About how long somebody takes for an item, as the producer has seen it."""
        self._lease = 0.0
        """Until then the producer leaves the making of items to whoever takes them."""
        self.left_at = 0.0
        """When the last item was taken."""
        self._in_vain = False
        """Whether somebody has come back for an item at once, found none, and is on the way to wait for it."""
        self._filled = threading.Condition()
        self._waiting = False
        self.capacity = self.room = self._limit = self.low = 0
        self._resize(capacity)
        self._thread = threading.Thread(target=self._run, name="penstock-producer", daemon=True)

    def _resize(self, capacity: int) -> None:
        self.capacity = self._limit = capacity
        """How many items may stand ready, and how many at the moment: more while a warmup asks for them."""
        self.room = capacity
        """What `depth` goes up to: of items made at once there may be more, which are yet to be finished."""
        self.low = max(1, capacity // 4)
        """With fewer items than this, the producer is woken."""

    def start(self) -> None:
        self._thread.start()

    @property
    def depth(self) -> int:
        """Items that stand ready."""
        return min(self.room, len(self.at_hand))

    # Whoever takes items

    def get(self, timeout: float | None = None) -> T | None:
        """The next item, or None at the end. The producer's exception is raised after its items."""
        if not self.at_hand:
            self._await_item(
                None if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            )
            if not self.at_hand and self._end is not None:
                if self._end.error is not None:
                    raise self._end.error
                return None
        try:
            item = self.at_hand.popleft()
        except IndexError:
            raise LoaderClosed(
                "the loader was shut down, or another thread took the batch"
            ) from None
        if self.notes:
            self.notes.popleft()
        self.attend()
        self.left_at, self._in_vain = perf_counter(), False
        return item

    def withdraw(self) -> None:
        """Let those who take from `at_hand` find nothing there any more."""
        gone, self.at_hand = self.at_hand, deque()
        gone.clear()

    def attend(self) -> None:
        """Wake the producer, if it sleeps and few items are left, or a large one may wait for room."""
        if self._asleep and (self._weigh is not None or len(self.at_hand) < self.low):
            self._wake()

    def _await_item(self, timeout: float | None) -> None:
        now = perf_counter()
        eager = self._in_vain or now - self.left_at < EAGER_S
        if self._helps and timeout is None and eager:
            self._lease = now + LEASE_S
            self._make_here(self._produce, all_there_is=True)
        elif self._lease:
            self._end_lease()
        if self.at_hand or self._end is not None:
            return
        deadline = None if timeout is None else now + timeout
        with self._clock.stage(WAIT, self._track):
            while True:
                self._wanted = True
                if self.at_hand or self._end is not None:
                    break  # it came just now
                if self._lease:
                    self._wake()  # the producer had begun to make some, or to leave it to this one
                self.attend()
                try:
                    self._bell.get(
                        timeout=None if deadline is None else max(0.0, deadline - perf_counter())
                    )
                except Empty:
                    self._wanted = self._in_vain = False
                    raise LoaderTimeout(
                        f"no batch within {timeout} s. Nothing is lost: ask again, or see where it is with stats()"
                    ) from None
        self._wanted = False

    def make_at_once(self, now: float) -> None:
        """Make items for somebody who only takes them and has none at hand, if that needs no waiting."""
        if not self._helps or self._at_once is None or now - self.left_at >= EAGER_S:
            self._in_vain = False
            return
        self._make_here(self._at_once, all_there_is=False)
        self._in_vain = not self.at_hand

    def _make_here(self, produce: Callable[[], list[T]], all_there_is: bool) -> None:
        """Make items, if nobody does so already and there are none. `all_there_is`: if none come, this is the end."""
        if self._making._is_owned() or not self._making.acquire(blocking=False):
            return
        try:
            if (
                not self.at_hand
                and self._end is None
                and not self._make_instead(produce)
                and all_there_is
            ):
                self._finish(None)
        finally:
            with suppress(RuntimeError):  # a signal's handler has shut the loader down meanwhile
                self._making.release()

    def _make_instead(self, produce: Callable[[], list[T]]) -> bool:
        """Make items in the producer's place. False if there are none; where that fails, the end says why."""
        try:
            items = self._make(produce)
        except Exception as error:
            self._finish(error)
            return True
        except BaseException:  # Ctrl-C, anywhere: what is half done cannot be gone on with
            self.stop()
            raise
        if items:
            self.room = self.capacity  # what a warmup has filled up has been taken
            self._put(items)
            self._lease = perf_counter() + LEASE_S
        return bool(items)

    def _end_lease(self) -> None:
        self._lease = 0.0
        self._wake()

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def fill(self, items: int, timeout: float) -> int:
        """Wait until `items` are ready, or the end, a fault or the timeout comes first. Gives how many are."""
        deadline = time.monotonic() + timeout
        self.room = self._limit = max(self.capacity, items)
        with self._filled:
            self._waiting, self._blocked = True, False
            try:
                self._end_lease()
                # Large items may fill all room before they are as many as was asked for.
                while (
                    self.depth < items
                    and self._end is None
                    and not (self._blocked and self._weigh is not None)
                ):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._filled.wait(left)
            finally:
                self._waiting = False
                self._limit = self.capacity
        return self.depth

    def resize(self, capacity: int) -> None:
        """Keep more or fewer items ready from now on. On the thread that takes them."""
        self._resize(capacity)
        self._wake()

    def stop(self) -> None:
        """Wake everybody who waits."""
        self._stopped = True
        self._end_lease()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end, and for whoever makes items in its place, and let go of the items."""
        deadline = time.monotonic() + timeout
        while (
            self._making._is_owned()
        ):  # Ctrl-C took it and left: nobody makes anything here any more
            self._making.release()
        joined = join_all([self._thread], timeout) if self._thread.ident is not None else True
        if self._making.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._making.release()
        else:
            joined = False
        self.at_hand.clear()
        self._end = _End(LoaderClosed("the loader was shut down"))
        self._ring()
        return joined

    # The producer

    def _run(self) -> None:
        try:
            if self._cpus is not None:
                pin(self._cpus)
            self._clock.adopt(self._track)
            while self._await_turn():
                self.meanwhile()
                with self._making:
                    if self._lease and not self._wanted:
                        continue  # whoever takes items made some meanwhile, and goes on
                    if not self._make_some():
                        break
        except BaseException as error:  # it belongs to whoever calls get()
            self._finish(error)
        if self._stopped:
            self._finish(LoaderClosed("the loader was shut down"))

    def _make_some(self) -> bool:
        """Make the next items and put them at hand. False if these were all."""
        if self._end is not None or self._stopped:
            return False
        try:
            if items := self._make(self._produce):
                return self._hand_out(items)
            self._finish(None)
        except (
            BaseException
        ) as error:  # told before anybody else may make what would have come after it
            self._finish(error)
        return False

    def _await_turn(self) -> bool:
        """Wait until there is room for an item at least, and nobody else makes them. False if it is time to stop."""
        while not self._stopped:
            if self._lease:
                with self._turn:
                    while (
                        (left := self._lease - perf_counter()) > 0
                        and not self._stopped
                        and not self._wanted
                    ):
                        self._turn.wait(left)
                    self._lease = 0.0
            elif (
                self._weigh is not None or self._room() > 0
            ):  # how large an item is shows when it is made
                return True
            else:
                self._nap(1)
        return False

    def _hand_out(self, items: list[T]) -> bool:
        """Put items at hand as there is room for them. False if it is time to stop."""
        first = 0
        for i, item in enumerate(items):
            if self._stopped:
                return False
            weight = 1 if self._weigh is None else max(1, min(self._weigh(item), self.capacity))
            if self._room() - (i - first) < weight:
                # No room for this one: those that have theirs do not wait for it.
                self._put(items[first:i])
                first = i
                if not self._await_room(weight):
                    return False
            if self._weigh is not None:
                self._put([item], weight)
                first = i + 1
        self._put(items[first:])
        return True

    def _room(self) -> int:
        """How much may still be put at hand."""
        if self._weigh is not None:
            while len(self._weights) > len(self.at_hand):
                self._weights.popleft()
            return self._limit - sum(self._weights)
        taken = self._handed - len(self.at_hand)
        # What was taken is noticed when it is half of the queue: to make an item or two is not worth the while.
        if taken - self._seen >= self._limit // 2 or self._waiting or len(self.at_hand) < self.low:
            self._seen = taken
        return self._limit - self._handed + self._seen

    def _await_room(self, weight: int) -> bool:
        """Wait until there is so much room. False if it is time to stop."""
        while self._room() < weight and not self._stopped:
            self._blocked = True
            self._tell_filler()
            self._nap(weight)
        self._blocked = False
        return not self._stopped

    def _nap(self, weight: int) -> None:
        """Sleep until about half of the queue has been taken, or somebody wakes it."""
        self.meanwhile()
        with self._clock.stage(OUT), self._turn:
            self._asleep = (
                True  # before it looks once more: whoever takes an item looks at this after it
            )
            before, begun = len(self.at_hand), perf_counter()
            if not self._stopped and self._room() < weight:
                wanted = max(1, self._limit // 2 - (self._handed - before - self._seen))
                self._turn.wait(min(max(wanted * self._pace_s, NAP_S[0]), NAP_S[1]))
                taken, took = before - len(self.at_hand), perf_counter() - begun
                # Where nobody takes anything, it looks less and less often.
                self._pace_s = took / taken if taken > 0 else min(2 * self._pace_s, NAP_S[1])
            self._asleep = False

    def _make(self, produce: Callable[[], list[T]]) -> list[T]:
        with self._clock.stage("pack") as track:
            items = produce()
        track.count("batch", len(items))
        return items

    def _put(self, items: list[T], weight: int = 1) -> None:
        if not items:
            return
        if self.first_made is None:
            self.first_made = time.monotonic()
        if self._weigh is not None:
            self._weights.append(weight)
        if self._note is not None:
            self.notes.extend(map(self._note, items))
        self.at_hand.extend(items)
        self._handed += len(items)
        self._ring()

    def _ring(self) -> None:
        if self._wanted:
            self._wanted = False
            self._bell.put(True)
        self._tell_filler()

    def _tell_filler(self) -> None:
        if self._waiting:
            with self._filled:
                self._filled.notify_all()

    def _finish(self, error: BaseException | None) -> None:
        if self._end is None:
            self._end = _End(error)
        self._ring()

"""Fetch the first items of any iterator before the first step.

One thread, "penstock-warmup", fills one buffer. With `prefetch` it keeps reading ahead; without, it
ends with the warmup, and the consumer fetches the rest itself. If the iterator has a `state_dict`,
a copy of its state is kept with each buffered item. A loader of ours fills its own queue instead.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from penstock.config import whole_number
from penstock.errors import ConfigError, LoaderClosed, StateError

log = logging.getLogger("penstock")

T = TypeVar("T")

BATCHES = 8
QUICK_S = 0.1
"""An "auto" warmup waits for one item only if that took no longer than this."""
CLOSE_S = 5.0
"""How long `close` waits for the item that is being fetched."""

_NOTHING: Any = object()


class Warmup(NamedTuple):
    """The result of a warmup: batches requested, batches ready, and how long it waited."""

    requested: int
    filled: int
    wait_ms: float


class EventSink(Protocol):
    """Receives the event of a warmup: a `Heartbeat`, or anything with its `event`."""

    def event(self, msg: str, **fields: Any) -> Any: ...


class WarmedIterator(Iterator[T]):
    """One pass over a loader whose first items were fetched already. Close it, or use `with`."""

    def __init__(self, iterable: Any, own: Any, first: Any) -> None:
        self.result = Warmup(0, 0, 0.0)
        self._iterable, self._own, self._first = iterable, own, first
        # On the caller's thread: a DataLoader draws its seed here.
        iterator = iter(iterable)
        if first is not _NOTHING and iterator is not iterable:
            log.warning(
                "a %s starts a new pass, so a first batch that was taken from it comes again. "
                "Pass the iterator that it was taken from.", type(iterable).__name__,
            )  # fmt: skip
        self._buffer: _Buffer[T] = _Buffer(iterator, _state_of(iterable, iterator))
        # The thread refers to the buffer and not to this object, so garbage collection ends it.
        weakref.finalize(self, self._buffer.stop)

    def __next__(self) -> T:
        first, self._first = self._first, _NOTHING
        return self._buffer.next() if first is _NOTHING else first

    def __len__(self) -> int:
        return len(self._iterable)

    def __bool__(self) -> bool:
        return True  # also without a length

    def queue_depth(self) -> int:
        """Return how many items are buffered, not counting a first one passed by the caller."""
        return int(self._own.queue_depth()) if self._own is not None else self._buffer.depth

    def state_dict(self) -> Any:
        """Return the loader's state after the last item handed out, however far it was read ahead."""
        if self._first is not _NOTHING:
            raise StateError(
                "the state before the first batch is unknown, because it was fetched before the warmup. "
                "Take that batch first, or save the loader's state before fetching it."
            )
        return self._buffer.state()

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Release the loader and the buffer, and join the thread. Safe to call again.

        A stuck iterator cannot be interrupted: then this logs a warning and returns False after
        the timeout. A loader of ours is shut down.
        """
        self._first, self._iterable = _NOTHING, None
        if self._own is not None:
            self._own.shutdown()
        return self._buffer.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def warmup_loader(
    iterable: Iterable[T],
    batches: int | Literal["auto"] = BATCHES,
    timeout: float = 30.0,
    *,
    prefetch: int | None = None,
    heartbeat: EventSink | None = None,
) -> WarmedIterator[T]:
    """Fetch the first items of a loader in the background; wait for them or until the timeout.

    batches: how many. "auto" waits for one and, if that took over 0.1 s, for `prefetch` (or 8).
        0 turns it off: no thread, nothing is fetched ahead.
    timeout: seconds to wait at most. An item that is being fetched then comes next. 0 turns it off.
    prefetch: items to keep buffered afterwards. More hide longer delays and take memory. None or 0:
        each item is fetched on demand. Refused for a loader of ours, which has its own queue.
    heartbeat: receives an event `loader_warmup`, with its own prefix if it has one.
    """
    return warmup_loader_with_first_batch(
        iterable, _NOTHING, batches, timeout, prefetch=prefetch, heartbeat=heartbeat
    )


def warmup_loader_with_first_batch(
    iterable: Iterable[T],
    first: T,
    batches: int | Literal["auto"] = BATCHES,
    timeout: float = 30.0,
    *,
    prefetch: int | None = None,
    heartbeat: EventSink | None = None,
) -> WarmedIterator[T]:
    """Like `warmup_loader`, for a caller that has the first item already: it comes first.

    iterable: the iterator that `first` was taken from.
    """
    if batches != "auto":
        batches = whole_number("batches", batches, 0)
    capacity = whole_number("prefetch", prefetch or 0, 0)
    if not timeout >= 0:
        raise ConfigError(f"timeout={timeout!r}: needs a number of seconds, at least 0")
    own: Any = iterable if hasattr(iterable, "next_batch") and hasattr(iterable, "warmup") else None
    if own is not None and prefetch is not None:
        raise ConfigError(
            f"prefetch={prefetch}: this loader has its own queue; set its prefetch_size instead"
        )
    warmed: WarmedIterator[T] = WarmedIterator(iterable, own, first)
    if batches == 0 or timeout == 0:
        return warmed
    warmed.result = result = (
        warmed._buffer.warm(batches, timeout, capacity)
        if own is None
        else own.warmup(batches, timeout)
    )
    if heartbeat is not None:
        heartbeat.event(
            f"{getattr(heartbeat, 'prefix', 'loader_')}warmup", **result._asdict(),
            fetch_warmup_batches=result.filled, fetch_warmup_wait_ms=result.wait_ms,
        )  # fmt: skip
    return warmed


def _state_of(*owners: Any) -> Callable[[], Any] | None:
    """Return the first `state_dict` method: the loader's, or else the iterator's."""
    methods = (getattr(owner, "state_dict", None) for owner in owners)
    return next(filter(callable, methods), None)


class _Fetched(NamedTuple):
    """An item or the exception in its place, and the loader's state after it."""

    item: Any
    error: BaseException | None
    state: Any


class _Buffer(Generic[T]):
    """Items of an iterator, read ahead by at most one thread."""

    def __init__(self, iterator: Iterator[T], state_of: Callable[[], Any] | None) -> None:
        self._iterator, self._state_of = iterator, state_of
        self._kind = type(iterator).__name__
        self._fetched: deque[_Fetched] = deque()
        self._capacity = 0
        self._thread: threading.Thread | None = None
        self._running = self._closed = False
        self._state = _NOTHING
        """After the last item handed out; _NOTHING if that is where the loader is."""
        self._changed = threading.Condition()

    @property
    def depth(self) -> int:
        with self._changed:
            return sum(each.error is None for each in self._fetched)

    def warm(self, batches: int | Literal["auto"], timeout: float, prefetch: int) -> Warmup:
        begun = time.monotonic()
        deadline = begun + min(timeout, threading.TIMEOUT_MAX)
        requested = 1 if batches == "auto" else batches
        self._state = self._capture()
        self._capacity, self._running = max(requested, prefetch), True
        self._thread = threading.Thread(target=self._run, name="penstock-warmup", daemon=True)
        self._thread.start()
        self._fill(requested, deadline)
        if batches == "auto" and time.monotonic() - begun > QUICK_S:
            requested = prefetch or BATCHES
            self._fill(requested, deadline)
        with self._changed:
            self._capacity = prefetch
            self._changed.notify_all()
            filled = min(self.depth, requested)
        return Warmup(requested, filled, 1e3 * (time.monotonic() - begun))

    def _fill(self, items: int, deadline: float) -> None:
        """Wait until `items` are buffered, the iterator ends, or the deadline passes."""
        with self._changed:
            self._capacity = max(items, self._capacity)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(self._fetched) >= items or not self._running,
                max(0.0, deadline - time.monotonic()),
            )

    def next(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._fetched or not self._running or self._closed)
            if self._closed:
                raise LoaderClosed("this iterator was closed. Warm up again for another pass.")
            fetched = self._fetched.popleft() if self._fetched else None
            self._changed.notify_all()
        if fetched is None:
            self._state = _NOTHING
            return next(self._iterator)
        self._state = fetched.state
        if fetched.error is not None:
            raise fetched.error
        return fetched.item  # type: ignore[no-any-return]

    def state(self) -> Any:
        if self._state_of is None:
            raise StateError(
                f"a {self._kind} has no state_dict, so its position cannot be saved. "
                "Use a loader that has one: a StatefulDataLoader, or an AsyncDataLoader."
            )
        if isinstance(self._state, Exception):
            raise StateError(
                f"state_dict() failed while reading ahead: {self._state!r}"
            ) from self._state
        return self._state_of() if self._state is _NOTHING else self._state

    def stop(self) -> None:
        """Tell the thread to end. May run in a garbage collection, on any thread."""
        with self._changed:
            self._closed = True
            self._fetched.clear()
            self._iterator = iter(())  # ends the worker processes of a DataLoader
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning(
                    "%s was still fetching an item %.0f s after close; its thread ends with that item",
                    self._kind, timeout,
                )  # fmt: skip
                return False
        return True

    def _run(self) -> None:
        iterator = self._iterator
        while self._has_room() and self._fetch(iterator):
            pass

    def _has_room(self) -> bool:
        """Wait for room. Return False if nothing more is to be read ahead."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._capacity or len(self._fetched) < self._capacity
            )
            self._running = self._capacity > 0 and not self._closed
            self._changed.notify_all()
            return self._running

    def _fetch(self, iterator: Iterator[T]) -> bool:
        """Fetch one item or the exception in its place. Return False at the end."""
        item, error = None, None
        try:
            item = next(iterator)
        except BaseException as raised:  # for the consumer that asks for this item
            error = raised
        fetched = _Fetched(item, error, self._capture())
        with self._changed:
            if not self._closed:
                self._fetched.append(fetched)
            self._running = not isinstance(error, StopIteration)
            self._changed.notify_all()
            return self._running

    def _capture(self) -> Any:
        """Return a copy of the loader's state, or the exception that it raised."""
        try:
            return copy.deepcopy(self._state_of()) if self._state_of is not None else None
        except Exception as error:
            return error

"""Warm up a loader that is not ours: have its first items ready before the first step.

In:    any iterable or iterator: a PyTorch `DataLoader`, a `datasets` stream, a generator; or a loader of ours.
Out:   the same items in the same order, and what the warmup did. An exception comes where its item would have.
Where: items are fetched on one thread, "penstock-warmup", while there is room in the one buffer; without read-ahead
       it ends with the warmup, and the rest is fetched by whoever asks. A loader of ours warms itself.
State: the items that wait, each with the loader's state after it, if the loader has one. No rank waits for another.
Cost:  as many items as are ready; where the loader has a `state_dict`, a copy of it for each item fetched ahead.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, Literal, NoReturn, Protocol, Self, TypeVar

from penstock.config import whole_number
from penstock.errors import ConfigError, LoaderClosed, StateError
from penstock.feed.pool import join_all

log = logging.getLogger("penstock")

T = TypeVar("T")

BATCHES = 8
"""What a warmup asks for where nothing else is said."""
QUICK_S = 0.1
"""An "auto" warmup waits for nothing more if the first item took no longer."""
CLOSE_S = 5.0
"""How long `close` waits for an item that is under way. More holds up a shutdown."""

_NOTHING: Any = object()


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """What a warmup did."""

    requested: int
    filled: int
    wait_ms: float


class Beats(Protocol):
    """What hears of a warmup: a `Heartbeat`, or anything with its `event`."""

    def event(self, msg: str, **fields: Any) -> Any: ...


class Warmed(Iterator[T]):
    """One pass over a loader, its first items fetched already.

    It is a context manager; without one, `close` ends its thread, as do garbage collection and the
    end of the interpreter.
    """

    def __init__(
        self, feed: _Ahead[T] | _Own[T], of: Any, result: WarmupResult, first: Any = _NOTHING
    ) -> None:
        self.result = result
        self._feed = feed
        self._kind, self._sized = type(of).__name__, of if hasattr(type(of), "__len__") else None
        self._first = first
        self._closed = False
        # The thread knows the feed and not this, so one that nobody holds any more is collected.
        self._finalizer = (
            weakref.finalize(self, feed.close, CLOSE_S) if isinstance(feed, _Ahead) else None
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise LoaderClosed(
                "this warmed iterator was closed. Warm up the loader again for another pass."
            )
        if self._first is not _NOTHING:
            first, self._first = self._first, _NOTHING
            return first  # type: ignore[no-any-return]
        return self._feed.take()

    def __len__(self) -> int:
        """As the loader says it."""
        if self._sized is None:
            raise TypeError(f"a {self._kind} has no len()")
        return len(self._sized)

    def __bool__(self) -> bool:
        return True  # like any iterator, and also where there is no len()

    def queue_depth(self) -> int:
        """Items that stand ready, the first one that was put in front aside."""
        return self._feed.depth

    def state_dict(self) -> Any:
        """The loader's own state after the last item that was handed out, however far ahead it has been read."""
        if self._first is not _NOTHING:
            raise StateError(
                "the state before the first batch is not known, because it was fetched before the warmup. "
                "Take it out, or save the loader's state before fetching it."
            )
        return self._feed.state()

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Let go of the loader and of the items that wait, and end the thread. Harmless at any time, and again.

        An iterator that is stuck cannot be interrupted: after the timeout this says so in the log and gives False.
        A loader of ours is shut down.
        """
        self._closed = True
        self._first = _NOTHING
        ended = self._feed.close(timeout)
        if self._finalizer is not None:
            self._finalizer.detach()
        return ended

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
    heartbeat: Beats | None = None,
) -> Warmed[T]:
    """Fetch the first items of a loader in the background, and wait until they stand ready or the timeout passes.

    batches: how many. "auto" waits for one and, only if that took longer than a blink, for `prefetch` (or 8).
        0 is off: no thread, nothing is fetched ahead.
    timeout: seconds to wait at most; the item that is under way then comes next. 0 is off.
    prefetch: how many items to keep ready afterwards. More hide longer hiccups and take memory. None or 0: none,
        each is fetched when it is asked for. A loader of ours has its own, and takes none here.
    heartbeat: gets an event `loader_warmup`, with its own prefix if it has one.
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
    heartbeat: Beats | None = None,
) -> Warmed[T]:
    """Like `warmup_loader`, where the caller has fetched the first item already: it comes first, then the rest.

    iterable: the iterator that `first` was taken from. Anything else starts a new pass, with `first` in it.
    """
    begun = time.monotonic()
    batches = batches if batches == "auto" else whole_number("batches", batches, 0)
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds ≥ 0")
    room = 0 if prefetch is None else whole_number("prefetch", prefetch, 0)
    if not (hasattr(type(iterable), "__iter__") or hasattr(type(iterable), "__getitem__")):
        raise ConfigError(
            f"a {type(iterable).__name__} cannot be iterated over: give a loader or an iterator"
        )
    ours = hasattr(iterable, "warmup") and hasattr(
        iterable, "next_batch"
    )  # which this module does not know
    if ours and prefetch is not None:
        kind = type(iterable).__name__
        raise ConfigError(
            f"prefetch={prefetch}: a {kind} has its own queue; set its prefetch_size instead"
        )
    # On the caller's thread: a DataLoader draws its seed here, from the random numbers that the model draws from.
    iterator = iter(iterable)
    if first is not _NOTHING and iterator is not iterable:
        log.warning(
            "a %s starts a new pass, so a first batch that was taken from it comes again. "
            "Give the iterator that it was taken from.", type(iterable).__name__,
        )  # fmt: skip
    feed: _Ahead[T] | _Own[T]
    feed = _Own(iterable) if ours else _Ahead(iterator, _state_of(iterable, iterator), room)
    off = batches == 0 or timeout == 0
    try:
        result = WarmupResult(0, 0, 0.0) if off else feed.warm(batches, begun, timeout)
        if heartbeat is not None and not off:
            again = {"fetch_warmup_batches": result.filled, "fetch_warmup_wait_ms": result.wait_ms}
            heartbeat.event(
                f"{getattr(heartbeat, 'prefix', 'loader_')}warmup", **asdict(result), **again
            )
    except BaseException as error:  # nobody gets what was made, so nobody could close it
        feed.close(
            CLOSE_S if isinstance(error, Exception) else 0.1
        )  # Ctrl-C does not wait for a slow item
        raise
    return Warmed(feed, iterable, result, first)


def _state_of(iterable: Any, iterator: Any) -> Callable[[], Any] | None:
    """Who knows the state of the pass: the loader, which is also who is given it back, or the iterator."""
    for one in (iterable, iterator):
        if callable(getattr(one, "state_dict", None)):
            return one.state_dict  # type: ignore[no-any-return]
    return None


class _Own(Generic[T]):
    """A loader of ours, handed through: its queue is the buffer, its threads fill it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def depth(self) -> int:
        return int(self._loader.queue_depth())

    def warm(self, batches: int | Literal["auto"], begun: float, timeout: float) -> WarmupResult:
        done = self._loader.warmup(batches, timeout)
        return WarmupResult(done.requested, done.filled, done.wait_ms)

    def take(self) -> T:
        return next(self._loader)  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self, timeout: float) -> bool:
        self._loader.shutdown()
        return True


@dataclass(slots=True)
class _Fetched:
    """What one `next` gave: an item or an exception, and how to have the loader's state after it."""

    item: Any
    error: BaseException | None
    state: Callable[[], Any] | None


class _Ahead(Generic[T]):
    """Reads an iterator ahead: one buffer, and at most one thread that fills it."""

    def __init__(
        self, iterator: Iterator[T], state_of: Callable[[], Any] | None, prefetch: int
    ) -> None:
        self._iterator = iterator
        self._kind = type(iterator).__name__
        self._state_of = state_of
        self._prefetch = prefetch
        self._room = 0
        self._buffer: deque[_Fetched] = deque()
        # Reentrant, because a garbage collection may close this on a thread that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._running = self._ended = self._stopped = False
        # How to have the state of the last item handed out; None: it is where the loader stands.
        self._state: Callable[[], Any] | None = None
        self._lost: Callable[[], Any] | None = None
        self._pid = os.getpid()

    @property
    def depth(self) -> int:
        with self._changed:
            # An end or a fault can only be the last that was fetched.
            return len(self._buffer) - bool(self._buffer and self._buffer[-1].error is not None)

    def warm(self, batches: int | Literal["auto"], begun: float, timeout: float) -> WarmupResult:
        deadline = begun + min(timeout, threading.TIMEOUT_MAX)
        self._state = self._saved_state()
        requested = 1 if batches == "auto" else batches
        filled = self._fill(requested, deadline)
        if batches == "auto" and (filled < 1 or time.monotonic() - begun > QUICK_S):
            requested = self._prefetch or BATCHES
            filled = self._fill(requested, deadline)
        with self._changed:
            self._room = self._prefetch
            self._changed.notify_all()
        return WarmupResult(requested, min(filled, requested), 1e3 * (time.monotonic() - begun))

    def _fill(self, items: int, deadline: float) -> int:
        """Wait until items stand ready, or the end, a fault or the deadline comes first. Gives how many do."""
        with self._changed:
            self._room = max(items, self._prefetch)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.depth >= items or not self._running,
                max(0.0, deadline - time.monotonic()),
            )
            return self.depth

    def take(self) -> T:
        if self._thread is not None and os.getpid() != self._pid:
            raise LoaderClosed(
                f"this iterator was warmed up in process {self._pid} and asked in process {os.getpid()}, a fork that "
                "has none of its threads. Warm up in the process that uses it."
            )
        with self._changed:
            if self._room and not (self._buffer or self._running or self._ended or self._stopped):
                self._start()  # a fault ended the thread; whoever asks again wants what comes after it
            self._changed.wait_for(lambda: self._buffer or not self._running or self._stopped)
            if self._stopped:
                raise LoaderClosed("the iterator was closed while somebody waited for it")
            fetched = self._buffer.popleft() if self._buffer else None
            self._changed.notify_all()
        if fetched is None:  # nobody reads ahead, so the loader's own state is that of this item
            self._state = None
            return next(self._iterator)
        self._state = fetched.state
        if fetched.error is None:
            return fetched.item  # type: ignore[no-any-return]
        try:
            raise fetched.error
        finally:
            del fetched  # or the exception and this frame would keep each other

    def state(self) -> Any:
        if self._state_of is None:
            raise StateError(
                f"a {self._kind} has no state_dict, so where it stands cannot be saved. "
                "Use a loader that has one: a StatefulDataLoader, or an AsyncDataLoader."
            )
        return self._state_of() if self._state is None else self._state()

    def close(self, timeout: float) -> bool:
        if os.getpid() != self._pid:
            return True  # a forked child has no thread to end
        with self._changed:
            self._stopped = True
            dropped, self._buffer = self._buffer, deque()
            self._changed.notify_all()
            thread = self._thread
        del dropped  # not under the lock: what items do when they go is theirs
        if thread is not None:
            if threading.current_thread().name.startswith("penstock-"):
                return False  # a garbage collection on a thread of ours must wait for nobody; it ends on its own
            if not join_all([thread], timeout):
                log.warning(
                    "%s was still busy with an item %.0f s after it was to end; it cannot be interrupted, "
                    "and ends with that item or with the process", self._kind, timeout,
                )  # fmt: skip
                return False
        self._release()
        return True

    def _release(self) -> None:
        # What was made for this pass, such as a DataLoader's worker processes, goes with its last reference.
        self._iterator = iter(())

    # On the thread

    def _start(self) -> None:
        if self._thread is not None:
            self._thread.join()  # it has handed its last over, and waits for nothing any more
        self._running = True
        self._thread = threading.Thread(target=self._run, name="penstock-warmup", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._has_room():
            fetched = self._fetch()
            over = fetched.error is not None
            with self._changed:
                if not self._stopped:
                    self._buffer.append(fetched)
                self._ended = isinstance(fetched.error, StopIteration)
                self._running = not over
                self._changed.notify_all()
            del fetched  # while this thread waits, the item is the trainer's
            if over:
                break
        if self._stopped:
            self._release()  # close() may have given up waiting

    def _has_room(self) -> bool:
        """Wait for room. False if nothing more is to be fetched ahead."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or len(self._buffer) < self._room or not self._room
            )
            self._running = self._room > 0 and not self._stopped
            self._changed.notify_all()
            return self._running

    def _fetch(self) -> _Fetched:
        try:
            item = next(self._iterator)
        except BaseException as error:  # it belongs to whoever asks for the item
            return _Fetched(None, error, self._saved_state())
        return _Fetched(item, None, self._saved_state())

    def _saved_state(self) -> Callable[[], Any] | None:
        """The state as it is now, for later. A copy, because loaders hand out parts that they go on changing."""
        if self._state_of is None or self._lost is not None:
            return self._lost
        try:
            return partial(copy.deepcopy, copy.deepcopy(self._state_of()))
        except Exception as error:
            log.warning(
                "reading ahead, the loader's state cannot be kept: %s: %s",
                type(error).__name__,
                error,
            )
            self._lost = partial(_refuse, error)
            return self._lost


def _refuse(error: Exception) -> NoReturn:
    raise StateError(
        f"the loader's state_dict() failed when an item had been fetched: {type(error).__name__}: {error}. "
        "Without warmup and prefetch it is asked only when you ask."
    ) from error

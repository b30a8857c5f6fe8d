"""Fetch the first items of any iterator before the first step.

The thread "penstock-warmup" fetches them into one buffer and exits with the warmup; the consumer
fetches the rest itself. If the loader has a `state_dict`, each buffered item comes with a copy of
the loader's state. A Penstock loader fills its own queue instead.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

from penstock.errors import ConfigError, LoaderClosed, StateError
from penstock.options import LoaderOptions, options_of

if TYPE_CHECKING:
    from penstock.sources.base import RunContext

log = logging.getLogger("penstock")

T = TypeVar("T")

BATCHES = 8
QUICK_S = 0.1
"""An "auto" warmup fetches one item only, if that took no longer than this."""
CLOSE_S = 5.0
"""How long `close` waits for the current fetch."""

_NOTHING: Any = object()


class Warmup(NamedTuple):
    """The result of a warmup."""

    requested: int
    filled: int
    wait_ms: float


class _Fetched(NamedTuple):
    """An item or the exception in its place, and the loader's state after it."""

    item: Any
    error: BaseException | None
    state: Any


class WarmedIterator(Iterator[T]):
    """One pass over a loader whose first items are buffered."""

    def __init__(self, iterable: Iterable[T], first: Any = _NOTHING) -> None:
        self.result = Warmup(0, 0, 0.0)
        self._iterable, self._first = iterable, first
        # On the caller's thread, because a DataLoader draws its seed in `iter`.
        # A Penstock loader continues with `next`; `iter` might start another pass.
        continues = first is not _NOTHING and _is_own(iterable)
        self._iterator: Any = iterable if continues else iter(iterable)
        if first is not _NOTHING and self._iterator is not iterable:
            log.warning(
                "a %s starts a new pass, so the given first batch will be repeated. "
                "Pass the iterator that returned it.", type(iterable).__name__,
            )  # fmt: skip
        self._wanted = 0
        self._thread: threading.Thread | None = None
        self._fetched: deque[_Fetched] = deque()
        self._state = _NOTHING
        """The state after the last item returned; _NOTHING if the loader's own state is current."""

    def __next__(self) -> T:
        if self._iterator is None:
            raise LoaderClosed("this iterator was closed. Warm up again for another pass.")
        if self._first is not _NOTHING:
            first, self._first = self._first, _NOTHING
            return first  # type: ignore[no-any-return]
        if self._thread is not None and not self._fetched:
            self._thread.join()  # it exits after its current fetch
            self._thread = None
        if not self._fetched:
            self._state = _NOTHING
            return next(self._iterator)  # type: ignore[no-any-return]
        fetched = self._fetched.popleft()
        self._state = fetched.state
        if fetched.error is not None:
            raise fetched.error
        return fetched.item  # type: ignore[no-any-return]

    def state_dict(self) -> Any:
        """Return the loader's state after the last item returned, regardless of read-ahead."""
        if self._first is not _NOTHING:
            raise StateError(
                "the state before the first batch is unknown, because it was fetched before the warmup. "
                "Take that batch first, or save the loader's state before fetching it."
            )
        state = self._loader_state() if self._state is _NOTHING else self._state
        if isinstance(state, Exception):
            raise StateError(f"the loader's state cannot be saved: {state!r}") from state
        return state

    def close(self) -> bool:
        """Release the loader and the buffer, and join the thread. Safe to call again.

        A stuck iterator cannot be interrupted: after 5 s this logs a warning and returns False. A
        Penstock loader is shut down.
        """
        self._wanted, self._first, self._iterator = 0, _NOTHING, None
        if _is_own(self._iterable):
            self._iterable.shutdown()  # type: ignore[attr-defined]
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("an item was still being fetched %.0f s after close", CLOSE_S)
                return False
        self._fetched.clear()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warm(self, batches: int | Literal["auto"], timeout: float) -> None:
        begun = time.monotonic()
        deadline = begun + min(timeout, threading.TIMEOUT_MAX)
        requested = 1 if batches == "auto" else batches
        self._state = self._loader_state()
        self._fetch_until(requested, deadline)
        if batches == "auto" and QUICK_S < time.monotonic() - begun < timeout:
            requested = BATCHES
            self._fetch_until(requested, deadline)
        filled = sum(each.error is None for each in list(self._fetched)[:requested])
        self.result = Warmup(requested, filled, 1e3 * (time.monotonic() - begun))

    def _fetch_until(self, count: int, deadline: float) -> None:
        """Buffer `count` items on a thread. After the deadline it exits with its current item."""
        self._wanted = count
        self._thread = threading.Thread(
            target=self._fetch, args=[self._iterator], name="penstock-warmup", daemon=True
        )
        self._thread.start()
        try:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._wanted = 0

    def _fetch(self, iterator: Iterator[T]) -> None:
        error: BaseException | None = None
        while error is None and len(self._fetched) < self._wanted:
            item = None
            try:
                item = next(iterator)
            except BaseException as raised:  # raised by the `next` that requests this item
                error = raised
            self._fetched.append(_Fetched(item, error, self._loader_state()))

    def _loader_state(self) -> Any:
        """Return a copy of the loader's state, or the exception that prevents it."""
        owner: Any = self._iterable if hasattr(self._iterable, "state_dict") else self._iterator
        try:
            return copy.deepcopy(owner.state_dict())
        except Exception as error:
            return error


def warmup_loader(
    iterable: Iterable[T],
    batches: int | Literal["auto"] = BATCHES,
    timeout: float = 30.0,
    *,
    heartbeat: Any = None,
) -> WarmedIterator[T]:
    """Fetch the first items of a loader in the background, and wait for them up to the timeout.

    batches: the number of items. "auto" fetches one and, if that took longer than 0.1 s, 8. 0: off.
    timeout: longest wait in seconds; a fetch in progress continues and its item comes next. 0: off.
    heartbeat: an object with `event(msg, **fields)`; receives `loader_warmup`, with its own prefix
        if it has one.
    """
    return warmup_loader_with_first_batch(iterable, _NOTHING, batches, timeout, heartbeat=heartbeat)


def warmup_loader_with_first_batch(
    iterable: Iterable[T],
    first: T,
    batches: int | Literal["auto"] = BATCHES,
    timeout: float = 30.0,
    *,
    heartbeat: Any = None,
) -> WarmedIterator[T]:
    """Like `warmup_loader`, for a caller that has already taken the first item: it comes first.

    iterable: the iterator that returned `first`.
    """
    batches, timeout = check_arguments(batches, timeout)
    warmed = WarmedIterator(iterable, first)
    if batches == 0 or timeout == 0:
        return warmed
    if _is_own(iterable):
        warmed.result = iterable.warmup(batches, timeout)  # type: ignore[attr-defined]
    else:
        warmed._warm(batches, timeout)
    if heartbeat is not None:
        result, prefix = warmed.result, getattr(heartbeat, "prefix", "loader_")
        same = {"fetch_warmup_batches": result.filled, "fetch_warmup_wait_ms": result.wait_ms}
        heartbeat.event(f"{prefix}warmup", **result._asdict(), **same)
    return warmed


def check_arguments(batches: Any, timeout: Any) -> tuple[int | Literal["auto"], float]:
    """Check the arguments of a warmup against the loader's options of the same meaning."""
    declared = options_of(LoaderOptions)
    batches = replace(declared["warmup_batches"], name="batches").read(batches)
    return batches, replace(declared["warmup_timeout"], name="timeout").read(timeout)


def check_warmup(
    run: RunContext, memory_limit: int, batches: Any, timeout: Any
) -> tuple[int | Literal["auto"], float]:
    """Check the arguments of a loader's `warmup()`."""
    wanted, timeout = check_arguments(run.prefetch_size if batches is None else batches, timeout)
    batch_bytes = run.row_bytes * run.batch_size
    if wanted != "auto" and batch_bytes * (wanted + 1) > memory_limit:
        raise ConfigError(
            f"batches={wanted}: they take {batch_bytes * wanted} bytes, more than "
            f"memory_limit={memory_limit}. Ask for fewer, or raise it."
        )
    return wanted, timeout


def _is_own(iterable: Any) -> bool:
    return hasattr(iterable, "warmup") and hasattr(iterable, "next_batch")

"""Carry batches to the device, so that the copy of one overlaps the step on the one before.

In:    batches of narrow numpy arrays; a device behind a small interface.
Out:   the same batches, in order, with tensors on the device.
Where: the trainer's thread, and no other: every call of the device is made in `next` or `close`.
State: the batches in flight, and a ring of staging buffers, which are reused and only grow.
Cost:  one memcpy into the staging buffer and one copy to the device for each batch, whatever its
       number of fields. Never waits for a batch that is not the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from penstock.errors import ConfigError, LoaderClosed, LoaderTimeout
from penstock.watch.stage_timer import Clock, NullClock

Array = np.ndarray[Any, Any]

ALIGN = 64
"""Fields begin at multiples of this many bytes: enough for every type, and a cache line."""

TYPES = frozenset({
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
})  # fmt: skip
"""What can travel: the types that numpy and torch both have."""


@dataclass(frozen=True, slots=True)
class Field:
    """An array's place in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the arrays of a batch lie in one buffer."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, leaves: Mapping[str, Array]) -> Self:
        fields = []
        end = 0
        for name, array in leaves.items():
            if array.dtype.name not in TYPES:
                raise ConfigError(
                    f"field {name!r} is of type {array.dtype}, which cannot go to a device. "
                    f"Make it one of {', '.join(sorted(TYPES))}."
                )
            offset = -(-end // ALIGN) * ALIGN
            end = offset + array.nbytes
            fields.append(Field(name, array.dtype.name, array.shape, offset, array.nbytes))
        return cls(tuple(fields), end)

    def pack(self, leaves: Mapping[str, Array], into: Array) -> None:
        """Copy the arrays to their places."""
        for field in self.fields:
            place = into[field.offset : field.offset + field.nbytes]
            # Through the native type, so that arrays in foreign byte order arrive right.
            np.copyto(place.view(field.dtype).reshape(field.shape), leaves[field.name])


class Landing(Protocol):
    """The arrays of a batch, on the device. What is done with them is queued behind their copy."""

    def __getitem__(self, name: str) -> Any:
        """The field as it came: a view, of its own type."""

    def wide(self, name: str, where: Any = ...) -> Any:
        """The part `where` (slices) of an integer field, as a contiguous int64 tensor of its own."""


class Cargo(Protocol):
    """What travels: a batch."""

    def leaves(self) -> Mapping[str, Array]:
        """The arrays to copy, as narrow as they are."""

    def arrive(self, landing: Landing) -> None:
        """Take the device's tensors. Called where the copy is queued: may widen and derive."""

    def tensors(self) -> Iterable[Any]:
        """Every tensor that the batch now has, after `arrive` and the hook."""


class Ticket(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """Whether the staging buffer has been read."""

    def wait(self) -> None:
        """Block the host until it has been."""


class Staging(Protocol):
    """Host memory that a device copies from."""

    @property
    def bytes(self) -> Array:
        """The memory, as uint8."""


S = TypeVar("S", bound=Staging)
K = TypeVar("K", bound=Ticket)
C = TypeVar("C", bound=Cargo)


class Device(Protocol[S, K]):
    """All that is asked of a device."""

    def staging(self, nbytes: int) -> S:
        """Host memory to copy from, pinned where that means something."""

    def send(self, staging: S, layout: Layout, then: Callable[[Landing], Iterable[Any]]) -> K:
        """Start one copy of the layout's bytes on the side stream, and return without waiting for it.

        `then` is called once, at once, with the side stream current, to queue more work; it gives the
        tensors that the trainer will get. If it raises, the copy is over before the exception leaves.
        """

    def hand_over(self, ticket: K) -> None:
        """Make the trainer's stream, and not the host, wait for what was sent; keep the memory of its
        tensors from being reused before the trainer's stream is done with them."""


class Waits(Protocol):
    """Measures on the device how long it stands still between two steps. Never waits for it."""

    def begin(self) -> None:
        """The trainer asks for a batch: what it queued before this is the step that ends."""

    def end(self) -> None:
        """The batch is handed over: what is queued from now on is the next step."""

    def seconds(self) -> float:
        """What is known by now."""


class _Slot(Generic[S, K]):
    """A staging buffer, and the copy that last read it."""

    def __init__(self) -> None:
        self.staging: S | None = None
        self.ticket: K | None = None

    def room(self, device: Device[S, K], nbytes: int) -> S:
        if self.staging is None or len(self.staging.bytes) < nbytes:
            # Powers of two: batches whose size varies a little must not pin new memory again and again.
            self.staging = device.staging(1 << (nbytes - 1).bit_length() if nbytes else 0)
        return self.staging


class DeviceFeed(Generic[C]):
    """Hands out batches on the device, and has the next ones on their way."""

    def __init__(
        self,
        device: Device[Any, Any],
        take: Callable[[float | None], C | None],
        poll: Callable[[], C | None],
        prefetch: int = 1,
        hook: Callable[[C], C | None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is copied until the first `next`.

        take: the next batch, waiting at most so many seconds for it; None at the end.
        poll: the next batch if it is ready, else None.
        prefetch: batches on the device beyond the one handed out. More take device memory.
        hook: changes a batch on the device, or gives another in its place.
        """
        self._device = device
        self._waits: Waits | None = getattr(device, "waits", None)
        self._clock = clock or NullClock()
        self._take = take
        self._poll = poll
        self._prefetch = prefetch
        self._hook = hook
        # One slot for each batch in flight, and one for the batch handed out last: the device waits
        # for its copy, the host does not, so it may still be running when the next one is sent.
        self._ring: list[_Slot[Any, Any]] = [_Slot() for _ in range(prefetch + 1)]
        self._turn = 0
        self._flying: deque[tuple[C, Any]] = deque()
        self._failed: Exception | None = None
        self._ended = False
        self._closed = False
        self.interrupted = False
        """Whether an interrupt may have lost a batch between its taking and its sending. Start anew then."""
        self.stalls = 0
        """How often the host had to wait for a staging buffer, because copies did not keep up."""

    @property
    def in_flight(self) -> int:
        """Batches sent and not handed out."""
        return len(self._flying)

    def next(self, timeout: float | None = None) -> C | None:
        """The next batch, or None at the end. Only the first one, or one that was late, is waited for.

        A failure is raised when everything before it has been handed out. After a timeout, ask again.
        """
        if self._closed:
            raise LoaderClosed("the way to the device was closed")
        if self.interrupted:
            raise LoaderClosed(
                "an interrupt lost a batch on its way to the device: restart after the last one you got"
            )
        if self._waits is not None:
            self._waits.begin()
        if not self._flying:
            if self._failed is not None:
                raise self._failed  # what follows a failure would not be the stream
            if self._ended or not self._load(lambda: self._take(timeout)):
                self._ended = True
                return None
        self._top_up()
        batch, ticket = self._flying[0]
        self._device.hand_over(ticket)
        if self._waits is not None:
            self._waits.end()
        self._flying.popleft()  # last, so that an interrupt before it loses nothing
        return batch

    def told(self) -> float | None:
        """How long the device itself stood waiting for batches, as far as is known yet; None if it cannot tell."""
        return self._waits.seconds() if self._waits is not None else None

    def close(self) -> None:
        """Wait for running copies, which read our memory, and let go of everything. Harmless again."""
        self._closed = True
        try:
            for slot in self._ring:
                if slot.ticket is not None:
                    slot.ticket.wait()
        finally:
            self._ring.clear()
            self._flying.clear()

    def _top_up(self) -> None:
        """Send what is ready. Its failures belong to later batches than the one about to be handed out."""
        while self._failed is None and not self._ended and len(self._flying) <= self._prefetch:
            try:
                if not self._load(self._poll):
                    return
            except LoaderTimeout:
                return  # another way to say that nothing is ready
            except Exception as error:
                self._failed = error

    def _load(self, get: Callable[[], C | None]) -> bool:
        """Get a batch and send it. False if there was none."""
        self.interrupted = True  # unless we get to where nothing hangs in between
        try:
            batch = get()
        except Exception:
            self.interrupted = False
            raise
        if batch is not None:
            try:
                with self._clock.stage("copy") as track:
                    track.count("copy", 1, self._send(batch))
            except Exception as error:
                self._failed = error
                self.interrupted = False
                raise
        self.interrupted = False
        return batch is not None

    def _send(self, batch: C) -> int:
        leaves = batch.leaves()
        layout = Layout.of(leaves)
        slot = self._ring[self._turn]
        if slot.ticket is not None and not slot.ticket.done():
            slot.ticket.wait()
            self.stalls += 1
        staging = slot.room(self._device, layout.nbytes)
        layout.pack(leaves, staging.bytes)
        sent = batch

        def then(landing: Landing) -> Iterable[Any]:
            nonlocal sent
            sent.arrive(landing)
            if self._hook is not None:
                changed = _called(self._hook, sent)
                sent = sent if changed is None else changed
            return sent.tensors()

        slot.ticket = self._device.send(staging, layout, then)
        self._turn = (self._turn + 1) % len(self._ring)
        self._flying.append((sent, slot.ticket))
        return layout.nbytes


def _called(hook: Callable[[C], C | None], batch: C) -> C | None:
    try:
        return hook(batch)
    except Exception as error:
        error.add_note("in stage copy, in device_preprocess")
        raise

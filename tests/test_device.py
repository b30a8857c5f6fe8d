"""The way to the device, on two simulated ones.

`SlowDevice` stands in for the whole of a device: copies read their staging buffer later than they are
asked to, so a buffer that is written too early is seen in the data. `SimulatedCuda` stands in for CUDA
alone, under the real `CudaDevice`: streams run in any order that their events allow, and memory that
was freed is overwritten as early as the caching allocator might.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, LoaderClosed, LoaderTimeout
from penstock.feed.device import DeviceFeed, Landing, Layout

POISON = -77


@dataclass
class Crate:
    """A batch: rows of narrow ids, and weights."""

    number: int
    ids: Any
    weights: Any
    inputs: Any = None
    targets: Any = None

    def leaves(self) -> Mapping[str, Any]:
        return {"ids": self.ids, "weights": self.weights}

    def arrive(self, landing: Landing) -> None:
        self.inputs = landing.wide("ids", np.s_[:, :-1])
        self.targets = landing.wide("ids", np.s_[:, 1:])
        self.weights = landing["weights"]

    def tensors(self) -> Iterable[Any]:
        return self.inputs, self.targets, self.weights


def crate(number: int, rows: int = 3, columns: int = 5) -> Crate:
    ids = (np.arange(rows * columns).reshape(rows, columns) + 1000 * (number + 1)) % 65536
    return Crate(
        number, ids.astype(np.uint16), np.linspace(number, number + 1, rows, dtype=np.float32)
    )


def content(number: int, rows: int = 3, columns: int = 5) -> tuple[list[Any], list[Any], list[Any]]:
    """What the crate of that number should hold on the device."""
    made = crate(number, rows, columns)
    ids = made.ids.astype(np.int64)
    return ids[:, :-1].tolist(), ids[:, 1:].tolist(), made.weights.tolist()


class Source:
    """Gives crates. An exception among them is raised, again and again, when its turn comes."""

    def __init__(
        self, items: Iterable[Crate | BaseException], rng: random.Random | None = None
    ) -> None:
        self.items = deque(items)
        self.rng = rng
        self.ended = False
        self.hold_back = False

    def late(self) -> bool:
        return self.hold_back or (self.rng is not None and self.rng.random() < 0.3)

    def take(self, timeout: float | None = None) -> Crate | None:
        if timeout is not None and self.late():
            raise LoaderTimeout("not yet")
        if not self.items:
            self.ended = True
            return None
        item = self.items[0]
        if isinstance(item, BaseException):
            raise item
        self.items.popleft()
        return item

    def poll(self) -> Crate | None:
        assert not self.ended, "polled after the end"
        return None if self.late() or not self.items else self.take()


def passing(work: Callable[[], object]) -> Callable[[], bool]:
    """Queued work that never blocks its stream."""

    def run() -> bool:
        work()
        return True

    return run


class SlowMemory:
    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.copies: list[SlowTicket] = []


class SlowTicket:
    def __init__(self, device: SlowDevice) -> None:
        self.device = device
        self.copied = self.ready = self.handed_over = False

    def done(self) -> bool:
        self.device.same_thread()
        return self.copied

    def wait(self) -> None:
        self.device.same_thread()
        while not self.copied:
            self.device.tick()


class SlowLanding:
    """Arrays that hold nonsense until the side stream has filled them."""

    def __init__(self, device: SlowDevice, layout: Layout) -> None:
        self.device = device
        self.bytes = np.full(layout.nbytes, 0xEE, np.uint8)
        self.fields = {f.name: f for f in layout.fields}

    def __getitem__(self, name: str) -> Any:
        f = self.fields[name]
        return self.bytes[f.offset : f.offset + f.nbytes].view(f.dtype).reshape(f.shape)

    def wide(self, name: str, where: Any = ...) -> Any:
        narrow = self[name][where]
        wide = np.full(narrow.shape, POISON, np.int64)
        self.device.queue(lambda: np.copyto(wide, narrow))
        return wide


class SlowDevice:
    """Two streams of queued work, of which only `tick` runs any, in seeded turns."""

    def __init__(self, prefetch: int = 1, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.thread = threading.get_ident()
        self.streams: dict[str, deque[Callable[[], bool]]] = {"trainer": deque(), "side": deque()}
        self.current = "trainer"
        self.prefetch = prefetch
        self.sent = self.handed_over = self.allocated = 0
        self.seen: list[tuple[Any, ...]] = []

    def same_thread(self) -> None:
        assert threading.get_ident() == self.thread, "the device was called in another thread"

    def staging(self, nbytes: int) -> SlowMemory:
        self.same_thread()
        self.allocated += 1
        return SlowMemory(nbytes)

    def send(
        self, staging: SlowMemory, layout: Layout, then: Callable[[Landing], Iterable[Any]]
    ) -> SlowTicket:
        self.same_thread()
        assert all(copy.copied for copy in staging.copies), (
            "a staging buffer was reused while it was read"
        )
        self.sent += 1
        assert self.sent - self.handed_over <= self.prefetch + 1, "more in flight than asked for"
        ticket = SlowTicket(self)
        staging.copies.append(ticket)
        landing = SlowLanding(self, layout)

        def copy() -> None:
            landing.bytes[:] = staging.bytes[: layout.nbytes]
            ticket.copied = True

        self.current = "side"
        try:
            self.queue(copy)
            list(then(landing))
            self.queue(lambda: setattr(ticket, "ready", True))
        except BaseException:
            ticket.wait()
            raise
        finally:
            self.current = "trainer"
        return ticket

    def hand_over(self, ticket: SlowTicket) -> None:
        self.same_thread()
        assert not ticket.handed_over
        ticket.handed_over = True
        self.handed_over += 1
        self.streams["trainer"].append(lambda: ticket.ready)

    def queue(self, work: Callable[[], object]) -> None:
        self.streams[self.current].append(passing(work))

    def tick(self) -> None:
        """Run one piece of work, or find it blocked."""
        stream = self.streams[self.rng.choice(["trainer", "side"])]
        if stream and stream[0]():
            stream.popleft()

    def drain(self) -> None:
        while any(self.streams.values()):
            self.tick()

    def step(self, batch: Crate) -> None:
        """Queue what reads the batch, as a training step does."""
        self.queue(
            lambda: self.seen.append(
                (batch.inputs.tolist(), batch.targets.tolist(), batch.weights.tolist())
            )
        )


def opened(
    items: Iterable[Crate | BaseException],
    prefetch: int = 1,
    hook: Callable[[Crate], Crate | None] | None = None,
) -> tuple[SlowDevice, Source, DeviceFeed[Crate]]:
    device, source = SlowDevice(prefetch), Source(items)
    return device, source, DeviceFeed(device, source.take, source.poll, prefetch, hook)


# What arrives


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=12),
    prefetch=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    speed=st.integers(0, 12),
)
def test_every_batch_arrives_whole_and_in_order_whatever_the_timing(
    shapes: list[tuple[int, int]], prefetch: int, seed: int, speed: int
) -> None:
    rng = random.Random(seed)
    device = SlowDevice(prefetch, seed)
    source = Source((crate(i, *shape) for i, shape in enumerate(shapes)), rng)
    feed = DeviceFeed(device, source.take, source.poll, prefetch)
    held: list[Crate] = []
    while True:
        try:
            batch = feed.next(0.0)
        except LoaderTimeout:
            continue
        if batch is None:
            break
        assert feed.in_flight <= prefetch
        device.step(batch)
        held.append(batch)
        for _ in range(rng.randint(0, speed)):
            device.tick()
    assert feed.next(0.0) is None
    device.drain()
    assert [batch.number for batch in held] == list(range(len(shapes)))
    assert device.seen == [content(i, *shape) for i, shape in enumerate(shapes)]
    for batch in held:
        device.step(batch)
    device.drain()
    assert device.seen[len(shapes) :] == device.seen[: len(shapes)], (
        "a batch changed while it was held"
    )
    assert device.sent == len(shapes), "not one copy a batch"


def test_the_copy_of_the_next_batch_is_queued_before_the_step_on_this_one() -> None:
    device, _, feed = opened(map(crate, range(5)), prefetch=2)
    feed.next()
    assert (device.sent, feed.in_flight) == (3, 2)
    feed.next()
    assert (device.sent, feed.in_flight) == (4, 2)


def test_next_does_not_wait_for_the_batch_after() -> None:
    device, source, feed = opened(map(crate, range(3)))
    source.hold_back = True
    assert feed.next() is not None
    assert (device.sent, feed.in_flight) == (1, 0)
    source.hold_back = False
    assert feed.next() is not None
    assert (device.sent, feed.in_flight) == (3, 1)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_host_waits_for_a_staging_buffer_only_when_every_one_is_being_read(
    prefetch: int,
) -> None:
    device, _, feed = opened(map(crate, range(9)), prefetch)
    feed.next()
    assert (device.sent, feed.stalls) == (prefetch + 1, 0)
    assert device.streams["side"], "the copies wait for a tick"
    feed.next()
    assert (device.sent, feed.stalls) == (prefetch + 2, 1)
    device.drain()
    feed.next()
    assert feed.stalls == 1


def test_staging_memory_is_reused_and_only_grows() -> None:
    sizes = [40, 38, 40, 3, 2, 400, 390, 410, 1, 405]
    device, _, feed = opened((crate(i, n) for i, n in enumerate(sizes)), prefetch=1)
    while (batch := feed.next()) is not None:
        device.step(batch)
    device.drain()
    assert device.seen == [content(i, n) for i, n in enumerate(sizes)]
    assert device.allocated == 4  # two buffers, each of which grew once


def test_a_layout_takes_arrays_of_any_shape_and_order() -> None:
    leaves: dict[str, Any] = {
        "none": np.zeros((0, 7), np.uint32),
        "one": np.array(5, np.int8),
        "flags": np.array([True, False, True]),
        "foreign": np.arange(4, dtype=">u4"),
        "strided": np.arange(20, dtype=np.float64).reshape(4, 5)[::2, ::-1],
        "last": np.zeros(0, np.int64),
    }
    layout = Layout.of(leaves)
    buffer = np.zeros(layout.nbytes, np.uint8)
    layout.pack(leaves, buffer)
    landing = SlowLanding(SlowDevice(), layout)
    landing.bytes[:] = buffer
    for name, array in leaves.items():
        np.testing.assert_array_equal(landing[name], array)
    assert all(f.offset % 64 == 0 for f in layout.fields)


def test_a_batch_without_arrays_passes() -> None:
    class Empty(Crate):
        def leaves(self) -> Mapping[str, Any]:
            return {}

        def arrive(self, landing: Landing) -> None:
            pass

        def tensors(self) -> Iterable[Any]:
            return ()

    _, _, feed = opened([Empty(0, None, None), Empty(1, None, None)])
    assert [batch.number for batch in iter(feed.next, None)] == [0, 1]


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([None]), np.zeros(2, np.complex64)])
def test_a_type_that_no_device_has_is_refused_by_name(array: Any) -> None:
    _, _, feed = opened([Crate(0, array, np.zeros(1))])
    with pytest.raises(ConfigError, match="field 'ids' is of type"):
        feed.next()


# The hook


def test_the_hook_runs_on_the_side_stream_before_the_hand_over() -> None:
    ran_on = []

    def double(batch: Crate) -> None:
        ran_on.append((device.current, batch.number, device.handed_over))
        inputs = batch.inputs
        device.queue(lambda: np.multiply(inputs, 2, out=inputs))

    device, _, feed = opened(map(crate, range(3)), hook=double)
    while (batch := feed.next()) is not None:
        device.step(batch)
    device.drain()
    assert ran_on == [("side", 0, 0), ("side", 1, 0), ("side", 2, 1)]
    assert [inputs for inputs, _, _ in device.seen] == [
        (2 * np.array(content(i)[0])).tolist() for i in range(3)
    ]


def test_the_hook_may_give_another_batch() -> None:
    _, _, feed = opened(
        map(crate, range(3)),
        hook=lambda batch: Crate(-batch.number, None, batch.weights, batch.inputs, batch.targets),
    )
    batches = list(iter(feed.next, None))
    assert [batch.number for batch in batches] == [0, -1, -2]


def test_an_error_in_the_hook_comes_after_the_batches_before_and_stays() -> None:
    def hook(batch: Crate) -> None:
        if batch.number == 2:
            raise ZeroDivisionError("in the hook")

    _, _, feed = opened(map(crate, range(4)), prefetch=3, hook=hook)
    assert [batch.number for batch in (feed.next(), feed.next()) if batch] == [0, 1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the hook") as raised:
            feed.next()
        assert "in stage copy, in device_preprocess" in raised.value.__notes__
    feed.close()


# Ends, errors and timeouts


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_comes_after_the_batches_before_it(prefetch: int) -> None:
    device, _, feed = opened([crate(0), crate(1), OSError("the disk")], prefetch)
    for _ in range(2):
        batch = feed.next()
        assert batch is not None
        device.step(batch)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk"):
            feed.next()
    device.drain()
    assert device.seen == [content(0), content(1)]


def test_a_timeout_loses_nothing() -> None:
    _, source, feed = opened(map(crate, range(4)))
    source.hold_back = True
    with pytest.raises(LoaderTimeout):
        feed.next(0.0)
    source.hold_back = False
    assert feed.next(0.0).number == 0  # type: ignore[union-attr]
    source.hold_back = True
    assert feed.next(0.0).number == 1  # type: ignore[union-attr]
    with pytest.raises(LoaderTimeout):
        feed.next(0.0)
    source.hold_back = False
    assert [batch.number for batch in iter(feed.next, None)] == [2, 3]


def test_a_poll_that_times_out_means_that_nothing_is_ready() -> None:
    source = Source(map(crate, range(3)))
    source.hold_back = True
    feed = DeviceFeed(SlowDevice(), source.take, lambda: source.take(0.0))
    assert [batch.number for batch in iter(feed.next, None)] == [0, 1, 2]


@pytest.mark.parametrize("where", ["take", "poll", "hook"])
def test_after_an_interrupt_that_may_have_lost_a_batch_nothing_more_is_given(where: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    source = Source(map(crate, range(3)))
    parts: dict[str, Any] = {"take": source.take, "poll": source.poll, "hook": None}
    feed = DeviceFeed(SlowDevice(), **(parts | {where: interrupt}))
    with pytest.raises(KeyboardInterrupt):
        feed.next()
    assert feed.interrupted
    with pytest.raises(LoaderClosed, match="interrupt"):
        feed.next()
    feed.close()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_close_waits_for_the_copies_that_run_and_lets_go_of_everything(prefetch: int) -> None:
    device, _, feed = opened(map(crate, range(9)), prefetch)
    batch = feed.next()
    assert batch is not None
    device.step(batch)
    buffers = [weakref.ref(slot.staging) for slot in feed._ring]
    copies: list[Any] = [slot.ticket for slot in feed._ring]
    assert not any(copy.copied for copy in copies)
    feed.close()
    assert len(copies) == prefetch + 1
    assert all(copy.copied for copy in copies)
    device.drain()
    assert device.seen == [content(0)], "the batch that was handed out stays"
    assert feed.in_flight == 0
    assert not any(buffer() for buffer in buffers)
    feed.close()
    with pytest.raises(LoaderClosed):
        feed.next()


def test_the_logic_does_not_import_torch() -> None:
    code = "import sys, penstock.feed.device; print('torch' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.strip() == "False"


# The devices of torch that are here


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("uint8", [0, 127, 128, 255]),
        ("uint16", [0, 32767, 32768, 50256, 65535]),
        ("uint32", [0, 2**31 - 1, 2**31, 2**32 - 1]),
        ("int8", [-128, 127]),
        ("int16", [-32768, 32767]),
        ("int32", [-(2**31), -100, 2**31 - 1]),
        ("int64", [-(2**63), 2**63 - 1]),
    ],
)
def test_widening_keeps_every_value(dtype: str, values: list[int]) -> None:
    import torch

    from penstock.feed.torch_device import widen

    array = np.array([values, values[::-1]], dtype)
    for where in (np.s_[:, :], np.s_[:, 1:], np.s_[1, ::2]):
        tensor = torch.from_numpy(array)[where]
        wide = widen(tensor, dtype)
        assert (wide.dtype, wide.is_contiguous()) == (torch.int64, True)
        assert wide.tolist() == array[where].astype(np.int64).tolist()
        wide.zero_()
    assert array.tolist() == [values, values[::-1]], "what was widened is a copy"


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint64"])
def test_what_does_not_fit_int64_is_not_widened(dtype: str) -> None:
    import torch

    from penstock.feed.torch_device import widen

    with pytest.raises(ConfigError, match=f"{dtype} cannot be widened"):
        widen(torch.from_numpy(np.zeros(3, dtype)), dtype)


def test_every_type_arrives_as_it_was() -> None:
    import torch

    from penstock.feed.device import TYPES
    from penstock.feed.torch_device import open_device

    arrays = {name: np.arange(6).reshape(2, 3).astype(name) for name in sorted(TYPES)}
    arrays |= {"scalar": np.array(3, np.int32), "none": np.zeros((2, 0), np.float16)}
    got: dict[str, Any] = {}

    def then(landing: Landing) -> Iterable[Any]:
        got.update({name: landing[name] for name in arrays})
        return got.values()

    device = open_device("cpu")
    layout = Layout.of(arrays)
    staging = device.staging(layout.nbytes)
    layout.pack(arrays, staging.bytes)
    device.send(staging, layout, then)
    staging.bytes[:] = 0
    for name, array in arrays.items():
        assert got[name].dtype == getattr(torch, array.dtype.name)
        np.testing.assert_array_equal(got[name].numpy(), array)


def test_batches_on_the_cpu_share_no_memory() -> None:
    from penstock.feed.torch_device import open_device

    source = Source(map(crate, range(6)))
    feed = DeviceFeed(open_device("cpu"), source.take, source.poll)
    batches = list(iter(feed.next, None))
    batches[0].inputs.zero_()
    batches[0].weights.zero_()
    assert [tuple(t.tolist() for t in b.tensors()) for b in batches[1:]] == [
        content(i) for i in range(1, 6)
    ]
    assert batches[0].targets.tolist() == content(0)[1]


def test_batches_on_the_meta_device_have_shapes_and_types() -> None:
    from penstock.feed.torch_device import open_device

    source = Source([crate(0, 3, 5), crate(1, 0, 2)])
    feed = DeviceFeed(open_device("meta"), source.take, source.poll)
    described = [
        [(str(t.device), str(t.dtype), tuple(t.shape)) for t in b.tensors()]
        for b in iter(feed.next, None)
    ]
    assert described == [
        [
            ("meta", "torch.int64", (n, m)),
            ("meta", "torch.int64", (n, m)),
            ("meta", "torch.float32", (n,)),
        ]
        for n, m in [(3, 4), (0, 1)]
    ]


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "privateuseone:3"])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(name: str) -> None:
    from penstock.feed.torch_device import open_device

    with pytest.raises(ConfigError, match=f"device='{name}' cannot be used: .*Here are: cpu"):
        open_device(name)


# CUDA, simulated: the real CudaDevice on streams that run in any order their events allow


class SimulatedStream:
    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.work: deque[Callable[[], bool]] = deque()
        cuda.streams.append(self)

    def push(self, work: Callable[[], object]) -> None:
        self.work.append(passing(work))

    def wait_event(self, event: SimulatedEvent) -> None:
        self.work.append(lambda: event.marked)

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(SimulatedEvent(self.cuda).record(other))

    def synchronize(self) -> None:
        SimulatedEvent(self.cuda).record(self).synchronize()


class SimulatedEvent:
    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.marked = True  # as in CUDA: one that was never recorded is over
        self.at = 0

    def record(self, stream: SimulatedStream | None = None) -> SimulatedEvent:
        self.marked = False
        (stream or self.cuda.current).push(self._mark)
        return self

    def _mark(self) -> None:
        self.marked, self.at = True, self.cuda.ticks

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.marked, "in CUDA this would be an error"
        assert end.marked
        return float(end.at - self.at)

    def query(self) -> bool:
        return self.marked

    def synchronize(self) -> None:
        while not self.marked:
            self.cuda.tick()


class Owned(np.ndarray[Any, Any]):
    """Memory that a tensor lives in; it dies with the last tensor there."""


@dataclass
class SimulatedCuda:
    """What `CudaDevice` uses of torch.cuda, and the caching allocator."""

    rng: random.Random
    streams: list[SimulatedStream] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)
    used_by: dict[int, set[int]] = field(default_factory=dict)
    alive: int = 0
    running: bool = False
    ticks: int = 0

    def __post_init__(self) -> None:
        self.trainer = self.current = SimulatedStream(self)

    def Stream(self, device: Any) -> SimulatedStream:  # noqa: N802
        return SimulatedStream(self)

    def Event(self, enable_timing: bool = False) -> SimulatedEvent:  # noqa: N802
        return SimulatedEvent(self)

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self.current

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def tick(self) -> None:
        stream = self.rng.choice([s for s in self.streams if s.work])
        self.running = True
        self.ticks += 1
        if stream.work[0]():
            stream.work.popleft()
        self.running = False

    def drain(self) -> None:
        while any(s.work for s in self.streams):
            self.tick()

    def allocate(self, shape: Any, dtype: Any, *, pinned: bool) -> Any:
        import torch

        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = np.full(-(-max(nbytes, 1) // 64) * 64, 0xA5, np.uint8)
        owned = raw[:nbytes].view(Owned)
        self.memory[raw.ctypes.data] = raw
        if not pinned:
            self.alive += 1
            weakref.finalize(owned, self.freed, raw, self.current)
        return torch.from_numpy(owned).view(dtype).reshape(shape)

    def freed(self, raw: Any, stream: SimulatedStream) -> None:
        """Somebody may get the memory once its own stream, and those it was recorded for, have come this far."""
        self.alive -= 1
        reuse = SimulatedStream(self)
        recorded = self.used_by.pop(raw.ctypes.data, set())
        for other in [stream, *(s for s in self.streams if id(s) in recorded)]:
            reuse.wait_event(SimulatedEvent(self).record(other))
        reuse.push(lambda: raw.fill(0x5A))

    def record(self, tensor: Any, stream: SimulatedStream) -> None:
        self.used_by.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(stream))

    def alias(self, value: Any) -> Any:
        """The same memory, without keeping it alive: queued work on a GPU keeps nothing alive either."""
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        raw = self.memory[value.untyped_storage().data_ptr()]
        flat = torch.from_numpy(raw).view(value.dtype)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())


@contextmanager
def simulated_cuda(seed: int) -> Iterator[tuple[SimulatedCuda, Any]]:
    """The simulation, and a CudaDevice on it. Every torch operation within is queued on the current stream."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from penstock.feed import torch_device

    cuda = SimulatedCuda(random.Random(seed))

    class Queued(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if cuda.running:
                return func(*args, **kwargs)
            if func is torch.ops.aten.empty.memory_format:
                return cuda.allocate(
                    args[0], kwargs.get("dtype"), pinned=bool(kwargs.get("pin_memory"))
                )
            changes = func._schema.returns[0].alias_info
            if changes is not None and not changes.is_write:
                return func(*args, **kwargs)  # a view
            inputs = [cuda.alias(arg) for arg in args]
            if changes is not None:
                cuda.current.push(lambda: func(*inputs, **kwargs))
                return args[0]
            model = func(*inputs, **kwargs)  # for its shape: there is nothing in the inputs yet
            made = cuda.allocate(model.shape, model.dtype, pinned=False)
            into = cuda.alias(made)
            cuda.current.push(lambda: into.copy_(func(*inputs, **kwargs)))
            return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_device, "cuda", cuda)
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: cuda.record(tensor, stream)
        )
        with Queued():
            yield cuda, torch_device.CudaDevice(torch.device("cpu"))


def plus_one(batch: Crate) -> None:
    batch.targets = batch.targets + 1 - 0  # tensors of its own, and one that is dropped at once


@settings(deadline=None)
@given(
    prefetch=st.integers(0, 3), seed=st.integers(0, 2**32), speed=st.integers(0, 40), count=st.integers(1, 9),
    hook=st.sampled_from([None, plus_one]),
)  # fmt: skip
def test_no_order_of_streams_shows_a_training_step_anything_but_its_batch(
    prefetch: int, seed: int, speed: int, count: int, hook: Callable[[Crate], None] | None
) -> None:
    rng = random.Random(seed)
    with simulated_cuda(seed) as (cuda, device):
        source = Source(map(crate, range(count)), rng)
        feed = DeviceFeed(device, source.take, source.poll, prefetch, hook)
        seen = []
        while (batch := feed.next()) is not None:
            seen.append([tensor.clone() for tensor in batch.tensors()])
            for _ in range(rng.randint(0, speed)):
                if any(s.work for s in cuda.streams):
                    cuda.tick()
            del batch  # its memory may be given away while the step on it has yet to run
        feed.close()
        cuda.drain()
    got = [tuple(tensor.tolist() for tensor in tensors) for tensors in seen]
    wanted = [content(i) for i in range(count)]
    if hook is not None:
        wanted = [(a, (np.array(b) + 1).tolist(), c) for a, b, c in wanted]
    assert got == wanted


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), speed=st.integers(0, 40))
def test_the_device_tells_late_how_long_it_stood_still_and_is_never_waited_for(
    seed: int, speed: int
) -> None:
    with simulated_cuda(seed) as (cuda, device):
        source = Source(map(crate, range(6)))
        feed = DeviceFeed(device, source.take, source.poll, prefetch=1)
        while (batch := feed.next()) is not None:
            told = feed.told()
            assert told is not None, "what is not known yet is left for later"
            for _ in range(speed):
                if any(s.work for s in cuda.streams):
                    cuda.tick()
            del batch
        feed.close()
        cuda.drain()
        gaps = cuda.ticks / 1e3  # an event tells milliseconds; here they are ticks
        waited = feed.told()
        assert waited is not None
        assert 0 < waited <= gaps


def test_waits_of_a_device_are_counted_however_rarely_somebody_asks() -> None:
    from penstock.feed.torch_device import PENDING

    told = []
    for asks in (True, False):
        with simulated_cuda(0) as (cuda, device):
            source = Source(map(crate, range(3 * PENDING)))
            feed = DeviceFeed(device, source.take, source.poll, prefetch=1)
            while (batch := feed.next()) is not None:
                del batch
                cuda.drain()
                if asks:
                    feed.told()
            told.append(feed.told())
            feed.close()
    assert told[0] == told[1]
    assert told[0] is not None
    assert told[0] > 0


def test_two_threads_may_ask_how_long_a_device_waited() -> None:
    import torch

    from penstock.feed.torch_device import CudaWaits

    waits = CudaWaits(torch.device("cpu"))
    others: list[threading.Thread] = []
    heard: list[float] = []

    class Past:
        """An event that is past, and is asked by one thread while another begins to ask."""

        def query(self) -> bool:
            if not others:
                others.append(threading.Thread(target=lambda: heard.append(waits.seconds())))
                others[0].start()
                others[0].join(0.2)  # it either is done by then, or waits for this one
            return True

        def elapsed_time(self, end: Past) -> float:
            return 2000.0

    waits._pending.append((Past(), Past()))
    assert waits.seconds() == 2.0
    others[0].join(60)
    assert heard == [2.0]


def test_a_batch_on_the_device_takes_no_memory_after_it_was_dropped() -> None:
    with simulated_cuda(0) as (cuda, device):
        source = Source(map(crate, range(8)))
        feed = DeviceFeed(device, source.take, source.poll, prefetch=2)
        alive = []
        while (batch := feed.next()) is not None:
            alive.append(cuda.alive)
            del batch
        # For each batch the bytes as they came, of which the weights are a view, the inputs and the targets.
        assert alive == [9, 9, 9, 9, 9, 9, 6, 3]
        feed.close()
        cuda.drain()
        assert cuda.alive == 0


def test_a_hook_that_raises_leaves_no_copy_running() -> None:
    kept = []

    def hook(batch: Crate) -> None:
        kept.append(batch.weights)
        raise ZeroDivisionError

    with simulated_cuda(0) as (_, device):
        source = Source([crate(0)])
        feed = DeviceFeed(device, source.take, source.poll, hook=hook)
        with pytest.raises(ZeroDivisionError):
            feed.next()
    assert kept[0].tolist() == content(0)[2], "the copy came after the exception"


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), prefetch=st.integers(0, 2))
def test_a_hook_sees_what_was_made_before_the_first_batch(seed: int, prefetch: int) -> None:
    import torch

    with simulated_cuda(seed) as (cuda, device):
        bias = torch.empty(1, dtype=torch.int64).fill_(7)  # queued on the trainer's stream

        def hook(batch: Crate) -> None:
            batch.inputs = batch.inputs + bias

        source = Source(map(crate, range(3)))
        feed = DeviceFeed(device, source.take, source.poll, prefetch, hook)
        batches = list(iter(feed.next, None))
        feed.close()
        cuda.drain()
    assert [b.inputs.tolist() for b in batches] == [
        (np.array(content(i)[0]) + 7).tolist() for i in range(3)
    ]

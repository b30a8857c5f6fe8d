"""The stages wired in order: the first file to open.

    source ══ work ══► producer ── batches ──► queue ──► next
            workers,    one thread,           bounded    the trainer's thread
            any order   in order

In:    a source (see `sources`: one file for each kind of data) and how to run it.
Out:   batches, through `next`.
Where: batches are made on the producer thread; with 0 workers, or by a caller who would only wait for them, on the
       caller's.
State: the threads and processes of one run. What a stream's own state is, its source knows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from penstock.config import default_workers
from penstock.encode.batch import Batch
from penstock.errors import LoaderClosed
from penstock.feed.pool import Pool, make_pool
from penstock.feed.prefetch import Prefetcher
from penstock.feed.quick import Last, note_of, nothing_ready, shortcut
from penstock.sources.source import Producer, Run, Source
from penstock.watch.attribution import Known
from penstock.watch.telemetry import Telemetry

if TYPE_CHECKING:
    from penstock.feed.autotune import Autotune

log = logging.getLogger("penstock")

QUICK_S = 0.1
"""A first batch that took no longer to make needs no more of them to stand ready."""
LOW_BATCHES = 100
"""So many batches in a row with less than half the queue filled mean that the workers do not keep up."""


class Pipeline:
    """One run of a stream, from given places on."""

    def __init__(
        self,
        source: Source,
        run: Run,
        *,
        workers: Literal["thread", "process"] = "thread",
        cpus: frozenset[int] | None = None,
        restart: bool = True,
    ) -> None:
        work = self._work = source.work(run)
        self._run = run
        self._clock = run.clock
        self._kind = workers
        self._cores = len(cpus) if cpus is not None else default_workers()
        self._pool: Pool = make_pool(
            run.n_workers, work, kind=workers, cpus=cpus, restart=restart, clock=run.clock
        )
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self._failed: Exception | None = None
        self.interrupted = False
        """Whether something like Ctrl-C came while a batch was made or taken: it may be lost, and others half made."""
        self._low, self._capacity = 0, run.prefetch_size
        self._queue: Prefetcher[Batch] | None = None
        self._weighs = False
        self._started = time.monotonic()
        try:
            self._producer: Producer = source.open(run, self._pool, work)
        except BaseException:
            self._pool.stop()
            self._pool.join(10.0)
            self._tell_work("stop")
            self._tell_work("close")
            raise
        if run.n_workers > 0:
            # Batches whose size is not known beforehand take slots by their bytes.
            weigh = None if source.row_bytes() else _Weigh(run.queue_bytes // run.prefetch_size)
            self._weighs = weigh is not None
            produce, at_once = self._producer.next, self._producer.at_once
            self._queue = Prefetcher(
                produce, run.prefetch_size, cpus, weigh, run.clock, at_once, note_of
            )
            try:
                self._queue.start()
            except BaseException:  # Ctrl-C, say: nobody has this to close it
                self.close()
                raise

    # For the loader

    def next(self, timeout: float | None) -> Batch | None:
        """The next batch, or None at the end of a finite stream."""
        if os.getpid() != self._pid:
            raise LoaderClosed(
                f"this loader was started in process {self._pid} and asked in process {os.getpid()}, a fork that has "
                "none of its threads. Create the loader in the process that uses it."
            )
        if self._queue is not None:
            batch = self._queue.get(timeout)
            if batch is not None:
                batch.finish()
            return batch
        if self._failed is not None:
            raise self._failed  # what follows a failure would not be the stream
        try:
            with self._clock.stage("pack") as track:
                made = self._producer.next()
            track.count("batch", len(made))
        except Exception as error:
            self._failed = error
            raise
        except BaseException:  # Ctrl-C, anywhere: what is half done cannot be gone on with
            self.interrupted = True
            raise
        return made[0] if made else None

    def shortcut(self, telemetry: Telemetry, last: Last) -> Callable[[], Batch | None]:
        """A shorter way than `next`, for batches that stand ready; one that gives nothing where it cannot be gone."""
        if self._queue is None or self._weighs:
            return nothing_ready
        return shortcut(self._queue, telemetry, last, tensors=self._run.tensors)

    def poll(self) -> Batch | None:
        """A batch that stands ready, if there is one."""
        return self.next(None) if self.depth > 0 else None

    def warm(self, batches: int | Literal["auto"], timeout: float) -> tuple[int, int]:
        """Wait until batches are ready; gives how many were waited for, and how many are."""
        assert self._queue is not None
        if batches != "auto":
            return batches, self._queue.fill(batches, timeout)
        begun = time.monotonic()
        filled = self._queue.fill(1, timeout)
        made = self._queue.first_made
        if made is not None and made - self._started <= QUICK_S:
            return 1, filled
        return self._capacity, self._queue.fill(
            self._capacity, max(0.0, timeout - (time.monotonic() - begun))
        )

    @property
    def depth(self) -> int:
        return self._queue.depth if self._queue is not None else 0

    def watch(self, depths: Iterable[int]) -> None:
        """Notice, by what each batch left in the queue, that the workers do not keep up, and say so once."""
        if self._low < 0 or self._capacity < 2 or self._queue is None:
            return  # said already, or a queue that every batch leaves empty
        for depth in depths:
            self._low = self._low + 1 if depth * 2 < self._capacity else 0
            if self._low >= LOW_BATCHES:
                self._warn()
                return

    def _warn(self) -> None:
        self._low = -1
        log.warning(
            "the queue has been less than half full for %d batches: %d workers do not keep up. "
            "Give them more cores (n_workers=…), or less to do.", LOW_BATCHES, self._pool.n_workers,
        )  # fmt: skip

    def totals(self) -> dict[str, int]:
        """What was read into the stream, what packing left out or added, and workers that were replaced."""
        return self._producer.totals() | {"worker_restarts": self._pool.restarts}

    def bad(self) -> dict[str, int]:
        """Records left out, by reason."""
        return self._producer.bad()

    # For telemetry, on any thread

    def gauges(self) -> dict[str, Any]:
        """How full the queues are, and where fetches spend their time."""
        depth, capacity = self.queue()
        queues = {"batches": {"depth": depth, "capacity": capacity}}
        lanes: Any = getattr(self._producer, "lanes", None)
        if hasattr(lanes, "ahead"):
            ready, asked = lanes.ahead()
            queues["chunks"] = {"depth": ready, "capacity": asked}
        return {"queues": queues, "fetch": self._fetch_times()}

    def queue(self) -> tuple[int, int]:
        """Batches that stand ready, and how many may."""
        return (self._queue.depth, self._queue.capacity) if self._queue is not None else (0, 0)

    def _fetch_times(self) -> dict[str, Any] | None:
        lanes: Any = getattr(self._producer, "lanes", None)
        times: dict[str, Any] | None = (
            lanes.fetch_times() if hasattr(lanes, "fetch_times") else None
        )
        return times

    def tuner(self, batch_bytes: int, telemetry: Telemetry) -> Autotune:
        """Changes what may be changed while this runs."""
        from penstock.feed.autotune import Autotune, pipeline_knobs

        lanes = getattr(self._producer, "lanes", None)
        if self._queue is None:
            return Autotune([], telemetry)
        knobs = pipeline_knobs(
            self._pool,
            self._queue,
            lanes,
            cores=self._cores,
            batch_bytes=batch_bytes,
            queue_bytes=self._run.queue_bytes,
            read_ahead_bytes=self._run.read_ahead_bytes,
        )
        return Autotune(knobs, telemetry)

    def known(self) -> Known:
        """What a verdict takes into account."""
        lanes: Any = getattr(self._producer, "lanes", None)
        times = self._fetch_times() or {}
        spent = sum(times.get(f"{part}_s", 0.0) for part in ("connect", "first_byte", "body"))
        return Known(
            n_workers=self._pool.n_workers,
            cores=self._cores,
            workers=self._kind,
            remote=bool(times),
            fetches=getattr(lanes, "fetches", 0),
            fetch_p95_ms=times.get("p95_ms", 0.0),
            retries=times.get("retries", 0),
            link_bound=spent > 0 and times.get("body_s", 0.0) > 0.7 * spent,
            tight=bool(getattr(lanes, "tight", False)),
            cached=bool(getattr(lanes, "cached", False)),
            text=lanes is not None,
            python=lanes is None and not getattr(self._producer, "rows_known", False),
        )

    def close(self, timeout: float = 10.0) -> bool:
        """Stop and join every thread, close every file. Safe to call again and from any thread.

        False if a thread was still busy after the timeout; it ends on its own.
        """
        if os.getpid() != self._pid:
            return True  # a forked child has none of the threads, and the files are its parent's
        if self._queue is not None:
            self._queue.stop()
        self._pool.stop()
        self._producer.stop()
        self._tell_work("stop")
        if (name := threading.current_thread().name).startswith(
            "penstock-"
        ) and name != "penstock-open":
            # A garbage collection on one of our own threads: it cannot wait for itself, and may hold
            # whatever the others wait for. They all end on their own now. "penstock-open" is the thread
            # of a `BackgroundOpen`, which closes its own loader.
            return False
        deadline = time.monotonic() + timeout
        joined = self._pool.join(timeout)
        if self._queue is not None:
            joined = self._queue.join(max(0.0, deadline - time.monotonic())) and joined
        if not joined:
            log.warning(
                "a worker was still busy %.0f s after shutdown began; it ends with its piece of work",
                timeout,
            )
            return False
        with self._closing:
            self._producer.close()
            self._tell_work("close")
        return True

    def _tell_work(self, what: str) -> None:
        """Have the work stop or close, where it has anything to."""
        if hasattr(self._work, what):
            getattr(self._work, what)()


class _Weigh:
    """How many slots a batch takes."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = max(1, slot_bytes)

    def __call__(self, batch: Batch) -> int:
        return -(-batch.nbytes // self._slot_bytes)

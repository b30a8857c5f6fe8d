"""The pipeline of one run: workers, producer and queue. Start reading here.

    source ══ work ══► producer ── batches ──► queue ──► next()
            workers,    one thread,           bounded    the trainer's thread
            any order   in order

With 0 workers there is no thread and no queue: `next` makes the batch itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Literal

import numpy as np

from penstock.config import default_workers
from penstock.encode.batch import Batch, BatchOrigin
from penstock.errors import LoaderClosed
from penstock.feed.autotune import Autotune, pipeline_knobs
from penstock.feed.prefetch_queue import PrefetchQueue
from penstock.feed.worker_pool import make_pool
from penstock.sources.base import Producer, RunContext, Source
from penstock.types import MiB
from penstock.watch.attribution import Known
from penstock.watch.loader_stats import SourceChunks, shuffle_quality
from penstock.watch.telemetry import Telemetry

log = logging.getLogger("penstock")

SOON_S = 0.1
"""`warmup_batches="auto"` buffers no more if the first batch took no longer than this."""
OWN_THREADS = ("penstock-worker", "penstock-fetch", "penstock-producer")
LOW_BATCHES = 100
"""Consecutive batches with the queue less than half full, before a warning."""


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory for the next batches.

    By default glibc returns all but a few hundred KB to the system, and getting it back costs as
    much as filling a batch. After a large block is freed, up to 32 MiB, glibc keeps twice its
    size for each thread. The block need not be touched.
    """
    np.empty(31 * MiB, np.uint8)


class Pipeline:
    """The threads and processes of one run."""

    def __init__(self, source: Source, run: RunContext) -> None:
        self._run, self._clock = run, run.clock
        self._cores = default_workers() if run.cpus is None else len(run.cpus)
        self._work = source.work(run)
        self._pool = make_pool(
            run.n_workers, self._work, workers=run.workers, cpus=run.cpus, clock=run.clock
        )
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._failed: Exception | None = None
        self._low = 0
        self._origin: BatchOrigin | None = None
        """The origin of the last batch that was made."""
        self.makes_tensors = False
        """True if the producer wraps arrays as tensors: set once torch is imported."""
        self._queue: PrefetchQueue[Batch] | None = None
        self._started = time.monotonic()
        keep_freed_memory()
        try:
            self._producer: Producer = source.open(run, self._pool, self._work)
        except BaseException:
            self._pool.stop()
            self._work.stop()
            self._pool.join(10.0)
            self._work.close()
            raise
        if run.n_workers > 0:
            slot_bytes = max(1, run.queue_bytes // run.prefetch_size)
            self._queue = PrefetchQueue(
                self._make,
                run.prefetch_size,
                clock=run.clock,
                cpus=run.cpus,
                # Batches of unknown size take slots by their bytes.
                slots=lambda batch: 1 if run.row_bytes else -(-batch.nbytes // slot_bytes),
                block=run.block,
            )

    def next(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch, or None at the end of a finite stream."""
        if os.getpid() != self._pid:
            raise LoaderClosed(
                f"this loader was started in process {self._pid} and used in process {os.getpid()}, a "
                "fork without its threads. Create the loader in the process that uses it."
            )
        if self._queue is not None:
            batch = self._queue.get(timeout_s)
            if batch is not None and self._low >= 0:
                self._watch_depth(self._queue)
            return batch
        if self._failed is not None:
            raise self._failed
        try:
            return next(iter(self._make(1)), None)
        except Exception as error:
            self._failed = error
            raise

    def _make(self, n: int) -> list[Batch]:
        """Return up to `n` batches; an empty list at the end of a finite stream."""
        with self._clock.stage("pack") as timeline:
            batches = self._producer.take(n)
        timeline.count("batch", len(batches))
        if self.makes_tensors:
            for batch in batches:
                batch.to_torch()
        if batches:
            self._origin = batches[-1]._origin
        return batches

    def poll(self) -> Batch | None:
        """Return a batch if one is buffered, otherwise None."""
        return self.next() if self.depth > 0 else None

    def warm(self, batches: int | Literal["auto"], timeout_s: float) -> tuple[int, int]:
        """Wait until batches are buffered. Return the requested and the buffered number."""
        assert self._queue is not None
        if batches != "auto":
            return batches, self._queue.fill(batches, timeout_s)
        begun = time.monotonic()
        filled = self._queue.fill(1, timeout_s)
        made = self._queue.first_made
        if made is not None and made - self._started <= SOON_S:
            return 1, filled
        left_s = max(0.0, timeout_s - (time.monotonic() - begun))
        return self._queue.capacity, self._queue.fill(self._queue.capacity, left_s)

    @property
    def depth(self) -> int:
        """The number of buffered batches."""
        return self._queue.depth if self._queue is not None else 0

    def _watch_depth(self, queue: PrefetchQueue[Batch]) -> None:
        """Warn once if the workers do not keep up."""
        self._low = self._low + 1 if queue.depth * 2 < queue.capacity >= 2 else 0
        if self._low >= LOW_BATCHES:
            self._low = -1
            log.warning(
                "the queue has been less than half full for %d batches: %d workers do not keep up. "
                "Give them more cores (n_workers=…), or less to do.",
                LOW_BATCHES,
                self._pool.n_workers,
            )

    def totals(self) -> dict[str, int]:
        """Return counters of the data read into the stream, and of replaced workers."""
        return self._producer.totals() | {"worker_restarts": self._pool.restarts}

    def bad(self) -> dict[str, int]:
        """Return the number of rejected records by reason."""
        return self._producer.bad()

    # For telemetry, called on any thread

    def gauges(self) -> dict[str, Any]:
        """Return queue depths, the timing of fetches, lane balance and shuffle quality."""
        gauges = self._producer.gauges()
        depth, capacity = self.queue()
        queues = {"batches": {"depth": depth, "capacity": capacity}}
        if "chunks_ready" in gauges:
            under_way = gauges["chunks_under_way"]
            queues["chunks"] = {"depth": gauges["chunks_ready"], "capacity": under_way}
        return {
            "queues": queues,
            "fetch": gauges.get("fetch"),
            "balance": gauges.get("lane_balance"),
            "shuffle_quality": self._shuffle_quality(gauges.get("source_chunks")),
        }

    def _shuffle_quality(self, chunks: SourceChunks | None) -> float | None:
        if chunks is None or self._origin is None or not self._run.shuffle:
            return None
        return shuffle_quality(self._origin.spans(), chunks, self._run.shard.mod)

    def queue(self) -> tuple[int, int]:
        """Return the depth and the capacity of the queue."""
        return (self.depth, self._queue.capacity) if self._queue is not None else (0, 0)

    def known(self) -> Known:
        """Return the facts that a verdict depends on."""
        gauges = self._producer.gauges()
        times = gauges.get("fetch") or {}
        spent_s = sum(times.get(f"{part}_s", 0.0) for part in ("first_byte", "body"))
        return Known(
            n_workers=self._pool.n_workers,
            cores=self._cores,
            workers=self._run.workers,
            remote=bool(times),
            fetch_p95_ms=times.get("p95_ms", 0.0),
            retries=times.get("retries", 0),
            link_bound=spent_s > 0 and times.get("body_s", 0.0) > 0.7 * spent_s,
            tight=gauges.get("memory_bound", False),
            text="chunks_ready" in gauges,
            **{name: gauges[name] for name in ("fetches", "cached", "python") if name in gauges},
        )

    # Autotune

    def tuner(self, telemetry: Telemetry) -> Autotune:
        """Return the tuner of workers, requests, read-ahead and queue for this run."""
        if self._queue is None:
            return Autotune([], telemetry)
        lanes = getattr(self._producer, "lanes", None)
        knobs = pipeline_knobs(self._pool, self._queue, lanes, self._run, self._cores)
        return Autotune(knobs, telemetry)

    # Shutdown

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop and join all threads, and close all files. Safe to call again, from any thread.

        Return False if a thread was still busy after the timeout; it exits after its current task.
        """
        if os.getpid() != self._pid:
            return True  # a forked child has none of the threads, and its parent owns the files
        if self._queue is not None:
            self._queue.stop()
        self._pool.stop()
        self._producer.stop()
        self._work.stop()
        if threading.current_thread().name.startswith(OWN_THREADS):
            # Garbage collection runs on one of these threads, which cannot join itself. All of
            # them exit without a join.
            return False
        deadline = time.monotonic() + timeout_s
        joined = self._pool.join(timeout_s)
        if self._queue is not None:
            joined = self._queue.join(max(0.0, deadline - time.monotonic())) and joined
        if not joined:
            log.warning(
                "a worker was still busy %.0f s after shutdown began; it exits after its current task",
                timeout_s,
            )
            return False
        with self._closing:
            self._producer.close()
            self._work.close()
        return True

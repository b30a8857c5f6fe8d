"""The stages wired in order: the first file to open.

    files ──plan──► chunks ══ fetch · decode · tokenize ══► windows ── shuffle · pack ──► rows ── batch ──► queue
             pure                  stateless                                 stateful
                          worker threads, any order                   one producer thread, in order

In:    what a dataset is made of, a place for each lane, and how to run.
Out:   batches, through `next`.
Where: `next` runs on the producer thread, or with 0 workers on the caller's.
State: see `lane`, `encode.pack` and `encode.batch`; all of it integers that a batch carries along.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.encode.batch import Batch, Batcher, Position
from penstock.encode.pack import make_packer
from penstock.encode.tokenize import Tokenizer
from penstock.encode.window import Place
from penstock.errors import LoaderClosed
from penstock.feed.pool import Pool, Task, make_pool
from penstock.feed.prefetch import Prefetcher
from penstock.lane import Lane, LaneSettings
from penstock.order.plan import Plan
from penstock.read.reader import Reader, ReadSettings
from penstock.read.records import Quarantine, where
from penstock.types import Bad, ChunkRef, FileRef, Packing, Shard, TokenChunk

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What the stream is a function of, besides the files and the tokenizer."""

    seq_len: int
    packing: Packing
    shuffle: bool
    seed: int
    lanes: int
    window_chunks: int
    window_bytes: int
    extras: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How it is run: none of it changes the stream."""

    batch_size: int
    shard: Shard
    n_workers: int
    prefetch_size: int
    doc_batch: int | None
    read_ahead_bytes: int
    drop_last: bool
    end_epoch: int | None
    tensors: bool
    quarantine: str | None


@dataclass(slots=True)
class Counts:
    """What has entered the stream so far. Written by the producer thread only."""

    documents: int = 0
    empty: int = 0
    text_bytes: int = 0
    bad: dict[str, int] = field(default_factory=dict)


class Pipeline:
    """One run of a stream: threads, open files and lanes, from given places on."""

    def __init__(
        self,
        *,
        files: tuple[FileRef, ...],
        tokenizer: Tokenizer,
        read: ReadSettings,
        stream: StreamSettings,
        run: RunSettings,
        places: Mapping[int, Place],
        row: int,
        batch: int,
        state: Callable[[Position], dict[str, Any]],
    ) -> None:
        self._tokenizer = tokenizer
        self._run = run
        own = range(run.shard.rem, stream.lanes, run.shard.mod)
        self._reader = Reader(read, run.n_workers, len(own))
        self._plan = Plan(files=files, lanes=stream.lanes, shuffle=stream.shuffle, seed=stream.seed)
        self._quarantine = Quarantine(run.quarantine) if run.quarantine else None
        self._inspected: OrderedDict[int, Task[tuple[list[ChunkRef], list[Bad]]]] = OrderedDict()
        self._reported: set[int] = set()
        self._counts = Counts()
        self._pool: Pool = make_pool(run.n_workers)
        settings = LaneSettings(
            chunk_bytes=read.chunk_bytes,
            window_chunks=stream.window_chunks if stream.shuffle else 1,
            window_bytes=stream.window_bytes,
            end_epoch=run.end_epoch,
            expansion=tokenizer.expansion,
            dtype=tokenizer.dtype,
        )
        self._lanes = [
            Lane(n, self._plan, settings, places[n], self._chunks_of, self._foresee, self._submit, self._use)
            for n in own
        ]
        self._packers = [
            make_packer(
                stream.packing,
                self._windows_of(lane),
                places[lane.number],
                stream.seq_len,
                tokenizer.pad_id,
                tokenizer.dtype,
                keep_tail=not run.drop_last,
                track=stream.extras,
            )
            for lane in self._lanes
        ]
        self._batcher = Batcher(
            self._packers,
            shard=run.shard,
            lanes=stream.lanes,
            batch_size=run.batch_size,
            seq_len=stream.seq_len,
            drop_last=run.drop_last,
            extras=stream.extras,
            tensors=run.tensors,
            most=run.prefetch_size // 2 if run.n_workers else 1,
            row=row,
            batch=batch,
            state=state,
        )
        compressed = any(file.open_ended for file in files)
        self._budget = run.read_ahead_bytes - (self._reader.cache_bytes if compressed else 0)
        self._failed: Exception | None = None
        self.interrupted = False
        self._queue: Prefetcher[Batch] | None = None
        if run.n_workers > 0:
            self._queue = Prefetcher(self._batcher.next, run.prefetch_size)
            self._queue.start()
        self._closing = threading.Lock()
        self._pid = os.getpid()

    # For the loader

    def next(self, timeout: float | None) -> Batch | None:
        """The next batch, or None at the end of a finite stream."""
        if os.getpid() != self._pid:
            raise LoaderClosed(
                f"this loader was started in process {self._pid} and asked in process {os.getpid()}, a fork that has "
                "none of its threads. Create the loader in the process that uses it."
            )
        if self._queue is not None:
            return self._queue.get(timeout)
        if self._failed is not None:
            raise self._failed  # what follows a failure would not be the stream
        try:
            made = self._batcher.next()
        except Exception as error:
            self._failed = error
            raise
        except BaseException:  # Ctrl-C, anywhere: what is half done cannot be gone on with
            self.interrupted = True
            raise
        return made[0] if made else None

    def warm(self, batches: int, timeout: float) -> int:
        """Wait until batches are ready; gives how many are."""
        return self._queue.fill(batches, timeout) if self._queue is not None else 0

    @property
    def depth(self) -> int:
        return self._queue.depth if self._queue is not None else 0

    def totals(self) -> dict[str, int]:
        """What was read into the stream, and what packing left out or added."""
        counts = self._counts
        read = {"documents": counts.documents, "empty": counts.empty, "text_bytes": counts.text_bytes}
        names = ("cropped_tokens", "padded_tokens", "dropped_tokens")
        return read | {name: sum(getattr(p.counts, name) for p in self._packers) for name in names}

    def bad(self) -> dict[str, int]:
        """Records left out, by reason."""
        return dict(self._counts.bad)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop and join every thread, close every file. Safe to call again and from any thread.

        False if a thread was still busy after the timeout; it ends on its own.
        """
        if os.getpid() != self._pid:
            return True  # a forked child has none of the threads, and the files are its parent's
        if self._queue is not None:
            self._queue.stop()
        self._pool.stop()
        self._reader.stop()
        if threading.current_thread().name.startswith("penstock-"):
            # A garbage collection on one of our own threads: it cannot wait for itself, and may hold
            # whatever the others wait for. They all end on their own now.
            return False
        deadline = time.monotonic() + timeout
        joined = self._pool.join(timeout)
        if self._queue is not None:
            joined = self._queue.join(max(0.0, deadline - time.monotonic())) and joined
        if not joined:
            log.warning("a worker was still busy %.0f s after shutdown began; it ends with its piece of work", timeout)
            return False
        with self._closing:
            self._reader.close()
            if self._quarantine is not None:
                self._quarantine.close()
        return True

    # On the worker threads

    def _inspect(self, file: FileRef) -> tuple[list[ChunkRef], list[Bad]]:
        try:
            return self._reader.inspect(file)
        except BaseException as error:
            error.add_note(f"in stage fetch, listing the chunks of {file.path}")
            raise

    def _make_chunk(self, ref: ChunkRef) -> TokenChunk:
        stage = "fetch, decode"
        try:
            documents = self._reader.read(ref)
            stage = "tokenize"
            return self._tokenizer.encode(ref, documents, self._run.doc_batch)
        except BaseException as error:
            error.add_note(f"in stage {stage}, reading {ref}")
            raise

    # On the producer thread

    def _windows_of(self, lane: Lane) -> Callable[[], Any]:
        def next_window() -> Any:
            self._read_ahead()
            window = lane.next_window()
            # A lane may have nothing in a finite stream that others fill; a shard or, where all
            # lanes have to go in step, a lane may not.
            if window is None and all(x.barren for x in ([lane] if self._run.drop_last else self._lanes)):
                raise lane.no_data()
            return window

        return next_window

    def _read_ahead(self) -> None:
        """Ask for chunks, the lane with fewest first, within the bounds of chunks and bytes."""
        workers = self._pool.n_workers
        if workers == 0:
            return
        budget = self._budget - sum(lane.ahead_bytes() for lane in self._lanes)
        hungry = [lane for lane in self._lanes if lane.ahead_chunks() < lane.wanted_ahead(workers)]
        while hungry and budget > 0:
            lane = min(hungry, key=Lane.ahead_chunks)
            before = lane.ahead_bytes()
            try:
                more = lane.ask()
            except Exception:
                # It will be raised where the stream gets there: asking again fails again.
                more = False
            if not more or lane.ahead_chunks() >= lane.wanted_ahead(workers):
                hungry.remove(lane)
            budget -= lane.ahead_bytes() - before

    def _submit(self, ref: ChunkRef) -> Task[TokenChunk]:
        return self._pool.submit(self._make_chunk, ref)

    def _chunks_of(self, group: tuple[int, ...]) -> list[list[ChunkRef]]:
        """The chunks of some files: their footers are read side by side, and kept for a while."""
        self._foresee(group)
        chunks = []
        for index in group:
            refs, bad = self._inspected[index].result()
            if bad and index not in self._reported:
                self._reported.add(index)
                self._report(bad)
            chunks.append(refs)
        while len(self._inspected) > max(64, len(group)) and self._plan.whole_files:
            self._inspected.popitem(last=False)
        return chunks

    def _foresee(self, group: tuple[int, ...]) -> None:
        """Have the footers of some files read, before everything else that waits."""
        for index in group:
            if index not in self._inspected and not self._plan.files[index].open_ended:
                self._inspected[index] = self._pool.submit_first(self._inspect, self._plan.files[index])

    def _use(self, chunk: TokenChunk) -> None:
        """A chunk enters the stream: only now does what was found in it count."""
        self._counts.documents += len(chunk.docs)
        self._counts.empty += chunk.empty
        self._counts.text_bytes += chunk.text_bytes
        if chunk.bad:
            self._report(chunk.bad)
        self._read_ahead()

    def _report(self, bad: list[Bad]) -> None:
        for record in bad:
            if record.reason not in self._counts.bad:
                log.warning(
                    "left out %s: %s (further ones are counted, not logged)", where(record.address), record.detail
                )
            self._counts.bad[record.reason] = self._counts.bad.get(record.reason, 0) + 1
        if self._quarantine is not None:
            self._quarantine.write(bad)

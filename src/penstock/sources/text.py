"""Text, read, tokenized and packed: what files and iterables have in common.

    files ──plan──► chunks ══ fetch · decode · tokenize ══► windows ── shuffle · pack ──► rows
             pure                  stateless                                 stateful
                          workers, any order                     the producer thread, in order

In:    a `TextDataset`, and a place for each lane.
Out:   rows, by lane.
Where: the producer thread; `TextWork` on the workers, and for what is remote on fetch threads.
State: see `lane` and `encode.pack`; all of it integers that a batch carries along.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock.encode.pack import make_packer
from penstock.encode.window import Place
from penstock.errors import StateFormat
from penstock.feed.pool import Pool, Task
from penstock.lane import Lane, LaneSettings
from penstock.order.plan import Plan
from penstock.read.records import where
from penstock.sources.source import Run
from penstock.state import is_count, show
from penstock.types import Bad, ChunkRef, Packing, TokenChunk

log = logging.getLogger("penstock")

EPOCHS = 10**9
"""No stream comes this far. A place that says so would have an iterable read again for years, for its other lanes."""
CHUNKS = 1 << 31
"""No file has this many for a lane. Byte offsets stay within 63 bits up to here, of 4 MiB for each of 1,023 lanes."""


class PackSettings(NamedTuple):
    """How documents become rows."""

    seq_len: int
    packing: Packing
    window_chunks: int
    window_bytes: int
    extras: bool
    chunk_bytes: int
    pad_id: int
    dtype: np.dtype[Any]
    expansion: int


@dataclass(slots=True)
class Counts:
    """What has entered the stream so far. Written by one thread at a time: whoever makes batches."""

    documents: int = 0
    empty: int = 0
    text_bytes: int = 0
    chunks: int = 0
    """To their last document: first documents whose chunk is to follow make none yet."""
    cache_hits: int = 0
    bad: dict[str, int] = field(default_factory=dict)


class TextLanes(ABC):
    """The lanes of one run: what is read ahead, and what was found on the way."""

    def __init__(
        self, *, plan: Plan, pack: PackSettings, run: Run, pool: Pool, read_ahead_bytes: int
    ) -> None:
        self._plan = plan
        self._run = run
        self._pool = pool
        self._budget = read_ahead_bytes
        self.tight = False
        """Whether more would be read ahead if there were more memory for it."""
        self.extra = 0
        """Chunks to have under way beyond the next window, at the least."""
        self.forward = False
        """Whether some files can only be read forwards, with room for as many workers as there are."""
        self._counts = Counts()
        self._reported_docs = 0
        settings = LaneSettings(
            chunk_bytes=pack.chunk_bytes,
            window_chunks=pack.window_chunks if run.shuffle else 1,
            window_bytes=pack.window_bytes,
            end_epoch=run.end_epoch,
            expansion=pack.expansion,
            dtype=pack.dtype,
        )
        self._lanes = [
            Lane(
                n,
                plan,
                settings,
                run.places[n],
                self.chunks_of,
                self.foresee,
                self.known,
                self.submit,
                self.go_on,
                self._use,
            )
            for n in run.own_lanes
        ]
        self.packers = [
            make_packer(
                pack.packing,
                self._windows_of(lane),
                run.places[lane.number],
                pack.seq_len,
                pack.pad_id,
                pack.dtype,
                keep_tail=not run.drop_last,
                track=pack.extras,
            )
            for lane in self._lanes
        ]

    # What differs between files and iterables

    @abstractmethod
    def chunks_of(self, group: tuple[int, ...]) -> list[list[ChunkRef]]:
        """The chunks of some files."""

    def foresee(self, group: tuple[int, ...]) -> None:
        """Some files will be needed soon."""
        return

    def known(self, group: tuple[int, ...]) -> bool:
        """Whether it is known already which chunks some files have."""
        return True

    @abstractmethod
    def submit(self, ref: ChunkRef, place: Place, fresh: bool) -> Task[TokenChunk]:
        """Have a chunk made. `fresh`: it is its lane's first, and read from its first document on."""

    def go_on(self, begun: TokenChunk) -> Task[TokenChunk]:
        """Have the rest of a chunk made, of which only the first documents were asked for."""
        return self._pool.submit("encode_rest", begun, first=True)

    def beyond(self, workers: int) -> int:
        """Chunks to have under way beyond the next window: work for every thread.

        None at first: somebody waits for the first batch, which then has the machine to itself.
        """
        return 2 * workers if self._counts.chunks else 0

    def stop(self) -> None:
        """Nothing to do: the work is stopped by whoever runs it."""
        return

    def close(self) -> None:
        """Let go of what is not the work's."""
        return

    # Counting

    def totals(self) -> dict[str, int]:
        counts = self._counts
        return {
            "documents": counts.documents,
            "empty": counts.empty,
            "text_bytes": counts.text_bytes,
            "cache_hits": counts.cache_hits,
            "cache_misses": counts.chunks - counts.cache_hits,
        }

    def bad(self) -> dict[str, int]:
        return dict(self._counts.bad)

    def read_ahead(self) -> int:
        """Chunks that are to be under way beyond the next window."""
        return max(self.extra, self.beyond(self._pool.n_workers))

    def allow(self, read_ahead_bytes: int) -> None:
        """Read ahead within so many bytes from now on."""
        self._budget = read_ahead_bytes

    def ahead(self) -> tuple[int, int]:
        """Chunks that are ready, and those that were asked for. For any thread, which may find them a moment old."""
        tasks = [task for lane in self._lanes for task in lane.tasks()]
        return sum(task.ready() for task in tasks), len(tasks)

    # On the producer thread

    def _windows_of(self, lane: Lane) -> Callable[[], Any]:
        def next_window() -> Any:
            self._read_ahead()
            window = lane.next_window()
            # A lane may have nothing in a finite stream that others fill; a shard or, where all
            # lanes have to go in step, a lane may not.
            if window is None and all(
                x.barren for x in ([lane] if self._run.drop_last else self._lanes)
            ):
                raise lane.no_data()
            if self._run.shuffle and self._counts.chunks:
                self._read_ahead()  # the next window may be larger than this one, for which `_use` has asked on the way
            return window

        return next_window

    def _read_ahead(self) -> None:
        """Ask for chunks, the lane with fewest first, within the bounds of chunks and bytes."""
        workers = self._pool.n_workers
        if workers == 0:
            return
        beyond = self.read_ahead() if self._counts.chunks else self.beyond(workers)
        if beyond:
            for lane in self._lanes:
                lane.ask_rest()  # before any worker begins with what comes after it
        budget = self._budget - sum(lane.ahead_bytes() for lane in self._lanes)
        hungry = [lane for lane in self._lanes if lane.ahead_chunks() < lane.wanted_ahead(beyond)]
        while hungry and budget > 0:
            lane = min(hungry, key=Lane.ahead_chunks)
            if lane.waits():
                # What is there already goes on its way first. Whoever needs this chunk now will wait for it.
                hungry.remove(lane)
                continue
            before = lane.ahead_bytes()
            try:
                more = lane.ask()
            except Exception:
                # It will be raised where the stream gets there: asking again fails again.
                more = False
            if not more or lane.ahead_chunks() >= lane.wanted_ahead(beyond):
                hungry.remove(lane)
            budget -= lane.ahead_bytes() - before
        self.tight = bool(hungry) and budget <= 0

    def _use(self, chunk: TokenChunk) -> None:
        """A chunk enters the stream: only now does what was found in it count."""
        counts = self._counts
        counts.documents += len(chunk.docs)
        counts.empty += chunk.empty
        counts.text_bytes += chunk.text_bytes
        counts.chunks += chunk.rest is None
        counts.cache_hits += chunk.cached
        if chunk.bad:
            self.report(chunk.bad)
        if (
            self._run.report_docs
            and counts.documents - self._reported_docs >= self._run.report_docs
        ):
            self._reported_docs = counts.documents
            log.info(
                "%d documents, %.1f MB of text read", counts.documents, counts.text_bytes / 1e6
            )
        if chunk.rest is None:  # else the first batch is made first
            self._read_ahead()

    def report(self, bad: Sequence[Bad]) -> None:
        """Count records that are left out, and log the first of each kind."""
        for record in bad:
            if record.reason not in self._counts.bad:
                log.warning(
                    "left out %s: %s (further ones are counted, not logged)",
                    where(record.address),
                    record.detail,
                )
            self._counts.bad[record.reason] = self._counts.bad.get(record.reason, 0) + 1


def check_place(value: Any) -> Place:
    """The place of a lane of text: seven counts, and for iterables what the source said."""
    fits = isinstance(value, list | tuple) and len(value) in (7, 8)
    if not fits or not all(is_count(n) for n in value[:7]):
        raise StateFormat(f"a lane's place is not 7 counts: {show(value)}")
    place = Place(*value)
    if place.epoch >= EPOCHS or place.chunk >= CHUNKS:
        raise StateFormat(
            f"a lane stands at chunk {place.chunk} of epoch {place.epoch}: no stream is that long"
        )
    said = place.source
    if said is not None and (not isinstance(said, dict) or not is_count(said.get("taken"))):
        raise StateFormat(f"a lane's place does not say where its iterable stands: {show(said)}")
    return place

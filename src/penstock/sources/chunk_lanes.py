"""Lanes of chunks: read ahead, cut into shuffle windows, packed into rows.

    files ──plan──► chunks ══ fetch · decode · tokenize ══► windows ── shuffle · pack ──► rows
             pure                  stateless                                stateful
                              workers, any order                   the producer thread, in order

`ChunkLane` is one lane. `ChunkLanes` holds the lanes of a rank: it reads ahead within a budget of
bytes and counts what enters the stream. What differs between files, iterables and other kinds of
chunks is behind `ChunkReader`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.encode.best_fit import BestFitPacker
from penstock.encode.concat import ConcatPacker
from penstock.encode.rows import LaneOptions, Packer
from penstock.encode.tokenizer import Tokenizer
from penstock.encode.window import Window
from penstock.errors import SourceError
from penstock.feed.worker_pool import Pool, Task
from penstock.options import TextOptions
from penstock.order.plan import Plan
from penstock.order.shuffle import spread, window_chunks
from penstock.read.validation import where
from penstock.sources.base import Counted, Lanes, RowSource, RunContext
from penstock.types import Bad, ChunkRef, FileRef, LanePosition, MiB, TokenChunk

log = logging.getLogger("penstock")

EMPTY_EPOCHS = 8
"""A lane that found no text in this many epochs in a row has too little of it."""
SHUFFLE_BYTES = 256 * MiB
"""Bytes of text after which a shuffle window is full, however few chunks it has."""
LOOK_AHEAD = 8
"""Groups of files whose chunks are looked up at once, when read-ahead would wait for one."""
_DOCUMENTS = 4  # a permutation of documents shares no key with those of `order.plan`


class ChunkReader(Counted, Protocol):
    """What differs between kinds of chunks. Called on the producer thread."""

    @property
    def read_ahead(self) -> int:
        """Chunks to have under way beyond the next window, besides those for the workers."""
        return 0

    def look_up(self, files: tuple[int, ...]) -> None:
        """Start to find the chunks of some files, apart from sequential ones."""
        return

    def known(self, files: tuple[int, ...]) -> bool:
        """Return True if the chunks of some files are known already."""
        return True

    def chunks_of(self, files: tuple[int, ...]) -> list[list[ChunkRef]]:
        """Return the chunks of each file. May wait. Not called for sequential files."""
        return []

    def take_bad(self) -> list[Bad]:
        """Return, once, the files that `chunks_of` found to be unreadable."""
        return []

    def submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        """Start to make a chunk."""

    def used(self, chunk: TokenChunk) -> None:
        """A chunk has entered the stream."""
        return

    def reopen(self, lane: int, epoch: int) -> None:
        """A lane leaves its position and begins an epoch."""
        return

    def rejected(self, bad: Sequence[Bad]) -> None:
        """Records were rejected."""
        return


class ChunkPlan(Protocol):
    """Which chunks a lane reads, and in which order. A pure function."""

    @property
    def shuffle(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def lanes(self) -> int: ...

    def groups(self, lane: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the lane's groups of files, in reading order."""

    def is_sequential(self, group: tuple[int, ...]) -> bool:
        """Return True if the group is a file that can only be read in order."""

    def chunks(
        self,
        lane: int,
        epoch: int,
        number: int,
        group: tuple[int, ...],
        chunks: Sequence[Sequence[ChunkRef]],
    ) -> list[ChunkRef]:
        """Return the lane's chunks of its `number`-th group, given the chunks of each file."""

    def next_chunk(self, lane: int, epoch: int, file: int, index: int, nbytes: int) -> ChunkRef:
        """Return the lane's `index`-th chunk of a file that can only be read in order."""

    def balance(self) -> float:
        """Return the bytes of the lane that has least, as a share of the mean."""


@dataclass(slots=True, eq=False)
class Ahead:
    """A chunk that is under way."""

    position: LanePosition
    ref: ChunkRef
    task: Task[TokenChunk]
    nbytes: int | None = None
    """Its size, once it is made and was counted."""


class ChunkLane:
    """The chunks of one lane, from a position on."""

    def __init__(
        self,
        number: int,
        plan: ChunkPlan,
        options: LaneOptions,
        reader: ChunkReader,
        start: LanePosition,
        end_epoch: int | None,
        used: Callable[[TokenChunk], None],
    ) -> None:
        self.number = number
        self._plan, self._options, self._reader, self._used = plan, options, reader, used
        self._end_epoch = end_epoch
        self._ahead: deque[Ahead] = deque()
        self._uncounted: list[Ahead] = []
        self._counted_bytes = 0
        """Those under way whose size is not known, and the bytes of the others."""
        self._epoch, self._group, self._chunk = start.epoch, start.group, start.chunk
        """The next chunk to submit."""
        self._window, self._window_epoch = start.window, start.epoch
        """The next window to build."""
        self._groups: list[tuple[int, ...]] | None = None
        self._refs: list[ChunkRef] | None = None
        self._submitted = 0 if start == LanePosition(epoch=start.epoch) else 1
        """Chunks submitted in this epoch, or earlier by the run that saved the position."""
        self.found_text = bool(self._submitted)
        self._text_epoch = start.epoch if self.found_text else start.epoch - 1
        """The last epoch that had text."""
        self.finished = False

    # Read-ahead

    def ahead(self) -> list[Task[TokenChunk]]:
        """Return the tasks under way. May be called by other threads."""
        return [ahead.task for ahead in list(self._ahead)]

    def ahead_bytes(self) -> int:
        """Return the memory that the chunks under way take, or may take."""
        waiting = []
        for ahead in self._uncounted:
            if ahead.task.ready():
                ahead.nbytes = ahead.task.result().nbytes
                self._counted_bytes += ahead.nbytes
            else:
                waiting.append(ahead)
        self._uncounted = waiting
        return self._counted_bytes + sum(map(self._estimate, waiting))

    def _estimate(self, ahead: Ahead) -> int:
        return self._options.expansion * ahead.ref.nbytes

    def _forget(self, ahead: Ahead) -> None:
        """A chunk is no longer under way."""
        if ahead.nbytes is None:
            self._uncounted.remove(ahead)
        else:
            self._counted_bytes -= ahead.nbytes

    @property
    def n_ahead(self) -> int:
        return len(self._ahead)

    def wants_chunks(self, beyond: int) -> bool:
        """Return True if fewer chunks are under way than the next window and `beyond` need."""
        return len(self._ahead) < self._window_chunks(self._window_epoch) + beyond

    def _window_chunks(self, epoch: int) -> int:
        """Return how many chunks the next window spans."""
        full, growth = self._options.window_chunks, self._options.window_growth
        return window_chunks(epoch, self._window, full, growth)

    def would_wait(self) -> bool:
        """Return True if submitting a chunk would wait for a footer, and look up the next few."""
        if self._groups is None or (self._refs is not None and self._chunk < len(self._refs)):
            return False
        next_group = self._group if self._refs is None else self._group + 1
        upcoming = self._groups[next_group : next_group + LOOK_AHEAD]
        if not upcoming or self._plan.is_sequential(upcoming[0]) or self._reader.known(upcoming[0]):
            return False
        for group in upcoming:
            self._reader.look_up(group)
        return True

    def submit(self) -> int:
        """Submit one more chunk. Return the memory that it may take; 0 at the end of a finite stream."""
        while self._end_epoch is None or self._epoch < self._end_epoch:
            if self._groups is None:
                self._groups = self._plan.groups(self.number, self._epoch)
            if self._group >= len(self._groups):
                self._next_epoch()
                continue
            ref = self._next_ref(self._groups)
            if ref is None:
                self._group, self._chunk, self._refs = self._group + 1, 0, None
                continue
            position = LanePosition(self._epoch, self._group, self._chunk)
            # First: if it fails, this chunk is still the next one, and the lane that needs it
            # meets the same error.
            task = self._reader.submit(ref, position)
            self._chunk += 1
            self._submitted += 1
            ahead = Ahead(position, ref, task)
            self._ahead.append(ahead)
            self._uncounted.append(ahead)
            return max(1, self._estimate(ahead))
        return 0

    def _next_epoch(self) -> None:
        if self._submitted == 0 and self._end_epoch is None:
            raise self.no_data()
        self._epoch, self._group, self._chunk = self._epoch + 1, 0, 0
        self._submitted = 0
        self._groups = self._refs = None

    def _next_ref(self, groups: list[tuple[int, ...]]) -> ChunkRef | None:
        group = groups[self._group]
        if self._plan.is_sequential(group):
            return self._plan.next_chunk(
                self.number, self._epoch, group[0], self._chunk, self._options.chunk_bytes
            )
        if self._refs is None:
            chunks = self._reader.chunks_of(group)
            self._refs = self._plan.chunks(self.number, self._epoch, self._group, group, chunks)
            for later in groups[self._group + 1 : self._group + 2]:
                self._reader.look_up(later)
        return self._refs[self._chunk] if self._chunk < len(self._refs) else None

    # Windows

    def next_window(self) -> Window | None:
        """Return the next window that has a document, or None at the end of a finite stream."""
        while True:
            if not self._ahead and not self.submit():
                self.finished = True
                return None
            start = self._ahead[0].position
            if start.epoch != self._window_epoch:
                if start.epoch - self._text_epoch > EMPTY_EPOCHS:
                    raise self.no_data()
                self._window_epoch, self._window = start.epoch, 0
            number, chunks = self._window, self._take_window(start)
            self._window += 1
            if not chunks:
                continue
            start = start._replace(window=number, source=chunks[0].source)
            order = None
            if self._plan.shuffle:
                documents = np.array([len(chunk.docs) for chunk in chunks])
                order = spread(documents, self._plan.seed, _DOCUMENTS, self.number, *start[:4])
            window = Window(start, chunks, order, self._options.dtype)
            if window.map.tokens:
                self.found_text, self._text_epoch = True, start.epoch
            return window

    def next_chunk(self) -> TokenChunk | None:
        """Return the next chunk, or None at the end of a finite stream."""
        if not self._ahead and not self.submit():
            return None
        ahead = self._ahead[0]
        chunk = ahead.task.result()  # if this raises, the chunk stays the next one
        self._forget(self._ahead.popleft())
        if chunk.last and ahead.ref.file.sequential:
            self._end_file(ahead.position)
        self._used(chunk)
        return chunk

    def _take_window(self, start: LanePosition) -> list[TokenChunk]:
        limit = self._window_chunks(start.epoch)
        chunks: list[TokenChunk] = []
        size = 0
        while len(chunks) < limit and size < SHUFFLE_BYTES:
            if not self._ahead and not self.submit():
                break
            if self._ahead[0].position.epoch != start.epoch:
                break
            nbytes = self._ahead[0].ref.nbytes
            chunk = self.next_chunk()
            assert chunk is not None
            if len(chunk.docs) or not chunk.ref.file.sequential:
                chunks.append(chunk)
                size += nbytes
        return chunks

    def _end_file(self, position: LanePosition) -> None:
        """A sequential file ended: drop what was submitted beyond its end."""
        file = position[:2]
        while self._ahead and self._ahead[-1].position[:2] == file:
            dropped = self._ahead.pop()
            dropped.task.cancel()
            self._forget(dropped)
        if (self._epoch, self._group) == file:
            self._group, self._chunk, self._refs = self._group + 1, 0, None

    def no_data(self) -> SourceError:
        if self._plan.lanes == 1:
            return SourceError("the data holds no text: all documents are empty or left out")
        return SourceError(
            f"lane {self.number} of {self._plan.lanes} would have no text: there are too few documents. "
            "Use fewer lanes or ranks, or a larger split."
        )


class ChunkLanes(Lanes):
    """The lanes of one rank, which share workers and memory."""

    def __init__(
        self,
        plan: ChunkPlan,
        options: LaneOptions,
        reader: ChunkReader,
        run: RunContext,
        pool: Pool,
        report_docs: int = 0,
    ) -> None:
        """`report_docs`: documents between two log lines; 0 for none."""
        self._plan, self._options = plan, options
        self._run, self._pool, self.reader = run, pool, reader
        self.read_ahead_bytes = run.read_ahead_bytes
        self.min_read_ahead = 0
        """Chunks to have under way beyond the next window, at least: set by autotune."""
        self.memory_bound = False
        """True if more would be read ahead with more memory."""
        names = ("documents", "empty", "filtered", "text_bytes", "cache_hits", "cache_misses")
        self._counts = dict.fromkeys(names, 0)
        """What has entered the stream. Written by the producer thread."""
        self._bad: dict[str, int] = {}
        self._report_docs, self._reported_docs = report_docs, 0
        opened = [self._open(n, run.positions[n]) for n in run.own_lanes]
        self.lanes = [lane for lane, _ in opened]
        self.packers = [packer for _, packer in opened]

    def _open(self, number: int, start: LanePosition) -> tuple[ChunkLane, Packer]:
        end = start.epoch + 1 if self._run.by_epoch else self._run.end_epoch
        lane = ChunkLane(number, self._plan, self._options, self.reader, start, end, self._use)
        packer = BestFitPacker if self._options.packing == "best_fit" else ConcatPacker
        return lane, packer(self._options, self._windows_of(lane), start)

    def reopen(self, index: int, epoch: int) -> None:
        for task in self.lanes[index].ahead():
            task.cancel()
        number = self.lanes[index].number
        self.reader.reopen(number, epoch)
        self.lanes[index], packer = self._open(number, LanePosition(epoch=epoch))
        packer.counts.update(self.packers[index].counts)
        self.packers[index] = packer

    def totals(self) -> dict[str, int]:
        return self.reader.totals() | self._counts

    def bad(self) -> dict[str, int]:
        return dict(self._bad)

    def gauges(self) -> dict[str, Any]:
        tasks = [task for lane in self.lanes for task in lane.ahead()]
        return self.reader.gauges() | {
            "chunks_ready": sum(task.ready() for task in tasks),
            "chunks_under_way": len(tasks),
            "memory_bound": self.memory_bound,
            "lane_balance": self._plan.balance(),
        }

    def stop(self) -> None:
        self.reader.stop()

    def close(self) -> None:
        self.reader.close()

    @property
    def read_ahead(self) -> int:
        """Chunks to have under way beyond the next window.

        None before the first chunk was used: the first batch has workers and link to itself.
        """
        if not self._counts["cache_hits"] + self._counts["cache_misses"]:
            return 0
        return max(self.min_read_ahead, 2 * self._pool.n_workers + self.reader.read_ahead)

    # On the producer thread

    def submit_ahead(self) -> None:
        """Submit chunks, for the lane with the fewest first, within the budget of bytes."""
        if self._pool.n_workers == 0:
            return
        beyond = self.read_ahead
        budget = self.read_ahead_bytes - sum(lane.ahead_bytes() for lane in self.lanes)
        hungry = [lane for lane in self.lanes if lane.wants_chunks(beyond)]
        while hungry and budget > 0:
            lane = min(hungry, key=lambda lane: lane.n_ahead)
            if lane.would_wait():  # what is known already goes first
                hungry.remove(lane)
                continue
            try:
                nbytes = lane.submit()
            except Exception:  # raised again when the stream comes to this chunk
                nbytes = 0
            if not nbytes or not lane.wants_chunks(beyond):
                hungry.remove(lane)
            budget -= nbytes
        self.memory_bound = bool(hungry) and budget <= 0

    def _windows_of(self, lane: ChunkLane) -> Callable[[], Window | None]:
        def next_window() -> Window | None:
            self.submit_ahead()
            window = lane.next_window()
            # In a finite stream a lane may be empty if others are not; lanes that have to keep
            # in step may not.
            if window is None and all(
                other.finished and not other.found_text
                for other in ([lane] if self._run.drop_last else self.lanes)
            ):
                raise lane.no_data()
            self.submit_ahead()  # the next window may be larger than this one
            return window

        return next_window

    def _use(self, chunk: TokenChunk) -> None:
        """Count a chunk that enters the stream, and what was found in it."""
        counts = self._counts
        counts["documents"] += len(chunk.docs)
        counts["empty"] += chunk.empty
        counts["filtered"] += chunk.filtered
        counts["text_bytes"] += chunk.text_bytes
        counts["cache_hits" if chunk.cached else "cache_misses"] += 1
        if bad := [*self.reader.take_bad(), *chunk.bad]:
            self._count_bad(bad)
        documents, size = counts["documents"], counts["text_bytes"]
        if self._report_docs and documents - self._reported_docs >= self._report_docs:
            self._reported_docs = documents
            log.info("%d documents, %.1f MB of text read", documents, size / 1e6)
        self.reader.used(chunk)
        self.submit_ahead()

    def _count_bad(self, bad: Sequence[Bad]) -> None:
        """Count rejected records, and log the first of each kind."""
        for record in bad:
            if record.reason not in self._bad:
                log.warning(
                    "left out %s: %s (further ones are counted, not logged)",
                    where(record.address),
                    record.detail,
                )
            self._bad[record.reason] = self._bad.get(record.reason, 0) + 1
        self.reader.rejected(bad)


def text_lanes(
    source: RowSource,
    files: Sequence[FileRef],
    options: TextOptions,
    tokenizer: Tokenizer | None,
    reader: ChunkReader,
    run: RunContext,
    pool: Pool,
    report_docs: int = 0,
) -> ChunkLanes:
    """Open the lanes of text in files or of an iterable."""
    plan = Plan(files=tuple(files), lanes=run.lanes, shuffle=run.shuffle, seed=run.seed)
    lane_options = LaneOptions(
        chunk_bytes=options.chunk_bytes,
        window_chunks=options.shuffle_chunks if run.shuffle else 1,
        expansion=2 if tokenizer is None else tokenizer.expansion,
        packing=options.packing,
        seq_len=options.seq_len,
        pad_id=0 if tokenizer is None else tokenizer.pad_id,
        dtype=source.dtype,
        positions=options.positions,
        keep_tail=not run.drop_last,
    )
    return ChunkLanes(plan, lane_options, reader, run, pool, report_docs)

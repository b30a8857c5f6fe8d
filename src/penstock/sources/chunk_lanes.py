"""Lanes of chunks: read ahead, cut into shuffle windows, packed into rows.

    files ──plan──► chunks ══ fetch · decode · tokenize ══► windows ── shuffle · pack ──► rows
             pure                  stateless                                stateful
                              workers, any order                   the producer thread, in order

`ChunkLane` is one lane. `ChunkLanes` holds the lanes of a rank, reads ahead within a budget of
bytes, and counts the documents that enter the stream. `ChunkReader` is the interface to files,
iterables and other kinds of chunks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.encode.best_fit import BestFitPacker
from penstock.encode.concat import ConcatPacker
from penstock.encode.rows import Packer
from penstock.encode.window import Window
from penstock.errors import SourceError
from penstock.feed.worker_pool import Pool, Task, ThreadPool
from penstock.order.plan import Plan
from penstock.order.shuffle import spread, window_chunks
from penstock.read.validation import where
from penstock.sources.base import Counted, Lanes, RowSource, RunContext
from penstock.types import Bad, ChunkRef, LanePosition, MiB, TokenChunk

log = logging.getLogger("penstock")

EMPTY_EPOCHS = 8
"""A lane without text in this many consecutive epochs raises."""
SHUFFLE_BYTES = 256 * MiB
"""Bytes of text at which a shuffle window is full, regardless of its number of chunks."""
LOOK_AHEAD = 8
"""Groups of files to look up at once when read-ahead would wait for one."""
CLOSE_S = 5.0
"""How long a shutdown waits for requests in flight."""
TEXT_SETTINGS = ("seq_len", "packing", "text_field", "chunk_bytes", "shuffle_chunks")
_DOCUMENTS = 4  # keeps the keys of document permutations apart from those of `order.plan`


class ChunkReader(Counted, Protocol):
    """Reads one kind of chunks. Called on the producer thread."""

    io: ThreadPool | None = None
    """The pool for fetches, if any."""
    fetches: int = 0
    """Requests to keep in flight."""

    def look_up(self, files: tuple[int, ...]) -> list[Task[tuple[list[ChunkRef], list[Bad]]]]:
        """Start listing the chunks of each file. A result also has the reasons for skipping the
        file. Return nothing for sequential files."""
        return []

    def submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        """Start making the next chunk of a lane."""

    def reopen(self, lane: int, epoch: int) -> None:
        """Start an epoch in one lane."""
        return

    def rejected(self, bad: Sequence[Bad]) -> None:
        """Handle rejected records."""
        return

    def set_fetches(self, fetches: int) -> None:
        """Change the number of requests in flight. Does not change the stream."""
        assert self.io is not None
        self.io.resize(fetches)
        self.fetches = fetches

    def stop(self) -> None:
        if self.io is not None:
            self.io.stop()

    def close(self) -> None:
        if self.io is not None:
            self.io.join(CLOSE_S)


class ChunkSource(RowSource):
    """A dataset of chunks that are packed into rows."""

    seq_len: int
    settings: tuple[str, ...] = TEXT_SETTINGS
    """The options that determine the stream."""
    ordered_chunks = 1
    """Chunks per window without a shuffle."""
    window_growth = 2
    """The factor by which windows of the first epoch grow."""
    expansion = 2
    """Peak memory of a chunk as a multiple of its text."""
    pad_id = 0
    dtype: np.dtype[Any] = np.dtype(np.uint32)

    def __init__(self, dataset: Any, shuffle_chunks: int) -> None:
        """`shuffle_chunks`: chunks per shuffle window."""
        self.dataset, self.shuffle_chunks, options = dataset, shuffle_chunks, dataset.options
        self.seq_len, self.positions = options.seq_len, options.positions
        self.packing: str = options.packing
        tokenizer = getattr(dataset, "tokenizer", None)
        if tokenizer is not None:
            self.expansion, self.pad_id = tokenizer.expansion, tokenizer.pad_id
            self.dtype = tokenizer.dtype

    def settings_id(self) -> dict[str, Any]:
        return {name: getattr(self.dataset.options, name) for name in self.settings}


@dataclass(slots=True, eq=False)
class Ahead:
    """A chunk in progress."""

    position: LanePosition
    ref: ChunkRef
    task: Task[TokenChunk]
    nbytes: int
    """The size of the chunk, or an estimate of its memory until it is ready."""


class ChunkLane:
    """The chunks of one lane, starting at a position."""

    def __init__(self, lanes: ChunkLanes, number: int, start: LanePosition) -> None:
        self.number, self._lanes = number, lanes
        self._plan, self._source, self._reader = lanes.plan, lanes.source, lanes.reader
        self._end_epoch = start.epoch + 1 if lanes.run.by_epoch else lanes.run.end_epoch
        self.ahead: deque[Ahead] = deque()
        """The chunks in progress."""
        self._known = 0
        """The number of these, from the first on, whose size is known."""
        self._ahead_bytes = 0
        self._epoch, self._group, self._chunk = start[:3]
        """The next chunk to submit."""
        self._groups: list[tuple[int, ...]] | None = None
        self._refs: list[ChunkRef] | None = None
        """The groups of the epoch and the chunks of the group, computed on demand."""
        self._window, self._window_epoch = start.window, start.epoch
        """The next window to build."""
        self.found_text = start != LanePosition(epoch=start.epoch)
        """Also True if the run that saved the position had found text."""
        self._chunk_epoch = self._text_epoch = start.epoch - (not self.found_text)
        """The last epoch with a chunk, and the last epoch with text."""
        self.finished = False

    # Read-ahead

    def ahead_bytes(self) -> int:
        """Return the memory of the chunks in progress, estimated where unknown."""
        while self._known < len(self.ahead) and self.ahead[self._known].task.ready():
            ahead = self.ahead[self._known]
            estimated, ahead.nbytes = ahead.nbytes, ahead.task.result().nbytes
            self._ahead_bytes += ahead.nbytes - estimated
            self._known += 1
        return self._ahead_bytes

    def wants_chunks(self, beyond: int) -> bool:
        """Return True if the next window and `beyond` more chunks are not all in progress."""
        return len(self.ahead) < self._window_chunks(self._window_epoch) + beyond

    def _window_chunks(self, epoch: int) -> int:
        """Return the number of chunks in the next window."""
        full = self._source.shuffle_chunks if self._plan.shuffle else self._source.ordered_chunks
        return window_chunks(epoch, self._window, full, self._source.window_growth)

    def submit(self, wait: bool = True) -> int:
        """Submit the next chunk. Return an estimate of its memory.

        Return 0 at the end of a finite stream, and with wait=False if a footer must be read first.
        """
        while self._end_epoch is None or self._epoch < self._end_epoch:
            if self._groups is None:
                self._groups = self._plan.groups(self.number, self._epoch)
            if self._group >= len(self._groups):
                if self._chunk_epoch < self._epoch and self._end_epoch is None:
                    raise self.no_data()
                self._epoch, self._group, self._groups = self._epoch + 1, 0, None
                continue
            if self._refs is None and not self._open_group(self._groups, wait):
                return 0
            ref = self._next_ref(self._groups[self._group])
            if ref is None:
                self._next_group()
                continue
            position = LanePosition(self._epoch, self._group, self._chunk)
            # Submitted before the position changes: after a failure, this chunk is still the next
            # one, and raises again when it is needed.
            task = self._reader.submit(ref, position)
            nbytes = max(1, self._source.expansion * ref.nbytes)
            self.ahead.append(Ahead(position, ref, task, nbytes))
            self._chunk, self._chunk_epoch = self._chunk + 1, self._epoch
            self._ahead_bytes += nbytes
            return nbytes
        return 0

    def _next_group(self) -> None:
        self._group, self._chunk, self._refs = self._group + 1, 0, None

    def _open_group(self, groups: list[tuple[int, ...]], wait: bool) -> bool:
        """Look up the lane's chunks in the next group. Return False if that would wait."""
        group, after = groups[self._group], self._group + 1
        lookups = self._reader.look_up(group)
        ready = wait or all(task.ready() for task in lookups)
        if ready:
            found = [task.result() for task in lookups]
            self._lanes.leave_out([bad for _, bad_file in found for bad in bad_file])
            chunks = [refs for refs, _ in found]
            self._refs = self._plan.chunks(self.number, self._epoch, self._group, group, chunks)
        for upcoming in groups[after : after + (1 if ready else LOOK_AHEAD)]:
            self._reader.look_up(upcoming)
        return ready

    def _next_ref(self, group: tuple[int, ...]) -> ChunkRef | None:
        if self._refs is not None:
            return self._refs[self._chunk] if self._chunk < len(self._refs) else None
        nbytes = self._source.dataset.options.chunk_bytes
        return self._plan.next_chunk(self.number, self._epoch, group[0], self._chunk, nbytes)

    # Windows

    def next_window(self) -> Window | None:
        """Return the next window that has a document, or None at the end of a finite stream."""
        while (first := self._first()) is not None:
            start = first.position
            if start.epoch != self._window_epoch:
                if start.epoch - self._text_epoch > EMPTY_EPOCHS:
                    raise self.no_data()
                self._window_epoch, self._window = start.epoch, 0
            number, chunks = self._window, self._take_window(start.epoch)
            self._window += 1
            if not chunks:
                continue
            start = start._replace(window=number, source=chunks[0].source)
            order = None
            if self._plan.shuffle:
                documents = np.array([n for chunk in chunks for _, n in chunk.parts])
                order = spread(documents, self._plan.seed, _DOCUMENTS, self.number, *start[:4])
            window = Window(start, chunks, order, self._source.dtype)
            if window.map.tokens:
                self.found_text, self._text_epoch = True, start.epoch
            return window
        self.finished = True
        return None

    def next_chunk(self) -> TokenChunk | None:
        """Return the next chunk, or None at the end of a finite stream."""
        ahead = self._first()
        if ahead is None:
            return None
        chunk = ahead.task.result()  # if this raises, the chunk is still the next one
        self._ahead_bytes -= self.ahead.popleft().nbytes
        self._known = max(0, self._known - 1)
        if chunk.last and ahead.ref.file.sequential:
            self._end_file(ahead.position[:2])
        self._lanes.use(chunk)
        return chunk

    def _first(self) -> Ahead | None:
        """Return the next chunk in progress, or None at the end of a finite stream."""
        return self.ahead[0] if self.ahead or self.submit() else None

    def _take_window(self, epoch: int) -> list[TokenChunk]:
        limit = self._window_chunks(epoch)
        chunks: list[TokenChunk] = []
        size = 0
        while len(chunks) < limit and size < SHUFFLE_BYTES:
            first = self._first()
            if first is None or first.position.epoch != epoch:
                break
            chunk = self.next_chunk()
            assert chunk is not None
            if len(chunk.docs) or not chunk.ref.file.sequential:
                chunks.append(chunk)
                size += first.ref.nbytes
        return chunks

    def _end_file(self, file: tuple[int, ...]) -> None:
        """Drop the chunks submitted beyond the end of a sequential file (epoch, group)."""
        while self.ahead and self.ahead[-1].position[:2] == file:
            dropped = self.ahead.pop()
            self._ahead_bytes -= dropped.nbytes
            dropped.task.cancel()
        self._known = min(self._known, len(self.ahead))
        if (self._epoch, self._group) == file:
            self._next_group()

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
        source: ChunkSource,
        plan: Plan,
        reader: ChunkReader,
        run: RunContext,
        pool: Pool,
        report_docs: int = 0,
    ) -> None:
        """`report_docs`: documents between progress log lines; 0 for none."""
        self.source, self.plan, self.reader, self.run = source, plan, reader, run
        self._pool, self.inner = pool, [reader]
        self.read_ahead_bytes = run.read_ahead_bytes
        self.min_read_ahead = 0
        """Minimum number of chunks to read ahead beyond the next window. Set by autotune."""
        self.memory_bound = False
        """True if memory limits read-ahead."""
        self._counts: Counter[str] = Counter()
        """Counters of the data in the stream. Written by the producer thread."""
        self._bad: Counter[str] = Counter()
        self._bad_files: set[Bad] = set()
        self._report_docs, self._reported_docs = report_docs, 0
        self.lanes = [ChunkLane(self, n, run.positions[n]) for n in run.own_lanes]
        self.packers = [self._packer(lane, run.positions[lane.number]) for lane in self.lanes]

    def _packer(self, lane: ChunkLane, start: LanePosition) -> Packer:
        packer = BestFitPacker if self.source.packing == "best_fit" else ConcatPacker
        next_window = partial(self._next_window, lane)
        return packer(self.source, next_window, start, not self.run.drop_last)

    def reopen(self, index: int, epoch: int) -> None:
        for ahead in self.lanes[index].ahead:
            ahead.task.cancel()
        number, start = self.lanes[index].number, LanePosition(epoch=epoch)
        self.reader.reopen(number, epoch)
        self.lanes[index] = ChunkLane(self, number, start)
        packer = self._packer(self.lanes[index], start)
        packer.counts.update(self.packers[index].counts)
        self.packers[index] = packer

    def totals(self) -> dict[str, int]:
        return super().totals() | self._counts

    def bad(self) -> dict[str, int]:
        return dict(self._bad)

    def gauges(self) -> dict[str, Any]:
        tasks = [ahead.task for lane in self.lanes for ahead in list(lane.ahead)]
        return super().gauges() | {
            "chunks_ready": sum(task.ready() for task in tasks),
            "chunks_under_way": len(tasks),
            "memory_bound": self.memory_bound,
            "lane_balance": self.plan.balance(),
        }

    @property
    def read_ahead(self) -> int:
        """Chunks to read ahead beyond the next window.

        0 before the first chunk is used, so that the first batch has the workers and the link to
        itself.
        """
        if not self._counts:
            return 0
        # Twice the number processed at once, so that others continue while one is late.
        at_once = self._pool.n_workers + self.reader.fetches
        return max(self.min_read_ahead, 2 * at_once)

    # On the producer thread

    def submit_ahead(self) -> None:
        """Submit chunks within the budget of bytes, first for the lane with the fewest."""
        if self._pool.n_workers == 0:
            return
        beyond = self.read_ahead
        budget = self.read_ahead_bytes - sum(lane.ahead_bytes() for lane in self.lanes)
        hungry = [lane for lane in self.lanes if lane.wants_chunks(beyond)]
        while hungry and budget > 0:
            lane = min(hungry, key=lambda lane: len(lane.ahead))
            try:
                # Only the first batch waits for footers; later, known chunks go first.
                nbytes = lane.submit(wait=beyond == 0)
            except Exception:  # raised again when the stream reaches this chunk
                nbytes = 0
            if not nbytes or not lane.wants_chunks(beyond):
                hungry.remove(lane)
            budget -= nbytes
        self.memory_bound = bool(hungry) and budget <= 0

    def _next_window(self, lane: ChunkLane) -> Window | None:
        self.submit_ahead()
        window = lane.next_window()
        # In a finite stream, a lane may be empty if others are not, except with drop_last, where
        # the first lane to end ends the stream.
        others = [lane] if self.run.drop_last else self.lanes
        if window is None and all(each.finished and not each.found_text for each in others):
            raise lane.no_data()
        self.submit_ahead()  # the next window may be larger than this one
        return window

    def use(self, chunk: TokenChunk) -> None:
        """Count a chunk that enters the stream, and its documents."""
        self._counts.update(
            documents=len(chunk.docs),
            empty=chunk.empty,
            filtered=chunk.filtered,
            text_bytes=chunk.text_bytes,
            cache_hits=int(chunk.cached),
            cache_misses=int(not chunk.cached),
        )
        self._count_bad(chunk.bad)
        documents, size = self._counts["documents"], self._counts["text_bytes"]
        if self._report_docs and documents - self._reported_docs >= self._report_docs:
            self._reported_docs = documents
            log.info("%d documents, %.1f MB of text read", documents, size / 1e6)
        self.submit_ahead()

    def leave_out(self, files: list[Bad]) -> None:
        """Count each file that cannot be read once."""
        self._count_bad([bad for bad in files if bad not in self._bad_files])
        self._bad_files.update(files)

    def _count_bad(self, bad: Sequence[Bad]) -> None:
        """Count rejected records, and log the first of each kind."""
        for record in bad:
            if record.reason not in self._bad:
                log.warning(
                    "left out %s: %s (further ones are counted, not logged)",
                    where(record.address),
                    record.detail,
                )
            self._bad[record.reason] += 1
        if bad:
            self.reader.rejected(bad)

"""One lane: an independent sequence of chunks, cut into shuffle windows.

In:    the plan, and token chunks from the pool.
Out:   windows of documents, in the lane's order.
Where: the producer thread.
State: which chunk is asked for next, and the chunks that were asked for and not yet used.
Cost:  at most the current window and what is read ahead is in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.encode.window import Place, Window
from penstock.errors import NoData
from penstock.feed.pool import Task
from penstock.order.plan import Plan
from penstock.order.shuffle import permutation, window_chunks
from penstock.types import ChunkRef, TokenChunk

_DOCUMENTS = (
    3  # see order.plan: a permutation of documents shares no key with one of files or chunks
)


EMPTY_EPOCHS = 8
"""So many epochs in a row without any text, each dealt anew, mean that there is too little of it."""
FORESEEN = 8
"""Groups of files that are looked into at once, where reading ahead would wait for one."""


class Ahead(NamedTuple):
    """A chunk that was asked for."""

    place: Place
    ref: ChunkRef
    task: Task[TokenChunk]
    skipped: int = 0
    """Documents of the chunk that were given out before these."""


class Standing(NamedTuple):
    """Where a lane reads ahead."""

    lane: int
    epoch: int
    group: int
    at: int
    """The next one's number in the group."""
    refs: list[ChunkRef] | None
    """The chunks of the group, in order, once they are known."""


class LaneSettings(NamedTuple):
    """What decides a lane's order, apart from the plan."""

    chunk_bytes: int
    window_chunks: int
    window_bytes: int
    end_epoch: int | None
    expansion: int
    """How many times its text a chunk takes while it is worked on."""
    dtype: np.dtype[Any]


class Lane:
    """The chunks of one lane, from a place on."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        settings: LaneSettings,
        start: Place,
        chunks_of: Callable[[tuple[int, ...]], list[list[ChunkRef]]],
        foresee: Callable[[tuple[int, ...]], None],
        known: Callable[[tuple[int, ...]], bool],
        submit: Callable[[ChunkRef, Place, bool], Task[TokenChunk]],
        go_on: Callable[[TokenChunk], Task[TokenChunk]],
        used: Callable[[TokenChunk], None],
    ) -> None:
        self.number = number
        self._plan = plan
        self._settings = settings
        self._chunks_of = chunks_of
        self._foresee = foresee
        self._known = known
        self._submit = submit
        self._go_on = go_on
        self._used = used
        self._ahead: deque[Ahead] = deque()
        self._begun: tuple[Place, TokenChunk] | None = None
        """A chunk of which only the first documents were given out, and the rest is yet to be asked for."""
        self._epoch, self._group, self._index = start.epoch, start.group, start.chunk
        self._window = start.window
        self._window_epoch = start.epoch
        self._groups: list[tuple[int, ...]] | None = None
        self._refs: list[ChunkRef] | None = None
        self._whole_pass = start == Place(epoch=start.epoch)
        self._fresh = start.doc == start.token == start.row == 0
        """Whether the next chunk asked for is the lane's first, and read from its first document on."""
        self._asked = self._barren_asks = self._empty_epochs = 0
        self._tokens = 0 if self._whole_pass else 1
        ended = settings.end_epoch is not None and start.epoch >= settings.end_epoch
        self._any = ended or not self._whole_pass
        self._finished = False

    # Reading ahead

    def ahead_chunks(self) -> int:
        """Chunks that were asked for, or are to be gone on with."""
        return len(self._ahead) + (self._begun is not None)

    def ahead_bytes(self) -> int:
        """Memory that the chunks asked for take, or may take while they are worked on."""
        return sum(
            a.task.result().nbytes if a.task.ready() else self._settings.expansion * a.ref.nbytes
            for a in self._ahead
        )

    def wanted_ahead(self, beyond: int) -> int:
        """Chunks that should be under way: the next window, and some beyond it."""
        full = self._settings.window_chunks
        return window_chunks(self._window_epoch, self._window, full) + beyond

    def tasks(self) -> list[Task[TokenChunk]]:
        """What was asked for and not used yet. Read by other threads too."""
        return [ahead.task for ahead in list(self._ahead)]

    def under_way(self) -> list[ChunkRef]:
        """What was asked for and not used yet. Read by other threads too."""
        return [ahead.ref for ahead in list(self._ahead)]  # a list of a deque is made in one go

    def standing(self) -> Standing:
        """What is asked for next. Read by other threads too, which may find it a moment old."""
        return Standing(self.number, self._epoch, self._group, self._index, self._refs)

    def waits(self) -> bool:
        """Whether to ask for one more chunk would wait until it is known which chunks a file has. If so, that of the
        next few files is being found out by now."""
        if self._groups is None:
            return False
        group = self._group if self._refs is None else self._group + 1
        if self._refs is not None and self._index < len(self._refs):
            return False
        if group >= len(self._groups) or self._plan.files[self._groups[group][0]].open_ended:
            return False
        if self._known(self._groups[group]):
            return False
        for later in self._groups[group : group + FORESEEN]:
            self._foresee(later)
        return True

    def ask(self) -> bool:
        """Ask for one more chunk. False at the end of a finite stream."""
        while True:
            if self._settings.end_epoch is not None and self._epoch >= self._settings.end_epoch:
                return False
            if self._groups is None:
                self._groups = self._plan.groups(self.number, self._epoch)
            if self._group >= len(self._groups):
                self._barren_asks = (
                    self._barren_asks + 1 if self._whole_pass and not self._asked else 0
                )
                if self._barren_asks >= EMPTY_EPOCHS:
                    raise self.no_data()
                self._whole_pass, self._asked = True, 0
                self._epoch, self._group, self._index = self._epoch + 1, 0, 0
                self._groups = self._refs = None
                continue
            ref = self._ref()
            if ref is None:
                self._group, self._index, self._refs = self._group + 1, 0, None
                continue
            place = Place(self._epoch, self._group, self._index)
            # First of all: where it fails, this chunk is still the next one, and whoever needs it meets the same error.
            task = self._submit(ref, place, self._fresh)
            self._index += 1
            self._asked += 1
            self._fresh = False
            self._ahead.append(Ahead(place, ref, task))
            return True

    def ask_rest(self) -> None:
        """Ask for the rest of a chunk of which only the first documents were given out, if there is one: when these are
        used up, so that the first batch, for which somebody waits, goes before it."""
        if self._begun is not None:
            place, begun = self._begun
            self._ahead.appendleft(Ahead(place, begun.ref, self._go_on(begun), len(begun.docs)))
            self._begun = None

    def _ref(self) -> ChunkRef | None:
        assert self._groups is not None
        group = self._groups[self._group]
        file = self._plan.files[group[0]]
        if file.open_ended:
            return self._plan.open_ended(self.number, file, self._index, self._settings.chunk_bytes)
        if self._refs is None:
            self._refs = self._plan.order(self.number, self._epoch, group, self._chunks_of(group))
            if self._group + 1 < len(self._groups):
                self._foresee(self._groups[self._group + 1])
        return self._refs[self._index] if self._index < len(self._refs) else None

    def _file_ended(self, place: Place) -> None:
        """An open-ended file turned out to end at a place: forget what was asked for beyond it."""
        while self._ahead and self._ahead[-1].place[:2] == place[:2]:
            self._ahead.pop().task.cancel()
        if (self._epoch, self._group) == place[:2]:
            self._group, self._index, self._refs = self._group + 1, 0, None

    # Windows

    def next_window(self) -> Window | None:
        """The next window that has any document, or None at the end of a finite stream."""
        self.ask_rest()
        while True:
            if not self._ahead and not self.ask():
                self._finished = True
                return None
            start, skipped = self._ahead[0].place, self._ahead[0].skipped
            if start.epoch != self._window_epoch:
                self._close_epoch()
                self._window_epoch, self._window = start.epoch, 0
            chunks = self._take_window(start)
            if not skipped:  # else it is the same window's rest
                self._window += 1
            if not chunks:
                continue
            start = start._replace(window=self._window - 1, source=chunks[0].source)
            window = self._build(start, chunks, skipped)
            self._tokens += window.map.tokens
            self._any = self._any or self._tokens > 0
            return window

    def next_chunk(self) -> TokenChunk | None:
        """The next chunk by itself, or None at the end of a finite stream."""
        if not self._ahead and not self.ask():
            return None
        place, ref, task, _ = self._ahead.popleft()
        chunk = task.result()
        if chunk.rest is not None:
            self._begun = place, chunk
        if chunk.last and ref.file.open_ended:
            self._file_ended(place)
        self._used(chunk)
        return chunk

    def _take_window(self, start: Place) -> list[TokenChunk]:
        settings = self._settings
        limit = window_chunks(start.epoch, self._window, settings.window_chunks)
        chunks: list[TokenChunk] = []
        size = 0
        while len(chunks) < limit and size < settings.window_bytes:
            if not self._ahead and not self.ask():
                break
            if self._ahead[0].place.epoch != start.epoch:
                break
            nbytes = self._ahead[0].ref.nbytes
            chunk = self.next_chunk()
            assert chunk is not None
            if len(chunk.docs) or not chunk.ref.file.open_ended:
                chunks.append(chunk)
                size += nbytes
        return chunks

    def _build(self, start: Place, chunks: list[TokenChunk], skipped: int) -> Window:
        order = None
        if self._plan.shuffle:
            documents = sum(len(chunk.docs) for chunk in chunks)
            key = (self._plan.seed, _DOCUMENTS, self.number, *start[:4])
            order = permutation(documents, *key)
        return Window(start, chunks, order, self._settings.dtype, skipped)

    def _close_epoch(self) -> None:
        """Epochs that give nothing would be followed by others such for ever."""
        self._empty_epochs = 0 if self._tokens else self._empty_epochs + 1
        self._tokens = 0
        if self._empty_epochs >= EMPTY_EPOCHS:
            raise self.no_data()

    @property
    def barren(self) -> bool:
        """Whether this lane has come to its end and nothing ever came out of it."""
        return self._finished and not self._any

    def no_data(self) -> NoData:
        lanes = self._plan.lanes
        files = len(self._plan.files)
        if lanes == 1:
            return NoData(
                f"the {files} file(s) hold no text: nothing but empty, skipped or filtered documents"
            )
        return NoData(
            f"lane {self.number} of {lanes} would have no text: the {files} file(s) hold too few documents. "
            "Use fewer lanes or ranks, or a larger split."
        )

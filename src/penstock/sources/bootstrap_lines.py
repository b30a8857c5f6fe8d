"""The documents of files as JSONL, chunk after chunk in the order of the source.

In:    a `TextDataset`, and where to begin: file, chunk, document.
Out:   lines, a chunk at a time.
Where: fetch threads and workers make them, a few chunks ahead; the calling thread takes them in order.
State: what was asked for and not taken yet. No more is asked for than the caller still wants.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.config import default_workers
from penstock.dataset import TextDataset
from penstock.feed.pool import Lazy, Task, ThreadPool
from penstock.read.storage import Bytes
from penstock.sources.text_work import TextWork
from penstock.types import Bad, ChunkRef, MiB

I64 = np.ndarray[Any, np.dtype[np.int64]]

AHEAD_BYTES = 128 * MiB
"""Text that may be under way, one chunk at the least."""

STEP = 128
"""Documents that are made lines at once: their memory is soon used again, where a chunk's would be new each time."""

ESCAPES = {
    "\\": "\\\\",
    '"': '\\"',
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\b": "\\b",
    "\f": "\\f",
}
CONTROL = re.compile(rb"[\x00-\x1f]")
BETWEEN = b"\xff"
"""A byte that no UTF-8 has."""


class Lines(NamedTuple):
    """A chunk, as it is written."""

    data: bytes
    rows: I64
    """The document of each line, by its number in the chunk."""
    bad: list[Bad]
    last: bool


class LineWork(TextWork):
    """The work of one bootstrap."""

    def lines(self, ref: ChunkRef, first: int, fetched: list[Bytes] | None = None) -> Lines:
        """The documents of a chunk from the `first` on, without those that are empty."""
        try:
            documents = self._documents(ref, fetched)
        except BaseException as error:
            error.add_note(f"in stage fetch, decode, reading {ref}")
            raise
        texts = documents.texts.cast(pa.large_binary()).to_pylist()[first:]
        rows = np.array([row for row, text in enumerate(texts, first) if text], np.int64)
        lines = b"".join([as_lines(texts[i : i + STEP]) for i in range(0, len(texts), STEP)])
        return Lines(lines, rows, documents.bad, documents.last)


def as_lines(texts: Iterable[bytes]) -> bytes:
    """What `json.dumps({"text": text}, ensure_ascii=False)` gives for each that is not empty, much faster."""
    data = BETWEEN.join(filter(None, texts))
    if not data:
        return b""
    for character, escape in ESCAPES.items():
        data = data.replace(character.encode(), escape.encode())
    if np.frombuffer(data, np.uint8).min() < 32:
        data = CONTROL.sub(lambda match: b"\\u%04x" % match[0][0], data)
    return b'{"text": "' + data.replace(BETWEEN, b'"}\n{"text": "') + b'"}\n'


class Piece(NamedTuple):
    """A chunk in its turn."""

    file: int
    chunk: int
    first: int
    lines: Lines
    over: bool
    """Nothing follows in this file."""


class Ahead(NamedTuple):
    """A chunk that was asked for."""

    file: int
    chunk: int
    first: int
    nbytes: int
    task: Task[Lines]


class InOrder:
    """The chunks of the files, one after the other, made ahead of need. A context manager."""

    def __init__(self, data: TextDataset, file: int, chunk: int, document: int) -> None:
        self._files = data.files
        self._chunk_bytes = data.read.chunk_bytes
        self._file, self._chunk, self._first = file, chunk, document
        workers, self._fetches = min(4, default_workers()), data.fetches()
        self._most = self._fetches + 2 * workers
        self._work = LineWork(
            data.read, data.tokenizer, None, workers, 1, data.outside, threads=True
        )
        self._workers = ThreadPool(workers, self._work)
        self._fetchers = (
            ThreadPool(self._fetches, self._work, name="fetch") if self._fetches else None
        )
        self._inspected: dict[int, Task[tuple[list[ChunkRef], list[Bad]]]] = {}
        self._ahead: deque[Ahead] = deque()

    def next(self, wanted: int) -> Piece | None:
        """The next chunk. So many bytes are `wanted` in all: no more than that is read ahead."""
        while len(self._ahead) < self._most and self._ahead_bytes() < min(wanted, AHEAD_BYTES):
            self._foresee(wanted)
            if not self._ask():
                break
        if not self._ahead:
            return None
        file, chunk, first, _, task = self._ahead.popleft()
        lines = task.result()
        over = lines.last and (chunk < 0 or self._files[file].open_ended)
        if over:
            # Nobody knew where it ends: forget what was asked for beyond it.
            while self._ahead and self._ahead[-1].file == file:
                self._ahead.pop().task.cancel()
            if self._file == file:
                self._file, self._chunk = file + 1, 0
        return Piece(file, chunk, first, lines, over)

    def _ahead_bytes(self) -> int:
        return sum(ahead.nbytes for ahead in self._ahead) if self._ahead else -1

    def _foresee(self, wanted: int) -> None:
        """Have the chunks of the next files listed, as many files as may be needed."""
        size = 0
        for number in range(self._file, min(len(self._files), self._file + max(2, self._fetches))):
            if not self._files[number].open_ended:
                self._inspect(number)
            size += self._files[number].size
            if size >= wanted:
                break

    def _inspect(self, number: int) -> Task[tuple[list[ChunkRef], list[Bad]]]:
        if number not in self._inspected:
            file = self._files[number]
            pool = self._fetchers if self._fetchers is not None and file.remote else self._workers
            self._inspected[number] = pool.submit("inspect", file, first=number == self._file)
        return self._inspected[number]

    def _ask(self) -> bool:
        """Ask for one more chunk. False at the end, and where it is not known yet what comes next."""
        while self._file < len(self._files):
            number, file = self._file, self._files[self._file]
            if file.open_ended:
                self._submit(ChunkRef(file, self._chunk, self._chunk_bytes))
                return True
            inspected = self._inspect(number)
            if self._ahead and not inspected.ready():
                return False  # there is something else to take meanwhile
            refs, bad = inspected.result()
            if self._chunk < len(refs):
                self._submit(refs[self._chunk])
                return True
            del self._inspected[number]
            self._file, self._chunk, self._first = number + 1, 0, 0
            if bad:
                self._leave_out(number, bad)
                return True
        return False

    def _leave_out(self, file: int, bad: list[Bad]) -> None:
        """A file that cannot be read at all has its turn too: only then it counts."""
        nothing = Lines(b"", np.empty(0, np.int64), bad, True)
        self._ahead.append(Ahead(file, -1, 0, 0, Lazy(lambda: nothing)))

    def _submit(self, ref: ChunkRef) -> None:
        first, self._first = self._first, 0
        if self._fetchers is None or not ref.file.remote or ref.file.codec:
            task = self._workers.submit("lines", ref, first)
        else:
            fetched = self._fetchers.submit("fetch", ref)
            task = self._workers.submit("lines", before=lambda: (ref, first, fetched.result()))
        self._ahead.append(Ahead(self._file, self._chunk, first, ref.nbytes, task))
        self._chunk += 1

    def __enter__(self) -> InOrder:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.stop()
        pools = [pool for pool in (self._fetchers, self._workers) if pool is not None]
        for pool in pools:
            pool.stop()
        for pool in pools:
            pool.join(5.0)
        self._work.close()

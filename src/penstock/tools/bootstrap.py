"""Write the first bytes of a source's text to a local JSONL file, from which a run can start at once.

While it is written, the file is called PATH.partial. PATH.progress.json holds the number of bytes
that are safely on disk and the document that comes next. After a kill the partial file is cut to
that length, and continued: the result is byte for byte that of an uninterrupted run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.config import default_workers, whole_number, write_atomically
from penstock.dataset import TextDataset
from penstock.errors import ConfigError, NoData, SourceChanged
from penstock.read.attempt import Remote
from penstock.read.manifest import each
from penstock.read.reader import MAX_CHUNK_BYTES
from penstock.sources.text_work import TextWork
from penstock.types import Bad, ChunkRef, MiB, shown_address

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Position = tuple[int, int, int]
"""File, chunk and document, each by its number."""

VERSION = 2
COMMIT_BYTES, COMMIT_S = 4 * MiB, 1.0
"""Progress is saved after this many bytes or seconds: what a kill costs at most."""
AHEAD_BYTES = 128 * MiB
"""Text that may be read ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a bootstrap is."""

    bytes: int
    goal: int
    documents: int
    began: int
    """Bytes that existed when this run began."""
    file: str
    """The file that is read; at the end, the file that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """The result of a bootstrap."""

    path: Path
    bytes: int
    documents: int
    bad: Mapping[str, int]
    """Records that were skipped, by reason."""
    already: bool
    """The file was complete before."""
    exhausted: bool
    """The source has no more text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is safely on disk, and which document comes next."""

    source: dict[str, Any]
    goal: int
    next: Position = (0, 0, 0)
    bytes: int = 0
    documents: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    full: bool = False
    """The next document does not fit."""
    exhausted: bool = False
    """There is no next document."""


def bootstrap(
    urls: Paths,
    out: str | os.PathLike[str],
    max_bytes: int,
    *,
    config: str | None = None,
    text_field: str = "text",
    remote: Remote | dict[str, Any] | None = None,
    refresh: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Bootstrapped:
    """Write documents in the order of the source, as many as fit into `max_bytes` bytes.

    Called again after a kill, it continues. `refresh`: extend a finished file; until that is done,
    others read the old one.
    """
    check_name(out)
    goal = whole_number("max_bytes", max_bytes, 1)
    path = Path(os.path.realpath(out))
    given = [urls] if isinstance(urls, str | os.PathLike) else urls
    addresses = [_absolute(os.fspath(url)) for url in given]
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        point, finished = _load(path)
        if point is not None:
            _check_request(path, point, finished, goal, text_field, refresh)
            same = (point.source["urls"], point.source["config"]) == (addresses, config)
            if finished and same and _is_enough(point, goal):
                return _result(path, point, already=True)
        data = TextDataset(
            urls, tokenizer="byte", seq_len=1, text_field=text_field, config=config, remote=remote,
            on_bad_record="skip", cache=False,
        )  # fmt: skip
        source = _source(data, addresses, config, text_field)
        if point is None:
            point = Point(source=source, goal=goal)
        else:
            _check_source(path, point, source, data)
            if finished and _is_enough(point, goal):
                return _result(path, point, already=True)
        point = _write(
            path, replace(point, goal=goal, full=False), data, progress or (lambda _: None)
        )
    return _result(path, point, already=False)


def check_name(out: str | os.PathLike[str]) -> None:
    """Raise ConfigError unless a file of this name can be written."""
    if Path(out).suffix != ".jsonl":
        raise ConfigError(f"{os.fspath(out)}: needs a name that ends in .jsonl")
    if os.path.isdir(out):
        raise ConfigError(f"{os.fspath(out)} is a folder; needs the name of a file")


def _result(path: Path, point: Point, already: bool) -> Bootstrapped:
    return Bootstrapped(
        path=path, bytes=point.bytes, documents=point.documents, bad=point.bad, already=already,
        exhausted=point.exhausted,
    )  # fmt: skip


# The files on disk


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Refuse two writers of one file. The lock ends with its process, however that ends."""
    lock = _beside(path, "lock")
    with open(lock, "a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"{path} is being written by process {file.read().strip() or '(just starting)'}. "
                "Wait for it, end it, or name another file."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _load(path: Path) -> tuple[Point | None, bool]:
    """Return the saved progress, if any, and whether it describes a finished file."""
    saved, partial = _beside(path, "progress.json"), _beside(path, "partial")
    if not path.exists() and not partial.exists():
        return None, False
    try:
        fields = json.loads(saved.read_bytes())
        if fields.pop("version") != VERSION:
            raise ValueError("written by another version")
        point = Point(**{**fields, "next": tuple(fields["next"])})
    except FileNotFoundError:
        if not path.exists():
            return None, False  # killed before the first progress was saved
        raise ConfigError(
            f"{path} exists, and bootstrap did not write it. Move it, or name another file."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{saved} cannot be read ({error}). {_start_again(path)}") from error
    finished = not partial.exists()
    size = (path if finished else partial).stat().st_size
    if size < point.bytes or (finished and size > point.bytes):
        raise ConfigError(
            f"{path if finished else partial} was changed: it had {point.bytes} bytes, it has "
            f"{size}. {_start_again(path)}"
        )
    return point, finished


def _save(path: Path, point: Point) -> None:
    text = json.dumps({"version": VERSION, **asdict(point)})
    write_atomically(_beside(path, "progress.json"), text)


def _start_again(path: Path) -> str:
    there = [p for p in (path, _beside(path, "partial")) if p.exists()]
    return f"To start again, delete {' and '.join(map(str, there))}."


@contextmanager
def _partial(path: Path, point: Point) -> Iterator[BinaryIO]:
    """Open the partial file at the end of what is safe: of an earlier run, or of the finished file."""
    partial = _beside(path, "partial")
    if path.exists() and not partial.exists():
        # The finished file stays as it is: a reader must not see half a line.
        copy = _beside(path, "copy")
        shutil.copyfile(path, copy)
        with open(copy, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(copy, partial)
    with open(partial, "ab") as file:
        file.truncate(point.bytes)
        yield file


# What is asked for


def _absolute(url: str) -> str:
    """Return an address that means the same in another working directory."""
    is_name = "://" in url or (url.isidentifier() and not os.path.lexists(url))
    return url if is_name else os.path.abspath(url)


def _source(
    data: TextDataset, addresses: list[str], config: str | None, text_field: str
) -> dict[str, Any]:
    """Return what identifies the source, without secrets. Other data must not continue the file."""
    times = [os.stat(file.path).st_mtime_ns for file in each(data.files) if not file.remote]
    read = data.read
    return {
        "urls": [shown_address(url) for url in addresses],
        "config": config,
        "text_field": text_field,
        "first": data.files[0].path,
        **data.data_id(),
        "times": hashlib.sha256(repr(times).encode()).hexdigest()[:16],
        "chunks": [read.chunk_bytes, MAX_CHUNK_BYTES, read.max_doc_bytes, read.max_ratio],
    }


def _is_enough(point: Point, goal: int) -> bool:
    return goal <= point.goal or point.exhausted


def _check_request(
    path: Path, point: Point, finished: bool, goal: int, text_field: str, refresh: bool
) -> None:
    """Refuse what the existing file cannot become."""
    if point.source["text_field"] != text_field:
        raise ConfigError(
            f"{path} was begun with text_field {point.source['text_field']!r}, not {text_field!r}. "
            f"{_start_again(path)}"
        )
    if finished and not refresh and not _is_enough(point, goal):
        raise ConfigError(
            f"{path} was finished for {point.goal} bytes, and {goal} are asked for. To extend it, "
            f"use refresh=True (--refresh). {_start_again(path)}"
        )
    if not finished and goal < point.bytes:
        raise ConfigError(
            f"{_beside(path, 'partial')} has {point.bytes} bytes already, more than the {goal} that "
            f"are asked for. {_start_again(path)}"
        )


def _check_source(path: Path, point: Point, now: dict[str, Any], data: TextDataset) -> None:
    then = point.source
    if all(then[name] == now[name] for name in ("files", "times", "chunks")):
        return
    why = None
    if data.outside is not None:
        why = data.outside.explain_change(then["files"], data.files)
    if why is None:
        why = (
            f"it was {then['count']} files of {then['bytes']} bytes, now it is {now['count']} of "
            f"{now['bytes']}, or they were written at another time"
        )
    raise SourceChanged(
        f"the data is not what {path} was begun with: {why}. Use the same data, {then['first']} and "
        f"the files after it. {_start_again(path)}"
    )


# Writing


def _write(
    path: Path, point: Point, data: TextDataset, progress: Callable[[Progress], None]
) -> Point:
    """Write what is missing, and put the file into its place."""
    began, saved_at = point.bytes, time.monotonic()
    saved = point
    try:
        with _partial(path, point) as file, _Chunks(data) as chunks:
            _save(path, point)
            while not (point.full or point.exhausted):
                piece = chunks.next(point)
                if piece is None:
                    point = replace(point, exhausted=True)
                else:
                    lines, point = _fit(point, piece)
                    file.write(lines)
                done = point.full or point.exhausted
                due = time.monotonic() - saved_at >= COMMIT_S
                if done or due or point.bytes - saved.bytes >= COMMIT_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    _save(path, point)
                    saved, saved_at = point, time.monotonic()
                at_end = done or point.next[0] >= len(data.files)
                name = path.name if at_end else data.files[point.next[0]].name
                progress(_progress(point, began, name))
    except BaseException as error:
        if saved.bytes:
            partial = _beside(path, "partial")
            error.add_note(f"{saved.bytes} bytes are safe in {partial}; the same call continues")
        raise
    if not point.documents:
        if point.full:
            raise ConfigError(f"the first document does not fit into {point.goal} bytes")
        raise NoData(f"{len(data.files)} file(s), {data.files[0].path} and on, hold no text")
    os.replace(_beside(path, "partial"), path)
    return point


def _progress(point: Point, began: int, file: str) -> Progress:
    size, documents = point.bytes, point.documents
    return Progress(bytes=size, goal=point.goal, documents=documents, began=began, file=file)


class Lines(NamedTuple):
    """A chunk as it is written, without empty documents."""

    lines: list[bytes]
    rows: list[int]
    """The number in the chunk of each line's document."""
    bad: list[Bad]
    last: bool


Request = tuple[Position, ChunkRef | None, Future[Lines]]


class Piece(NamedTuple):
    """Lines, where they come from, and which position follows."""

    at: Position
    chunk: Lines
    following: Position


def _fit(point: Point, piece: Piece) -> tuple[bytes, Point]:
    """Return the lines of a chunk that fit, and the point after them."""
    lines, rows, bad, _ = piece.chunk
    size = 0
    for n, line in enumerate(lines):
        if point.bytes + size + len(line) > point.goal:
            point = replace(point, full=True)
            if n == 0:
                return b"", point  # as if the chunk had not been read
            lines = lines[:n]
            piece = piece._replace(following=(*piece.at[:2], rows[n]))
            break
        size += len(line)
    counts = Counter(point.bad)
    if piece.at[2] == 0:  # else they were counted when the chunk was begun
        counts.update(record.reason for record in bad)
    size, documents = point.bytes + size, point.documents + len(lines)
    after = replace(point, next=piece.following, bytes=size, documents=documents, bad=dict(counts))
    return b"".join(lines), after


# Reading


class _LineWork(TextWork):
    """Reads chunks as lines."""

    def lines(self, ref: ChunkRef, first: int) -> Lines:
        """Return the documents of a chunk from the `first` on."""
        try:
            documents = self._documents(ref, None)
        except BaseException as error:
            error.add_note(f"in stage fetch, decode, reading {ref}")
            raise
        texts = documents.texts.to_pylist()
        rows = [row for row in range(first, len(texts)) if texts[row]]
        dumps = json.JSONEncoder(ensure_ascii=False).encode
        lines = [(dumps({"text": texts[row]}) + "\n").encode() for row in rows]
        return Lines(lines, rows, documents.bad, documents.last)


class _Chunks:
    """Yields the chunks of a dataset in order, and reads ahead no more than is wanted."""

    def __init__(self, data: TextDataset) -> None:
        self._data = data
        workers = min(4, default_workers())
        self._threads = data.fetches() + workers
        self._work = _LineWork(
            data.read, data.tokenizer, None, workers, 1, data.outside, threads=True
        )
        self._pool = ThreadPoolExecutor(self._threads, "penstock-bootstrap")
        self._requests: Iterator[Request] | None = None
        self._ahead: deque[Request] = deque()

    def next(self, point: Point) -> Piece | None:
        """Return the chunk at the point, or None at the end of the data."""
        if self._requests is None:
            self._requests = self._request(*point.next)
        wanted = min(point.goal - point.bytes, AHEAD_BYTES)
        while not self._ahead or (
            len(self._ahead) < self._threads
            and sum(ref.nbytes for _, ref, _ in self._ahead if ref is not None) < wanted
        ):
            request = next(self._requests, None)
            if request is None:
                break
            self._ahead.append(request)
        if not self._ahead:
            return None
        at, ref, task = self._ahead.popleft()
        lines = task.result()
        is_end = ref is None or (ref.file.open_ended and lines.last)
        return Piece(at, lines, (at[0] + 1, 0, 0) if is_end else (at[0], at[1] + 1, 0))

    def _request(self, file: int, chunk: int, first: int) -> Iterator[Request]:
        """Submit one chunk after another. One without an address reports a file's bad records."""
        for number in range(file, len(self._data.files)):
            ref = self._data.files[number]
            if ref.open_ended:  # the number of chunks is known only at the end of the file
                for index in count(chunk):
                    address = ChunkRef(ref, index, self._data.read.chunk_bytes)
                    task = self._pool.submit(self._work.lines, address, first)
                    yield (number, index, first), address, task
                    first = 0
                    if task.result().last:
                        break
            else:
                refs, bad = self._work.inspect(ref)
                for index in range(chunk, len(refs)):
                    task = self._pool.submit(self._work.lines, refs[index], first)
                    yield (number, index, first), refs[index], task
                    first = 0
                if bad:
                    nothing: Future[Lines] = Future()
                    nothing.set_result(Lines([], [], bad, True))
                    yield (number, len(refs), 0), None, nothing
            chunk = first = 0

    def __enter__(self) -> _Chunks:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.stop()
        self._pool.shutdown(cancel_futures=True)
        self._work.close()

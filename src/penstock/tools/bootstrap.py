"""Write the first bytes of a source's text to a local JSONL file, so that a run can start at once.

While it is being written, the file is called PATH.partial. PATH.progress.json holds the number of
bytes that are safely on disk, and the next document. After a kill, the next call truncates the
partial file to that length and continues: the result is byte-identical to an uninterrupted run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from rich.filesize import decimal as size

from penstock.config import whole_number, write_atomically
from penstock.dataset import TextDataset
from penstock.errors import ConfigError, SourceError
from penstock.feed.worker_pool import make_pool
from penstock.loader import AsyncDataLoader
from penstock.options import RemoteOptions
from penstock.read.listing import each
from penstock.read.parquet import MAX_CHUNK_BYTES
from penstock.sources.base import Counted, RunContext
from penstock.sources.chunk_lanes import ChunkLanes
from penstock.sources.text_files import TextSource, TextWork
from penstock.types import LanePosition, MiB, Shard, TokenChunk, shown_address
from penstock.watch import seconds

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

VERSION = 3
COMMIT_BYTES, COMMIT_S = 4 * MiB, 1.0
"""Progress is saved after this many bytes or seconds, which bounds the cost of a kill."""
AHEAD_BYTES = 256 * MiB
"""Memory limit of read-ahead."""


class Progress(NamedTuple):
    """The progress of a bootstrap."""

    bytes: int
    goal: int
    began: int
    """Bytes that existed before this run."""
    file: str
    """The file being read; at the end, the written file."""
    seconds: float

    def as_text(self) -> str:
        """Return a line with the progress, the rate and the time left."""
        speed = (self.bytes - self.began) / max(1e-9, self.seconds)
        left = seconds((self.goal - self.bytes) / max(1.0, speed))
        done = f"{size(self.bytes)} of {size(self.goal)}, {size(int(speed))}/s"
        return f"{done}, {left} left ({self.file})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """The result of a bootstrap."""

    path: Path
    bytes: int
    documents: int
    bad: Mapping[str, int]
    """Records that this call skipped, by reason."""
    already: bool
    """True if the file was already complete."""
    exhausted: bool
    """True if the source has no more text."""

    def as_text(self) -> str:
        """Return a readable line."""
        text = f"{self.path}: {size(self.bytes)} in {self.documents} documents"
        text += ", complete already" if self.already else ""
        text += "; the source has no more" if self.exhausted else ""
        reasons = ", ".join(f"{reason} {n}" for reason, n in self.bad.items())
        return f"{text}; skipped records: {reasons}" if reasons else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The bytes that are safely on disk, and the next document."""

    source: dict[str, Any]
    goal: int
    file: int = 0
    chunk: int = 0
    document: int = 0
    """The numbers of the next document's file, chunk and position in the chunk."""
    bytes: int = 0
    documents: int = 0
    exhausted: bool = False
    """True if there is no next document."""

    def is_enough(self, goal: int) -> bool:
        return goal <= self.goal or self.exhausted


def bootstrap(
    urls: Paths,
    out: str | os.PathLike[str],
    max_bytes: int,
    *,
    text_field: str = "text",
    remote: RemoteOptions | dict[str, Any] | None = None,
    refresh: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Bootstrapped:
    """Write documents in the order of the source, as many as fit into `max_bytes`.

    A call after a kill continues. `refresh`: extend a finished file; until that is done, readers
    see the old one.
    """
    check_name(out)
    goal = whole_number("max_bytes", max_bytes, 1)
    path = Path(os.path.realpath(out))
    given = [urls] if isinstance(urls, str | os.PathLike) else urls
    addresses = [_absolute(os.fspath(url)) for url in given]
    config = RemoteOptions.of(remote).config
    asked = {"urls": addresses, "config": config, "text_field": text_field}
    path.parent.mkdir(parents=True, exist_ok=True)
    bad: Mapping[str, int] = {}
    with _locked(path):
        point, finished = _load(path)
        if point is not None:
            _check_goal(path, point, goal, finished, refresh)
        already = point is not None and finished and point.is_enough(goal)
        # Saved addresses omit secrets, so an address with a secret is always listed again.
        if point is None or not already or not asked.items() <= point.source.items():
            data = TextDataset(
                urls, tokenizer="byte", seq_len=1, eos=None, text_field=text_field,
                remote=replace(RemoteOptions.of(remote), report_docs=0), on_bad_record="skip", cache=False,
            )  # fmt: skip
            source = asked | _identify(data, addresses)
            point = point or Point(source=source, goal=goal)
            _check_source(path, point, source, data)
            if not already:
                point, bad = _write(path, replace(point, goal=goal), data, progress)
    return Bootstrapped(
        path=path, bytes=point.bytes, documents=point.documents, bad=bad, already=already,
        exhausted=point.exhausted,
    )  # fmt: skip


def check_name(out: str | os.PathLike[str]) -> None:
    """Raise ConfigError if a file of this name cannot be written."""
    if Path(out).suffix != ".jsonl":
        raise ConfigError(f"{os.fspath(out)}: needs a name that ends in .jsonl")
    if os.path.isdir(out):
        raise ConfigError(f"{os.fspath(out)} is a folder; needs the name of a file")


# The files on disk


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raise if another process writes the file. The lock is released when its process exits."""
    with open(_beside(path, "lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path} is being written by another process. Wait for it, or name another file."
            ) from None
        yield


def _load(path: Path) -> tuple[Point | None, bool]:
    """Return the saved progress, if any, and True if the file is finished."""
    saved, partial = _beside(path, "progress.json"), _beside(path, "partial")
    if not path.exists() and not partial.exists():
        return None, False
    try:
        fields = json.loads(saved.read_bytes())
        if fields.pop("version") != VERSION:
            raise ValueError("written by another version")
        point = Point(**fields)
    except FileNotFoundError:
        if not path.exists():
            return None, False  # killed before progress was first saved
        raise ConfigError(
            f"{path} exists, and bootstrap did not write it. Move it, or name another file."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{saved} cannot be read ({error}). {_start_again(path)}") from error
    finished = not partial.exists()
    file = path if finished else partial
    size = file.stat().st_size
    if size < point.bytes or (finished and size > point.bytes):
        raise ConfigError(
            f"{file} was changed: it had {point.bytes} bytes, it has {size}. {_start_again(path)}"
        )
    return point, finished


def _save(path: Path, point: Point) -> None:
    text = json.dumps({"version": VERSION, **asdict(point)})
    write_atomically(_beside(path, "progress.json"), text)


def _start_again(path: Path) -> str:
    there = [p for p in (path, _beside(path, "partial")) if p.exists()]
    return f"To start again, delete {' and '.join(map(str, there))}."


@contextmanager
def _open_partial(path: Path, point: Point) -> Iterator[BinaryIO]:
    """Open the partial file after its last safe byte. Copy a finished file that is extended."""
    partial = _beside(path, "partial")
    if path.exists() and not partial.exists():
        # The finished file is not modified, because a reader must not see half a line.
        copy = _beside(path, "copy")
        shutil.copyfile(path, copy)
        with open(copy, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(copy, partial)
    with open(partial, "ab") as file:
        file.truncate(point.bytes)
        yield file


# Checks


def _absolute(url: str) -> str:
    """Return an address that does not depend on the working directory."""
    is_name = "://" in url or (url.isidentifier() and not os.path.lexists(url))
    return url if is_name else os.path.abspath(url)


def _identify(data: TextDataset, addresses: list[str]) -> dict[str, Any]:
    """Return the identity of the source, without secrets. Other data must not extend the file."""
    times = [os.stat(file.path).st_mtime_ns for file in each(data.files) if not file.remote]
    read = data.read
    return {
        "urls": [shown_address(url) for url in addresses],
        "first": data.files[0].path,
        **data.data_id(),
        "times": hashlib.sha256(repr(times).encode()).hexdigest()[:16],
        "chunks": [read.chunk_bytes, MAX_CHUNK_BYTES, read.max_doc_bytes, read.max_ratio],
    }


def _check_goal(path: Path, point: Point, goal: int, finished: bool, refresh: bool) -> None:
    """Raise if the existing file cannot be extended to this size."""
    if finished and not refresh and not point.is_enough(goal):
        why = f"was finished for {point.goal} bytes. To extend it, use refresh=True (--refresh)."
    elif not finished and goal < point.bytes:
        why = f"has {point.bytes} bytes already."
    else:
        return
    raise ConfigError(f"{goal} bytes are requested, but {path} {why} {_start_again(path)}")


def _check_source(path: Path, point: Point, now: dict[str, Any], data: TextDataset) -> None:
    then, why = point.source, None
    names = ("text_field", "count", "bytes", "files", "times", "chunks")
    changes = [
        f"{name} was {then[name]}, is {now[name]}" for name in names if then[name] != now[name]
    ]
    if changes:
        if data.remote_config is not None:
            why = data.remote_config.explain_change(then["files"], data.files)
        raise SourceError(
            f"{path} was begun with other data: {why or ', '.join(changes)}. Use the same "
            f"data, {then['first']} and the files after it. {_start_again(path)}"
        )


# Writing


def _write(
    path: Path, point: Point, data: TextDataset, progress: Callable[[Progress], None] | None
) -> tuple[Point, Mapping[str, int]]:
    """Write the missing documents and move the file into place. Also return the bad records."""
    loader = AsyncDataLoader(data, 1, shuffle=False, epochs=1, lanes=1, shard=Shard(1, 0))
    source, run = loader.inspect()
    assert isinstance(source, TextSource)
    run = replace(run, positions={0: LanePosition(0, point.file, point.chunk)})
    began_at = saved_at = time.monotonic()
    saved, began = point, point.bytes
    full = False
    try:
        with _open_partial(path, point) as file, _open_lanes(source, run) as lanes:
            _save(path, point)
            while not (full or point.exhausted):
                # Never read ahead more than is still needed.
                lanes.read_ahead_bytes = min(AHEAD_BYTES, point.goal - point.bytes)
                lanes.submit_ahead()
                chunk = lanes.lanes[0].next_chunk()
                if chunk is None:
                    point, name = replace(point, exhausted=True), path.name
                else:
                    lines, full, point = _fit(point, chunk, data)
                    file.write(lines)
                    name = path.name if full else chunk.ref.file.name
                due = time.monotonic() - saved_at >= COMMIT_S
                if full or chunk is None or due or point.bytes - saved.bytes >= COMMIT_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    _save(path, point)
                    saved, saved_at = point, time.monotonic()
                if progress is not None:
                    elapsed_s = time.monotonic() - began_at
                    progress(Progress(point.bytes, point.goal, began, name, elapsed_s))
            bad = lanes.bad()
    except BaseException as error:
        # Even with 0 bytes, because the error of a full disk does not name the file.
        partial = _beside(path, "partial")
        error.add_note(f"{saved.bytes} bytes are safe in {partial}; repeat the call to continue")
        raise
    if not point.documents:
        if full:
            raise ConfigError(f"the first document does not fit into {point.goal} bytes")
        raise SourceError(f"{len(data.files)} file(s), {data.files[0].path} and on, hold no text")
    os.replace(_beside(path, "partial"), path)
    return point, bad


def _fit(point: Point, chunk: TokenChunk, data: TextDataset) -> tuple[bytes, bool, Point]:
    """Return the lines of a chunk that fit, True if one did not fit, and the point after them."""
    while data.files[point.file] != chunk.ref.file:
        point = replace(point, file=point.file + 1, chunk=0, document=0)
    encode = json.JSONEncoder(ensure_ascii=False).encode
    lines: list[bytes] = []
    size, full = point.bytes, False
    documents = chunk.docs.to_pylist()
    after = replace(point, chunk=point.chunk + 1, document=0)
    for number in range(point.document, len(documents)):
        if not documents[number]:
            continue
        # Each id is the byte itself.
        ids = np.frombuffer(documents[number], data.tokenizer.dtype)
        text = ids.astype(np.uint8).tobytes().decode()
        line = (encode({"text": text}) + "\n").encode()
        if size + len(line) > point.goal:
            full, after = True, replace(point, document=number)
            break
        lines.append(line)
        size += len(line)
    after = replace(after, bytes=size, documents=point.documents + len(lines))
    return b"".join(lines), full, after


@contextmanager
def _open_lanes(source: TextSource, run: RunContext) -> Iterator[ChunkLanes]:
    """Start workers and open the lane of a run; stop and close them at the end."""
    work = source.work(run)
    pool = make_pool(run.n_workers, work, workers=run.workers, cpus=None, clock=run.clock)
    opened: list[Counted | TextWork] = [work]
    try:
        lanes = source.open_lanes(run, pool, work)
        opened.insert(0, lanes)
        yield lanes
    finally:
        pool.stop()
        for each in opened:
            each.stop()
        pool.join(10.0)
        for each in opened:
            each.close()

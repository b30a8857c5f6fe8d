"""Write the first bytes of a source's text to a local file, from which a run can start at once.

In:    paths or addresses, the file to write, and how many bytes.
Out:   JSONL, a document a line in the order of the source; or the same texts as Parquet.
Where: the calling thread writes. Fetch threads and workers are some chunks ahead of it.
State: beside the file: PATH.partial, and PATH.progress.json, which says how much of it counts and which
       document comes next. A run that was killed goes on from there, to the same bytes.
Cost:  a flush to disk every few megabytes. A refresh takes room for the old file beside the new one:
       what is appended to a file that others read is seen in halves, and left so by a kill.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from penstock.config import whole_number
from penstock.dataset import TextDataset
from penstock.errors import ConfigError, NoData, SourceChanged
from penstock.read.attempt import Remote
from penstock.read.manifest import each
from penstock.read.reader import MAX_CHUNK_BYTES
from penstock.sources.bootstrap_lines import InOrder, Piece
from penstock.types import MiB

log = logging.getLogger("penstock")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

VERSION = 1
COMMIT_BYTES, COMMIT_S = 4 * MiB, 1.0
"""What was written is made safe after so many bytes, or so long: as much is read again after a kill."""
GROUP_BYTES = 8 * MiB
"""Text in a row group, where Parquet is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is."""

    bytes: int
    goal: int
    documents: int
    began: int
    """Bytes that were there when this run began."""
    file: str
    """What is read, by its name in the listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """What there is now."""

    path: Path
    bytes: int
    """Of JSONL; also where that was made into Parquet."""
    documents: int
    bad: Mapping[str, int]
    """Records that were left out, by reason."""
    already: bool
    """It was all there before."""
    exhausted: bool
    """The source has no more text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a file has, and which document comes next."""

    goal: int
    next: tuple[int, int, int] = (0, 0, 0)
    """File, chunk and document, each by its number."""
    bytes: int = 0
    documents: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    exhausted: bool = False
    size: int | None = None
    """Of the finished file, once it is known."""

    @property
    def complete(self) -> bool:
        return self.exhausted or self.bytes >= self.goal


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
    """Write documents until the file has `max_bytes` bytes, the last line counted whole.

    Called again after a kill, it goes on. `refresh`: a finished file may be extended, by as much as is
    missing; until that is done, others read the old one.
    """
    check_name(out, refresh)
    goal = whole_number("max_bytes", max_bytes, 1)
    place = Place(Path(os.path.realpath(out)))
    place.out.parent.mkdir(parents=True, exist_ok=True)
    with place.locked():
        place.load()
        run = Run(place, goal, refresh, progress or (lambda _: None))
        if run.at_hand(asked := Asked.of(urls, config, text_field)):
            return run.result(already=True)
        data = TextDataset(
            urls, tokenizer="byte", seq_len=1, text_field=text_field, config=config, remote=remote,
            on_bad_record="skip", cache=False,
        )  # fmt: skip
        return run.write(data, asked)


def check_name(out: str | os.PathLike[str], refresh: bool) -> None:
    """Whether a file of this name can be written."""
    ending = Path(out).suffix
    if ending not in (".jsonl", ".parquet"):
        raise ConfigError(f"{os.fspath(out)}: needs a name that ends in .jsonl or .parquet, which says what to write")
    if refresh and ending == ".parquet":
        raise ConfigError(f"{os.fspath(out)}: only JSONL can be extended. Write another file, without refresh.")
    if os.path.isdir(out):
        raise ConfigError(f"{os.fspath(out)} is a folder; needs the name of a file")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, without anything that must not be seen."""

    urls: list[str]
    config: str | None
    text_field: str

    secret: bool
    """Whether something was left out, so that equal ones need not mean equal data."""

    @classmethod
    def of(cls, urls: Paths, config: str | None, text_field: str) -> Asked:
        given = [os.fspath(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)]
        shown = [_shown(url) for url in given]
        return cls(shown, config, text_field, any("://" in a and a != b for a, b in zip(given, shown, strict=True)))


def _shown(url: str) -> str:
    if url.partition("://")[0].lower() in ("http", "https"):
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    # A short name stands for an address, unless there is a file of that name.
    return url if "://" in url or (url.isidentifier() and not os.path.lexists(url)) else os.path.abspath(url)


class Run:
    """One call."""

    def __init__(self, place: Place, goal: int, refresh: bool, progress: Callable[[Progress], None]) -> None:
        self._place = place
        self._goal = goal
        self._refresh = refresh
        self._progress = progress

    def at_hand(self, asked: Asked) -> bool:
        """Whether there is nothing to do, as far as this can be told without asking the source."""
        place, source = self._place, self._place.source
        if not (place.done or place.doing):
            return False
        if source["text_field"] != asked.text_field:
            raise ConfigError(
                f"{place.out} was begun with text_field={source['text_field']!r}, not {asked.text_field!r}. "
                f"{place.start_anew}"
            )
        done = place.done
        if done is None:
            return False
        if not self._enough(done):
            if place.parquet:
                raise ConfigError(f"{place.out} has {done.bytes} bytes, and only JSONL can be extended. {place.start_anew}")
            if not self._refresh:
                raise ConfigError(
                    f"{place.out} is finished with {done.bytes} bytes, fewer than {self._goal}. Extend it: refresh"
                )
        same = (source["urls"], source["config"]) == (asked.urls, asked.config)
        return same and not asked.secret and self._enough(done) and not (done.exhausted and self._refresh)

    def _enough(self, done: Point) -> bool:
        return self._goal <= done.goal or done.exhausted

    def result(self, *, already: bool) -> Bootstrapped:
        """What there is, now that it is finished."""
        place, done = self._place, self._place.done
        assert done is not None
        if place.doing is None:
            place.partial.unlink(missing_ok=True)  # Parquet was made of it, or a kill left it behind
        return Bootstrapped(
            path=place.out, bytes=done.bytes, documents=done.documents, bad=done.bad, already=already,
            exhausted=done.exhausted,
        )  # fmt: skip

    def write(self, data: TextDataset, asked: Asked) -> Bootstrapped:
        """Write what is missing."""
        place = self._place
        source = _source(data, asked)
        if place.done or place.doing:
            self._compare(source, data)
        else:
            place.source = source
        if place.done is not None and self._enough(place.done):
            return self.result(already=True)
        try:
            self._begin()
            self._fill(data)
            place.finish()
        except BaseException as error:
            safe = place.doing.bytes if place.doing is not None else 0
            error.add_note(f"{safe} bytes are safe in {place.partial}; the same call again goes on from there")
            raise
        return self.result(already=False)

    def _compare(self, now: dict[str, Any], data: TextDataset) -> None:
        """Refuse to go on with other data than it was begun with."""
        place, then = self._place, self._place.source
        if then["chunks"] != now["chunks"]:
            raise ConfigError(f"{place.out} was begun by a version that reads in other pieces. {place.start_anew}")
        if (then["files"], then["times"]) == (now["files"], now["times"]):
            return
        why = data.outside.explain_change(then["files"], data.files) if data.outside is not None else None
        if why is None:
            why = f"it was {then['count']} files of {then['bytes']} bytes from {then['first']} on, it is "
            why += f"{now['count']} of {now['bytes']} from {now['first']} on"
            why += "" if then["files"] != now["files"] else ", written at another time"
        raise SourceChanged(
            f"the data changed since {place.out} was begun: {why}. Give what it was begun with, {then['first']} "
            f"and those that follow. {place.start_anew}"
        )

    def _begin(self) -> None:
        """Have a partial file that ends where a run goes on."""
        place, goal = self._place, self._goal
        if place.doing is None:
            if place.done is not None:
                place.copy()
                place.save(done=place.done, doing=replace(place.done, goal=goal, size=None))
            else:
                place.partial.write_bytes(b"")
                place.save(done=None, doing=Point(goal=goal))
            place.sync_folder()
            return
        doing = place.doing
        size = place.partial.stat().st_size
        if size < doing.bytes:
            raise ConfigError(f"{place.partial} has {size} bytes, and {doing.bytes} were written. {place.start_anew}")
        if goal <= doing.bytes and not (doing.complete and goal == doing.goal):
            raise ConfigError(f"{place.partial} has {doing.bytes} bytes already: ask for more. {place.start_anew}")
        place.doing = replace(doing, goal=goal, size=None)
        os.truncate(place.partial, doing.bytes)

    def _fill(self, data: TextDataset) -> None:
        place, point = self._place, self._place.doing
        assert point is not None
        began = safe = point.bytes
        at = time.monotonic()
        with open(place.partial, "ab", buffering=0) as file, InOrder(data, *point.next) as chunks:
            while not point.complete:
                piece = chunks.next(point.goal - point.bytes)
                if piece is None:
                    point = replace(point, exhausted=True)
                else:
                    lines, point = advance(point, piece)
                    while lines:
                        lines = lines[file.write(lines) :]
                if point.complete or point.bytes - safe >= COMMIT_BYTES or time.monotonic() - at >= COMMIT_S:
                    os.fsync(file.fileno())
                    place.save(done=place.done, doing=point)
                    safe, at = point.bytes, time.monotonic()
                name = data.files[min(point.next[0], len(data.files) - 1)].name
                self._progress(
                    Progress(bytes=point.bytes, goal=point.goal, documents=point.documents, began=began, file=name)
                )
        if not point.documents:
            raise NoData(f"the {len(data.files)} file(s), from {data.files[0].path} on, hold no text")


def advance(point: Point, piece: Piece) -> tuple[memoryview, Point]:
    """The lines of a chunk, up to the one that reaches the goal, and the point after them."""
    data, rows, bad, _ = piece.lines
    left = point.goal - point.bytes
    following = (piece.file + 1, 0, 0) if piece.over else (piece.file, piece.chunk + 1, 0)
    documents = len(rows)
    if len(data) >= left:
        data = data[: data.index(b"\n", left - 1) + 1]  # within a line there are none
        documents = data.count(b"\n")
        following = (piece.file, piece.chunk, int(rows[documents - 1]) + 1)
    counts = dict(point.bad)
    for record in bad if piece.first == 0 else ():  # else they were counted when the chunk was begun
        counts[record.reason] = counts.get(record.reason, 0) + 1
    return memoryview(data), replace(
        point,
        next=following,
        bytes=point.bytes + len(data),
        documents=point.documents + documents,
        bad=counts,
    )


def _source(data: TextDataset, asked: Asked) -> dict[str, Any]:
    """What it is made of, for the run that goes on with it."""
    times = [os.stat(file.path).st_mtime_ns for file in each(data.files) if not file.remote]
    read = data.read
    return {
        "urls": asked.urls,
        "config": asked.config,
        "text_field": asked.text_field,
        "first": data.files[0].path,
        **data.data_id(),
        "times": hashlib.sha256(repr(times).encode()).hexdigest()[:16],
        "chunks": [read.chunk_bytes, MAX_CHUNK_BYTES, read.max_doc_bytes, read.max_ratio],
    }


# On disk


class Place:
    """A file to be made, and those beside it that say how far it is."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.parquet = out.suffix == ".parquet"
        self.partial = Path(f"{out}.partial")
        self.sidecar = Path(f"{out}.progress.json")
        self.source: dict[str, Any] = {}
        """What it is made of."""
        self.done: Point | None = None
        """Of the file itself, once it is there."""
        self.doing: Point | None = None
        """Of the partial one."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from the same file. The kernel's lock ends with its holder, however that ends."""
        path = f"{self.out}.lock"
        fd = -1
        while fd < 0:
            fd = _lock(path)
        try:
            yield
        finally:
            os.unlink(path)
            os.close(fd)

    def load(self) -> None:
        """What earlier runs left, also if they were killed between two steps."""
        try:
            saved = json.loads(self.sidecar.read_text())
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']!r}")
            self.source = dict(saved["source"])
            self.done, self.doing = (saved[key] and Point(**saved[key]) for key in ("done", "doing"))
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.sidecar} is not what was written there ({error}). Delete it and {self.partial} to start anew."
            ) from error
        size = self.out.stat().st_size if self.out.exists() else None
        doing = self.doing
        if doing is not None and size is not None and size == doing.size:
            if self.parquet or not self.partial.exists():  # else the one that is there is not it
                self.save(done=doing, doing=None)
        elif not self.partial.exists():
            self.doing = None
        if size is None:
            self.done = None
        elif self.done is None:
            raise ConfigError(f"{self.out} is there, and was not made by a bootstrap. Move it away, or name another.")
        elif self.done.size != size:
            raise ConfigError(
                f"{self.out} was changed since: it was {self.done.size} bytes long, it is {size}. "
                "Move it away to start anew."
            )

    def save(self, *, done: Point | None, doing: Point | None) -> None:
        self.done, self.doing = done, doing
        points = {"done": done and asdict(done), "doing": doing and asdict(doing)}
        text = json.dumps({"version": VERSION, "source": self.source, **points}, indent=1)
        # Not under a random name: a kill would leave one behind each time.
        new = Path(f"{self.sidecar}.new")
        with open(new, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.sidecar)

    def copy(self) -> None:
        """The file as the partial one."""
        with open(self.out, "rb") as source, open(self.partial, "wb") as sink:
            left = os.fstat(source.fileno()).st_size
            with suppress(OSError):  # where the disk cannot share the blocks of two files, or another one is asked
                while left and (n := os.copy_file_range(source.fileno(), sink.fileno(), left)):
                    left -= n
            while left and (part := source.read(MiB)):
                sink.write(part)
                left -= len(part)
            sink.flush()
            os.fsync(sink.fileno())

    def finish(self) -> None:
        """Put the file into its place, now that everything is in the partial one."""
        assert self.doing is not None
        new, size = self.partial, self.doing.bytes
        if self.parquet:
            new = Path(f"{self.out}.new")
            size = write_parquet(self.partial, new)
        self.save(done=self.done, doing=replace(self.doing, size=size))
        os.replace(new, self.out)
        self.sync_folder()
        self.save(done=self.doing, doing=None)

    def tidy(self) -> None:
        """Remove what a kill left behind, or Parquet was made of."""
        if self.doing is None:
            self.partial.unlink(missing_ok=True)

    def sync_folder(self) -> None:
        fd = os.open(self.out.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _lock(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise ConfigError(
            f"{path.removesuffix('.lock')} is being written by process {pid or 'of unknown number'}. "
            "Wait for it, end it, or name another file."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(fd)
            raise
        log.warning("%s: no locks on this disk; see that nobody else writes the same file", path)
    try:
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError
    except FileNotFoundError:
        os.close(fd)  # its last holder removed it in between
        return -1
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def write_parquet(lines: Path, out: Path) -> int:
    """The texts of a JSONL file as Parquet: the same bytes for the same lines. Gives its size."""
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    with (
        open(lines, "rb") as source,
        open(out, "wb") as sink,
        pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False, write_page_checksum=True) as writer,
    ):
        while group := source.readlines(GROUP_BYTES):
            texts = [json.loads(line)["text"] for line in group]
            writer.write_batch(pa.record_batch([pa.array(texts, pa.string())], schema), row_group_size=len(texts))
        writer.close()
        sink.flush()
        os.fsync(sink.fileno())
        return sink.tell()

"""Write the first bytes of a source's text to a local file, from which a run can start at once.

In:    paths or addresses, the file to write, and how many bytes.
Out:   JSONL, a document a line in the order of the source; or the same texts as Parquet.
Where: the calling thread writes. Fetch threads and workers are some chunks ahead of it.
State: on disk, see `bootstrap_place`: a run that was killed goes on, to the same bytes.
Cost:  a flush to disk every few megabytes. A refresh takes room for the old file beside the new one:
       what is appended to a file that others read is seen in halves, and left so by a kill.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import whole_number
from penstock.dataset import TextDataset
from penstock.errors import ConfigError, NoData, SourceChanged
from penstock.options import RemoteOptions
from penstock.read.manifest import each
from penstock.read.reader import MAX_CHUNK_BYTES
from penstock.sources.bootstrap_lines import InOrder, Piece
from penstock.sources.bootstrap_place import Place, Point
from penstock.types import MiB, shown_address

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

COMMIT_BYTES, COMMIT_S = 4 * MiB, 1.0
"""What was written counts after so many bytes, or so long: as much is read again after a kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is."""

    bytes: int
    goal: int
    documents: int
    began: int
    """Bytes that were there when this run began."""
    file: str
    """What is read, by its name in the listing; at the end, what is written."""


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
    """Nothing was missing."""
    exhausted: bool
    """The source has no more text."""


def bootstrap(
    urls: Paths,
    out: str | os.PathLike[str],
    max_bytes: int,
    *,
    config: str | None = None,
    text_field: str = "text",
    remote: RemoteOptions | dict[str, Any] | None = None,
    refresh: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Bootstrapped:
    """Write documents until there are `max_bytes` bytes; the last line is written whole.

    Called again after a kill, it goes on. `refresh`: a finished file may be extended; until that is
    done, others read the old one.
    """
    check_name(out, refresh)
    place = Place(Path(os.path.realpath(out)))
    run = Run(place, whole_number("max_bytes", max_bytes, 1), refresh, progress or (lambda _: None))
    place.out.parent.mkdir(parents=True, exist_ok=True)
    with place.locked():
        place.load()
        asked = Asked.of(urls, config, text_field)
        if not run.at_hand(asked):
            limits = RemoteOptions.of(remote)
            data = TextDataset(
                urls,
                tokenizer="byte",
                seq_len=1,
                text_field=text_field,
                remote=replace(limits, config=config),
                on_bad_record="skip",
                cache=False,
            )
            run.write(data, asked)
        return run.result()


def check_name(out: str | os.PathLike[str], refresh: bool) -> None:
    """Whether a file of this name can be written."""
    ending = Path(out).suffix
    if ending not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{os.fspath(out)}: needs a name that ends in .jsonl or .parquet, which says what to write"
        )
    if refresh and ending == ".parquet":
        raise ConfigError(
            f"{os.fspath(out)}: only JSONL can be extended. Write another file, without refresh."
        )
    if os.path.isdir(out):
        raise ConfigError(f"{os.fspath(out)} is a folder; needs the name of a file")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, without anything that must not be seen."""

    urls: list[str]
    config: str | None
    text_field: str
    secret: bool
    """Whether something was left out, so that the same again need not be the same data."""

    @classmethod
    def of(cls, urls: Paths, config: str | None, text_field: str) -> Asked:
        given = [
            os.fspath(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)
        ]
        shown = [_shown(url) for url in given]
        return cls(
            shown,
            config,
            text_field,
            any("://" in a and a != b for a, b in zip(given, shown, strict=True)),
        )


def _shown(url: str) -> str:
    if "://" in url:
        return shown_address(url)
    # A short name stands for an address, unless there is a file of that name.
    return url if (url.isidentifier() and not os.path.lexists(url)) else os.path.abspath(url)


class Run:
    """One call."""

    def __init__(
        self, place: Place, goal: int, refresh: bool, progress: Callable[[Progress], None]
    ) -> None:
        self._place = place
        self._goal = goal
        self._refresh = refresh
        self._progress = progress
        self._wrote = False

    def at_hand(self, asked: Asked) -> bool:
        """Whether there is nothing to do, as far as that can be told without asking the source."""
        place, source = self._place, self._place.source
        if not (place.done or place.doing):
            return False
        if source["text_field"] != asked.text_field:
            raise ConfigError(
                f"{place.out} was begun with text_field {source['text_field']!r}, not {asked.text_field!r}. "
                f"{place.start_anew}"
            )
        if place.done is None:
            return False
        if not self._enough(place.done):
            have = f"{place.out} was finished with {place.done.bytes} bytes, and {self._goal} are asked for"
            if place.parquet:
                raise ConfigError(f"{have}; only JSONL can be extended. {place.start_anew}")
            if not self._refresh:
                raise ConfigError(
                    f"{have}. To extend it, say refresh=True (--refresh). {place.start_anew}"
                )
            return False
        same = not asked.secret and (source["urls"], source["config"]) == (asked.urls, asked.config)
        return same and not (self._refresh and self._goal > place.done.goal)

    def _enough(self, done: Point) -> bool:
        return self._goal <= done.goal or done.exhausted

    def result(self) -> Bootstrapped:
        """What there is, now that it is finished."""
        place, done = self._place, self._place.done
        assert done is not None
        place.tidy()
        return Bootstrapped(
            path=place.out, bytes=done.bytes, documents=done.documents, bad=done.bad, already=not self._wrote,
            exhausted=done.exhausted,
        )  # fmt: skip

    def write(self, data: TextDataset, asked: Asked) -> None:
        """Write what is missing."""
        place = self._place
        source = _source(data, asked)
        if place.done or place.doing:
            self._compare(source, data)
        else:
            place.source = source
        if place.done is not None and self._enough(place.done):
            return
        self._wrote = True
        try:
            if place.doing is None:
                place.begin(self._goal)
            else:
                place.go_on(self._goal)
            self._fill(data)
            place.finish()
        except BaseException as error:
            if place.doing is not None and place.doing.bytes:
                error.add_note(
                    f"{place.doing.bytes} bytes are safe in {place.partial}: the same again goes on from there"
                )
            raise

    def _compare(self, now: dict[str, Any], data: TextDataset) -> None:
        """Refuse to go on with other data than it was begun with."""
        place, then = self._place, self._place.source
        if then["chunks"] != now["chunks"]:
            raise ConfigError(
                f"{place.out} was begun by a version that reads in other pieces. {place.start_anew}"
            )
        if (then["files"], then["times"]) == (now["files"], now["times"]):
            return
        why = (
            data.outside.explain_change(then["files"], data.files)
            if data.outside is not None
            else None
        )
        if why is None:
            why = f"it was {then['count']} files of {then['bytes']} bytes, it is {now['count']} of {now['bytes']}"
            why += "" if then["files"] != now["files"] else ", written at another time"
        raise SourceChanged(
            f"the data is not what {place.out} was begun with: {why}. Give that data again, {then['first']} and what "
            f"follows. {place.start_anew}"
        )

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
                if (
                    point.complete
                    or point.bytes - safe >= COMMIT_BYTES
                    or time.monotonic() - at >= COMMIT_S
                ):
                    os.fsync(file.fileno())
                    place.save(done=place.done, doing=point)
                    safe, at = point.bytes, time.monotonic()
                last = point.complete or point.next[0] >= len(data.files)
                self._tell(point, began, place.out.name if last else data.files[point.next[0]].name)
        if not point.documents:
            raise NoData(
                f"the {len(data.files)} file(s), from {data.files[0].path} on, hold no text"
            )

    def _tell(self, point: Point, began: int, file: str) -> None:
        documents = point.documents
        self._progress(
            Progress(
                bytes=point.bytes, goal=point.goal, documents=documents, began=began, file=file
            )
        )


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
    for record in (
        bad if piece.first == 0 else ()
    ):  # else they were counted when the chunk was begun
        counts[record.reason] = counts.get(record.reason, 0) + 1
    have, written = point.bytes + len(data), point.documents + documents
    return memoryview(data), replace(
        point, next=following, bytes=have, documents=written, bad=counts
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

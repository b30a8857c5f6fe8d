"""Keep token chunks on local disk, so that they are made once.

In:    token chunks as they are made, and when the run will need which (`foresee`).
Out:   the same chunks in the next epoch, restart or run, mapped into memory.
Where: `get` and `has` on worker threads, `put` on the thread of `feed.keep`; many processes at once.
State: in the folder: tokens/<2 hex>/<file>-<chunk>-<digest>.arrow, and tokens/.lock with the bytes in use.
Cost:  `get` reads an entry once at the speed of a checksum; `put` writes and syncs one.

Whatever happens to the disk, a run goes on: what cannot be read is made again, and what cannot be
written turns the cache off for writing, with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import CorruptFile
from penstock.read.cache_file import (
    TEMPORARY,
    Entry,
    Image,
    Key,
    as_entry,
    check,
    describe,
    entries,
    listing,
    load,
    make_key,
)
from penstock.read.cache_room import LIVE_S, LOCK, Room, When, alone, remove_if_left
from penstock.types import ChunkRef, TokenChunk

log = logging.getLogger("penstock")

__all__ = ["Entry", "Key", "TokenCache", "Verified", "clear", "describe", "entries", "verify"]

TOUCH_S = 60.0
OTHER_PARTS = ("revisions", "listings", "files", "cards", "manifests", "footers")
ADVICE = {
    errno.ENOSPC: "Free some space there, or lower the limit of the cache",
    errno.EDQUOT: "Raise the quota, or lower the limit of the cache",
    errno.EROFS: "Make it writable",
    errno.EACCES: "Make it writable for this user",
    errno.EIO: "Look at the disk",
}


class TokenCache:
    """The token chunks on this host's disk. Nothing is opened or made before the first use."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = Path(folder)
        self._tokens = self._folder / "tokens"
        self._max_bytes = max_bytes
        self._room = Room(self._tokens, max_bytes)
        self._writing = threading.Lock()
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._off: str | None = None
        self._told: set[str] = set()
        self.full = False
        """Whether there was no room for some chunk."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache, (self._folder, self._max_bytes)

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def off(self) -> str | None:
        """Why nothing is written any more."""
        return self._off

    def key(self, file_id: str, index: int, rest: str) -> Key:
        """The key of a chunk. `file_id` names the file and its version; it is kept and shown, so it holds no secrets.

        `rest` is all else that decides the ids, the type of the ids too; best the same for all
        chunks of a run, for entries of another `rest` are taken for those of another run.
        """
        key = make_key(file_id, index, rest)
        self._room.kinds.add(key.kind)
        return key

    def foresee(self, when: When) -> None:
        """Take `when(file, index)` for when this run needs an entry next: larger is later, None is never."""
        self._room.when = when

    def counts(self) -> dict[str, int]:
        """What happened so far."""
        names = ("hits", "misses", "written", "written_bytes", "evicted", "damaged", "refused")
        with self._counting:
            return {f"cache_{name}": self._counts[name] for name in names}

    def has(self, key: Key) -> bool:
        """Whether there is an entry, sound or not."""
        return os.path.exists(self._tokens / key.name)

    def get(self, key: Key, ref: ChunkRef) -> TokenChunk | None:
        """The chunk of that key, checked, or None if it has to be made."""
        path = self._tokens / key.name
        try:
            chunk, used = load(path, key.text, ref)
        except CorruptFile as error:
            self._count(misses=1, damaged=1)
            self._tell_once(
                "damage",
                f"token cache: {error}. It is removed and made again; more are only counted.",
            )
            with contextlib.suppress(
                OSError
            ):  # on a disk that cannot be written it stays, and is refused again
                os.unlink(path)
            return None
        except (FileNotFoundError, NotADirectoryError):
            self._count(misses=1)
            return None
        except OSError as error:
            self._count(misses=1)
            self._tell_once(
                "read", f"token cache: cannot read ({error}). What cannot be read is made again."
            )
            return None
        self._count(hits=1)
        now = time.time()
        if abs(now - used) > TOUCH_S:
            with contextlib.suppress(
                OSError
            ):  # read-only, or evicted meanwhile: the chunk is good all the same
                os.utime(path, (now, now))
        return chunk

    def put(self, key: Key, chunk: TokenChunk) -> bool:
        """Keep a chunk. False if there is no room for it, or no writing."""
        if self._off is not None or self._max_bytes <= 0 or chunk.source is not None:
            self._count(refused=1)
            return False
        with self._writing:
            try:
                kept = self._put(key, chunk)
            except FileNotFoundError:
                kept = False  # somebody cleared the folder just now
            except OSError as error:
                advice = ADVICE.get(error.errno or 0, "See to it")
                self.turn_off(f"{error}. {advice}, or name another folder with PENSTOCK_CACHE")
                kept = False
        if not kept:
            self._count(refused=1)
        return kept

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        """Write nothing from now on. What is there is still read."""
        if self._off is None:
            self._off = why
            self._tell_once(
                "off", f"token cache in {self._folder}: off, nothing more is written: {why}.", error
            )

    def _put(self, key: Key, chunk: TokenChunk) -> bool:
        path = self._tokens / key.name
        if path.exists():
            return True
        image = Image(key.text, chunk)
        file, evicted = self._room.reserve(key, image.size)
        self._count(evicted=evicted)
        if file is None:
            self.full = True
            return False
        try:
            with file:
                for piece in image.pieces():
                    file.write(piece)
                file.flush()
                # The folder is not synced: a rename that a crash undoes costs one entry, and none is torn.
                os.fsync(file.fileno())
                ours = self._room.settle(file.name, path, image.size)
        except BaseException:
            with contextlib.suppress(
                OSError
            ):  # a disk that fails here too: the next scan removes it
                os.unlink(file.name)
            raise
        if ours:
            self._room.add(
                Entry(str(path), key.file, key.index, key.digest, image.size, time.time())
            )
            self._count(written=1, written_bytes=image.size)
        return True

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts.update(more)

    def _tell_once(self, about: str, message: str, error: BaseException | None = None) -> None:
        with self._counting:
            known = about in self._told
            self._told.add(about)
        if not known:
            log.warning("%s", message, exc_info=error)


class Verified(NamedTuple):
    """What a check of all entries found."""

    entries: int
    bytes: int
    damaged: list[tuple[Path, str]]
    """Each with what is wrong with it."""


def verify(folder: Path, delete: bool = False) -> Verified:
    """Read and check every entry; with `delete`, remove those that are damaged."""
    n = total = 0
    damaged: list[tuple[Path, str]] = []
    for entry in entries(folder):
        n, total = n + 1, total + entry.size
        try:
            check(entry.path)
        except FileNotFoundError:
            n, total = n - 1, total - entry.size  # evicted meanwhile
        except (CorruptFile, OSError) as error:
            damaged.append((entry.path, str(error)))
    if delete and damaged:
        with alone(folder / "tokens") as lock:
            for path, _ in damaged:
                path.unlink(missing_ok=True)
            os.truncate(lock, 0)  # no account: whoever writes next scans
    return Verified(n, total, damaged)


def clear(folder: Path, older_than_s: float = 0.0, everything: bool = False) -> tuple[int, int]:
    """Remove the entries not used for that long; how many, and their bytes.

    With `everything`, listings, footers and locks too. Who has an entry mapped keeps it.
    """
    now, tokens = time.time(), folder / "tokens"
    before = (
        now - older_than_s if older_than_s > 0 else math.inf
    )  # all, even what a wrong clock dates later
    n = freed = 0
    if tokens.is_dir():
        with alone(tokens) as lock:
            for item, status in listing(tokens):
                if item.name.startswith(TEMPORARY):
                    remove_if_left(item.path, status.st_mtime < now - LIVE_S)
                elif as_entry(item, status) and status.st_mtime <= before:
                    with contextlib.suppress(
                        FileNotFoundError
                    ):  # a run that finds an entry damaged removes it too
                        os.unlink(item.path)
                        n, freed = n + 1, freed + status.st_size
            os.truncate(lock, 0)  # no account: whoever writes next scans
    for path, limit in _others(folder, before) if everything else ():
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path, follow_symlinks=False)
            if status.st_mtime <= limit:
                os.unlink(path)
                n, freed = n + 1, freed + status.st_size
    return n, freed


def _others(folder: Path, before: float) -> Iterator[tuple[Path, float]]:
    """What was kept of remote places, and the locks; each with the latest use that lets it go.

    What else lies in the folder is not ours to remove.
    """
    # The age of a lock says nothing; and locks only save work, so that one in use may go as well.
    limits = dict.fromkeys(OTHER_PARTS, before) | {"locks": math.inf}
    for part, limit in limits.items():
        for above, _, names in os.walk(folder / part):
            yield from ((Path(above, name), limit) for name in names)
    yield from ((path, math.inf) for path in (*folder.glob("*.lock"), folder / "tokens" / LOCK))

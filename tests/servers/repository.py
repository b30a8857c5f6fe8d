"""A dataset repository of the loopback Hub: commits, names for them, and what a listing says.

In:    files by path.
Out:   commits that never change, each addressed by a digest of its contents.
Where: made by the test's thread, read by the threads of connections.
State: every commit so far, and the commit that each branch stands for.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.types import MiB
from tests.servers.content import Content, Shelf, Source

LARGE = (".parquet", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".arrow", ".bin", ".npy")
"""Files with these endings are kept in large file storage whatever their size, as on the Hub."""
LARGE_BYTES = 10 * MiB
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(slots=True)
class Entry:
    """One file of a commit."""

    path: str
    content: Content
    oid: str = ""
    pointer_bytes: int = 0
    """The size of the pointer that git keeps instead of a large file; 0 for a file that git keeps itself."""

    def __post_init__(self) -> None:
        if not self.large:
            self.oid = self.content.git_sha1
            return
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.content.sha256}\nsize {self.content.size}\n"
        ).encode()
        self.oid = Content(pointer).git_sha1
        self.pointer_bytes = len(pointer)

    @property
    def large(self) -> bool:
        return self.path.endswith(LARGE) or self.content.size >= LARGE_BYTES

    @property
    def xet_hash(self) -> str:
        """What buckets name a version of a file by."""
        return Content(self.content.sha256.encode()).sha256

    @property
    def etag(self) -> str:
        return f'"{self.content.sha256 if self.large else self.oid}"'

    def listed(self) -> dict[str, Any]:
        item: dict[str, Any] = {
            "type": "file",
            "oid": self.oid,
            "size": self.content.size,
            "path": self.path,
        }
        if self.large:
            item["lfs"] = {
                "oid": self.content.sha256, "size": self.content.size, "pointerSize": self.pointer_bytes,
            }  # fmt: skip
        return item


@dataclass(slots=True)
class Commit:
    """The files of a repository at one time."""

    sha: str
    entries: dict[str, Entry]
    _items: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Commit:
        digest = hashlib.sha1()
        for path, entry in sorted(entries.items()):
            digest.update(f"{path}\0{entry.oid}\n".encode())
        return cls(digest.hexdigest(), dict(entries))

    def items(self) -> list[dict[str, Any]]:
        """Files and folders as a listing shows them, by path."""
        with self._lock:
            if not self._items:
                folders = {
                    path[:at]
                    for path in self.entries
                    for at, letter in enumerate(path)
                    if letter == "/" and at > 0
                }
                found = [entry.listed() for entry in self.entries.values()]
                found += [
                    {
                        "type": "directory",
                        "oid": hashlib.sha1(folder.encode()).hexdigest(),
                        "size": 0,
                        "path": folder,
                    }
                    for folder in folders
                ]
                self._items = sorted(found, key=lambda item: str(item["path"]))
            return self._items

    def below(self, folder: str, recursive: bool) -> list[dict[str, Any]] | None:
        """The items of a folder ("" is the top), or None if there is no such folder."""
        start = f"{folder}/" if folder else ""
        found = [
            item
            for item in self.items()
            if item["path"].startswith(start)
            and (recursive or "/" not in item["path"][len(start) :])
        ]
        return found if found or not folder else None


class Repository:
    """A dataset repository; made by `HubServer.add()`."""

    def __init__(
        self, name: str, shelf: Shelf, *, private: bool, gated: bool,
        tokens: tuple[str, ...], denied_tokens: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.name = name
        self.private = private
        self.gated = gated
        self.tokens = tokens
        self.denied_tokens = denied_tokens
        self._shelf = shelf
        self._lock = threading.Lock()
        first = Commit.of({})
        self._commits = {first.sha: first}
        self._branches = {"main": first.sha}
        self._by_sha256: dict[str, Content] = {}

    @property
    def sha(self) -> str:
        """The commit that `main` stands for."""
        return self.branches()["main"]

    def branches(self) -> dict[str, str]:
        with self._lock:
            return dict(self._branches)

    def commit(self, changes: Mapping[str, Source]) -> str:
        """Add and replace files: a new commit, to which `main` moves. Returns its sha."""
        made = {path: Entry(path, self._shelf.content(source)) for path, source in changes.items()}
        with self._lock:
            entries = dict(self._commits[self._branches["main"]].entries)
            entries.update(made)
            commit = Commit.of(entries)
            self._commits.setdefault(commit.sha, commit)
            self._branches["main"] = commit.sha
            self._by_sha256.update({entry.content.sha256: entry.content for entry in made.values()})
            return commit.sha

    def at(self, revision: str) -> Commit | None:
        """The commit of that sha or branch."""
        with self._lock:
            return self._commits.get(self._branches.get(revision, revision))

    def stored(self, sha256: str) -> Content | None:
        """What the large file storage holds under this digest."""
        with self._lock:
            return self._by_sha256.get(sha256)

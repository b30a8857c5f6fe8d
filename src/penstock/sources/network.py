"""What a dataset needs of the outside: the network, and what is kept on disk of it.

In:    the limits, secrets and folders of a dataset (`Outside`: plain values, which travel to worker processes).
Out:   a client with its threads, remote files, kept things and the token cache of one run (`Opened`).
Where: opened by the thread that creates a dataset or a pipeline; closed by whoever opened it.
State: threads and connections, all of which `close` ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import offline
from penstock.errors import Offline
from penstock.feed.spare import SpareThreads, resolve_in_time
from penstock.options import RemoteOptions
from penstock.read.http import Http
from penstock.read.kept import Kept
from penstock.read.listing import Secret
from penstock.read.manifest import explain_change
from penstock.read.remote import RemoteFiles
from penstock.read.retry import Client
from penstock.types import FileRef

if TYPE_CHECKING:
    from penstock.read.cache import TokenCache

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Where remote data is and how to get it; where to keep it."""

    limits: RemoteOptions
    folder: Path
    """Listings, footers and tokens are kept here."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    cache_bytes: int = 0
    """Disk for tokens; 0 for none."""

    def cache(self) -> TokenCache | None:
        """The token cache, where there is one."""
        from penstock.read.cache import TokenCache

        return TokenCache(self.folder, self.cache_bytes) if self.cache_bytes else None

    def explain_change(self, fingerprint: str, files: Sequence[FileRef]) -> str | None:
        """Which file is not what it was in an earlier listing, where that listing is kept."""
        return explain_change(Kept(self.folder), fingerprint, files)

    def open(self, *, threads: bool) -> Opened:
        """Ready to ask. Nothing is asked or started yet."""
        return Opened(self, threads)


class Opened:
    """The outside, while somebody uses it. A context manager."""

    def __init__(self, outside: Outside, threads: bool) -> None:
        fetches = outside.limits.fetches
        self._side = SpareThreads(fetches, "side") if threads else None
        # Each fetch, and each that goes on beside one, may have two attempts under way.
        self._second = SpareThreads(4 * fetches, "attempt") if threads else None
        http = Http(resolve=resolve_in_time)
        self.client = Client(outside.limits, http=http, side=self._side, second=self._second)
        self.files = (
            RemoteFiles(self.client, outside.secrets)
            if not offline()
            else _NoFiles(self.client, {})
        )
        self.kept = Kept(outside.folder)

    def meanwhile(self, thunk: Callable[[], T]) -> Future[T]:
        """Have something done while the caller goes on."""
        assert self._second is not None
        return self._second.submit(thunk)

    def resize(self, fetches: int) -> None:
        """Have more or fewer requests under way at once."""
        if self._side is not None and self._second is not None:
            self._side.allow(fetches)
            self._second.allow(4 * fetches)
        self.files.resize(fetches)

    def counts(self) -> dict[str, Any]:
        """What the network was asked for."""
        return self.client.tally.counts()

    def times(self) -> dict[str, Any]:
        """Where its time goes."""
        return self.client.tally.times()

    def stop(self) -> None:
        """End every attempt. Waits for nobody."""
        self.client.stop()
        for threads in (self._side, self._second):
            if threads is not None:
                threads.stop()

    def close(self) -> None:
        self.stop()
        self.client.close()
        for threads in (self._side, self._second):
            if threads is not None:
                threads.join(5.0)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _NoFiles(RemoteFiles):
    """Remote files while the network is not to be used."""

    def read_all(self, ranges: Sequence[tuple[FileRef, int, int]]) -> list[bytearray]:
        if not ranges:
            return []  # a file that is read forwards: the first of its blocks will be asked for by name
        raise Offline(
            f"{ranges[0][0].path} is not in the cache of this machine, and HF_HUB_OFFLINE is set. Allow the network, or fetch what a "
            f"run needs beforehand: `penstock stage`, with the settings of the run and the same cache."
        )

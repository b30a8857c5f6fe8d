"""Remote data: how a dataset is listed, and what a run needs to fetch it.

`RemoteConfig` has the limits, secrets and folders of a dataset: plain values, which travel to worker
processes. `RemoteSession` is what one run opens: a client with its threads, the remote files, the
metadata cache. `list_remote` lists files while the vocabulary is loaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import cache_dir, offline
from penstock.errors import Offline
from penstock.feed.collectives import from_rank_0
from penstock.feed.spare import SpareThreads, resolve_in_time
from penstock.options import RemoteOptions
from penstock.read.http import Http
from penstock.read.kept import Kept
from penstock.read.listing import RemoteListing, Secret
from penstock.read.manifest import explain_change
from penstock.read.remote import RemoteFiles
from penstock.read.retry import Client
from penstock.types import FileRef, Member

if TYPE_CHECKING:
    from penstock.encode.tokenizer import Tokenizer
    from penstock.read.cache import TokenCache

T = TypeVar("T")
Files = tuple[FileRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Where remote data is and how to fetch it; where to keep it."""

    limits: RemoteOptions
    folder: Path
    """Listings, footers and tokens are kept here."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    cache_bytes: int = 0
    """Disk space for tokens; 0 for no token cache."""

    def cache(self) -> TokenCache | None:
        """Return the token cache, if there is one."""
        from penstock.read.cache import TokenCache

        return TokenCache(self.folder, self.cache_bytes) if self.cache_bytes else None

    def explain_change(self, fingerprint: str, files: Sequence[FileRef]) -> str | None:
        """Name the file that changed since an earlier listing, if that listing is kept."""
        return explain_change(Kept(self.folder), fingerprint, files)

    def open(self, *, threads: bool) -> RemoteSession:
        return RemoteSession(self, threads)


class RemoteSession:
    """An open client and its threads."""

    def __init__(self, config: RemoteConfig, threads: bool) -> None:
        fetches = config.limits.fetches
        self._side = SpareThreads(fetches, "side") if threads else None
        # Each fetch, and each that runs beside one, may have two attempts under way.
        self._second = SpareThreads(4 * fetches, "attempt") if threads else None
        self._threads = [pool for pool in (self._side, self._second) if pool is not None]
        http = Http(resolve=resolve_in_time)
        self.client = Client(config.limits, http=http, side=self._side, second=self._second)
        files = OfflineFiles if offline() else RemoteFiles
        self.files = files(self.client, {} if offline() else config.secrets)
        self.kept = Kept(config.folder)

    def run_beside(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on another thread."""
        assert self._second is not None
        return self._second.submit(function)

    def resize(self, fetches: int) -> None:
        """Allow more or fewer requests at once."""
        if self._side is not None and self._second is not None:
            self._side.allow(fetches)
            self._second.allow(4 * fetches)
        self.files.resize(fetches)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of requests, retries and bytes."""
        return self.client.tally.counts()

    def times(self) -> dict[str, Any]:
        """Return where the time of requests goes."""
        return self.client.tally.times()

    def stop(self) -> None:
        """Cancel every request, without waiting."""
        self.client.stop()
        for threads in self._threads:
            threads.stop()

    def close(self) -> None:
        self.stop()
        self.client.close()
        for threads in self._threads:
            threads.join(5.0)


class OfflineFiles(RemoteFiles):
    """Remote files while the network must not be used."""

    def read_all(self, ranges: Sequence[tuple[FileRef, int, int]]) -> list[bytearray]:
        if not ranges:
            return []  # a sequential file: its first block will be asked for by name
        raise Offline(
            f"{ranges[0][0].path} is not in this machine's cache, and HF_HUB_OFFLINE is set. Allow "
            "the network, or fill the cache beforehand with `penstock stage`."
        )


def list_remote(
    make_listing: Callable[[RemoteListing], Files],
    limits: RemoteOptions,
    load: Callable[[], Tokenizer],
    *,
    urls: Any,
) -> tuple[Files, Tokenizer, RemoteConfig]:
    """List files and load the tokenizer at the same time."""
    remote = RemoteConfig(limits=limits, folder=cache_dir())
    with closing(remote.open(threads=True)) as session:
        listing = RemoteListing(
            client=session.client, kept=session.kept, config=limits.config, offline=offline()
        )
        if limits.share_listing:  # collectives belong on the trainer's thread
            tokenizer = load()
            files = list_on_rank_0(lambda: make_listing(listing))
            listing.know(files, urls)
        else:
            pending = session.run_beside(lambda: make_listing(listing))
            tokenizer = load()
            importlib.import_module("penstock.sources.text_files")  # costs nothing meanwhile
            files = pending.result()
    return files, tokenizer, replace(remote, secrets=dict(listing.secrets))


def list_on_rank_0(make: Callable[[], Files]) -> Files:
    """Return on every rank what rank 0 lists."""
    data = from_rank_0(lambda: json.dumps([asdict(file) for file in make()]).encode())
    return tuple(
        FileRef(**{**values, "members": tuple(Member(*member) for member in values["members"])})
        for values in json.loads(data)
    )

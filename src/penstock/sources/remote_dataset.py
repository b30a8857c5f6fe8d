"""Remote data: how a dataset is listed, and what a run needs to fetch it.

`RemoteConfig` has the limits, secrets and folders of a dataset: plain values, which travel to worker
processes. `RemoteSession` is what one run opens: the network, the remote files, the metadata cache.
`list_remote` lists files while the vocabulary is loaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import cache_dir, offline
from penstock.errors import RemoteError
from penstock.feed.collectives import from_rank_0
from penstock.feed.worker_pool import ThreadPool
from penstock.options import RemoteOptions
from penstock.read.http import Network
from penstock.read.listing import MetadataCache, RemoteListing, Secret, explain_change
from penstock.read.remote_files import RemoteFiles
from penstock.types import FileRef, Member

if TYPE_CHECKING:
    from penstock.encode.tokenizer import Tokenizer
    from penstock.read.token_store import TokenStore

Files = tuple[FileRef, ...]

LISTING_THREADS = 16
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Where remote data is and how to fetch it; where to keep it."""

    limits: RemoteOptions
    folder: Path
    """Listings, footers and tokens are kept here."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    cache_bytes: int = 0
    """Disk space for tokens; 0 for no token cache."""

    def cache(self) -> TokenStore | None:
        """Return the token cache, if there is one."""
        from penstock.read.token_store import TokenStore

        if not self.cache_bytes:
            return None
        return TokenStore(self.folder / "tokens", self.cache_bytes, best_effort=True)

    def explain_change(self, fingerprint: str, files: Sequence[FileRef]) -> str | None:
        """Name the file that changed since an earlier listing, if that listing is kept."""
        return explain_change(MetadataCache(self.folder), fingerprint, files)


class RemoteSession:
    """The connections, files and metadata cache of one run."""

    def __init__(self, config: RemoteConfig) -> None:
        self.network = Network(config.limits)
        files = OfflineFiles if offline() else RemoteFiles
        self.files = files(self.network, {} if offline() else config.secrets)
        self.metadata = MetadataCache(config.folder)


class OfflineFiles(RemoteFiles):
    """Remote files while the network must not be used."""

    def read_all(self, ranges: Sequence[tuple[FileRef, int, int]]) -> list[bytearray]:
        if not ranges:
            return []  # a sequential file: its first block will be asked for by name
        raise RemoteError(
            f"{ranges[0][0].path} is not in this machine's cache, and HF_HUB_OFFLINE is set. Allow "
            "the network, or prepare the corpus beforehand with `penstock prepare`."
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
    session = RemoteSession(remote)
    pool = ThreadPool(min(limits.fetches, LISTING_THREADS), None, name="fetch")
    session.network.threads = pool
    listing = RemoteListing(
        session.network, session.metadata, config=limits.config, offline=offline()
    )
    try:
        if limits.share_listing:  # collectives belong on the trainer's thread
            tokenizer = load()
            files = list_on_rank_0(lambda: make_listing(listing))
            listing.know(files, urls)
        else:
            pending = pool.submit(make_listing, listing)
            tokenizer = load()
            importlib.import_module("penstock.sources.text_files")  # costs nothing meanwhile
            files = pending.result()
    finally:
        session.network.stop()
        pool.stop()
        pool.join(CLOSE_S)
        session.network.close()
    return files, tokenizer, replace(remote, secrets=dict(listing.secrets))


def list_on_rank_0(make: Callable[[], Files]) -> Files:
    """Return on every rank what rank 0 lists."""
    data = from_rank_0(lambda: json.dumps([asdict(file) for file in make()]).encode())
    return tuple(
        FileRef(**values | {"members": tuple(Member(*each) for each in values["members"])})
        for values in json.loads(data)
    )

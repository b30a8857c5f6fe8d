"""Remote data: list the files of a dataset, and open the connections of a run.

`RemoteConfig` has the limits, secrets and folders of a dataset, as plain values that can be pickled.
`RemoteSession` has the network, the remote files and the metadata cache of one run. `list_remote`
lists files while the tokenizer loads.
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
from penstock.read.listing import MetadataCache, RemoteListing, Secret, each, fingerprint
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
    """The limits, credentials and cache folder of a remote dataset."""

    limits: RemoteOptions
    folder: Path
    """The cache of listings, Parquet footers and tokens."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    cache_bytes: int = 0
    """Disk space of the token cache; 0 disables it."""

    def cache(self) -> TokenStore | None:
        """Return the token cache, if there is one."""
        from penstock.read.token_store import TokenStore

        if not self.cache_bytes:
            return None
        return TokenStore(self.folder / "tokens", self.cache_bytes, best_effort=True)

    def remember(self, files: Files) -> None:
        """Keep a listing by its fingerprint, for `explain_change`."""
        rows = [[file.name, file.size, file.etag] for file in each(files)]
        MetadataCache(self.folder).put("manifests", fingerprint(files), json.dumps(rows).encode())

    def explain_change(self, old: str, files: Files) -> str | None:
        """Describe the first difference from an earlier listing; None if it is not in the cache."""
        data = MetadataCache(self.folder).get("manifests", old)
        if data is None:
            return None
        before = {name: f"{size} bytes, ETag {etag}" for name, size, etag in json.loads(data)}
        now = {file.name: f"{file.size} bytes, ETag {file.etag}" for file in each(files)}
        for name in [*now, *before]:
            was, is_now = before.get(name, "not there"), now.get(name, "gone")
            if was != is_now:
                return f"{name} changed: it was {was}, it is {is_now}"
        return "the files come in another order"


class RemoteSession:
    """The connections, files and metadata cache of one run."""

    def __init__(self, config: RemoteConfig) -> None:
        self.network = Network(config.limits)
        files = OfflineFiles if offline() else RemoteFiles
        self.files = files(self.network, {} if offline() else config.secrets)
        self.metadata = MetadataCache(config.folder)


class OfflineFiles(RemoteFiles):
    """Remote files in offline mode: any read that needs the network raises."""

    def read_all(self, ranges: Sequence[tuple[FileRef, int, int]]) -> list[bytearray]:
        if not ranges:
            return []  # a sequential file, whose blocks are requested one by one
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
            listing.know(urls)
        else:
            pending = pool.submit(make_listing, listing)
            tokenizer = load()
            importlib.import_module("penstock.sources.text_files")  # overlaps listing
            files = pending.result()
    finally:
        session.network.stop()
        pool.stop()
        pool.join(CLOSE_S)
        session.network.close()
    remote.remember(files)
    return files, tokenizer, replace(remote, secrets=dict(listing.secrets))


def list_on_rank_0(make: Callable[[], Files]) -> Files:
    """List files on rank 0 only, and return them on every rank."""
    data = from_rank_0(lambda: json.dumps([asdict(file) for file in make()]).encode())
    return tuple(
        FileRef(**values | {"members": tuple(Member(*each) for each in values["members"])})
        for values in json.loads(data)
    )

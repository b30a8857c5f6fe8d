"""Describe data that is far away: its files, and what it takes to get them.

In:    what a `TextDataset` was given.
Out:   its files, its tokenizer, and the `Outside` that its loaders need.
Where: the thread that creates the dataset. The listing goes on beside the loading of the vocabulary,
       so the first batch waits for the slower of them, not for both.
State: none; all threads have ended when the dataset is there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.config import cache_dir, offline
from penstock.feed.collectives import from_rank_0
from penstock.read.attempt import Remote
from penstock.read.listing import RemoteListing
from penstock.read.manifest import list_files
from penstock.sources.network import Outside
from penstock.types import FileRef, Format, Member

if TYPE_CHECKING:
    from penstock.encode.tokenize import Tokenizer

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True, slots=True)
class Listing:
    """What to list, and how."""

    urls: Paths
    format: Format | None
    whole: bool
    config: str | None
    share: bool


def far_away(
    listing: Listing, limits: Remote, load: Callable[[], Tokenizer]
) -> tuple[tuple[FileRef, ...], Tokenizer, Outside]:
    """The files, the tokenizer, and what it takes to get at the files."""
    outside = Outside(limits=limits, folder=cache_dir())
    with outside.open(threads=True) as opened:
        remote = RemoteListing(
            client=opened.client, kept=opened.kept, config=listing.config, offline=offline()
        )
        if listing.share:
            # A collective belongs on the thread that trains; only rank 0 asks.
            tokenizer = load()
            files = shared(lambda: _list(listing, remote))
            remote.know(files, listing.urls)
        else:
            under_way = opened.meanwhile(lambda: _list(listing, remote))
            tokenizer = load()
            importlib.import_module(
                "penstock.sources.files"
            )  # the loader will need it; now it costs nothing
            files = under_way.result()
    return files, tokenizer, replace(outside, secrets=dict(remote.secrets))


def _list(listing: Listing, remote: RemoteListing) -> tuple[FileRef, ...]:
    return list_files(listing.urls, format=listing.format, whole=listing.whole, remote=remote)


def shared(make: Callable[[], tuple[FileRef, ...]]) -> tuple[FileRef, ...]:
    """What rank 0 lists, on every rank."""
    return unpack(from_rank_0(lambda: pack(make())))


def pack(files: Sequence[FileRef]) -> bytes:
    """A listing as other ranks get it."""
    return json.dumps([asdict(file) for file in files]).encode()


def unpack(data: bytes) -> tuple[FileRef, ...]:
    def file(values: dict[str, Any]) -> FileRef:
        return FileRef(
            **{**values, "members": tuple(Member(*member) for member in values["members"])}
        )

    return tuple(file(values) for values in json.loads(data))


__all__ = ["Listing", "far_away", "shared"]

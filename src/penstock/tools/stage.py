"""Fill the token cache before a run, in the order in which the run will need it.

Chunks that are in the cache already are not fetched again, so an interrupted staging continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.config import whole_number
from penstock.errors import ConfigError, SourceError
from penstock.loader import AsyncDataLoader
from penstock.read.cache import TokenCache
from penstock.sources.text_files import WRITE_S, FileChunks, TextSource
from penstock.tools.chunks import open_lanes, read_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a staging has done so far."""

    bytes: int = 0
    """Tokens that are in the cache, in the order of the run without a gap."""
    chunks: int = 0
    already: int = 0
    """Chunks that were in the cache before."""
    fetched_bytes: int = 0
    seconds: float = 0.0
    complete: bool = True
    """True if this is a whole epoch."""
    next_bytes: int = 0
    """Size of the chunk that would have exceeded the limit."""


def stage(
    loader: AsyncDataLoader, max_bytes: int, progress: Callable[[Staged], None] | None = None
) -> Staged:
    """Cache the first `max_bytes` of tokens that `loader` will need, or a whole epoch."""
    whole_number("bytes", max_bytes, 1)
    source, run = loader.inspect()
    if not isinstance(source, TextSource):
        raise ConfigError("only text in files can be staged: give a TextDataset")
    # The cache is written by the fetch threads, which only a run with workers has.
    run = replace(run, n_workers=max(1, run.n_workers), end_epoch=run.first_epoch + 1)
    began, done = time.monotonic(), Staged()
    with open_lanes(source, run) as (lanes, work):
        if (cache := work.cache) is None:
            raise ConfigError(
                "there is no cache to stage into: use cache=True, and cache_bytes above 0"
            )
        for file in source.dataset.files:
            if not work.caches(file):
                raise SourceError(
                    f"{file.path}: its server sends neither an ETag nor a date, so a change would not "
                    "be noticed, and its tokens are not cached. Use another server, or copy the file "
                    "to disk."
                )
        reader = lanes.reader
        assert isinstance(reader, FileChunks)
        reader.wait_for_cache = True
        try:
            for chunk in read_chunks(lanes):
                if done.bytes + chunk.nbytes > max_bytes:
                    done = replace(done, complete=False, next_bytes=chunk.nbytes)
                    break
                _check_cache(cache)
                done = replace(
                    done, bytes=done.bytes + chunk.nbytes, chunks=done.chunks + 1,
                    already=done.already + chunk.cached, seconds=time.monotonic() - began,
                )  # fmt: skip
                if progress is not None:
                    progress(done)
            reader.flush(WRITE_S)
        except TimeoutError as error:
            raise SourceError(
                f"staging ended: the cache in {cache.folder} did not take a chunk within "
                f"{WRITE_S:.0f} s. Check the disk, or name another folder with PENSTOCK_CACHE."
            ) from error
        _check_cache(cache)
        fetched, seconds = lanes.totals().get("fetched_bytes", 0), time.monotonic() - began
    return replace(done, fetched_bytes=fetched, seconds=seconds)


def _check_cache(cache: TokenCache) -> None:
    """Raise if chunks are not kept. A run continues without its cache; a staging is for it."""
    if cache.off is not None:
        why = f"the cache cannot be written: {cache.off}"
    elif cache.full:
        why = f"the cache is full: it may take {cache.max_bytes} bytes. Allow more: cache_bytes=…"
    elif cache.counts()["cache_refused"]:
        why = f"{cache.folder} was cleared meanwhile. Start again; what is there is kept."
    else:
        return
    raise SourceError(f"staging ended: {why}")

"""Fill the token cache before a run, in the order in which the run will need it.

In:    a loader with the settings of that run, and how much disk to fill.
Out:   token chunks in the cache; what was done, as it is done.
Where: the calling thread, with the workers and fetch threads of a run.
State: the cache. What is in it already is not fetched again, so an interrupted staging goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.config import whole_number
from penstock.errors import ConfigError, SourceError
from penstock.feed.pool import make_pool
from penstock.loader import AsyncDataLoader
from penstock.sources.files import FileLanes, TextSource


@dataclass(frozen=True, slots=True)
class Staged:
    """What a staging has done so far."""

    bytes: int
    """Tokens that are in the cache, in the order of the run without a gap."""
    chunks: int
    already: int
    """Chunks that were there before."""
    fetched_bytes: int
    seconds: float
    complete: bool = False
    """Whether this is a whole epoch."""
    next_bytes: int = 0
    """What the chunk takes that would have been more than asked for. It may be in the cache all the same."""


def stage(
    loader: AsyncDataLoader, max_bytes: int, progress: Callable[[Staged], None] | None = None
) -> Staged:
    """Fill the cache with the first `max_bytes` of tokens that `loader` will need, or with a whole epoch."""
    whole_number("bytes", max_bytes, 1)
    source, run = loader.lay_open()
    if not isinstance(source, TextSource):
        raise ConfigError("only text in files can be staged: give a TextDataset")
    work = source.work(run)
    if work.cache is None:
        work.close()
        raise ConfigError(
            "there is no cache to stage into: use cache=True, and cache_bytes above 0"
        )
    pool = make_pool(run.n_workers, work)
    try:
        lanes = source.open_lanes(replace(run, end_epoch=run.first_epoch + 1), pool, work)
    except BaseException:
        pool.stop()
        work.stop()
        pool.join(10.0)
        work.close()
        raise
    began = time.monotonic()
    done = Staged(0, 0, 0, 0, 0.0, complete=True)
    try:
        for chunk in lanes.stage():
            if done.bytes + chunk.nbytes > max_bytes:
                done = replace(done, complete=False, next_bytes=chunk.nbytes)
                break
            _see_that_it_is_kept(lanes)
            done = Staged(
                bytes=done.bytes + chunk.nbytes,
                chunks=done.chunks + 1,
                already=done.already + chunk.cached,
                fetched_bytes=_fetched(lanes),
                seconds=time.monotonic() - began,
                complete=True,
            )
            if progress is not None:
                progress(done)
        lanes.flush()
        _see_that_it_is_kept(lanes)
        # Also what came after the last chunk that counts: it was fetched and waited for.
        done = replace(done, fetched_bytes=_fetched(lanes), seconds=time.monotonic() - began)
    finally:
        pool.stop()
        lanes.stop()
        work.stop()
        pool.join(10.0)
        lanes.close()
        work.close()
    return done


def _fetched(lanes: FileLanes) -> int:
    return lanes.totals().get("fetched_bytes", 0)


def _see_that_it_is_kept(lanes: FileLanes) -> None:
    """A run goes on without its cache; a staging has no other purpose."""
    why = lanes.cache_trouble()
    if why is not None:
        raise SourceError(f"staging ended: {why}")

"""Read the chunks of text files in the order of a run, for tools that do not need rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.feed.worker_pool import make_pool
from penstock.sources.base import Counted, RunContext
from penstock.sources.chunk_lanes import ChunkLanes
from penstock.sources.text_files import TextSource, TextWork
from penstock.types import TokenChunk


@contextmanager
def open_lanes(source: TextSource, run: RunContext) -> Iterator[tuple[ChunkLanes, TextWork]]:
    """Start workers and open the lanes of a run. Both are stopped and closed at the end."""
    work = source.work(run)
    pool = make_pool(run.n_workers, work, workers=run.workers, cpus=None, clock=run.clock)
    opened: list[Counted | TextWork] = [work]
    try:
        lanes = source.open_lanes(run, pool, work)
        opened.insert(0, lanes)
        yield lanes, work
    finally:
        pool.stop()
        for each in opened:
            each.stop()
        pool.join(10.0)
        for each in opened:
            each.close()


def read_chunks(lanes: ChunkLanes) -> Iterator[TokenChunk]:
    """Yield the chunks of all lanes in turn, to the end of a finite stream."""
    more = True
    while more:
        more = False
        lanes.submit_ahead()
        for lane in lanes.lanes:
            chunk = lane.next_chunk()
            if chunk is not None:
                more = True
                yield chunk

"""Prepare a corpus on a Ray cluster.

Actors with one core each run `make_entries` on addresses. They read the source and write the store
directly: only addresses and headers pass through Ray. An actor that dies is restarted and repeats
its task, which is idempotent. Every node must have access to the source, the store and this
package.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.config import access_variables, adopt
from penstock.errors import RemoteError, WorkerDied, missing_extra
from penstock.feed.process_pool import portable
from penstock.feed.worker_pool import ThreadPool
from penstock.prepare.local import Engine, Made, io_pool, make_entries
from penstock.read.token_store import TokenStore
from penstock.sources.text_files import TextWork
from penstock.types import ChunkRef

TASK_CHUNKS = 16
"""Chunks per task. More reduce Ray's overhead; fewer lose less work and balance better."""
RESTARTS = 3
"""Restarts of an actor before the run fails."""


class Worker:
    """An actor: one tokenizer on one core."""

    def __init__(self, access: dict[str, str], work: TextWork, store: TokenStore) -> None:
        adopt(access)
        self._work, self._store = work, store

    def open(self) -> list[Made]:
        """Load the vocabulary. Called first, so that an actor without a core gets no chunks."""
        self._work.prepare()
        return []

    def make(self, refs: Sequence[ChunkRef]) -> list[Made] | Any:
        """Make entries. Return them, or the exception, which Ray would wrap if raised."""
        pool = ThreadPool(1, self._work)
        try:
            with io_pool(self._work, 1) as io:
                ahead = 2 + self._work.fetches
                return list(make_entries(self._work, io, self._store, refs, pool, ahead))
        except Exception as error:
            return portable(error)
        finally:
            pool.stop()
            pool.join(10.0)


def run_on(address: str | None) -> Engine:
    """Return an engine for a cluster: `address`, RAY_ADDRESS, or a new one on this machine."""
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "engine='ray'", "ray") from None

    def run(
        work: TextWork,
        io: ThreadPool,
        store: TokenStore,
        refs: Sequence[ChunkRef],
        workers: int | None,
    ) -> Iterator[Made]:
        if not refs:
            return
        connected = ray.is_initialized()
        if not connected:
            try:
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            except ConnectionError as error:
                raise RemoteError(
                    f"no Ray cluster at {address or 'RAY_ADDRESS'}: {error}"
                ) from error
        try:
            cores = int(ray.cluster_resources().get("CPU", 1))
            size = max(1, min(TASK_CHUNKS, len(refs) // (4 * (workers or cores))))
            tasks = deque(refs[at : at + size] for at in range(0, len(refs), size))
            actor = ray.remote(num_cpus=1, max_restarts=RESTARTS, max_task_retries=RESTARTS)(Worker)
            count = min(workers or cores, len(tasks))
            actors = [actor.remote(access_variables(), work, store) for _ in range(count)]
            yield from _run(ray, actors, tasks)
        finally:
            if not connected:
                ray.shutdown()

    return run


def _run(ray: Any, actors: list[Any], tasks: deque[Sequence[ChunkRef]]) -> Iterator[Made]:
    """Give each idle actor its next task, until all tasks are done."""
    running = {actor.open.remote(): (actor, False) for actor in actors}
    while tasks or any(busy for _, busy in running.values()):
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        actor, _ = running.pop(done)
        try:
            made = ray.get(done)
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(f"an actor died {RESTARTS + 1} times: {error}") from error
        if isinstance(made, BaseException):
            raise made
        yield from made
        if tasks:
            running[actor.make.remote(tasks.popleft())] = actor, True

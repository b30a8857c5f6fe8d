"""What every stream must keep, whatever it is made of: written once, run on everything.

A `Make` builds a loader from keyword arguments that change how it runs (workers, prefetch, shard,
batch size), never what it streams.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock import AsyncDataLoader, Batch, Shard

Make = Callable[..., AsyncDataLoader]


def digest(batch: Batch) -> str:
    """A batch's ids, targets and whatever else it has, as one hash."""
    sha = hashlib.sha256(f"{batch.epoch} {batch.index}".encode())
    for value in (batch.inputs, batch.targets, batch.positions, batch.cu_seqlens, batch.data):
        if value is not None:
            _add(sha, value)
    return sha.hexdigest()


def _add(sha: Any, value: Any) -> None:
    """Arrays and tensors by their content, containers by what is in them, anything else by how it shows itself."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            sha.update(f"{key!r}:".encode())
            _add(sha, inside)
    elif isinstance(value, list | tuple):
        sha.update(f"{len(value)}[".encode())
        for inside in value:
            _add(sha, inside)
    elif hasattr(value, "shape"):
        array = np.ascontiguousarray(np.asarray(value))
        sha.update(f"{array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    else:
        sha.update(repr(value).encode())


def take(loader: AsyncDataLoader, n: int) -> list[str]:
    """The digests of the next batches, `n` at the most."""
    out: list[str] = []
    while len(out) < n and (batch := loader.next_batch(timeout=60)) is not None:
        out.append(digest(batch))
    return out


def ledger(make: Make, n: int, **how: Any) -> list[str]:
    """The digests of a fresh loader's first batches."""
    with make(**how) as loader:
        return take(loader, n)


def resumes_everywhere(make: Make, n: int, every: int = 1) -> None:
    """A state taken before the first batch and after each one restores the whole tail, bit for bit."""
    with make() as loader:
        states = [loader.state_dict()]
        whole: list[str] = []
        while len(whole) < n and (batch := loader.next_batch(timeout=60)) is not None:
            whole.append(digest(batch))
            states.append(loader.state_dict())
            assert batch.state_dict() == states[-1]
    for at in range(0, len(states), every):
        saved = json.loads(json.dumps(states[at]))
        with make() as loader:
            loader.load_state_dict(saved)
            assert loader.state_dict() == states[at]
            assert take(loader, len(whole) - at) == whole[at:], f"after a resume at batch {at}"


def resumes_repeatedly(make: Make, n: int, steps: Iterable[int]) -> None:
    """Resuming again and again, a few batches further each time, gives the uninterrupted stream."""
    whole = ledger(make, n)
    got: list[str] = []
    state = None
    for step in steps:
        with make() as loader:
            if state is not None:
                loader.load_state_dict(state)
            got += take(loader, min(step, n - len(got)))
            state = loader.state_dict()
    assert got == whole[: len(got)]
    assert len(got) >= min(n, len(whole)) or len(got) == sum(steps)


def same_for_any(make: Make, n: int, ways: Sequence[dict[str, Any]]) -> None:
    """The stream does not depend on how it is run."""
    first = ledger(make, n, **ways[0])
    assert first
    for way in ways[1:]:
        assert ledger(make, n, **way) == first, f"{way} differs from {ways[0]}"


def global_rows(
    make: Make, world: int, batches: int, global_batch: int, states: list[Any] | None = None
) -> tuple[list[bytes], list[Any]]:
    """The rows that all ranks together get, in global order, and the states they end with."""
    columns: list[list[bytes]] = []
    ended = []
    for rank in range(world):
        with make(shard=Shard(world, rank), batch_size=global_batch // world) as loader:
            if states is not None:
                loader.load_state_dict(states)
            rows: list[bytes] = []
            for _ in range(batches):
                batch = loader.next_batch(timeout=60)
                assert batch is not None
                targets = batch.inputs if batch.targets is None else batch.targets
                rows += [
                    a.tobytes() + b.tobytes()
                    for a, b in zip(np.asarray(batch.inputs), np.asarray(targets), strict=True)
                ]
            columns.append(rows)
            ended.append(json.loads(json.dumps(loader.state_dict())))
    assert len({len(rows) for rows in columns}) == 1
    return [row for turn in zip(*columns, strict=True) for row in turn], ended


def same_for_any_world(make: Make, batches: int, global_batch: int, worlds: Sequence[int]) -> None:
    """The global stream does not depend on the number of ranks, even where it changes on the way."""
    whole, _ = global_rows(make, worlds[0], batches * len(worlds), global_batch)
    for world in worlds:
        rows, _ = global_rows(make, world, batches, global_batch)
        assert rows == whole[: len(rows)], f"world size {world}"
    got: list[bytes] = []
    states = None
    for world in worlds:
        rows, states = global_rows(make, world, batches, global_batch, states)
        got += rows
    assert got == whole


def closes_cleanly(make: Make) -> None:
    """Shutting down at any point, twice, and going on afterwards, loses and repeats nothing."""
    whole = ledger(make, 6)
    loader = make()
    loader.shutdown()
    got = take(loader, 2)
    loader.shutdown()
    loader.shutdown()
    got += take(loader, 2)
    loader.start()
    loader.warmup(3, timeout=30)
    got += take(loader, 2)
    loader.shutdown()
    assert got == whole

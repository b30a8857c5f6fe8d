"""The contracts of every stream, written once and run on every kind of data.

A `Make` creates a loader for one stream. Its keyword arguments change how the loader runs (workers,
prefetch, shard, batch size, epochs), never what it streams. Loaders are compared with each other and
with the corpus, never with a recorded hash. All checks use the public API.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, Batch, Shard, Span

Make = Callable[..., AsyncDataLoader]
Read = Callable[[Span], list[int]]
"""Reads the ids of a span's document or sample from the source again."""

TIMEOUT_S = 60

WORKER_COUNTS: tuple[dict[str, Any], ...] = tuple(
    {"n_workers": n, "prefetch_size": size} for n, size in ((0, 1), (1, 1), (1, 8), (3, 1), (3, 8))
)
PROCESSES: tuple[dict[str, Any], ...] = ({"n_workers": 0}, {"n_workers": 2, "workers": "process"})


# Reading a stream


def digest(batch: Batch) -> str:
    """Hash a batch: its epoch, its index and every array in it."""
    sha = hashlib.sha256(f"{batch.epoch} {batch.index}".encode())
    for value in (batch.inputs, batch.targets, batch.positions, batch.cu_seqlens, batch.data):
        if value is not None:
            _add(sha, value)
    return sha.hexdigest()


def _add(sha: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        sha.update(f"{len(value)}[".encode())
        for inside in value:
            _add(sha, inside)
    elif hasattr(value, "shape"):
        array = np.ascontiguousarray(np.asarray(value))
        sha.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    else:
        sha.update(repr(value).encode())


def batches_of(loader: AsyncDataLoader, n: int) -> Iterable[Batch]:
    """Yield at most `n` batches."""
    for _ in range(n):
        batch = loader.next_batch(timeout=TIMEOUT_S)
        if batch is None:
            return
        yield batch


def take(loader: AsyncDataLoader, n: int) -> list[str]:
    """Return the digests of at most `n` further batches."""
    return [digest(batch) for batch in batches_of(loader, n)]


def ledger(make: Make, n: int, **how: Any) -> list[str]:
    """Return the digests of the first batches of a new loader."""
    with make(**how) as loader:
        return take(loader, n)


def rows_of(batch: Batch) -> list[list[int]]:
    """Return the `seq_len + 1` ids of each row, without padding."""
    inputs, targets = np.asarray(batch.inputs), np.asarray(batch.targets)
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1)
    real = (targets != -100).sum(axis=1) + 1
    return [row[:length].tolist() for row, length in zip(rows, real, strict=True)]


def finite_rows(make: Make, **how: Any) -> list[list[int]]:
    """Return every row of one pass over all data."""
    with make(epochs=1, drop_last=False, **how) as loader:
        return [row for batch in loader for row in rows_of(batch)]


# The same stream, however it is run


def same_for_any(make: Make, n: int, ways: Sequence[dict[str, Any]] = WORKER_COUNTS) -> None:
    """Assert that the stream does not depend on how it is run: by default, workers and prefetch."""
    first = ledger(make, n, **ways[0])
    assert first
    for way in ways[1:]:
        assert ledger(make, n, **way) == first, f"{way} differs from {ways[0]}"


def global_rows(
    make: Make, world: int, batches: int, global_batch: int, states: list[Any] | None = None
) -> tuple[list[bytes], list[Any]]:
    """Return the rows of all ranks in global order, and the state of each rank after them.

    Row i of rank r's batches is global row i * world + r.
    """
    columns: list[list[bytes]] = []
    ended = []
    for rank in range(world):
        with make(shard=Shard(world, rank), batch_size=global_batch // world) as loader:
            if states is not None:
                loader.load_state_dict(states)
            rows: list[bytes] = []
            for batch in batches_of(loader, batches):
                both = batch.inputs, batch.inputs if batch.targets is None else batch.targets
                pairs = zip(*map(np.asarray, both), strict=True)
                rows += [a.tobytes() + b.tobytes() for a, b in pairs]
            columns.append(rows)
            ended.append(json.loads(json.dumps(loader.state_dict())))
    assert {len(rows) for rows in columns} == {batches * global_batch // world}
    return [row for turn in zip(*columns, strict=True) for row in turn], ended


def same_for_any_world_size(
    make: Make, batches: int, global_batch: int, worlds: Sequence[int]
) -> None:
    """Assert that global rows do not depend on the world size, even if a resume changes it."""
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


# Resuming


def resumes_everywhere(
    make: Make, n: int, every: int = 1, tail: int = 1_000_000, state_bytes: int = 1024
) -> None:
    """Assert that a state before the first batch, or after any batch, gives the rest of the stream.

    `state_bytes` limits the length of a state as JSON. `tail` limits the batches compared after
    each resume; every tenth resume is compared to the end.
    """
    with make() as loader:
        states = [loader.state_dict()]
        whole: list[str] = []
        for batch in batches_of(loader, n):
            whole.append(digest(batch))
            states.append(loader.state_dict())
            assert batch.state_dict() == states[-1]
    for at in range(0, len(states), every):
        saved = json.dumps(states[at])
        assert len(saved) < state_bytes, saved
        length = len(whole) if at // every % 10 == 0 else at + tail
        with make() as loader:
            loader.load_state_dict(json.loads(saved))
            assert loader.state_dict() == states[at]
            assert take(loader, min(length, len(whole)) - at) == whole[at:length], (
                f"after a resume at batch {at}"
            )


def resumes_repeatedly(make: Make, n: int, steps: Iterable[int]) -> None:
    """Assert that repeated resumes, a few batches apart, give the uninterrupted stream."""
    whole = ledger(make, n)
    got: list[str] = []
    state = None
    for step in steps:
        with make() as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            got += take(loader, min(step, n - len(got)))
            state = loader.state_dict()
    assert got == whole


# What the stream is made of


def provenance_names_the_rows(make: Make, n: int, read: Read) -> None:
    """Assert that the spans of a row, read again from the source, equal the row."""
    with make() as loader:
        for batch in batches_of(loader, n):
            for ids, spans in zip(rows_of(batch), batch.provenance(), strict=True):
                if spans[0].at == (0, 0):  # a sample: one span without a range
                    assert len(spans) == 1
                    assert ids == read(spans[0])
                    continue
                found: list[int] = []
                for span in spans:
                    assert span.at == (len(found), len(found) + span.tokens[1] - span.tokens[0])
                    found += read(span)[slice(*span.tokens)]
                assert found == ids


def finite_pass_uses_every_document_once(
    make: Make, documents: Sequence[Sequence[int]], eos: int
) -> None:
    """Assert that a pass of concat rows has every document once. Rows overlap by one id."""
    rows = finite_rows(make)
    ids = [id for row in rows for id in row[:-1]] + rows[-1][-1:]
    ends = [at + 1 for at, id in enumerate(ids) if id == eos]
    assert ends[-1] == len(ids)
    found = [tuple(ids[at:end]) for at, end in pairwise([0, *ends])]
    assert Counter(found) == Counter(map(tuple, documents))


def finite_pass_names_every_document(
    make: Make, documents: Iterable[list[int]], read: Read
) -> None:
    """Assert that a pass names every document, each with one address."""
    with make(epochs=1, drop_last=False) as loader:
        named = {
            span.address: span for batch in loader for row in batch.provenance() for span in row
        }
    assert Counter(tuple(read(span)) for span in named.values()) == Counter(map(tuple, documents))


def stats_add_up(make: Make, documents: Sequence[Sequence[int]] | None = None) -> None:
    """Assert that after a finite pass `stats()` counts what the loader returned."""
    with make(epochs=1, drop_last=False) as loader:
        batches = list(loader)
        stats = loader.stats()
    assert stats.batches == len(batches) == batches[-1].index + 1
    assert stats.tokens == sum(np.asarray(batch.inputs).size for batch in batches)
    if documents is not None:
        assert stats.documents - stats.empty == len(documents)
        if stats.cache_misses:  # a prepared corpus does not know its text
            assert stats.text_bytes == sum(len(document) - 1 for document in documents)
    assert stats.bad == {}
    assert stats.queue_depth == 0
    assert 0 <= stats.wait_s <= stats.wall_s


# Faults and shutdown


def error_comes_after_the_batches_before_it(
    make: Make, error: type[BaseException], at_least: int, ways: Sequence[dict[str, Any]]
) -> None:
    """Assert that an error is raised after the batches before it, repeatedly, for any workers."""
    seen: list[list[str]] = []
    for way in ways:
        got: list[str] = []
        with make(**way) as loader:
            with pytest.raises(error):
                got.extend(map(digest, batches_of(loader, 1_000)))
            for _ in range(2):
                with pytest.raises(error):
                    loader.next_batch(timeout=TIMEOUT_S)
        seen.append(got)
        assert got == seen[0], f"{way} differs from {ways[0]}"
    assert len(seen[0]) >= at_least


def closes_cleanly(make: Make, rounds: int = 6) -> None:
    """Assert that a shutdown at any time leaks nothing, and that the loader continues after it."""
    whole = ledger(make, 6 * rounds)
    before = open_descriptors()
    rng = random.Random(0)
    loader = make()
    loader.shutdown()
    got: list[str] = []
    for turn in range(rounds):
        if turn % 3 == 1:
            loader.start()
        elif turn % 3 == 2:
            loader.warmup(3, timeout=TIMEOUT_S)
        threading.Event().wait(rng.random() * 0.01)
        got += take(loader, rng.randrange(6))
        loader.shutdown()
        loader.shutdown()
        assert not own_threads()
    got += take(loader, len(whole) - len(got))
    loader.shutdown()
    assert got == whole
    assert not own_threads()
    del loader
    # A server in this process closes its end of a connection slightly later.
    deadline = time.monotonic() + 10
    while len(open_descriptors()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(open_descriptors()) <= len(before), open_descriptors().items() - before.items()


def own_threads() -> list[str]:
    """Return the names of the loader's running threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-")]


def open_descriptors() -> dict[str, str]:
    """Return the target of each open file descriptor of this process."""
    gc.collect()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found

"""Verify on the data of a run that its stream resumes exactly.

    reference    one rank, from the beginning, with the settings of the run
    fresh        the same with 0, 1 and n workers, and on every world size that divides the lanes
    resume       from a point to the end; or to a later point, and resumed there again
    elastic      started on one world size, resumed on another, and resumed on a third

Every trial creates its dataset again, as a restart does, and every state is converted to JSON and
back. Ranks are simulated in this process, one at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from random import Random
from typing import Any, NamedTuple

import numpy as np

from penstock.config import default_workers
from penstock.encode.batch import Batch
from penstock.errors import SourceError
from penstock.loader import AsyncDataLoader
from penstock.read.validation import where
from penstock.types import Shard, Span

LANES = 4
"""The default, which allows 1, 2 and 4 ranks."""

Make = Callable[[], Any]
Arguments = Mapping[str, Any]
Say = Callable[[str], None]
Row = tuple[bytes, str]
"""The digest of a row's inputs and targets, and the origin of the row."""
END: Row = (b"", "the end of the stream")


class Leg(NamedTuple):
    """A part of a trial: runs to a batch with a number of ranks and workers."""

    until: int
    ranks: int
    workers: int


class Reference(NamedTuple):
    """The stream that every trial is compared with."""

    arguments: Arguments
    """The arguments of the loader, with the lanes and the global batch size."""
    batches: Sequence[Sequence[Row]]
    states: Sequence[Any]
    """The state after each batch."""
    ended: bool

    def even(self) -> int:
        """Return the number of batches before a lane ends. Later rows depend on the world size."""
        size = self.arguments["batch_size"]
        pairs = enumerate(zip(self.batches, self.states, strict=True), 1)
        full = (len(rows) == size and state["row"] == n * size for n, (rows, state) in pairs)
        return sum(takewhile(bool, full))

    def world_sizes(self) -> list[int]:
        """Return the world sizes that divide the lanes."""
        lanes = self.arguments["lanes"]
        return [n for n in range(1, lanes + 1) if lanes % n == 0]


def verify_resume(
    make: Make, arguments: Arguments, *, batches: int, points: int, seed: int, say: Say
) -> bool:
    """Return True if every trial gives the stream of the reference.

    make: creates the dataset. arguments: of `AsyncDataLoader`. batches: the number to compare.
    points: the number of places to resume at, chosen by `seed`. say: receives the report by line.
    """
    arguments = {**arguments, "device": None, "warmup_batches": 0}
    if arguments.get("n_workers") is None:
        arguments["n_workers"] = default_workers()
    reference = _read_reference(make, arguments, batches)
    random, count, even = Random(seed), len(reference.batches), reference.even()
    size, ranks = reference.arguments["batch_size"], map(str, reference.world_sizes())
    stream = f"{count} batches of {size} rows{', then the end' * reference.ended}"
    say(f"reference    {stream}; for ranks {', '.join(ranks)}")
    chosen = sorted(random.sample(range(1, count), min(points, count - 1)))
    if even < count:
        compared = f"over the first {even} batches only" if even > 1 else "not at all"
        say(f"note         its end depends on the world size: ranks are compared {compared}")
    say(f"points       after batch {', '.join(map(str, chosen))}")
    results = []
    for name, start, legs in _trials(reference, chosen, random):
        try:
            difference = _try(reference, make(), start, legs)
        except Exception as error:
            error.add_note(f"in the trial: {name}")
            raise
        same = f"same         {name:<46} {legs[-1].until - start:>4} batches"
        say(f"DIFFERENT    {name}: {difference}" if difference else same)
        results.append(bool(difference))
    digests = (digest for rows in reference.batches for digest, _ in rows)
    say(f"sha256       {hashlib.sha256(b''.join(digests)).hexdigest()}")
    failed, tried = sum(results), len(results)
    verdict = f"{failed} of {tried} trials gave another stream"
    say(f"verdict      {verdict if failed else f'all {tried} trials gave the same stream'}")
    return not failed


def _read_reference(make: Make, arguments: Arguments, batches: int) -> Reference:
    """Read the stream with the settings of the run."""
    lanes = arguments.get("lanes") or LANES
    size = -(-arguments["batch_size"] // lanes) * lanes
    arguments = {**arguments, "lanes": lanes, "batch_size": size}
    rows: list[list[Row]] = []
    states: list[Any] = []
    with AsyncDataLoader(make(), **arguments) as loader:
        while (batch := loader.next_batch()) is not None and len(rows) < batches:
            rows.append(_rows(batch))
            states.append(_through_json(loader.state_dict()))
    if len(rows) < 2:
        raise SourceError(
            f"the data gives {len(rows)} of the batches of {size} rows, but a resume needs two. "
            "Use a smaller --batch or --seq-len, or fewer --lanes."
        )
    return Reference(arguments, rows, states, ended=batch is None)


def _trials(
    reference: Reference, points: Sequence[int], random: Random
) -> Iterator[tuple[str, int, list[Leg]]]:
    """Yield the name, first batch and legs of each trial."""
    n_workers = reference.arguments["n_workers"]
    end, even, worlds = len(reference.batches), reference.even(), reference.world_sizes()
    workers = (0, 1, max(2, n_workers))
    for n in workers:
        yield f"fresh, workers {n}", 0, [Leg(end, 1, n)]
    for i, at in enumerate(points):
        n, then = workers[i % 3], workers[(i + 1) % 3]
        yield f"resume at {at}, workers {n}", at, [Leg(end, 1, n)]
        again = random.randrange(at, end)
        name = f"resume at {at}, again at {again}, workers {n} -> {then}"
        yield name, at, [Leg(again, 1, n), Leg(end, 1, then)]
    if even < 2:
        return
    for world in worlds[1:]:
        yield f"fresh, ranks {world}", 0, [Leg(even, world, n_workers)]
    points = [at for at in points if at < even] or [1]
    for i in range(max(len(points), len(worlds)) if len(worlds) > 1 else 0):
        at = points[i % len(points)]
        again = random.randrange(at, even)
        ranks = [worlds[(i + leg) % len(worlds)] for leg in range(3)]
        stops = enumerate(zip((at, again, even), ranks, strict=True))
        legs = [Leg(stop, n, workers[(i + leg) % 3]) for leg, (stop, n) in stops]
        yield f"resume at {at}, again at {again}, ranks {' -> '.join(map(str, ranks))}", 0, legs


def _try(reference: Reference, dataset: Any, start: int, legs: Sequence[Leg]) -> str:
    """Run legs in order, each from the states of the previous one. Return the first difference."""
    states: Any = [reference.states[start - 1]] if start else None
    for leg in legs:
        found, ended = [], []
        size = reference.arguments["batch_size"] // leg.ranks
        for rank in range(leg.ranks):
            own = {"shard": Shard(leg.ranks, rank), "batch_size": size, "n_workers": leg.workers}
            with AsyncDataLoader(dataset, **{**reference.arguments, **own}) as loader:
                if states is not None:
                    loader.load_state_dict(states)
                found += _differences(reference, loader, leg, rank, start)
                ended.append(_through_json(loader.state_dict()))
        if found:
            batch, row, text = min(found)
            return f"batch {batch}, row {row}: {text}"
        states, start = ended, leg.until
    return ""


def _differences(
    reference: Reference, loader: AsyncDataLoader, leg: Leg, rank: int, start: int
) -> list[tuple[int, int, str]]:
    """Return batch, row and description of the first difference of a rank's batches."""
    shard, stop = Shard(leg.ranks, rank), leg.until
    # One more, to check that the stream ends where it did before.
    stop += reference.ended and leg.ranks == 1 and stop == len(reference.batches)
    for number in range(start, stop):
        batch = loader.next_batch()
        expected = reference.batches[number][shard.rem :: shard.mod] if number < leg.until else []
        got = [] if batch is None else _rows(batch)
        for at, (wanted, row) in enumerate(zip_longest(expected, got, fillvalue=END)):
            if wanted[0] != row[0]:
                text = f"expected {wanted[1]}; got {row[1]}"
                if wanted[1] == row[1]:
                    text = f"{row[1]} has other ids now: its text or its vocabulary changed"
                return [(number, at * leg.ranks + rank, text)]
    return []


def _rows(batch: Batch) -> list[Row]:
    columns = (np.asarray(batch.inputs), np.asarray(batch.targets), batch.provenance())
    return [
        (hashlib.sha256(inputs.tobytes() + targets.tobytes()).digest(), _origin(spans))
        for inputs, targets, spans in zip(*columns, strict=True)
    ]


def _origin(spans: Sequence[Span]) -> str:
    """Describe the origin of a row: its first document, and the number of others."""
    if not spans:
        return "padding only"
    first, more = spans[0], f" and {len(spans) - 1} more" if len(spans) > 1 else ""
    return f"{where(first.address)} (tokens {first.tokens[0]} to {first.tokens[1]}{more})"


def _through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))

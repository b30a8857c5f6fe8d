"""Does a stream go on exactly where it stopped? Tried out, on the data and with the settings of a run.

In:    a function that makes the dataset, and how it is loaded.
Out:   a `Trial` for each thing that was tried, when it is done.
Where: the calling thread, with the workers of one loader at a time; ranks are simulated one after the other.
State: the digests of the reference (see `rows`), and the state that it had after each batch.

    reference    one rank, from the beginning, as set
    fresh        the same with 0, 1 and n workers, and with every number of ranks that divides the lanes
    resume       from each point to the end; with other workers
    twice        from a point to another one, and from the state that has then to the end
    elastic      begun on some ranks, continued on others, and on others again: all their states, as a list

Every trial makes its dataset anew, as a restart does, and every state passes through JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Any

from penstock.config import default_workers
from penstock.errors import NoData
from penstock.loader import AsyncDataLoader
from penstock.types import Shard
from penstock.verify.rows import Difference, Stream, compare

LANES = (4, 2, 1)
"""Where none are set: enough for 1, 2 and 4 ranks, or as many as there is text for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of a trial: from here on so many ranks and workers, until a batch."""

    until: int
    world: int = 1
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Something that was tried."""

    name: str
    batches: int
    """That were compared."""
    difference: Difference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What every trial is held against."""

    stream: Stream
    points: Sequence[int]
    """Batches after which it is resumed."""
    states: Sequence[Any]
    """After each batch."""
    worlds: Sequence[int]
    batch_size: int
    """Rows of a batch of all ranks together."""
    lanes: int
    even: int
    """Batches in which every lane has its rows. After that some lanes of a finite stream have ended, and how the rest
    is spread over ranks depends on their number."""
    fewer: str = ""
    """Why it has fewer lanes than are tried where none are set."""


class Verification:
    """Makes the reference first, and then one trial after the other."""

    def __init__(
        self,
        make: Callable[[], Any],
        arguments: Mapping[str, Any],
        *,
        batches: int,
        points: int,
        seed: int,
    ):
        """`arguments`: as for `AsyncDataLoader`. `batches`: how many to compare. `points`: how many to resume at,
        chosen by `seed`."""
        self._make = make
        n_workers = arguments.get("n_workers")
        self._workers = default_workers() if n_workers is None else n_workers
        # What never changes the stream and would only take time is left out.
        self._arguments = dict(arguments) | {"device": None, "warmup_batches": 0}
        self._random = Random(seed)
        self.reference = self._refer(batches, points)

    def _refer(self, batches: int, points: int) -> Reference:
        """The reference; where no lanes are set, with as many of them as the data has text for."""
        asked, fewer = self._arguments.get("lanes"), ""
        tried = LANES if asked is None else (asked,)
        for lanes in tried:
            self._arguments["lanes"] = lanes
            batch_size = self._rows(lanes)
            try:
                stream, states = self._read(batches, lanes)
            except NoData as error:
                if lanes == tried[-1]:
                    raise
                fewer = str(error)
                continue
            count = len(stream.batches)
            if count > 1:
                break
            given = f"{count} batch{'es' * (count != 1)} of {batch_size} rows"
            fewer = f"with {lanes} lane{'s' * (lanes != 1)} the data gives {given}"
        else:
            smaller = "--batch or --seq-len" if lanes == 1 else "--batch, --seq-len or --lanes"
            raise NoData(
                f"{fewer}, and there is no resuming between fewer than two. Use a smaller {smaller}."
            )
        chosen = sorted(self._random.sample(range(1, count), min(points, count - 1)))
        return Reference(
            stream=stream,
            points=chosen,
            states=states,
            worlds=[world for world in range(1, lanes + 1) if lanes % world == 0],
            batch_size=batch_size,
            lanes=lanes,
            even=_even(stream, states, batch_size),
            fewer=fewer,
        )

    def _rows(self, lanes: int) -> int:
        """Of a batch of all ranks: every number of ranks that divides the lanes divides it."""
        batch_size: int = self._arguments["batch_size"]
        return -(-batch_size // lanes) * lanes

    def _read(self, batches: int, lanes: int) -> tuple[Stream, list[Any]]:
        """The stream, and its state after each batch: where to resume is chosen once it is known how long it is."""
        stream, states = Stream(), []
        leg = Leg(until=batches, workers=self._workers)
        with self._loader(self._make(), leg, 0, self._rows(lanes)) as loader:
            while len(stream.batches) < batches:
                batch = loader.next_batch()
                if batch is None:
                    stream.ended = True
                    break
                stream.add(batch)
                states.append(json.loads(json.dumps(loader.state_dict())))
        return stream, states

    def trials(self) -> Iterator[Trial]:
        """One after the other, each when it is done."""
        yield from self._alone()
        if self.reference.even > 1 and len(self.reference.worlds) > 1:
            yield from self._elastic()

    def _ways(self) -> tuple[int, int, int]:
        """Numbers of workers to try."""
        return 0, 1, max(2, self._workers)

    def _alone(self) -> Iterator[Trial]:
        """On one rank."""
        points, end, ways = self.reference.points, len(self.reference.stream.batches), self._ways()
        for workers in ways:
            yield self._try(f"fresh, {_workers(workers)}", [Leg(until=end, workers=workers)])
        for i, at in enumerate(points):
            leg = Leg(until=end, workers=ways[i % 3])
            yield self._try(f"resume at {at}, {_workers(leg.workers)}", [leg], at)
        for i, point in enumerate(points):
            at, again = self._twice(point, end)
            legs = [
                Leg(until=again, workers=ways[(i + 1) % 3]),
                Leg(until=end, workers=ways[(i + 2) % 3]),
            ]
            how = f"{legs[0].workers}, then {_workers(legs[1].workers)}"
            yield self._try(f"resume at {at}, again at {again}, {how}", legs, at)

    def _elastic(self) -> Iterator[Trial]:
        """On several ranks, and on changing numbers of them."""
        end, worlds, ways = self.reference.even, self.reference.worlds, self._ways()
        points = [at for at in self.reference.points if at < end] or [1]
        for world in worlds[1:]:
            yield self._try(
                f"fresh, {world} ranks", [Leg(until=end, world=world, workers=self._workers)]
            )
        for i in range(max(len(points), len(worlds))):
            at, again = self._twice(points[i % len(points)], end)
            ranks = [worlds[(i + step) % len(worlds)] for step in range(3)]
            legs = [
                Leg(until=until, world=world, workers=ways[(i + step) % 3])
                for step, (until, world) in enumerate(zip((at, again, end), ranks, strict=True))
            ]
            shown = " -> ".join(map(str, ranks))
            yield self._try(f"resume at {at}, again at {again}, on {shown} ranks", legs)

    def _twice(self, at: int, end: int) -> tuple[int, int]:
        """Two places to resume at, of which `at` is one, with something to compare after each where that can be."""
        if at + 1 < end:
            return at, self._random.randrange(at + 1, end)
        return (self._random.randrange(1, at) if at > 1 else at), at

    def _try(self, name: str, legs: Sequence[Leg], start: int = 0) -> Trial:
        """Run legs one after the other, each from the states that the last one left."""
        dataset, at = self._make(), start
        states: Any = [self.reference.states[start - 1]] if start else None
        for leg in legs:
            try:
                states, difference = self._run(dataset, leg, at, states)
            except Exception as error:
                error.add_note(f"in the trial: {name}")
                raise
            if difference is not None:
                return Trial(name=name, batches=difference.batch - start, difference=difference)
            at = leg.until
        return Trial(name=name, batches=at - start)

    def _run(
        self, dataset: Any, leg: Leg, at: int, states: Any
    ) -> tuple[list[Any], Difference | None]:
        """All ranks of a leg. Gives the states that they end with, and the first difference."""
        found: list[Difference] = []
        ended: list[Any] = []
        for rank in range(leg.world):
            with self._loader(dataset, leg, rank, self.reference.batch_size) as loader:
                if states is not None:
                    loader.load_state_dict(states)
                difference = self._follow(loader, leg, rank, at)
                ended.append(json.loads(json.dumps(loader.state_dict())))
            if difference is not None:
                found.append(difference)
        return ended, min(found, key=lambda one: (one.batch, one.row), default=None)

    def _follow(self, loader: AsyncDataLoader, leg: Leg, rank: int, at: int) -> Difference | None:
        """One rank's batches beside the reference's."""
        stream, own = self.reference.stream, Shard(leg.world, rank)
        for number in range(at, leg.until):
            batch = loader.next_batch()
            difference = compare(batch, own.select(stream.batches[number]), number, leg.world, rank)
            if difference is not None:
                return difference
        if stream.ended and leg.world == 1 and leg.until == len(stream.batches):
            return compare(loader.next_batch(), (), leg.until, 1, 0)
        return None

    def _loader(self, dataset: Any, leg: Leg, rank: int, batch_size: int) -> AsyncDataLoader:
        how = {
            "shard": Shard(leg.world, rank),
            "batch_size": batch_size // leg.world,
            "n_workers": leg.workers,
        }
        return AsyncDataLoader(dataset, **self._arguments | how)


def _even(stream: Stream, states: Sequence[Any], batch_size: int) -> int:
    """Batches before the first one in which a lane had no row: its turn is counted, and nothing is in its place."""
    rows = zip(stream.batches, states, strict=True)
    whole = (
        len(batch) == batch_size and state["row"] == n * batch_size
        for n, (batch, state) in enumerate(rows, 1)
    )
    return sum(takewhile(bool, whole))


def _workers(n: int) -> str:
    return f"{n} worker{'s' * (n != 1)}"

"""Several datasets as one stream, by weights.

In:    a source of rows for each part, and weights.
Out:   rows, by lane: which part a row comes from is decided by the row's global number.
Where: the producer thread.
State: for each lane its place in every part, and how many rows each part has had since the weights
       last changed. A part that has left is a matter of its lane alone, so that no rank need know of
       another's.
Cost:  one more copy of each row in its narrow type, and about a microsecond for each global row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.config import one_of, whole_number
from penstock.errors import ConfigError, StateFormat
from penstock.feed.pool import Pool, Works
from penstock.order.mix import UNIT, whole_weights
from penstock.order.shuffle import mix
from penstock.read.tape import only_one
from penstock.sources.indexed import IndexedSource
from penstock.sources.indexed_lanes import IndexedRowSource
from penstock.sources.mixed_lanes import MixLanes
from penstock.sources.skipped import of_mixture, of_part
from penstock.sources.source import RowSource, Run, Source
from penstock.state import State, is_count, show
from penstock.types import Address

OnEnd = Literal["restart", "stop", "leave"]


class Mixture:
    """Several datasets as one stream: `Mixture({"web": (data, 0.7), "code": (other, 0.3)})`."""

    packed = True
    """It gives packed rows of ids."""

    def __init__(
        self,
        parts: Mapping[str, tuple[Any, float]],
        *,
        on_end: OnEnd = "restart",
        seq_len: int | None = None,
    ) -> None:
        """Describe a mixture.

        parts: for each name a dataset and its weight. Weights count tokens; they need not add up to 1.
        on_end: what happens when a part has been read to its end. "restart" reads it again, for ever;
            "stop" ends the epoch for all; "leave" lets the others go on without it.
        seq_len: only where no part knows it: map-style data whose samples are rows of seq_len + 1 ids.
        """
        one_of("on_end", on_end, ("restart", "stop", "leave"))
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError(f'parts={parts!r}: needs {{"name": (dataset, weight), …}}')
        for name, part in parts.items():
            if not isinstance(name, str) or not isinstance(part, tuple) or len(part) != 2:
                raise ConfigError(
                    f"part {name!r} is {part!r}: needs a pair of a dataset and its weight"
                )
            if isinstance(part[0], Mixture):
                raise ConfigError(
                    f"part {name!r} is a mixture itself: name its parts here, with their weights"
                )
        self.parts = dict(parts)
        self.on_end: OnEnd = on_end
        self.seq_len = None if seq_len is None else whole_number("seq_len", seq_len, 1)
        self.weights = whole_weights(
            {name: weight for name, (_, weight) in parts.items()}, list(parts)
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {weight:g}" for name, (_, weight) in self.parts.items())
        return f"Mixture({parts}, on_end={self.on_end!r})"


class MixPlace(NamedTuple):
    """Where a lane stands."""

    epoch: int
    row: int
    """Rows the lane has given since the run began."""
    counts: tuple[int, ...]
    """Rows of each part, over all lanes, since the weights last changed and before this round of lanes."""
    credits: tuple[int, ...]
    """For rows of parts that have left: what each of the others is owed, in this lane."""
    left: tuple[int, ...]
    places: tuple[Any, ...]

    def place(self) -> MixPlace:
        return self

    def to_list(self) -> list[Any]:
        children = [place.to_list() for place in self.places]
        return [
            self.epoch,
            self.row,
            list(self.counts),
            list(self.credits),
            list(self.left),
            children,
        ]


class MixtureSource(RowSource):
    """A mixture, as the loader sees it."""

    def __init__(self, mixture: Mixture, sources: Mapping[str, Source]) -> None:
        self.mixture = mixture
        self.mixed = self  # tells the loader that it is one
        self.names = list(sources)
        self._sources = list(sources.values())
        known = {name: int(s.seq_len) for name, s in _with_seq_len(sources).items()}
        lengths = set(known.values()) | (
            {mixture.seq_len} if mixture.seq_len is not None else set()
        )
        if len(lengths) != 1:
            told = ", ".join(f"{name}: {n}" for name, n in known.items()) or "none of them says"
            raise ConfigError(
                f"the parts of a mixture need one seq_len ({told}). Give all the same, or seq_len=…"
            )
        self.seq_len = lengths.pop()
        self.parts: list[Any] = [
            IndexedRowSource(source, self.seq_len) if isinstance(source, IndexedSource) else source
            for source in sources.values()
        ]
        for name, part in zip(self.names, self.parts, strict=True):
            if not hasattr(part, "open_lanes"):
                raise ConfigError(f"part {name!r} gives samples; a mixture is made of rows of ids")
            stream = getattr(part, "stream", None)
            if mixture.on_end != "restart" and stream is not None and only_one(stream.source):
                raise ConfigError(
                    f"part {name!r} keeps its own place or can be read once, and with on_end={mixture.on_end!r} lanes and "
                    "epochs read it side by side. Pass a function that makes it anew."
                )
        self.positions = any(part.positions for part in self.parts)
        self.report_docs = min(source.report_docs for source in sources.values())
        without = [
            name
            for name, part in zip(self.names, self.parts, strict=True)
            if not part.positions and not isinstance(part, IndexedRowSource)
        ]
        if self.positions and without:
            raise ConfigError(
                f"positions=True holds for a whole batch: give it to {', '.join(map(repr, without))} too"
            )
        self.dtype: np.dtype[Any] = np.result_type(*(part.dtype for part in self.parts))
        self.skip: frozenset[Address] = of_mixture(
            {name: source.skip for name, source in sources.items()}
        )

    def listings(self) -> list[tuple[float, float]]:
        return [listed for source in self._sources for listed in source.listings()]

    # Weights

    def reweighted(self, state: State, row: int, changed: Mapping[str, float]) -> State:
        """A state with weights that hold from `row` on, or from the next round of lanes on if it lies within
        one. Later changes that were planned stay; what no lane needs any more goes."""
        lanes, now = state.lanes, state.row // state.lanes
        row = -(-row // lanes) * lanes
        new = (row, whole_weights(changed, self.names))
        # A lane that is at its end stays behind the others, and its end is found again by the weights it met it with.
        rounds = {now, *(place.row for place in state.places.values() if place.row < now)}
        held = {max(begin for begin, _ in state.weights if begin <= n * lanes) for n in rounds}
        kept = [
            (begin, w)
            for begin, w in state.weights
            if begin != row and (begin in held or begin > now * lanes)
        ]
        none = (0,) * len(self.parts)
        places = {
            lane: place._replace(counts=none) if place.row * lanes == row else place
            for lane, place in state.places.items()
        }
        return replace(state, weights=tuple(sorted([*kept, new])), places=places)

    def check_state(self, state: State) -> None:
        """Weights for each part, beginning with the first row; lanes where the stream is."""
        n = len(self.parts)
        for row, weights in state.weights:
            if len(weights) != n or sum(weights) != UNIT or row % state.lanes:
                raise StateFormat(
                    f"the state's weights from row {row} on are not those of {n} parts: {show(weights)}"
                )
        rows = [row for row, _ in state.weights]
        first = min((place.row for place in state.places.values()), default=0) * state.lanes
        if not rows or rows[0] > first or rows != sorted(set(rows)):
            raise StateFormat(
                f"the state's weights do not begin before row {first} and ascend: {show(state.weights)}"
            )
        for lane, place in state.places.items():
            dealt = max(0, -(-(state.row - lane) // state.lanes))
            if place.row > dealt:
                raise StateFormat(
                    f"lane {lane} has given {place.row} rows, and the stream has come to {state.row}"
                )
            since = place.row * state.lanes - max(
                begin for begin in rows if begin <= place.row * state.lanes
            )
            if since and sum(place.counts) != since:
                raise StateFormat(
                    f"lane {lane} counts {sum(place.counts)} rows since the weights changed: it was {since}"
                )

    def check_epochs(self, epochs: int | None) -> None:
        if epochs is not None and self.mixture.on_end == "restart":
            raise ConfigError(
                f"epochs={epochs} of a mixture whose parts are restarted for ever: it has no end. Count steps, or use "
                "on_end='stop' (ends with its first part) or on_end='leave' (ends with its last)."
            )

    # For the state

    def data_id(self) -> dict[str, Any]:
        return self._of_parts("data_id")

    def tokenizer_id(self) -> dict[str, Any]:
        return self._of_parts(
            "tokenizer_id", but="name"
        )  # which is only for people: see `State.require`

    def settings_id(self) -> dict[str, Any]:
        weights = {name: float(weight) for name, (_, weight) in self.mixture.parts.items()}
        return self._of_parts("settings_id") | {"on_end": self.mixture.on_end, "weights": weights}

    def _of_parts(self, method: str, but: str = "") -> dict[str, Any]:
        return {
            f"{name}.{key}": value
            for name, part in zip(self.names, self.parts, strict=True)
            for key, value in getattr(part, method)().items()
            if key != but
        }

    def check_data(self, state: State) -> None:
        for name, source in zip(self.names, self._sources, strict=True):
            own = f"{name}."
            data = {
                key.removeprefix(own): value
                for key, value in state.data.items()
                if key.startswith(own)
            }
            source.check_data(replace(state, data=data))

    def first_place(self, epoch: int) -> MixPlace:
        none = (0,) * len(self.parts)
        return MixPlace(
            epoch, 0, none, none, none, tuple(part.first_place(epoch) for part in self.parts)
        )

    def check_place(self, value: Any) -> MixPlace:
        n = len(self.parts)
        fits = (
            isinstance(value, list | tuple)
            and len(value) == 6
            and is_count(value[0])
            and is_count(value[1])
        )
        if not fits or not all(
            isinstance(part, list | tuple) and len(part) == n for part in value[2:]
        ):
            raise StateFormat(
                f"the place of a lane of {n} parts does not look like this: {show(value)}"
            )
        numbers = [number for part in (value[2], value[3], value[4]) for number in part]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise StateFormat(f"the counts of a lane of a mixture are no integers: {show(value)}")
        if (
            not all(map(is_count, value[2]))
            or not all(left in (0, 1) for left in value[4])
            or all(value[4])
        ):
            raise StateFormat(
                f"the counts of a lane of a mixture do not fit together: {show(value)}"
            )
        places = tuple(
            part.check_place(place) for part, place in zip(self.parts, value[5], strict=True)
        )
        return MixPlace(
            value[0], value[1], tuple(value[2]), tuple(value[3]), tuple(value[4]), places
        )

    # For a run

    def work(self, run: Run) -> Works:
        runs = self._runs(run)
        return Works(
            {name: part.work(runs[name]) for name, part in zip(self.names, self.parts, strict=True)}
        )

    def open_lanes(self, run: Run, pool: Pool, work: Works) -> MixLanes:
        return MixLanes(self, run, self._runs(run), pool, work)

    def _runs(self, run: Run) -> dict[str, Run]:
        """How each part is run: in an order of its own, with its share of the memory.

        Parts keep their last row, whatever is done with the last batch: where a part that ends is followed by
        others, its end is within the stream, which has to be the same for any number of ranks.
        """
        share = max(1, run.read_ahead_bytes // len(self.parts))
        return {
            name: replace(
                run, seed=mix(run.seed, 5, i) >> 1, read_ahead_bytes=share, narrow=False, end_epoch=None,
                drop_last=False, skip=of_part(run.skip, name, self.names),
            )
            for i, name in enumerate(self.names)
        }  # fmt: skip


def _with_seq_len(sources: Mapping[str, Source]) -> dict[str, Any]:
    """The sources that know how long a row is, or their datasets."""
    found: dict[str, Any] = {}
    for name, source in sources.items():
        data = source.dataset if isinstance(source, IndexedSource) else source
        if hasattr(data, "seq_len"):
            found[name] = data
    return found

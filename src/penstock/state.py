"""The state of a stream: what it holds, how it is checked, how the states of ranks are put together.

    penstock   version of this format
    row batch  global rows dealt, and the number of the next batch
    first      the epoch at which this pass began
    lanes at   how many lanes there are, and for each lane of this rank its place: for text seven integers;
               no places for data that can be addressed, where a row's number says it all
    stream data tokenizer skip
               what the stream is a function of; a difference is refused and named
    weights    for mixtures: from which row on which weights hold
    source     for iterables of samples: where they stand

JSON through and through: integers, strings, no pickle. Under 1 KB for a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.encode.batch import Position
from penstock.errors import ConfigError, StateFormat, StateMismatch
from penstock.types import Address

VERSION = 1
KEYS = frozenset(
    {"penstock", "row", "batch", "first", "lanes", "at", "stream", "data", "tokenizer", "skip"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state that has been checked."""

    row: int
    batch: int
    first: int
    lanes: int
    places: dict[int, Any]
    """By lane, in ascending order: a place of the source's own kind, or as it was saved."""
    stream: dict[str, Any]
    data: dict[str, Any]
    tokenizer: dict[str, Any]
    skip: frozenset[Address]
    weights: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For mixtures: from which global row on which weights hold."""
    source: Any = None
    """For an iterable of samples: where it stands."""

    def to_dict(self) -> dict[str, Any]:
        state = {
            "penstock": VERSION,
            "row": self.row,
            "batch": self.batch,
            "first": self.first,
            "lanes": self.lanes,
            "at": {str(lane): place.to_list() for lane, place in self.places.items()},
            "stream": dict(self.stream),
            "data": dict(self.data),
            "tokenizer": dict(self.tokenizer),
            "skip": [list(address) for address in sorted(self.skip, key=str)] if self.skip else [],
        }
        if self.weights:
            state["weights"] = [[row, list(weights)] for row, weights in self.weights]
        if self.source is not None:
            state["source"] = self.source
        return state

    def at(self, row: int, batch: int, places: Iterable[Any], source: Any = None) -> State:
        """The same stream, further on."""
        return State(
            row=row, batch=batch, first=self.first, lanes=self.lanes,
            places=dict(zip(self.places, places, strict=True)),
            stream=self.stream, data=self.data, tokenizer=self.tokenizer, skip=self.skip,
            weights=self.weights, source=source,
        )  # fmt: skip

    def after(self, position: Position) -> State:
        """The same stream, after a batch."""
        return self.at(position.row, position.batch, position.places, position.source)

    def for_shard(self, lanes: Sequence[int]) -> State:
        """The part that a rank with these lanes needs."""
        missing = [lane for lane in lanes if lane not in self.places]
        if missing:
            raise StateMismatch(
                f"the state has no place for lane(s) {_some(missing)} of {self.lanes}: each rank saves its own "
                f"lanes only. Load the states of all ranks: load_state_dict([state_0, state_1, …])"
            )
        return replace(self, places={lane: self.places[lane] for lane in sorted(lanes)})

    def with_places(self, check: Callable[[Any], Any]) -> State:
        """The same, with places that their source has checked."""
        return replace(self, places={lane: check(place) for lane, place in self.places.items()})

    def require(
        self, *, stream: dict[str, Any], data: dict[str, Any], tokenizer: dict[str, Any]
    ) -> None:
        """Refuse to continue another stream as this one, and say what differs."""
        for what, saved, now in (
            ("the data", self.data, data),
            ("the tokenizer", self.tokenizer, tokenizer),
            ("settings", self.stream, stream),
        ):
            # A vocabulary's name is only for people: the same one may have another elsewhere.
            told = {"name"} if what == "the tokenizer" else set()
            names = sorted(key for key in {*saved, *now} - told if saved.get(key) != now.get(key))
            if names:
                pairs = ", ".join(
                    f"{name} was {saved.get(name)!r}, is {now.get(name)!r}" for name in names
                )
                raise StateMismatch(
                    f"{what} changed since the state was saved: {pairs}. Restore what it was, or start a new run."
                )


@dataclass(frozen=True, slots=True)
class StateMaker:
    """Makes the state of a batch, without holding on to the loader."""

    start: State

    def __call__(self, position: Position) -> dict[str, Any]:
        return self.start.after(position).to_dict()


def fitting(lanes: int, world: int, error: type[ConfigError | StateMismatch]) -> int:
    """Lanes that this number of ranks can share, or an error that says how many ranks could."""
    if lanes % world:
        sizes = [n for n in range(1, lanes + 1) if lanes % n == 0]
        raise error(
            f"{world} ranks cannot share {lanes} lanes evenly: world sizes that would work are "
            f"{', '.join(map(str, sizes))}. To grow, start with lanes=… a multiple of the largest size."
        )
    return lanes


def parse(value: Any) -> State:
    """A state from what `state_dict()` gave, or from a list of the states of all ranks."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not value:
            raise StateFormat("the list of states is empty: give the state of each rank")
        return merge([_parse_one(v) for v in value])
    return _parse_one(value)


def merge(states: Sequence[State]) -> State:
    """The states of all ranks, taken at the same batch, as one."""
    first = states[0]
    places: dict[int, Any] = {}
    for state in states:
        for name in (
            "row",
            "batch",
            "first",
            "lanes",
            "stream",
            "data",
            "tokenizer",
            "skip",
            "weights",
            "source",
        ):
            if getattr(state, name) != getattr(first, name):
                raise StateMismatch(
                    f"the states of the ranks were not taken at the same batch of the same run: {name} is "
                    f"{getattr(first, name)!r} in one and {getattr(state, name)!r} in another"
                )
        for lane, place in state.places.items():
            if places.setdefault(lane, place) != place:
                raise StateMismatch(
                    f"two states give different places for lane {lane}: give each rank's state once, all of one save"
                )
    return replace(first, places=places)


def _parse_one(value: Any) -> State:
    if not isinstance(value, Mapping) or "penstock" not in value:
        raise StateFormat(f"this is no state of a Penstock loader: {show(value)}")
    version = value["penstock"]
    if not is_count(version) or version < 1:
        raise StateFormat(f"the state has no version we know: {show(version)}")
    if version > VERSION:
        raise StateFormat(
            f"the state has version {version}, this release reads up to {VERSION}: it was made by a newer "
            "Penstock. Upgrade, or resume with the release that made it."
        )
    unknown, missing = set(value) - KEYS - {"weights", "source"}, KEYS - set(value)
    if unknown or missing:
        parts = [f"it lacks {', '.join(sorted(missing))}"] if missing else []
        parts += [f"it has unknown {', '.join(sorted(map(str, unknown)))}"] if unknown else []
        raise StateFormat(f"the state is damaged or foreign: {'; '.join(parts)}")
    for name in ("row", "batch", "first", "lanes"):
        if not is_count(value[name]):
            raise StateFormat(f"the state's {name!r} is no count: {show(value[name])}")
    for name in ("stream", "data", "tokenizer"):
        if not isinstance(value[name], Mapping) or not all(
            isinstance(key, str) for key in value[name]
        ):
            raise StateFormat(f"the state's {name!r} is no table: {show(value[name])}")
    lanes = value["lanes"]
    if lanes < 1:
        raise StateFormat("the state has no lanes")
    return State(
        row=value["row"],
        batch=value["batch"],
        first=value["first"],
        lanes=lanes,
        places=_places(value["at"], lanes),
        stream=dict(value["stream"]),
        data=dict(value["data"]),
        tokenizer=dict(value["tokenizer"]),
        skip=_skip(value["skip"]),
        weights=_weights(value.get("weights", [])),
        source=value.get("source"),
    )


def _places(value: Any, lanes: int) -> dict[int, Any]:
    """The places as they are: only their source can tell whether they fit."""
    if not isinstance(value, Mapping):
        raise StateFormat(f"the state's 'at' has no places: {show(value)}")
    for key in value:
        if not isinstance(key, str) or not key.isascii() or not key.isdigit() or int(key) >= lanes:
            raise StateFormat(f"the state names lane {show(key)}, but has lanes 0 to {lanes - 1}")
    return {int(key): place for key, place in value.items()}


def _weights(value: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    try:
        weights = tuple((row, tuple(of_row)) for row, of_row in value)
    except (TypeError, ValueError):
        weights = ((-1, ()),)
    if not all(is_count(row) and all(is_count(w) for w in of_row) for row, of_row in weights):
        raise StateFormat(f"the state's 'weights' are no list of rows and counts: {show(value)}")
    return weights


def _skip(value: Any) -> frozenset[Address]:
    if not isinstance(value, list | tuple):
        raise StateFormat(f"the state's 'skip' is no list: {show(value)}")
    return frozenset(address(entry) for entry in value)


def address(entry: Any) -> Address:
    """An address from a `Span`, an `Address`, or a list of file, row group and row."""
    entry = getattr(entry, "address", entry)
    if isinstance(entry, list | tuple) and len(entry) == 3:
        file, group, row = entry
        if isinstance(file, str) and (group is None or is_count(group)) and is_count(row):
            return Address(file, group, row)
    raise StateFormat(
        f"not an address of a document: {show(entry)}. It needs file, row group or None, and row"
    )


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")

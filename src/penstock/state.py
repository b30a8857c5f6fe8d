"""The state of a stream: what it holds, how it is checked, how ranks' states are combined.

    penstock   version of this format
    row batch  global rows dealt, and the number of the next batch
    first      the epoch at which this pass began
    lanes at   the number of lanes, and the position of each of this rank's lanes;
               no positions for map-style data, where the row is enough
    stream data tokenizer skip
               what the stream is a function of; a difference is refused and named
    weights    for mixtures: from which row on which weights hold
    source     for iterables of samples: their own position

JSON: integers, strings, no pickle. Under 1 KB a lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError, StateFormat, StateMismatch
from penstock.types import Address, LanePosition, StreamPosition, is_count

VERSION = 2
COUNTS = ("row", "batch", "first", "lanes")
TABLES = ("stream", "data", "tokenizer")
KEYS = {"penstock", "at", "skip", *COUNTS, *TABLES}
Weights = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A `StreamPosition` and the fingerprints of its stream."""

    row: int
    batch: int
    first: int
    lanes: int
    lane_positions: dict[int, LanePosition]
    """By lane, ascending."""
    stream: dict[str, Any]
    data: dict[str, Any]
    tokenizer: dict[str, Any]
    skip: frozenset[Address]
    weights: Weights = ()
    source: Any = None

    def to_dict(self) -> dict[str, Any]:
        state = {
            "penstock": VERSION,
            **{name: getattr(self, name) for name in COUNTS},
            "at": {str(lane): at.to_list() for lane, at in self.lane_positions.items()},
            **{name: dict(getattr(self, name)) for name in TABLES},
            "skip": [list(address) for address in sorted(self.skip, key=str)],
        }
        if self.weights:
            state["weights"] = [[row, list(weights)] for row, weights in self.weights]
        if self.source is not None:
            state["source"] = self.source
        return state

    @property
    def position(self) -> StreamPosition:
        return StreamPosition(
            self.row, self.batch, tuple(self.lane_positions.values()), self.source
        )

    def at(self, position: StreamPosition) -> State:
        """Return the state of the same stream at another position."""
        return replace(
            self,
            row=position.row,
            batch=position.batch,
            lane_positions=dict(zip(self.lane_positions, position.lanes, strict=True)),
            source=position.source,
        )

    def for_lanes(self, lanes: Sequence[int]) -> State:
        """Return the part of a rank that reads these lanes."""
        missing = [lane for lane in lanes if lane not in self.lane_positions]
        if missing:
            raise StateMismatch(
                f"the state has no position for lanes {missing[:8]} of {self.lanes}: each rank saves "
                "only its own lanes. Load the states of all ranks: load_state_dict([state_0, …])"
            )
        return replace(self, lane_positions={n: self.lane_positions[n] for n in sorted(lanes)})

    def require_stream_of(self, current: State) -> None:
        """Raise if the state belongs to another stream, and name what differs."""
        for what, saved, now in (
            ("the data", self.data, current.data),
            ("the tokenizer", self.tokenizer, current.tokenizer),
            ("settings", self.stream, current.stream),
        ):
            # The name of a vocabulary is only for people: it may differ between machines.
            ignored = {"name"} if what == "the tokenizer" else set()
            keys = sorted(k for k in {*saved, *now} - ignored if saved.get(k) != now.get(k))
            if keys:
                pairs = ", ".join(f"{k} was {saved.get(k)!r}, is {now.get(k)!r}" for k in keys)
                raise StateMismatch(
                    f"{what} changed since the state was saved: {pairs}. Restore what it was, or "
                    "start a new run."
                )


def check_lanes(lanes: int, world: int, error: type[ConfigError | StateMismatch]) -> None:
    """Raise if this number of ranks cannot share the lanes, and name the numbers that can."""
    if lanes % world:
        sizes = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise error(
            f"{world} ranks cannot share {lanes} lanes evenly: world sizes that work are {sizes}. "
            "To grow later, start with lanes=… a multiple of the largest size."
        )


def parse(value: Any) -> State:
    """Parse what `state_dict()` returned, or a list of the states of all ranks."""
    states = [_parse_one(each) for each in (value if isinstance(value, list | tuple) else [value])]
    if not states:
        raise StateFormat("the list of states is empty: give the state of each rank")
    first = states[0]
    positions: dict[int, LanePosition] = {}
    for state in states:
        for name in (*COUNTS, *TABLES, "skip", "weights", "source"):
            if getattr(state, name) != getattr(first, name):
                raise StateMismatch(
                    "the states of the ranks were not taken at the same batch of the same run: "
                    f"{name} is {getattr(first, name)!r} in one and {getattr(state, name)!r} in another"
                )
        for lane, at in state.lane_positions.items():
            if positions.setdefault(lane, at) != at:
                raise StateMismatch(
                    f"two states have different positions for lane {lane}: give each rank's state "
                    "once, all of one save"
                )
    return replace(first, lane_positions=positions)


def _parse_one(value: Any) -> State:
    if not isinstance(value, Mapping) or "penstock" not in value:
        raise StateFormat(f"not the state of a Penstock loader: {value!r:.80}")
    version = value["penstock"]
    if version != VERSION:
        raise StateFormat(
            f"the state has version {version!r:.20}, this release reads version {VERSION}. Resume with "
            "the release that saved it, or start a new run."
        )
    unknown, missing = value.keys() - KEYS - {"weights", "source"}, KEYS - value.keys()
    if unknown or missing:
        raise StateFormat(
            f"invalid state: missing {sorted(missing)}, unknown {sorted(map(str, unknown))}"
        )
    for name in COUNTS:
        _check(is_count(value[name]), value, name, "must be a non-negative integer")
    _check(value["lanes"] >= 1, value, "lanes", "must be at least 1")
    for name in TABLES:
        table = value[name]
        fits = isinstance(table, Mapping) and all(isinstance(key, str) for key in table)
        _check(fits, value, name, "must be a table")
    _check(isinstance(value["skip"], list | tuple), value, "skip", "must be a list")
    tables: dict[str, Any] = {name: dict(value[name]) for name in TABLES}
    return State(
        **{name: value[name] for name in COUNTS},
        **tables,
        lane_positions=_positions(value),
        skip=frozenset(address(entry) for entry in value["skip"]),
        weights=_weights(value),
        source=value.get("source"),
    )


def _check(fits: bool, state: Mapping[str, Any], name: str, needs: str) -> None:
    if not fits:
        raise StateFormat(f"invalid state: {name!r} {needs}, not {state[name]!r:.80}")


def _positions(state: Mapping[str, Any]) -> dict[int, LanePosition]:
    at = state["at"]
    _check(isinstance(at, Mapping), state, "at", "must be a table of positions by lane")
    lanes = [key for key in at if isinstance(key, str) and key.isascii() and key.isdigit()]
    fits = len(lanes) == len(at) and all(int(key) < state["lanes"] for key in lanes)
    _check(fits, state, "at", f"must name lanes 0 to {state['lanes'] - 1}")
    return {int(key): LanePosition.from_list(at[key]) for key in lanes}


def _weights(state: Mapping[str, Any]) -> Weights:
    if "weights" not in state:
        return ()
    weights: Weights = ()
    try:
        weights = tuple((row, tuple(of_row)) for row, of_row in state["weights"])
        fits = all(is_count(row) and all(map(is_count, of_row)) for row, of_row in weights)
    except (TypeError, ValueError):
        fits = False
    _check(fits, state, "weights", "must be a list of rows and weights")
    return weights


def address(entry: Any) -> Address:
    """Return an address from a `Span`, an `Address`, or a list of file, row group and row."""
    entry = getattr(entry, "address", entry)
    if isinstance(entry, list | tuple) and len(entry) == 3:
        file, group, row = entry
        if isinstance(file, str) and (group is None or is_count(group)) and is_count(row):
            return Address(file, group, row)
    raise StateFormat(
        f"not the address of a document: {entry!r:.80}. It needs file, row group or None, and row"
    )

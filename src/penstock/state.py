"""The state of a stream: its format, its checks, and how states of ranks are combined.

    penstock   version of this format
    row batch  global rows returned, and the number of the next batch
    first      the first epoch of this pass
    lanes at   the number of lanes, and the position of each of this rank's lanes;
               no positions for map-style data, where the row is enough
    stream data tokenizer skip
               everything that determines the stream; a difference raises and is named
    weights    for mixtures: pairs of a row and the weights from that row on
    source     for iterables of samples: their own position

JSON: integers, strings, no pickle. Under 1 KB per lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import torch_distributed
from penstock.errors import ConfigError, StateError
from penstock.types import Address, LanePosition, Shard, StreamPosition, is_count

VERSION = 2
MOST_LANES = 1 << 20
"""A state with more lanes is rejected as damaged: checking it takes time for each lane."""
COUNTS = ("row", "batch", "first", "lanes")
TABLES = {"data": "the data", "tokenizer": "the tokenizer", "stream": "settings"}
"""The fields that determine the stream, with their names in messages."""
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
        """Return the state of a rank that reads these lanes."""
        missing = [lane for lane in lanes if lane not in self.lane_positions]
        if missing:
            raise StateError(
                f"the state has no position for lanes {missing[:8]} of {self.lanes}: each rank saves "
                "only its own lanes. Load the states of all ranks: load_state_dict([state_0, …])"
            )
        return replace(self, lane_positions={n: self.lane_positions[n] for n in sorted(lanes)})

    def require_stream_of(self, current: State) -> None:
        """Raise if the state belongs to another stream, and name what differs."""
        for table, what in TABLES.items():
            saved, now = getattr(self, table), getattr(current, table)
            # A damaged state may have keys of any type. A vocabulary's name may differ.
            keys = sorted({*saved, *now} - ({"name"} if table == "tokenizer" else set()), key=str)
            differ = [k for k in keys if saved.get(k) != now.get(k)]
            if differ:
                pairs = ", ".join(f"{k} was {saved.get(k)!r}, is {now.get(k)!r}" for k in differ)
                raise StateError(
                    f"{what} changed since the state was saved: {pairs}. Restore the saved value, "
                    "or start a new run."
                )


def check_lanes(lanes: int, world: int, error: type[ConfigError | StateError]) -> None:
    """Raise if the ranks cannot share the lanes evenly, naming the world sizes that can."""
    if lanes % world:
        sizes = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise error(
            f"{world} ranks cannot share {lanes} lanes evenly: world sizes that work are {sizes}. "
            "To grow later, start with lanes=… a multiple of the largest size."
        )


def parse(value: Any) -> State:
    """Parse a result of `state_dict()`, or a list of the states of all ranks."""
    states = [_parse_one(each) for each in (value if isinstance(value, list | tuple) else [value])]
    if not states:
        raise StateError("the list of states is empty: pass the state of each rank")
    alike = replace(states[0], lane_positions={})
    if any(replace(state, lane_positions={}) != alike for state in states):
        raise StateError(
            "the states of the ranks were not taken at the same batch of the same run: their "
            f"batches are {[state.batch for state in states]}. Load the states of one checkpoint."
        )
    positions = {lane: at for state in states for lane, at in state.lane_positions.items()}
    return replace(alike, lane_positions=positions)


def gather(state: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """Return the states of all ranks as one. A collective."""
    if shard.mod == 1:
        return state
    distributed = torch_distributed()
    if distributed is None:
        raise ConfigError(
            f"gathering the states of {shard.mod} ranks needs torch.distributed, which is "
            "not initialised. Call init_process_group first, or save each rank's state_dict()."
        )
    # Ranks that read the same shard, as in tensor parallelism, have the same state.
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, state)
    return parse(states).to_dict()


def _parse_one(value: Any) -> State:
    if not isinstance(value, Mapping) or "penstock" not in value:
        raise StateError(f"not the state of a Penstock loader: {value!r:.80}")
    version = value["penstock"]
    if version != VERSION:
        raise StateError(
            f"the state has version {version!r:.20}, this release reads version {VERSION}. Resume with "
            "the release that saved it, or start a new run."
        )
    try:
        fields: dict[str, Any] = {name: _count(name, value[name]) for name in COUNTS}
        fields |= {name: dict(value[name]) for name in TABLES}
        positions = {int(lane): LanePosition.from_list(at) for lane, at in value["at"].items()}
        lanes = fields["lanes"]
        if lanes > MOST_LANES or not all(0 <= lane < lanes for lane in positions):
            raise ValueError(f"'at' must name lanes 0 to {lanes - 1}, of at most {MOST_LANES}")
        return State(
            **fields,
            lane_positions=positions,
            skip=frozenset(map(Address.of, value["skip"])),
            weights=tuple(
                (_count("weights", row), tuple(_count("weights", one) for one in weights))
                for row, weights in value.get("weights", ())
            ),
            source=value.get("source"),
        )
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise StateError(f"invalid state: {type(error).__name__}: {error}") from error


def _count(name: str, value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{name!r} must be a non-negative integer, not {value!r:.80}")
    return int(value)

"""Where a stream begins: at its first row, or after the batch at which a state was saved.

In:    a source, the options it runs with, and perhaps a saved state.
Out:   a state that fits both, or an error that says what does not.
Where: the trainer's thread.
State: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.config import whole_number
from penstock.errors import ConfigError, StateMismatch
from penstock.order.mix import Schedule
from penstock.run_options import RunOptions
from penstock.sources.source import Source
from penstock.state import State, fitting, parse
from penstock.types import Address

if TYPE_CHECKING:
    from penstock.sources.mixture import MixtureSource


def choose_lanes(source: Source, options: RunOptions) -> int:
    """The lanes of a first start: as many as asked for, or one for each rank."""
    if not source.by_lane:
        return 1
    return fitting(options.lanes or options.shard.mod, options.shard.mod, ConfigError)


def anew(
    source: Source,
    options: RunOptions,
    *,
    lanes: int,
    first: int,
    batch: int,
    skip: frozenset[Address],
    weights: Schedule,
) -> State:
    """The state before the first row of the epoch `first`."""
    own = _own_lanes(options, lanes) if source.by_lane else []
    return State(
        row=0,
        batch=batch,
        first=first,
        lanes=lanes,
        places={lane: source.first_place(first) for lane in own},
        stream=_stream_id(source, options),
        data=source.data_id(),
        tokenizer=source.tokenizer_id(),
        skip=skip,
        weights=weights,
        source=source.start(first),
    )


def after(
    source: Source, options: RunOptions, saved: dict[str, Any] | Sequence[dict[str, Any]]
) -> State:
    """A saved state, or the states of all ranks, checked: this rank's part of it."""
    loaded = parse(saved)
    source.check_data(loaded)
    loaded.require(
        stream=_stream_id(source, options), data=source.data_id(), tokenizer=source.tokenizer_id()
    )
    if source.by_lane:
        fitting(loaded.lanes, options.shard.mod, StateMismatch)
        if options.lanes not in (None, loaded.lanes):
            raise StateMismatch(
                f"lanes was {loaded.lanes} when the state was saved, and is {options.lanes}. "
                "Leave lanes out to take it from the state."
            )
    loaded = loaded.with_places(source.check_place)
    source.check_state(loaded)
    if options.epochs is not None:
        furthest = _furthest(source, loaded)
        if furthest > loaded.first + options.epochs:
            raise StateMismatch(
                f"the state is past the end of a stream of epochs={options.epochs}: it stands in epoch {furthest}, and "
                f"began with epoch {loaded.first}. Give as many epochs as the run that saved it, or start a new run."
            )
    own = loaded.for_shard(_own_lanes(options, loaded.lanes) if source.by_lane else [])
    return replace(own, skip=source.skip | own.skip)


def _furthest(source: Source, loaded: State) -> int:
    """The epoch in which a stream stands, or the one of its lanes that is furthest."""
    if source.by_lane:
        return max((place.epoch for place in loaded.places.values()), default=loaded.first)
    length = source.length()
    if length is not None:
        return loaded.first + loaded.row // length
    epoch: int = loaded.source["epoch"]  # an iterable, which has checked it
    return epoch


def _stream_id(source: Source, options: RunOptions) -> dict[str, Any]:
    return source.settings_id() | {"shuffle": options.shuffle, "seed": options.seed}


def reweighted(
    mixture: MixtureSource,
    options: RunOptions,
    state: State,
    weights: Mapping[str, float],
    step: int | None,
) -> State:
    """A state with other weights from its next batch on, or from the batch number `step` on."""
    at = state.batch if step is None else whole_number("step", step, 0)
    if at < state.batch:
        raise ConfigError(f"step={step}: {state.batch} batches have been handed out already")
    row = state.row + (at - state.batch) * options.batch_size * options.shard.mod
    return mixture.reweighted(state, row, weights)


def _own_lanes(options: RunOptions, lanes: int) -> list[int]:
    return list(range(options.shard.rem, lanes, options.shard.mod))

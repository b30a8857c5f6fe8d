"""Several datasets as one stream, interleaved row by row, by weights.

The global row number determines the part, so the stream is the same for any number of ranks. A
lane's position has a position in every part, and the rows of each part since the weights changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, cast

import numpy as np

from penstock.config import one_of
from penstock.encode.batching import RowsOrigin
from penstock.encode.rows import Mark, Packer, Rows
from penstock.errors import ConfigError, SourceError, StateError
from penstock.feed.worker_pool import PartPool, PartWorks, Pool
from penstock.order.mixture_weights import UNIT, Chooser, choice_of, whole_weights
from penstock.order.shuffle import mix
from penstock.read.resumable_iterator import only_one
from penstock.sources.base import Lanes, RowSource, RunContext
from penstock.sources.factory import as_source
from penstock.sources.map_style import RowsSource
from penstock.sources.text_iterable import TextIterable
from penstock.state import State
from penstock.types import LanePosition

OnEnd = Literal["restart", "stop"]
OF_PART = "::"
"""Separates the names of a part and its file in the addresses of skipped documents."""


class Mixture:
    """Several datasets as one stream: `Mixture({"web": (data, 0.7), "code": (other, 0.3)})`."""

    def __init__(
        self, parts: Mapping[str, tuple[Any, float]], *, on_end: OnEnd = "restart"
    ) -> None:
        """Combine datasets into one stream.

        parts: a dataset and its weight for each name. Weights are relative shares of tokens.
        on_end: what happens when a part ends. "restart" reads it again, forever; "stop" ends the
            epoch for all parts.
        """
        one_of("on_end", on_end, ("restart", "stop"))
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError(f'parts={parts!r}: must be {{"name": (dataset, weight), …}}')
        for name, part in parts.items():
            if not isinstance(name, str) or not isinstance(part, tuple) or len(part) != 2:
                raise ConfigError(f"part {name!r} must be a pair (dataset, weight), not {part!r}")
            if isinstance(part[0], Mixture):
                raise ConfigError(
                    f"part {name!r} is itself a mixture: list its parts here, with their weights"
                )
        self.parts = dict(parts)
        self.on_end: OnEnd = on_end
        weights = {name: weight for name, (_, weight) in parts.items()}
        self.weights = whole_weights(weights, list(parts))

    def as_source(self) -> MixtureSource:
        """Return the source of packed rows that a loader reads."""
        return MixtureSource(self)

    @property
    def vocab_size(self) -> int | None:
        """The largest vocabulary size of the parts; None if unknown."""
        sizes = [getattr(part, "vocab_size", None) or 0 for part, _ in self.parts.values()]
        return max(sizes) or None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a row of ids, if a part has a tokenizer."""
        for part, _ in self.parts.values():
            if getattr(part, "tokenizer", None):
                return str(part.decode(ids))
        raise ConfigError("decode: none of the parts has a tokenizer")

    def __repr__(self) -> str:
        """Return a tree of the parts with their shares and, if known, token counts."""
        lines = [f"Mixture(on_end={self.on_end!r})"]
        width = max(map(len, self.parts))
        for i, (name, (part, _)) in enumerate(self.parts.items()):
            branch = "└──" if i == len(self.parts) - 1 else "├──"
            tokens = getattr(part, "tokens", None)
            known = "" if tokens is None else f", {tokens:,} tokens"
            share = self.weights[i] / UNIT
            lines.append(f"{branch} {name:<{width}}  {share:6.2%}  {part!r}{known}")
        return "\n".join(lines)


class MixturePacker:
    """Interleaves the rows of one lane of every part."""

    def __init__(self, mixed: MixtureLanes, index: int, lane: int, run: RunContext) -> None:
        self._mixed, self._index, self._lane, self._run = mixed, index, lane, run
        start = run.positions[lane]
        self._epoch, self.row = start.epoch, start.row
        self._ended = self._is_last(start.epoch - 1)
        self._given = start.row > 0
        """True if this epoch has returned a row."""
        self._part_rows = [0] * len(mixed.parts)
        self.failed: Exception | None = None

    def _is_last(self, epoch: int) -> bool:
        return self._run.end_epoch is not None and epoch + 1 >= self._run.end_epoch

    def _packers(self) -> list[Packer]:
        return [part.packers[self._index] for part in self._mixed.parts]

    def fill(self, n: int) -> int:
        return 0  # the part of the next row is not known yet

    @property
    def counts(self) -> Counter[str]:
        return sum((packer.counts for packer in self._packers()), Counter())

    def rows(self, n: int) -> list[Rows]:
        out: list[Rows] = []
        chooser, lanes = self._mixed.chooser, self._run.lanes
        chooser.forget(min(packer.row for packer in self._mixed.packers) * lanes)
        while n > 0 and not self._ended and self.failed is None:
            own = self.row + np.arange(n, dtype=np.int64)
            chosen = chooser.parts(choice_of(own, self._lane, lanes))
            for part, run in groupby(chosen.tolist()):
                wanted = len(list(run))
                rows = self._mixed.parts[part].packers[self._index].rows(wanted)
                got = sum(len(each.ids) for each in rows)
                out += rows
                n -= got
                self.row += got
                self._part_rows[part] += got
                self._given = self._given or got > 0
                if got < wanted:
                    self._end(part)
                    break
        return out

    def mark(self) -> MixtureMark:
        counts = self._mixed.chooser.counts(self.row * self._run.lanes)
        parts = tuple(packer.mark() for packer in self._packers())
        return MixtureMark(self._epoch, self.row, counts, parts, tuple(self._part_rows))

    def _end(self, part: int) -> None:
        """Handle a part without further rows: it failed, or the epoch ends for all parts."""
        self.failed = self._packers()[part].failed
        if self.failed is not None:
            return
        if not (self._mixed.by_epoch and self._given):
            self.failed = SourceError(
                f"lane {self._lane} of {self._run.lanes} gets no row of part {part} of the mixture"
            )
            return
        # The position stays at the end of the last epoch, so that a run of more epochs can resume.
        self._ended = self._is_last(self._epoch)
        if not self._ended:
            self._epoch += 1
            self._given = False
            for lanes in self._mixed.parts:
                lanes.reopen(self._index, self._epoch)


@dataclass(frozen=True, slots=True)
class MixtureMark:
    """A position in every part."""

    epoch: int
    row: int
    counts: tuple[int, ...]
    parts: tuple[Mark, ...]
    part_rows: tuple[int, ...]
    """Rows of each part that the lane has returned since the pipeline was opened."""

    def __call__(self) -> LanePosition:
        parts = tuple(part() for part in self.parts)
        return LanePosition(epoch=self.epoch, row=self.row, counts=self.counts, parts=parts)


class MixtureLanes(Lanes):
    """The lanes of a mixture on this rank, over the same lanes of its parts."""

    def __init__(self, source: MixtureSource, run: RunContext, pool: Pool, work: PartWorks) -> None:
        self.inner = self.parts = list[Lanes]()
        try:
            for i, (name, part) in enumerate(source.parts.items()):
                own = source.part_run(run, i)
                self.parts.append(part.open_lanes(own, PartPool(pool, name), work.parts[name]))
        except BaseException:
            self.stop()
            self.close()
            raise
        behind = min((run.positions[lane] for lane in run.own_lanes), key=lambda at: at.row)
        self.chooser = Chooser(run.weights, behind.row * run.lanes, behind.counts)
        self.by_epoch = source.mixture.on_end == "stop"
        own_lanes = enumerate(run.own_lanes)
        self.packers: list[MixturePacker] = [MixturePacker(self, i, n, run) for i, n in own_lanes]

    def gauges(self) -> dict[str, Any]:
        """Return the gauges of the part with the most fetches, with totals over all parts."""
        every = [gauges for part in self.parts if (gauges := part.gauges())]
        most = max(every, key=lambda gauges: int(gauges.get("fetches", 0)), default={})
        names = ("chunks_ready", "chunks_under_way", "fetches")
        sums = {name: sum(gauges.get(name, 0) for gauges in every) for name in names}
        bound = any(gauges.get("memory_bound") for gauges in every)
        return most | sums | {"memory_bound": bound, "source_chunks": None}


class MixtureSource(RowSource):
    """A mixture as the loader sees it."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.parts: dict[str, RowSource] = {}
        for name, (data, _) in mixture.parts.items():
            source = as_source(data)
            if not isinstance(source, RowSource):
                raise ConfigError(f"part {name!r} returns samples, but a mixture needs rows")
            once = isinstance(data, TextIterable) and only_one(data.source)
            if once and mixture.on_end == "stop":
                raise ConfigError(
                    f"part {name!r} has a state of its own or can be read only once, but with "
                    "on_end='stop' each lane reads it separately. Pass a function that returns it."
                )
            self.parts[name] = source
        parts = self.parts.items()
        lengths = {name: part.seq_len for name, part in parts}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"the parts of a mixture need the same seq_len, but have {lengths}")
        ids = {name: about["fingerprint"] for name, part in parts if (about := part.tokenizer_id())}
        if len({str(fingerprint).split("/")[0] for fingerprint in ids.values()}) > 1:
            raise ConfigError(
                f"the parts {', '.join(map(repr, ids))} of a mixture have different vocabularies: "
                "the same id would mean different tokens. Use one tokenizer for all of them."
            )
        self.positions = any(part.positions for _, part in parts)
        for name, part in parts:
            if self.positions and not (part.positions or isinstance(part, RowsSource)):
                raise ConfigError(
                    f"positions=True applies to whole batches: set it for {name!r} too"
                )
        self.seq_len = max(lengths.values())
        self.dtype = np.result_type(*(part.dtype for _, part in parts))
        self.skip = frozenset(
            address._replace(file=f"{name}{OF_PART}{address.file}")
            for name, part in parts
            for address in part.skip
        )

    def listings(self) -> list[tuple[float, float]]:
        return [listed for part in self.parts.values() for listed in part.listings()]

    def check_epochs(self, epochs: int | None) -> None:
        """Raise if `epochs` is set for a mixture that never ends."""
        if epochs is not None and self.mixture.on_end == "restart":
            raise ConfigError(
                f"epochs={epochs}: a mixture whose parts restart never ends. Count steps, or use "
                "on_end='stop', which ends the epoch with the first part that ends."
            )

    # The state

    def data_id(self) -> dict[str, Any]:
        return self._of_parts("data_id")

    def tokenizer_id(self) -> dict[str, Any]:
        return self._of_parts("tokenizer_id", without="name")  # the name is informative only

    def settings_id(self) -> dict[str, Any]:
        weights = {name: float(weight) for name, (_, weight) in self.mixture.parts.items()}
        return self._of_parts("settings_id") | {"on_end": self.mixture.on_end, "weights": weights}

    def _of_parts(self, method: str, without: str = "") -> dict[str, Any]:
        return {
            f"{name}.{key}": value
            for name, part in self.parts.items()
            for key, value in getattr(part, method)().items()
            if key != without
        }

    def first_position(self, epoch: int) -> LanePosition:
        parts = tuple(part.first_position(epoch) for part in self.parts.values())
        return LanePosition(epoch=epoch, counts=(0,) * len(parts), parts=parts)

    def check_state(self, state: State) -> None:
        n, positions = len(self.parts), state.lane_positions
        changes = [row for row, _ in state.weights]
        first = min((at.row for at in positions.values()), default=0) * state.lanes
        whole = all(len(weights) == n and sum(weights) == UNIT for _, weights in state.weights)
        if not whole or changes != sorted(set(changes)) or not changes or changes[0] > first:
            raise StateError(f"invalid state: its weights are not those of {n} parts")
        for lane, at in positions.items():
            row = at.row * state.lanes
            since = row - max(begin for begin in changes if begin <= row)
            if len(at.parts) != n or len(at.counts) != n or (since and sum(at.counts) != since):
                raise StateError(f"invalid state: lane {lane} needs a position in {n} parts")
        for i, (name, part) in enumerate(self.parts.items()):
            part.check_state(
                replace(
                    state,
                    lane_positions={lane: at.parts[i] for lane, at in positions.items()},
                    data=_of_part(state.data, name),
                    stream=state.stream | _of_part(state.stream, name),
                )
            )

    def reweighted(self, state: State, row: int, changed: Mapping[str, float]) -> State:
        """Return a state with new weights from `row` on, rounded up to a multiple of the lanes.

        Keeps changes planned for later rows. Drops weights that no lane needs any more.
        """
        lanes, positions = state.lanes, state.lane_positions
        row = -(-row // lanes) * lanes
        # A lane that has ended stays behind the others and keeps its last weights.
        behind = min([state.row // lanes, *(at.row for at in positions.values())]) * lanes
        first = max(begin for begin, _ in state.weights if begin <= behind)
        kept = [each for each in state.weights if each[0] >= first and each[0] != row]
        none = (0,) * len(self.parts)
        return replace(
            state,
            weights=tuple(sorted([*kept, (row, whole_weights(changed, list(self.parts)))])),
            lane_positions={
                lane: at._replace(counts=none) if at.row * lanes == row else at
                for lane, at in positions.items()
            },
        )

    def extended(self, state: State, fresh: State) -> State:
        """Return a state saved with fewer parts, extended by the added ones. New parts start at zero;
        the weights of this mixture apply from the next row of all lanes. `fresh`: a new run's state."""
        names, n = list(self.parts), len(state.weights[0][1]) if state.weights else 0
        old = {key.partition(".")[0] for key in state.data}
        if old != set(names[:n]) or len(names) == n:
            raise StateError(
                f"extend=True: the state has the parts {sorted(old)}. The mixture must have the "
                f"same ones first, then the new ones, but has {names}."
            )
        added = names[n:]
        zeros = (0,) * len(added)

        def position(at: LanePosition) -> LanePosition:
            epoch = at.epoch if self.mixture.on_end == "stop" else 0
            parts = (self.parts[name].first_position(epoch) for name in added)
            return at._replace(counts=at.counts + zeros, parts=(*at.parts, *parts))

        def merged(saved: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
            own = {k: v for k, v in new.items() if k == "weights" or k.partition(".")[0] in added}
            return saved | own

        padded = replace(
            state,
            lane_positions={lane: position(at) for lane, at in state.lane_positions.items()},
            weights=tuple((row, weights + zeros) for row, weights in state.weights),
            stream=merged(state.stream, fresh.stream),
            data=merged(state.data, fresh.data),
            tokenizer=merged(state.tokenizer, fresh.tokenizer),
        )
        weights = {name: weight for name, (_, weight) in self.mixture.parts.items()}
        return self.reweighted(padded, state.row, weights)

    def part_rows(self, origin: RowsOrigin) -> dict[str, int]:
        """Return the rows of each part that a pipeline has returned, up to a batch."""
        rows = zip(*(cast(MixtureMark, mark).part_rows for mark in origin.marks()), strict=True)
        return dict(zip(self.parts, map(sum, rows), strict=True))

    # A run

    def part_run(self, run: RunContext, i: int) -> RunContext:
        """Return the parameters of a part: its own order, and an equal share of the memory.

        `drop_last` is off, because the last row of a part lies within the stream.
        """
        own = f"{list(self.parts)[i]}{OF_PART}"
        return replace(
            run,
            seed=mix(run.seed, 5, i) >> 1,
            read_ahead_bytes=max(1, run.read_ahead_bytes // len(self.parts)),
            end_epoch=None,
            by_epoch=self.mixture.on_end == "stop",
            drop_last=False,
            skip=frozenset(
                address._replace(file=address.file.removeprefix(own))
                for address in run.skip
                if address.file.startswith(own)
            ),
            positions={lane: at.parts[i] for lane, at in run.positions.items()},
        )

    def work(self, run: RunContext) -> PartWorks:
        parts = enumerate(self.parts.items())
        return PartWorks({name: part.work(self.part_run(run, i)) for i, (name, part) in parts})

    def open_lanes(self, run: RunContext, pool: Pool, work: PartWorks) -> MixtureLanes:
        return MixtureLanes(self, run, pool, work)


def _of_part(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = f"{name}."
    return {k.removeprefix(own): value for k, value in table.items() if k.startswith(own)}

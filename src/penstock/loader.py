"""AsyncDataLoader: prepares batches in the background, before the trainer requests them.

Everything here runs on the trainer's thread; the threads it starts are in `feed/`. The state is the
position after the last batch returned, regardless of read-ahead.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from penstock.config import whole_number
from penstock.encode.batch import Batch, BatchOrigin
from penstock.errors import ConfigError, StateError
from penstock.feed.collectives import RankAgreement
from penstock.feed.warmup import Warmup, check_warmup
from penstock.options import LoaderOptions, accepts, from_habit, options_of
from penstock.order.mixture_weights import next_pass
from penstock.pipeline import Pipeline
from penstock.settings import build, resolve_options
from penstock.sources.base import RunContext, Source
from penstock.sources.factory import as_source
from penstock.state import State, check_lanes, gather, parse
from penstock.watch.loader_stats import LoaderStats, Stats
from penstock.watch.stage_timer import IMPORT
from penstock.watch.telemetry import Telemetry

if TYPE_CHECKING:
    from penstock.feed.autotune import Autotune
    from penstock.feed.device import DeviceFeed
    from penstock.torch_dataset import TorchDataset


class AsyncDataLoader:
    """Streams a dataset as batches, prepared by workers in the background.

    Iterate over it, or call `next`. With `epochs`, each `for` is a pass in a new order; the first
    one after `load_state_dict` finishes the saved pass. `next` always continues the current pass.

    Use it as a context manager, or call `shutdown` to stop its threads. Garbage collection and the
    exit of the interpreter stop them too.
    """

    @accepts(LoaderOptions)
    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        """Create a loader. Nothing runs until it is entered, started, warmed up or iterated.

        dataset: a TextDataset, PreparedDataset, TokenFileDataset, SyntheticDataset or Mixture; a
            map-style dataset; or an iterable of samples.
        """
        self._given = given = LoaderOptions(*args, **from_habit(kwargs, options_of(LoaderOptions)))
        self._dataset = dataset
        self._source: Source = as_source(dataset, given.preprocess, given.collate)
        self._options = resolve_options(given, self._source)
        self._mixture = cast(Any, self._source) if hasattr(self._source, "mixture") else None
        if self._mixture is not None:
            self._mixture.check_epochs(self._options.epochs)
        self._pipeline: Pipeline | None = None
        self._finalizer: Any = None
        self._feed: DeviceFeed | None = None
        self._agreement: RankAgreement | None = None
        self._tuner: Autotune | None = None
        self._tuned: dict[str, int] = {}
        self._next_lock = threading.Lock()
        self._listings = self._source.listings()
        self.observe(Telemetry())
        lanes = 1
        if self._source.by_lane:
            lanes = given.lanes or self._options.shard.mod
            check_lanes(lanes, self._options.shard.mod, ConfigError)
        self._state = self._fresh_state(lanes)
        self._origin: BatchOrigin | None = None
        """The origin of the last batch returned since `_state`."""
        self._exhausted = self._interrupted = False
        self._begun = False
        """True if a batch was requested since this pass began or a state was loaded."""

    @classmethod
    def from_config(cls, path: Any = None, dataset: Any = None, **overrides: Any) -> Self:
        """Return a loader configured by a settings file.

        dataset: used instead of the file's [data]. overrides: settings with the highest precedence.
        """
        dataset, arguments = build(path, dataset, overrides)
        return cls(dataset, **arguments)

    def __repr__(self) -> str:
        options = self._options
        return (
            f"AsyncDataLoader({type(self._dataset).__name__}, batch_size={options.batch_size}, "
            f"n_workers={options.n_workers}, prefetch_size={options.prefetch_size})"
        )

    def observe(self, telemetry: Telemetry) -> None:
        """Use `telemetry` instead of the loader's own. Call this before the first batch."""
        telemetry.bind(self, self._listings)
        self.telemetry, self._stats = telemetry, LoaderStats()

    # Iterating

    def __iter__(self) -> Pass:
        if self._begun and self._options.epochs is not None:
            self._start_pass()
        return Pass(self)

    def _start_pass(self) -> None:
        """Start the next pass, in a new order."""
        assert self._options.epochs is not None
        ended = self._current()
        self._close()
        weights = next_pass(ended.weights, ended.row, ended.lanes)
        first = ended.first + self._options.epochs
        fresh = self._fresh_state(ended.lanes, first, ended.batch)
        self._state = replace(fresh, skip=ended.skip, weights=weights)
        self._exhausted = self._begun = False

    def __next__(self) -> Batch:
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def __bool__(self) -> bool:
        return True  # even if len() raises

    def __len__(self) -> int:
        """Return the number of batches in one pass. Raise TypeError if it is unknown."""
        return -(-self._rows_of_pass() // self._options.batch_size)

    def _rows_of_pass(self) -> int:
        """Return the rows of one pass on this rank. Raise TypeError if they are unknown."""
        batches = self._source.batches(self._run_context())
        if batches is not None:
            return batches * self._options.batch_size
        from penstock.sources.map_style import rows_of_pass

        return rows_of_pass(self._options, self._source.length())

    def next_batch(self, timeout: float | None = None) -> Batch | None:
        """Return the next batch, or None at the end of a finite stream.

        Raise `LoaderTimeout` after `timeout` seconds; nothing is lost. Without workers, this
        makes the batch itself and ignores the timeout.
        """
        with self._next_lock:
            if self._exhausted:
                return None
            before = self._origin
            try:
                batch = self._timed(timeout)
                self._exhausted, self._begun = batch is None, True
                if batch is not None:
                    self._origin = batch._origin
                return batch
            except BaseException as error:
                if not isinstance(error, Exception):
                    # Ctrl-C, anywhere: a batch may have been taken and not returned. The next call
                    # restarts after the last one returned.
                    self._origin, self._interrupted = before, True
                raise

    def _timed(self, timeout: float | None) -> Batch | None:
        telemetry, begun = self.telemetry, time.perf_counter()
        telemetry.next_begins(begun)
        try:
            batch = self._take(timeout)
            tokens = None if batch is None else batch.tokens
        except BaseException as error:
            telemetry.next_failed(begun, time.perf_counter(), error)
            raise
        now = time.perf_counter()
        telemetry.next_ended(begun, now, tokens)
        if self._tuner is not None and tokens is not None:
            self._tuner.step(now, tokens, telemetry.timer.last_pause_s)
        return batch

    def _take(self, timeout: float | None) -> Batch | None:
        if self._interrupted:
            self.shutdown()
            self._interrupted = False
        if self._pipeline is None:
            self._begin()
        pipeline = self._pipeline
        assert pipeline is not None
        stage = self._feed or pipeline
        if self._agreement is None:
            batch = stage.next(timeout)
        else:
            self._interrupted = True  # if another rank fails, the batch is read again
            batch = self._agreement.next(lambda: stage.next(timeout))
            self._interrupted = False
        if batch is not None and self._options.tensors and not batch.is_torch:
            if "torch" not in sys.modules:
                with self.telemetry.clock.stage(IMPORT):
                    importlib.import_module("torch")
            batch.to_torch()
            pipeline.makes_tensors = self._feed is None  # torch is now imported
        return batch

    # Starting and stopping

    def _begin(self) -> None:
        if self._pipeline is None:
            self.warmup(self._given.warmup_batches, self._given.warmup_timeout)
        self.start()

    def start(self) -> Self:
        """Start the workers, unless they are running."""
        if self._pipeline is not None:
            return self
        options, begun = self._options, time.perf_counter()
        together = options.shard.mod > 1 and not options.alone and not self._source.even
        if self._agreement is None and together and options.epochs is not None:
            self._agreement = RankAgreement(options.shard, self.telemetry.clock)
        if options.device is not None:
            from penstock.feed.device import DeviceFeed, open_copier

            copier = open_copier(options.device)  # may raise, so before threads start
        pipeline = self._pipeline = Pipeline(self._source, self._run_context())
        # The threads reference the pipeline and not the loader, so an unused loader is collected,
        # which stops its threads.
        self._finalizer = weakref.finalize(self, pipeline.close)
        self.telemetry.opened(pipeline, begun)
        if self._given.prefetch_size == "auto":
            self._tuner = pipeline.tuner(self.telemetry)
            self._tuner.adopt(self._tuned)
        if options.device is not None:
            hook, clock = self._given.device_preprocess, self.telemetry.clock
            self._feed = DeviceFeed(copier, pipeline.next, pipeline.poll, hook, clock)
            self.telemetry.device = self._feed.waited_s
        return self

    def _run_context(self) -> RunContext:
        """Return the parameters of a run from the current state."""
        options, state = self._options, self._current()
        return replace(
            options,
            lanes=state.lanes,
            skip=state.skip,
            weights=state.weights,
            first_epoch=state.first,
            end_epoch=None if options.epochs is None else state.first + options.epochs,
            positions=state.lane_positions,
            start=state.position,
            # Must not reference the loader.
            state=lambda position: state.at(position).to_dict(),
            clock=self.telemetry.clock,
        )

    def inspect(self) -> tuple[Source, RunContext]:
        """Return the source and the parameters of a run, for tools."""
        return self._source, self._run_context()

    def warmup(self, batches: int | Literal["auto"] | None = None, timeout: float = 30.0) -> Warmup:
        """Start, and wait up to `timeout` until `batches` (by default a full queue) are buffered.

        "auto" waits for the first batch and, if that took longer than 0.1 s, for a full queue. A
        timeout loses nothing. An error in the data is raised by the `next` that reaches it. Does
        nothing if batches, timeout or workers are 0.
        """
        wanted, timeout = check_warmup(self._options, self._given.memory_limit, batches, timeout)
        if wanted == 0 or timeout == 0 or self._options.n_workers == 0 or self._exhausted:
            return Warmup(0, 0, 0.0)
        begun = time.perf_counter()
        self.start()
        assert self._pipeline is not None
        requested, filled = self._pipeline.warm(wanted, timeout)
        done = Warmup(requested, min(filled, requested), 1e3 * (time.perf_counter() - begun))
        self.telemetry.warmed(done.requested, done.filled, done.wait_ms)
        return done

    def shutdown(self) -> None:
        """Stop all workers and close all files. Safe at any time, and again. A later `next`
        restarts after the last batch returned."""
        self._state = self._current()
        self._close()

    def _close(self) -> None:
        parts, self._origin = self._part_rows(), None
        feed, self._feed = self._feed, None
        pipeline, self._pipeline = self._pipeline, None
        if feed is not None:
            feed.close()
        if pipeline is not None:
            self._stats.keep(pipeline, parts)
            if self._tuner is not None:
                self._tuned |= self._tuner.values()
            pipeline.close()
            self._finalizer.detach()
            self.telemetry.closed()
            self._tuner = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch returned: JSON, a few hundred bytes per lane.

        It has only this rank's lanes. To save on one rank for all, or to resume on another number
        of ranks, use `full_state_dict`, or load a list of all ranks' states.
        """
        return self._current().to_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks as one, which loads on any number that divides the lanes.

        A collective: all ranks must call it after the same batch, even if only one saves it.
        """
        return gather(self.state_dict(), self._options.shard)

    def load_state_dict(
        self, state: dict[str, Any] | Sequence[dict[str, Any]], *, extend: bool = False
    ) -> None:
        """Resume after the batch at which `state` was saved; a list has the states of all ranks.

        `extend` is for a mixture with new parts after the old ones: they begin at their first row,
        and the new weights apply from here on.
        """
        parsed = parse(state)
        if extend:
            if self._mixture is None:
                raise ConfigError("extend=True is only for a Mixture with new parts")
            parsed = self._mixture.extended(parsed, self._state)
        loaded = self._checked(parsed)
        self._close()
        self._state, self._exhausted, self._begun = loaded, False, False
        self.telemetry.reset()
        self._stats = LoaderStats()

    def set_weights(self, weights: Mapping[str, float], step: int | None = None) -> None:
        """Change the weights of a mixture from the next batch on, or from batch number `step` on.

        The change is part of the state. All ranks must make it at the same batch. Batches already
        prepared with the old weights are made again.
        """
        if self._mixture is None:
            raise ConfigError(f"set_weights is for a Mixture, not {type(self._dataset).__name__}")
        state, options = self._current(), self._options
        at = state.batch if step is None else whole_number("step", step, 0)
        if at < state.batch:
            raise ConfigError(f"step={step}: {state.batch} batches have already been returned")
        row = state.row + (at - state.batch) * options.batch_size * options.shard.mod
        changed = self._mixture.reweighted(state, row, weights)
        self._close()
        self._state = changed

    def as_torch_dataset(self, *, batched: bool = False) -> TorchDataset:
        """Return an `IterableDataset` of rows, for `DataLoader(dataset, batch_size=…)` and trainers.

        With batched=True it yields whole batches, for `DataLoader(dataset, batch_size=None)`.
        """
        from penstock.torch_dataset import TorchDataset

        return TorchDataset(self, batched=batched)

    def _current(self) -> State:
        origin = self._origin
        return self._state if origin is None else self._state.at(origin.position())

    def _own_lanes(self, lanes: int) -> range:
        shard = self._options.shard
        return range(shard.rem, lanes if self._source.by_lane else 0, shard.mod)

    def _fresh_state(self, lanes: int, first: int = 0, batch: int = 0) -> State:
        """Return the state before the first row of the epoch `first`."""
        source, options = self._source, self._options
        return State(
            row=0,
            batch=batch,
            first=first,
            lanes=lanes,
            lane_positions={n: source.first_position(first) for n in self._own_lanes(lanes)},
            stream=source.settings_id() | {"shuffle": options.shuffle, "seed": options.seed},
            data=source.data_id(),
            tokenizer=source.tokenizer_id(),
            skip=source.skip,
            weights=((0, self._mixture.mixture.weights),) if self._mixture is not None else (),
            source=source.first_source(first),
        )

    def _checked(self, loaded: State) -> State:
        """Return this rank's part of a state. Raise if it does not fit the data and the options."""
        source, options = self._source, self._options
        source.check_state(loaded)
        loaded.require_stream_of(self._state)
        if source.by_lane:
            check_lanes(loaded.lanes, options.shard.mod, StateError)
            if self._given.lanes not in (None, loaded.lanes):
                raise StateError(
                    f"lanes was {loaded.lanes} when the state was saved, and is {self._given.lanes}. "
                    "Leave lanes out to take it from the state."
                )
        if options.epochs is not None:
            epoch = self._epoch_of(loaded)
            if epoch > loaded.first + options.epochs:
                raise StateError(
                    f"the state is in epoch {epoch} of a pass that began with epoch {loaded.first}, "
                    f"beyond the end of epochs={options.epochs}. Pass as many epochs as the run "
                    "that saved it, or start a new run."
                )
        own = loaded.for_lanes(self._own_lanes(loaded.lanes))
        return replace(own, skip=source.skip | own.skip)

    def _epoch_of(self, state: State) -> int:
        """Return the epoch of a state: that of its furthest lane."""
        if self._source.by_lane:
            return max((at.epoch for at in state.lane_positions.values()), default=state.first)
        length = self._source.length()
        if length is not None:
            return state.first + state.row // length
        return int(state.source["epoch"])

    # Monitoring

    def queue_depth(self) -> int:
        """Return the number of buffered batches."""
        return self._pipeline.depth if self._pipeline is not None else 0

    def stats(self) -> Stats:
        """Return the statistics so far."""
        waited_s = None if self._feed is None else self._feed.waited_s()
        return self._stats.stats(
            self._pipeline,
            self.telemetry,
            parts=self._part_rows(),
            memory_estimate=self._options.queue_bytes,
            device_wait_s=waited_s,
        )

    def _part_rows(self) -> dict[str, int]:
        """Return the rows of each part of a mixture that the pipeline has returned."""
        if self._mixture is None or self._origin is None:
            return {}
        return dict(self._mixture.part_rows(self._origin))

    def pause(self, name: str) -> AbstractContextManager[None]:
        """Exclude evaluation or a checkpoint from step times: `with loader.pause("eval"): …`."""
        return self.telemetry.pause(name)


class Pass(Iterator[Batch]):
    """One `for` over a loader. Other attributes are the loader's."""

    def __init__(self, loader: AsyncDataLoader) -> None:
        self._loader = loader
        self._first = True

    def __next__(self) -> Batch:
        loader, first = self._loader, self._first
        batch, self._first = loader.next_batch(), False
        if batch is None and first and loader._options.epochs is not None:
            # The loaded state is the end of a pass: start the next one instead of an empty `for`.
            loader._start_pass()
            batch = loader.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

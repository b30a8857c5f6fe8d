"""AsyncDataLoader: batches that are ready before they are asked for.

In:    a dataset and how to run it.
Out:   batches; the state of the last one handed out; counts.
Where: everything here runs on the trainer's thread. What it starts lives in `feed/`.
State: the position after the last batch that was handed out, wherever read-ahead stands.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.begin import after, anew, choose_lanes, reweighted
from penstock.encode.batch import Batch, Origin
from penstock.errors import ConfigError
from penstock.feed.agree import RankAgreement
from penstock.feed.quick import Last, nothing_ready
from penstock.options import LoaderOptions, accepts
from penstock.order.mix import Schedule, restarted
from penstock.pipeline import Pipeline
from penstock.run_options import DEVICE_PREFETCH, resolve_options
from penstock.sources.kinds import as_source
from penstock.state import State
from penstock.tally import Tally, Warmup
from penstock.watch.telemetry import Telemetry, attach

if TYPE_CHECKING:
    from penstock.feed.autotune import Autotune
    from penstock.feed.cargo import BatchCargo
    from penstock.feed.device import DeviceFeed
    from penstock.sources.mixture import MixtureSource
    from penstock.sources.source import Run, Source
    from penstock.stats import Stats
    from penstock.torch_dataset import TorchDataset


class AsyncDataLoader:
    """Streams a dataset as batches, prepared by workers in the background.

    Iterate over it, or call `next_batch`. It is a context manager; without one, `shutdown` ends
    its threads, as do garbage collection and the end of the interpreter.
    """

    @accepts(LoaderOptions)
    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        """Set up a loader. Nothing runs until it is entered, started, warmed or asked for a batch.

        dataset: a TextDataset, TokenFileDataset, SyntheticDataset or Mixture; a map-style dataset; or
            an iterable of samples.
        """
        given = LoaderOptions(*args, **kwargs)
        self._source = as_source(dataset, given.preprocess, given.collate)
        self._dataset = dataset
        self._options = resolve_options(given, self._source)
        self._mixture: MixtureSource | None = getattr(self._source, "mixed", None)
        if self._mixture is not None:
            self._mixture.check_epochs(self._options.epochs)
        self._pipeline: Pipeline | None = None
        self._feed: DeviceFeed[BatchCargo] | None = None
        self._quick: Callable[[], Batch | None] = nothing_ready
        """Takes a batch that stands ready, the shortest way."""
        self._last = Last()
        self._finalizer: Any = None
        self._agreement: RankAgreement | None = None
        self._exhausted = False
        self._listings = self._source.listings()
        self.observe(Telemetry())
        self._tuner: Autotune | None = None
        self._tuned: dict[str, int] = {}
        self._origin: Origin | None = None
        """Of the last batch that was not taken by the shortest way."""
        self._skip = self._source.skip
        self._state = self._fresh_state(choose_lanes(self._source, self._options), first=0, batch=0)

    @classmethod
    def from_config(cls, path: Any = None, dataset: Any = None, **overrides: Any) -> Self:
        """A loader as a settings file describes it: see docs/configuration.md.

        dataset: the data, where the file does not name it. overrides: rank above everything else.
        """
        from penstock.settings import build

        dataset, arguments = build(path, dataset, overrides)
        return cls(dataset, **arguments)

    def observe(self, telemetry: Telemetry) -> None:
        """Record into `telemetry` instead of the loader's own. Call it before the first batch."""
        self.telemetry = attach(telemetry, self, self._listings)
        self._tally = Tally.of(telemetry)

    # Iterating

    def __iter__(self) -> Self:
        if self._exhausted:
            # Like any loader: the next `for` is the next pass, with its own order.
            assert self._options.epochs is not None
            ended = self._current()
            self._close()
            weights = restarted(ended.weights, ended.row, ended.lanes)
            self._state = self._fresh_state(
                ended.lanes, ended.first + self._options.epochs, ended.batch, weights
            )
            self._exhausted = False
        return self

    def __next__(self) -> Batch:
        batch = self._quick()  # as usual, and before anything else is looked at
        if batch is None and (batch := self._take_slowly(None)) is None:
            raise StopIteration
        return batch

    def __bool__(self) -> bool:
        return True  # like any iterator, and also where there is no len()

    def __len__(self) -> int:
        """Batches of one pass, where that is known beforehand."""
        return self._options.batches(self._source.length())

    def next_batch(self, timeout: float | None = None) -> Batch | None:
        """The next batch, or None at the end of a finite stream. Raises `LoaderTimeout` after `timeout` s.

        Without threads (`n_workers=0`) the batch is made here and now, however long that takes.
        """
        batch = self._quick()
        return batch if batch is not None else self._take_slowly(timeout)

    def _take_slowly(self, timeout: float | None) -> Batch | None:
        """A batch that may have to be waited for."""
        if self._exhausted:
            return None
        try:
            batch = self._wait_for_one(timeout)
            if self._pipeline is not None:
                self._pipeline.interrupted = False
            if batch is not None and batch._origin is not None:
                self._origin, self._last.next = batch._origin, batch.index + 1
                self._last.before = None  # the last thing: a batch lost before that is given again
            return batch
        except (
            BaseException
        ) as error:  # Ctrl-C, anywhere: a batch may have been taken, and not handed out
            if self._pipeline is not None and (
                self._pipeline.interrupted or not isinstance(error, Exception)
            ):
                self._origin, self._quick, self._pipeline.interrupted = (
                    self._latest(),
                    nothing_ready,
                    True,
                )
            raise

    def _wait_for_one(self, timeout: float | None) -> Batch | None:
        """The same, with everything that is to be written down of it."""
        begun = time.perf_counter()
        self.telemetry.entering(begun)
        try:
            batch = self._next(timeout)
        except BaseException as error:
            self._tally.took(begun, now := time.perf_counter(), None)
            self.telemetry.failed(begun, now, error)
            raise
        now, tokens = time.perf_counter(), None if batch is None else batch.tokens
        self._tally.took(begun, now, tokens)
        self.telemetry.took(begun, now, tokens, self.queue_depth())
        if batch is None:
            self._exhausted = True
        elif self._tuner is not None:
            self._tuner.step(now, batch.tokens, *self.telemetry.consumer.last_s())
        elif (
            self._quick is nothing_ready
            and not (self._agreement or self._feed)
            and self._pipeline is not None
        ):
            self._quick = self._pipeline.shortcut(self.telemetry, self._last)
        return batch

    def _next(self, timeout: float | None) -> Batch | None:
        if self._interrupted():
            self.shutdown()
        self._begin()
        assert self._pipeline is not None
        batch = (
            self._take(timeout)
            if self._agreement is None
            else self._agreement.next(lambda: self._take(timeout))
        )
        if batch is not None:
            if self._options.tensors:
                batch.to_torch()
            self._pipeline.watch([self._pipeline.depth])
        return batch

    def _take(self, timeout: float | None) -> Batch | None:
        pipeline, options = self._pipeline, self._options
        assert pipeline is not None
        if options.device is None:
            batch = pipeline.next(timeout)
        else:
            if self._feed is None:
                from penstock.feed.cargo import open_feed

                self._feed = open_feed(
                    options.device,
                    pipeline.next,
                    pipeline.poll,
                    DEVICE_PREFETCH,
                    options.device_preprocess,
                    self.telemetry.clock,
                )
                self.telemetry.device = self._feed.told
            cargo = self._feed.next(timeout)
            batch = None if cargo is None else cargo.batch
        pipeline.interrupted = (
            batch is not None
        )  # until it is handed out: whatever fails before, it is given again
        return batch

    def _interrupted(self) -> bool:
        return any(
            part is not None and part.interrupted
            for part in (self._pipeline, self._feed, self._last)
        )

    # Starting and stopping

    def _begin(self) -> None:
        fresh = self._pipeline is None
        self.start()
        if fresh and self._options.warmup_batches and self._options.warmup_timeout:
            self.warmup(self._options.warmup_batches, self._options.warmup_timeout)

    def start(self) -> Self:
        """Start the workers, if they do not run yet."""
        if self._pipeline is not None:
            return self
        options, begun = self._options, time.perf_counter()
        if self._agreement is None and options.must_agree(self._source.even):
            self._agreement = RankAgreement(options.shard, self.telemetry.clock)
        run = options.run(self._source, self._state, self._skip, self.telemetry.clock)
        pipeline = Pipeline(
            self._source,
            run,
            workers=options.workers,
            cpus=options.cpus,
            restart=True,
        )
        self._pipeline = pipeline
        # The threads know the pipeline and not the loader, so a loader that nobody holds any more
        # is collected, and its threads end with it.
        self._finalizer = weakref.finalize(self, pipeline.close)
        self.telemetry.follow(pipeline, begun)
        if self._options.tunes:
            self._tuner = pipeline.tuner(options.row_bytes * options.batch_size, self.telemetry)
            self._tuner.adopt(self._tuned)
        return self

    def lay_open(self) -> tuple[Source, Run]:
        """What the loader reads and how it would run, for those who do something else with it."""
        return self._source, self._options.run(self._source, self._current(), self._skip)

    def warmup(self, batches: int | Literal["auto"] | None = None, timeout: float = 30.0) -> Warmup:
        """Start, and wait until `batches` (by default a full queue) stand ready or the timeout passes.

        "auto" waits for the first one and, only if that took longer than a blink to make, for a full queue.
        Nothing is lost either way. A fault in the data is raised by the `next` that meets it. Without
        batches, time or workers it is off, and nothing is started.
        """
        wanted, timeout = self._options.check_warmup(batches, timeout)
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
        """Stop every worker and close every file. Harmless at any time, and again. A later `next`
        starts anew, after the last batch that was handed out."""
        self._state = self._current()
        self._close()

    def _close(self) -> None:
        try:
            if self._feed is not None:
                self._feed.close()
        finally:
            self._feed = None
            if self._pipeline is not None:
                self._tally.keep(self._pipeline)
                self._pipeline.interrupted = (
                    True  # where Ctrl-C comes now, whoever goes on begins with this again
                )
                self._pipeline.close()
                self._finalizer.detach()  # not before: what is left running then is ended with the interpreter
                self.telemetry.left()
                self._tuned |= self._tuner.values() if self._tuner is not None else {}
                self._pipeline, self._tuner, self._quick = None, None, nothing_ready
            self._origin, self._last = None, Last()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch handed out: JSON, and a few hundred bytes for a lane.

        It has this rank's lanes only. To resume on another number of ranks, save all ranks' states
        and load them as a list.
        """
        return self._current().to_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continue after the batch at which `state` was taken; a list has the states of all ranks."""
        loaded = after(self._source, self._options, state)
        self._close()
        self._state, self._skip = loaded, loaded.skip
        self._exhausted = False
        self.telemetry.reset()
        self._tally = Tally.of(self.telemetry)

    def set_weights(self, weights: Mapping[str, float], step: int | None = None) -> None:
        """Change the weights of a mixture from the next batch on, or from the batch number `step` on.

        It is part of the state from now on. All ranks have to call it at the same batch. Batches that
        were prepared under the old weights are made anew.
        """
        if self._mixture is None:
            raise ConfigError(
                f"set_weights is for a Mixture, and this is {type(self._dataset).__name__}"
            )
        changed = reweighted(self._mixture, self._options, self._current(), weights, step)
        self._close()
        self._state = changed

    def as_torch_dataset(self, shift: bool = True) -> TorchDataset:
        """An `IterableDataset` of finished batches, for whoever takes one: see docs/integrations.md."""
        from penstock.torch_dataset import TorchDataset

        return TorchDataset(self, shift=shift)

    def _current(self) -> State:
        origin = self._latest()
        return self._state if origin is None else self._state.after(origin.position())

    def _latest(self) -> Origin | None:
        """Of the last batch that was handed out."""
        return self._last.origin or self._origin

    def _fresh_state(self, lanes: int, first: int, batch: int, weights: Schedule = ()) -> State:
        if self._mixture is not None and not weights:
            weights = ((0, self._mixture.mixture.weights),)
        options, skip = self._options, self._skip
        return anew(
            self._source, options, lanes=lanes, first=first, batch=batch, skip=skip, weights=weights
        )

    # Watching

    def queue_depth(self) -> int:
        """Batches that stand ready."""
        return self._pipeline.depth if self._pipeline is not None else 0

    def stats(self) -> Stats:
        """What has been done so far."""
        waited = None if self._feed is None else self._feed.told()
        return self._tally.stats(self._pipeline, self.telemetry, self._options.queue_bytes, waited)

    def pause(self, name: str) -> AbstractContextManager[None]:
        """`with loader.pause("eval"):` keeps evaluation, a checkpoint and the like apart from the run's own time."""
        return self.telemetry.pause(name)

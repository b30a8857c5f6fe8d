"""AsyncDataLoader: batches that are ready before they are asked for.

In:    a dataset and how to run it.
Out:   batches; the state of the last one handed out; counts.
Where: everything here runs on the trainer's thread. What it starts lives in `feed/`.
State: the position after the last batch that was handed out, wherever read-ahead stands.
"""

from __future__ import annotations

import importlib.util
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from penstock.config import current_shard, default_workers, one_of, whole_number
from penstock.dataset import TextDataset
from penstock.encode.batch import Batch, Position
from penstock.encode.window import Place
from penstock.errors import ConfigError, MissingExtra, StateMismatch
from penstock.feed.agree import RankAgreement
from penstock.pipeline import Pipeline, RunSettings, StreamSettings
from penstock.state import State, parse
from penstock.stats import Stats, Tally, Warmup
from penstock.types import MiB, Shard

MEMORY_LIMIT = 1024 * MiB


class AsyncDataLoader:
    """Streams a dataset as batches, prepared by threads in the background.

    Iterate over it, or call `next_batch`. It is a context manager; without one, `shutdown` ends
    its threads, as do garbage collection and the end of the interpreter.
    """

    def __init__(
        self,
        dataset: TextDataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        n_workers: int | None = None,
        prefetch_size: int = 8,
        device: str | None = None,
        *,
        shard: Shard | None = None,
        lanes: int | None = None,
        epochs: int | None = None,
        drop_last: bool | None = None,
        output: Literal["auto", "torch", "numpy"] = "auto",
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        """Set a loader up. Nothing runs until it is entered, started, warmed or asked for a batch.

        shuffle: reorder chunks and the documents of each window, anew in each epoch.
        n_workers: threads that read and tokenize; None: this rank's share of the cores; 0: no
            threads, everything happens in `next`. Never changes the stream.
        prefetch_size: batches kept ready. More hide longer hiccups and take memory.
        shard: this reader's part, by default this rank's. One that is given stands alone: ranks
            then need not get equally many batches.
        lanes: independent sequences, dealt to ranks. A checkpoint loads on every world size that
            divides them. Default: the world size of the first start. More cost memory: each lane
            has a window of its own.
        epochs: None for an endless stream, or how many passes to make.
        drop_last: whether a finite stream ends with its last full batch. With several ranks it must.
        memory_limit: bytes that read-ahead and queue may take; a single chunk is always let in.
        """
        if not isinstance(dataset, TextDataset):
            raise ConfigError(f"dataset: needs a TextDataset, not {type(dataset).__name__}")
        if not isinstance(shard, Shard | None):
            raise ConfigError(f"shard={shard!r}: needs a Shard(mod, rem)")
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle={shuffle!r}: needs True or False")
        if device not in (None, "cpu"):
            raise ConfigError(f"device={device!r}: batches are made on the CPU; move them with batch.inputs.to(…)")
        one_of("output", output, ("auto", "torch", "numpy"))
        self._dataset = dataset
        self._batch_size = whole_number("batch_size", batch_size, 1)
        self._shuffle = shuffle
        self._seed = whole_number("seed", seed, 0)
        self._n_workers = default_workers() if n_workers is None else whole_number("n_workers", n_workers, 0)
        self._prefetch_size = whole_number("prefetch_size", prefetch_size, 1)
        self._alone = shard is not None
        self._shard = shard or current_shard()
        self._lanes_asked = None if lanes is None else whole_number("lanes", lanes, 1)
        self._epochs = None if epochs is None else whole_number("epochs", epochs, 1)
        self._drop_last = self._choose_drop_last(drop_last)
        self._torch = self._choose_output(output)
        self._read_ahead = whole_number("memory_limit", memory_limit, 1) - self._queue_bytes()
        if self._read_ahead <= 0:
            raise ConfigError(
                f"memory_limit={memory_limit} does not hold the {prefetch_size} batches of the queue, which take "
                f"{self._queue_bytes()} bytes. Raise it, or lower prefetch_size or batch_size."
            )
        self._pipeline: Pipeline | None = None
        self._finalizer: Any = None
        self._agreement: RankAgreement | None = None
        self._exhausted = False
        self._tally = Tally()
        self._position: Callable[[], Position] | None = None
        self._skip = dataset.read.skip
        self._state = self._fresh_state(
            self._fitting(self._lanes_asked or self._shard.mod, ConfigError), first=0, batch=0
        )

    # Iterating

    def __iter__(self) -> Self:
        if self._exhausted:
            # Like any loader: the next `for` is the next pass, with its own order.
            assert self._epochs is not None
            ended = self._current()
            self._close()
            self._state = self._fresh_state(ended.lanes, ended.first + self._epochs, ended.batch)
            self._exhausted = False
        return self

    def __next__(self) -> Batch:
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def next_batch(self, timeout: float | None = None) -> Batch | None:
        """The next batch, or None at the end of a finite stream. Raises `LoaderTimeout` after `timeout` s.

        Without threads (`n_workers=0`) the batch is made here and now, however long that takes.
        """
        begun = time.perf_counter()
        if self._exhausted:
            return None
        if self._pipeline is not None and self._pipeline.interrupted:
            self.shutdown()
        if self._pipeline is None:
            self.start()
        batch = self._take(timeout) if self._agreement is None else self._agreement.next(lambda: self._take(timeout))
        now = time.perf_counter()
        if batch is None:
            self._exhausted = True
            self._tally.took(begun, now, None)
            return None
        self._position = batch.locate()
        if self._torch:
            batch.to_torch()
        self._tally.took(begun, now, batch.tokens)
        return batch

    def _take(self, timeout: float | None) -> Batch | None:
        assert self._pipeline is not None
        return self._pipeline.next(timeout)

    # Starting and stopping

    def start(self) -> Self:
        """Start the threads, if they do not run yet."""
        if self._pipeline is not None:
            return self
        if self._needs_agreement() and self._agreement is None:
            self._agreement = RankAgreement(self._shard)
        state, dataset = self._state, self._dataset
        pipeline = Pipeline(
            files=dataset.files,
            tokenizer=dataset.tokenizer,
            read=replace(dataset.read, skip=self._skip),
            stream=StreamSettings(
                seq_len=dataset.seq_len,
                packing=dataset.packing,
                shuffle=self._shuffle,
                seed=self._seed,
                lanes=state.lanes,
                window_chunks=dataset.shuffle_chunks,
                window_bytes=dataset.shuffle_bytes,
                extras=dataset.positions,
            ),
            run=RunSettings(
                batch_size=self._batch_size,
                shard=self._shard,
                n_workers=self._n_workers,
                prefetch_size=self._prefetch_size,
                doc_batch=dataset.doc_batch,
                read_ahead_bytes=self._read_ahead,
                drop_last=self._drop_last,
                end_epoch=None if self._epochs is None else state.first + self._epochs,
                tensors=self._torch,
                quarantine=dataset.quarantine,
            ),
            places=state.places,
            row=state.row,
            batch=state.batch,
            state=_StateMaker(state),
        )
        self._pipeline = pipeline
        # The threads know the pipeline and not the loader, so a loader that nobody holds any more
        # is collected, and its threads end with it.
        self._finalizer = weakref.finalize(self, pipeline.close)
        return self

    def warmup(self, batches: int | None = None, timeout: float = 30.0) -> Warmup:
        """Start, and wait until `batches` (by default a full queue) stand ready or the timeout passes.

        Nothing is lost either way. A fault in the data is raised by the `next` that meets it.
        """
        batches = self._prefetch_size if batches is None else batches
        if batches < 0:
            raise ConfigError(f"batches={batches}: needs a whole number, at least 0")
        begun = time.perf_counter()
        self.start()
        assert self._pipeline is not None
        filled = self._pipeline.warm(batches, timeout) if timeout > 0 and not self._exhausted else self._pipeline.depth
        return Warmup(batches, min(filled, batches), 1e3 * (time.perf_counter() - begun))

    def shutdown(self) -> None:
        """Stop every thread and close every file. Harmless at any time, and again. A later `next`
        starts anew, after the last batch that was handed out."""
        self._state = self._current()
        self._close()

    def _close(self) -> None:
        if self._pipeline is not None:
            self._finalizer.detach()
            self._tally.keep(self._pipeline)
            self._pipeline.close()
            self._pipeline = None
        self._position = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        loaded = parse(state)
        self._fitting(loaded.lanes, StateMismatch)
        if self._lanes_asked not in (None, loaded.lanes):
            raise StateMismatch(
                f"lanes was {loaded.lanes} when the state was saved, and is {self._lanes_asked}. "
                "Leave lanes out to take it from the state."
            )
        loaded.require(stream=self._stream_id(), data=self._dataset.data_id(), tokenizer=self._dataset.tokenizer_id())
        if self._epochs is not None and any(p.epoch > loaded.first + self._epochs for p in loaded.places.values()):
            raise StateMismatch(f"the state is past the end of a stream of epochs={self._epochs}")
        own = loaded.for_shard(self._own_lanes(loaded.lanes))
        self._close()
        self._skip = self._dataset.read.skip | own.skip
        self._state = replace(own, skip=self._skip)
        self._exhausted = False
        self._tally = Tally()

    def _current(self) -> State:
        return self._state if self._position is None else _advance(self._state, self._position())

    def _fresh_state(self, lanes: int, first: int, batch: int) -> State:
        return State(
            row=0,
            batch=batch,
            first=first,
            lanes=lanes,
            places={lane: Place(epoch=first) for lane in self._own_lanes(lanes)},
            stream=self._stream_id(),
            data=self._dataset.data_id(),
            tokenizer=self._dataset.tokenizer_id(),
            skip=self._skip,
        )

    def _stream_id(self) -> dict[str, Any]:
        return self._dataset.settings_id() | {"shuffle": self._shuffle, "seed": self._seed}

    def _own_lanes(self, lanes: int) -> list[int]:
        return list(range(self._shard.rem, lanes, self._shard.mod))

    # Watching

    def queue_depth(self) -> int:
        """Batches that stand ready."""
        return self._pipeline.depth if self._pipeline is not None else 0

    def stats(self) -> Stats:
        """What has been done so far."""
        return self._tally.stats(self._pipeline)

    # Checks

    def _choose_drop_last(self, asked: bool | None) -> bool:
        several = self._shard.mod > 1 and not self._alone
        if asked is None:
            return several
        if several and not asked and self._epochs is not None:
            raise ConfigError(
                f"drop_last=False with epochs={self._epochs} on {self._shard.mod} ranks: their last batches would "
                "differ in number and size, and a rank without one would leave the others waiting. Use drop_last=True."
            )
        return asked

    def _choose_output(self, output: str) -> bool:
        installed = importlib.util.find_spec("torch") is not None
        if output == "torch" and not installed:
            raise MissingExtra("torch", "output='torch'", "torch")
        return installed if output == "auto" else output == "torch"

    def _queue_bytes(self) -> int:
        """The queue's batches and the one in hand: inputs and targets of 8 bytes each."""
        return (self._prefetch_size + 1) * self._batch_size * self._dataset.seq_len * 8 * 2

    def _needs_agreement(self) -> bool:
        return self._epochs is not None and self._shard.mod > 1 and not self._alone

    def _fitting(self, lanes: int, error: type[ConfigError | StateMismatch]) -> int:
        """Lanes that this number of ranks can share."""
        world = self._shard.mod
        if lanes % world:
            fitting = [n for n in range(1, lanes + 1) if lanes % n == 0]
            raise error(
                f"{world} ranks cannot share {lanes} lanes evenly: world sizes that would work are "
                f"{', '.join(map(str, fitting))}. To grow, start with lanes=… a multiple of the largest size."
            )
        return lanes


@dataclass(frozen=True, slots=True)
class _StateMaker:
    """Makes the state of a batch, without holding on to the loader."""

    start: State

    def __call__(self, position: Position) -> dict[str, Any]:
        return _advance(self.start, position).to_dict()


def _advance(state: State, position: Position) -> State:
    return state.at(position.row, position.batch, position.places)

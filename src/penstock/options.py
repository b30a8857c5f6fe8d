"""How a loader runs: its arguments, checked against each other and against the data.

In:    what the user gave.
Out:   `Options`, of which every value fits; the `Run` that they make of a state.
Where: the thread that creates a loader.
State: none.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config import current_shard, default_workers, one_of, whole_number
from penstock.errors import ConfigError, MissingExtra
from penstock.feed.affinity import resolve
from penstock.sources.source import Run, Source
from penstock.state import State, StateMaker
from penstock.types import Address, MiB, Shard
from penstock.watch.spans import Clock, Quiet

MEMORY_LIMIT = 1024 * MiB

Workers = Literal["thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `AsyncDataLoader` for what they mean."""

    batch_size: int
    shuffle: bool
    seed: int
    n_workers: int
    workers: Workers
    restart_workers: bool
    cpus: frozenset[int] | None
    prefetch_size: int
    device: str | None
    device_prefetch: int
    device_preprocess: Callable[[Any], Any] | None
    shard: Shard
    alone: bool
    lanes: int | None
    epochs: int | None
    drop_last: bool
    tensors: bool
    memory_limit: int
    row_bytes: int
    """What a row takes in the queue; 0 where that is not known beforehand."""
    queue_bytes: int
    """What the queue, the batch in hand and the way to the device are expected to take."""
    read_ahead_bytes: int
    warmup_batches: int | Literal["auto"]
    warmup_timeout: float
    report_docs: int

    def must_agree(self, even: bool) -> bool:
        """Whether ranks have to agree on the end of the stream: it ends, and not for all of them at once by itself."""
        return self.epochs is not None and self.shard.mod > 1 and not self.alone and not even

    def batches(self, length: int | None) -> int:
        """Batches of one pass over so many rows or samples."""
        if length is None or self.epochs is None:
            why = (
                "an endless stream"
                if self.epochs is None
                else "a stream whose length is not known beforehand"
            )
            raise TypeError(f"{why} has no len()")
        from penstock.sources.indexed import steps

        return steps(
            length,
            self.epochs,
            self.batch_size,
            self.shard,
            alone=self.alone,
            drop_last=self.drop_last,
        )

    def run(self, state: State, skip: frozenset[Address], clock: Clock | None = None) -> Run:
        """A run with these options, from a state on."""
        return Run(
            shuffle=self.shuffle,
            seed=self.seed,
            lanes=state.lanes,
            skip=skip,
            weights=state.weights,
            shard=self.shard,
            alone=self.alone,
            batch_size=self.batch_size,
            n_workers=self.n_workers,
            prefetch_size=self.prefetch_size,
            queue_bytes=self.queue_bytes,
            read_ahead_bytes=self.read_ahead_bytes,
            drop_last=self.drop_last,
            first_epoch=state.first,
            end_epoch=None if self.epochs is None else state.first + self.epochs,
            tensors=self.tensors,
            narrow=self.device is not None,
            report_docs=self.report_docs,
            places=state.places,
            source=state.source,
            row=state.row,
            batch=state.batch,
            state=StateMaker(state),
            clock=clock or Quiet(),
        )


def check(
    source: Source,
    *,
    batch_size: int,
    shuffle: bool | None,
    seed: int,
    n_workers: int | None,
    prefetch_size: int,
    device: str | None,
    shard: Shard | None,
    lanes: int | None,
    epochs: int | None,
    drop_last: bool | None,
    output: str,
    memory_limit: int | None,
    workers: Workers,
    restart_workers: bool,
    cpus: Iterable[int] | None,
    numa_node: int | None,
    device_prefetch: int,
    device_preprocess: Callable[[Any], Any] | None,
    warmup_batches: int | Literal["auto"],
    warmup_timeout: float,
    report_docs: int,
) -> Options:
    """The options that these arguments make, or an error that names the one that does not fit."""
    if not isinstance(shard, Shard | None):
        raise ConfigError(f"shard={shard!r}: needs a Shard(mod, rem)")
    for name, flag in (
        ("shuffle", shuffle),
        ("drop_last", drop_last),
        ("restart_workers", restart_workers),
    ):
        if not isinstance(flag, bool | None):
            raise ConfigError(f"{name}={flag!r}: needs True or False")
    one_of("output", output, ("auto", "torch", "numpy"))
    one_of("workers", workers, ("thread", "process"))
    device = _device(device, output)
    if device_preprocess is not None and device is None:
        raise ConfigError(
            "device_preprocess=… runs on the way to a device: it needs device='cuda' or the like"
        )
    alone, shard = shard is not None, shard or current_shard()
    epochs = None if epochs is None else whole_number("epochs", epochs, 1)
    chosen = resolve(cpus, numa_node)
    if n_workers is None:
        n_workers = default_workers() if chosen is None else min(default_workers(), len(chosen))
    batch_size = whole_number("batch_size", batch_size, 1)
    prefetch_size = whole_number("prefetch_size", prefetch_size, 1)
    if warmup_batches != "auto":
        warmup_batches = whole_number("warmup_batches", warmup_batches, 0)
    device_prefetch = whole_number("device_prefetch", device_prefetch, 1)
    memory_limit = (
        MEMORY_LIMIT if memory_limit is None else whole_number("memory_limit", memory_limit, 1)
    )
    ready = max(prefetch_size, 0 if warmup_batches == "auto" else warmup_batches) + 1
    on_the_way = device_prefetch + 1 if device is not None else 0
    queue_bytes = (ready + on_the_way) * batch_size * source.row_bytes()
    if queue_bytes >= memory_limit:
        raise ConfigError(
            f"memory_limit={memory_limit} does not hold the {ready + on_the_way} batches of the queue and beyond, which "
            f"take {queue_bytes} bytes. Raise it, or lower prefetch_size or batch_size."
        )
    return Options(
        batch_size=batch_size,
        shuffle=source.shuffles if shuffle is None else shuffle,
        seed=whole_number("seed", seed, 0),
        n_workers=whole_number("n_workers", n_workers, 0),
        workers=workers,
        restart_workers=restart_workers,
        cpus=chosen,
        prefetch_size=prefetch_size,
        device=device,
        device_prefetch=device_prefetch,
        device_preprocess=device_preprocess,
        shard=shard,
        alone=alone,
        lanes=None if lanes is None else whole_number("lanes", lanes, 1),
        epochs=epochs,
        drop_last=_drop_last(drop_last, shard, alone, epochs, source.even),
        tensors=_tensors(output),
        memory_limit=memory_limit,
        row_bytes=source.row_bytes(),
        # Where a batch's size is not known beforehand, queue and read-ahead get half each.
        queue_bytes=queue_bytes or memory_limit // 2,
        read_ahead_bytes=memory_limit - (queue_bytes or memory_limit // 2),
        warmup_batches=warmup_batches,
        warmup_timeout=_seconds("warmup_timeout", warmup_timeout),
        report_docs=whole_number("report_docs", report_docs, 0),
    )


def check_autotune(autotune: Any, measured: bool) -> bool:
    if not isinstance(autotune, bool):
        raise ConfigError(f"autotune={autotune!r}: needs True or False")
    if autotune and not measured:
        raise ConfigError("autotune=True follows what is measured: it needs telemetry=True")
    return autotune


def check_warmup(
    options: Options, batches: Any, timeout: Any
) -> tuple[int | Literal["auto"], float]:
    """What a warmup at run time asks for, if it fits."""
    timeout = _seconds("timeout", timeout)
    if batches == "auto":
        return "auto", timeout
    batches = options.prefetch_size if batches is None else whole_number("batches", batches, 0)
    if options.row_bytes * options.batch_size * (batches + 1) > options.memory_limit:
        raise ConfigError(
            f"batches={batches}: they would take {options.row_bytes * options.batch_size * batches} bytes, more than "
            f"memory_limit={options.memory_limit} allows. Ask for fewer, or raise it."
        )
    return batches, timeout


def _device(device: Any, output: str) -> str | None:
    if device is None:
        return None
    name = str(device)
    if name.partition(":")[0] == "cpu":
        return None
    if output == "numpy":
        raise ConfigError(
            f"device={name!r} with output='numpy': numpy's arrays are in host memory. Leave one of them out."
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", f"device={name!r}", "torch")
    return name


def _seconds(name: str, value: Any) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= threading.TIMEOUT_MAX
    ):
        raise ConfigError(f"{name}={value!r}: needs a number of seconds, at least 0")
    return float(value)


def _tensors(output: str) -> bool:
    installed = importlib.util.find_spec("torch") is not None
    if output == "torch" and not installed:
        raise MissingExtra("torch", "output='torch'", "torch")
    return installed if output == "auto" else output == "torch"


def _drop_last(
    asked: bool | None, shard: Shard, alone: bool, epochs: int | None, even: bool
) -> bool:
    several = shard.mod > 1 and not alone
    if asked is None:
        return several
    if several and not asked and epochs is not None and not even:
        raise ConfigError(
            f"drop_last=False with epochs={epochs} on {shard.mod} ranks: their last batches would "
            "differ in number and size, and a rank without one would leave the others waiting. Use drop_last=True."
        )
    return asked

"""The options of a loader, resolved against its data, its rank and the machine."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config import current_shard, default_workers, whole_number
from penstock.errors import ConfigError, MissingExtra
from penstock.feed.affinity import resolve
from penstock.options import LoaderOptions
from penstock.sources.base import Source
from penstock.types import Shard

PREFETCH_AT_FIRST = 8
"""Where prefetch_size="auto" starts."""
DEVICE_PREFETCH = 1
"""Batches on the device beyond the one in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """See `LoaderOptions`; here nothing is left open."""

    batch_size: int
    shuffle: bool
    seed: int
    n_workers: int
    prefetch_size: int
    tunes: bool
    workers: Literal["thread", "process"]
    cpus: frozenset[int] | None
    device: str | None
    device_preprocess: Callable[[Any], Any] | None
    shard: Shard
    alone: bool
    lanes: int | None
    epochs: int | None
    drop_last: bool
    tensors: bool
    memory_limit: int
    row_bytes: int
    """Bytes of a row in the queue; 0 if that is not known in advance."""
    queue_bytes: int
    """Bytes that the queue, the batch in hand and the device copies are expected to take."""
    read_ahead_bytes: int
    warmup_batches: int | Literal["auto"]
    warmup_timeout: float

    def must_agree(self, even: bool) -> bool:
        """Return True if ranks have to agree on the end of the stream."""
        return self.epochs is not None and self.shard.mod > 1 and not self.alone and not even

    def batches(self, length: int | None) -> int:
        """Return the batches of one pass over this many rows or samples."""
        if length is None or self.epochs is None:
            kind = "an endless stream" if self.epochs is None else "a stream of unknown length"
            raise TypeError(f"{kind} has no len()")
        from penstock.sources.map_style import own_rows

        rows = own_rows(
            length * self.epochs,
            self.batch_size,
            self.shard,
            alone=self.alone,
            drop_last=self.drop_last,
        )
        return -(-rows // self.batch_size)

    def check_warmup(self, batches: Any, timeout: Any) -> tuple[int | Literal["auto"], float]:
        """Check the arguments of `warmup()`."""
        if (
            not isinstance(timeout, int | float)
            or isinstance(timeout, bool)
            or not 0 <= timeout <= threading.TIMEOUT_MAX
        ):
            raise ConfigError(f"timeout={timeout!r}: must be a number of seconds ≥ 0")
        if batches == "auto":
            return "auto", float(timeout)
        batches = self.prefetch_size if batches is None else whole_number("batches", batches, 0)
        if self.row_bytes * self.batch_size * (batches + 1) > self.memory_limit:
            raise ConfigError(
                f"batches={batches}: take {self.row_bytes * self.batch_size * batches} bytes, more "
                f"than memory_limit={self.memory_limit}. Ask for fewer, or raise it."
            )
        return batches, float(timeout)


def resolve_options(given: LoaderOptions, source: Source) -> RunOptions:
    """Fill in what the data, the rank and the machine decide, and check that all of it fits."""
    device = _device(given.device)
    if given.device_preprocess is not None and device is None:
        raise ConfigError("device_preprocess=…: needs device='cuda' or another device")
    alone, shard = given.shard is not None, given.shard or current_shard()
    cpus = resolve(given.cpus, given.numa_node)
    n_workers = given.n_workers
    if n_workers is None:
        n_workers = default_workers() if cpus is None else min(default_workers(), len(cpus))
    tunes = given.prefetch_size == "auto"
    prefetch = PREFETCH_AT_FIRST if given.prefetch_size == "auto" else given.prefetch_size
    warmup = 0 if given.warmup_batches == "auto" else given.warmup_batches
    batches = max(prefetch, warmup) + 1 + (DEVICE_PREFETCH + 1 if device is not None else 0)
    queue_bytes = batches * given.batch_size * source.row_bytes()
    if queue_bytes >= given.memory_limit:
        raise ConfigError(
            f"memory_limit={given.memory_limit}: the {batches} batches of the queue and beyond take "
            f"{queue_bytes} bytes. Raise it, or lower prefetch_size or batch_size."
        )
    # If a batch's size is not known in advance, queue and read-ahead get half each.
    queue_bytes = queue_bytes or given.memory_limit // 2
    return RunOptions(
        batch_size=given.batch_size,
        shuffle=source.shuffles if given.shuffle is None else given.shuffle,
        seed=given.seed,
        n_workers=n_workers,
        prefetch_size=prefetch,
        tunes=tunes,
        workers=given.workers,
        cpus=cpus,
        device=device,
        device_preprocess=given.device_preprocess,
        shard=shard,
        alone=alone,
        lanes=given.lanes,
        epochs=given.epochs,
        drop_last=_drop_last(given, shard, alone, source.even),
        tensors=importlib.util.find_spec("torch") is not None,
        memory_limit=given.memory_limit,
        row_bytes=source.row_bytes(),
        queue_bytes=queue_bytes,
        read_ahead_bytes=given.memory_limit - queue_bytes,
        warmup_batches=given.warmup_batches,
        warmup_timeout=given.warmup_timeout,
    )


def _device(device: Any) -> str | None:
    name = "cpu" if device is None else str(device)
    if name.partition(":")[0] == "cpu":
        return None
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", f"device={name!r}", "torch")
    return name


def _drop_last(given: LoaderOptions, shard: Shard, alone: bool, even: bool) -> bool:
    several = shard.mod > 1 and not alone
    if given.drop_last is None:
        return several
    if several and not given.drop_last and given.epochs is not None and not even:
        raise ConfigError(
            f"drop_last=False with epochs={given.epochs} on {shard.mod} ranks: their last batches "
            "would differ in number and size. Use drop_last=True."
        )
    return given.drop_last

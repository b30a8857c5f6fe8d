"""Resolve a loader's options against its data, its rank and the machine."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from penstock.config import current_shard, default_workers
from penstock.errors import ConfigError, missing_extra
from penstock.feed.affinity import resolve
from penstock.feed.warmup import check_arguments
from penstock.options import LoaderOptions
from penstock.sources.base import RunContext, Source
from penstock.types import Shard

PREFETCH_AT_FIRST = 8
"""Where prefetch_size="auto" starts."""
DEVICE_BATCHES = 3
"""Batches on the device: the one in use and two in flight."""


def resolve_options(given: LoaderOptions, source: Source) -> RunContext:
    """Fill in what the data, the rank and the machine decide, and check that all of it fits."""
    device = _device(given.device)
    if given.device_preprocess is not None and device is None:
        raise ConfigError("device_preprocess=…: needs device='cuda' or another device")
    alone, shard = given.shard is not None, given.shard or current_shard()
    cpus = resolve(given.cpus, given.numa_node)
    n_workers = given.n_workers
    if n_workers is None:
        n_workers = default_workers() if cpus is None else min(default_workers(), len(cpus))
    prefetch = PREFETCH_AT_FIRST if given.prefetch_size == "auto" else given.prefetch_size
    warmup = 0 if given.warmup_batches == "auto" else given.warmup_batches
    batches = max(prefetch, warmup) + 1 + (DEVICE_BATCHES if device is not None else 0)
    queue_bytes = batches * given.batch_size * source.row_bytes()
    if queue_bytes >= given.memory_limit:
        raise ConfigError(
            f"memory_limit={given.memory_limit}: the {batches} batches of the queue and beyond take "
            f"{queue_bytes} bytes. Raise it, or lower prefetch_size or batch_size."
        )
    # If a batch's size is not known beforehand, queue and read-ahead get half each.
    queue_bytes = queue_bytes or given.memory_limit // 2
    return RunContext(
        shuffle=source.shuffles if given.shuffle is None else given.shuffle,
        seed=given.seed,
        batch_size=given.batch_size,
        drop_last=_drop_last(given, shard, alone, source.even),
        epochs=given.epochs,
        shard=shard,
        alone=alone,
        n_workers=n_workers,
        workers=given.workers,
        cpus=cpus,
        prefetch_size=prefetch,
        row_bytes=source.row_bytes(),
        queue_bytes=queue_bytes,
        read_ahead_bytes=given.memory_limit - queue_bytes,
        tensors=importlib.util.find_spec("torch") is not None,
        device=device,
    )


def _device(device: Any) -> str | None:
    name = "cpu" if device is None else str(device)
    if name.partition(":")[0] == "cpu":
        return None
    if importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", f"device={name!r}", "torch")
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


def rows_of_pass(run: RunContext, length: int | None) -> int:
    """Return the rows or samples of one pass on this rank, if an epoch has this many in all."""
    if length is None or run.epochs is None:
        kind = "an endless stream" if run.epochs is None else "a stream of unknown length"
        raise TypeError(f"{kind} has no len()")
    from penstock.sources.map_style import own_rows

    return own_rows(length * run.epochs, run)


def check_warmup(
    run: RunContext, memory_limit: int, batches: Any, timeout: Any
) -> tuple[int | Literal["auto"], float]:
    """Check the arguments of `warmup()`."""
    wanted, timeout = check_arguments(run.prefetch_size if batches is None else batches, timeout)
    batch_bytes = run.row_bytes * run.batch_size
    if wanted != "auto" and batch_bytes * (wanted + 1) > memory_limit:
        raise ConfigError(
            f"batches={wanted}: take {batch_bytes * wanted} bytes, more than "
            f"memory_limit={memory_limit}. Ask for fewer, or raise it."
        )
    return wanted, timeout

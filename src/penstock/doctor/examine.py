"""Try a pipeline out before a run: how fast is each stage, how fast is all of it, and is that enough?

In:    a dataset, how it would be loaded, and how fast the trainer is.
Out:   a `Diagnosis`.
Where: the calling thread, with the workers and fetch threads of a run, which have all ended afterwards.
State: none. The user's cache is left alone: what is kept meanwhile is kept in a folder of its own.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from penstock.config import available_cores, one_of
from penstock.dataset import TextDataset
from penstock.doctor.advice import Recommended, Setup, recommend
from penstock.doctor.flow import Flow, drain
from penstock.doctor.trial import Alone, Trial
from penstock.doctor.what_if import Question, WhatIf, ask, with_cache
from penstock.errors import ConfigError
from penstock.loader import AsyncDataLoader
from penstock.types import Shard
from penstock.watch.attribution import advise, band
from penstock.watch.stage_timer import STAGES

GOOD = 0.05
"""Below this data wait a pipeline is fast enough."""
ALONE = 0.25
"""Each stage alone gets this part of the time that the whole gets."""
EXPLAINED = 0.33
"""A stage explains a rate that is at least this part of what the stage could give."""
SHORT = 0.85
"""From this part of the cores on, threads wait for one."""
PATIENCE_S = 30.0
"""How long a server that gives nothing is asked again, at most, unless the measurement itself takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What takes memory, in bytes."""

    queue_bytes: int
    window_bytes: int | None
    """The window that is packed and the next one."""
    read_ahead_bytes: int | None
    """Chunks under way or ready, at their most, while they are worked on."""
    limit_bytes: int
    """What queue and read-ahead may take together."""
    grown_bytes: int
    """How far the resident memory of this process grew while the whole pipeline ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found. None: does not apply to this data, or was not asked for."""

    listing_s: float | None
    """Listing the files and, meanwhile or before, loading the vocabulary."""
    files: int | None
    bytes: int | None
    alone: Alone | None
    """Each stage by itself; for text in files."""
    memory: Memory
    first_batch_s: float
    tokens_per_s: float
    """The highest rate that this machine can feed with these settings, from data that is not in the token cache."""
    limited_by: str
    """The stage that holds it back."""
    shares: Mapping[str, float]
    """Of the wait for batches, by stage; they add up to 1."""
    bad: Mapping[str, int]
    """Records left out, by reason."""
    wanted_tokens_per_s: float | None
    data_wait: float | None
    """What a trainer of that rate would wait, as a share of its time."""
    band: str | None
    advice: str
    """What to change; empty where nothing has to be."""
    recommended: Recommended
    what_if: WhatIf | None
    cores: int
    """That this process may use."""
    cores_used: float
    """That its threads kept busy while the whole pipeline ran."""
    load: float | None
    """How many threads wanted a core in the last minute, those of other programs included; None where nobody counts."""

    @property
    def cores_short(self) -> bool:
        """Whether threads had to wait for a core: their own stages are charged with that, not those that have it."""
        return self.cores_used > SHORT * self.cores or (self.load or 0.0) > self.cores

    @property
    def enough(self) -> bool:
        """Whether the trainer can be fed."""
        return self.data_wait is None or self.data_wait < GOOD

    @property
    def exit_code(self) -> int:
        """For scripts: 0 it can, 1 it cannot."""
        return 0 if self.enough else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        values["shares"], values["bad"] = dict(self.shares), dict(self.bad)
        values["recommended"]["lines"] = self.recommended.lines()
        if self.what_if is not None:
            values["what_if"]["apart_points"] = self.what_if.apart
        return values | {
            "cores_short": self.cores_short,
            "enough": self.enough,
            "exit_code": self.exit_code,
        }


def examine(
    dataset: Any,
    batch_size: int = 16,
    *,
    seconds: float = 5.0,
    tokens_per_second: float | None = None,
    what_if: Question | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Diagnosis:
    """Try a dataset out, stage by stage and then as a whole.

    seconds: how long the whole pipeline is run, and each side of a what-if; each stage alone gets a quarter
        of it. The whole, and what is compared with it, ends within a minute and twenty times this after the start,
        with an error if it must; a request of a stage alone, or to fill a cache, ends by the deadlines of `RemoteOptions`.
    tokens_per_second: what the trainer could consume.
    what_if: measure, besides, what would be gained with all tokens in the cache ("cached") or with no real data
        ("synthetic"), beside what the attribution says of it.
    say: called with what is tried next.
    options: as for `AsyncDataLoader`.
    """
    _check(seconds, tokens_per_second)
    one_of("what_if", what_if, (None, "cached", "synthetic"))
    options = {"shard": Shard(1, 0), **options}
    if options.get("prefetch_size") == "auto":
        del options["prefetch_size"]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before this adds to it
    by = monotonic() + 60 + 20 * seconds
    with tempfile.TemporaryDirectory(
        prefix="penstock-doctor-", ignore_cleanup_errors=True
    ) as folder:
        if what_if == "cached":
            with_cache(
                dataset, Path(folder)
            )  # what cannot be asked is said now, and not after a minute
        if isinstance(dataset, TextDataset):
            dataset = _apart(dataset, Path(folder), max(PATIENCE_S, 4 * seconds))
            options["epochs"] = None  # a part of the data, over and over if need be

        def make(data: Any) -> AsyncDataLoader:
            stand_in = data is not dataset and not isinstance(data, TextDataset)
            return AsyncDataLoader(data, batch_size, **(_plain(options) if stand_in else options))

        loader = make(dataset)
        alone = _try_alone(dataset, loader, ALONE * seconds, say)
        say("the whole pipeline")
        flow = drain(loader, seconds, by=by)
        found = None
        if what_if is not None:
            say(f"what if {what_if}")
            found = ask(
                what_if,
                dataset,
                make,
                flow,
                alone,
                Path(folder) / "tokens",
                seconds,
                by,
                tokens_per_second,
            )
    return _diagnose(dataset, loader, alone, flow, tokens_per_second, found, load)


def _check(seconds: Any, tokens_per_second: Any) -> None:
    for name, value in (("seconds", seconds), ("tokens_per_second", tokens_per_second)):
        if value is None and name == "tokens_per_second":
            continue
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise ConfigError(f"{name}={value!r}: needs a number above 0")


def _apart(dataset: TextDataset, folder: Path, patience_s: float) -> TextDataset:
    """The same data, with nothing of the token cache, and less patience with a server."""
    if dataset.outside is None:
        return dataset
    limits = dataset.outside.limits
    apart = copy.copy(dataset)
    apart.outside = replace(
        dataset.outside,
        limits=replace(limits, retry_budget=min(limits.retry_budget, patience_s)),
        folder=folder / "kept",
        cache_bytes=0,
    )
    return apart


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for data of ours that stands in for the user's: without what is done to samples of his own."""
    return {
        name: value
        for name, value in options.items()
        if name not in ("preprocess", "collate", "pad", "shuffle")
    }


def _try_alone(
    dataset: Any, loader: AsyncDataLoader, seconds: float, say: Callable[[str], None]
) -> Alone | None:
    if not isinstance(dataset, TextDataset):
        return None
    with Trial(dataset, loader.lay_open()[1], seconds) as trial:
        return trial.run(say)


def _diagnose(
    dataset: Any,
    loader: AsyncDataLoader,
    alone: Alone | None,
    flow: Flow,
    wanted: float | None,
    found: WhatIf | None,
    load: float | None,
) -> Diagnosis:
    setup = _setup(dataset, loader, flow)
    limited_by = _limit(alone, flow)
    data_wait = None if wanted is None else max(0.0, 1 - flow.tokens_per_s / wanted)
    enough = data_wait is None or data_wait < GOOD
    files = getattr(dataset, "files", None)
    listed = getattr(dataset, "listed", None)
    return Diagnosis(
        listing_s=None if listed is None else listed[1] - listed[0],
        files=None if files is None else len(files),
        bytes=None if files is None else sum(file.size for file in files),
        alone=alone,
        memory=_memory(setup, alone, flow, loader),
        first_batch_s=flow.first_batch_s,
        tokens_per_s=flow.tokens_per_s,
        limited_by=limited_by,
        shares=flow.shares(),
        bad=flow.stats.bad,
        wanted_tokens_per_s=wanted,
        data_wait=data_wait,
        band=None if data_wait is None else band(data_wait),
        advice="" if enough else advise(limited_by, flow.known),
        recommended=recommend(setup, alone, limited_by, wanted, enough),
        what_if=found,
        cores=available_cores(),
        cores_used=flow.cores_used,
        load=load,
    )


def _limit(alone: Alone | None, flow: Flow) -> str:
    """The stage that holds the whole back: the slowest alone, if that explains it, else the one that is waited for.

    Where cores are short, a thread that has little to do waits for its turn, and its stage is charged with that. So
    what was waited for is asked only where all of it is much slower than any stage alone.
    """
    waited_for = next((stage for stage in flow.shares() if stage in STAGES), "batch")
    if alone is None:
        return waited_for
    ceilings = alone.ceilings()
    # Stages that the same threads do one after the other share these threads.
    workers = ("decode", "tokenize") if alone.remote else ("fetch", "decode", "tokenize")
    groups = [workers, ("pack", "batch"), *([("fetch",)] if alone.remote else [])]
    costs = [
        {stage: 1 / ceilings[stage] for stage in group if stage in ceilings} for group in groups
    ]
    dearest = max(costs, key=lambda group: sum(group.values()))
    if flow.tokens_per_s * sum(dearest.values()) < EXPLAINED:
        return waited_for
    return max(dearest, key=lambda stage: dearest[stage])


def _setup(dataset: Any, loader: AsyncDataLoader, flow: Flow) -> Setup:
    source, run = loader.lay_open()
    tokens = max(1, flow.stats.tokens // max(1, flow.stats.batches))
    text = isinstance(dataset, TextDataset)
    return Setup(
        n_workers=run.n_workers,
        prefetch_size=run.prefetch_size,
        batch_tokens=tokens,
        batch_bytes=source.row_bytes() * run.batch_size
        or flow.stats.memory_estimate // run.prefetch_size,
        memory_limit=run.queue_bytes + run.read_ahead_bytes,
        window_chunks=dataset.options.shuffle_chunks if text and run.shuffle else 1,
        lanes=run.lanes,
        expansion=dataset.tokenizer.expansion if text else 1,
        cache=text and dataset.outside is not None and not dataset.fetches(),
    )


def _memory(setup: Setup, alone: Alone | None, flow: Flow, loader: AsyncDataLoader) -> Memory:
    window = ahead = None
    if alone is not None:
        window = int(2 * setup.lanes * setup.window_chunks * alone.token_chunk_bytes)
        limit = loader.lay_open()[1].read_ahead_bytes
        ahead = min(limit, int(flow.chunks_ahead * setup.expansion * alone.chunk_bytes))
    return Memory(
        queue_bytes=flow.stats.memory_estimate,
        window_bytes=window,
        read_ahead_bytes=ahead,
        limit_bytes=setup.memory_limit,
        grown_bytes=flow.peak_bytes,
    )

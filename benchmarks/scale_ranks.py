"""What one rank of many does, in a process of its own: list, plan, take a first batch, go on from a state.

In:    a case: the files, the ranks, which of them this is.
Out:   seconds, bytes and counts.
Where: a process that begins fresh for each case.
State: none.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import statistics
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

from common import BATCH_SIZE, SEQ_LEN
from rounds import process_memory, timed

GROUP_ROWS = 1000
"""Documents of a row group, where a file has as many."""


ROW_BYTES = 64


OWN_LANES = 64
"""Lanes that one rank may come to hold: of 4,096, on 64 ranks."""


FULL_WINDOW = 1000
"""The number of a window that is as large as windows get."""


HOSTS = 125


PER_HOST = 8
DEADLINE_S = 60.0


WORLD = HOSTS * PER_HOST


def rank(case: Mapping[str, Any]) -> dict[str, Any]:
    """One rank of a large run: list, plan, the first batch, a resume."""
    for name in (
        "penstock.sources.far",
        "penstock.sources.files",
        "penstock.encode.tokenizer",
        "penstock.loader",
    ):
        importlib.import_module(name)  # none of which is what is measured
    from penstock import AsyncDataLoader, Shard, TextDataset
    from penstock.order.plan import Plan

    ranks, number, seed, traced = case["ranks"], case["rank"], case["seed"], case["traced"]
    told: dict[str, Any] = {}
    gc.collect()
    if traced:
        tracemalloc.start()
    begun = time.perf_counter()
    data = TextDataset(case["url"], tokenizer="byte", seq_len=ROW_BYTES)
    told["list_s"] = time.perf_counter() - begun
    held = _traced() if traced else 0
    told["held"] = held / 1e6

    def plan() -> Plan:
        return Plan(files=data.files, lanes=ranks, shuffle=True, seed=seed)

    groups = plan().groups(number, 0)
    told["plan_ms"] = 1e3 * statistics.median(
        timed(lambda: plan().groups(number, 0)) for _ in range(5)
    )
    own = range(number, ranks, max(1, ranks // OWN_LANES))
    dealt = plan()
    told["lanes_ms"] = (
        1e3 * timed(lambda: [dealt.groups(lane, 0) for lane in own]) if len(own) > 1 else None
    )

    def loader() -> AsyncDataLoader:
        return AsyncDataLoader(data, 1, True, seed, 1, 1, shard=Shard(ranks, number), lanes=ranks)  # fmt: skip

    if traced:
        with loader() as before:  # what is imported with a first one is not what is measured
            next(before)
        held = _traced()
    told["window"] = [time.monotonic()]
    begun = time.perf_counter()
    with loader() as fresh:
        next(fresh)
        told["first_s"] = time.perf_counter() - begun
        told["window"].append(time.monotonic())
        told["refs"] = (_traced() - held) / 1e6 if traced else 0.0
        state = fresh.state_dict()
    if traced:
        return told
    whole = len(groups) > 1
    chunks = case["files"] * -(-case["rows"] // GROUP_ROWS) // ranks
    at = [0, int(0.8 * len(groups)), 0] if whole else [0, 0, int(0.8 * chunks)]
    place = [*at, FULL_WINDOW, 0, 0, 0]
    begun = time.perf_counter()
    resumed = loader()
    resumed.load_state_dict({**state, "at": {str(number): place}})
    next(resumed)
    told["resume_s"] = time.perf_counter() - begun
    resumed.shutdown()
    told["state"] = len(json.dumps(state))
    text = json.dumps([{**state, "at": {str(lane): place}} for lane in range(ranks)])
    told["states"] = len(text)
    last = loader()
    told["load_s"] = timed(lambda: last.load_state_dict(json.loads(text)))
    return told | {"peak": process_memory()["peak"] / 1e6}


def _traced() -> int:
    """Bytes that Python's own objects take."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def list_only(case: Mapping[str, Any]) -> dict[str, Any]:
    """A listing that nothing is kept of."""
    importlib.import_module("penstock.sources.far")
    importlib.import_module("penstock.encode.tokenizer")
    from penstock.sources.far import pack, unpack

    from penstock import TextDataset

    begun = time.perf_counter()
    data = TextDataset(case["url"], tokenizer="byte", seq_len=ROW_BYTES)
    told: dict[str, Any] = {"cold_s": time.perf_counter() - begun}
    packed = pack(data.files)
    return told | {
        "packed": len(packed), "pack_s": timed(lambda: pack(data.files)), "unpack_s": timed(lambda: unpack(packed)),
    }  # fmt: skip


def host_rank(case: Mapping[str, Any]) -> dict[str, Any]:
    """A rank of a host: until it asks for nothing more. With `stage`, so many bytes of tokens are put on disk first."""
    from penstock import AsyncDataLoader, Shard, TextDataset
    from penstock.tools.stage import stage

    meet = case.get("meet")
    if meet:
        import torch.distributed as distributed

        distributed.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=case["rank"], world_size=case["world"]
        )
    begun = time.perf_counter()
    data = TextDataset(
        case["url"],
        tokenizer=case["tokenizer"],
        seq_len=SEQ_LEN,
        remote={"share_listing": bool(meet)},
    )
    loader = AsyncDataLoader(
        data,
        BATCH_SIZE,
        True,
        7,
        1,
        shard=Shard(WORLD, case["rank"]),
        lanes=WORLD,
    )
    if case.get("stage"):
        done = stage(loader, case["stage"])
        told = {"chunks": done.chunks, "M tokens": done.bytes / data.tokenizer.dtype.itemsize / 1e6}
        return {
            "first_s": time.perf_counter() - begun,
            "staged": told,
            "peak": process_memory()["peak"] / 1e6,
        }
    with loader:
        next(loader)
        first = time.perf_counter() - begun
        wait_until_still(loader, case["still_s"])
        stats = loader.stats()
    if meet:
        distributed.destroy_process_group()
    return {
        "first_s": first, "requests": stats.requests, "bytes": stats.fetched_bytes, "peak": process_memory()["peak"] / 1e6,
    }  # fmt: skip


def wait_until_still(loader: Any, still_s: float) -> None:
    """Until a loader that nobody takes batches from has asked for nothing for a while."""
    before, since = -1, time.monotonic()
    end = since + DEADLINE_S
    while time.monotonic() - since < still_s:
        if time.monotonic() > end:
            raise RuntimeError(f"a rank was still asking after {DEADLINE_S:.0f} s")
        now = loader.stats().requests
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.05)

"""Write the activity of all threads as a trace for Perfetto (https://ui.perfetto.dev).

Threads append their segments to a bounded log, and the trainer appends its steps; the log is
converted at the end. A segment costs a microsecond or two while recording, and nothing otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from penstock.config import write_atomically
from penstock.watch.heartbeat import plain
from penstock.watch.stage_timer import IDLE, OUT, RANKS, WAIT, TaskTimeline, ThreadTimeline
from penstock.watch.telemetry import Step, Telemetry

log = logging.getLogger("penstock")

MAX_SEGMENTS = 200_000
"""The number of latest segments to keep, at 200 bytes each in memory and about as many on disk."""
NAMES = {WAIT: "waits for input", OUT: "waits for room", RANKS: "waits for other ranks"}


@contextmanager
def write_trace(
    path: str | os.PathLike[str], telemetry: Telemetry, max_segments: int = MAX_SEGMENTS
) -> Iterator[None]:
    """Record a loader during a `with` block, then write a trace in Chrome's JSON format to `path`.

    telemetry: that of the loader. max_segments: the number of latest segments to keep.
    """
    recorded: deque[tuple[str, Any]] = deque(maxlen=max_segments)
    began = time.time(), perf_counter()
    telemetry.clock.record(recorded)
    try:
        yield
    finally:
        telemetry.clock.record(None)
        if len(recorded) == max_segments:
            log.warning("the trace has only the latest %d segments", max_segments)
        # Times are relative to a whole second, because microseconds since 1970 exceed a double.
        base_s = int(began[0]) - 1
        events = _draw(list(recorded), began[1] - (began[0] - base_s))
        trace = {"traceEvents": events, "baseTimeNanoseconds": base_s * 10**9}
        write_atomically(Path(path).expanduser(), json.dumps(trace, separators=(",", ":")))


def _draw(recorded: list[tuple[str, Any]], zero: float) -> list[dict[str, Any]]:
    """Return events of the Trace Event Format, in microseconds since `zero`."""
    trainers = {row for row, each in recorded if isinstance(each, Step)}
    rows = sorted({row for row, _ in recorded}, key=lambda row: (row not in trainers, row))
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, row: str, at: float, args: dict[str, Any], **more: Any) -> None:
        place = {"ts": round(1e6 * (at - zero), 3), "pid": os.getpid(), "tid": rows.index(row)}
        events.append({"ph": kind, "name": name, **place, "args": args, **more})

    def span(name: str, row: str, begin: float, end: float, args: dict[str, Any]) -> None:
        length = round(1e6 * (end - zero), 3) - round(1e6 * (begin - zero), 3)
        add("X", name, row, begin, args, dur=max(0.0, round(length, 3)))

    for row in rows:
        named = f"trainer ({row})" if row in trainers else row
        add("M", "thread_name", row, zero, {"name": named})
    for row, each in recorded:
        what: Any = getattr(each, "what", None)
        if isinstance(each, Step):
            got, end = each.begin + each.wait, each.begin + each.wall + each.paused
            charged = {f"{stage}_ms": round(1e3 * s, 3) for stage, s in each.charges.items()}
            span("next", row, each.begin, got, charged)
            span("step", row, got, end, {"tokens": each.tokens})
        elif each.stage == "queue":
            add("C", "batches ready", row, each.begin, {"ready": what})
        elif each.stage == "pause":
            span(str(what["name"]), row, each.begin - what["seconds"], each.begin, {})
        elif isinstance(what, dict):
            add("i", each.stage, row, each.begin, plain(what), s="p")
        elif each.stage != IDLE:  # shown as a gap
            span(NAMES.get(each.stage, each.stage), row, each.begin, each.end, _about(what))
    return events


def _about(what: Any) -> dict[str, str]:
    """Return the address of the data, or the target of a wait."""
    if isinstance(what, ThreadTimeline):
        return {"for": what.name}
    if isinstance(what, TaskTimeline):
        found = next((s.what for s in what.done if s.what is not None), None)
        return {} if found is None else {"for": str(found)[:500]}
    return {} if what is None else {"what": str(what)[:500]}

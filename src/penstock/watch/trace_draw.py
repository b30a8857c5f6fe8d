"""What was recorded, drawn as a Chrome trace.

In:    segments, steps, queue depths and events (see `trace`).
Out:   events of the Trace Event Format: spans, arrows, counters, marks.
Where: the thread that saves a trace.
State: none.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.watch.stage_timer import (
    OUT,
    RANKS,
    STAGES,
    WAIT,
    Segment,
    TaskTimeline,
    ThreadTimeline,
)

if TYPE_CHECKING:
    from penstock.watch.trace import Axis, Log

NAMES = {WAIT: "waits for input", OUT: "waits for room", RANKS: "waits for other ranks"}
TICK_US = 0.001
"""The smallest step of a trace. An arrow that begins so long before the end of a span still belongs to it."""
ORDER = ("penstock-producer", "penstock-worker", "penstock-fetch")
"""Threads below the trainer's, from the queue backwards."""


class _Span(NamedTuple):
    """Something that takes time on a row."""

    begin: float
    end: float
    name: str
    kind: str
    args: dict[str, Any]


class Drawing:
    """What was recorded, as events of a trace."""

    def __init__(self, kept: Log, axis: Axis, here: str, end: float) -> None:
        self._kept, self._axis, self._end = kept, axis, end
        self._segments = list(kept)
        self._pid = os.getpid()
        # Whoever waits for the producer is the trainer, whichever thread has begun to record.
        waits = (
            label
            for label, s in self._segments
            if s.stage == WAIT and isinstance(s.what, ThreadTimeline)
        )
        self._trainer = next(waits, here)
        labels = {label for label, _ in self._segments} | {self._trainer}
        self._rows = {label: i for i, label in enumerate(sorted(labels, key=self._rank), 1)}
        self._pauses = [event for event in list(kept.events) if event[2] == "pause"]

    def _rank(self, label: str) -> tuple[int, str]:
        place = next((i for i, name in enumerate(ORDER) if label.startswith(name)), len(ORDER))
        return (-1 if label == self._trainer else place), label

    def trace(self) -> dict[str, Any]:
        """The whole file."""
        kept = self._kept
        told = {
            "recorded": "penstock", "steps": len(kept.steps), "segments": len(self._segments), "lost": kept.lost,
            "steps_missed": kept.missed, "samples_failed": kept.unread, "seconds": round(self._end - self._axis.began, 6),
        }  # fmt: skip
        events = [*self._names(), *self._spans(), *self._arrows(), *self._queues(), *self._marks()]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._axis.base_ns,
            "otherData": told,
        }

    def _event(self, kind: str, name: str, at: float, row: int, **more: Any) -> dict[str, Any]:
        return {
            "ph": kind,
            "name": name,
            "ts": self._axis.us(at),
            "pid": self._pid,
            "tid": row,
            **more,
        }

    def _names(self) -> Iterator[dict[str, Any]]:
        began = self._axis.began
        yield self._event("M", "process_name", began, 0, args={"name": "penstock"})
        yield self._event("M", "process_sort_index", began, 0, args={"sort_index": -1})
        for label, row in self._rows.items():
            name = f"trainer ({label})" if label == self._trainer else label
            yield self._event("M", "thread_name", began, row, args={"name": name})
            yield self._event("M", "thread_sort_index", began, row, args={"sort_index": row})

    def _spans(self) -> Iterator[dict[str, Any]]:
        rows: dict[str, list[_Span]] = {label: [] for label in self._rows}
        for label, segment in self._segments:
            kind = "stage" if segment.stage in STAGES else "wait"
            name = NAMES.get(segment.stage, segment.stage)
            rows[label].append(_Span(segment.begin, segment.end, name, kind, _about(segment)))
        rows[self._trainer] += self._steps()
        for label, spans in rows.items():
            for span in _nested(spans, self._axis.began):
                begun = self._event(
                    "X", span.name, span.begin, self._rows[label], cat=span.kind, args=span.args
                )
                yield begun | {"dur": max(0.0, round(self._axis.us(span.end) - begun["ts"], 3))}

    def _steps(self) -> Iterator[_Span]:
        """Calls of `next`, what the trainer did after each, and pauses in that."""
        steps = sorted(self._kept.steps, key=lambda step: step.begin)
        ended = [self._axis.of_event(event) for event in self._pauses]
        pauses = sorted(
            (end - event[3]["seconds"], end, event[3]["name"])
            for end, event in zip(ended, self._pauses, strict=True)
        )
        for i, step in enumerate(steps):
            got = step.begin + step.wait
            charged = {f"{stage}_ms": round(1e3 * s, 3) for stage, s in step.charges.items()}
            yield _Span(step.begin, got, "next", "step", {"tokens": step.tokens, **charged})
            limit = steps[i + 1].begin if i + 1 < len(steps) else self._end
            paused = sum(end - begin for begin, end, _ in pauses if got <= begin < limit)
            end = min(limit, step.begin + step.wall + paused) if step.wall else limit
            yield _Span(got, end, "step", "step", {"tokens": step.tokens})
        for begin, end, name in pauses:
            yield _Span(begin, end, str(name), "pause", {})

    def _arrows(self) -> Iterator[dict[str, Any]]:
        """From the work that somebody waited for to the end of that wait."""
        where = {id(segment): label for label, segment in self._segments}
        made: dict[str, list[Segment]] = {}
        for label, segment in self._segments:
            if segment.stage in STAGES:
                made.setdefault(label, []).append(segment)
        number = 0
        for label, wait in self._segments:
            work = _ended(wait, made)
            if (
                work is None
                or id(work) not in where
                or work.begin < self._axis.began
                or wait.begin < self._axis.began
            ):
                continue
            number += 1
            more = {"cat": "wait", "id": number}
            begun = self._event("s", "ready", work.end, self._rows[where[id(work)]], **more)
            ended = self._event("f", "ready", wait.end, self._rows[label], bp="e", **more)
            for arrow, span in ((begun, work), (ended, wait)):
                arrow["ts"] = max(self._axis.us(span.begin), round(arrow["ts"] - TICK_US, 3))
            if begun["ts"] <= ended["ts"]:
                yield begun
                yield ended

    def _queues(self) -> Iterator[dict[str, Any]]:
        for at, name, depth in list(self._kept.depths):
            yield self._event("C", f"{name} ready", at, 0, args={"ready": depth})

    def _marks(self) -> Iterator[dict[str, Any]]:
        for event in list(self._kept.events):
            at = self._axis.of_event(event)
            if event[2] != "pause" and at >= self._axis.began:
                yield self._event(
                    "i",
                    event[2],
                    at,
                    self._rows[self._trainer],
                    cat="event",
                    s="p",
                    args=_plain(event[3]),
                )


def _about(segment: Segment) -> dict[str, Any]:
    what = segment.what
    if isinstance(what, ThreadTimeline):
        return {"for": what.name}
    if isinstance(what, TaskTimeline):
        what = next((s.what for s in what.done if s.what is not None), None)
        return {} if what is None else {"for": _address(what)}
    return {} if what is None else {"what": _address(what)}


def _address(what: Any) -> str:
    path = getattr(what, "path", None)  # of a file; that of a chunk says which chunk it is
    return (path if isinstance(path, str) else str(what))[:500]


def _ended(wait: Segment, made: Mapping[str, list[Segment]]) -> Segment | None:
    """The piece of work that a wait ended with."""
    if wait.stage != WAIT:
        return None
    if isinstance(wait.what, TaskTimeline):
        work = [
            segment
            for segment in wait.what.done
            if segment.stage in STAGES and segment.end <= wait.end
        ]
        return work[-1] if work and wait.what.ended is not None else None
    if isinstance(wait.what, ThreadTimeline):
        work = made.get(wait.what.name, [])
        i = bisect_right(work, wait.end, key=lambda segment: segment.end) - 1
        return work[i] if i >= 0 and work[i].end > wait.begin else None
    return None


def _nested(spans: Iterable[_Span], began: float) -> Iterator[_Span]:
    """The spans of a row, none of which reaches out of the one that it begins in: a viewer would drop it."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        begin = max(span.begin, began)
        if span.end < begin:
            continue
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        end = min(span.end, open_until[-1]) if open_until else span.end
        open_until.append(end)
        yield span._replace(begin=begin, end=end)


def _plain(value: Any) -> Any:
    """As JSON has it: no number that is none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool | int | str | None) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    return str(value)

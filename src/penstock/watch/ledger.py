"""The ledger of a start: when what was first there.

In:    marks that the loader sets, and what the threads did until the first batch.
Out:   the seconds from the start of the process to each of them, and how the time was spent.
Where: the trainer's thread, once.
State: the marks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from penstock.watch.attribution import charge
from penstock.watch.stage_timer import Segment, ThreadTimeline

ENTRIES = (
    "import",
    "list",
    "open",
    "first_bytes",
    "first_tokens",
    "first_row",
    "first_batch",
    "first_copy",
)

WORK = ("fetch", "decode", "tokenize", "pack", "batch")
"""Stages without which there is no first batch of text."""


class Ledger:
    """Written until the first batch is there."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.parts: dict[str, float] | None = None
        """How the time until the first batch was spent, once it is there."""
        self._spent: dict[str, float] = {}
        self._began: float | None = None
        self._opened: float | None = None

    def spent(self, name: str, begin: float, end: float) -> None:
        """Something was done before any thread ran: listing files, opening the pipeline."""
        if name == "open" and "open" in self.marks:
            return  # only the first pipeline is a start
        self.marks[name] = max(end, self.marks.get(name, end))
        self._spent[name] = self._spent.get(name, 0.0) + end - begin
        if name == "open":
            self._began, self._opened = begin, end

    def close(self, timelines: Iterable[ThreadTimeline], now: float) -> dict[str, Any]:
        """The first batch is there. Gives what an event tells of it."""
        timelines = list(timelines)
        segments = sorted(
            (s for track in timelines for s in list(track.recent)), key=lambda s: s.end
        )
        for mark, stage in (
            ("first_bytes", "fetch"),
            ("first_bytes", "decode"),
            ("first_tokens", "tokenize"),
        ):
            first = _first(segments, stage)
            if first is not None:
                self.marks.setdefault(mark, first.end)
        batch = _first(segments, "batch")
        if batch is not None:
            self.marks.setdefault("first_row", batch.begin)
        self.marks.setdefault("first_batch", batch.end if batch is not None else now)
        copied = _first(segments, "copy")
        if copied is not None:
            self.marks.setdefault("first_copy", copied.end)
        ready = self.marks["first_batch"]
        begun = self._began if self._began is not None else ready
        producer = next((t for t in timelines if t.name.startswith("penstock-producer")), None)
        parts = dict(self._spent)
        opened = self._opened if self._opened is not None else begun
        if producer is not None and ready > opened:
            parts |= charge(producer, opened, ready, default="pack").seconds
        elif ready > opened:
            own = next((t for t in timelines if not t.name.startswith("penstock-")), None)
            parts |= charge(own, opened, ready, default="pack").seconds if own is not None else {}
        for segment in segments:
            if segment.stage in WORK:  # done before anybody came to wait for it
                parts.setdefault(segment.stage, 0.0)
        self.parts = {name: round(seconds, 6) for name, seconds in parts.items()}
        origin = process_began()
        origin = min(self.marks.values()) if origin is None else origin
        return {
            # What the program did between listing files and opening the loader is its own.
            "dt": round(ready - begun + self._spent.get("list", 0.0), 6),
            "parts": self.parts,
            "ledger": self._entries(origin),
        }

    def _entries(self, origin: float) -> dict[str, float]:
        """Each in its order: a thread may have its first bytes before the last one is started."""
        entries: dict[str, float] = {}
        latest = 0.0
        for name in ENTRIES:
            if name in self.marks:
                latest = max(latest, self.marks[name] - origin)
                entries[name] = round(latest, 6)
        return entries


def _first(segments: list[Segment], stage: str) -> Segment | None:
    return next((s for s in segments if s.stage == stage), None)


def process_began() -> float | None:
    """When this process began, on the clock of `perf_counter`; None where that cannot be told."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return perf_counter() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return None  # not Linux

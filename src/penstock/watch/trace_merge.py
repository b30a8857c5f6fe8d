"""Traces as files: ours beside torch.profiler's, on one axis.

In:    a trace that a `Recorder` saved, and what `torch.profiler` exported of the same time.
Out:   one file with both.
Where: the thread that asks for it.
State: none.

Both have `ts` in microseconds after `baseTimeNanoseconds`, which is Unix time; older profilers have no base.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.config import write_atomically
from penstock.errors import ConfigError, CorruptFile, NoData


def merge(
    ours: str | os.PathLike[str], profiler: str | os.PathLike[str], out: str | os.PathLike[str]
) -> Path:
    """Put a recorded trace and one of torch.profiler (`export_chrome_trace`) of the same time into one file.

    Both count from Unix time, each with a base of its own, and agree to some tens of microseconds.
    """
    mine, theirs = _read(Path(ours).expanduser()), _read(Path(profiler).expanduser())
    if not _recorded(mine):
        raise ConfigError(
            f"{ours}: was not written by a Recorder; give that one first, then the profiler's"
        )
    if _recorded(theirs):
        raise ConfigError(
            f"{profiler}: was written by a Recorder, or has one's trace in it already; "
            "give the profiler's own, as export_chrome_trace wrote it"
        )
    told = mine["otherData"]
    base = _base(theirs, profiler)
    shift_us = (_base(mine, ours) - base) / 1000
    taken = {event.get("pid") for event in theirs["traceEvents"]}
    pid = next(number for number in itertools.count(1) if number not in taken)
    flows = max(
        (event["id"] for event in theirs["traceEvents"] if isinstance(event.get("id"), int)),
        default=0,
    )
    moved = []
    for event in mine["traceEvents"]:
        try:
            at = event | {"ts": round(event["ts"] + shift_us, 3), "pid": pid}
            moved.append(at | {"id": flows + event["id"]} if "id" in event else at)
        except (KeyError, TypeError):
            raise CorruptFile(f"{ours}: has an event without a time: {str(event)[:200]}") from None
    (a, b), (c, d) = _extent(moved, ours), _extent(theirs["traceEvents"], profiler)
    if b < c or d < a:
        apart = (c - b if b < c else a - d) / 1e6
        raise ConfigError(
            f"{ours} and {profiler} were not recorded at the same time: there are {apart:,.1f} s between them. "
            "Run the profiler within the Recorder's block, in one process."
        )
    written = Path(out).expanduser()
    write(written, theirs | {"traceEvents": [*theirs["traceEvents"], *moved], "otherData": told})
    return written


def _read(path: Path) -> dict[str, Any]:
    """A trace; torch's own may be compressed."""
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except FileNotFoundError:
        raise NoData(f"{path}: there is no such file") from None
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise CorruptFile(f"{path}: is not JSON: {error}") from None
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    found: dict[str, Any] = trace if isinstance(trace, dict) else {}
    events = found.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise CorruptFile(f"{path}: is JSON, but not a Chrome trace: it needs a list traceEvents")
    return found


def _recorded(trace: Mapping[str, Any]) -> bool:
    told = trace.get("otherData")
    return isinstance(told, dict) and told.get("recorded") == "penstock"


def _base(trace: Mapping[str, Any], path: object) -> int:
    base = trace.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int):
        raise CorruptFile(
            f"{path}: baseTimeNanoseconds is {base!r}, and needs to be a whole number"
        )
    return base


def _extent(events: Iterable[Mapping[str, Any]], path: object) -> tuple[float, float]:
    """From when to when there are spans."""
    spans = [event for event in events if event.get("ph") == "X"]
    try:
        return min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    except (KeyError, TypeError):
        raise CorruptFile(f"{path}: has a span without ts or dur") from None
    except ValueError:
        raise NoData(f"{path}: has no span (ph X) in it") from None


def write(path: Path, trace: Mapping[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(trace, separators=(",", ":")))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None

"""The format of a heartbeat's line: JSON with `ts iso mono pid rank step msg` and other fields.

The writer makes a line of any fields; the reader returns None for a line that is cut off or not a
heartbeat's. Only finite numbers are written: a non-finite loss is text, others are left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.types import MiB

Line = dict[str, Any]
Event = tuple[float, float, str, dict[str, Any]]
"""Unix time, monotonic time, message and fields of a line to be."""

MAX_LINE_BYTES = MiB
"""Readers skip longer lines."""
MAX_TEXT = 200
MAX_DEPTH = 5
MAX_SECONDS = 2e11
"""Of a Unix time: the year 8307."""
NOT_METRICS = frozenset(("ts", "mono", "pid", "rank", "step"))


def kind(line: Mapping[str, Any]) -> str:
    """Return the message without the data's prefix: `fineweb_loader_ready` is `loader_ready`."""
    return str(line["msg"]).removeprefix("fineweb_")


def number(value: Any) -> float | None:
    """Return a finite number, or None for any other value."""
    if type(value) not in (int, float) or not abs(value) < 1e300:
        return None
    return float(value)


def iso(ts: float) -> str:
    """Return a time in UTC as text: 2026-11-16T07:13:25.123Z."""
    text = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return one line of JSON."""
    text = json.dumps(plain(fields), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    # File names may hold bytes that are not UTF-8.
    return text.encode("utf-8", "replace") + b"\n"


def plain(fields: Mapping[str, Any]) -> Line:
    """Return fields that JSON can hold."""
    loss = _plain(fields.get("loss"), 0)
    if isinstance(loss, float) and not math.isfinite(loss):
        fields = {**fields, "loss": str(loss)}
    found: Line = _plain(fields, MAX_DEPTH)
    return found


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, str, int, float):
        return value
    if depth and isinstance(value, Mapping):
        inner = {str(name): _plain(item, depth - 1) for name, item in value.items()}
        return {name: item for name, item in inner.items() if _is_finite(item)}
    if depth and isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item, depth - 1) for item in value]
        return [item if _is_finite(item) else str(item) for item in items]
    if isinstance(value, os.PathLike | str):
        return str(value)
    try:
        scalar = value.item()  # of numpy; arrays refuse
    except Exception:  # not a number
        scalar = None
    return scalar if type(scalar) in (bool, int, float) else repr(value)[:MAX_TEXT]


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line, nested ones as `outer/inner`, a non-finite loss as a float."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name not in NOT_METRICS and (known := number(value)) is not None:
            found[name] = known
        elif isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif name == "loss" and value in ("nan", "inf", "-inf"):
            found[name] = float(value)
    return found


def decode(line: bytes) -> Line | None:
    """Return the fields of a line, or None if it is not a complete line of a heartbeat."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_heartbeat(found) else None


def _is_heartbeat(line: Line) -> bool:
    counts = [line.get(name) for name in ("pid", "rank", "step")]
    times = [line.get(name) for name in ("ts", "mono")]
    return (
        all(isinstance(line.get(name), str) for name in ("msg", "iso"))
        and all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(at, int | float) and 0 <= at < MAX_SECONDS for at in times)
    )


def step_seconds(line: Mapping[str, Any], previous_mono: float | None) -> float | None:
    """Return the time of a step: as recorded, or else by the clock, without named pauses."""
    dt = number(line.get("dt_step_s"))
    if dt is None and previous_mono is not None:
        paused = line.get("paused")
        pauses = numbers(paused).values() if isinstance(paused, Mapping) else ()
        dt = line["mono"] - previous_mono - sum(pauses)
    return dt if dt is not None and 0 <= dt < 1e9 else None

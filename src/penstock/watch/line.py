"""The format of a heartbeat's line: JSON with `ts iso mono pid rank step msg` and other fields.

The writer makes a line of any fields; the reader returns None for a line that is cut off or not a
heartbeat's. Numbers are finite on both sides: a non-finite loss is text, others are left out.
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

MAX_LINE_BYTES = MiB
"""Readers skip longer lines; the writer shortens its fields to stay below."""
MAX_TEXT = 200
MAX_DEPTH = 5
MAX_SECONDS = 1e12
NOT_METRICS = frozenset(("ts", "mono", "pid", "rank", "step"))


def iso(ts: float) -> str:
    """Return a time in UTC as text: 2026-11-16T07:13:25.123Z."""
    text = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return one line of JSON."""
    kept = plain(fields)
    line = _dump(kept)
    if len(line) >= MAX_LINE_BYTES:
        line = _dump({k: v if len(_dump(v)) <= MAX_TEXT else _shown(v) for k, v in kept.items()})
    return line


def _dump(fields: Any) -> bytes:
    text = json.dumps(fields, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
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
        number = value.item()  # a numpy scalar; arrays refuse
    except Exception:  # not a number
        number = value
    return number if type(number) in (bool, int, float) else _shown(value)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # an object of the user's
        text = f"<{type(value).__name__}: {type(error).__name__} in its repr>"
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line, nested ones as `outer/inner`, a non-finite loss as a float."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if type(value) in (float, int) and name not in NOT_METRICS:
            found[name] = float(value)
        elif isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif name == "loss" and value in ("nan", "inf", "-inf"):
            found[name] = float(value)
    return found


def decode(line: bytes) -> Line | None:
    """Return the fields of a line, or None if it is not a complete line of a heartbeat."""
    try:
        found = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_heartbeat(found) else None


def _finite(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else str(value)


# Readers calculate with the numbers: non-finite ones become text, huge integers become floats.
_DECODER = json.JSONDecoder(
    parse_float=_finite,
    parse_int=lambda text: int(text) if len(text) < 19 else _finite(text),
    parse_constant={"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.__getitem__,
)


def _is_heartbeat(line: Line) -> bool:
    texts = all(isinstance(line.get(name), str) for name in ("msg", "iso"))
    counts = [line.get(name) for name in ("pid", "rank", "step")]
    times = [line.get(name) for name in ("ts", "mono")]
    return (
        texts
        and all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(at, int | float) and abs(at) < MAX_SECONDS for at in times)
    )

"""One line of a heartbeat: how it is written, and read back.

In:    fields, of whatever the caller has put there; or the bytes of a line.
Out:   one line of JSON, never longer than a reader takes; or the fields again.
Where: the heartbeat's thread; any reader.
State: none.

Every line has `ts iso mono pid rank step msg`. One that is cut off, is no JSON or lacks one of those is None to a
reader, so nobody has to ask whether a run was killed in the middle of a write.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.types import KiB, MiB

Line = dict[str, Any]

MAX_LINE_BYTES = MiB
"""A longer line is not ours: ours are a few hundred bytes, and what would be longer is cut by the writer."""
MAX_TEXT = 4 * KiB
"""Bytes of one field in a line that would be too long."""
_DEEPEST = 5
_WORDS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_FAR = 1e12
"""Seconds; a clock that shows more is none."""


def file_name(rank: int) -> str:
    """What the file of a rank is called."""
    return f"heartbeat_rank{rank}.jsonl"


def iso(ts: float) -> str:
    """A time as people read it, in UTC: 2026-11-16T07:13:25.123Z."""
    return (
        datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        + "Z"
    )


def encode(fields: Mapping[str, Any]) -> bytes:
    """One line. Whatever the fields hold, it can be written and read back, and is not too long."""
    return as_line(fields)[1]


def as_line(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
    """What a reader will find, and the line it finds it in."""
    try:
        line = _dump(fields)
    except (TypeError, ValueError, RecursionError):
        fields = plain(fields)
        line = _dump(fields)
    if len(line) >= MAX_LINE_BYTES:
        each = min(MAX_TEXT, MAX_LINE_BYTES // (2 * max(1, len(fields))))
        fields = {name: _cut(value, each) for name, value in plain(fields).items()}
        line = _dump(fields)
    return fields, line


def _dump(fields: Any) -> bytes:
    text = json.dumps(fields, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    # File names may hold bytes that are no text; they must not make the line unreadable.
    return text.encode("utf-8", "replace") + b"\n"


def plain(fields: Mapping[Any, Any]) -> Line:
    """The same as JSON can say it: numbers that are not finite are left out, except a loss, which becomes a word."""
    kept = {}
    for name, value in fields.items():
        told = _plain(value, _DEEPEST)
        if isinstance(told, float) and not math.isfinite(told):
            if name != "loss":
                continue
            told = str(told)
        kept[str(name)] = told
    return kept


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _number(value)
    if depth and isinstance(value, Mapping):
        inner = {str(name): _plain(item, depth - 1) for name, item in value.items()}
        return {
            name: item
            for name, item in inner.items()
            if not isinstance(item, float) or math.isfinite(item)
        }
    if depth and isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item, depth - 1) for item in value]
        return [
            str(item) if isinstance(item, float) and not math.isfinite(item) else item
            for item in items
        ]
    if isinstance(value, os.PathLike):
        return str(value)
    try:
        # A number of numpy's, say; anything that has more than one value refuses.
        return _number(value.item())
    except Exception:  # it is shown as what it is
        return _shown(value)


def _number(value: Any) -> int | float | str:
    if isinstance(value, int):
        whole = int(value)
        return (
            whole
            if abs(whole) < 1 << 63
            else float(whole)
            if abs(whole) < 1 << 1000
            else "a huge number"
        )
    if isinstance(value, float):
        return float(value)
    return _shown(value)


def _shown(value: Any, most: int = 200) -> str:
    try:
        text = repr(value)
    except (
        Exception
    ) as error:  # the caller's object, on the caller's thread: it must not end a step
        text = f"<{type(value).__name__}, which cannot be shown: {type(error).__name__}>"
    return text if len(text) <= most else text[: most - 1] + "…"


def _cut(value: Any, most: int) -> Any:
    """A value that takes its share of a line."""
    size = len(_dump(value))
    if size <= most:
        return value
    # A character may take four bytes, and an escape six.
    return _shown(value, most // 8)


def decode(line: bytes) -> Line | None:
    """What a line says; None if it is cut off or not a heartbeat's."""
    try:
        found = _DECODER.decode(line.decode())
        if b"\\u" in line:
            json.dumps(found, ensure_ascii=False).encode()  # readers print it
    except (ValueError, RecursionError):  # a lone surrogate is a ValueError too
        return None
    return found if isinstance(found, dict) and _whole(found) else None


def _finite(text: str) -> float | str:
    value = float(text)
    return value if -math.inf < value < math.inf else str(value)


def _whole_number(text: str) -> int | float | str:
    return int(text) if len(text) < 19 else _number(int(text))


# Readers calculate with what they find, and not every float or int of JSON can take part in that.
_DECODER = json.JSONDecoder(
    parse_float=_finite, parse_int=_whole_number, parse_constant=_WORDS.__getitem__
)


def _whole(line: Line) -> bool:
    """Whether it has what every line has."""
    return (
        isinstance(line.get("msg"), str)
        and isinstance(line.get("iso"), str)
        and all(type(line.get(name)) is int and line[name] >= 0 for name in ("pid", "rank", "step"))
        and all(
            type(line.get(name)) in (int, float) and abs(line[name]) < _FAR
            for name in ("ts", "mono")
        )
    )

"""Numbers and times as a report shows them.

In:    a number, or None or NaN where it is not known.
Out:   text; a question mark for what is not known.
Where: anywhere.
State: none.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime


def printable(said: str) -> str:
    """Text from a file without what moves a terminal's cursor or cannot be encoded."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _control(c) else c for c in said)


def _control(c: str) -> bool:
    return (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff"


def when(ts: float) -> str:
    """A moment, in UTC, to the second."""
    try:
        return datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "?"


def percent(value: float | None) -> str:
    """With a digit more the smaller it is."""
    if value is None or math.isnan(value):
        return "?"
    return (
        f"{value:.0f} %"
        if value >= 20
        else f"{value:.1f} %"
        if value >= 0.095 or value == 0
        else f"{value:.2f} %"
    )


def count(value: float | None) -> str:
    """A number of things, or of things a second."""
    if value is None or math.isnan(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None or math.isnan(value):
        return "?"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0995:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return (
        f"{int(value) // 60} min {int(value) % 60} s" if value < 7200 else f"{value / 3600:.1f} h"
    )


def size(n: float | None) -> str:
    """Bytes."""
    if n is None or math.isnan(n):
        return "?"
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"

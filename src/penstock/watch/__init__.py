"""Measure a run and explain its waits: stage times, verdicts, heartbeat, report, health.

Records on the threads that do the work, evaluates elsewhere, and never delays a step. This file has
the number formats of all output: one spelling per unit, and "?" for an unknown number.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

MAX_TEXT = 600
"""The maximum length of a text from a file when shown."""


def seconds(value: float | None) -> str:
    """Return a duration in a suitable unit: 12.3 ms, 4.56 s, 3 min 20 s, 2.5 h."""
    if value is None or math.isnan(value):
        return "?"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0009995:
        return f"{1e6 * value:.3g} µs" if value else "0 s"
    if value < 0.9995:
        return f"{1e3 * value:.3g} ms"
    if value < 119.5:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if value < 7200 else f"{value / 3600:.1f} h"


def count(value: float | None) -> str:
    """Return a count or a rate as text: 12,345 or 3.14."""
    if value is None or math.isnan(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rate(tokens_per_s: float | None) -> str:
    """Return a rate of tokens: 12,345 tokens/s."""
    return f"{count(tokens_per_s)} tokens/s"


def percent(value: float | None) -> str:
    """Return a percentage. Smaller values have more digits."""
    if value is None or math.isnan(value):
        return "?"
    digits = 0 if value >= 20 else 1 if value >= 0.095 or value == 0 else 2
    return f"{value:.{digits}f} %"


def when(ts: float) -> str:
    """Return a Unix time in UTC, to the second."""
    return datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clean(value: Any) -> str:
    """Return text that is safe to show: one line, not too long, no escape sequences."""
    text = " ".join(str(value).split())
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)

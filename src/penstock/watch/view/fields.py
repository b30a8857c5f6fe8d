"""Take fields out of a heartbeat line that anybody may have written.

In:    the value of a field: JSON, and not always what the format says.
Out:   a number, a text that a terminal can show, a mapping; or nothing.
Where: any thread.
State: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How a number that JSON does not have is written."""
LONGEST_STEP_S = 1e9
"""Thirty years. A larger number is no duration, and sums of such would overflow."""
MOST_TOKENS = 1e15
"""Of one step. More is no count."""
LONGEST = 400
"""Characters of a text that are kept. A verdict has a hundred, an error's message may be a page."""


def number(value: Any) -> float | None:
    """A number, or None where there is none."""
    if isinstance(value, str):
        return NOT_FINITE.get(value.lower())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON sets no limit to whole numbers
        return None


def finite(value: Any) -> float | None:
    """A number that can be reckoned with."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """A whole number that is not negative: a step, a rank."""
    found = finite(value)
    return int(found) if found is not None and found >= 0 else None


def text(value: Any) -> str:
    """A text in one line. A file's name may hold an escape sequence, which must not reach a terminal."""
    if value is None:
        return ""
    shown = value if isinstance(value, str) else str(value)
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
        for c in shown[:LONGEST]
    )


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping; an empty one where it is something else."""
    return value if isinstance(value, Mapping) else {}


def kind(line: Mapping[str, Any]) -> str:
    """What a line says, whatever data it is about: `fineweb_loader_ready` is `loader_ready`."""
    msg = line.get("msg")
    return msg.removeprefix("fineweb_") if isinstance(msg, str) else ""

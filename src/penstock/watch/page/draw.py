"""The pieces that the plots of a report are made of, as plotly's JSON.

In:    numbers, names and colours.
Out:   traces, layouts, lines and notes.
Where: the thread that makes a report.
State: none.

Colours are names that begin with @; the page puts in those of its theme. Names that come from files are escaped,
because plotly reads a few HTML tags in its texts.
"""

from __future__ import annotations

import html
from typing import Any

from penstock.watch.page.series import packed

Figure = dict[str, Any]

EXACT = 1 << 24
"""Steps below this are exact in four bytes."""


def upright(x: float, colour: str, dash: str) -> Figure:
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": line}


def note(x: float, text: str, colour: str, side: str) -> Figure:
    """A few words beside an upright line, above the plot so that they cover nothing."""
    where = {"x": x, "xanchor": side, "y": 1, "yref": "paper", "yanchor": "bottom"}
    return where | {"text": text, "showarrow": False, "font": {"color": colour, "size": 12}}


def line(
    name: str, x: Any, y: Any, colour: str, unit: str = "", width: float = 1.5
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": packed(x, "f4" if len(x) == 0 or max(x[0], x[-1]) < EXACT else "f8"),
        "y": packed(y),
        "line": {"color": colour, "width": width},
        "connectgaps": False,
        "hovertemplate": f"%{{y:.4~s}}{unit}" if not unit else f"%{{y:.4~g}}{unit}",
    }


def layout(title: str, over_steps: bool) -> dict[str, Any]:
    return {
        "margin": {"l": 12, "r": 14, "t": 24, "b": 44},
        "hovermode": "x unified" if over_steps else "closest",
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title}, "automargin": True},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "showlegend": True,
        "shapes": [],
        "annotations": [],
    }


def figure(traces: list[dict[str, Any]], plan: dict[str, Any], alt: str) -> Figure:
    return {"data": traces, "layout": plan, "alt": alt}


def safe(text: str) -> str:
    """Text from a file, for plotly, which reads tags."""
    return html.escape(text if len(text) <= 120 else text[:119] + "…")

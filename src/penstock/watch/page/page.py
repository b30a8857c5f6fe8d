"""The page of a report: one file of HTML that opens from disk and asks nobody for anything.

In:    numbers and plots.
Out:   HTML with its style, its script, plotly and the data inside.
Where: the thread that makes a report.
State: none.

Text from files is escaped where it enters the page. Should that ever fail, the page's own policy still stands: only
scripts with the fingerprints that it names run, and nothing is requested.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from penstock.errors import MissingExtra
from penstock.watch.page.units import printable

EARLY = 'document.documentElement.dataset.theme=matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"'
"""Runs before anything is painted, so that a dark page does not begin with a white flash."""
_UNIT = re.compile(r"(?<=\d) (?=(?:%|ms|s|min|h|points)(?:\W|$))")
LONGEST_TEXT = 600
"""Characters of one text from a file."""


def page(title: str, about: str, body: str, figures: Mapping[str, Any]) -> str:
    """The whole file. `body` is HTML; everything else is text."""
    drawing = _part("page.js")
    plotly = _plotly()
    scripts = " ".join(f"'sha256-{_fingerprint(script)}'" for script in (EARLY, plotly, drawing))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "connect-src 'none'; form-action 'none'; base-uri 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<script>{EARLY}</script>
<style>{_part("page.css")}</style>
</head>
<body>
<div class="page">
<header><h1>{text(title)}</h1><p>{text(about)}</p><button class="do" id="theme" type="button">Dark</button></header>
<noscript><p class="card">Plots need JavaScript; the numbers and tables do not.</p></noscript>
<main>
{body}
</main>
<footer>Made by <b>penstock report</b>. This page is complete in itself and requests nothing.</footer>
</div>
<script type="application/json" id="figures">{embedded(figures)}</script>
<script>{plotly}</script>
<script>{drawing}</script>
</body>
</html>
"""


def text(value: Any, most: int = LONGEST_TEXT) -> str:
    """Anything as text that is safe between tags and in an attribute."""
    said = str(value)
    if len(said) > most:
        said = said[: most - 1] + "…"
    return html.escape(printable(said))


def prose(said: str) -> str:
    """A sentence, with numbers that stay on the line of their unit."""
    return _UNIT.sub("\N{NO-BREAK SPACE}", text(said))


def embedded(value: Any) -> str:
    """JSON that nothing in it can end before its end."""
    said = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plot(
    name: str,
    title: str,
    wide: bool = False,
    log: bool = False,
    own_height: bool = False,
    note: str = "",
) -> str:
    """A place for a plot. Its caption is the sentence that comes with it, unless there is a note."""
    button = (
        f'<button class="do" type="button" data-log="{name}" aria-pressed="false">log</button>'
        if log
        else ""
    )
    caption = (
        f"<figcaption>{prose(note)}</figcaption>"
        if note
        else '<figcaption data-alt=""></figcaption>'
    )
    kind = "plot own" if own_height else "plot"
    return (
        f'<figure class="card{" wide" if wide else ""}" id="{name}"><div class="title"><h3>{text(title)}</h3>{button}</div>'
        f'{caption}<div class="{kind}" data-plot="{name}" role="img" aria-label="{text(title)}"></div></figure>'
    )


class Cell(str):
    """HTML that is safe already."""

    __slots__ = ()


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    numeric: Iterable[int] = (),
    wide: Iterable[int] = (),
    unbroken: Iterable[int] = (),
    marked: Mapping[int, str] | None = None,
) -> str:
    """A table whose first column names the row. It scrolls in itself, so that the page never does sideways."""
    kinds = (
        dict.fromkeys(numeric, "n") | dict.fromkeys(wide, "text") | dict.fromkeys(unbroken, "keep")
    )

    def kind(i: int) -> str:
        return f' class="{kinds[i]}"' if i in kinds else ""

    titles = "".join(f'<th scope="col"{kind(i)}>{text(name)}</th>' for i, name in enumerate(head))
    lines = []
    for at, row in enumerate(rows):
        cells = [one if isinstance(one, Cell) else text("" if one is None else one) for one in row]
        first = f'<th scope="row"{kind(0)}>{cells[0]}</th>'
        rest = "".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(cells[1:], 1))
        mark = f' class="{marked[at]}"' if marked and at in marked else ""
        lines.append(f"<tr{mark}>{first}{rest}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table><caption><span>'
        f"{text(caption)}</span></caption><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def facts(pairs: Iterable[tuple[str, str, str]]) -> str:
    """Numbers with their names, and a few words to each."""
    items = (
        f"<div><dt>{text(name)}</dt><dd>{prose(value)}{f'<small>{prose(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in pairs
    )
    return f'<dl class="figures">{"".join(items)}</dl>'


def warnings(said: Sequence[str]) -> str:
    return (
        f'<ul class="warnings">{"".join(f"<li>{prose(one)}</li>" for one in said)}</ul>'
        if said
        else ""
    )


def card(content: str, kind: str = "") -> str:
    return f'<section class="card {kind}">{content}</section>'


def _part(name: str) -> str:
    return files("penstock.watch.page").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtra("plotly", "a report with plots", "report") from None
    return str(get_plotlyjs())


def _fingerprint(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")

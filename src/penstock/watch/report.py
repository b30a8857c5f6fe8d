"""Write a report on a run: an HTML page, the same numbers as JSON, and a short text summary.

Reads only heartbeat files, so the run need not have ended. Text from these files is escaped in the
page. The page makes no requests, and its policy allows only its own plotly scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from rich.filesize import decimal as size

from penstock.config import write_atomically
from penstock.errors import missing_extra
from penstock.watch import clean, count, percent, rate, seconds, when
from penstock.watch.attribution import band
from penstock.watch.heartbeat_reader import Line, kind, listed
from penstock.watch.run import RankRun, Run, describe, read_run
from penstock.watch.stage_timer import CHARGED, RANKS
from penstock.watch.steady_state import Floats

Numbers = dict[str, Any]

MAX_POINTS = 1600
"""Maximum points of a line: about the pixels of a screen."""
MAX_BLOCKS = 100
"""Maximum bars of a figure, and points of a running median."""
MAX_EVENTS = 300
"""The number of latest events to list."""
MAX_RANKS = 64
"""Ranks in the comparison: those that wait longest."""
SHOWN = ("tokens_per_s", "low", "high", "overhead_s", "overhead_pct")
"""Numbers of the steady state to include in the numbers of the run."""
LOG_RATIO = 10
"""An axis is logarithmic if its largest value is this many times the median."""


@dataclass(frozen=True)
class Report:
    """A report on one run."""

    run: Run
    numbers: Numbers
    """Values for JSON. Unknown ones are None."""

    @property
    def summary(self) -> str:
        """The verdict in a few lines of text."""
        lines = [f"{self.numbers['headline']} [{self.numbers['band'] or 'unknown'}]"]
        lines += [f"  {clean(line)}" for line in self.numbers["sentences"]]
        return "\n".join([*lines, *(f"  ! {clean(line)}" for line in self.numbers["warnings"])])

    def write(self, path: str | Path) -> Path:
        """Write the page atomically."""
        path = Path(path).expanduser()
        write_atomically(path, self.html())
        return path

    def html(self) -> str:
        """Return the page."""
        try:
            from plotly.offline import get_plotlyjs
        except ImportError:
            raise missing_extra("plotly", "a report with figures", "report") from None
        numbers = self.numbers
        rank, own = self.run.ranks[numbers["worst_rank"]], _worst(numbers)
        several = len(self.run.ranks) > 1
        figures = "".join(_Figures(rank, own, numbers["shape"]).all())
        compared = f"<h2>Ranks compared</h2>{_ranks_figure(numbers)}" if several else ""
        title = f"Rank {rank.rank}, which waits longest" if several else "Over the run"
        sections = [
            _verdict(numbers),
            f'<h2>{title}</h2><div class="plots">{figures}</div>',
            compared,
            _stage_table(rank, own),
            _event_table(self.run),
            _settings_table(rank),
        ]
        scripts = [str(get_plotlyjs()), *_SCRIPT.findall(figures + compared)]
        about = f"{_who(list(self.run.ranks))}, {numbers['begun']} to {numbers['last_line']}"
        return Template(_resource("report.html")).substitute(
            hashes=" ".join(f"'sha256-{_sha256(script)}'" for script in scripts),
            about=_text(about),
            plotly=scripts[0],
            body="\n".join(sections),
        )


def report(*patterns: str | Path) -> Report:
    """Return a report on the run whose heartbeats are in these files, globs or folders."""
    run = read_run(patterns)
    numbers = _run_numbers(run)
    numbers["headline"] = _headline(numbers)
    numbers["sentences"] = list(_sentences(numbers, run))
    numbers["warnings"] = list(_warnings(numbers, run))
    return Report(run, numbers)


def _resource(name: str) -> str:
    return files("penstock.watch").joinpath(name).read_text(encoding="utf-8")


# Numbers


def _run_numbers(run: Run) -> Numbers:
    """Return the numbers of a run.

    The data wait of a run is that of the rank that waits longest for its own data, because the
    other ranks wait for that rank.
    """
    steady = run.analysis()
    ranks = [_rank_numbers(rank, steady.steady_step) for rank in run.ranks.values()]
    slowest = max(ranks, key=lambda one: (_own_wait(one), one["data_wait_pct"] or 0.0))
    wait = slowest["data_wait_pct"]
    return {
        "version": 2,
        "ranks_expected": run.world_size,
        "band": None if wait is None else band(wait / 100),
        "data_wait_pct": wait,
        "worst_rank": slowest["rank"],
        "steady_from": steady.steady_step,
        **{name: getattr(steady, name) for name in SHOWN},
        "shape": steady.as_dict(),
        "begun": when(min((r.events or [r.last])[0]["ts"] for r in run.ranks.values())),
        "last_line": when(max(rank.last["ts"] for rank in run.ranks.values())),
        "ended": slowest["ended"] if all(one["ended"] for one in ranks) else None,
        "skipped_lines": run.skipped,
        "ranks": ranks,
    }


def _rank_numbers(rank: RankRun, steady_step: int | None) -> Numbers:
    """Return the numbers of a rank's last attempt. Waits are those since steady state, if any."""
    start = rank.attempt.start
    steps, loss = rank.steps[start:], rank.column("loss", start)
    steady = start + int(np.searchsorted(steps, steady_step or 0))
    wait, by_stage = rank.waits_pct(steady)
    known = rank.column("dt_fetch_s", steady)
    known = 1000 * known[np.isfinite(known)]
    quantiles = np.quantile(known, (0.5, 0.95, 0.99)).tolist() if len(known) else [None] * 3
    names = ("dt_step_s", "tokens")
    wall, tokens = (float(np.nansum(rank.column(name, start))) for name in names)
    finite, bad = loss[np.isfinite(loss)], steps[np.isinf(loss)]
    warmup = rank.last_event("loader_warmup")
    events = Counter(kind(line).removeprefix("loader_") for line in rank.events)
    return {
        "rank": rank.rank,
        "steps": len(steps),
        "first_step": int(steps[0]) if len(steps) else None,
        "last_step": int(steps[-1]) if len(steps) else None,
        "sessions": len(rank.attempts),
        "ended": rank.ended,
        "shape": rank.analysis().as_dict(),
        "data_wait_pct": wait,
        "waits_pct": by_stage,
        **dict(zip(("next_p50_ms", "next_p95_ms", "next_p99_ms"), quantiles, strict=True)),
        "tokens_per_s": tokens / wall if tokens and wall else None,
        "tokens": int(tokens) or None,
        "wall_s": wall,
        "first_batch_s": rank.last_event("loader_ready").get("dt"),
        "warmup_wait_s": warmup["wait_ms"] / 1000 if warmup else None,
        "last_loss": float(finite[-1]) if len(finite) else None,
        "loss_not_finite": int(bad[0]) if len(bad) else None,
        "loss_not_finite_steps": len(bad),
        "shuffle_quality": rank.beat.get("shuffle_quality"),
        "fell_back": any(e["msg"] == "fallback" and e.get("to") != "data" for e in rank.events),
        "events": dict(sorted(events.items())),
        "dropped_lines": _overall(rank).get("dropped", 0),
        "words": str(_overall(rank).get("verdict", "")),
    }


def _overall(rank: RankRun) -> Line:
    """Return the newest totals: the last beat, updated by the shutdown line."""
    return rank.beat | rank.last_event("shutdown")


def _own_wait(one: Numbers) -> float:
    """Return the share of time that a rank waits for its own data."""
    return float((one["data_wait_pct"] or 0.0) - one["waits_pct"].get(RANKS, 0.0))


def _worst(numbers: Numbers) -> Numbers:
    """Return the numbers of the rank that waits longest for its own data."""
    return next(one for one in numbers["ranks"] if one["rank"] == numbers["worst_rank"])


# Text


def _headline(numbers: Numbers) -> str:
    if numbers["data_wait_pct"] is None:
        steps = any(one["steps"] for one in numbers["ranks"])
        return "Data wait was not recorded" if steps else "No step has been recorded yet"
    words = "Data slows this run down" if numbers["band"] in ("fair", "poor") else "Data keeps up"
    return f"{words}: {percent(numbers['data_wait_pct'])} of the time is spent waiting for data"


def _sentences(numbers: Numbers, run: Run) -> Iterator[str]:
    slowest = _worst(numbers)
    waits = sorted(slowest["waits_pct"].items(), key=lambda item: -item[1])
    if parts := [f"{stage} {percent(pct)}" for stage, pct in waits[:3] if pct >= 0.05]:
        yield f"Steps wait for {', '.join(parts)}."
    # The loader's verdict is "input-bound 12 %: tokenize 9 %: what to change".
    if len(verdict := slowest["words"].split(": ", 2)) == 3:
        yield f"What to change: {verdict[2]}."
    if len(numbers["ranks"]) > 1 and numbers["data_wait_pct"] is not None:
        yield f"Rank {slowest['rank']} waits longest for its own data."
    if slowest["steps"]:
        speed = f"{rate(numbers['tokens_per_s'])}, " if numbers["tokens_per_s"] else ""
        yield _sentence(f"{speed}{run.analysis().headline()}")
    if (mixed := slowest["shuffle_quality"]) is not None:
        share = percent(100 * mixed)
        yield f"A batch mixes {share} of the source chunks that a uniform order would."
    if (numbers["overhead_s"] or 0) > 0:
        share, cause = percent(numbers["overhead_pct"]), numbers["shape"]["warmup_cause"]
        yield f"Warmup cost {share} of the run{f': {cause}' if cause else ''}."


def _warnings(numbers: Numbers, run: Run) -> Iterator[str]:
    """Yield warnings. Ranks with the same warning share a line."""
    ranks = numbers["ranks"]
    if missing := run.missing():
        yield f"{missing}. The numbers are those of the others."
    shared: dict[str, list[int]] = {}
    for one in ranks:
        for warning in _rank_warnings(one):
            shared.setdefault(warning, []).append(one["rank"])
    for warning, who in shared.items():
        yield f"{_who(who)}: {warning}." if len(ranks) > 1 else _sentence(warning)


def _rank_warnings(one: Numbers) -> Iterator[str]:
    if one["loss_not_finite"] is not None:
        steps, first = one["loss_not_finite_steps"], one["loss_not_finite"]
        yield f"the loss is not a finite number at {steps:,} steps, first at step {first:,}"
    if one["fell_back"]:
        yield "it fell back to synthetic data; see the events"
    if errors := one["events"].get("error"):
        yield f"the loader reported {errors} error{'s' * (errors > 1)}; see the events"
    if one["dropped_lines"]:
        yield f"lines that could not be written are missing here: {one['dropped_lines']:,}"
    if one["steps"] and one["ended"] is None:
        yield "there is no shutdown line: the run was still in progress, or it was killed"


def _who(ranks: list[int]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# Figures

BLUE, PALE, GREEN = "#3b82d6", "rgba(59, 130, 214, 0.45)", "#1f9d66"
AMBER, RED, GREY = "#d98312", "#dc4a4a", "#8a93a1"
"""Colours that are readable on white and on black, because figures have no dark mode."""
COLOURS = (BLUE, "#62b6e8", "#e0692a", "#e3a82c", GREEN, "#c06ba6", GREY, "#8f6bd0")
STAGE_COLOURS = dict(zip(CHARGED, COLOURS, strict=True))
BUTTONS = ["zoom2d", "pan2d", "resetScale2d", "toImage"]
CONFIG = {"displaylogo": False, "modeBarButtons": [BUTTONS]}


def _card(name: str, title: str, figure: Any, caption: str = "", wide: bool = False) -> str:
    made = figure.to_html(CONFIG, full_html=False, include_plotlyjs=False, div_id=f"plot-{name}")
    return (
        f'<figure class="card{" wide" * wide}" id="{name}"><h3>{_text(title)}</h3>'
        f"<figcaption>{_text(caption)}</figcaption>{made}</figure>"
    )


def _figure(x_title: str, y_title: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure(layout={"template": json.loads(_resource("report_figures.json"))})
    return figure.update_xaxes(title_text=x_title).update_yaxes(title_text=y_title)


class _Figures:
    """The figures over the steps of one rank. A figure without recorded data is left out."""

    def __init__(self, rank: RankRun, own: Numbers, shape: Numbers) -> None:
        self._rank, self._own, self._shape = rank, own, shape
        self._steps = rank.steps.astype(float)
        self._blocks = _blocks(len(self._steps), MAX_BLOCKS)
        self._middle = [self._steps[block].mean() for block in self._blocks]

    def all(self) -> Iterator[str]:
        """Yield the figures in the order of the page."""
        if len(self._steps):
            column = self._rank.column
            yield self._step_time()
            yield from self._waits()
            speed = column("tokens") / np.maximum(column("dt_step_s"), 1e-9)
            yield from self._lines("rate", "Speed", "tokens/s", {"each step": speed}, noisy=True)
            percentiles = {p: column(f"fetch_{p}_ms") for p in ("p50", "p95", "p99")}
            yield from self._lines("next", "Time in next()", "ms", percentiles)
            full = 100 * column("queue_depth") / np.maximum(column("queue_capacity"), 1)
            yield from self._lines("queue", "Queue", "% full", {"batches": full}, noisy=True)
            loss = {"each step": column("loss")}
            yield from self._lines("loss", "Loss", "loss", loss, noisy=True)
            memory = {"process": column("rss_bytes"), "device": column("device_bytes")}
            yield from self._lines("memory", "Memory", "bytes", memory)
        yield from self._first_batch()

    def _step_time(self) -> str:
        times, waits = self._rank.column("dt_step_s"), self._rank.column("dt_fetch_s")
        figure = self._over_steps("seconds", log=times)
        self._line(figure, "step time", times, "s")
        self._line(figure, "in next()", waits, "s")
        # A stall is recorded before its step finishes, so it belongs to the next step number.
        stalls = [e["step"] + 1 for e in self._rank.events if e["msg"] == "stall"]
        pauses = [e["step"] for e in self._rank.events if e["msg"] == "pause"]
        marks = [("slow step", "circle-open", self._shape["spikes"]), ("stall", "x", stalls)]
        for name, symbol, steps in [*marks, ("pause", "square-open", pauses)]:
            rows = np.isin(self._rank.steps, steps)
            marker = {"symbol": symbol, "size": 9}
            if rows.any():
                x, y = self._steps[rows], times[rows]
                figure.add_scatter(name=name, x=x, y=y, mode="markers", marker=marker)
        changes = [c for c in self._shape["changes"] if c["cause"]]
        causes = [f"From step {c['step']:,} on: {c['cause']}." for c in changes]
        return _card("step-time", "Step time", figure, " ".join(causes), wide=True)

    def _waits(self) -> Iterator[str]:
        """Yield stacked bars per block of steps, because shares of single steps are too noisy."""
        figure = self._over_steps("% of the time").update_layout(bargap=0)
        starts = [block.start for block in self._blocks]
        names = ("dt_step_s", *(f"wait_by_stage/{stage}" for stage in STAGE_COLOURS))
        columns = (np.nan_to_num(self._rank.column(name)) for name in names)
        wall, *waits = (np.add.reduceat(column, starts) for column in columns)
        shares = [np.minimum(100 * wait / np.maximum(wall, 1e-9), 100) for wait in waits]
        width = [np.ptp(self._steps[block]) + 1 for block in self._blocks]
        for y, (stage, colour) in zip(shares, STAGE_COLOURS.items(), strict=True):
            if y.any():
                _bar(figure, stage, colour, "%{y:.2f} %", x=self._middle, y=y, width=width)
        if figure.data:
            yield _card("waits", "Data wait by stage", figure, wide=True)

    def _lines(
        self, name: str, title: str, unit: str, lines: dict[str, Floats], noisy: bool = False
    ) -> Iterator[str]:
        """Yield a figure of columns. Noisy ones get a running median."""
        figure = self._over_steps(unit, None if noisy else np.concatenate(list(lines.values())))
        for label, y in lines.items():
            y = np.where(np.isfinite(y), y, np.nan)
            style = {"color": PALE, "width": 1} if noisy else {}
            self._line(figure, label, y, unit, **style)
            if noisy and figure.data:
                medians = [np.median(y[block]) for block in self._blocks]
                more = {"name": "median", "mode": "lines", "line_color": BLUE}
                figure.add_scatter(x=self._middle, y=medians, **more)
        if figure.data:
            yield _card(name, title, figure)

    def _first_batch(self) -> Iterator[str]:
        if not (parts := self._rank.last_event("loader_ready").get("parts")):
            return
        figure = _figure("seconds", "").update_yaxes(autorange="reversed")
        took = list(parts.values())
        bars = {"x": took, "y": [_text(name) for name in parts], "orientation": "h"}
        text = {"text": [seconds(part) for part in took], "textposition": "outside"}
        _bar(figure, "", BLUE, "%{text}", cliponaxis=False, **bars, **text)
        figure.update_layout(hovermode="y unified", margin_b=44, margin_r=60, showlegend=False)
        yield _card("first-batch", "Time to the first batch", figure)

    def _over_steps(self, unit: str, log: Floats | None = None) -> Any:
        """Return a figure over steps, with the warmup shaded and changes marked."""
        figure = _figure("step", unit).update_yaxes(rangemode="tozero")
        figure.update_xaxes(range=[self._steps[0] - 0.5, self._steps[-1] + 0.5])

        def mark(step: float, colour: str, label: str, where: str = "top left") -> None:
            note = {"text": label, "font": {"color": colour}, "yshift": 20}
            line = {"color": colour, "dash": "dash", "width": 1.5}
            figure.add_vline(step - 0.5, line=line, annotation=note, annotation_position=where)

        if (steady := self._shape["steady_step"]) is not None:
            box = {"fillcolor": GREY, "opacity": 0.18, "line_width": 0, "layer": "below"}
            figure.add_vrect(x0=self._shape["first_step"] - 0.5, x1=steady - 0.5, **box)
            mark(steady, GREEN, f"steady since {steady:,}", "top right")
        for attempt in self._rank.attempts[1:]:
            if attempt.start < len(self._steps):
                mark(self._steps[attempt.start], GREY, "resumed")
        for change in self._shape["changes"]:
            mark(change["step"], AMBER, f"{change['pct']:+.0f} %")
        if (bad := self._own["loss_not_finite"]) is not None:
            mark(bad, RED, "loss not finite")
        known = log[log > 0] if log is not None else self._steps[:0]
        if len(known) and known.max() > LOG_RATIO * np.median(known):
            figure.update_yaxes(type="log", dtick="D2", title_text=f"{unit} (log scale)")
        return figure

    def _line(self, figure: Any, name: str, y: Floats, unit: str, **line: Any) -> None:
        if not np.isnan(y).all():
            at, hover = _extremes(y), f"%{{y:,.4~r}} {unit}"
            style = {"mode": "lines", "line": {"width": 1.5} | line, "hovertemplate": hover}
            figure.add_scatter(name=name, x=self._steps[at], y=y[at], **style)


def _bar(figure: Any, name: str, colour: str, hover: str, **more: Any) -> None:
    marker = {"color": colour, "line": {"width": 0}}
    figure.add_bar(name=name, marker=marker, hovertemplate=hover, **more)


def _ranks_figure(numbers: Numbers) -> str:
    ranks = sorted(numbers["ranks"], key=lambda one: -_own_wait(one))[:MAX_RANKS]
    figure = _figure("% of the time", "").update_yaxes(autorange="reversed")
    names = [f"rank {one['rank']}" for one in ranks]
    for stage, colour in STAGE_COLOURS.items():
        share = [one["waits_pct"].get(stage, 0.0) for one in ranks]
        if any(share):
            _bar(figure, stage, colour, "%{x:.2f} %", x=share, y=names, orientation="h")
    figure.update_layout(height=140 + 26 * len(ranks), hovermode="y unified")
    caption = "Sorted by waiting for own data; “ranks” is waiting for other ranks."
    return _card("ranks", "Data wait by rank and stage", figure, caption, wide=True)


def _blocks(n: int, most: int) -> list[slice]:
    """Divide n values into at most `most` blocks of equal size."""
    length = max(1, -(-n // most))
    return [slice(begin, min(begin + length, n)) for begin in range(0, n, length)]


def _extremes(y: Floats) -> Any:
    """Return the rows of the extremes of each block, so that slow steps stay visible."""
    if len(y) <= MAX_POINTS:
        return slice(None)
    low, high = np.nan_to_num(y, nan=np.inf), np.nan_to_num(y, nan=-np.inf)
    blocks = _blocks(len(y), MAX_POINTS // 2)
    return np.unique([(b.start + low[b].argmin(), b.start + high[b].argmax()) for b in blocks])


# HTML

ELSEWHERE = frozenset(("loader_ready", "steady_state", "pause"))
"""Events that are shown in the verdict or a figure instead."""
_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def _text(value: Any) -> str:
    """Return a value as text that is safe between tags and in attributes."""
    return html.escape(clean(value))


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _verdict(numbers: Numbers) -> str:
    facts = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(more)}</small></dd></div>"
        for name, value, more in _facts(numbers)
        if value != "?"
    )
    warnings = "".join(f"<li>{_text(warning)}</li>" for warning in numbers["warnings"])
    name = numbers["band"] or ""
    return (
        f'<section class="card verdict {name}"><span class="band">{name}</span>'
        f"<h2>{_text(numbers['headline'])}</h2><p>{_text(' '.join(numbers['sentences']))}</p>"
        f'<dl>{facts}</dl><ul class="warnings">{warnings}</ul></section>'
    )


def _facts(numbers: Numbers) -> Iterator[tuple[str, str, str]]:
    own, shape = _worst(numbers), numbers["shape"]
    interval = f"{count(numbers['low'])} to {count(numbers['high'])}"
    yield "steady tokens/s", count(numbers["tokens_per_s"]), interval
    tail = f"p95 {seconds(shape['p95_s'])}, p99 {seconds(shape['p99_s'])}"
    yield "step time p50", seconds(shape["p50_s"]), tail
    yield "warmup overhead", seconds(numbers["overhead_s"]), f"{shape['onset'] or 0} steps"
    filled = f"then {seconds(own['warmup_wait_s'])} to fill the queue"
    yield "first batch", seconds(own["first_batch_s"]), filled if own["warmup_wait_s"] else ""
    yield "steps", f"{own['steps']:,}", f"{count(own['first_step'])} to {count(own['last_step'])}"
    yield "last loss", count(own["last_loss"]), "the last finite one"


def _table(title: str, head: str, rows: Sequence[Sequence[Any]], text_columns: int = 9) -> str:
    """Return a table in a card, with text columns before number columns. Wide tables scroll."""
    kinds = [' class="number"' * (i >= text_columns) for i in range(len(head.split(",")))]

    def line(tag: str, cells: Iterable[Any]) -> str:
        made = (f"<{tag}{k}>{_text(cell)}</{tag}>" for k, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    table = f"<table><thead>{line('th', head.split(','))}</thead><tbody>{body}</tbody></table>"
    card = f'<section class="card"><div class="scroll" tabindex="0">{table}</div></section>'
    return f"<h2>{title}</h2>{card}" if rows else ""


def _stage_table(rank: RankRun, own: Numbers) -> str:
    rows = [
        (
            name,
            percent(own["waits_pct"].get(name, 0.0)),
            *(seconds(stage[key]) for key in ("busy_s", "blocked_in_s", "blocked_out_s")),
            count(stage["items"]),
            size(stage["bytes"]),
        )
        for name, stage in _overall(rank).get("stages", {}).items()
    ]
    head = "stage,steps wait for it,busy,waits for input,waits for room,items,bytes"
    return _table("Stages", head, rows, text_columns=1)


def _event_table(run: Run) -> str:
    events = [event for rank in run.ranks.values() for event in rank.events]
    shown = [e for e in events if kind(e) not in ELSEWHERE]
    shown = sorted(shown, key=itemgetter("ts"))[-MAX_EVENTS:]
    rows = [(when(e["ts"]), e["rank"], e["step"], kind(e), describe(e)) for e in shown]
    return _table("Events", "time,rank,step,event,fields", rows)


def _settings_table(rank: RankRun) -> str:
    rows = [pair for part in ("settings", "versions") for pair in rank.boot.get(part, {}).items()]
    return _table("Settings and versions", "name,value", rows)

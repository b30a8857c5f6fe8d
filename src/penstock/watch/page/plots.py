"""The plots of a report, as plotly's JSON.

In:    a run's columns and its numbers.
Out:   for each plot its traces, its layout and a sentence for those who cannot see it.
Where: the thread that makes a report.
State: none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.watch.page.draw import Figure, figure, layout, line, note, safe, upright
from penstock.watch.page.numbers import RankNumbers, RunNumbers
from penstock.watch.page.run import STAGES, Column, Event, RankRun, Session, number, numbers
from penstock.watch.page.series import drawn, medians, packed, stretches
from penstock.watch.page.units import count, percent, seconds
from penstock.watch.page.words import not_finite

MOST_MARKS = 60
"""Spikes, stalls or pauses that are marked in one plot."""
WIDE_RANGE = 10
"""When the slowest step takes this many times the usual, a linear axis shows nothing but that step."""
FARTHEST = 1e38
"""A loss beyond it is drawn there: plots have four bytes for a number."""


def rank_figures(rank: RankRun, one: RankNumbers) -> dict[str, Figure]:
    """The plots over time of one rank. What was not recorded is not among them."""
    figures = {
        "step-time": _step_time(rank, one),
        "waits": _waits(rank, one),
        "next": _next(rank, one),
        "queue": _queue(rank, one),
        "rate": _rate(rank, one),
        "loss": _loss(rank, one),
        "memory": _memory(rank, one),
        "ledger": _ledger(rank.judged()),
    }
    return {name: one for name, one in figures.items() if one is not None}


def _step_time(rank: RankRun, one: RankNumbers) -> Figure | None:
    times = rank.columns["dt_step_s"]
    known = times[~np.isnan(times)]
    if not len(known):
        return None
    traces = [line("step time", *drawn(rank, times), "@main", unit=" s", width=1.2)]
    if len(known) > 400:
        traces.append(line("median around it", *medians(rank, times), "@ink", unit=" s", width=2))
    fetch = rank.columns["dt_fetch_s"]
    if not np.isnan(fetch).all():
        traces.append(line("of it in next()", *drawn(rank, fetch), "@bad", unit=" s", width=1.2))
    traces += _marks(rank, one)
    plan = _plan(rank, one, "seconds a step", named=True)
    usual = float(np.median(known))
    made = figure(traces, plan, f"Time of each step of rank {rank.rank}: median {seconds(usual)}, ")
    made["alt"] += f"longest {seconds(float(known.max()))}. {_steady_words(one)}"
    made["log"] = wide_range(known)
    return made


def _marks(rank: RankRun, one: RankNumbers) -> list[dict[str, Any]]:
    """Spikes, stalls and pauses, where they happened."""
    session = rank.judged()
    steps = rank.step[session.begin : session.end]
    times = rank.columns["dt_step_s"][session.begin : session.end]
    at = {
        int(step): float(time)
        for step, time in zip(steps, times, strict=True)
        if not math.isnan(time)
    }
    stalls = [event for event in rank.events if event.msg == "stall"]
    pauses = [event for event in rank.events if event.msg == "pause"]
    spikes = sorted((step for step in one.shape.spikes if step in at), key=lambda step: -at[step])[
        :MOST_MARKS
    ]
    found = [
        _mark(
            "spike", [(step, at[step], "") for step in sorted(spikes)], "triangle-up-open", "@warn"
        )
    ]
    # A stall is written while the step still waits, so it belongs to the step after the last one that was done.
    found.append(
        _mark("stall", [(e.step + 1, at.get(e.step + 1), _stall(e)) for e in stalls], "x", "@bad")
    )
    found.append(
        _mark(
            "pause", [(e.step, at.get(e.step), _pause(e)) for e in pauses], "square-open", "@soft"
        )
    )
    return [mark for mark in found if mark is not None]


def _mark(
    name: str, points: list[tuple[int, float | None, str]], symbol: str, colour: str
) -> dict[str, Any] | None:
    known = [(x, y, text) for x, y, text in points if y is not None][:MOST_MARKS]
    if not known:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x for x, _, _ in known],
        "y": [y for _, y, _ in known],
        "text": [text for _, _, text in known],
        "cliponaxis": False,
        "marker": {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1.5}},
        "hovertemplate": f"{name}, step %{{x}}: %{{y:.3g}} s %{{text}}<extra></extra>",
    }


def _stall(event: Event) -> str:
    return safe(f"({event.fields.get('stage')}: {event.fields.get('where')})")


def _pause(event: Event) -> str:
    return safe(f"({event.fields.get('name')}, {seconds(number(event.fields.get('seconds')))})")


def _waits(rank: RankRun, one: RankNumbers) -> Figure | None:
    """Whose waiting it was. Bars, because shares of a stretch add up where shares of a step only flicker."""
    times, fetch = rank.columns["dt_step_s"], rank.columns["dt_fetch_s"]
    parts = stretches(rank)
    rows = [(part, first, last, float(np.nansum(times[part]))) for part, first, last in parts]
    rows = [row for row in rows if row[3] > 0]
    if not rows:
        return None
    waits = rank.waits
    if not waits:
        if np.isnan(fetch).all():
            return None
        waits = {"next()": np.nan_to_num(fetch)}
    x = [(first + last) / 2 for _, first, last, _ in rows]
    width = [last - first + 1 for _, first, last, _ in rows]
    traces = []
    for name, column in waits.items():
        share = [min(100.0, 100 * float(column[part].sum()) / wall) for part, _, _, wall in rows]
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": packed(x),
                "y": packed(share),
                "width": packed(width),
                "marker": {"color": f"@{name}" if name in STAGES else "@bad", "line": {"width": 0}},
                "hovertemplate": f"{name}, around step %{{x:.0f}}: %{{y:.2f}} %<extra></extra>",
            }
        )
    plan = _plan(rank, one, "% of the time") | {
        "barmode": "stack",
        "bargap": 0,
        "hovermode": "closest",
    }
    told = (
        ", ".join(f"{name} {percent(pct)}" for name, pct in one.waits_pct.items())
        or "not known by stage"
    )
    alt = f"Share of the time that rank {rank.rank} waited for data, by stage: {told}."
    return figure(traces, plan, alt)


def _next(rank: RankRun, one: RankNumbers) -> Figure | None:
    names = (("p50", "@good"), ("p95", "@warn"), ("p99", "@bad"))
    traces = []
    for name, colour in names:
        column = rank.columns[f"fetch_{name}_ms"]
        if not np.isnan(column).all():
            traces.append(line(name, *drawn(rank, column), colour, unit=" ms"))
    if not traces:
        return None
    plan = _plan(rank, one, "ms in next()")
    alt = (
        f"Time in next() of rank {rank.rank}, rolling. In steady state p50 {_ms(one.next_p50_ms)}, "
    )
    made = figure(traces, plan, f"{alt}p95 {_ms(one.next_p95_ms)}, p99 {_ms(one.next_p99_ms)}.")
    made["log"] = wide_range(rank.columns["fetch_p99_ms"])
    return made


def _queue(rank: RankRun, one: RankNumbers) -> Figure | None:
    depth, capacity = rank.columns["queue_depth"], rank.columns["queue_capacity"]
    traces, alt = [], f"How full the queues of rank {rank.rank} are."
    plan = _plan(rank, one, "% full")
    there = capacity >= 1  # less is no queue
    if there.any():
        full = np.where(there, 100 * depth / np.where(there, capacity, 1), np.nan)
        traces.append(line("batches", *drawn(rank, full), "@faint", unit=" %", width=1))
        traces.append(
            line("median around it", *medians(rank, full, 60), "@main", unit=" %", width=2)
        )
        plan["yaxis"]["range"] = [0, 104]
        alt += f" Batches: {percent(_median(full))} at the median."
        for name, (x, y) in _occupancy(rank).items():
            if name != "batches":
                traces.append(line(safe(name), x, y, "@pack", unit=" %", width=1.2))
    elif not np.isnan(depth).all():
        traces.append(line("batches", *drawn(rank, depth), "@main"))
        plan["yaxis"]["title"]["text"] = "batches ready"
    if not traces:
        return None
    return figure(traces, plan, alt)


def _occupancy(rank: RankRun) -> dict[str, tuple[Column, Column]]:
    """Queues that only the beats know of."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for step, queues in rank.beats:
        for name, share in queues.items():
            if len(found) < 4 or name in found:
                x, y = found.setdefault(name, ([], []))
                x.append(step)
                y.append(100 * share)
    return {name: (np.asarray(x, float), np.asarray(y, float)) for name, (x, y) in found.items()}


def _rate(rank: RankRun, one: RankNumbers) -> Figure | None:
    times, tokens, rolling = (rank.columns[name] for name in ("dt_step_s", "tokens", "toks_per_s"))
    each = np.where(times > 0, tokens / np.where(times > 0, times, 1), np.nan)
    traces = []
    if not np.isnan(each).all():
        traces.append(line("each step", *drawn(rank, each), "@faint", width=1))
        traces.append(line("median around it", *medians(rank, each), "@main", width=2))
    elif not np.isnan(rolling).all():
        traces.append(line("rolling", *drawn(rank, rolling), "@main", width=1.5))
    if not traces:
        return None
    plan = _plan(rank, one, "tokens/s")
    alt = f"Tokens a second of rank {rank.rank}."
    if (
        one.shape.tokens_per_s is not None
        and one.shape.low is not None
        and one.shape.high is not None
    ):
        low, high = one.shape.low, one.shape.high
        plan["shapes"].append(
            {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high}
            | {"fillcolor": "@good", "opacity": 0.25, "line": {"width": 0}, "layer": "below"}
        )
        alt += f" Steady: {count(one.shape.tokens_per_s)} ({count(low)} to {count(high)})."
    return figure(traces, plan, alt)


def _loss(rank: RankRun, one: RankNumbers) -> Figure | None:
    loss = np.clip(rank.columns["loss"], -FARTHEST, FARTHEST)
    if np.isnan(loss).all() and one.loss_not_finite is None:
        return None
    traces = [line("loss", *drawn(rank, loss), "@faint", width=1)]
    traces.append(line("median around it", *medians(rank, loss), "@main", width=2))
    plan = _plan(rank, one, "loss")
    plan["yaxis"]["rangemode"] = "normal"
    alt = f"Loss of rank {rank.rank}."
    if one.last_loss is not None:
        alt += f" The last finite one is {one.last_loss:.4g}."
    if (first := one.loss_not_finite) is not None:
        plan["shapes"].append(upright(first, "@bad", "solid"))
        plan["annotations"].append(note(first, "not finite", "@bad", _side(rank, first)))
        alt += f" It is not finite {not_finite(one)}."
    return figure(traces, plan, alt)


def _memory(rank: RankRun, one: RankNumbers) -> Figure | None:
    traces = []
    for name, title, colour in (
        ("rss_bytes", "process", "@main"),
        ("device_bytes", "device", "@warn"),
    ):
        column = rank.columns[name] / 1e9
        if not np.isnan(column).all():
            traces.append(line(title, *drawn(rank, column, 600), colour, unit=" GB"))
    if not traces:
        return None
    plan = _plan(rank, one, "GB")
    return figure(traces, plan, f"Memory of rank {rank.rank} over its steps.")


def _ledger(session: Session) -> Figure | None:
    """From the start to the first batch, each part where the one before it ended."""
    reached = sorted(numbers(session.ready.get("ledger")).items(), key=lambda item: item[1])
    reached = [(name, at) for name, at in reached if at >= 0][:12]
    if not reached:
        return None
    names, begun, took, last = [], [], [], 0.0
    for name, at in reached:
        names.append(name.replace("_", " "))
        begun.append(last)
        took.append(at - last)
        last = at
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [safe(name) for name in names],
        "x": took,
        "base": begun,
        "text": [f" {seconds(one)}" for one in took],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": "@main"},
        "hovertemplate": "%{y}: %{text}, done at %{x:.2f} s<extra></extra>",
    }
    plan = layout("", over_steps=False)
    plan["xaxis"] = {"title": {"text": "seconds since the start"}, "range": [0, 1.14 * last or 1]}
    plan["yaxis"] = {"autorange": "reversed", "automargin": True, "ticks": ""}
    plan["showlegend"] = False
    plan["height"] = 90 + 26 * len(names)
    longest = max(range(len(took)), key=lambda i: took[i])
    # The page shows this as text, not as plotly does: it needs no escaping.
    part = f"{names[longest][:120]}, {seconds(took[longest])}"
    alt = f"The way to the first batch took {seconds(last)}; the longest part was {part}."
    return figure([trace], plan, alt)


def ranks_figure(run: RunNumbers, shown: list[RankNumbers]) -> Figure:
    """Every rank's waiting, side by side."""
    order = sorted(shown, key=lambda one: one.rank)
    names = [f"rank {one.rank}" for one in order]
    traces = []
    for stage in STAGES:
        share = [one.waits_pct.get(stage, 0.0) for one in order]
        if any(share):
            traces.append(_bar(stage, names, share, f"@{stage}"))
    if not traces:
        traces.append(_bar("next()", names, [one.data_wait_pct or 0.0 for one in order], "@bad"))
    plan = layout("", over_steps=False) | {"barmode": "stack", "hovermode": "closest"}
    plan["xaxis"] = {"title": {"text": "% of the time, waiting"}, "rangemode": "tozero"}
    plan["yaxis"] = {"autorange": "reversed", "automargin": True, "ticks": "", "type": "category"}
    plan["height"] = 120 + 24 * len(order)
    return figure(
        traces,
        plan,
        f"Waiting of each rank by stage. Rank {run.worst_rank} waits most for its own data.",
    )


def _bar(name: str, y: list[str], x: list[float], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": y,
        "x": [round(value, 4) for value in x],
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}, {name}: %{{x:.2f}} %<extra></extra>",
    }


def _plan(rank: RankRun, one: RankNumbers, title: str, named: bool = False) -> dict[str, Any]:
    """The layout of a plot over steps: all of them show the same steps, with the same regions marked."""
    plan = layout(title, over_steps=True)
    plan["shapes"], plan["annotations"] = _regions(rank, one, named)
    if len(rank.step):
        plan["xaxis"]["range"] = [int(rank.step.min()) - 0.5, int(rank.step.max()) + 0.5]
    plan["yaxis"]["rangemode"] = "tozero"
    return plan


def _regions(rank: RankRun, one: RankNumbers, named: bool) -> tuple[list[Figure], list[Figure]]:
    """Warmup shaded, the beginning of steady state, later changes, and where a run was resumed."""
    shapes: list[Figure] = []
    notes: list[Figure] = []
    first, steady = one.first_step, one.shape.from_step
    if first is not None and steady is not None:
        if steady > first:
            box = {
                "type": "rect",
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "x0": first - 0.5,
                "x1": steady - 0.5,
            }
            shapes.append(box | {"fillcolor": "@shade", "line": {"width": 0}, "layer": "below"})
        shapes.append(upright(steady - 0.5, "@good", "solid"))
        if named:
            notes.append(
                note(steady - 0.5, f"steady from {steady:,}", "@good", _side(rank, steady))
            )
    for session in rank.sessions[1:]:
        if session.steps:
            at = int(rank.step[session.begin])
            shapes.append(upright(at - 0.5, "@soft", "dash"))
            if named:
                notes.append(note(at - 0.5, "resumed", "@soft", _side(rank, at, 0.2)))
    for change in one.shape.changes[:10]:
        shapes.append(upright(change["step"] - 0.5, "@warn", "dot"))
        if named:
            notes.append(
                note(
                    change["step"] - 0.5,
                    f"{change['pct']:+.0f} %",
                    "@warn",
                    _side(rank, change["step"]),
                )
            )
    return shapes, notes


def _side(rank: RankRun, step: float, from_share: float = 0.7) -> str:
    """On which side of a line its words end, so that they stay within the plot."""
    first, last = int(rank.step.min()), int(rank.step.max())
    return "right" if step - first > from_share * (last - first) else "left"


def _steady_words(one: RankNumbers) -> str:
    shape = one.shape
    if shape.from_step is None:
        return f"Class: {shape.kind}."
    return f"Steady from step {shape.from_step:,}; class: {shape.kind}."


def _median(values: Column) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def wide_range(values: Column) -> bool:
    """Whether a linear axis would show little but its largest value."""
    known = values[values > 0]
    return bool(len(known) and known.max() > WIDE_RANGE * np.median(known))


def _ms(value: float | None) -> str:
    return "?" if value is None else seconds(value / 1000)

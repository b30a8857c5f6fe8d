"""Two runs side by side: which is faster, whether that is more than chance, and what was set differently.

In:    two runs and their numbers.
Out:   the difference in numbers and words, plots and the body of a page.
Where: the thread that makes a report.
State: none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.watch.page.draw import Figure, figure, layout, line
from penstock.watch.page.numbers import RunNumbers
from penstock.watch.page.page import card, facts, plot, prose, table, text, warnings
from penstock.watch.page.plots import wide_range
from penstock.watch.page.run import STAGES, Column, Run
from penstock.watch.page.series import medians
from penstock.watch.page.tables import flat
from penstock.watch.page.units import count, percent, printable, seconds
from penstock.watch.page.words import Words, headline

Pair = tuple[RunNumbers, RunNumbers]
BINS = 80
MOST_SETTINGS = 200


@dataclass(frozen=True, kw_only=True)
class Difference:
    """B against A."""

    tokens_per_s_pct: float | None
    """How much faster B is; negative is slower."""
    beyond_intervals: bool | None
    """Whether the 95 % intervals of the two rates lie apart. None where one of them is not known."""
    step_p50_pct: float | None
    data_wait_points: float | None
    overhead_s: float | None
    settings: dict[str, list[Any]]
    """Those that differ: the value in A and in B, null where it is not set."""
    words: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_numbers(runs: tuple[Run, Run], both: Pair) -> Difference:
    a, b = both
    rate = _change(a.tokens_per_s, b.tokens_per_s)
    beyond = None
    if a.low is not None and a.high is not None and b.low is not None and b.high is not None:
        beyond = b.low > a.high or b.high < a.low
    known: dict[str, Any] = {
        "tokens_per_s_pct": rate,
        "beyond_intervals": beyond,
        "step_p50_pct": _change(a.worst.shape.p50_s, b.worst.shape.p50_s),
        "data_wait_points": _minus(b.data_wait_pct, a.data_wait_pct),
        "overhead_s": _minus(b.overhead_s, a.overhead_s),
        "settings": _settings(*runs),
    }
    return Difference(**known, words=_words(rate, beyond))


def _words(rate: float | None, beyond: bool | None) -> str:
    if rate is None:
        return "The steady rates cannot be compared: one of the runs has none"
    way = f"B is {percent(abs(rate))} {'faster' if rate >= 0 else 'slower'} than A"
    if beyond is None:
        return f"{way}; how certain that is cannot be said"
    if beyond:
        return f"{way}, beyond both 95 % intervals"
    return f"No difference shown: {way}, within the 95 % intervals"


def _settings(a: Run, b: Run) -> dict[str, list[Any]]:
    one, other = (
        {
            name: _plain(value)
            for part in ("settings", "versions")
            for name, value in flat({part: boot.get(part)})
        }
        for boot in (run.first.judged().boot for run in (a, b))
    )
    one["ranks"], other["ranks"] = len(a.ranks), len(b.ranks)
    names = sorted(one.keys() | other.keys())
    return {
        name: [one.get(name), other.get(name)] for name in names if one.get(name) != other.get(name)
    }


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def compare_summary(both: Pair, names: tuple[str, str], difference: Difference) -> str:
    """For a terminal."""
    lines = [difference.words]
    for letter, run, name in zip("AB", both, names, strict=True):
        rate = f", {count(run.tokens_per_s)} tokens/s" if run.tokens_per_s is not None else ""
        lines.append(
            f"  {letter} {name}: {headline(run)}{rate}{f' [{run.band}]' if run.band else ''}"
        )
    if difference.settings:
        lines.append(f"  set differently: {', '.join(list(difference.settings)[:8])}")
    return printable("\n".join(lines))


def compare_figures(runs: tuple[Run, Run], both: Pair) -> dict[str, Figure]:
    figures = {
        "rates": _rates(both),
        "spread": _spread(runs, both),
        "both-waits": _waits(both),
        "both-steps": _steps(runs),
    }
    return {name: one for name, one in figures.items() if one is not None}


def _rates(both: Pair) -> Figure | None:
    known = [
        (letter, run)
        for letter, run in zip("AB", both, strict=True)
        if run.tokens_per_s is not None
    ]
    if not known:
        return None
    traces = []
    for letter, run in known:
        rate = run.tokens_per_s or 0.0
        error: dict[str, Any] = {"type": "data", "symmetric": False, "thickness": 2, "width": 8}
        error |= {"array": [(run.high or rate) - rate], "arrayminus": [rate - (run.low or rate)]}
        colour = f"@run-{letter.lower()}"
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": letter,
                "y": [letter],
                "x": [rate],
                "error_x": error,
            }
            | {
                "marker": {"size": 12, "color": colour},
                "hovertemplate": f"{letter}: %{{x:,.0f}} tokens/s<extra></extra>",
            }
        )
        error["color"] = colour
    plan = layout("", over_steps=False) | {"showlegend": False, "height": 190}
    plan["xaxis"] = {"title": {"text": "steady tokens/s, with 95 % interval"}, "automargin": True}
    plan["yaxis"] = {"type": "category", "automargin": True, "autorange": "reversed"}
    told = "; ".join(
        f"{x} {count(run.tokens_per_s)} ({count(run.low)} to {count(run.high)})" for x, run in known
    )
    return figure(traces, plan, f"Steady tokens a second: {told}.")


def _spread(runs: tuple[Run, Run], both: Pair) -> Figure | None:
    """Step times after warmup as densities over the same bins, of all ranks."""
    times = [_steady_times(run, known) for run, known in zip(runs, both, strict=True)]
    if not all(len(one) for one in times):
        return None
    ends = np.array([np.quantile(one, (0.002, 0.995)) for one in times])
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    edges = np.linspace(low, high if high > low else low + max(1e-6, 0.1 * low), BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    traces = []
    for letter, one in zip("AB", times, strict=True):
        share = 100 * np.histogram(one, edges)[0] / len(one)
        trace = line(letter, middles, share, f"@run-{letter.lower()}", unit=" % of steps", width=2)
        traces.append(trace | {"line": trace["line"] | {"shape": "hvh"}})
    plan = layout("% of steps", over_steps=True)
    plan["xaxis"]["title"]["text"] = "seconds a step"
    plan["yaxis"]["rangemode"] = "tozero"
    told = "; ".join(
        f"{x} median {seconds(float(np.median(one)))}" for x, one in zip("AB", times, strict=True)
    )
    return figure(
        traces,
        plan,
        f"How long steps take after warmup, all ranks: {told}. The slowest 0.5 % are cut off.",
    )


def _steady_times(run: Run, known: RunNumbers) -> Column:
    parts = []
    for rank, one in zip(run.ranks, known.ranks, strict=True):
        session = rank.judged()
        steps = rank.step[session.begin : session.end]
        times = rank.columns["dt_step_s"][session.begin : session.end]
        wanted = ~np.isnan(times) & (steps >= (one.shape.from_step or 0))
        parts.append(times[wanted])
    return np.concatenate(parts)


def _waits(both: Pair) -> Figure | None:
    if all(run.data_wait_pct is None for run in both):
        return None
    traces = []
    for stage in (*STAGES, "next()"):
        share = []
        for run in both:
            waits = run.worst.waits_pct or {"next()": run.data_wait_pct or 0.0}
            share.append(round(waits.get(stage, 0.0), 4))
        if any(share):
            traces.append(
                {"type": "bar", "orientation": "h", "name": stage, "y": ["A", "B"], "x": share}
                | {"marker": {"color": f"@{stage}" if stage in STAGES else "@bad"}}
                | {"hovertemplate": f"%{{y}}, {stage}: %{{x:.2f}} %<extra></extra>"}
            )
    plan = layout("", over_steps=False) | {"barmode": "stack", "height": 210}
    plan["xaxis"] = {
        "title": {"text": "% of the time, waiting"},
        "rangemode": "tozero",
        "automargin": True,
    }
    plan["yaxis"] = {"type": "category", "automargin": True, "autorange": "reversed"}
    told = "; ".join(f"{x} {percent(run.data_wait_pct)}" for x, run in zip("AB", both, strict=True))
    return figure(traces, plan, f"Data wait of the rank that waits most, by stage: {told}.")


def _steps(runs: tuple[Run, Run]) -> Figure | None:
    traces, wide = [], False
    for letter, run in zip("AB", runs, strict=True):
        x, y = medians(run.first, run.first.columns["dt_step_s"])
        if x:
            wide = wide or wide_range(np.asarray(y))
            traces.append(line(letter, x, y, f"@run-{letter.lower()}", unit=" s", width=2))
    if not traces:
        return None
    plan = layout("seconds a step", over_steps=True)
    plan["yaxis"]["rangemode"] = "tozero"
    ranks = " and ".join(str(rank) for rank in dict.fromkeys(run.first.rank for run in runs))
    return figure(traces, plan, f"Median step time along both runs, rank {ranks}.") | {"log": wide}


def compare_body(
    both: Pair, said: tuple[Words, Words], names: tuple[str, str], difference: Difference
) -> str:
    cards = "".join(map(_half, "AB", both, said, names))
    kind = (
        ""
        if not difference.beyond_intervals
        else "good"
        if (difference.tokens_per_s_pct or 0) > 0
        else "fair"
    )
    told = f"<h2>{prose(difference.words)}</h2>{facts(_difference(difference))}"
    plots = (
        plot("rates", "Steady rate", wide=True, own_height=True)
        + plot("spread", "Step times after warmup")
        + plot("both-steps", "Step time along the run", log=True)
        + plot("both-waits", "Data wait by stage", wide=True, own_height=True)
    )
    rows = [
        (name, _value(a), _value(b))
        for name, (a, b) in list(difference.settings.items())[:MOST_SETTINGS]
    ]
    settings = table(
        "Settings and versions that differ", ("setting", "A", "B"), rows, wide=(0, 1, 2)
    )
    parts = [
        card(told, f"verdict {kind}"),
        f'<h2>The two runs</h2><div class="two">{cards}</div>',
        f'<h2>Side by side</h2><div class="plots">{plots}</div>',
        card(_side_by_side(both), "long"),
        "<h2>What was set differently</h2>"
        + card(settings if rows else "<p>Nothing that was recorded.</p>", "long"),
    ]
    return "\n".join(parts)


def _half(letter: str, run: RunNumbers, said: Words, name: str) -> str:
    band = f'<span class="band">{text(run.band)}</span>' if run.band else ""
    told = f"<h3>{prose(said.headline)}</h3><p>{' '.join(map(prose, said.sentences))}</p>"
    inner = f"{band} <b>{letter}</b> {text(name)}{told}{warnings(said.warnings)}"
    return card(inner, f"verdict {run.band or ''}")


def _difference(difference: Difference) -> Iterable[tuple[str, str, str]]:
    def signed(value: float | None, unit: str) -> str:
        return "?" if value is None else f"{value:+.1f} {unit}".replace("-", "\N{MINUS SIGN}")

    beyond = {None: "not known", True: "intervals lie apart", False: "intervals overlap"}[
        difference.beyond_intervals
    ]
    yield "steady tokens/s", signed(difference.tokens_per_s_pct, "%"), beyond
    yield "step time p50", signed(difference.step_p50_pct, "%"), "of the rank that waits most"
    yield "data wait", signed(difference.data_wait_points, "points"), "of that rank"
    yield "warmup overhead", signed(difference.overhead_s, "s"), "B less A"


def _side_by_side(both: Pair) -> str:
    rows = [
        ("data wait", *(percent(run.data_wait_pct) for run in both)),
        ("data wait, warmup included", *(percent(run.worst.data_wait_all_pct) for run in both)),
        ("steady tokens/s", *(count(run.tokens_per_s) for run in both)),
        ("95 % interval from", *(count(run.low) for run in both)),
        ("95 % interval to", *(count(run.high) for run in both)),
        (
            "steady since step",
            *("–" if run.steady_from is None else f"{run.steady_from:,}" for run in both),
        ),
        ("class", *(run.worst.shape.kind for run in both)),
        ("warmup overhead", *(seconds(run.overhead_s) for run in both)),
        ("step time p50", *(seconds(run.worst.shape.p50_s) for run in both)),
        ("step time p95", *(seconds(run.worst.shape.p95_s) for run in both)),
        ("step time p99", *(seconds(run.worst.shape.p99_s) for run in both)),
        ("next() p50", *(_ms(run.worst.next_p50_ms) for run in both)),
        ("next() p95", *(_ms(run.worst.next_p95_ms) for run in both)),
        ("next() p99", *(_ms(run.worst.next_p99_ms) for run in both)),
        ("first batch", *(seconds(run.worst.first_batch_s) for run in both)),
        ("steps", *(f"{run.worst.steps:,}" for run in both)),
        ("ranks", *(len(run.ranks) for run in both)),
        ("stalls", *(sum(one.events.get("stall", 0) for one in run.ranks) for run in both)),
        (
            "last loss",
            *("?" if run.worst.last_loss is None else f"{run.worst.last_loss:.4g}" for run in both),
        ),
    ]
    return table(
        "The numbers of both; times are of the rank that waits most",
        ("", "A", "B"),
        rows,
        numeric=(1, 2),
    )


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)


def _ms(value: float | None) -> str:
    return "?" if value is None else seconds(value / 1000)


def _change(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or a <= 0 else 100 * (b / a - 1)


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b

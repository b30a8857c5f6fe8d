"""The words and tables of a report's page.

In:    a run and its numbers.
Out:   HTML, with every text from a file escaped.
Where: the thread that makes a report.
State: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.watch.page.numbers import RunNumbers
from penstock.watch.page.page import Cell, card, facts, prose, table, text, warnings
from penstock.watch.page.run import STAGES, Event, RankRun, Run, number, numbers
from penstock.watch.page.units import count, percent, seconds, size, when
from penstock.watch.page.words import Words
from penstock.watch.view.fields import number as loss_number

MOST_ROWS = 30
"""Events of one kind that are listed from the beginning, and as many from the end."""
MOST_CAUSES = 12
LEFT_OUT = frozenset(
    ("ts", "iso", "mono", "pid", "rank", "step", "msg", "stages", "settings", "versions", "ledger")
)


def verdict(run: RunNumbers, said: Words) -> str:
    """The first card of the page."""
    band = f'<span class="band">{text(run.band)}</span>' if run.band else ""
    told = f"<h2>{prose(said.headline)}</h2><p>{' '.join(map(prose, said.sentences))}</p>"
    inner = f"{band}{told}{facts(_facts(run))}{warnings(said.warnings)}"
    return card(inner, f"verdict {run.band or ''}")


def _facts(run: RunNumbers) -> list[tuple[str, str, str]]:
    worst = run.worst
    shape = worst.shape
    interval = f"{count(run.low)} to {count(run.high)}" if run.low is not None else "no interval"
    rates = [one.tokens_per_s for one in run.ranks if one.tokens_per_s is not None]
    spikes = (
        ""
        if not shape.spikes
        else f"{len(shape.spikes):,} {'spike' if len(shape.spikes) == 1 else 'spikes'}"
        + (f", every {shape.spike_period} steps" if shape.spike_period else "")
    )
    found = [
        (
            "data wait",
            percent(run.data_wait_pct),
            f"with warmup {percent(worst.data_wait_all_pct)}" if run.band else "not recorded",
        ),
        ("steady tokens/s", count(run.tokens_per_s), interval)
        if run.tokens_per_s is not None
        else ("tokens/s", count(sum(rates)), "all steps; no steady state")
        if rates
        else ("tokens/s", "?", "not recorded"),
        (
            "steady since step",
            "–" if run.steady_from is None else f"{run.steady_from:,}",
            shape.kind,
        ),
        ("warmup overhead", seconds(run.overhead_s), _of_run(run.overhead_pct)),
        (
            "step time p50",
            seconds(shape.p50_s),
            f"p95 {seconds(shape.p95_s)}, p99 {seconds(shape.p99_s)}",
        ),
        ("steps", f"{worst.steps:,}", spikes),
        ("first batch", seconds(worst.first_batch_s), _warmed(worst.warmup_wait_s)),
    ]
    if len(run.ranks) > 1:
        found.append(
            (
                "worst rank",
                str(run.worst_rank),
                f"waits {percent(worst.own_wait_pct)} for its own data",
            )
        )
    return found


def _warmed(wait_s: float | None) -> str:
    return "no warmup recorded" if wait_s is None else f"warmup wait {seconds(wait_s)}"


def _of_run(pct: float | None) -> str:
    return "" if pct is None else f"{percent(pct)} of the run"


def cause_list(run: RunNumbers) -> str:
    """Why steps were slow, as far as there is evidence."""
    shape = run.worst.shape
    said = list(shape.causes[:MOST_CAUSES])
    if len(shape.causes) > len(said):
        said.append(f"and {len(shape.causes) - len(said)} more, which --json lists")
    if shape.drift_per_1000_pct is not None:
        way = "slower" if shape.drift_per_1000_pct > 0 else "faster"
        said.append(
            f"steady steps become {abs(shape.drift_per_1000_pct):.2g} % {way} in 1,000 steps"
        )
    return f"<ul>{''.join(f'<li>{prose(one)}</li>' for one in said)}</ul>" if said else ""


def rank_table(run: RunNumbers) -> str:
    head = (
        "rank",
        "host",
        "steps",
        "data wait",
        "own",
        "tokens/s",
        "step p50",
        "p95",
        "next() p95",
        "steady from",
        "stalls",
    )
    ranks = sorted(run.ranks, key=lambda one: (-one.own_wait_pct, one.rank))
    rows = [
        (
            one.rank,
            one.host,
            f"{one.steps:,}",
            percent(one.data_wait_pct),
            percent(one.own_wait_pct),
            count(
                one.shape.tokens_per_s if one.shape.tokens_per_s is not None else one.tokens_per_s
            ),
            seconds(one.shape.p50_s),
            seconds(one.shape.p95_s),
            seconds(None if one.next_p95_ms is None else one.next_p95_ms / 1000),
            "–" if one.shape.from_step is None else f"{one.shape.from_step:,}",
            one.events.get("stall", 0),
        )
        for one in ranks
    ]
    caption = "Those that wait longest for data of their own first; “own” leaves out waiting for other ranks."
    return table(caption, head, rows, numeric=range(2, 11), marked={0: "worst"})


def session_table(rank: RankRun) -> str:
    judged = rank.judged()
    rows = []
    for at, session in enumerate(rank.sessions, 1):
        steps = rank.step[session.begin : session.end]
        span = f"{int(steps[0]):,} to {int(steps[-1]):,}" if len(steps) else "no step"
        begun = when(number(session.boot.get("ts"))) if session.boot else "?"
        verdict_of = "the numbers above are of this one" if session is judged else ""
        rows.append((at, begun, span, session.ended or "no shutdown line", verdict_of))
    caption = f"Rank {rank.rank}: every start of the run."
    return table(
        caption, ("session", "begun", "steps", "ended", ""), rows, wide=(4,), unbroken=(1, 2)
    )


def stage_table(rank: RankRun) -> str:
    session = rank.judged()
    wall = float(np.nansum(rank.columns["dt_step_s"][session.begin : session.end]))
    rows = []
    for name in STAGES:
        known = numbers(session.stages.get(name))
        if known:
            busy = known.get("busy_s")
            rows.append(
                (
                    name,
                    seconds(busy),
                    percent(100 * busy / wall) if busy is not None and wall > 0 else "?",
                    seconds(known.get("blocked_in_s")),
                    seconds(known.get("blocked_out_s")),
                    count(known.get("items")),
                    size(known.get("bytes")),
                )
            )
    if not rows:
        return ""
    head = ("stage", "busy", "of wall", "waits for input", "waits for room", "items", "bytes")
    caption = f"Rank {rank.rank}, threads of a stage added up; a stage with several may be busy for more than the wall time."
    told = table(caption, head, rows, numeric=range(1, 7))
    fetch = numbers(session.fetch)
    if fetch:
        parts = [
            f"{name.removesuffix('_s').replace('_', ' ')} {seconds(fetch[name])}"
            for name in fetch
            if name.endswith("_s")
        ]
        told += (
            f"<p>Fetching: {text(', '.join(parts))}; {count(fetch.get('requests', 0))} requests, "
        )
        told += f"{count(fetch.get('retries', 0))} retries.</p>"
    return told


def event_table(run: Run) -> str:
    kinds: dict[str, list[Event]] = {}
    for rank in run.ranks:
        for event in rank.events:
            kinds.setdefault(event.msg, []).append(event)
    counts: dict[str, int] = {}
    for rank in run.ranks:
        for msg, n in rank.counts.items():
            counts[msg] = counts.get(msg, 0) + n
    shown: list[Event] = []
    for events in kinds.values():
        events.sort(key=lambda event: event.ts)
        shown += (
            events if len(events) <= 2 * MOST_ROWS else events[:MOST_ROWS] + events[-MOST_ROWS:]
        )
    shown.sort(key=lambda event: event.ts)
    rows = [(_moment(e), e.rank, e.step, _tag(e), describe(e)) for e in shown]
    told = ", ".join(f"{n:,} {msg.replace('_', ' ')}" for msg, n in sorted(counts.items()))
    left = sum(counts.values()) - len(shown)
    more = f"; {left:,} of them, from the middle of each kind, are not listed" if left > 0 else ""
    caption = f"{told or 'none'}{more}. Times are UTC."
    return table(
        caption,
        ("time", "rank", "step", "event", "what"),
        rows,
        numeric=(1, 2),
        wide=(4,),
        unbroken=(0,),
    )


def _moment(event: Event) -> Cell:
    """Date and time; a phone has no room for the date."""
    day, _, time = when(event.ts).removesuffix(" UTC").rpartition(" ")
    return Cell(f'<span class="day">{day} </span>{time}')


def _tag(event: Event) -> Cell:
    status = event.fields.get("status") if event.msg == "health" else ""
    kind = f"{event.msg} {status}" if status in ("ok", "warn", "fail") else event.msg
    return Cell(f'<span class="tag {kind}">{event.msg.replace("_", " ")}</span>')


def describe(event: Event) -> str:
    """An event in a line of text; not yet escaped."""
    said = {name: value for name, value in event.fields.items() if name not in LEFT_OUT}
    match event.msg:
        case "stall":
            return f"waited {_s(said, 'wait_s')} for {said.get('stage', '?')}, {said.get('where') or 'no file known'}"
        case "pause":
            return f"{said.get('name', '?')}, {_s(said, 'seconds')}"
        case "tune":
            kept = (
                ", kept"
                if said.get("kept") is True
                else ", taken back"
                if said.get("kept") is False
                else ""
            )
            return f"{said.get('what')}: {said.get('from')} → {said.get('to')}, because {said.get('why')}{kept}"
        case "fallback":
            return f"to {said.get('to')} data: {said.get('reason')}"
        case "error":
            places = ", ".join(str(said[name]) for name in ("stage", "where") if said.get(name))
            return f"{said.get('error', '?')}{f' in {places}' if places else ''}"
        case "health":
            reasons = said.get("reasons")
            why = "; ".join(map(str, reasons)) if isinstance(reasons, list) else str(reasons or "")
            return f"{said.get('status')}{': ' + why if why else ''}{', in its grace period' if said.get('grace') is True else ''}"
        case "ready":
            return f"first batch after {_s(said, 'dt')}"
        case "warmup":
            waited = number(said.get("wait_ms")) / 1000
            of = f" of {said['of']}" if said.get("of") else ""
            return f"{said.get('filled', '?')} of {said.get('requested', '?')} batches{of} in {seconds(waited)}"
        case "start":
            if "hidden_s" not in said:
                return f"torch and the model in {seconds(number(said.get('torch_s')) + number(said.get('build_s')))}"
            return (
                f"{_s(said, 'hidden_s')} of the data's {_s(said, 'data_s')} were hidden behind importing torch "
                f"({_s(said, 'torch_s')}) and building the model ({_s(said, 'build_s')}); {_s(said, 'waited_s')} were not"
            )
        case "prewarm":
            return f"model and optimizer warm after {_s(said, 'seconds')}"
        case "eval":
            return (
                f"validation loss {_loss(said.get('loss'))} over {said.get('batches', '?')} batches"
            )
        case "saved":
            return f"{said.get('folder', '?')} in {_s(said, 'seconds')}"
        case "steady_state":
            rate = count(number(said.get("tokens_per_s")))
            return f"from step {said.get('at_step')}, {rate} tokens/s, warmup cost {_s(said, 'overhead_s')}"
        case "boot":
            ranks = f", {said['world_size']} ranks" if said.get("world_size") else ""
            return f"on {said.get('host') or 'a host that is not named'}{ranks}{', resumed' if said.get('resumed') is True else ''}"
        case "shutdown":
            why = f"; {said['verdict']}" if said.get("verdict") else ""
            return f"{said.get('reason', '?')} after {said.get('steps', '?')} steps{why}"
    return ", ".join(f"{name} {value}" for name, value in said.items())


def _loss(value: Any) -> str:
    """A number beyond all measure is a loss too."""
    loss = loss_number(value)
    return "?" if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def _s(fields: Mapping[str, Any], name: str) -> str:
    return seconds(number(fields.get(name)))


def settings_tables(run: Run) -> str:
    boot = run.first.judged().boot
    rows = list(flat(boot.get("settings")))
    told = (
        table("Settings of the run", ("setting", "value"), rows, wide=(0, 1))
        if rows
        else "<p>No settings recorded.</p>"
    )
    versions = [(name, value) for name, value in flat(boot.get("versions"))]
    return told + (
        table("Versions", ("library", "version"), versions, wide=(0, 1)) if versions else ""
    )


def flat(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Settings as names with dots and values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, value


def file_table(run: Run) -> str:
    rows = [
        (rank.path.name, rank.rank, f"{rank.lines:,}", rank.skipped, rank.dropped)
        for rank in run.ranks
    ]
    head = ("file", "rank", "lines", "left out", "not written")
    caption = (
        "What this page was made of. “Left out” are lines that were torn or not a heartbeat’s."
    )
    return "<h2>Files</h2>" + card(
        table(caption, head, rows, numeric=(1, 2, 3, 4), wide=(0,)), "long"
    )

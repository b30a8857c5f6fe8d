"""The table of all entrants as Markdown, and the goals beside what was reached.

In:    what was seen of each entrant.
Out:   benchmarks/results/peers.md, and numbers for the plots in peers.json.
Where: the driver's process, at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Goal, show

from bench import PAUSES_S, Seen
from roster import (
    DOCUMENTED,
    HANDED,
    LIMIT,
    LIMIT_COPY,
    LIMIT_TEXT,
    PENSTOCK,
    PENSTOCK_TOKENS,
    PREPARED,
    Entrant,
)

GROUPS = {
    LIMIT: "Limits",
    DOCUMENTED: "From text, each with the tokenizer that its documentation uses",
    HANDED: "From text, with our tokenizer handed to it",
    PREPARED: "From tokens that were prepared",
}
SPEED = {
    "rate|M tokens/s": "M tokens/s", "CPU|s/M tokens": "CPU s per M tokens", "peak RSS|MB": "peak RSS, MB",
    "first batch, local|s": "first batch, s", "first batch, Hub|s": "from a Hub, s", "exit|s": "exit, s",
    "preparation|s": "prepared in, s",
}  # fmt: skip
PACED = {f"{1e3 * pause:.0f} ms steps, {what}": f"{1e3 * pause:.0f} ms: {short}" for pause in PAUSES_S
         for what, short in (("data wait|%", "wait %"), ("next() p50|ms", "p50 ms"), ("next() p99|ms", "p99 ms"))}  # fmt: skip
RESUMED = {
    "first batch of a resume at 80 %|s": "first batch of a resume at 80 %, s", "resume, once": "identical, once",
    "resume, twice": "twice", "resume, one worker instead of two": "with one worker instead of two",
    "one worker, two": "same stream for one worker and two",
}  # fmt: skip
STALLED = {"one answer stalls": "one answer stalls", "all answers stall": "all answers stall"}

Results = Mapping[str, Seen]


def write(
    folder: Path, entrants: Sequence[Entrant], seen: Results, about: Mapping[str, Any]
) -> Path:
    """The page; the plots' numbers beside it."""
    lines = ["# Beside its peers", "", *_about(about), ""]
    lines += ["## Goals", "", *_goals(entrants, seen), ""]
    for title, columns in (
        ("Speed", SPEED), ("Beside a consumer that waits after each batch", PACED),
        ("Resume, and the number of workers", RESUMED), ("A source that stalls", STALLED),
    ):  # fmt: skip
        lines += [f"## {title}", "", *_table(entrants, seen, columns), ""]
    path = folder / "peers.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    numbers = {
        entrant.name: {
            "group": entrant.group,
            **{key: seen[entrant.name].median(key) for key in (*SPEED, *PACED)},
        }
        for entrant in entrants
    }
    (folder / "peers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return path


def _about(about: Mapping[str, Any]) -> list[str]:
    machine = about["machine"]
    told = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    where = f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, commit {machine['commit']}"
    return [
        f"{machine['date'][:10]}, {where}. Medians of {about['repeats']} rounds, and more of those that take seconds. {told}."
    ]


def _cell(seen: Seen, key: str) -> str:
    if "|" not in key:
        return seen.words.get(key, "")
    median = seen.median(key)
    return "" if median is None else show(median)


def _table(entrants: Sequence[Entrant], seen: Results, columns: Mapping[str, str]) -> list[str]:
    used = {
        key: title
        for key, title in columns.items()
        if any(_cell(seen[each.name], key) for each in entrants)
    }
    if not used:
        return ["Not measured."]
    lines = ["| | " + " | ".join(used.values()) + " |", "|---" * (len(used) + 1) + "|"]
    for group, title in GROUPS.items():
        rows = [
            (entrant.name, [_cell(seen[entrant.name], key) for key in used])
            for entrant in entrants
            if entrant.group == group
        ]
        rows = [(name, cells) for name, cells in rows if any(cells) or seen[name].words]
        if rows:
            lines.append(f"| **{title}** |" + " |" * len(used))
        for name, cells in rows:
            failed = seen[name].words.get(
                "drain" if columns is SPEED else "resume" if columns is RESUMED else "", ""
            )
            if failed and not any(cells):
                cells = [failed, *cells[1:]]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _goals(entrants: Sequence[Entrant], seen: Results) -> list[str]:
    """Each goal, what was reached, and beside whom."""
    lines = ["| goal | reached | |", "|---|---|---|"]

    def best(group: str, key: str, pick: Callable[..., Any]) -> tuple[str, float] | None:
        found = [
            (each.name, value)
            for each in entrants
            if each.group == group
            and each.module != "ours"
            and (value := seen[each.name].median(key)) is not None
        ]
        return pick(found, key=lambda pair: pair[1]) if found else None

    def add(what: str, value: float | None, goal: Goal, beside: str = "") -> None:
        if value is not None:
            lines.append(
                f"| {what}: {goal} | {show(value)}{beside} | {'met' if goal.met(value) else '**missed**'} |"
            )

    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else a / b

    rate, cpu, first = "rate|M tokens/s", "CPU|s/M tokens", "first batch, local|s"
    own = seen[PENSTOCK]
    add(
        "from text, of the limit",
        over(own.median(rate), seen[LIMIT_TEXT].median(rate)),
        Goal(">=", 0.85),
    )
    for group, bound, what in (
        (HANDED, 2, "that has our tokenizer too"),
        (DOCUMENTED, 15, "as documented"),
        (PREPARED, 1, "that reads tokens prepared ahead"),
    ):
        rival = best(group, rate, max)
        if group == PREPARED and rival:
            rivals = [
                (n, seen[n].median(rate))
                for n in ("litdata, TokensLoader", "MosaicML Streaming, MDS of tokens")
            ]
            known = [(n, value) for n, value in rivals if value is not None]
            rival = max(known, key=lambda pair: pair[1]) if known else None
        if rival:
            ratio = over(own.median(rate), rival[1])
            add(
                f"times the best peer {what}",
                ratio,
                Goal(">=", bound),
                f" ({rival[0]}, {show(rival[1])} M tokens/s)",
            )
    add(
        "from tokens, of a bare gather and copy",
        over(seen[PENSTOCK_TOKENS].median(rate), seen[LIMIT_COPY].median(rate)),
        Goal(">=", 0.9),
    )
    soonest = [rival for group in (DOCUMENTED, HANDED) if (rival := best(group, first, min))]
    if soonest:
        name, value = min(soonest, key=lambda pair: pair[1])
        add(
            "first batch, of the soonest peer's from text",
            over(own.median(first), value),
            Goal("<=", 1),
            f" ({show(own.median(first) or 0)} s; {name}, {show(value)} s)",
        )
    add(
        "CPU time a token, of the limit's",
        over(own.median(cpu), seen[LIMIT_TEXT].median(cpu)),
        Goal("<=", 1.25),
    )
    add("peak RSS, MB", own.median("peak RSS|MB"), Goal("<=", 400))
    for pause in PAUSES_S:
        name = f"{1e3 * pause:.0f} ms steps, data wait"
        add(f"{name}, %", own.median(f"{name}|%"), Goal("<", 0.1))
    told = {title: own.words[key] for key, title in RESUMED.items() if key in own.words}
    return lines + [
        f"| {title}: identical | {words} | {'met' if words == 'identical' else '**missed**'} |"
        for title, words in told.items()
    ]

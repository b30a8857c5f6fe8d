"""Write the tables of all entrants, and the floors, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import Seen
from report import Goal, show
from roster import PENSTOCK, Entrant

GROUPS = {
    "limit": "Limit",
    "documented": "From text, each with the tokenizer that its documentation uses",
    "our tokenizer": "From text, with our tokenizer",
    "tokens": "From tokens that were prepared",
}
RATE, FIRST, CPU, RSS = "rate|M tokens/s", "first batch, local|s", "CPU|s/M tokens", "peak RSS|MB"
HUB, WAIT = "first batch, Hub|s", "data wait|%"
TABLES = {
    "Speed": {
        RATE: "M tokens/s",
        CPU: "CPU s per M tokens",
        RSS: "peak RSS, MB",
        FIRST: "first batch, s",
        HUB: "from a Hub, s",
        "exit|s": "exit, s",
        "preparation|s": "prepared in, s",
        "drain": "failed",
    },
    "Beside a consumer that waits 20 ms after each batch": {
        WAIT: "data wait, %",
        "next() p50|ms": "next() p50, ms",
        "next() p99|ms": "p99, ms",
    },
    "Resume at 80 %": {
        "first batch of a resume|s": "first batch, s",
        "resume, once": "identical, once",
        "resume, twice": "twice",
        "resume, one worker": "with one worker instead of two",
        "resume": "failed",
    },
}
Results = Mapping[str, Seen]


def write(
    folder: Path, entrants: Sequence[Entrant], seen: Results, about: Mapping[str, Any]
) -> Path:
    """Write peers.md; return its path."""
    machine = about["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}"
    lines = ["# Beside its peers", ""]
    lines += [f"{machine['date'][:10]}, {where}, commit {machine['commit']}. {versions}.", ""]
    lines += ["## Floors", "", *_floors(entrants, seen), ""]
    for title, columns in TABLES.items():
        lines += [f"## {title}", "", *_table(entrants, seen, columns), ""]
    path = folder / "peers.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _cell(seen: Seen, key: str) -> str:
    median = seen.median(key)
    return seen.words.get(key, "") if median is None else show(median)


def _table(entrants: Sequence[Entrant], seen: Results, columns: Mapping[str, str]) -> list[str]:
    used = [key for key in columns if any(_cell(seen[each.name], key) for each in entrants)]
    if not used:
        return ["Not measured."]
    lines = [_row("", *(columns[key] for key in used)), "|---" * (len(used) + 1) + "|"]
    for group, title in GROUPS.items():
        rows = [
            (entrant.name, [_cell(seen[entrant.name], key) for key in used])
            for entrant in entrants
            if entrant.group == group
        ]
        rows = [(name, cells) for name, cells in rows if any(cells)]
        if rows:
            lines.append(_row(f"**{title}**", *[""] * len(used)))
        lines += [_row(name, *cells) for name, cells in rows]
    return lines


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _floors(entrants: Sequence[Entrant], seen: Results) -> list[str]:
    """Return Penstock beside the best peer of each floor."""
    lines = [_row("floor", "Penstock", "best peer", "ratio", ""), "|---" * 5 + "|"]
    text = ("documented", "our tokenizer")
    for what, key, groups, best, goal in (
        ("tokens/s, peers with our tokenizer", RATE, ("our tokenizer",), max, Goal(">=", 1.4)),
        ("first batch, local", FIRST, text, min, Goal("<=", 1)),
        ("first batch, Hub", HUB, text, min, Goal("<=", 1)),
        ("data wait, 20 ms steps", WAIT, text, min, Goal("<=", 1)),
    ):
        own = seen[PENSTOCK].median(key)
        peers = {
            each.name: value
            for each in entrants
            if each.group in groups and each.module != "ours"
            if (value := seen[each.name].median(key)) is not None
        }
        if own is None or not peers:
            continue
        name = best(peers, key=lambda name: peers[name])
        ratio = own / peers[name] if peers[name] else 1.0
        verdict = "met" if goal.met(ratio) else "**missed**"
        beside = f"{name}, {show(peers[name])}"
        lines.append(_row(f"{what}: {goal} ×", show(own), beside, show(ratio), verdict))
    return lines + list(_identical(seen[PENSTOCK]))


def _identical(seen: Seen) -> Iterator[str]:
    for key, words in seen.words.items():
        if "worker" in key or "resume" in key:
            yield _row(key, words, "", "", "met" if words == "identical" else "**missed**")

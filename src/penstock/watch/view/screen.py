"""The view of a run on a terminal.

In:    a `RunView`, the time, and the size of the terminal.
Out:   what rich prints; it never takes more lines than there are.
Where: the watcher's thread.
State: none.

Columns give way as a terminal narrows, sections as it gets short: first events, then stages, then the ranks that are
doing well. Colours only repeat what a word says, so nothing is lost without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from penstock.watch.attribution import band
from penstock.watch.live import RunView
from penstock.watch.view.plain import clock, loss, progress_line, queue, ranks, rate, span
from penstock.watch.view.rank import STUCK_S, RankView

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

COLOURS = {"excellent": "green", "good": "green", "fair": "yellow", "poor": "red"}
FEWEST_RANKS = 3
"""Ranks that are shown before stages and events get room."""
BAR = 8
PROGRESS = 66
"""Columns that progress takes in words; a bar gets what is left."""
WIDE, MIDDLE, NARROW = 100, 76, 56
"""Columns from which on there is room for more."""
MOST_NOTES = 3
"""Lines for what the watcher itself has to say: of a thousand files that cannot be read, a few are enough."""
FEW_EVENTS = 5
"""Lines for events that ranks leave free, where there are more ranks than lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How to draw."""

    width: int = 80
    height: int = 24
    rank: int | None = None
    """The rank whose stages are shown; by default the slowest."""
    ascii: bool = False
    """Whether the terminal knows no other characters."""
    notes: tuple[str, ...] = ()
    """What the watcher itself has to say: files it waits for or cannot read."""


def screen(view: RunView, now: float, look: Look) -> Group:
    """The whole view."""
    from rich.console import Group

    head = _head(view, now, look)
    room = look.height - len(head)
    if not view.ranks:
        return Group(*head)
    chosen = view.ranks.get(look.rank) if look.rank is not None else view.slowest(now)
    stages = _stages(chosen, look) if chosen is not None else None
    below = 2 + stages.row_count if stages is not None else 0  # a blank line and the heading
    wanted = len(view.ranks)
    free = room - 1 - below - (FEW_EVENTS if view.events else 0)  # the heading takes one
    shown = wanted
    if wanted > free:  # and so does the line that says how many are left out
        shown = max(1, min(wanted, max(FEWEST_RANKS, free - 1), room - 2))
    parts: list[RenderableType] = [*head, *_ranks(view, now, look, shown)]
    room -= 1 + shown + (shown < wanted)
    if stages is not None and room >= below:
        parts += ["", stages]
        room -= below
    if room >= 3 and view.events:
        parts += ["", *_events(view, look, room - 2)]
    return Group(*parts)


def _head(view: RunView, now: float, look: Look) -> list[RenderableType]:
    hosts = sorted({rank.host for rank in view.ranks.values() if rank.host})
    on = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    there = len(view.ranks)
    count = (
        f"{there} of {view.expected} ranks"
        if view.expected > there
        else f"{there} rank{'s' * (there != 1)}"
    )
    title = _line(("penstock", "bold"))
    if there:
        title.append(f" · {count}{on} · ")
        warmth = view.warmth()
        title.append(warmth, style="green" if warmth.startswith("steady") else "yellow")
    if look.width >= MIDDLE:
        title.append(f" · {clock(now)}", style="dim")
    lines: list[RenderableType] = [title]
    more = len(look.notes) - MOST_NOTES
    notes = [*look.notes[:MOST_NOTES], *([f"and {more} more"] if more > 0 else [])]
    lines += [_line((note, "yellow")) for note in notes]
    progress = view.progress(now)
    if progress is not None:
        width = min(30, look.width - PROGRESS)
        line = _line()
        if progress.share is not None and width >= BAR:
            line.append(_bar(progress.share, width, look) + " ", style="cyan")
        line.append(progress_line(progress))
        lines.append(line)
    verdict = view.verdict(now, look.rank)
    if verdict:
        slow = view.ranks.get(look.rank) if look.rank is not None else view.slowest(now)
        pct = None if slow is None else slow.data_wait_pct
        style = f"bold {'' if pct is None else COLOURS[band(pct / 100)]}".strip()
        lines += [
            _line((part, style))
            for part in wrap(verdict, max(20, look.width), max_lines=3, placeholder=" …")
        ]
    if look.height > 16:
        lines.append("")
    return lines


def _ranks(view: RunView, now: float, look: Look, shown: int) -> list[RenderableType]:
    """The table, and a line for the ranks that did not fit in."""
    table = _table(look)
    wide = look.width >= MIDDLE
    titles = ("rank", "step", "loss", "tokens/s" if wide else "tok/s")
    for title in titles if look.width >= NARROW else ("rank", "step", "tok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("data wait", no_wrap=True)
    table.add_column("queue", no_wrap=True)
    table.add_column("last line" if wide else "age", justify="right", no_wrap=True)
    if wide:
        table.add_column("state", no_wrap=True, ratio=1, overflow="ellipsis")
    worst = view.worst_first(now)
    kept = {rank.rank for rank in worst[:shown]}
    for rank in view.in_order():
        if rank.rank in kept:
            table.add_row(*_row(rank, now, look, wide))
    rest = worst[shown:]
    if not rest:
        return [table]
    waits = [rank.data_wait_pct for rank in rest if rank.data_wait_pct is not None]
    highest = f", data wait at most {max(waits):.1f} %" if waits else ""
    return [table, _line((f"and {len(rest)} more rank{'s' * (len(rest) != 1)}{highest}", "dim"))]


def _row(rank: RankView, now: float, look: Look, wide: bool) -> list[Text]:
    from rich.text import Text

    gone = rank.ended is not None
    stale = rank.stale(now)
    quiet = "dim" if gone else ""
    pct = rank.data_wait_pct
    word = "" if pct is None else band(pct / 100)
    waits = Text(
        "-" if pct is None else f"{pct:4.1f} % {word}", style=quiet or COLOURS.get(word, "")
    )
    full = 0.0 if not rank.queue_capacity else (rank.queue_depth or 0.0) / rank.queue_capacity
    width = BAR if look.width >= WIDE else 4 if look.width >= NARROW else 0
    bar = Text(
        f"{_bar(full, width, look)} " if rank.queue_capacity and width else "",
        style=quiet or "cyan",
    )
    bar.append(queue(rank), style=quiet)
    age = "ended" if gone else span(rank.age(now))
    cells = [
        Text(str(rank.rank), style=quiet),
        Text(str(rank.step), style=quiet),
        *([Text(loss(rank.loss), style=quiet)] if look.width >= NARROW else []),
        Text(rate(rank.tokens_per_s), style=quiet),
        waits,
        bar,
        Text(
            age if wide or not stale else f"{age} stale",
            style=quiet or ("bold red" if stale else ""),
        ),
    ]
    if wide:
        state = rank.state(now)
        if not gone and not stale and rank.stuck_s < STUCK_S and rank.dropped:
            state += f", {rank.dropped} lines dropped"
        bad = stale or rank.stuck_s >= STUCK_S or rank.synthetic or rank.health == "fail"
        colour = "bold red" if bad else "green" if state == "steady" else "yellow"
        cells.append(Text(state, style=quiet or colour))
    return cells


def _stages(rank: RankView, look: Look) -> Table | None:
    shares = rank.stages()
    if not shares:
        return None
    table = _table(look)
    wide = look.width >= MIDDLE
    which = f"rank {rank.rank}" + ("" if look.rank is not None else ", slowest")
    table.add_column(f"stage ({which})" if wide else f"stage (r{rank.rank})", no_wrap=True)
    for title in (
        ("busy", "waits for input", "waits for room") if wide else ("busy", "input", "room")
    ):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("items/s", justify="right", no_wrap=True)
    table.add_column("bytes/s", justify="right", no_wrap=True)
    busiest = max(shares, key=lambda share: share.busy).stage
    for share in shares:
        table.add_row(
            share.stage,
            *(f"{100 * part:.0f} %" for part in (share.busy, share.blocked_in, share.blocked_out)),
            f"{share.items_per_s:.1f}",
            rate(share.bytes_per_s),
            style="bold" if share.stage == busiest and share.busy >= 0.01 else None,
        )
    return table


def _events(view: RunView, look: Look, room: int) -> list[RenderableType]:
    lines: list[RenderableType] = [_line(("events", "bold"))]
    for event in view.events[-room:]:
        line = _line((f"{clock(event.ts)}  ", "dim"), (f"{ranks(event.ranks)}  ", ""))
        line.append(f"{event.kind}: {event.text}", style="red" if event.bad else "")
        lines.append(line)
    return lines


def _bar(share: float, width: int, look: Look) -> str:
    full = round(width * min(1.0, max(0.0, share)))
    return (
        ("#" * full + "-" * (width - full)) if look.ascii else ("█" * full + "░" * (width - full))
    )


def _line(*parts: tuple[str, str]) -> Text:
    """One line, cut where the terminal ends: a second one would push others out of it."""
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    for part, style in parts:
        line.append(part, style=style or None)
    return line


def _table(look: Look) -> Table:
    from rich.table import Table

    return Table(
        box=None,
        pad_edge=False,
        padding=(0, 2 if look.width >= WIDE else 1, 0, 0),
        header_style="bold",
    )

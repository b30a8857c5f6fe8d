"""Show a run on one screen, or as plain lines where there is no terminal.

Everything shown comes from a `Run`; the time is passed in. Colours only repeat what a word says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.watch.attribution import band
from penstock.watch.line import Line, kind, number
from penstock.watch.run import RankRun, Run, describe
from penstock.watch.stage_timer import RANKS
from penstock.watch.units import clean, count, percent, rate, seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

STALE_S = 10.0
"""A rank without a line for this long is stale: a living process writes one every second."""
LOST_S = 300.0
"""After this time a stale rank is not expected to return."""
LONG_S = 5.0
"""A wait or a step that takes longer is shown while it lasts."""
EVENTS_SHOWN = 12
COLUMNS = ("rank", "step", "loss", "tokens/s", "data wait", "queue", "last line", "state")
COLORS = {"excellent": "green", "good": "green", "fair": "yellow", "poor": "red"}
BAD = frozenset(("loader_error", "stall", "fallback", "save_failed", "eval_skipped"))


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at a moment."""

    run: RankRun
    now: float
    steady: bool

    @property
    def age_s(self) -> float:
        return max(0.0, self.now - float(self.run.last["ts"]))

    @property
    def stale(self) -> bool:
        return self.run.ended is None and self.age_s > STALE_S

    @property
    def beat(self) -> Line:
        """The last beat; empty if a step was finished after it."""
        beats = self.run.beats
        return beats[-1] if beats and beats[-1]["step"] >= self.run.last["step"] else {}

    @property
    def waiting(self) -> tuple[float, str]:
        """For how long and for what `next()` has been waiting."""
        waiting = self.beat.get("waiting") if self.run.last["msg"] != "progress" else None
        found = waiting if isinstance(waiting, Mapping) else {}
        what = f"{found.get('stage') or 'data'} {found.get('where') or ''}"
        return number(found.get("for_s")) or 0.0, clean(what)

    @property
    def trouble(self) -> tuple[bool, bool, float, float]:
        """Sorts ranks that hold up the others first."""
        pct, by_stage = self.run.waits_pct(-20)
        own = round((pct or 0.0) - by_stage.get(RANKS, 0.0))
        return self.run.ended is not None, not self.stale, -self.waiting[0], -own

    def state(self) -> str:
        """Return what the rank is doing, in a few words."""
        fallback, health = self.run.last_event("fallback"), self.run.last_event("health")
        since = number(self.beat.get("since_step_s")) or 0.0
        if self.run.ended is not None:
            return clean(f"ended: {self.run.ended}")
        if self.stale:
            return "stale"
        if self.waiting[0] >= 1.0:
            return f"waiting for {self.waiting[1]}"
        if fallback.get("to") == "synthetic":
            return "synthetic data"
        if health.get("status") in ("warn", "fail"):
            return f"health: {health['status']}"
        if since >= LONG_S:
            return f"no step for {seconds(since)}"
        return "steady" if self.steady else "warming up"

    def verdict(self) -> str:
        """Say in one line why the rank waits."""
        if self.stale:
            return f"rank {self.run.rank} has written nothing for {seconds(self.age_s)}"
        waited, what = self.waiting
        if waited > 0:
            return f"waiting for {what} for {seconds(waited)}"
        recent = {k: v for line in (*self.run.beats[-1:], self.run.last) for k, v in line.items()}
        pct = self.run.latest("data_wait_pct")
        if "verdict" in recent or pct is None:
            return clean(recent.get("verdict", "no step yet"))
        return f"data wait {percent(pct)} ({band(pct / 100)})"

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table, one cell for each of COLUMNS."""
        names = ("loss", "data_wait_pct", "queue_depth", "queue_capacity")
        loss, wait, depth, capacity = map(self.run.latest, names)
        room = "" if capacity is None else f"/{capacity:.0f}"
        return (
            str(self.run.rank),
            str(self.run.last["step"]),
            "?" if loss is None else f"{loss:.4f}" if loss < float("inf") else "not finite",
            count(self.run.latest("toks_per_s")),
            "?" if wait is None else f"{percent(wait)} {band(wait / 100)}",
            "?" if depth is None else f"{depth:.0f}{room}",
            "ended" if self.run.ended is not None else f"{seconds(round(self.age_s, 1))} ago",
            self.state(),
        )


@dataclass(slots=True)
class LiveView:
    """A run at a moment, for a terminal or for a log."""

    run: Run
    total_tokens: float | None = None
    """Where the run ends; otherwise its settings may say so."""
    rank: int | None = None
    """The rank whose verdict is shown; otherwise the slowest."""
    notes: list[str] = field(default_factory=list)
    _logged: set[tuple[Any, ...]] = field(default_factory=set)

    def ranks(self, now: float) -> list[RankView]:
        """Return the ranks, those that hold up the others first."""
        steady = bool(self.run.ranks) and self.run.analysis().onset is not None
        views = [RankView(rank, now, steady) for rank in self.run.ranks.values()]
        return sorted(views, key=lambda view: view.trouble)

    def over(self, now: float) -> bool:
        """Return whether every rank has ended or is lost."""
        going = [v for v in self.ranks(now) if v.run.ended is None and v.age_s <= LOST_S]
        return bool(self.run.ranks) and not going

    def chosen(self, now: float) -> RankView:
        """Return the chosen rank, or the slowest."""
        views = self.ranks(now)
        return next((view for view in views if view.run.rank == self.rank), views[0])

    def progress(self) -> tuple[float | None, str]:
        """Return the share that is done, and in words how far the run is and how long it takes."""
        first, world = self.run.first, self.run.world_size
        step = int(first.steps[-1]) if len(first) else 0
        settings = first.boot.get("settings")
        given = settings if isinstance(settings, Mapping) else {}
        tokens = first.column("tokens")
        per_step = world * float(np.nansum(tokens)) / max(1, np.isfinite(tokens).sum())
        total = self.total_tokens or number(given.get("total_tokens"))
        last_step = total / per_step if total and per_step else number(given.get("max_steps"))
        recent = first.column("dt_step_s", -50)
        step_s = float(np.nansum(recent)) / max(1, np.isfinite(recent).sum())
        words = [f"step {step:,}" + (f" of {last_step:,.0f}" if last_step else "")]
        if last_step and step_s and first.ended is None:
            words.append(f"{seconds(max(0.0, last_step - step) * step_s)} left")
        if per_step:
            words.append(f"{count(step * per_step)} tokens")
        speeds = [rank.latest("toks_per_s") for rank in self.run.ranks.values()]
        if known := [speed for speed in speeds if speed is not None]:
            words.append(rate(sum(known)))
        return min(1.0, step / last_step) if last_step else None, ", ".join(words)

    def events(self) -> list[tuple[float, str, bool]]:
        """Return events as (time, text, bad), oldest first; ranks that report the same are one."""
        same: dict[tuple[int, str], list[Line]] = {}
        for rank in self.run.ranks.values():
            for line in rank.events[-100:]:
                text = f"{clean(kind(line))}: {describe(line)}"
                same.setdefault((int(line["ts"] / 10), text), []).append(line)
        found = []
        for (_, text), (line, *more) in same.items():
            bad = kind(line) in BAD or line.get("status") in ("warn", "fail")
            who = f"{len(more) + 1} ranks" if more else f"rank {line['rank']}"
            found.append((float(line["ts"]), f"{who}  {text}", bad))
        return sorted(found)

    def title(self) -> str:
        """Say what is watched and whether it is steady."""
        here, world = len(self.run.ranks), self.run.world_size
        hosts = sorted({clean(rank.boot.get("host") or "?") for rank in self.run.ranks.values()})
        ranks = f"{here} of {world} ranks" if here < world else f"{here} rank{'s' * (here != 1)}"
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        return f"{ranks} on {where} · {self.run.analysis().headline()}"

    def plain(self, now: float) -> list[str]:
        """Return new events, a line for each rank, the progress and the verdict."""
        if not self.run.ranks:
            return []
        new = [event for event in self.events() if event[:2] not in self._logged]
        recent = new if self._logged else new[-5:]
        self._logged |= {event[:2] for event in new}
        lines = [f"{_clock(ts)}  {text}" for ts, text, _ in recent]
        for view in sorted(self.ranks(now), key=lambda view: view.run.rank):
            cells = zip(COLUMNS, view.cells(), strict=True)
            lines.append("  ".join(f"{name} {cell}" for name, cell in cells))
        missing = [self.run.missing()] if self.run.missing() else []
        verdict = f"verdict: {self.chosen(now).verdict()}"
        return [*lines, *missing, f"run: {self.title()}; {self.progress()[1]}", verdict]

    def screen(self, now: float, width: int, height: int) -> Group:
        """Return what rich prints. The oldest events are last: a small terminal cuts them off."""
        from rich.console import Group

        head = _text("penstock", "bold")
        notes = (_text(clean(note), "yellow") for note in self.notes[:3])
        if not self.run.ranks:
            return Group(head, *notes)
        head.append(f" · {self.title()} · {_clock(now)}")
        share, words = self.progress()
        bar = "" if share is None else f"{'█' * round(20 * share):░<20} "
        views, chosen = self.ranks(now), self.chosen(now)
        parts = [head, *notes, _text(f"{bar}{words}", "cyan"), _text(chosen.verdict(), "bold")]
        shown = views[: max(1, height // 2 - len(parts))]
        rows = [view.cells() for view in sorted(shown, key=lambda view: view.run.rank)]
        keep = range(len(COLUMNS)) if width >= 76 else (0, 1, 3, 4, 7)
        ranks = _table([COLUMNS[i] for i in keep], [[row[i] for i in keep] for row in rows])
        events = [_text(f"{_clock(ts)}  {text}", "red" * bad) for ts, text, bad in self.events()]
        rest = len(views) - len(shown)
        more = [_text(f"and {rest} more ranks", "dim")] if rest else []
        return Group(*parts, "", ranks, *more, "", *events[: -EVENTS_SHOWN - 1 : -1])


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        bad = row[-1].startswith(("stale", "waiting", "synthetic", "health"))
        styles = (COLORS.get(cell.split()[-1], "") for cell in row[:-1])
        table.add_row(*map(Text, row, (*styles, "red" if bad else "")))
    return table


def _text(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _clock(ts: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(ts))

"""What a run looks like now: a fold over the heartbeat lines of all its ranks.

In:    lines, each rank's in order, the ranks' mixed as they come.
Out:   a view of every rank, totals, progress with an arrival time, and the latest events.
Where: the watcher's thread. `view.screen` draws it for a terminal, `view.plain` for a log.
State: the view. It depends on the lines alone; the time is given by whoever asks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.watch.attribution import band
from penstock.watch.view.fields import finite, kind, mapping, text, whole
from penstock.watch.view.rank import RankView

EVENTS = 64
"""Events kept; a terminal shows a dozen."""
TOGETHER_S = 10.0
"""What several ranks say within this time is one event: they decide together."""


@dataclass(slots=True)
class Event:
    """Something that happened, to one rank or to several at once."""

    ts: float
    kind: str
    text: str
    bad: bool
    ranks: list[int]
    number: int
    """Counted in the order in which they were read, which need not be that of their times."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run is."""

    tokens: float | None
    """Of all ranks that say how many."""
    total: float | None
    share: float | None
    """0 to 1, where the goal is known."""
    tokens_per_s: float | None
    eta_s: float | None


@dataclass(slots=True)
class RunView:
    """A run, as its heartbeats tell it."""

    total_tokens: float | None = None
    """Where the run is to end, if somebody said so; else its settings may."""
    ranks: dict[int, RankView] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    """The latest ones, by time: the file of one rank may be read long after another's."""
    noted: int = 0
    """Events so far, those included that are no longer kept."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line. One without a rank is nobody's."""
        rank = whole(line.get("rank"))
        if rank is None or not kind(line):
            return
        view = self.ranks.get(rank)
        if view is None:
            view = self.ranks[rank] = RankView(rank)
        before = view.health
        view.add(line)
        told = _tell(line)
        if told is not None and not (kind(line) == "health" and before == view.health):
            self._note(rank, finite(line.get("ts")) or 0.0, kind(line), *told)

    def extend(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take in several."""
        for line in lines:
            self.add(line)

    @property
    def expected(self) -> int:
        """Ranks that the run has, by its own account."""
        return max([len(self.ranks), *(view.world_size or 0 for view in self.ranks.values())])

    @property
    def ended(self) -> bool:
        """Whether every rank that was seen has ended."""
        return bool(self.ranks) and all(view.ended is not None for view in self.ranks.values())

    def over(self, now: float) -> bool:
        """Whether nothing more is to be expected: every rank has ended, or is lost."""
        return bool(self.ranks) and all(
            view.ended is not None or view.lost(now) for view in self.ranks.values()
        )

    def in_order(self) -> list[RankView]:
        """The ranks, by number."""
        return [self.ranks[rank] for rank in sorted(self.ranks)]

    def worst_first(self, now: float) -> list[RankView]:
        """The ranks, those first that hold the others up."""

        def trouble(view: RankView) -> tuple[bool, bool, float, float, int]:
            # In whole percents, so that ranks that are alike do not take turns with every step.
            waits = -round(view.own_wait_pct)
            return view.ended is not None, not view.stale(now), -view.stuck_s, waits, view.rank

        return sorted(self.ranks.values(), key=trouble)

    def slowest(self, now: float) -> RankView | None:
        """The rank that waits most for its data."""
        return next(iter(self.worst_first(now)), None)

    def verdict(self, now: float, rank: int | None = None) -> str:
        """Why the run waits, in one line: what the slowest or the chosen rank says of itself."""
        view = self.ranks.get(rank) if rank is not None else self.slowest(now)
        if view is None:
            return ""
        if view.stale(now):
            return f"rank {view.rank} has said nothing for {view.age(now):.0f} s"
        if view.stuck_s > 0 and view.ended is None:
            where = text(view.waiting.get("where"))
            stage = text(view.waiting.get("stage")) or "data"
            return f"waiting for {stage} for {view.stuck_s:.1f} s" + (f": {where}" if where else "")
        if view.verdict:
            return view.verdict
        if view.data_wait_pct is None:
            return "no step yet" if not view.step else ""
        return f"data wait {view.data_wait_pct:.1f} % ({band(view.data_wait_pct / 100)})"

    def warmth(self) -> str:
        """Whether the numbers are the real ones already."""
        running = [view for view in self.ranks.values() if view.ended is None]
        views = running or list(self.ranks.values())
        if not views:
            return ""
        steady = [view.steady_at for view in views if view.steady_at is not None]
        if len(steady) < len(views):
            return "warming up" if running else "no steady state"
        return f"steady since step {max(steady)}"

    def progress(self, now: float) -> Progress | None:
        """How far it is, and when it arrives at this rate. None before the first step."""
        views = self.in_order()
        if not any(view.step for view in views):
            return None
        moving = [view for view in views if view.ended is None and not view.stale(now)]
        counted = [view.tokens for view in views if view.tokens is not None]
        tokens = sum(counted) if counted else None
        rates = [rate for view in moving if (rate := view.tokens_per_s) is not None]
        rate = sum(rates) if rates else None
        total = self.total_tokens or self._setting("total_tokens")
        if total is not None:
            if tokens is None:
                return Progress(None, total, None, rate, None)
            eta = max(0.0, total - tokens) / rate if rate is not None and rate > 0 else None
            return Progress(tokens, total, min(1.0, tokens / total), rate, eta)
        steps = self._setting("max_steps")
        if steps is None:
            return Progress(tokens, None, None, rate, None)
        slowest = min(views, key=lambda view: view.step)
        left = max(0.0, steps - slowest.step)
        a_step = [view.tokens_a_step for view in views]
        known = [n for n in a_step if n is not None]
        pace = slowest.steps_per_s if slowest in moving else None
        total = (
            tokens + left * sum(known) if tokens is not None and len(known) == len(a_step) else None
        )
        # Steps that go back have no time of arrival.
        eta = left / pace if pace is not None and pace > 0 else None
        return Progress(tokens, total, min(1.0, slowest.step / steps), rate, eta)

    def _setting(self, name: str) -> float | None:
        found = (finite(view.settings.get(name)) for view in self.in_order())
        return next((value for value in found if value is not None and value > 0), None)

    def _note(self, rank: int, ts: float, kind: str, what: str, bad: bool) -> None:
        for event in reversed(self.events):
            if event.kind == kind and event.text == what and abs(event.ts - ts) <= TOGETHER_S:
                if rank not in event.ranks:
                    event.ranks = sorted([*event.ranks, rank])
                    return
                break  # the same rank says it again: it happened again
        self.noted += 1
        insort(
            self.events, Event(ts, kind, what, bad, [rank], self.noted), key=lambda event: event.ts
        )
        del self.events[:-EVENTS]


def _tell(line: Mapping[str, Any]) -> tuple[str, bool] | None:
    """An event in words, and whether it is bad; None for a line that is no event."""
    what = kind(line)
    if what in ("progress", "beat"):  # nearly all of them
        return None
    said = {name: text(value) for name, value in line.items() if not isinstance(value, Mapping)}
    get = said.get
    where = f", {said['where']}" if get("where") else ""
    if what == "boot":
        if line.get("rotated"):
            return None
        version = text(mapping(line.get("versions")).get("penstock"))
        resumed = f", resumed at step {get('step')}" if line.get("resumed") is True else ""
        return f"on {get('host') or 'some host'}" + (
            f", penstock {version}" if version else ""
        ) + resumed, False
    if what == "loader_ready":
        return f"first batch after {_seconds(line.get('dt'))}", False
    if what == "loader_warmup":
        wait = finite(line.get("wait_ms"))
        took = "" if wait is None else f" in {_seconds(wait / 1e3)}"
        of = f" of {said['of']}" if get("of") else ""
        return f"{get('filled', '?')} of {get('requested', '?')} batches{of}{took}", False
    if what == "loader_error":
        return f"{get('stage') or 'loader'}: {get('error') or 'unknown'}{where}", True
    if what == "stall":
        return f"{get('stage') or 'data'}, {_seconds(line.get('wait_s'))}{where}", True
    if what == "pause":
        return f"{get('name') or 'pause'}, {_seconds(line.get('seconds'))}", False
    if what == "tune":
        kept = "" if line.get("kept") is not False else ", taken back"
        return f"{get('what')} {get('from')} → {get('to')}: {get('why', '')}{kept}", False
    if what == "fallback":
        return f"to {get('to')}: {get('reason', '')}", get("to") == "synthetic"
    if what == "steady_state":
        rate = finite(line.get("tokens_per_s"))
        return f"at step {get('at_step', '?')}" + (
            "" if rate is None else f", {rate:,.0f} tokens/s"
        ), False
    if what == "health":
        reasons = line.get("reasons")
        listed = "; ".join(text(reason) for reason in reasons) if isinstance(reasons, list) else ""
        return f"{get('status')}" + (f": {listed}" if listed else ""), get("status") != "ok"
    if what == "eval":
        loss = finite(line.get("loss"))
        return f"validation loss {'?' if loss is None else f'{loss:.4f}'}", False
    if what == "eval_skipped":
        return f"no validation: {get('reason') or 'no reason given'}", True
    if what == "saved":
        return f"{get('folder', '?')} in {_seconds(line.get('seconds'))}", False
    if what == "save_failed":
        return get("error") or "unknown", True
    if what == "shutdown":
        return f"{get('reason') or 'no reason given'}, after step {get('step')}", False
    return None


def _seconds(value: Any) -> str:
    found = finite(value)
    return (
        "? s"
        if found is None
        else f"{found:.1f} s"
        if found >= 0.1 or found == 0
        else f"{found * 1e3:.0f} ms"
    )

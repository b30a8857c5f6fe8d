"""The view of a run in plain text: one line for each rank, for a log or a pipe.

In:    a `RunView`, and the time.
Out:   lines of text.
Where: the watcher's thread.
State: none.
"""

from __future__ import annotations

import math
import time

from penstock.watch.attribution import band
from penstock.watch.live import Event, Progress, RunView
from penstock.watch.view.rank import RankView


def plain(view: RunView, now: float, rank: int | None = None) -> list[str]:
    """One line for each rank, how far the run is, and the verdict of the slowest or the chosen rank."""
    lines = [rank_line(each, now) for each in view.in_order()]
    missing = view.expected - len(view.ranks)
    if missing:
        lines.append(f"{missing} of {view.expected} ranks have not been heard of")
    progress = view.progress(now)
    if progress is not None:
        lines.append(f"run: {'; '.join(filter(None, (progress_line(progress), view.warmth())))}")
    verdict = view.verdict(now, rank)
    if verdict:
        lines.append(f"verdict: {verdict}")
    return lines


def rank_line(rank: RankView, now: float) -> str:
    """One rank. Each field is there in each line, so that a column is a column."""
    parts = [
        f"rank {rank.rank}",
        f"step {rank.step}",
        f"loss {loss(rank.loss)}",
        f"{rate(rank.tokens_per_s)} tokens/s",
        f"data wait {wait(rank.data_wait_pct)}",
        f"queue {queue(rank)}",
        f"last line {span(rank.age(now))} ago",
        rank.state(now),
    ]
    return "  ".join(parts)


def event_line(event: Event) -> str:
    """One event, with its time of day here."""
    return f"{clock(event.ts)}  {ranks(event.ranks)}  {event.kind}: {event.text}"


def progress_line(progress: Progress | None) -> str:
    """How far, how fast, how long still."""
    if progress is None:
        return ""
    of = "" if progress.total is None else f" of {rate(progress.total)}"
    parts = (
        "" if progress.share is None else f"{100 * progress.share:.1f} %",
        "" if progress.eta_s is None else f"{span(progress.eta_s)} left",
        "" if progress.tokens is None else f"{rate(progress.tokens)}{of} tokens",
        "" if progress.tokens_per_s is None else f"{rate(progress.tokens_per_s)} tokens/s",
    )
    return ", ".join(filter(None, parts))


def loss(value: float | None) -> str:
    """As many digits as a loss needs."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """A number with three or four digits: 12.3 k, 4.56 M."""
    if value is None:
        return "-"
    for unit in ("", " k", " M", " G", " T"):
        if abs(value) < 999.5 or unit == " T":
            digits = 0 if not unit else 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f}{unit}" if abs(value) < 1e6 else f"{value:.3g}{unit}"
        value /= 1000
    return "-"


def wait(pct: float | None) -> str:
    """Data wait with its band."""
    return "-" if pct is None else f"{pct:.1f} % {band(pct / 100)}"


def queue(rank: RankView) -> str:
    """Batches that stand ready, of those that may."""
    if rank.queue_depth is None:
        return "-"
    return f"{rank.queue_depth:.0f}" + (
        "" if rank.queue_capacity is None else f"/{rank.queue_capacity:.0f}"
    )


def span(seconds: float | None) -> str:
    """A time in the two units that matter."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return (
            f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
            if seconds % 60 < 59.5
            else f"{seconds // 60 + 1:.0f} min"
        )
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds / 86400:.1f} days" if seconds < 1e9 else "for ever"


def clock(ts: float) -> str:
    """The time of day, here."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"


def ranks(which: list[int]) -> str:
    """Ranks in few characters: rank 3, ranks 0-7, 12 ranks."""
    if len(which) == 1:
        return f"rank {which[0]}"
    if len(which) == which[-1] - which[0] + 1 and which == list(range(which[0], which[-1] + 1)):
        return f"ranks {which[0]}-{which[-1]}"
    return f"ranks {', '.join(map(str, which))}" if len(which) <= 4 else f"{len(which)} ranks"

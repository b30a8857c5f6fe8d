"""A report on a run: verdict first, then what it rests on.

In:    heartbeat files, of one run or of two.
Out:   one HTML file that opens from disk, the same numbers as JSON, a few lines for a terminal.
Where: the thread that asks for it; the run need not have ended.
State: none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.config import write_atomically
from penstock.errors import PenstockError
from penstock.watch.page.compare import (
    compare_body,
    compare_figures,
    compare_numbers,
    compare_summary,
)
from penstock.watch.page.numbers import RankNumbers, RunNumbers, run_numbers
from penstock.watch.page.page import card, page, plot, text
from penstock.watch.page.plots import rank_figures, ranks_figure
from penstock.watch.page.run import Run, read_run
from penstock.watch.page.tables import (
    cause_list,
    event_table,
    file_table,
    rank_table,
    session_table,
    settings_tables,
    stage_table,
    verdict,
)
from penstock.watch.page.units import percent, printable
from penstock.watch.page.words import Words, words
from penstock.watch.world import missing

MOST_RANKS = 8
"""Ranks whose plots are in the page: those that wait most, and rank 0. All are in the table."""
MOST_BARS = 64


@dataclass(frozen=True)
class Report:
    """What came of it."""

    html: str
    numbers: dict[str, Any]
    """For scripts: plain JSON."""
    summary: str
    """For a terminal."""

    def write(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        path = Path(path).expanduser()
        try:
            write_atomically(path, self.html)
        except OSError as error:
            raise PenstockError(
                f"{path}: the report cannot be written: {error.strerror or error}"
            ) from error
        return path


def report(*patterns: str | Path) -> Report:
    """A report on one run, whose heartbeats are in these files, globs or folders."""
    run = read_run(patterns)
    known = run_numbers(run)
    said = words(known)
    shown = _shown(known)
    by_rank = {rank.rank: rank for rank in run.ranks}
    ranks = {str(one.rank): rank_figures(by_rank[one.rank], one) for one in shown}
    common = {}
    if len(run.ranks) > 1:
        most = sorted(known.ranks, key=lambda one: -one.own_wait_pct)[:MOST_BARS]
        common["ranks"] = ranks_figure(known, most)
    figures = {"common": common, "ranks": ranks, "rank": str(known.worst_rank)}
    of = f" of {run.expected:,}" if missing(run.expected, {rank.rank for rank in run.ranks}) else ""
    what = f"{len(run.ranks)}{of} ranks" if len(run.ranks) > 1 else run.first.path.name
    host = f" on {known.worst.host}" if known.worst.host else ""
    about = f"{what}{host} · {known.begun} to {known.last_line}"
    body = "\n".join(_sections(run, known, said, shown))
    return Report(
        page("Penstock report", about, body, figures),
        known.as_dict() | asdict(said),
        summary(known, said),
    )


def compare(a: str | Path, b: str | Path) -> Report:
    """A report on two runs side by side, each a file, a glob or a folder."""
    runs = read_run([a]), read_run([b])
    both = run_numbers(runs[0]), run_numbers(runs[1])
    said = words(both[0]), words(both[1])
    names = (str(a), str(b))
    difference = compare_numbers(runs, both)
    figures = {"common": compare_figures(runs, both), "ranks": {}, "rank": ""}
    about = f"A: {names[0]} · B: {names[1]}"
    html = page(
        "Penstock report: two runs", about, compare_body(both, said, names, difference), figures
    )
    told = {
        letter: run.as_dict() | asdict(one)
        for letter, run, one in zip("ab", both, said, strict=True)
    }
    numbers = told | {"difference": difference.as_dict()}
    return Report(html, numbers, compare_summary(both, names, difference))


def summary(run: RunNumbers, said: Words) -> str:
    """The verdict in a few lines."""
    band = f" [{run.band}]" if run.band else ""
    lines = [
        f"{said.headline}{band}",
        *(f"  {one}" for one in said.sentences),
        *(f"  ! {one}" for one in said.warnings),
    ]
    return printable("\n".join(lines))


def _shown(run: RunNumbers) -> list[RankNumbers]:
    """The ranks whose plots are drawn."""
    order = sorted(
        run.ranks,
        key=lambda one: (one.rank != run.worst_rank, one.rank != 0, -one.own_wait_pct, one.rank),
    )
    return sorted(order[:MOST_RANKS], key=lambda one: one.rank)


def _sections(run: Run, known: RunNumbers, said: Words, shown: list[RankNumbers]) -> Iterable[str]:
    yield verdict(known, said)
    yield _over_time(known, shown)
    causes = cause_list(known)
    if causes:
        yield f"<h2>Why steps were slow</h2>{card(causes)}"
    if len(run.ranks) > 1:
        yield "<h2>Ranks compared</h2>"
        yield f'<div class="plots">{plot("ranks", "Who waits for what", wide=True, own_height=True)}</div>'
        yield card(rank_table(known), "long")
    worst = next(rank for rank in run.ranks if rank.rank == known.worst_rank)
    if len(worst.sessions) > 1:
        yield "<h2>Sessions</h2>" + card(session_table(worst))
    stages = stage_table(worst)
    if stages:
        yield f"<h2>Stages</h2>{card(stages)}"
    yield "<h2>Events</h2>" + card(event_table(run), "long tall")
    yield "<h2>Settings and versions</h2>" + card(settings_tables(run), "long")
    yield file_table(run)


def _over_time(known: RunNumbers, shown: list[RankNumbers]) -> str:
    choice = ""
    if len(known.ranks) > 1:
        options = "".join(
            f'<option value="{one.rank}">{one.rank}: waits {text(percent(one.data_wait_pct))}'
            f"{' (slowest)' if one.rank == known.worst_rank else ''}</option>"
            for one in shown
        )
        more = f" of {len(known.ranks)}" if len(shown) < len(known.ranks) else ""
        choice = f'<label>Rank{more} <select id="rank">{options}</select></label>'
    plots = (
        plot("step-time", "Step time", wide=True, log=True)
        + plot("waits", "Data wait by stage", wide=True)
        + plot("rate", "Tokens per second")
        + plot("next", "Time in next(), p50, p95, p99", log=True)
        + plot("queue", "Queues")
        + plot("loss", "Loss", log=True)
        + plot("ledger", "The way to the first batch", own_height=True)
        + plot("memory", "Memory")
    )
    return f'<div class="bar"><h2>Over the run</h2>{choice}</div><div class="plots">{plots}</div>'

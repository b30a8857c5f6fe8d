"""A verdict in words.

In:    the numbers of a run.
Out:   a headline, what supports it, and what a reader must not miss.
Where: the thread that makes a report.
State: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.watch.page.numbers import RankNumbers, RunNumbers
from penstock.watch.page.units import count, percent, seconds
from penstock.watch.world import missing

MATTERS_PCT = 5.0
"""A change of a run's speed that is worth a warning."""
NO_STEADY = {
    "not enough steps": "There are not enough steps to tell where steady state begins.",
    "no steady state": "Step times do not settle: there is no steady state.",
}


@dataclass(frozen=True)
class Words:
    """What is said of a run. Texts from its files are in it as they are: whoever shows it escapes it."""

    headline: str
    sentences: list[str]
    warnings: list[str]


def words(run: RunNumbers) -> Words:
    return Words(headline(run), sentences(run), warnings(run))


def headline(run: RunNumbers) -> str:
    if run.data_wait_pct is None:
        return (
            "No step has been recorded yet"
            if not any(one.steps for one in run.ranks)
            else "Data wait is not known"
        )
    words = {
        "excellent": "The data keeps up",
        "good": "The data nearly keeps up",
        "fair": "The data slows this run down",
        "poor": "The data holds this run back",
    }[run.band or "poor"]
    return f"{words}: {percent(run.data_wait_pct)} of the time goes into waiting for it"


def sentences(run: RunNumbers) -> list[str]:
    worst, shape = run.worst, run.worst.shape
    said = []
    waits = sorted(worst.waits_pct.items(), key=lambda item: -item[1])
    if waits and waits[0][1] >= 0.05:
        parts = [f"{name} {percent(pct)}" for name, pct in waits[:3] if pct >= 0.05]
        said.append(f"It waits for {', '.join(parts)}.")
    if run.steady_from is not None and run.tokens_per_s is not None:
        interval = f" ({count(run.low)} to {count(run.high)})" if run.low is not None else ""
        said.append(
            f"Steady since step {run.steady_from:,} at {count(run.tokens_per_s)} tokens/s{interval}."
        )
    elif run.steady_from is not None:
        said.append(
            f"Steady since step {run.steady_from:,}; how many tokens a step has is not recorded."
        )
    elif any(one.steps for one in run.ranks):
        said.append(NO_STEADY.get(shape.kind, "Not every rank has reached a steady state."))
    if run.overhead_s is not None and run.overhead_s > 0:
        share = "" if run.overhead_pct is None else f", {percent(run.overhead_pct)} of the run"
        said.append(f"Warmup cost {seconds(run.overhead_s)}{share}.")
    if len(run.ranks) > 1 and worst.data_wait_pct is not None:
        others = [one.own_wait_pct for one in run.ranks if one.rank != worst.rank]
        said.append(
            f"Rank {worst.rank} waits most for its own data: {percent(worst.own_wait_pct)} "
            f"(median of the others {percent(float(np.median(others)))})."
        )
    if worst.words:
        said.append(f"The loader’s own words: {worst.words}")
    return said


def warnings(run: RunNumbers) -> list[str]:
    """What a reader must not miss. What several ranks share is said once."""
    shared: dict[str, list[int]] = {}
    for one in run.ranks:
        for what in _own_warnings(one):
            shared.setdefault(what, []).append(one.rank)
    lacking = missing(run.ranks_expected, {one.rank for one in run.ranks})
    said = [f"{lacking}. What is said here is of those that did."] if lacking else []
    said += [
        f"{_which(ranks)}: {what}" if len(run.ranks) > 1 else _upper(what)
        for what, ranks in shared.items()
    ]
    if any(one.steps for one in run.ranks) and run.ended is None:
        quiet = [one.rank for one in run.ranks if one.ended is None]
        who = f" from {_which(quiet).lower()}" if len(run.ranks) > 1 else ""
        said.append(
            f"There is no shutdown line{who}: the run was still going when this was made, or it was killed."
        )
    steps = [one.last_step for one in run.ranks if one.last_step is not None]
    if steps and max(steps) - min(steps) > max(5, 0.02 * max(steps)):
        said.append(f"The ranks’ last steps differ: {min(steps):,} to {max(steps):,}.")
    return said


def _own_warnings(one: RankNumbers) -> Iterator[str]:
    if one.loss_not_finite is not None:
        again = "; it is finite again" if one.loss_not_finite_from is None else ""
        yield f"the loss {'was' if again else 'is'} not a finite number {not_finite(one)}{again}."
    for change in one.shape.changes:
        if abs(change["pct"]) >= MATTERS_PCT:
            way = "slower" if change["pct"] > 0 else "faster"
            # In fives, so that ranks that slow down together are told of together.
            about = 5 * round(abs(change["pct"]) / 5)
            yield f"steps became about {about} % {way} at step {int(change['step']):,}."
    if (
        one.shape.kind == "slowdown"
        and not one.shape.changes
        and one.shape.drift_per_1000_pct is not None
    ):
        yield f"steps become slower and slower, {one.shape.drift_per_1000_pct:.1f} % in 1,000 steps."
    if one.fell_back:
        yield "it fell back to synthetic data; see the events."
    elif one.events.get("fallback"):
        yield "it came back from synthetic data; since when it had that is not recorded."
    if errors := one.events.get("error"):
        yield f"the loader reported {errors} {'error' if errors == 1 else 'errors'}; see the events."
    if one.earlier_runs:
        runs = "one earlier run" if one.earlier_runs == 1 else f"{one.earlier_runs} earlier runs"
        yield f"{runs} wrote to the same file; this report leaves what they wrote out."
    if one.dropped_lines:
        yield f"{one.dropped_lines:,} lines could not be written and are missing here."


def not_finite(one: RankNumbers) -> str:
    """At which steps the loss is not a finite number, if there are any."""
    first, since = one.loss_not_finite, one.loss_not_finite_from
    if first is None or first == since:
        return f"from step {first or 0:,} on"
    n = one.loss_not_finite_steps
    at = f"at step {first:,}" if n == 1 else f"at {n:,} steps, first at step {first:,}"
    return at if since is None else f"{at}, and from step {since:,} on"


def _which(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:12])) + (
        f" and {len(ranks) - 12} more" if len(ranks) > 12 else ""
    )
    return f"Rank {names}" if len(ranks) == 1 else f"Ranks {names}"


def _upper(said: str) -> str:
    return said[:1].upper() + said[1:]

"""Why steps were slow, where evidence says so.

In:    ranges of slow steps, what they took more than others, and the evidence.
Out:   causes with what supports them; a range that nothing supports is "unexplained".
Where: the caller's thread.
State: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.watch.steps.input import Evidence, Floats
from penstock.watch.steps.result import UNEXPLAINED, Cause, seconds
from penstock.watch.steps.spikes import SpikeGroup

EXPLAINS = 0.5
"""Waits and pauses must make up at least half of what a range took too long."""
BESIDE = 2
"""Steps around a change within which a compilation or a resume counts as its cause."""
MOST_RANGES = 5
"""A head that falls into more pieces than this is one slow start."""

NAMES = {
    "compiles": "compile",
    "optimizer_state": "optimizer state",
    "alloc_retries": "allocator retries",
}


def of_warmup(
    slow: Sequence[int], onset: int, excess_s: Floats, evidence: Evidence, wait_s: float
) -> list[Cause]:
    """Causes of the slow steps before the onset, by runs of neighbours."""
    ranges: list[tuple[int, int]] = []
    for step in slow:
        if ranges and step - ranges[-1][1] < BESIDE:
            ranges[-1] = (ranges[-1][0], step + 1)
        else:
            ranges.append((step, step + 1))
    if len(ranges) > MOST_RANGES or not ranges:
        ranges = [(0, onset)]
    causes = []
    for start, stop in ranges:
        inside = range(start, stop)
        found = [
            *_grown(inside, evidence),
            *_taken(inside, float(excess_s[start:stop].sum()), evidence, wait_s),
        ]
        if evidence.resumed & set(inside):
            found.append(("resume", "the run went on from a checkpoint here"))
        causes += _causes(start, stop, found)
    return causes


def of_spikes(group: SpikeGroup, evidence: Evidence, wait_s: float) -> list[Cause]:
    """Causes of a group of spikes: those that hold for at least half of them, or for half of their cost."""
    steps = group.steps
    found = [
        (name, said)
        for name, said in _grown(steps, evidence, least=len(steps) / 2)
        if name != NAMES["optimizer_state"]
    ]
    found += _taken(steps, group.cost_s, evidence, wait_s)
    return _causes(steps[0], steps[-1] + 1, found)


def of_change(
    step: int, stop: int, before: slice, more_s: float, evidence: Evidence
) -> list[Cause]:
    """Causes of a later change of level: what began there, or grew with it."""
    beside = range(max(0, step - BESIDE), step + BESIDE + 1)
    found = _grown(beside, evidence, ("compiles", "optimizer_state"))
    found += _retries(before, slice(step, stop), evidence)
    if evidence.resumed & set(beside):
        found.append(
            (
                "resume",
                f"the run went on from a checkpoint at step {min(evidence.resumed & set(beside))}",
            )
        )
    return _causes(step, stop, found + _waits(before, slice(step, stop), more_s, evidence))


def of_drift(start: int, stop: int, more_s: float, evidence: Evidence) -> list[Cause]:
    """Causes of steps getting slower little by little, by `more_s` from the first to the last third."""
    third = (stop - start) // 3
    before, after = slice(start, start + third), slice(stop - third, stop)
    return _causes(
        start, stop, _retries(before, after, evidence) + _waits(before, after, more_s, evidence)
    )


def _causes(start: int, stop: int, found: Iterable[tuple[str, str]]) -> list[Cause]:
    made = [Cause(start, stop, name, said) for name, said in found]
    return made or [Cause(start, stop, UNEXPLAINED, "")]


def _grown(
    steps: Sequence[int], evidence: Evidence, kinds: Iterable[str] = tuple(NAMES), least: float = 1
) -> list[tuple[str, str]]:
    """Counters that grew at enough of the steps."""
    inside = set(steps)
    found = []
    for kind in kinds:
        grown = [growth for growth in evidence.growths[kind] if growth.step in inside]
        if len(grown) >= max(1, least):
            said = f"{kind} {grown[0].before:,.0f} → {grown[-1].after:,.0f}"
            at = (
                f"at step {grown[0].step}"
                if len(grown) == 1
                else f"at {len(grown)} steps from {grown[0].step} on"
            )
            found.append((NAMES[kind], f"{said} {at}"))
    return found


def _taken(
    steps: Sequence[int], excess_s: float, evidence: Evidence, usual_s: float
) -> list[tuple[str, str]]:
    """Waits and pauses that make up enough of the time."""
    found = []
    if evidence.wait_s is not None and excess_s > 0:
        waited = float((evidence.wait_s[list(steps)] - usual_s).sum())
        if waited >= EXPLAINS * excess_s:
            found.append(("data wait", f"{seconds(waited)} of {seconds(excess_s)}"))
    paused = [evidence.pause_s[step] for step in steps if step in evidence.pause_s]
    pause_s = sum(taken for taken, _ in paused)
    if paused and pause_s >= EXPLAINS * excess_s:
        names = ", ".join(dict.fromkeys(name for _, name in paused if name))
        found.append(
            ("pause", f"{names}: {seconds(pause_s)} of {seconds(excess_s)}".removeprefix(": "))
        )
    return found


def _waits(before: slice, after: slice, more_s: float, evidence: Evidence) -> list[tuple[str, str]]:
    """Data wait that changed with the step time, by enough of it."""
    if evidence.wait_s is None:
        return []
    was, now = float(evidence.wait_s[before].mean()), float(evidence.wait_s[after].mean())
    enough = more_s * (now - was) > 0 and (now - was) / more_s >= EXPLAINS
    return [("data wait", f"{seconds(was)} a step before, {seconds(now)} after")] if enough else []


def _retries(before: slice, after: slice, evidence: Evidence) -> list[tuple[str, str]]:
    """Allocator retries that come more often after a change than before it."""

    def often(span: slice) -> tuple[float, float]:
        grown = [
            g.after - g.before
            for g in evidence.growths["alloc_retries"]
            if span.start <= g.step < span.stop
        ]
        return sum(grown), sum(grown) / max(1, span.stop - span.start)

    (_, was), (count, now) = often(before), often(after)
    return (
        [("allocator retries", f"{count:,.0f} from step {after.start} on")] if now > 2 * was else []
    )


def usual_wait(evidence: Evidence, steady: slice) -> float:
    """Data wait of an ordinary steady step."""
    return 0.0 if evidence.wait_s is None else float(np.median(evidence.wait_s[steady]))

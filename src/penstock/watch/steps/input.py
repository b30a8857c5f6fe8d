"""What is known of a run's steps, checked.

In:    seconds and tokens per step, and events: from the caller, or from a heartbeat's progress lines.
Out:   arrays of the same length, and the evidence by kind.
Where: the caller's thread.
State: none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.watch.view.fields import LONGEST_STEP_S, MOST_TOKENS

Floats = NDArray[np.float64]

COUNTERS = ("optimizer_state", "compiles", "alloc_retries")
"""Kinds whose value is a level: what matters is that it grew."""
KINDS = (*COUNTERS, "data_wait_s", "pause", "resume")
BEFORE = -1
"""The step of an event that says what a counter was before the first step."""
LEAST_S = 1e-100
"""A step that takes less takes nothing: other steps divided by it would be no numbers."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something that is known of one step."""

    step: int
    """Its 0-based index in `times`; -1 says what a counter was before the first step."""
    kind: str
    """`optimizer_state` (bytes after the step), `compiles` and `alloc_retries` (counted from the start of the process),
    `data_wait_s` (of this step), `pause` (seconds, with a name), `resume`."""
    value: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Growth:
    """A counter that grew at a step."""

    step: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the events say, by kind."""

    growths: dict[str, list[Growth]]
    wait_s: Floats | None
    """Data wait of each step, where it is known of any."""
    pause_s: dict[int, tuple[float, str]]
    """Seconds of pauses by step, and their names."""
    resumed: frozenset[int]


def step_times(times: Any) -> Floats:
    """Seconds per step as an array, or an error that names the first that cannot be one."""
    try:
        array = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"times: needs seconds per step, as numbers: {error}") from None
    if array.ndim != 1:
        raise ConfigError(f"times: needs one number per step, got an array of shape {array.shape}")
    if not array.size:
        raise ConfigError("times: is empty; give the seconds of at least one step")
    bad = ~((array >= 0) & (array <= LONGEST_STEP_S))
    if bad.any():
        index = int(np.argmax(bad))
        raise ConfigError(
            f"times[{index}] = {array[index]}: needs seconds, from 0 to {LONGEST_STEP_S:.0e}"
        )
    return np.where(array < LEAST_S, 0.0, array)


def step_tokens(tokens: Any, n: int) -> Floats | None:
    """Tokens per step as an array."""
    if tokens is None:
        return None
    try:
        array = np.asarray(tokens, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tokens: needs one number for all steps or one for each: {error}"
        ) from None
    if array.ndim == 0:
        array = np.full(n, float(array))
    if array.shape != (n,):
        raise ConfigError(
            f"tokens: needs one number for all steps or one for each of {n}, got shape {array.shape}"
        )
    bad = ~((array >= 0) & (array < MOST_TOKENS))
    if bad.any():
        index = int(np.argmax(bad))
        raise ConfigError(f"tokens[{index}] = {array[index]}: needs a count, at least 0")
    return array


def gather(events: Iterable[StepEvent | Mapping[str, Any]] | None, n: int) -> Evidence:
    """The events of `n` steps by kind; counters keep only the steps at which they grew."""
    counters: dict[str, list[tuple[int, float]]] = {kind: [] for kind in COUNTERS}
    wait: Floats | None = None
    pauses: dict[int, tuple[float, str]] = {}
    resumed = set()
    for number, event in enumerate(events or ()):
        told = event if isinstance(event, StepEvent) else _event(number, event)
        first = BEFORE if told.kind in COUNTERS else 0
        if told.kind not in KINDS:
            raise ConfigError(
                f"events[{number}]: kind {told.kind!r} is not known; there are {', '.join(KINDS)}"
            )
        if not first <= told.step < n:
            raise ConfigError(
                f"events[{number}]: {told.kind} of step {told.step}; there are steps 0 to {n - 1}"
            )
        if not (math.isfinite(told.value) and told.value >= 0):
            raise ConfigError(
                f"events[{number}]: {told.kind} = {told.value}: needs a number, at least 0"
            )
        if told.kind in COUNTERS:
            counters[told.kind].append((told.step, told.value))
        elif told.kind == "data_wait_s":
            wait = np.zeros(n) if wait is None else wait
            wait[told.step] += told.value
        elif told.kind == "pause":
            seconds, name = pauses.get(told.step, (0.0, ""))
            names = [part for part in (name, told.name) if part]
            pauses[told.step] = (seconds + told.value, ", ".join(dict.fromkeys(names)))
        else:
            resumed.add(told.step)
    return Evidence(
        {kind: _growths(seen) for kind, seen in counters.items()}, wait, pauses, frozenset(resumed)
    )


def _event(number: int, event: Mapping[str, Any]) -> StepEvent:
    try:
        step, kind = int(event["step"]), str(event["kind"])
        return StepEvent(step, kind, float(event.get("value", 0.0)), str(event.get("name", "")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"events[{number}] = {event!r}: needs step, kind and value ({type(error).__name__}: {error})"
        ) from None


def _growths(seen: list[tuple[int, float]]) -> list[Growth]:
    found, before = [], 0.0
    for step, value in sorted(seen):
        # A counter that fell belongs to a new process; it counts from there.
        if value > before and step != BEFORE:
            found.append(Growth(step, before, value))
        before = value
    return found


def from_progress(
    lines: Iterable[Mapping[str, Any]],
) -> tuple[list[float], list[int] | None, list[StepEvent]]:
    """Times, tokens and events of one rank's heartbeat lines, as `analyze_steps` takes them.

    A progress line without a step time takes it from the one before, by the clock; the first such is left out.
    Tokens are None unless every step has them.
    """
    times: list[float] = []
    tokens: list[int | None] = []
    events: list[StepEvent] = []
    late: list[StepEvent] = []  # of the step that comes next
    ranks: set[Any] = set()
    booted = False
    last_mono: float | None = None
    for line in lines:
        ranks.add(line.get("rank", 0))
        if len(ranks) > 1:
            raise ConfigError(
                f"lines of ranks {sorted(ranks, key=str)} are mixed: analyse one rank at a time"
            )
        message = line.get("msg")
        if message == "boot" and not line.get("rotated"):
            booted, last_mono = True, None
            if line.get("resumed") or times:
                late.append(StepEvent(len(times), "resume"))
        if message != "progress":
            continue
        mono = _number(line.get("mono"))
        paused = {
            str(k): v
            for k, s in _mapping(line.get("paused")).items()
            if (v := _number(s)) is not None
        }
        seconds = _number(line.get("dt_step_s"))
        if seconds is None and mono is not None and last_mono is not None:
            seconds = max(0.0, mono - last_mono - sum(paused.values()))
        last_mono = mono
        if seconds is None or seconds > LONGEST_STEP_S:
            continue
        index = len(times)
        if not times and not booted and (_number(line.get("step")) or 0) > 1:
            # The file does not begin with the run, so what its counters show at first is no growth.
            events += [
                StepEvent(BEFORE, kind, v)
                for kind in COUNTERS
                if (v := _number(line.get(kind))) is not None
            ]
        times.append(seconds)
        count = _number(line.get("tokens"))
        tokens.append(None if count is None or count >= MOST_TOKENS else int(count))
        events += late
        late.clear()
        events += [
            StepEvent(index, kind, v)
            for kind in COUNTERS
            if (v := _number(line.get(kind))) is not None
        ]
        wait = _number(line.get("dt_fetch_s", line.get("dt_fetch_last")))
        if wait is not None:
            events.append(StepEvent(index, "data_wait_s", wait))
        events += [StepEvent(index, "pause", s, name) for name, s in paused.items()]
    known = [count for count in tokens if count is not None]
    return times, known if known and len(known) == len(times) else None, events


def _number(value: Any) -> float | None:
    """A usable number, or None: a heartbeat's fields may be missing, and a reader does not stop at a strange one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= 1e18 else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def evidence_of_step(step: int, evidence: Mapping[str, Any]) -> Sequence[StepEvent]:
    """What `SteadyWatch.step` was told by keyword, as events."""
    events: list[StepEvent] = []
    for kind, value in evidence.items():
        if kind not in KINDS:
            raise ConfigError(f"evidence {kind!r} is not known; there are {', '.join(KINDS)}")
        if value is None or value is False:
            continue
        if kind == "pause" and isinstance(value, Mapping):
            events += [
                StepEvent(step, kind, float(seconds), str(name)) for name, seconds in value.items()
            ]
        elif kind == "resume":
            events.append(StepEvent(step, kind))
        else:
            events.append(StepEvent(step, kind, float(value)))
    return events

"""Judge a run by its heartbeat: ok, warn or fail, with reasons.

Averages cover the last `for_s` seconds and at least `for_steps` steps, without the worst step. They
are not judged in a grace period: from the start, a resume or a recompilation until the steady state
or a cap. A non-finite loss, a missing heartbeat, a hung step and a loader error count at once.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import PenstockError
from penstock.options import option, options
from penstock.types import MiB
from penstock.watch.heartbeat_reader import (
    Event,
    expand,
    kind,
    missing_ranks,
    number,
    read_heartbeat,
    step_seconds,
)

Status = Literal["ok", "warn", "fail"]

LOOKS = 30
"""The number of comparisons of averages with limits per `for_s`."""
LAST_BYTES = 16 * MiB
"""Bytes to read from the end of each file: about 25,000 steps. Older lines do not affect the
verdict."""


@options
class Limits:
    """The limits that a run is judged by. None disables a limit.

    min_tokens_per_s: Minimum tokens per second of each rank, without named pauses.
    max_data_wait_pct: Maximum share of the time spent waiting for data, in per cent.
    max_fetch_p95_ms: Maximum 95th percentile of the time in next(), in milliseconds.
    max_heartbeat_age_s: Maximum seconds since the last line of a run that has not ended. A larger
        value detects a dead process later.
    max_step_s: Maximum seconds without a finished step. A larger value detects a hung collective
        later.
    finite_loss: Fail at once if the loss is not finite.
    for_s: Seconds to average over. A larger value gives fewer and later alarms.
    for_steps: Minimum steps to average over. A larger value gives fewer and later alarms.
    grace_s: Longest grace period during warmup, in seconds. With a larger value, a run that never
        becomes steady stays unjudged longer.
    grace_steps: The same in steps.
    """

    _: KW_ONLY
    min_tokens_per_s: float | None = option(default=None, minimum=0)
    max_data_wait_pct: float | None = option(default=None, minimum=0)
    max_fetch_p95_ms: float | None = option(default=None, minimum=0)
    max_heartbeat_age_s: float | None = option(default=60.0, minimum=0)
    max_step_s: float | None = option(default=None, minimum=0)
    finite_loss: bool = True
    for_s: float = option(default=30.0, minimum=0)
    for_steps: int = option(default=10, minimum=1)
    grace_s: float = option(default=600.0, minimum=0)
    grace_steps: int = option(default=1000, minimum=1)


CHECKS = {
    "min_tokens_per_s": ("tokens_per_s", "{:,.0f} tokens/s"),
    "max_data_wait_pct": ("data_wait_pct", "data wait {:.1f} %"),
    "max_fetch_p95_ms": ("fetch_p95_ms", "fetch p95 {:,.1f} ms"),
}


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """The health of one rank."""

    status: Status
    reasons: tuple[str, ...]
    """The problems, with value and limit; otherwise the state of the run."""
    grace: bool
    judged: bool
    """True if the run was long enough to compare averages with the limits."""
    known: bool
    """True if the rank has reported a step or an error."""
    rank: int | None
    step: int
    world_size: int | None = None
    ended: str | None = None
    """The reason of the shutdown; None without a shutdown line."""
    age_s: float | None = None
    loss: float | str | None = None
    tokens_per_s: float | None = None
    data_wait_pct: float | None = None
    fetch_p95_ms: float | None = None

    def line(self) -> str:
        """Return a readable line."""
        parts = [f"step {self.step}"]
        values = ((text, getattr(self, name)) for name, text in CHECKS.values())
        parts += [text.format(value) for text, value in values if value is not None]
        if self.ended is not None:
            parts.append(f"ended: {self.ended}")
        elif self.age_s is not None:
            parts.append(f"last line {self.age_s:,.0f} s ago")
        status = self.status if self.known else "unknown"
        return f"rank {self.rank}: {status}: {', '.join(parts)}: {'; '.join(self.reasons)}"


def judge_rank(
    lines: Iterable[Mapping[str, Any]], now: float | None = None, limits: Limits | None = None
) -> RankHealth:
    """Judge one rank by its heartbeat lines, at a Unix time or that of the last line."""
    gate = HealthGate(limits)
    for line in lines:
        gate.add(line)
    return gate.verdict(now)


class HealthGate:
    """Judges one rank by its lines, during the run or afterwards."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._events: list[Event] = []
        self._reported: tuple[Status, bool] = ("ok", True)
        self._last: Mapping[str, Any] = {}
        self._boot: Mapping[str, Any] | None = None
        self._begin("start")

    def _begin(self, reason: str) -> None:
        """Reset for another process of the run."""
        self._step: Mapping[str, Any] | None = None
        self._compiles = math.inf
        self._since_step_s = 0.0
        self._ended: str | None = None
        self._error = self._synthetic = ""
        self._bad_loss: int | None = None
        self._capped = False
        self._open_grace(reason)

    def _open_grace(self, reason: str) -> None:
        self._grace, self._reason = True, reason
        self._times, self._tokens = array("d"), array("d")
        """Times and tokens of the steps in the grace period."""
        self._next_analysis = 0
        self._seconds = 0.0
        """Total time of the steps in the grace period, then in the window."""
        self._window: deque[tuple[float, float | None, float | None]] = deque()
        """Seconds, tokens and data wait of the last steps."""
        self._averages: dict[str, float] = {}
        self._broken: dict[str, tuple[float, str]] = {}
        self._looked = -math.inf

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the next line."""
        self._last = line
        msg = kind(line)
        if msg == "boot":
            if not line.get("rotated"):
                self._begin("start" if self._boot is None and not line.get("resumed") else "resume")
            self._boot = line
        elif msg == "progress":
            self._progress(line)
        elif msg == "beat":
            self._since_step_s = number(line.get("since_step_s")) or 0.0
        elif msg == "shutdown":
            self._ended = str(line.get("reason", "end"))
        elif msg == "fallback":
            since = f"synthetic data since step {line.get('at_step', line['step'])}"
            self._synthetic = "" if line.get("to") == "data" else f"{since}: {line.get('reason')}"
        elif msg == "loader_error":
            self._error = f"the loader failed at {line.get('stage')}: {line.get('error')}"
        if msg in ("progress", "beat", "boot"):
            self._report()

    def verdict(self, now: float | None = None) -> RankHealth:
        """Return the verdict, at a Unix time or that of the last line."""
        if self._grace and self._times:
            self._end_grace_if_steady()  # steps since the last analysis may have confirmed it
        self._look()
        age = None if now is None or not self._last else max(0.0, now - self._last["ts"])
        status, reasons = self._judge(age or 0.0)
        step = self._step or {}
        world = (self._boot or {}).get("world_size")
        reported = {"tokens_per_s": number(step.get("toks_per_s"))}
        reported |= {name: number(step.get(name)) for name in ("data_wait_pct", "fetch_p95_ms")}
        return RankHealth(
            status=status,
            reasons=tuple(reasons),
            grace=self._grace,
            judged=self._judged(),
            known=self._step is not None or bool(self._error),
            rank=self._last.get("rank"),
            step=step.get("step", 0),
            world_size=world if type(world) is int else None,
            ended=self._ended,
            age_s=age,
            loss=step.get("loss"),
            **(reported | self._averages),
        )

    def take_events(self) -> list[Event]:
        """Return new `health` and `steady_state` events, as (ts, mono, msg, fields)."""
        events, self._events = self._events, []
        return events

    def _progress(self, line: Mapping[str, Any]) -> None:
        if self._step is not None and line["step"] <= self._step["step"]:
            self._begin("resume")  # the boot line was lost
        compiles = number(line.get("compiles"))
        # After a cap there are no new grace periods: a run that recompiles at every step is judged.
        if compiles is not None and compiles > self._compiles and not (self._grace or self._capped):
            self._open_grace("recompilation")
        self._compiles = self._compiles if compiles is None else compiles
        dt = step_seconds(line, None if self._step is None else self._step["mono"])
        self._step, self._since_step_s, self._ended, self._error = line, 0.0, None, ""
        if line.get("loss") is None or number(line["loss"]) is not None:
            self._bad_loss = None
        elif self._bad_loss is None:
            self._bad_loss = line["step"]
        if dt is None:
            return
        tokens, wait = number(line.get("tokens")), number(line.get("dt_fetch_s"))
        self._seconds += dt
        if self._grace:
            self._times.append(dt)
            self._tokens.append(math.nan if tokens is None else tokens)
            if (n := len(self._times)) >= self._next_analysis:
                self._next_analysis = n + max(1, n // 16)
                self._end_grace_if_steady()
            limits = self.limits
            self._capped = self._seconds > limits.grace_s or n >= limits.grace_steps
            if self._grace and self._capped:
                self._grace, self._seconds = False, 0.0
            return
        self._window.append((dt, tokens, wait))
        while self._full(len(self._window) - 1, self._seconds - self._window[0][0]):
            self._seconds -= self._window.popleft()[0]
        if line["mono"] - self._looked >= self.limits.for_s / LOOKS:
            self._look()

    def _end_grace_if_steady(self) -> None:
        from penstock.watch.steady_state import analyze_steps  # imports numpy

        assert self._step is not None
        first = self._step["step"] - len(self._times) + 1
        found = analyze_steps(self._times, self._tokens, first_step=first)
        if found.onset is not None:
            self._grace, self._seconds = False, 0.0
            self._add_event("steady_state", found.as_event(self._reason))

    def _full(self, steps: int, seconds: float) -> bool:
        return steps > self.limits.for_steps and seconds >= self.limits.for_s

    def _look(self) -> None:
        """Compare averages with limits. A violation lasts until the limit has held for `for_s`."""
        if not self._window:
            return
        import numpy as np  # imported on use, because it takes longer than the rest of a command

        self._looked = self._last["mono"]
        dt, tokens, waits = np.array(self._window, dtype=np.float64).T  # None is NaN
        # Excludes the worst step, because one checkpoint must not raise an alarm.
        slow, waited = (np.argsort(x)[: max(1, len(x) - 1)] for x in (dt, waits))
        found = {
            "tokens_per_s": tokens[slow].sum() / dt[slow].sum(),
            "data_wait_pct": 100 * waits[waited].sum() / dt[waited].sum(),
            "fetch_p95_ms": 1000 * np.quantile(waits[waited], 0.95, method="inverted_cdf"),
        }
        self._averages = {name: float(value) for name, value in found.items() if value >= 0}
        over = f"judged over {self.limits.for_s:g} s and at least {self.limits.for_steps} steps"
        for limit, (name, text) in CHECKS.items():
            allowed, value = getattr(self.limits, limit), self._averages.get(name)
            if allowed is None or value is None or not self._full(len(dt), self._seconds):
                continue
            if value < allowed if limit.startswith("min") else value > allowed:
                reason = f"{text.format(value)}, limit {allowed:,.10g}; {over}"
                self._broken[limit] = (self._looked, reason)
        since = self._looked - self.limits.for_s
        self._broken = {k: (at, text) for k, (at, text) in self._broken.items() if at > since}

    def _judge(self, age_s: float = 0.0) -> tuple[Status, list[str]]:
        limits = self.limits
        failed = [text for _, text in self._broken.values()]
        failed += [self._error] if self._error else []
        if self._step is not None and self._bad_loss is not None and limits.finite_loss:
            failed.append(f"loss is {self._step['loss']} since step {self._bad_loss}")
        since = {"no sign of life": (age_s, limits.max_heartbeat_age_s)}
        since["no step finished"] = (self._since_step_s, limits.max_step_s)
        for what, (value, limit) in since.items():
            if self._ended is None and limit is not None and value > limit:
                failed.append(f"{what} for {value:,.0f} s, limit {limit:g} s")
        warned = [self._synthetic] if self._synthetic else []
        warned += [
            f"{limit} cannot be judged: the heartbeat does not record it"
            for limit, (name, _) in CHECKS.items()
            if self._averages and getattr(limits, limit) is not None and name not in self._averages
        ]
        status: Status = "fail" if failed else "warn" if warned else "ok"
        return status, [*failed, *warned] or [self._state()]

    def _state(self) -> str:
        if self._step is None:
            return "no step yet"
        what = "warming up" if self._ended is None else "too short to judge"
        if self._grace:
            return f"{what}: {len(self._times)} steps since {self._reason}, no steady state"
        need = f"averages need {self.limits.for_s:g} s and {self.limits.for_steps} steady steps"
        return "within limits" if self._judged() else f"{what}: {need}"

    def _judged(self) -> bool:
        """Return True if averages were compared with the limits, or none is limited."""
        limited = any(getattr(self.limits, limit) is not None for limit in CHECKS)
        return not self._grace and (not limited or self._full(len(self._window), self._seconds))

    def _report(self) -> None:
        status, reasons = self._judge()
        if (status, self._grace) != self._reported:
            self._reported = status, self._grace
            self._add_event("health", {"status": status, "reasons": reasons, "grace": self._grace})

    def _add_event(self, msg: str, fields: dict[str, Any]) -> None:
        self._events.append((self._last["ts"], self._last["mono"], msg, fields))


@dataclass(frozen=True)
class RunHealth:
    """The health of a run: a verdict per file, and reasons why others are unknown."""

    verdicts: dict[Path, RankHealth]
    unknown: list[str]

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if healthy or warming up, 1 if unhealthy, 2 if unknown."""
        if any(verdict.status == "fail" and verdict.known for verdict in self.verdicts.values()):
            return 1
        return 2 if self.unknown or not self.verdicts else 0

    def summary(self) -> str:
        """Return the verdict in a few words."""
        found = self.verdicts.values()
        if self.exit_code == 1:
            failed = sum(verdict.status == "fail" for verdict in found)
            return f"unhealthy: {failed} of {len(found)} ranks"
        if self.exit_code == 2:
            return "cannot tell"
        if not all(verdict.judged for verdict in found):
            ended = all(verdict.ended is not None for verdict in found)
            return "healthy, but too short to judge" if ended else "healthy so far: warming up"
        return "healthy" if all(v.status == "ok" for v in found) else "healthy, with warnings"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        ranks = [{"file": str(path)} | asdict(verdict) for path, verdict in self.verdicts.items()]
        code, word = self.exit_code, ("ok", "fail", "unknown")[self.exit_code]
        return {"verdict": word, "exit_code": code, "unknown": self.unknown, "ranks": ranks}


def judge_run(
    patterns: Sequence[str | os.PathLike[str]], now: float, limits: Limits | None = None
) -> RunHealth:
    """Judge the heartbeats in files, globs or folders. A folder must have one of every rank."""
    verdicts = {}
    unknown = [f"{pattern}: no heartbeat there" for pattern in patterns if not expand([pattern])]
    for path in expand(patterns):
        try:
            verdict = judge_rank(read_heartbeat(path, LAST_BYTES), now, limits)
            if not verdict.known:  # the last step may be hours of beats ago
                verdict = judge_rank(read_heartbeat(path), now, limits)
        except (PenstockError, OSError) as error:
            unknown.append(f"{path}: {error}")
            continue
        verdicts[path] = verdict
        unknown += [] if verdict.known else [f"{path}: no step in it yet"]
    if verdicts and any(Path(pattern).expanduser().is_dir() for pattern in patterns):
        # The newest file decides: others may be left from a start with more ranks.
        newest = min(verdicts.values(), key=lambda verdict: verdict.age_s or 0.0)
        there = {verdict.rank for verdict in verdicts.values()}
        if lacking := missing_ranks(newest.world_size, there):
            unknown.append(lacking)
    return RunHealth(verdicts, unknown)

"""Whether a run is well: limits on what a heartbeat says, and no alarm before the run is warm.

In:    the lines of one rank's heartbeat, in order.
Out:   a verdict: ok, warn or fail, with reasons; online also `health` and `steady_state` events when that changes.
Where: the heartbeat's thread while the run goes on, or any reader's.
State: the steps of the last `for_s` seconds; in the grace period those that the search for the steady state keeps.

A limit is judged on the average of the last `for_s` seconds and at least `for_steps` steps, without their worst step, so
one checkpoint that nobody named is no alarm, and a slow-down is one within that time. Averages are not judged in a
grace period, from the start, a resume or a recompilation until the steady state, or a cap: the loss, the age, a step
that does not end and an error of the loader always are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError
from penstock.watch.health_window import Window
from penstock.watch.view.fields import MOST_TOKENS
from penstock.watch.world import world_size

if TYPE_CHECKING:
    from penstock.watch.steady import SteadyWatch

Status = Literal["ok", "warn", "fail"]
Event = tuple[float, float, str, dict[str, Any]]

LOOKS = 30
"""A limit is looked at so often in `for_s`: more would find nothing sooner."""
FEWEST = 4
"""Steps from which on an average is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run must keep to. None: not judged."""

    min_tokens_per_s: float | None = None
    """Of one rank, over wall time without named pauses. A larger value raises the alarm earlier, and over less."""
    max_data_wait_pct: float | None = None
    """Per cent of the time spent waiting for data. A larger value lets more of the accelerator stand idle unnoticed."""
    max_fetch_p95_ms: float | None = None
    """Of the time in `next()`. A larger value lets slower batches pass, as long as prefetching does not hide them."""
    max_heartbeat_age_s: float | None = 60.0
    """Since the last line, which comes every second from a process that lives. A larger value finds a dead one later."""
    max_step_s: float | None = None
    """Without a finished step, compilation and evaluation included. A larger value finds a hung collective later."""
    finite_loss: bool = True
    """A loss that is not finite fails at once, in the grace period too."""
    for_s: float = 30.0
    """A limit is judged on so many seconds. A larger value gives fewer alarms, each later by as much."""
    for_steps: int = 10
    """And on so many steps, if those take longer. A larger value gives fewer alarms, each later by as many steps."""
    grace_s: float = 600.0
    """The grace period ends so long after its first step if no steady state is found. A larger value leaves a run that
    never gets steady unwatched for longer."""
    grace_steps: int = 1000
    """And after so many steps, if they come first."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if name == "finite_loss":
                fits = isinstance(value, bool)
            elif name in ("for_steps", "grace_steps"):
                fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            else:
                optional = name.startswith(("min_", "max_"))
                number = isinstance(value, int | float) and not isinstance(value, bool)
                fits = (number and math.isfinite(value) and value >= 0) or (
                    optional and value is None
                )
            if not fits:
                kind = "True or False" if name == "finite_loss" else "a number, at least 0"
                raise ConfigError(
                    f"{name}={value!r}: needs {'a whole number, at least 1' if 'steps' in name else kind}"
                )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one rank is."""

    status: Status
    reasons: tuple[str, ...]
    """What is wrong, with the number, the limit and over how long; else one that says what the run does."""
    grace: bool
    known: bool
    """Whether anything can be told of it: it has reported a step, or that its data failed before the first one."""
    rank: int | None
    step: int
    world_size: int | None = None
    """Ranks of the run, by the newest boot among the lines."""
    ended: str | None = None
    """Why it ended, if it said so."""
    age_s: float | None = None
    loss: float | str | None = None
    tokens_per_s: float | None = None
    data_wait_pct: float | None = None
    fetch_p95_ms: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}


def judge(
    lines: Iterable[Mapping[str, Any]], now: float | None = None, limits: Limits | None = None
) -> Verdict:
    """How a rank is, by the lines of its heartbeat; `now` in Unix seconds, or None for the time of its last line."""
    gate = HealthGate(limits)
    for line in lines:
        gate.add(line)
    return gate.verdict(now)


class HealthGate:
    """Judges one rank from its lines, as they come or afterwards."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._events: list[Event] = []
        self._told: tuple[Status, bool] = ("ok", True)
        self._rank: int | None = None
        self._world: int | None = None
        self._ts = self._mono = 0.0
        self._pid: int | None = None
        self._line: Mapping[str, Any] = {}
        """The last progress line."""
        self._waiting_s = 0.0
        self._compiles: float | None = None
        self._ended: str | None = None
        self._error: str | None = None
        self._synthetic: str | None = None
        self._bad_loss: tuple[int, str] | None = None
        self._open("start")

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in the next line."""
        msg = str(line.get("msg"))
        self._rank = line.get("rank", self._rank)
        self._ts, self._mono = _number(line, "ts") or self._ts, _number(line, "mono") or self._mono
        if msg == "boot":
            self._world = world_size(line)
        if msg == "boot" and not line.get("rotated"):
            self._synthetic = None  # another process, which begins with data
            self._begin(line)
        elif msg == "progress":
            self._progress(line)
        elif msg == "beat":
            self._waiting_s = _number(line, "since_step_s") or 0.0
        elif msg == "shutdown":
            self._ended = str(line.get("reason", "end"))
        elif msg == "fallback":
            to_data = line.get("to") == "data"
            self._synthetic = (
                None
                if to_data
                else f"synthetic data since step {line.get('at_step', line.get('step'))}: {line.get('reason')}"
            )
        elif msg.endswith("loader_error"):
            self._error = f"the loader failed at {line.get('stage')}: {line.get('error')}"
        if msg in ("progress", "beat", "boot"):
            self._tell()

    def verdict(self, now: float | None = None) -> Verdict:
        """How the rank is, at a time in Unix seconds or at that of its last line."""
        if not self._opened_grace:
            self._look()
        failed, warned, soft = self._reasons(now)
        (rate, wait), p95 = self._averages, self._window.fetch_p95_ms()
        status: Status = "fail" if failed else "warn" if warned or soft else "ok"
        age = None if now is None or not self._ts else max(0.0, now - self._ts)
        return Verdict(
            status=status,
            reasons=(*failed, *warned, *soft) or (self._state(),),
            grace=self._opened_grace,
            known=bool(self._line) or self._error is not None,
            rank=self._rank,
            step=int(_number(self._line, "step") or 0),
            world_size=self._world,
            ended=self._ended,
            age_s=age,
            loss=self._line.get("loss"),
            tokens_per_s=_number(self._line, "toks_per_s") if rate is None else rate,
            data_wait_pct=_number(self._line, "data_wait_pct") if wait is None else wait,
            fetch_p95_ms=_number(self._line, "fetch_p95_ms") if p95 is None else p95,
        )

    def take_events(self) -> list[Event]:
        """What has changed since the last call, as (ts, mono, msg, fields): `health` and `steady_state`."""
        events, self._events = self._events, []
        return events

    # The grace period

    def _open(self, reason: str) -> None:
        self._opened_grace = True
        self._why = reason
        self._since: float | None = None
        self._steps = 0
        self._steady: SteadyWatch | None = None
        self._ended_by_cap = False
        self._window = Window(self.limits.for_s, self.limits.for_steps)
        self._broken: dict[str, tuple[float, str]] = {}
        self._looked = -math.inf
        self._averages: tuple[float | None, float | None] = (None, None)

    def _begin(self, line: Mapping[str, Any]) -> None:
        again = self._pid is not None or bool(line.get("resumed"))
        self._pid = int(_number(line, "pid") or 0)
        self._ended = self._error = self._bad_loss = self._compiles = None
        self._line, self._waiting_s = {}, 0.0
        self._open("resume" if again else "start")

    def _grace_step(self, step: int, dt: float, tokens: float | None, wait: float | None) -> None:
        from penstock.watch.steady import SteadyWatch

        if self._steady is None:
            self._steady = SteadyWatch(first_step=step)
            self._since = self._mono
        self._steps += 1
        evidence = {"compiles": self._compiles, "data_wait_s": wait}
        reached = self._steady.step(dt, None if tokens is None else round(tokens), **evidence)
        if reached is not None:
            self._opened_grace = False
            self._events.append((self._ts, self._mono, "steady_state", reached.as_event()))
        elif (
            self._mono - (self._since or 0.0) > self.limits.grace_s
            or self._steps >= self.limits.grace_steps
        ):
            self._opened_grace, self._ended_by_cap = False, True
        if not self._opened_grace:
            self._steady = None

    # Steps

    def _progress(self, line: Mapping[str, Any]) -> None:
        before, step = _number(self._line, "step"), int(_number(line, "step") or 0)
        pid = int(_number(line, "pid") or 0)
        if (self._pid not in (None, pid)) or (before is not None and step <= before):
            self._begin(line)  # its boot line was lost
            before = None
        self._pid = pid
        compiles = _number(line, "compiles")
        compiles = None if compiles is None or compiles < 0 else compiles
        grew = compiles is not None and self._compiles is not None and compiles > self._compiles
        self._compiles = self._compiles if compiles is None else compiles
        # In a grace period its cap goes on counting, and one that ended by its cap is not opened again by this: a run
        # that recompiles at every step would never be judged.
        if grew and not self._opened_grace and not self._ended_by_cap:
            self._open("recompilation")
        dt = self._step_s(line, step, before)
        self._line, self._waiting_s, self._ended, self._error = line, 0.0, None, None
        self._note_loss(line, step)
        if dt is None:
            return
        tokens, wait = _tokens(line, dt), _wait(line, dt)
        if self._opened_grace:
            self._grace_step(step, dt, tokens, wait)
            return
        self._window.add(dt, tokens, wait)
        if self._mono - self._looked >= self.limits.for_s / LOOKS:
            self._look()

    def _step_s(self, line: Mapping[str, Any], step: int, before: float | None) -> float | None:
        dt = _number(line, "dt_step_s")
        if dt is None and before is not None and step == before + 1:
            paused = line.get("paused")
            pauses = (
                [_number(paused, name) or 0.0 for name in paused]
                if isinstance(paused, Mapping)
                else []
            )
            dt = self._mono - (_number(self._line, "mono") or 0.0) - sum(pauses)
        return None if dt is None or not 0 <= dt < 1e9 else dt

    def _note_loss(self, line: Mapping[str, Any], step: int) -> None:
        loss = line.get("loss")
        if loss in ("nan", "inf", "-inf") or (isinstance(loss, float) and not math.isfinite(loss)):
            first = step if self._bad_loss is None else self._bad_loss[0]
            self._bad_loss = (
                first,
                f"loss is {loss} since step {first} (limit finite_loss, at once)",
            )
        elif loss is not None:
            self._bad_loss = None

    # Limits

    def _look(self) -> None:
        """Compare the averages with the limits; one that is broken stays so until it has held for `for_s` again."""
        self._looked = self._mono
        self._averages = self._window.averages()
        if self._window.full():
            for name, text in self._over().items():
                self._broken[name] = (self._mono, f"{text}; judged over {self._span()}")
        self._broken = {
            name: (at, text)
            for name, (at, text) in self._broken.items()
            if self._mono - at < self.limits.for_s
        }

    def _over(self) -> dict[str, str]:
        limits, (rate, wait) = self.limits, self._averages
        found = {}
        if (
            limits.min_tokens_per_s is not None
            and rate is not None
            and rate < limits.min_tokens_per_s
        ):
            found["min_tokens_per_s"] = (
                f"{rate:,.0f} tokens/s, limit {limits.min_tokens_per_s:,.0f}"
            )
        if (
            limits.max_data_wait_pct is not None
            and wait is not None
            and wait > limits.max_data_wait_pct
        ):
            found["max_data_wait_pct"] = (
                f"data wait {wait:.1f} %, limit {limits.max_data_wait_pct:g} %"
            )
        p95 = None if limits.max_fetch_p95_ms is None else self._window.fetch_p95_ms()
        if (
            limits.max_fetch_p95_ms is not None
            and p95 is not None
            and p95 > limits.max_fetch_p95_ms
        ):
            found["max_fetch_p95_ms"] = (
                f"fetch p95 {p95:.0f} ms, limit {limits.max_fetch_p95_ms:g} ms"
            )
        return found

    def _span(self) -> str:
        return f"{self.limits.for_s:g} s and at least {self.limits.for_steps} steps"

    def _reasons(self, now: float | None) -> tuple[list[str], list[str], list[str]]:
        """What fails, what warns, and what would fail if it went on."""
        limits = self.limits
        failed = [text for _, text in self._broken.values()]
        failed += [self._error] if self._error is not None else []
        warned = [self._synthetic] if self._synthetic is not None else []
        if self._bad_loss is not None and limits.finite_loss:
            failed.append(self._bad_loss[1])
        if self._ended is None:
            age = 0.0 if now is None or not self._ts else max(0.0, now - self._ts)
            if limits.max_heartbeat_age_s is not None and age > limits.max_heartbeat_age_s:
                failed.append(
                    f"no sign of life for {age:,.0f} s, limit {limits.max_heartbeat_age_s:g} s"
                )
            if limits.max_step_s is not None and self._waiting_s > limits.max_step_s:
                failed.append(
                    f"no step finished for {self._waiting_s:,.0f} s, limit {limits.max_step_s:g} s"
                )
        if self._opened_grace:
            return failed, warned, []
        rate, wait = self._averages
        if self._window.full():
            if limits.min_tokens_per_s is not None and rate is None:
                warned.append(
                    "min_tokens_per_s cannot be judged: the lines have neither tokens nor toks_per_s"
                )
            if (limits.max_data_wait_pct, limits.max_fetch_p95_ms) != (None, None) and wait is None:
                warned.append(
                    "data wait and fetch cannot be judged: the lines have neither dt_fetch_s nor data_wait_pct"
                )
            return failed, warned, []
        so_far = (
            f"so far, {self._window.seconds:.0f} s and {len(self._window)} steps of {self._span()}"
        )
        soft = [
            f"{text} {so_far}" for name, text in self._over().items() if name not in self._broken
        ]
        return failed, warned, soft if len(self._window) >= FEWEST else []

    def _state(self) -> str:
        if not self._opened_grace:
            return "within limits" if len(self._window) else "warm"
        if not self._line:
            return "no step yet"
        cap = f"until steady state, {self.limits.grace_s:g} s or {self.limits.grace_steps} steps"
        return f"warming up since {self._why}: {self._steps} steps, {self._mono - (self._since or self._mono):.0f} s; {cap}"

    def _tell(self) -> None:
        failed, warned, _ = self._reasons(None)
        status: Status = "fail" if failed else "warn" if warned else "ok"
        if (status, self._opened_grace) != self._told:
            self._told = (status, self._opened_grace)
            told = {
                "status": status,
                "reasons": [*failed, *warned] or [self._state()],
                "grace": self._opened_grace,
            }
            self._events.append((self._ts, self._mono, "health", told))


def _number(line: Any, name: str) -> float | None:
    value = line.get(name)
    if type(value) is float and -1e300 < value < 1e300:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def _tokens(line: Mapping[str, Any], dt: float) -> float | None:
    tokens, rate = _number(line, "tokens"), _number(line, "toks_per_s")
    found = tokens if tokens is not None else None if rate is None else rate * dt
    return None if found is None or not 0 <= found < MOST_TOKENS else found


def _wait(line: Mapping[str, Any], dt: float) -> float | None:
    for name in ("dt_fetch_s", "dt_fetch_last"):
        if (wait := _number(line, name)) is not None and wait >= 0:
            return wait
    share = _number(line, "data_wait_pct")
    return None if share is None or share < 0 else share / 100 * dt

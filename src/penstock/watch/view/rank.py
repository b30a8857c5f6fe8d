"""What is known of one rank while it runs.

In:    its heartbeat lines, in order.
Out:   the latest of everything, rates over the last minute, and how the rank is doing.
Where: the watcher's thread.
State: the latest values; a minute of steps and of stage times. Nothing here looks at a clock: `now` is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.watch.stage_timer import RANKS, STAGES
from penstock.watch.view.fields import (
    LONGEST_STEP_S,
    MOST_TOKENS,
    finite,
    kind,
    mapping,
    number,
    text,
    whole,
)

if TYPE_CHECKING:
    from penstock.watch.steady import SteadyWatch

STALE_S = 10.0
"""A rank that says nothing for so long is stale: it beats every second, even while a step is stuck."""
LOST_S = 300.0
"""After so long it is not expected to come back: it was killed without a word."""
STUCK_S = 1.0
"""A call of `next` that takes longer is shown while it lasts."""
LONG_S = 5.0
"""A step that takes longer is shown while it lasts: it compiles, or it hangs, or somebody evaluates."""
RECENT_S = 60.0
"""Rates are taken over so long."""
FADE = 0.95
"""How much of what was is kept with each step, where a sum is to follow the last twenty or so."""


class Pace(NamedTuple):
    """Where a rank stood at a moment."""

    mono: float
    step: int
    tokens: float | None


class StageShare(NamedTuple):
    """What a stage did lately, in seconds for each second of wall time: its threads add up."""

    stage: str
    busy: float
    blocked_in: float
    blocked_out: float
    items_per_s: float
    bytes_per_s: float


@dataclass(slots=True)
class RankView:
    """The latest of one rank."""

    rank: int
    host: str = ""
    world_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    ts: float | None = None
    """Unix time of its last line."""
    step: int = 0
    loss: float | None = None
    data_wait_pct: float | None = None
    queue_depth: float | None = None
    queue_capacity: float | None = None
    tokens: float | None = None
    """Trained on so far, those before a resume included; None while no line has said how many."""
    tokens_a_step: float | None = None
    verdict: str = ""
    waiting: Mapping[str, Any] = field(default_factory=dict)
    """What `next` waits for, if it does."""
    since_step_s: float | None = None
    steady_at: int | None = None
    """The step where the steady state began; None while warming up."""
    health: str = ""
    synthetic: bool = False
    ended: str | None = None
    """Why it ended, once it has."""
    dropped: int = 0
    """Lines that its heartbeat could not write."""
    _rate: float | None = None
    _waited: float = 0.0
    _waited_for_ranks: float = 0.0
    _before: float | None = None
    """Tokens of the steps before this process, which its own count leaves out."""
    _counted: float = 0.0
    """Tokens of this process, as it says or as they add up."""
    _pace: deque[Pace] = field(default_factory=deque)
    _beats: deque[tuple[float, Mapping[str, Any]]] = field(default_factory=deque)
    _steady: SteadyWatch | None = None
    _compiles: float | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line."""
        msg = kind(line)
        ts = finite(line.get("ts"))
        self.ts = self.ts if ts is None else ts
        if msg == "boot":
            self._boot(line)
        step = whole(line.get("step"))
        self.step = self.step if step is None else step
        for name in ("queue_depth", "queue_capacity"):
            if (found := finite(line.get(name))) is not None:
                setattr(self, name, found)
        if msg == "progress":
            self._progress(line)
        elif msg == "beat":
            self._beat(line)
        elif msg == "steady_state":
            self.steady_at = at if (at := whole(line.get("at_step"))) is not None else self.step
        elif msg == "health":
            self.health = text(line.get("status"))
        elif msg == "fallback":
            self.synthetic = line.get("to") == "synthetic"
        elif msg == "shutdown":
            self._shutdown(line)

    def age(self, now: float) -> float | None:
        """Seconds since its last line. Clocks of two hosts may differ, but nothing is younger than now."""
        return None if self.ts is None else max(0.0, now - self.ts)

    def stale(self, now: float) -> bool:
        """Whether it should have said something by now."""
        age = self.age(now)
        return self.ended is None and age is not None and age > STALE_S

    def lost(self, now: float) -> bool:
        """Whether it will not say anything any more, and did not say why."""
        age = self.age(now)
        return self.ended is None and age is not None and age > LOST_S

    def state(self, now: float) -> str:
        """How it is doing, in a word or two."""
        if self.ended is not None:
            return f"ended: {self.ended}" if self.ended else "ended"
        if self.stale(now):
            return "stale"
        if self.stuck_s >= STUCK_S:
            return f"waits for {text(self.waiting.get('stage')) or 'data'}"
        if self.synthetic:
            return "synthetic data"
        if self.health in ("warn", "fail"):
            return f"health: {self.health}"
        if self.since_step_s is not None and self.since_step_s >= LONG_S:
            return f"no step for {self.since_step_s:.0f} s"
        return "warming up" if self.steady_at is None else "steady"

    @property
    def stuck_s(self) -> float:
        """How long `next` has been waiting."""
        return finite(self.waiting.get("for_s")) or 0.0

    @property
    def own_wait_pct(self) -> float:
        """Data wait without the time it waited for other ranks, which is theirs."""
        others = self._waited_for_ranks / self._waited if self._waited > 0 else 0.0
        return (self.data_wait_pct or 0.0) * (1.0 - min(1.0, others))

    @property
    def steps_per_s(self) -> float | None:
        """Over the last minute, pauses included: what an arrival time needs."""
        if len(self._pace) < 2:
            return None
        first, last = self._pace[0], self._pace[-1]
        return (
            (last.step - first.step) / (last.mono - first.mono) if last.mono > first.mono else None
        )

    @property
    def tokens_per_s(self) -> float | None:
        """As the run itself says, else over the last minute."""
        if self._rate is not None:
            return self._rate
        if len(self._pace) < 2:
            return None
        first, last = self._pace[0], self._pace[-1]
        if (
            first.tokens is None
            or last.tokens is None
            or last.tokens < first.tokens
            or last.mono <= first.mono
        ):
            return None
        return (last.tokens - first.tokens) / (last.mono - first.mono)

    def stages(self) -> list[StageShare]:
        """What the stages did in the last minute, in their order; nothing before the second beat."""
        if len(self._beats) < 2:
            return []
        (began, before), (ended, after) = self._beats[0], self._beats[-1]
        wall = ended - began
        if wall <= 0:
            return []
        shares = []
        for stage in STAGES:
            old, new = mapping(before.get(stage)), mapping(after.get(stage))
            if not new:
                continue
            fields = ("busy_s", "blocked_in_s", "blocked_out_s", "items", "bytes")
            shares.append(
                StageShare(
                    stage,
                    *(
                        max(0.0, (finite(new.get(f)) or 0.0) - (finite(old.get(f)) or 0.0)) / wall
                        for f in fields
                    ),
                )
            )
        return shares

    def _boot(self, line: Mapping[str, Any]) -> None:
        self.host = text(line.get("host")) or self.host
        self.world_size = whole(line.get("world_size")) or self.world_size
        self.settings = mapping(line.get("settings")) or self.settings
        if line.get("rotated"):
            return
        # Another process: its clock and its counts begin anew, and so does its warmup.
        self.ended = self.steady_at = self._steady = self._compiles = self._rate = self._before = (
            self.since_step_s
        ) = None
        self.synthetic, self.health, self.verdict, self.waiting = False, "", "", {}
        self._waited = self._waited_for_ranks = self._counted = 0.0
        self._pace.clear()
        self._beats.clear()

    def _progress(self, line: Mapping[str, Any]) -> None:
        self.loss = number(line.get("loss"))
        if (pct := finite(line.get("data_wait_pct"))) is not None:
            self.data_wait_pct = pct
        self._rate = finite(line.get("toks_per_s"))
        self.since_step_s = 0.0
        self.waiting = {}
        tokens, total = finite(line.get("tokens")), finite(line.get("tokens_total"))
        self.tokens_a_step = self.tokens_a_step if tokens is None else tokens
        if total is None and tokens is not None and 0 <= tokens <= MOST_TOKENS:
            total = self._counted + tokens
        if total is not None:
            if self._before is None:
                # A process that resumed counts its own tokens only: what is missing at its first step was before it.
                self._before = max(
                    0.0, (self.step - 1) * (tokens or 0.0) - (total - (tokens or 0.0))
                )
            self._counted = total
            self.tokens = self._before + total
        waits = {
            stage: max(0.0, finite(s) or 0.0)
            for stage, s in mapping(line.get("wait_by_stage")).items()
        }
        self._waited = FADE * self._waited + sum(waits.values())
        self._waited_for_ranks = FADE * self._waited_for_ranks + waits.get(RANKS, 0.0)
        mono = finite(line.get("mono"))
        if mono is not None:
            self._pace.append(Pace(mono, self.step, self.tokens))
            while len(self._pace) > 2 and mono - self._pace[1].mono > RECENT_S:
                self._pace.popleft()
        self._warm(line)

    def _warm(self, line: Mapping[str, Any]) -> None:
        """A run that does not say itself when it is warm is watched for it."""
        dt, compiles = finite(line.get("dt_step_s")), finite(line.get("compiles"))
        if compiles is not None:
            if self._compiles is not None and compiles > self._compiles:
                self.steady_at = self._steady = None
            self._compiles = compiles
        if self.steady_at is not None or dt is None or not 0 <= dt <= LONGEST_STEP_S:
            return
        if self._steady is None:
            from penstock.watch.steady import SteadyWatch

            self._steady = SteadyWatch(first_step=self.step)
        self._steady.step(dt)
        if self._steady.reached is not None:
            self.steady_at, self._steady = self._steady.reached.onset, None

    def _beat(self, line: Mapping[str, Any]) -> None:
        self.verdict = text(line.get("verdict")) or self.verdict
        self.waiting = mapping(line.get("waiting"))
        self.since_step_s = finite(line.get("since_step_s"))
        self.dropped = whole(line.get("dropped")) or self.dropped
        mono, stages = finite(line.get("mono")), mapping(line.get("stages"))
        if mono is not None and stages:
            self._beats.append((mono, stages))
            while len(self._beats) > 2 and mono - self._beats[1][0] > RECENT_S:
                self._beats.popleft()

    def _shutdown(self, line: Mapping[str, Any]) -> None:
        self.ended = text(line.get("reason"))
        self.verdict = text(line.get("verdict")) or self.verdict
        self.waiting = {}
        if (pct := finite(line.get("data_wait_pct"))) is not None:
            self.data_wait_pct = pct

"""The thread of a heartbeat.

In:    what the trainer has said, and what the loader has observed.
Out:   lines to the file, numbers to the hooks, a beat every second or so, and the health gate's news.
Where: "penstock-heartbeat". All that touches a disk, a device or a hook is done here.
State: two bounded queues: what the trainer has said, and what the disk has not taken yet. What they cannot hold is
       dropped, oldest first, and counted.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.feed.beat_file import BeatFile
from penstock.feed.beat_hooks import Hook, Hooks
from penstock.feed.beat_values import Late, count_of, device_bytes, keep_value, settle, versions
from penstock.types import MiB
from penstock.watch.line import Line, as_line, encode, iso

if TYPE_CHECKING:
    from penstock.watch.health import HealthGate
from penstock.watch.memory import resident_bytes

log = logging.getLogger("penstock")

FLUSH_S = 0.2
"""Lines wait at most so long for the disk: what a process that is killed loses. More often would disturb the trainer."""
LATE_S = 10.0
"""How long a line waits for a value that the device has not computed yet; then it goes without."""
LAST_S = 0.5
"""Of the time that `close` has, what is kept for writing."""
GIVE_UP_S = 1.0
"""How long `close` tries a disk that was not to be written to before."""
MAX_BACKLOG_BYTES = 8 * MiB
RATE_STEPS = 50
"""Steps over which tokens/s is taken where the loader does not say it."""


class Observed(Protocol):
    """What a loader tells a heartbeat."""

    def step_fields(self) -> dict[str, Any]:
        """What is known of the last step. Called on the trainer's thread, so it must be cheap."""

    def beat_fields(self) -> dict[str, Any]:
        """What is known between steps. Called on the heartbeat's thread."""

    def take_events(self) -> list[tuple[float, float, str, dict[str, Any]]]:
        """What has happened since the last call: (ts, mono, msg, fields). Called on the heartbeat's thread."""


class Said(NamedTuple):
    """Something on its way to the heartbeat's thread."""

    ts: float
    mono: float
    step: int
    msg: str
    fields: dict[str, Any]


class Beating:
    """What the thread works on. It knows nothing of the `Heartbeat`, which can so be dropped while the thread runs."""

    def __init__(
        self,
        *,
        rank: int,
        file: tuple[Path, int, int],
        most: int,
        every_s: float,
        observed: Observed | None,
        prefix: str,
        hooks: list[Hook],
        boot: dict[str, Any],
        gate: HealthGate | None,
    ) -> None:
        self.pid = os.getpid()
        self.step = self._told = 0
        self.closing = False
        self._rank = rank
        self._most = most
        self._every_s = every_s
        self._observed = observed
        self._prefix = prefix
        self._boot = boot
        self._gate = gate
        self._file = BeatFile(*file, self._boot_again)
        self._hooks = Hooks(hooks, most)
        # Reentrant, because a garbage collection may close a heartbeat on a thread that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._said: deque[Said] = deque()
        self._late: deque[Said] = deque()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._woken = False
        self._lost = 0
        self._errors = 0
        self._reason = "end"
        self._deadline = math.inf
        self._thread: threading.Thread | None = None
        self._begun = self._last_step = time.monotonic()
        self._steps = 0
        self._tokens = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._before: Said | None = None
        self._data_wait: Any = None
        self._measured: tuple[float, dict[str, int]] = (-math.inf, {})

    # On any thread

    @property
    def dropped(self) -> int:
        return self._lost + self._file.lost

    def counts(self) -> dict[str, int]:
        return {
            "dropped": self.dropped,
            "disk_failures": self._file.failures,
            "hook_errors": self._hooks.errors,
            "hook_dropped": self._hooks.dropped,
            "errors": self._errors,
        }

    def start(self) -> None:
        with self._changed:
            if self._thread is not None or self.closing:
                return
            self._begun = self._last_step = time.monotonic()
            thread = threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads for this process, or it is ending
                self.closing = True
                self._wrong("its thread cannot be started, and nothing is recorded", error)
            else:
                self._thread = thread

    def progressed(self, ts: float, mono: float, step: Any, fields: dict[str, Any]) -> None:
        try:
            self.step = operator.index(step)
        except Exception:  # not a number: the line says what it was
            self.step += 1
            fields["step_given"] = keep_value(step)
        self._last_step = mono
        self._steps += 1
        self._tokens += count_of(fields.get("tokens"))
        if "tokens_total" not in fields and self._tokens:
            fields["tokens_total"] = self._tokens
        self.add(Said(ts, mono, self.step, "progress", fields))

    def add(self, said: Said) -> None:
        with self._changed:
            if self.closing:
                self._lost += 1  # nobody will come for it
                return
            if len(self._said) >= self._most:
                self._said.popleft()
                self._lost += 1
            self._said.append(said)
            if len(self._said) == self._most // 2:
                self._woken = True
                self._changed.notify_all()

    def ask(self, what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the loader says, or nothing: its errors must not end a run."""
        try:
            return dict(what())
        except Exception as error:
            self._wrong("the loader's telemetry failed", error)
            return {}

    def close(self, reason: str, timeout: float) -> bool:
        if self.pid != os.getpid():
            return True  # a forked child has the object, and not the thread
        with self._changed:
            if not self.closing:
                self.closing = True
                self._reason = reason
                self._deadline = time.monotonic() + timeout
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        # A thread that hangs in a system call or a hook cannot be ended; it is a daemon, and holds nothing up.
        thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
        if thread.is_alive():
            self._wrong(
                f"the thread hangs, and {len(self._backlog)} lines were not written to {self._file.path}",
                None,
            )
        return not thread.is_alive() and not self._backlog

    # On the heartbeat's thread

    def _run(self) -> None:
        self._boot["versions"] = versions()
        self._emit(Said(time.time(), time.monotonic(), self.step, "boot", self._boot))
        next_beat = self._begun + self._every_s
        while not self.closing:
            try:
                now = time.monotonic()
                if now >= next_beat:
                    self._beat(now)
                    next_beat = max(next_beat + self._every_s, now)
                self._turn(min(next_beat, now + FLUSH_S))
                self._wait(min(next_beat, now + FLUSH_S))
            except Exception as error:  # whatever it is, the next beat is worth more than this one
                self._wrong("the heartbeat failed", error)
                self._wait(time.monotonic() + FLUSH_S)
        try:
            self._end()
        except Exception as error:
            self._wrong("the last lines of the heartbeat failed", error)
        finally:
            self._file.close()

    def _wait(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._woken or self.closing, max(0.0, until - time.monotonic())
            )
            self._woken = False

    def _turn(self, until: float) -> None:
        self._collect()
        self._file.check()
        self._flush()
        self._hooks.run(until)

    def _collect(self) -> None:
        """Make lines of what has been said, in that order: one that waits for the device holds up those behind it."""
        events = self._events(self._observed) if self._observed is not None else []
        with self._changed:
            said = [*self._said, *events]
            self._said.clear()
        # By their time: an event belongs to the step that was the last one when it happened.
        step = self._late[-1].step if self._late else self._told
        for one in sorted(said, key=lambda one: one.mono) if events else said:
            step = one.step if one.step >= 0 else step
            self._late.append(one if one.step >= 0 else one._replace(step=step))
        self._told = step
        while self._late and self._is_ready(self._late[0]):
            self._try_to_emit(self._late.popleft())
        while len(self._late) > self._most:
            self._late.popleft()
            self._lost += 1

    def _try_to_emit(self, said: Said) -> None:
        try:
            self._emit(said)
        except Exception as error:  # a dictionary, say, that its owner changes meanwhile
            self._lost += 1
            self._wrong(f"a {said.msg} line could not be made", error)

    def _events(self, observed: Observed) -> list[Said]:
        """What the loader has to tell, of a step that is yet to be found out."""
        try:
            return [
                Said(ts, mono, -1, msg, dict(fields))
                for ts, mono, msg, fields in observed.take_events()
            ]
        except Exception as error:
            self._wrong("the loader's telemetry failed", error)
            return []

    def _is_ready(self, said: Said) -> bool:
        late = [value for value in said.fields.values() if isinstance(value, Late)]
        now = time.monotonic()
        return (
            all(value.ready() for value in late)
            or now - said.mono > LATE_S
            or now > self._deadline - LAST_S
        )

    def _emit(self, said: Said) -> None:
        """Make a line of it, and show it to those who look at lines."""
        msg = said.msg
        if msg.startswith("loader_"):
            msg = self._prefix + msg.removeprefix("loader_")
        fields = settle(said.fields)
        if msg == "progress":
            self._add_rates(said, fields)
        line, text = as_line(self._line(said.ts, said.mono, said.step, msg, fields))
        self._keep(text)
        if msg == "progress":
            self._hooks.add(said.step, line)
        if self._gate is not None:
            self._judge(self._gate, line)

    def _line(self, ts: float, mono: float, step: int, msg: str, fields: Mapping[str, Any]) -> Line:
        first = {
            "ts": round(ts, 6),
            "iso": iso(ts),
            "mono": round(mono, 6),
            "pid": self.pid,
            "rank": self._rank,
            "step": max(0, step),
            "msg": msg,
        }
        return first | {name: value for name, value in fields.items() if name not in first}

    def _add_rates(self, said: Said, fields: dict[str, Any]) -> None:
        """What can be told of a step without a loader that observes itself."""
        before, self._before = self._before, said
        if "dt_step_s" not in fields and before is not None and said.step == before.step + 1:
            fields["dt_step_s"] = round(said.mono - before.mono, 6)
        tokens = fields.get("tokens")
        if isinstance(tokens, int | float):
            self._recent.append((said.mono, count_of(tokens)))
            if (
                "toks_per_s" not in fields
                and len(self._recent) > 1
                and said.mono > self._recent[0][0]
            ):
                some = sum(n for _, n in self._recent) - self._recent[0][1]
                fields["toks_per_s"] = round(some / (said.mono - self._recent[0][0]), 3)
        for name, n in self._memory().items():
            fields.setdefault(name, n)
        self._data_wait = fields.get("data_wait_pct", self._data_wait)

    def _beat(self, now: float) -> None:
        fields = self.ask(self._observed.beat_fields) if self._observed is not None else {}
        fields = self._memory() | fields
        fields["since_step_s"] = round(max(0.0, now - self._last_step), 3)
        fields |= {name: n for name, n in self.counts().items() if n or name == "dropped"}
        self._emit(Said(time.time(), now, self.step, "beat", fields))

    def _memory(self) -> dict[str, int]:
        now = time.monotonic()
        if now - self._measured[0] > self._every_s:
            found = {"rss_bytes": resident_bytes(), "device_bytes": device_bytes()}
            self._measured = (now, {name: n for name, n in found.items() if n is not None})
        return self._measured[1]

    def _judge(self, gate: HealthGate, line: Mapping[str, Any]) -> None:
        try:
            gate.add(line)
        except Exception as error:
            self._wrong("the health gate failed", error)
        for ts, mono, msg, fields in gate.take_events():
            self._keep(encode(self._line(ts, mono, line["step"], msg, fields)))
            if msg == "health":
                level = logging.INFO if fields["status"] == "ok" else logging.WARNING
                log.log(
                    level,
                    "health: %s at step %d: %s",
                    fields["status"],
                    line["step"],
                    "; ".join(fields["reasons"]),
                )

    def _keep(self, line: bytes) -> None:
        if len(self._backlog) >= self._most:
            self._flush()  # a disk that is well has room for however many come at once
        self._backlog.append(line)
        self._backlog_bytes += len(line)
        while len(self._backlog) > self._most or (
            self._backlog_bytes > MAX_BACKLOG_BYTES and len(self._backlog) > 1
        ):
            self._backlog_bytes -= len(self._backlog.popleft())
            self._lost += 1

    def _flush(self, *, now: bool = False) -> bool:
        while self._backlog:
            if not self._file.write(self._backlog[0], now=now):
                return False
            self._backlog_bytes -= len(self._backlog.popleft())
        return True

    def _end(self) -> None:
        """What waits, and a last line; for as long as `close` allows."""
        if self._file.in_trouble:
            self._deadline = min(self._deadline, time.monotonic() + GIVE_UP_S)
        self._collect()
        while self._late:
            self._pause()
            self._collect()
        fields = self.ask(self._observed.beat_fields) if self._observed is not None else {}
        last: dict[str, Any] = {
            name: fields[name] for name in ("verdict", "stages", "data_wait_pct") if name in fields
        }
        if self._data_wait is not None:
            last.setdefault("data_wait_pct", self._data_wait)
        now = time.monotonic()
        last |= {
            "reason": self._reason,
            "steps": self._steps,
            "wall_s": round(now - self._begun, 3),
        }
        total = (
            self._before.fields.get("tokens_total", self._tokens) if self._before is not None else 0
        )
        last |= {"tokens_total": total, "dropped": self.dropped}
        self._try_to_emit(Said(time.time(), now, self.step, "shutdown", last))
        self._file.check()
        while not self._flush(now=True) and time.monotonic() < self._deadline:
            self._pause()
        self._lost += len(self._backlog)
        # Last, because they may take long, and the file should be whole by then.
        self._hooks.run(self._deadline)

    def _pause(self) -> None:
        """The device or the disk may be there in a moment; there is nobody who would tell us."""
        with self._changed:
            self._changed.wait(min(0.05, max(0.0, self._deadline - time.monotonic())))

    def _boot_again(self) -> bytes:
        line = self._line(time.time(), time.monotonic(), self.step, "boot", self._boot)
        return encode(line | {"rotated": True})

    def _wrong(self, what: str, error: BaseException | None) -> None:
        self._errors += 1
        if self._errors == 1:
            log.warning("heartbeat: %s. The run goes on; this is said once.", what, exc_info=error)

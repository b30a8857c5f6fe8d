"""Write the heartbeat of a run: a line for every step, and beats between steps.

The trainer's thread puts an event on a queue and never waits. A `logging.handlers.QueueListener`
handles it on a separate thread: it appends a line to `heartbeat_rank{N}.jsonl`, passes the numbers
to the metric hooks and judges the run's health. Never imports torch: a process without torch has no
tensors.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import operator
import os
import platform
import queue as queue_
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import current_shard, installed_version, one_of, whole_number
from penstock.errors import ConfigError
from penstock.types import KiB, MiB
from penstock.watch.health import HealthGate, Limits
from penstock.watch.heartbeat_reader import FOLDER, Line, numbers

log = logging.getLogger("penstock")

Hook = Callable[[int, dict[str, float]], None]
"""Called with a step and its numbers by field name; nested names are joined by a slash."""

DEVICE_WAIT_S = 10.0
"""How long a line waits for a value from a device before it is written without the value."""
DEVICE_POLL_S = 0.05
MAX_TEXT = 200
MAX_DEPTH = 5


class Heartbeat:
    """Records a run. A context manager: call `progress` once per step and `close` at the end.

    A full, slow or missing disk never delays a step or ends a run: the failure is logged once, and
    lost lines are counted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = FOLDER,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        observed: Any = None,
        every_s: float = 1.0,
        max_bytes: int = 64 * MiB,
        keep: int = 3,
        queue: int = 1024,
        prefix: str = "loader_",
        on_metrics: Iterable[Any] = (),
        settings: Mapping[str, Any] | None = None,
        resumed: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """Create a heartbeat. `start`, `with`, or the first `progress` or `event` starts it.

        path: a folder, or a file whose name ends in `.jsonl`. With several ranks, a folder.
        rank, world_size: by default those of `torch.distributed` or of the launcher.
        observed: the loader's telemetry, or another object with `step_fields`, called on the
            trainer's thread, and `beat_fields` and `take_events`.
        every_s: seconds between beats. A larger value detects a hang later.
        max_bytes, keep: the size at which the file is rotated, and the number of old parts to keep.
        queue: lines that may wait for the disk. A longer queue loses fewer if the disk is slow.
        prefix: prefix of the loader's events; `fineweb_loader_` for FineWeb-Edu.
        on_metrics: functions to call with each step and its numbers; a `MetricsServer` receives
            every line.
        settings, resumed: written to the `boot` line.
        limits: the limits of the health gate. By default, only that the loss is finite.
        """
        shard = current_shard()
        self.rank = whole_number("rank", shard.rem if rank is None else rank, 0)
        if not isinstance(every_s, int | float) or not 0.01 <= every_s <= 3600:
            raise ConfigError(f"every_s={every_s!r}: must be a number of seconds, 0.01 to 3600")
        self.path = Path(path).expanduser().absolute()
        if self.path.suffix != ".jsonl":
            self.path /= f"heartbeat_rank{self.rank}.jsonl"
        boot = {"settings": dict(settings or {}), "host": platform.node(), "resumed": bool(resumed)}
        if rank is None or world_size is not None:
            world = shard.mod if world_size is None else world_size
            boot["world_size"] = whole_number("world_size", world, self.rank + 1)
        one_of("prefix", prefix, ("loader_", "fineweb_loader_"))
        self._boot, self._prefix, self._observed = boot, prefix, observed
        self._every_s, self._queue_size = every_s, whole_number("queue", queue, 2)
        self._hooks, self._gate = list(on_metrics), HealthGate(limits or Limits())
        self._failures: Counter[str] = Counter()
        max_bytes = whole_number("max_bytes", max_bytes, 4 * KiB)
        self._file = _File(self, max_bytes, whole_number("keep", keep, 1))
        self._events: queue_.SimpleQueue[Any] = queue_.SimpleQueue()
        self._listener = _Listener(self)
        self._head: tuple[Any] | None = None
        """The next event, whose values a device may still be computing."""
        self._step = self._steps = self._tokens = 0
        self._last_step = self._begun = time.monotonic()
        self._next_beat = self._deadline = math.inf
        self._started = self._closing = False
        self._finished = threading.Event()
        self._last: tuple[_Event, Line] | None = None
        """The last `progress` event and its line."""

    def start(self) -> Heartbeat:
        """Start the thread. A second call does nothing."""
        if not self._started and not self._closing:
            self._started, self._begun = True, time.monotonic()
            self._next_beat = self._begun + self._every_s
            self._put(self._new("boot", {})._replace(step=0))
            with suppress(OSError):  # each line then counts as lost
                self.path.parent.mkdir(parents=True, exist_ok=True)
            atexit.register(self.close, "not closed", 2.0)
            self._listener.start()
        return self

    def progress(
        self, step: int, loss: Any = None, grad_norm: Any = None, tokens: Any = None, **more: Any
    ) -> None:
        """Record a finished step. Never waits.

        Values may be tensors. A tensor on the CPU is read at once. A tensor on a device is read on
        the heartbeat's thread once it is computed, so do not change it in place.
        """
        self.start()
        self._take_events()  # they belong to the previous step
        self._step, self._steps = operator.index(step), self._steps + 1
        self._last_step = time.monotonic()
        more |= {"loss": loss, "grad_norm": grad_norm, "tokens": tokens}
        more.setdefault("compiles", compile_count())
        fields = {name: value for name, value in more.items() if value is not None}
        self.event("progress", **self._ask("step_fields") | fields)

    def event(self, msg: str, /, **fields: Any) -> None:
        """Record an event. Never waits."""
        self.start()
        self._put(self._new(msg, {name: _readable(value) for name, value in fields.items()}))

    def close(self, reason: str = "end", timeout: float = 5.0) -> bool:
        """Write queued lines and a `shutdown` line, and stop the thread. Safe to call again.

        Return False if that takes longer than `timeout`, or if the last line cannot be written.
        """
        first = self._started and not self._closing
        if first:
            self._deadline = time.monotonic() + timeout
            self._take_events()
            self._events.put(self._new("shutdown", {"reason": reason}))
            self._listener.enqueue_sentinel()
        self._closing = True
        if not self._started:
            return True
        # `stop` waits without a limit, but a write or a hook may hang. The thread is a daemon, so
        # it can be abandoned.
        if not self._finished.wait(timeout):
            self._fail("errors", f"the thread hangs; {self._events.qsize()} lines are not written")
            return False
        if first:
            self._listener.stop()
            atexit.unregister(self.close)
        return self._file.ok

    def counts(self) -> dict[str, int]:
        """Return the numbers of dropped lines, failed writes and other failed calls."""
        return {name: self._failures[name] for name in ("dropped", "disk_failures", "errors")}

    def __enter__(self) -> Heartbeat:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        self.close("end" if kind is None else f"{kind.__name__}: {error}"[:500])

    def _new(self, msg: str, fields: dict[str, Any]) -> _Event:
        return _Event(time.time(), time.monotonic(), msg, fields, self._step)

    def _fail(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Count a failure, and log the first of its kind."""
        self._failures[kind] += 1
        if self._failures[kind] == 1:
            log.warning("heartbeat: %s. The run continues; logged once.", text, exc_info=error)

    def _ask(self, method: str) -> Any:
        """Call a method of the loader's telemetry, if there is one."""
        return {} if self._observed is None else self._call(getattr(self._observed, method)) or {}

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a hook or the telemetry. An error in it must not end the run."""
        try:
            return function(*args)
        except Exception as error:
            self._fail("errors", f"{function!r} failed at step {self._step}", error)

    def _take_events(self) -> None:
        """Queue new events of the loader."""
        for ts, mono, msg, fields in self._ask("take_events"):
            self._put(_Event(ts, mono, msg, fields, self._step))

    def _put(self, event: _Event) -> None:
        if self._closing or self._events.qsize() >= self._queue_size:
            self._failures["dropped"] += 1
        else:
            self._events.put(event)

    # On the heartbeat's thread

    def _next_event(self) -> Any:
        """Return a beat if one is due, or the next event once its values are computed."""
        while True:
            now = time.monotonic()
            if now >= self._next_beat and not self._closing:
                self._next_beat = now + self._every_s
                self._take_events()
                since = {"since_step_s": round(max(0.0, now - self._last_step), 3)}
                return self._new(
                    "beat", _memory() | self._ask("beat_fields") | since | self.counts()
                )
            if self._head is None:
                with suppress(queue_.Empty):
                    self._head = (self._events.get(timeout=max(0.0, self._next_beat - now)),)
            elif self._is_ready(self._head[0], now):
                (event,), self._head = self._head, None
                return event
            else:
                self._finished.wait(DEVICE_POLL_S)  # not set before the end

    def _is_ready(self, event: _Event | None, now: float) -> bool:
        """Return True if the event's values are computed, or if it cannot wait any longer."""
        if event is None or now > min(event.mono + DEVICE_WAIT_S, self._deadline):
            return True
        return self._events.qsize() >= self._queue_size or not _uncomputed(event.fields)

    def _totals(self) -> Line:
        """Return the fields of the shutdown line."""
        last = {"tokens_total": 0} | (self._last[1] if self._last else {})
        known = last | plain(self._ask("beat_fields"))
        names = ("verdict", "stages", "data_wait_pct", "tokens_total")
        fields = {name: known[name] for name in names if name in known}
        wall_s = round(time.monotonic() - self._begun, 3)
        return fields | {
            "steps": self._steps,
            "dropped": self._failures["dropped"],
            "wall_s": wall_s,
        }

    def _handle(self, event: _Event) -> None:
        """Write a line, pass it to hooks and judge it. Errors do not end the thread."""
        try:
            line = self._line(event)
            self._write(line)
            if event.msg == "progress":
                self._last = event, line
            self._gate.add(line)
            for found in self._gate.take_events():
                line = self._line(_Event(*found, event.step))
                self._write(line)
                if line["msg"] == "health":
                    level = logging.INFO if line["status"] == "ok" else logging.WARNING
                    what = (line["status"], event.step, "; ".join(line["reasons"]))
                    log.log(level, "health: %s at step %d: %s", *what)
        except Exception as error:
            self._fail("errors", f"a {event.msg} line failed", error)

    def _write(self, line: Line) -> None:
        """Append a line to the file, and pass it to the hooks."""
        self._file.handle(_record(line))
        for hook in self._hooks:
            if hasattr(hook, "add_line"):
                self._call(hook.add_line, line)
            elif line["msg"] == "progress":
                self._call(hook, line["step"], numbers(line))

    def _line(self, event: _Event) -> Line:
        """Return the line of an event."""
        late = _uncomputed(event.fields)
        msg, fields = event.msg, plain({k: v for k, v in event.fields.items() if k not in late})
        if msg == "boot":
            fields |= plain(self._boot) | {"versions": _versions()}
        elif msg == "shutdown":
            fields |= self._totals()
        elif msg == "progress":
            self._add_rates(event, fields)
        elif msg.startswith("loader_"):
            msg = self._prefix + msg.removeprefix("loader_")
        first = {"ts": round(event.ts, 6), "iso": iso(event.ts), "mono": round(event.mono, 6)}
        first |= {"pid": os.getpid(), "rank": self.rank, "step": event.step, "msg": msg}
        return first | {name: value for name, value in fields.items() if name not in first}

    def _add_rates(self, event: _Event, fields: Line) -> None:
        """Add rates and memory, which do not need a loader's telemetry."""
        if self._last is not None and event.step == self._last[0].step + 1:
            fields.setdefault("dt_step_s", round(event.mono - self._last[0].mono, 6))
        tokens = fields.get("tokens")
        if isinstance(tokens, int | float):
            self._tokens += int(tokens)
            fields.setdefault("tokens_total", self._tokens)
            if seconds := fields.get("dt_step_s"):
                fields.setdefault("toks_per_s", round(tokens / seconds, 3))
        fields.update(_memory() | fields)


class _Event(NamedTuple):
    """An event to write as a line."""

    ts: float
    mono: float
    msg: str
    fields: dict[str, Any]
    step: int


class _Listener(QueueListener):
    """The heartbeat's thread: gets the next event from the heartbeat and handles it there."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(heartbeat._events)
        self._heartbeat = heartbeat

    def dequeue(self, block: bool) -> Any:
        threading.current_thread().name = "penstock-heartbeat"
        event = self._heartbeat._next_event()
        if event is None:  # the sentinel
            self._heartbeat._file.close()
            self._heartbeat._finished.set()
        return event

    def handle(self, record: Any) -> None:
        self._heartbeat._handle(record)


class _File(RotatingFileHandler):
    """Appends lines to a file with rotation by size. Counts lines that cannot be written."""

    def __init__(self, heartbeat: Heartbeat, max_bytes: int, keep: int) -> None:
        path = heartbeat.path
        super().__init__(path, "a", max_bytes, keep, "utf-8", delay=True, errors="replace")
        self._heartbeat = heartbeat
        self.ok = True
        """False if the last write failed."""
        with suppress(OSError), open(path, "rb+") as file:
            if file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                file.write(b"\n")  # the last line was truncated by a kill

    def emit(self, record: logging.LogRecord) -> None:
        before = self._heartbeat.counts()["disk_failures"]
        super().emit(record)
        self.ok = self._heartbeat.counts()["disk_failures"] == before

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, after a newline if the last write may have been partial."""
        return record.getMessage() if self.ok else f"\n{record.getMessage()}"

    def doRollover(self) -> None:  # noqa: N802 - a name of logging
        super().doRollover()
        boot = self._heartbeat._new("boot", {"rotated": True})
        self.emit(_record(self._heartbeat._line(boot)))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a name of logging
        self._heartbeat._failures["dropped"] += 1
        text = f"{self.baseFilename} cannot be written ({sys.exc_info()[1]})"
        self._heartbeat._fail("disk_failures", text)
        with suppress(OSError):  # flushing the buffer fails too
            self.close()


def _record(line: Line) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": encode(line).decode().rstrip("\n")})


class _DeviceValue:
    """A tensor on a device, which must not be read on the trainer's thread: that would wait."""

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._computed = tensor.detach(), None
        if tensor.device.type == "cuda":
            # Reading waits for the value, so a hung device would stop the beats.
            cuda: Any = sys.modules["torch"].cuda
            self._computed = cuda.Event()
            self._computed.record(cuda.current_stream(tensor.device))

    def is_ready(self) -> bool:
        return self._computed is None or bool(self._computed.query())

    def item(self) -> Any:
        return self._tensor.item()


def _uncomputed(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that a device has not computed yet."""
    return [k for k, v in fields.items() if isinstance(v, _DeviceValue) and not v.is_ready()]


def _readable(value: Any) -> Any:
    """Return a value to queue. Reads CPU tensors now, because they may change after the step."""
    if not hasattr(value, "device") or not hasattr(value, "detach"):
        return value
    if hasattr(value, "to_local") or value.numel() != 1:  # a DTensor takes all ranks to read
        return f"not a number: {type(value).__name__} of shape {tuple(value.shape)}"
    return value.item() if value.device.type == "cpu" else _DeviceValue(value)


def compile_count() -> int | None:
    """Return the number of graphs that torch has compiled, or None if it has not compiled any."""
    # Not a public name of torch; without it, the field is omitted.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return None if counters is None else int(counters["stats"]["unique_graphs"])


def _memory() -> dict[str, int]:
    """Return the memory of this process, on the host and on CUDA."""
    found = {}
    with suppress(OSError), open("/proc/self/statm", "rb") as file:  # Linux
        found["rss_bytes"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        found["device_bytes"] = int(cuda.memory_allocated())
    return found


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the main libraries."""
    names = ("penstock", "torch", "numpy", "pyarrow", "gigatoken", "tokenizers")
    found = {name: version for name in names if (version := installed_version(name))}
    return {"python": platform.python_version()} | found


# Lines


def iso(ts: float) -> str:
    """Return a time in UTC as text: 2026-11-16T07:13:25.123Z."""
    text = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return fields as a line of JSON."""
    text = json.dumps(plain(fields), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    # File names may contain bytes that are not UTF-8.
    return text.encode("utf-8", "replace") + b"\n"


def plain(fields: Mapping[str, Any]) -> Line:
    """Return fields converted to JSON types."""
    loss = _plain(fields.get("loss"), 0)
    if isinstance(loss, float) and not math.isfinite(loss):
        fields = {**fields, "loss": str(loss)}
    found: Line = _plain(fields, MAX_DEPTH)
    return found


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, str, int, float):
        return value
    if depth and isinstance(value, Mapping):
        inner = {str(name): _plain(item, depth - 1) for name, item in value.items()}
        return {name: item for name, item in inner.items() if _is_finite(item)}
    if depth and isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item, depth - 1) for item in value]
        return [item if _is_finite(item) else str(item) for item in items]
    if isinstance(value, os.PathLike | str):
        return str(value)
    try:
        scalar = value.item()  # a numpy scalar; arrays raise
    except Exception:  # not a number
        scalar = None
    return scalar if type(scalar) in (bool, int, float) else repr(value)[:MAX_TEXT]


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)

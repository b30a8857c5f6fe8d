"""Write the heartbeat of a run: a line for every step, and a sign of life between steps.

The trainer's thread puts a log record on a queue and never waits. A `logging.handlers.QueueListener`
takes it from there on a thread of its own: it completes the line, appends it to
`heartbeat_rank{N}.jsonl`, passes the numbers to the metric hooks and judges the run's health.
Torch is never imported here: a process without torch has no tensors.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import platform
import queue
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol

from penstock.config import current_shard, installed_version, whole_number
from penstock.errors import ConfigError
from penstock.types import KiB, MiB
from penstock.watch.health import HealthGate, Limits
from penstock.watch.heartbeat_reader import FOLDER
from penstock.watch.line import MAX_TEXT, Line, encode, iso, numbers, plain
from penstock.watch.memory import resident_bytes

log = logging.getLogger("penstock")

Hook = Callable[[int, dict[str, float]], None]
"""Called with a step and its numbers. Names are those of the fields; nested ones have a slash."""

DEVICE_WAIT_S = 10.0
"""How long a line waits for a value that a device is computing. Then it is written without it."""
DEVICE_POLL_S = 0.05


class TelemetrySource(Protocol):
    """What a heartbeat reads from a loader: `penstock.Telemetry`, or an object like it."""

    def step_fields(self) -> dict[str, Any]:
        """Return the fields of the last step. Called on the trainer's thread: must be cheap."""

    def beat_fields(self) -> dict[str, Any]:
        """Return the fields of a beat. Called on the heartbeat's thread."""

    def take_events(self) -> list[tuple[float, float, str, dict[str, Any]]]:
        """Return new events: (ts, mono, msg, fields). Called on the heartbeat's thread."""


class Heartbeat:
    """Records a run. A context manager: call `progress` once a step and `close` at the end.

    A disk that is full, slow or gone never delays a step and never ends a run: it is logged once,
    and the lines that it costs are counted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = FOLDER,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        observed: TelemetrySource | None = None,
        every_s: float = 1.0,
        max_bytes: int = 64 * MiB,
        keep: int = 3,
        queue: int = 1024,
        prefix: str = "loader_",
        on_metrics: Iterable[Hook] = (),
        settings: Mapping[str, Any] | None = None,
        resumed: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """Prepare a heartbeat. `start`, `with`, or the first `progress` or `event` starts it.

        path: a folder, or a file whose name ends in `.jsonl`. With several ranks, a folder.
        rank, world_size: those of `torch.distributed` or of the launcher by default.
        observed: the loader's telemetry.
        every_s: seconds between beats. A larger value detects a hang later.
        max_bytes, keep: the size at which the file is rotated, and how many old parts are kept.
        queue: lines that may wait for the disk. A larger queue loses fewer if the disk is slow.
        prefix: names the loader's events; `fineweb_loader_` for FineWeb-Edu.
        on_metrics: functions that are called with each step and its numbers.
        settings, resumed: written into the `boot` line.
        limits: what the health gate checks. By default only that the loss is finite.
        """
        shard = current_shard() if rank is None else None
        self.rank = whole_number("rank", rank if shard is None else shard.rem, 0)
        self.prefix = prefix
        if not isinstance(prefix, str) or not prefix.endswith("loader_"):
            raise ConfigError(
                f"prefix={prefix!r}: must end in 'loader_', as 'fineweb_loader_' does"
            )
        if not isinstance(every_s, int | float) or not 0.01 <= every_s <= 3600:
            raise ConfigError(f"every_s={every_s!r}: must be a number of seconds, 0.01 to 3600")
        hooks = list(on_metrics)
        if not all(map(callable, hooks)):
            raise ConfigError("on_metrics: needs functions that take a step and its numbers")
        given = Path(path).expanduser().absolute()
        is_file = given.suffix == ".jsonl" or (given.exists() and not given.is_dir())
        self.path = given if is_file else given / f"heartbeat_rank{self.rank}.jsonl"
        boot = {"settings": dict(settings or {}), "host": platform.node(), "resumed": bool(resumed)}
        world = shard.mod if shard is not None and world_size is None else world_size
        if world is not None:
            boot["world_size"] = whole_number("world_size", world, self.rank + 1)
        failures = _Failures()
        max_bytes = whole_number("max_bytes", max_bytes, 4 * KiB)
        file = _File(self.path, max_bytes, whole_number("keep", keep, 1), failures)
        gate = HealthGate(limits or Limits())
        size = whole_number("queue", queue, 2)
        config = _Config(self.rank, prefix, float(every_s), size, observed, boot, gate)
        self._listener = _Listener(file, _Hooks(hooks, failures), failures, config)
        self._finalizer: weakref.finalize[[str, float], Heartbeat] | None = None

    def start(self) -> Heartbeat:
        """Start the thread. A second call does nothing."""
        if self._finalizer is None and not self._listener.closing:
            # Closes at interpreter exit, or when this object is dropped. A bound method of this
            # object would keep it alive.
            self._finalizer = weakref.finalize(self, self._listener.close, "not closed", 2.0)
            self._listener.start()
        return self

    def progress(
        self, step: int, loss: Any = None, grad_norm: Any = None, tokens: Any = None, **more: Any
    ) -> None:
        """Record a finished step. Never waits.

        Values may be tensors. A tensor on the CPU is read at once. A tensor on a device is read on
        the heartbeat's thread once it is computed, so do not change it in place.
        """
        listener = self._listener
        if listener.is_forked():
            return
        self.start()
        fields = {**listener.ask(lambda observed: observed.step_fields(), {})}
        given = {"loss": loss, "grad_norm": grad_norm, "tokens": tokens}
        fields |= {name: _keep(value) for name, value in given.items() if value is not None}
        fields |= {name: _keep(value) for name, value in more.items()}
        if (compiles := compile_count()) is not None:
            fields.setdefault("compiles", compiles)
        record = _Record("progress", operator.index(step), fields)
        listener.steps += 1
        listener.step, listener.last_step = record.step, record.mono
        listener.add(record)

    def event(self, msg: str, /, **fields: Any) -> None:
        """Record an event. Never waits."""
        if not self._listener.is_forked():
            self.start()
            kept = {name: _keep(value) for name, value in fields.items()}
            self._listener.add(_Record(msg, self._listener.step, kept))

    def close(self, reason: str = "end", timeout: float = 5.0) -> bool:
        """Write what is queued and a `shutdown` line, and end the thread. May be called again.

        Returns False if that takes longer than `timeout`, or if the last line cannot be written.
        """
        done = self._listener.close(reason, timeout)
        if self._finalizer is not None:
            self._finalizer.detach()
        return done

    @property
    def dropped(self) -> int:
        """Lines that were lost."""
        return self.counts()["dropped"]

    def counts(self) -> dict[str, int]:
        """Return how many lines were dropped, and how many writes, hooks and other calls failed."""
        return self._listener.counts()

    def __enter__(self) -> Heartbeat:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close("end" if kind is None else f"{kind.__name__}: {error}"[:500])


class _Record(logging.LogRecord):
    """An event on its way to the file. `created` is its wall-clock time."""

    def __init__(
        self, msg: str, step: int, fields: dict[str, Any], ts: float = 0.0, mono: float = 0.0
    ) -> None:
        super().__init__("penstock.heartbeat", logging.INFO, "", 0, msg, None, None)
        self.created = ts or self.created
        self.mono = mono or time.monotonic()
        self.step = step
        self.fields = fields
        self.line: Line = {}


class _Failures(Counter[str]):
    """Counts what failed, and logs the first failure of each kind."""

    def add(self, kind: str, text: str, error: BaseException | None = None) -> None:
        self[kind] += 1
        if self[kind] == 1:
            log.warning("heartbeat: %s. The run continues; logged once.", text, exc_info=error)


class _Enqueue(QueueHandler):
    """Queues records as they are. Drops the oldest one if the queue is full."""

    def __init__(self, records: queue.SimpleQueue[Any], size: int, failures: _Failures) -> None:
        super().__init__(records)
        self._records, self._size, self._failures = records, size, failures

    def prepare(self, record: Any) -> Any:
        return record

    def enqueue(self, record: Any) -> None:
        while self._records.qsize() >= self._size:
            with suppress(queue.Empty):  # the listener has taken it
                self._records.get_nowait()
                self._failures["dropped"] += 1
        self._records.put_nowait(record)


class _Config(NamedTuple):
    rank: int
    prefix: str
    every_s: float
    queue_size: int
    observed: TelemetrySource | None
    boot: dict[str, Any]
    gate: HealthGate


class _Listener(QueueListener):
    """Turns records into lines on its own thread, and adds the beats.

    It does not know its `Heartbeat`, which can therefore be garbage-collected while this runs.
    """

    def __init__(self, file: _File, hooks: _Hooks, failures: _Failures, config: _Config) -> None:
        # A SimpleQueue, because a garbage collection within get() may call put() in `close`.
        self._records: queue.SimpleQueue[Any] = queue.SimpleQueue()
        super().__init__(self._records, file, hooks)
        self.step = self.steps = 0
        self.last_step = self._begun = time.monotonic()
        self.closing = False
        self._enqueue = _Enqueue(self._records, config.queue_size, failures)
        self._file, self._failures, self._config = file, failures, config
        file.first_line = lambda: encode(self._line(_Record("boot", self.step, {"rotated": True})))
        hooks.is_behind = lambda: self._records.qsize() > config.queue_size // 2
        self._pid: int | None = None
        self._thread_id = 0
        self._finished = threading.Event()
        self._reason, self._deadline, self._next_beat = "end", math.inf, math.inf
        self._ended = self._stopped = False
        self._pending: deque[_Record] = deque()
        self._collected_step = 0
        self._last_progress: _Record | None = None
        self._tokens = 0

    # Any thread

    def is_forked(self) -> bool:
        """Return True in a forked child, which has this object but not its thread."""
        return self._pid not in (None, os.getpid())

    def start(self) -> None:
        self._pid = os.getpid()
        self.last_step = self._begun = time.monotonic()
        self._next_beat = self._begun + self._config.every_s
        self._pending.append(_Record("boot", 0, {}))
        super().start()

    def add(self, record: _Record) -> None:
        if self.closing:
            self._failures["dropped"] += 1
        else:
            self._enqueue.handle(record)

    def ask(self, call: Callable[[TelemetrySource], Any], default: Any) -> Any:
        """Ask the loader's telemetry, if there is one. An error in it must not end the run."""
        if self._config.observed is None:
            return default
        try:
            return call(self._config.observed)
        except Exception as error:
            self._failures.add("telemetry", "the loader's telemetry failed", error)
            return default

    def counts(self) -> dict[str, int]:
        found = self._failures
        names = ("dropped", "disk_failures", "hook_errors", "hook_dropped")
        errors = found["telemetry"] + found["line"] + found["thread"]
        return {name: found[name] for name in names} | {"errors": errors}

    def close(self, reason: str, timeout: float) -> bool:
        if self.is_forked():
            return True
        if not self.closing:
            self._reason, self._deadline = reason, time.monotonic() + timeout
            self.closing = True
            self.enqueue_sentinel()  # wakes the thread
        if self._pid is None or self._thread_id == threading.get_ident():
            return True  # not started; or a garbage collection on the heartbeat's own thread
        # `stop` waits without a limit, and a write or a hook may hang: then the thread, a daemon,
        # is left behind.
        if not self._finished.wait(timeout):
            text = f"the thread hangs, and about {self._records.qsize()} lines are not written"
            self._failures.add("thread", text)
            return False
        if not self._stopped:
            self._stopped = True
            self.stop()
        return self._file.ok

    # The heartbeat's thread

    def dequeue(self, block: bool) -> Any:
        """Return the next record: a beat that is due, one from the queue, or the last one."""
        if not self._thread_id:
            self._thread_id = threading.get_ident()
            threading.current_thread().name = "penstock-heartbeat"
        wait = 0.0
        while True:
            is_full = len(self._pending) >= self._config.queue_size
            if not is_full:
                self._collect(wait)
            now = time.monotonic()
            if now >= self._next_beat and not self.closing:
                self._next_beat = now + self._config.every_s
                return self._beat(now)
            if self._pending and (is_full or self._is_ready(self._pending[0], now)):
                return self._pending.popleft()
            if self.closing and not self._pending:
                return self._end(now)
            wait = DEVICE_POLL_S if self._pending else max(0.0, self._next_beat - now)

    def _collect(self, wait: float) -> None:
        """Move queued records and the loader's events to `_pending`, in the order of their time."""
        found: list[_Record] = []
        with suppress(queue.Empty):
            item = self._records.get(timeout=wait) if wait else self._records.get_nowait()
            while True:
                if isinstance(item, _Record):
                    found.append(item)
                item = self._records.get_nowait()
        for ts, mono, msg, fields in self.ask(lambda observed: observed.take_events(), []):
            found.append(_Record(msg, -1, dict(fields), ts, mono))
        for record in sorted(found, key=lambda record: record.mono):
            if record.step < 0:  # an event of the loader belongs to the step before it
                record.step = self._collected_step
            self._collected_step = record.step
            self._pending.append(record)

    def _is_ready(self, record: _Record, now: float) -> bool:
        late = (value for value in record.fields.values() if isinstance(value, _DeviceValue))
        if now > min(record.mono + DEVICE_WAIT_S, self._deadline):
            return True
        return all(value.is_ready() for value in late)

    def _beat(self, now: float) -> _Record:
        fields = _memory() | self.ask(lambda observed: observed.beat_fields(), {})
        fields["since_step_s"] = round(max(0.0, now - self.last_step), 3)
        fields |= {name: n for name, n in self.counts().items() if n or name == "dropped"}
        return _Record("beat", self.step, fields)

    def _end(self, now: float) -> Any:
        """Return the shutdown record, and on the next call the sentinel that ends the thread."""
        if self._ended:
            self._file.close()
            self._finished.set()
            self.enqueue_sentinel()
            return self._records.get_nowait()
        self._ended = True
        last = self._last_progress.line if self._last_progress is not None else {}
        known = last | self.ask(lambda observed: observed.beat_fields(), {})
        kept = ("verdict", "stages", "data_wait_pct")
        fields: dict[str, Any] = {name: known[name] for name in kept if name in known}
        fields |= {"reason": self._reason, "steps": self.steps}
        fields |= {"wall_s": round(now - self._begun, 3), "dropped": self.counts()["dropped"]}
        fields["tokens_total"] = last.get("tokens_total", 0)
        return _Record("shutdown", self.step, fields)

    def handle(self, record: Any) -> None:
        """Write a line and judge it. No error ends the thread."""
        try:
            super().handle(record)
            self._config.gate.add(record.line)
            for ts, mono, msg, fields in self._config.gate.take_events():
                super().handle(_Record(msg, record.step, fields, ts, mono))
                if msg == "health":
                    level = logging.INFO if fields["status"] == "ok" else logging.WARNING
                    what = (fields["status"], record.step, "; ".join(fields["reasons"]))
                    log.log(level, "health: %s at step %d: %s", *what)
        except Exception as error:
            self._failures.add("line", f"a {record.msg} line failed", error)

    def prepare(self, record: Any) -> Any:
        """Complete a record with its line."""
        record.line = self._line(record)
        return record

    def _line(self, record: _Record) -> Line:
        fields = {
            name: value.read() if isinstance(value, _DeviceValue) else value
            for name, value in record.fields.items()
            if not isinstance(value, _DeviceValue) or value.is_ready()
        }
        msg = record.msg
        if msg == "boot":
            fields |= self._config.boot | {"versions": _versions()}
        elif msg == "progress":
            self._add_rates(record, fields)
        elif msg.startswith("loader_"):
            msg = self._config.prefix + msg.removeprefix("loader_")
        first = {
            "ts": round(record.created, 6),
            "iso": iso(record.created),
            "mono": round(record.mono, 6),
            "pid": record.process,
            "rank": self._config.rank,
            "step": max(0, record.step),
            "msg": msg,
        }
        return first | plain({name: value for name, value in fields.items() if name not in first})

    def _add_rates(self, record: _Record, fields: dict[str, Any]) -> None:
        """Add what can be measured without a loader's telemetry."""
        last, self._last_progress = self._last_progress, record
        if last is not None and record.step == last.step + 1:
            fields.setdefault("dt_step_s", round(record.mono - last.mono, 6))
        tokens: Any = plain({"tokens": fields.get("tokens")}).get("tokens")
        if type(tokens) in (int, float):
            self._tokens += int(tokens)
            fields.setdefault("tokens_total", self._tokens)
            if dt := fields.get("dt_step_s"):
                fields.setdefault("toks_per_s", round(tokens / dt, 3))
        for name, n in _memory().items():
            fields.setdefault(name, n)


class _OneThread(logging.Handler):
    """A handler that only the listener's thread calls.

    It has no lock: `logging.shutdown` would wait for one that a hanging write or hook holds.
    """

    def createLock(self) -> None:  # noqa: N802 - a name of logging
        self.lock = None


class _File(_OneThread):
    """Appends lines to a file, each in one write, and rotates it by size."""

    def __init__(self, path: Path, max_bytes: int, keep: int, failures: _Failures) -> None:
        super().__init__()
        self.ok = True
        """False if the last line could not be written."""
        self.first_line: Callable[[], bytes] = bytes
        self._path, self._max_bytes, self._keep, self._failures = path, max_bytes, keep, failures
        self._file: BinaryIO | None = None

    def emit(self, record: Any) -> None:
        try:
            self._write(self._current(record.msg == "boot"), encode(record.line))
            self.ok = True
        except OSError as error:
            self.ok = False
            self._failures["dropped"] += 1
            self._failures.add("disk_failures", f"{self._path} cannot be written ({error})")
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a write that failed late, of a line that is lost
                file.close()
        super().close()

    def _current(self, is_boot: bool) -> BinaryIO:
        """Return the open file; a new one if it was deleted or is large."""
        if self._file is not None:
            found = os.fstat(self._file.fileno())
            if not found.st_nlink or (found.st_size >= self._max_bytes and self._rotate()):
                self.close()
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
            if not self._file.seek(0, os.SEEK_END):
                self._write(self._file, b"" if is_boot else self.first_line())
            elif self._file.seek(-1, os.SEEK_END) and self._file.read(1) != b"\n":
                self._write(self._file, b"\n")  # a kill or a full disk has cut the last line
        return self._file

    @staticmethod
    def _write(file: BinaryIO, line: bytes) -> None:
        if file.write(line) < len(line):
            raise OSError("only part of a line was written")

    def _rotate(self) -> bool:
        names = [str(self._path), *(f"{self._path}.{n}" for n in range(1, self._keep + 1))]
        try:
            for n in reversed(range(self._keep)):
                if os.path.exists(names[n]):
                    os.replace(names[n], names[n + 1])
        except OSError as error:  # the file grows instead
            self._failures.add("disk_failures", f"{self._path} cannot be rotated ({error})")
            return False
        return True


class _Hooks(_OneThread):
    """Passes the numbers of each step to the functions of `on_metrics`."""

    def __init__(self, hooks: list[Hook], failures: _Failures) -> None:
        super().__init__()
        self.is_behind: Callable[[], bool] = bool
        self._hooks, self._failures = hooks, failures

    def emit(self, record: Any) -> None:
        if record.msg != "progress" or not self._hooks:
            return
        if self.is_behind():  # a slow hook must not cost lines
            self._failures["hook_dropped"] += 1
            return
        for hook in self._hooks:
            try:
                hook(record.step, numbers(record.line))
            except Exception as error:
                text = f"the hook {hook!r} failed at step {record.step}"
                self._failures.add("hook_errors", text, error)


class _DeviceValue:
    """A tensor on a device. Reading it on the trainer's thread would wait for the device."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()
        self._computed: Any = None
        if tensor.device.type == "cuda":
            # Reading blocks until the value is computed, and a hanging device would stop the beats.
            cuda: Any = sys.modules["torch"].cuda
            self._computed = cuda.Event()
            self._computed.record(cuda.current_stream(tensor.device))

    def is_ready(self) -> bool:
        return self._computed is None or bool(self._computed.query())

    def read(self) -> Any:
        """Return the number, or why there is none: several values, or a lost device."""
        try:
            return self._tensor.item()
        except Exception as error:
            return f"unreadable: {type(error).__name__}: {error}"[:MAX_TEXT]


def _keep(value: Any) -> Any:
    """Return what to queue of a value. Reads tensors on the CPU, which may change after the step."""
    device = getattr(value, "device", None)
    if device is None or not hasattr(value, "detach"):
        return value
    if hasattr(value, "to_local"):  # reading a DTensor takes all ranks together
        return "unreadable: a DTensor; pass its .full_tensor()"
    kept = _DeviceValue(value)
    return kept.read() if device.type == "cpu" else kept


def compile_count() -> int | None:
    """Return how many graphs torch has compiled so far, or None if it has not been asked to."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    try:
        return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else None
    except Exception:  # not a public name of torch: the field is then missing
        return None


def _memory() -> dict[str, Any]:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {"rss_bytes": resident_bytes()}
    return {"rss_bytes": resident_bytes(), "device_bytes": int(cuda.memory_allocated())}


def _versions() -> dict[str, str]:
    """Return the versions of what takes part in a run, whether it is imported yet or not."""
    from penstock import __version__

    found = {"python": platform.python_version(), "penstock": __version__}
    for name in ("torch", "numpy", "pyarrow", "gigatoken", "tokenizers"):
        version = getattr(sys.modules.get(name), "__version__", None) or installed_version(name)
        if version is not None:
            found[name] = str(version)
    return found

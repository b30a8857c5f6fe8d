"""The heartbeat of a run: what each step did, and a sign of life between steps.

In:    `progress` and `event` from the trainer, and what the loader has observed.
Out:   lines in `heartbeat_rank{N}.jsonl`; the numbers of each step to the hooks in `on_metrics`.
Where: the trainer's thread makes a dictionary and appends it to a queue, and never waits; the rest is `beat_thread`'s.
State: none of its own.
Cost:  some microseconds a step.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.config import current_shard, whole_number
from penstock.errors import ConfigError
from penstock.feed.beat_hooks import Hook
from penstock.feed.beat_thread import Beating, Observed, Said
from penstock.feed.beat_values import compile_count, keep_value
from penstock.types import KiB, MiB
from penstock.watch.heartbeat import FOLDER
from penstock.watch.line import file_name

if TYPE_CHECKING:
    from penstock.watch.health import HealthGate, Limits


class Heartbeat:
    """Records a run. A context manager; `progress` once a step, `close` at the end.

    No disk, however dead, full or slow, delays a step or ends a run: the thread deals with it, and says so once in the log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = FOLDER,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        observed: Observed | None = None,
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
        """`path`: a folder, or a file whose name ends in `.jsonl`; with several ranks, a folder.

        `rank`, `world_size`: by default those of `torch.distributed` or of the launcher. `observed`: the loader's telemetry.
        `every_s`: a beat so often; a larger value finds a run that hangs later. `max_bytes`, `keep`: the file is rotated at
        this size, and so many old ones are kept, which is the disk it may take. `queue`: lines that wait for the thread or
        the disk; a larger one loses less when the disk is away, and takes about a kilobyte a line. `prefix`: how the
        loader's own events are called, `fineweb_loader_` with that data. `settings`: what to write into the first line.
        `limits`: what is judged while it runs; without them, that the loss is finite.
        """
        shard = current_shard() if rank is None else None
        self.rank = whole_number("rank", rank if shard is None else shard.rem, 0)
        self.prefix = prefix
        if not isinstance(prefix, str) or not prefix.endswith("loader_"):
            raise ConfigError(
                f"prefix={prefix!r}: needs a text that ends in 'loader_', such as 'fineweb_loader_'"
            )
        if (
            isinstance(every_s, bool)
            or not isinstance(every_s, int | float)
            or not 0.01 <= every_s <= 3600
        ):
            raise ConfigError(f"every_s={every_s!r}: needs a number of seconds, 0.01 to 3600")
        hooks = list(on_metrics)
        if not all(map(callable, hooks)):
            raise ConfigError(
                "on_metrics: needs functions that take a step and a dictionary of numbers"
            )
        given = Path(path).expanduser()
        # A name says what is meant where nothing is yet.
        is_file = given.name.endswith(".jsonl") or (
            os.path.exists(given) and not os.path.isdir(given)
        )
        self.path = (given if is_file else given / file_name(self.rank)).absolute()
        world = shard.mod if shard is not None and world_size is None else world_size
        boot = {"settings": dict(settings or {}), "host": platform.node(), "resumed": bool(resumed)}
        boot |= (
            {}
            if world is None
            else {"world_size": whole_number("world_size", world, self.rank + 1)}
        )
        self._observed = observed
        self._core = Beating(
            rank=self.rank,
            file=(
                self.path,
                whole_number("max_bytes", max_bytes, 4 * KiB),
                whole_number("keep", keep, 0),
            ),
            most=whole_number("queue", queue, 2),
            every_s=float(every_s),
            observed=observed,
            prefix=prefix,
            hooks=hooks,
            boot=boot,
            gate=_gate(limits),
        )
        self._finalizer: weakref.finalize[[str, float], Heartbeat] | None = None

    def start(self) -> Heartbeat:
        """Begin to beat. `progress` and `event` do so themselves if nobody has."""
        if self._finalizer is None and not self._core.closing:
            # Not by a method of ours: that would keep us alive, and a dropped heartbeat would beat for ever.
            self._finalizer = weakref.finalize(self, self._core.close, "not closed", 2.0)
            self._core.start()
        return self

    def progress(
        self, step: int, loss: Any = None, grad_norm: Any = None, tokens: Any = None, **more: Any
    ) -> None:
        """A step is finished. Never waits, and never raises.

        `loss`, `grad_norm` and numbers in `more` may be tensors. One on the CPU is read at once; one on a device is kept,
        and read on the heartbeat's thread when the device has computed it: do not change it in place.
        """
        core = self._core
        if core.pid != os.getpid():
            return  # a forked child of the trainer's
        ts, mono = time.time(), time.monotonic()
        self.start()
        fields = core.ask(self._observed.step_fields) if self._observed is not None else {}
        if loss is not None:
            fields["loss"] = keep_value(loss)
        if grad_norm is not None:
            fields["grad_norm"] = keep_value(grad_norm)
        if tokens is not None:
            fields["tokens"] = keep_value(tokens)
        for name, value in more.items():
            fields[name] = keep_value(value)
        if "compiles" not in fields and (compiles := compile_count()) is not None:
            fields["compiles"] = compiles
        core.progressed(ts, mono, step, fields)

    def event(self, msg: str, /, **fields: Any) -> None:
        """Something has happened. Never waits, and never raises."""
        core = self._core
        if core.pid == os.getpid():
            self.start()
            kept = {name: keep_value(value) for name, value in fields.items()}
            core.add(Said(time.time(), time.monotonic(), core.step, str(msg), kept))

    def close(self, reason: str = "end", timeout: float = 5.0) -> bool:
        """Write what waits and a `shutdown` line, and end the thread. False if the disk would not have it in time."""
        done = self._core.close(reason, timeout)
        if self._finalizer is not None:
            self._finalizer.detach()
        return done

    @property
    def dropped(self) -> int:
        """Lines that are lost."""
        return self._core.dropped

    def counts(self) -> dict[str, int]:
        """What went wrong so far: lines dropped, writes that failed, calls of hooks that failed or were left out."""
        return self._core.counts()

    def __enter__(self) -> Heartbeat:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close("end" if kind is None else f"{kind.__name__}: {error}"[:500])


def _gate(limits: Limits | None) -> HealthGate:
    from penstock.watch.health import HealthGate, Limits

    return HealthGate(Limits() if limits is None else limits)

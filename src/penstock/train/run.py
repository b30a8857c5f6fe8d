"""Start a run: open the data on a thread, then import torch and train.

Does not import torch itself, so that the loader reads its first batches during the seconds in which
torch is imported and the model is built.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from penstock.config import current_shard, local_rank
from penstock.errors import ConfigError, missing_extra
from penstock.feed.fallback import Limits, SharedFeed, loader_states
from penstock.settings import Settings
from penstock.train.checkpoint import Saved, newest, read
from penstock.train.data import TrainData
from penstock.train.options import TrainOptions, device_name, micro_steps, parallel
from penstock.types import shown_address
from penstock.watch.heartbeat import Heartbeat
from penstock.watch.telemetry import Telemetry
from penstock.watch.trace import write_trace

log = logging.getLogger("penstock")


def show(line: str) -> None:
    """Print a line. If stdout is closed (`| head`, a closed terminal), the run continues."""
    try:
        print(line, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (never closed)
        log.warning("the console can no longer be written: %s", error.strerror)


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGHUP into a request to save and stop. A context manager.

    After `grace_s`, the process exits in any case, with its stacks on stderr. A second Ctrl-C
    raises KeyboardInterrupt.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # Ignored signals stay ignored, for nohup.
        self._before = {n: h for n in numbers if (h := signal.getsignal(n)) is not signal.SIG_IGN}
        self.received: signal.Signals | None = None
        self.on_stop: Callable[[], None] = self._exit
        """Called by the handler. Exits by default: before training, there is nothing to save."""

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, else 0."""
        return 130 if self.received == signal.SIGINT else 0

    def __enter__(self) -> StopSignals:
        for number in self._before:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self.received is not None:
            faulthandler.cancel_dump_traceback_later()
        for number, handler in self._before.items():
            # Repeated signals must not change the exit code of an exiting process.
            signal.signal(number, handler if self.received is None else signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        faulthandler.dump_traceback_later(
            self._grace_s, exit=True, file=sys.__stderr__ or sys.stderr
        )
        self.on_stop()

    def _exit(self) -> NoReturn:
        assert self.received is not None
        line = f"[train] stopped by {self.received.name} before the first step: nothing to save\n"
        with suppress(OSError):
            os.write(1, line.encode())  # the handler may have interrupted a `print`
        raise SystemExit(self.exit_code)


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts of a run, while its data is being opened."""

    options: TrainOptions
    settings: Settings
    data: TrainData
    accumulate: int
    device: str | None
    saved: Saved | None
    """The checkpoint to resume from."""
    telemetry: Telemetry
    heartbeat: Heartbeat
    feed: SharedFeed
    signals: StopSignals
    started_at: float


def train(options: TrainOptions, settings: Settings) -> int:
    """Train, and return the exit code."""
    if importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", "training", "torch")
    if options.report is not None and importlib.util.find_spec("plotly") is None:
        raise missing_extra("plotly", "--report", "report")
    started_at, shard = time.perf_counter(), current_shard()
    parallel(options, shard.mod)
    accumulate = micro_steps(options, shard.mod)
    saved = _find_checkpoint(options)
    saved_data = [] if saved is None else [rank["data"] for rank in saved.ranks]
    states = loader_states(saved_data) if saved_data else None
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals(options.grace))
        data = TrainData(options, settings)
        stack.callback(data.close)
        if shard.rem == 0:
            _lock(options.out, stack)
        telemetry = Telemetry()
        heartbeat = Heartbeat(
            options.out,
            observed=telemetry,
            prefix=data.prefix,
            settings=_describe(options, settings, accumulate),
            resumed=saved is not None,
            on_metrics=_exporters(options, stack),
        )
        stack.enter_context(heartbeat)
        if options.trace is not None and shard.rem == 0:
            stack.enter_context(write_trace(options.trace, telemetry))

        device = device_name(options)
        feed = SharedFeed(
            partial(data.loader, telemetry, device, states),
            Limits(
                on_stall="synthetic" if options.synthetic_on_fail else "stop",
                first_timeout_s=options.loader_timeout,
                stall_timeout_s=options.stall_timeout,
            ),
            event=heartbeat.event,
            blame=telemetry.blame,
            resumed=states,
            substituted=saved_data[0]["substituted"] if saved_data else (),
        )
        stack.callback(feed.close)
        parts = (telemetry, heartbeat, feed, signals, started_at)
        context = RunContext(options, settings, data, accumulate, device, saved, *parts)
        from penstock.train.loop import run  # imports torch

        return run(context)


def _find_checkpoint(options: TrainOptions) -> Saved | None:
    if options.resume not in (None, "newest"):
        return read(Path(str(options.resume)).expanduser())
    if options.resume is None:
        return None
    found = newest(options.checkpoints)
    if found is None:
        show(f"[train] --resume: {options.out} has no checkpoint yet; starting at step 0")
    return found


def _lock(folder: Path, stack: ExitStack) -> None:
    """Lock a folder for this run. Raise if it is in use or not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(open(folder / ".lock", "a", encoding="utf-8"))  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--out {folder}: another run is using it. Choose another.") from None
    except OSError:
        log.info("%s: this file system has no locks; start only one run there", folder)


def _exporters(options: TrainOptions, stack: ExitStack) -> list[Any]:
    """Return hooks that export each step's numbers to Prometheus and TensorBoard."""
    exporters: list[Any] = []
    if options.metrics_port is not None:
        from penstock.watch.exporters import MetricsServer

        port = options.metrics_port + local_rank() if options.metrics_port else 0
        server = stack.enter_context(MetricsServer(port, setting="--metrics-port"))
        show(f"[train] metrics at {server.url}")
        exporters.append(server)
    if options.tensorboard is not None and current_shard().rem == 0:
        from penstock.watch.exporters import tensorboard

        exporters.append(stack.enter_context(tensorboard(options.tensorboard)))
    return exporters


def _describe(options: TrainOptions, settings: Settings, accumulate: int) -> dict[str, Any]:
    """Return the settings for the heartbeat's first line, without secrets."""
    more = {"accumulate": accumulate, "max_steps": options.steps, "loader": settings.values}
    return asdict(options) | {"dataset": options.dataset and shown_address(options.dataset)} | more

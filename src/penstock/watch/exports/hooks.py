"""Hand progress to the tools that people already watch: hooks for `Heartbeat(on_metrics=[…])`.

In:    a step, and the numbers of its progress line, nested names joined by `/`.
Out:   the same under the same names, or torchtitan's, in TensorBoard's files or an object of W&B's kind.
Where: the heartbeat's thread; TensorBoard's writer has one of its own.
State: an open event file.
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from penstock.errors import MissingExtra

Hook = Callable[[int, dict[str, float]], None]
Names = Callable[[Mapping[str, float]], dict[str, float]]

FLUSH_S = 10
"""Event files are complete up to this long ago, so that TensorBoard can follow a run."""
GIB = 2**30

# The names are those of torchtitan's MetricsProcessor (components/metrics.py) and of its trainer, which adds lr.
TITAN: Mapping[str, tuple[str, float]] = {
    "loss": ("loss_metrics/global_avg_loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "lr": ("lr", 1.0),
    "toks_per_s": ("throughput(tps)", 1.0),
    "dt_step_s": ("time_metrics/end_to_end(s)", 1.0),
    "dt_fetch_s": ("time_metrics/data_loading(s)", 1.0),
    "data_wait_pct": ("time_metrics/data_loading(%)", 1.0),
    "device_bytes": ("memory/max_active(GiB)", 1.0 / GIB),
}


def titan_names(values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that torchtitan logs too, under its names and in its units; only those that are there."""
    return {name: values[ours] * scale for ours, (name, scale) in TITAN.items() if ours in values}


class Run(Protocol):
    """What W&B's run has, and whatever else takes numbers by step."""

    def log(self, data: dict[str, Any], /, *, step: int) -> Any: ...


def wandb_hook(run: Run, names: Names | None = None) -> Hook:
    """A hook that logs to `run`, as `wandb.init()` gives it. `names=titan_names` changes the names."""

    def hook(step: int, values: dict[str, float]) -> None:
        run.log(dict(values) if names is None else names(values), step=step)

    return hook


def tensorboard(log_dir: str | os.PathLike[str], names: Names | None = None) -> TensorBoardHook:
    """A hook that writes TensorBoard's event files. `names=titan_names` changes the names."""
    return TensorBoardHook(log_dir, names)


class TensorBoardHook:
    """Writes scalars, one for each number of a progress line. Close it, so that the last steps are on disk."""

    def __init__(self, log_dir: str | os.PathLike[str], names: Names | None = None) -> None:
        for package in ("tensorboard", "torch"):
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # a mere folder of that name has none
                raise MissingExtra(package, "writing for TensorBoard", package)
        self._folder = os.fspath(log_dir)
        os.makedirs(self._folder, exist_ok=True)
        self._names = names
        self._writer: Any = None
        self._end: Callable[[], Any] | None = None

    def __call__(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:
            self._open()
        for name, value in (values if self._names is None else self._names(values)).items():
            self._writer.add_scalar(name, value, step)

    def _open(self) -> None:
        """Not before it is needed: it takes torch, whose import is nothing for a run to begin with."""
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(self._folder, flush_secs=FLUSH_S)
        self._writer, self._end = writer, weakref.finalize(self, _close, writer, os.getpid())

    def close(self) -> None:
        """Write what is left, and end the writer. May be called again."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> TensorBoardHook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _close(writer: Any, pid: int) -> None:
    if (
        os.getpid() == pid
    ):  # a fork has none of the writer's threads, and would wait for them for good
        writer.close()

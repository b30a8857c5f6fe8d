"""What a run says on the terminal: one rank speaks for all.

In:    what each step did.
Out:   a live line on a terminal, a line every few seconds elsewhere; at the end the metrics and what they mean.
Where: the trainer's thread, on rank 0; the other ranks are silent.
State: when a line was last printed.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.watch.attribution import band

if TYPE_CHECKING:
    from penstock.train.steps import Done
    from penstock.watch.telemetry import Telemetry

EVERY_S = 2.0


class Console:
    """Prints, if this is the rank that speaks."""

    def __init__(self, speaks: bool, *, steps: int | None, log_every: int, telemetry: Telemetry) -> None:
        self._speaks, self._steps, self._log_every, self._telemetry = speaks, steps, log_every, telemetry
        self._printed = 0.0
        self._live: Any = None
        self._task: Any = None
        if speaks and sys.stdout.isatty():
            self._live = _progress()

    def say(self, line: str) -> None:
        """A line of its own."""
        if not self._speaks:
            return
        if self._live is not None and self._task is not None:
            self._live.console.print(f"[train] {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"[train] {line}", flush=True)

    def begin(self, step: int) -> None:
        """The first step is about to begin."""
        if self._live is not None:
            self._live.start()
            self._task = self._live.add_task("", total=self._steps, completed=step, line="")

    def step(self, step: int, done: Done, *, world: int, warning: str) -> None:
        """A step is finished. Reads the loss only when it prints it: on a device, that waits for it."""
        now = time.monotonic()
        last = step == self._steps
        due = step % self._log_every == 0 if self._log_every else now - self._printed >= EVERY_S
        if not self._speaks or not (due or last or (self._live is not None and now - self._printed >= 0.1)):
            return
        self._printed = now
        line = self._line(done, world)
        if warning and due:
            self.say(f"WARNING: {warning}")
        if self._live is not None:
            self._live.update(self._task, completed=step, line=line)
        else:
            of = f"/{self._steps}" if self._steps is not None else ""
            self.say(f"step {step}{of}  {line}")

    def _line(self, done: Done, world: int) -> str:
        window = self._telemetry.window
        rate = world * window.tokens / window.wall if window.wall > 0 else 0.0
        wait = 100 * window.wait / window.wall if window.wall > 0 else 0.0
        depth, capacity = self._telemetry.queue()
        return (
            f"loss {float(done.loss):.4f}  {rate:,.0f} tok/s  data wait {wait:.2f} %  queue {depth}/{capacity}  "
            f"lr {done.lr:.2e}"
        )

    def end(self) -> None:
        """The last step is over."""
        if self._live is not None and self._task is not None:
            self._live.stop()
            self._task = None

    def metrics(
        self, *, loss: float | None, tokens_per_s: float, batch: int, data_wait: float, elapsed_s: float
    ) -> None:
        """The block that people look for, and what it means."""
        if not self._speaks:
            return
        minutes, seconds = divmod(int(elapsed_s), 60)
        shown = "none" if loss is None else f"{loss:.3f}"
        print("Metrics:")
        print(f"  Loss: {shown}")
        print(f"  Avg tokens/sec: {tokens_per_s:.1f}")
        print(f"  Batch size: {batch}")
        print(f"  Data wait: {100 * data_wait:.1f}%")
        print(f"  Elapsed: {minutes}m {seconds}s")
        said = self._telemetry.verdict().line
        print(said if band(data_wait) in said else f"{said} ({band(data_wait)} over the whole run)", flush=True)


def _progress() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("[train]", markup=False),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        TimeRemainingColumn(compact=True),
    )

"""What a run says on the terminal: one rank speaks for all.

In:    what each step did.
Out:   a live line on a terminal, a line every few seconds elsewhere; at the end the metrics and what they mean.
Where: the trainer's thread, on rank 0; the other ranks are silent.
State: when a line was last printed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.watch.attribution import band

if TYPE_CHECKING:
    from penstock.train.steps import Done
    from penstock.watch.steady import StepEvent
    from penstock.watch.telemetry import Telemetry

log = logging.getLogger("penstock")

EVERY_S = 2.0
LIVE_S = 0.1
ROOMY = 100
"""Columns from which on there is room for a bar too."""


def show(line: str) -> None:
    """Print a line. A reader that is gone (`| head`, a dead ssh) ends the console, and not the run."""
    try:
        print(line, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for good)
        log.warning(
            "nobody reads the console any more (%s): the run goes on without it",
            error.strerror or error,
        )


class Console:
    """Prints, if this is the rank that speaks."""

    def __init__(
        self, speaks: bool, *, steps: int | None, log_every: int, telemetry: Telemetry
    ) -> None:
        self._speaks, self._steps, self._log_every, self._telemetry = (
            speaks,
            steps,
            log_every,
            telemetry,
        )
        self._printed = self._drawn = 0.0
        self._live: Any = None
        self._task: Any = None
        if speaks and sys.stdout.isatty():
            self._live = _progress()

    def say(self, line: str) -> None:
        """A line of its own."""
        if not self._speaks:
            return
        if self._live is not None and self._task is not None:
            self._live.console.print(
                f"[train] {line}", markup=False, highlight=False, soft_wrap=True
            )
        else:
            show(f"[train] {line}")

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
        live = self._live is not None
        if not self._speaks or not (due or last or (live and now - self._drawn >= LIVE_S)):
            return
        line = self._line(done, world)
        if live:
            self._drawn = now
            self._live.update(self._task, completed=step, line=line)
        if not due and not last:
            return
        self._printed = now
        if warning:
            self.say(f"WARNING: {warning}")
        if not live or self._log_every:
            of = f"/{self._steps}" if self._steps is not None else ""
            self.say(f"step {step}{of}  {line}  lr {done.lr:.2e}")

    def _line(self, done: Done, world: int) -> str:
        window = self._telemetry.window
        rate = world * window.tokens / window.wall if window.wall > 0 else 0.0
        wait = 100 * window.wait / window.wall if window.wall > 0 else 0.0
        depth, capacity = self._telemetry.queue()
        return f"loss {float(done.loss):.4f}  {rate:,.0f} tok/s  data wait {wait:.2f} %  queue {depth}/{capacity}"

    def end(self) -> None:
        """The last step is over."""
        if self._live is not None and self._task is not None:
            self._live.stop()
            self._task = None

    def metrics(
        self,
        *,
        loss: float | None,
        tokens_per_s: float,
        batch: int,
        data_wait: float,
        elapsed_s: float,
    ) -> None:
        """The block that people look for, and what it means."""
        if not self._speaks:
            return
        minutes, seconds = divmod(int(elapsed_s), 60)
        said = self._telemetry.verdict().line
        for line in (
            "Metrics:",
            f"  Loss: {'none' if loss is None else f'{loss:.3f}'}",
            f"  Avg tokens/sec: {tokens_per_s:.1f}",
            f"  Batch size: {batch}",
            f"  Data wait: {100 * data_wait:.1f}%",
            f"  Elapsed: {minutes}m {seconds}s",
            said if band(data_wait) in said else f"{said} ({band(data_wait)} over the whole run)",
        ):
            show(line)


def _progress() -> Any:
    from rich.console import Console as Terminal
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    terminal = Terminal()
    bar = [BarColumn(20)] if terminal.width >= ROOMY else []
    return Progress(
        TextColumn("[train]", markup=False),
        *bar,
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=terminal,
    )


def steady_lines(
    times: Sequence[float],
    waits: Sequence[float],
    tokens: Sequence[int],
    compiled: list[StepEvent],
    *,
    world: int,
    first: int,
) -> list[str]:
    """What the steps of one rank say of the whole run, of which they are those from number `first` on."""
    from penstock.watch.steady import StepEvent, analyze_steps

    events = [StepEvent(i, "data_wait_s", waited) for i, waited in enumerate(waits)] + compiled
    return (
        analyze_steps(times, [world * each for each in tokens], events).summary(first).splitlines()
    )

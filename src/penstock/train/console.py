"""What a run prints: rank 0 speaks for all ranks."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from penstock.feed.collectives import Ranks
from penstock.feed.fallback import Substitution
from penstock.train.options import TrainOptions
from penstock.watch.attribution import band
from penstock.watch.telemetry import Telemetry

log = logging.getLogger("penstock")

EVERY_S = 2.0


def show(line: str) -> None:
    """Print a line. If its reader has gone (`| head`, a closed terminal), the run continues."""
    try:
        print(line, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (never closed)
        log.warning("the console cannot be written any more: %s", error.strerror)


class Console:
    """Prints a line every few steps, and a summary at the end."""

    def __init__(
        self, telemetry: Telemetry, options: TrainOptions, title: str, ranks: Ranks
    ) -> None:
        """`title`: what the data is called."""
        self._telemetry, self._title, self._world = telemetry, title, ranks.world
        self._silent, self._total, self._every = ranks.rank != 0, options.steps, options.log_every
        self._tokens = 0
        self._printed_at = 0.0
        self._announced = False

    def say(self, line: str) -> None:
        """Print a line."""
        if not self._silent:
            show(f"[train] {line}")

    def step(
        self, step: int, seconds: float, tokens: int, result: Any, instead: Substitution | None
    ) -> None:
        """Record a step, and print it if it is due. Reads the loss only then, which may wait.

        result: its loss and learning rate. instead: the synthetic data that it ran on, if any.
        """
        self._tokens += self._world * tokens
        if not self._announced and (first := self._telemetry.first):
            self._announced = True
            self.say(f"first {self._title}batch fetched in {first['dt']:.2f}s")
        now = time.monotonic()
        due = step % self._every == 0 if self._every else now - self._printed_at >= EVERY_S
        if self._silent or not (due or step == self._total):
            return
        self._printed_at = now
        if instead is not None:
            self.say(f"WARNING: SYNTHETIC data since step {instead.first}: {instead.reason}")
        window = self._telemetry.timer.rolling
        wall = window.wall or seconds
        depth, capacity = self._telemetry.queue()
        self.say(
            f"step {step}{f'/{self._total}' if self._total else ''}  "
            f"loss {float(result.loss):.4f}  {self._world * (window.tokens or tokens) / wall:,.0f} tokens/s  "
            f"data wait {100 * window.wait / wall:.2f} %  queue {depth}/{capacity}  "
            f"lr {result.lr:.2e}"
        )

    def summary(self, loss: float, rows: int, elapsed_s: float) -> None:
        """Print the metrics of the run and what they mean."""
        if self._silent:
            return
        data_wait = self._telemetry.data_wait()
        verdict = self._telemetry.verdict().line
        if band(data_wait) not in verdict:
            verdict += f" ({band(data_wait)} over the whole run)"
        minutes, seconds = divmod(int(elapsed_s), 60)
        show(
            f"Metrics:\n  Loss: {loss:.3f}\n"
            f"  Avg tokens/sec: {self._tokens / elapsed_s:.1f}\n  Batch size: {rows}\n"
            f"  Data wait: {100 * data_wait:.1f}%\n  Elapsed: {minutes}m {seconds}s\n{verdict}"
        )

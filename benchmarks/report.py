"""Results: a table on stdout, and JSON lines in benchmarks/results that describe the machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

from common import REPO, RESULTS

PACKAGES = ("penstock", "gigatoken", "tokenizers", "pyarrow", "numpy", "torch")


@functools.cache
def machine() -> dict[str, Any]:
    """Describe the machine and its load by other processes. Measured once."""
    installed = {each.name: each.version for each in distributions()}
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "system": platform.platform(),
        "others_busy_percent": round(_busy_percent(), 1),
        "python": platform.python_version(),
        "versions": {name: installed.get(name) for name in PACKAGES},
        "commit": git("describe", "--always", "--dirty", "--abbrev=12"),
    }


def _busy_percent(seconds: float = 0.5) -> float:
    def ticks() -> tuple[int, int]:
        values = [int(v) for v in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return sum(values), values[3] + values[4]  # all; idle and waiting for disks

    before = ticks()
    time.sleep(seconds)
    after = ticks()
    return 100 * (1 - (after[1] - before[1]) / max(1, after[0] - before[0]))


def git(*arguments: str) -> str:
    """Return the output of git in this repository, or "unknown" outside a repository."""
    command = ["git", "--no-optional-locks", "-C", str(REPO), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@dataclass(frozen=True)
class Goal:
    """A bound for a median. It is shown next to the result and never fails a run."""

    sense: Literal["<=", ">="]
    bound: float

    def met(self, value: float) -> bool:
        return value <= self.bound if self.sense == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


@dataclass
class Report:
    """Collects the results of one script."""

    name: str
    quick: bool
    settings: dict[str, Any]
    _rows: list[tuple[str, ...]] = field(default_factory=list)
    _begun: float = field(default_factory=time.perf_counter)

    def add(
        self,
        case: str,
        metric: str,
        values: float | Sequence[float],
        unit: str,
        goal: Goal | None = None,
        **more: Any,
    ) -> float:
        """Record the repeated values of one result. Return their median."""
        listed = [float(v) for v in values] if isinstance(values, Sequence) else [float(values)]
        median = statistics.median(listed)
        line = {"case": case, "metric": metric, "unit": unit, "median": median, "values": listed}
        verdict = ""
        if goal is not None:
            met = None if self.quick else goal.met(median)
            line |= {"goal": str(goal), "met": met}
            verdict = str(goal) + {None: "", True: "  met", False: "  MISSED"}[met]
        self._write(line | more)
        spread = f"{show(min(listed))} to {show(max(listed))}" if len(listed) > 1 else ""
        self._rows.append((case, metric, show(median), unit, spread, verdict))
        return median

    def note(self, case: str, words: Mapping[str, str], **more: Any) -> None:
        """Record a text."""
        self._write({"case": case, "words": dict(words)} | more)

    def _write(self, line: Mapping[str, Any]) -> None:
        about = {"settings": self.settings, "quick": self.quick, "machine": machine()}
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / f"{self.name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"bench": self.name, **line, **about}) + "\n")

    def close(self) -> None:
        """Print the table."""
        print(table(("case", "metric", "median", "unit", "min to max", "goal"), self._rows))
        took = time.perf_counter() - self._begun
        print(f"# {took:.0f} s; appended to {RESULTS / self.name}.jsonl\n", flush=True)


def show(value: float) -> str:
    """Format a number with three significant digits."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return (
        f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}"
        if size >= 0.01
        else f"{value:.2g}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns, the median to the right. A case is printed once."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines, before = [], ""
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = ["" if row[0] == before else row[0], *row[1:]]
        before = row[0]
        padded = zip(head, cells, widths, strict=True)
        aligned = [c.rjust(w) if name == "median" else c.ljust(w) for name, c, w in padded]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def print_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    lines = [head, ["---"] * len(head), *rows]
    print("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines), flush=True)

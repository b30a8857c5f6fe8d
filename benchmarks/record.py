"""What was measured, and on what.

In:    numbers by case and metric.
Out:   JSON lines in benchmarks/results, and a table on stdout.
Where: the script's end.
State: none but the lines.
"""

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from common import REPO, RESULTS


@functools.cache
def machine() -> dict[str, Any]:
    """What the numbers were measured on. Taken once, when the script begins."""
    names = ("penstock", "gigatoken", "tokenizers", "pyarrow", "numpy", "torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "system": platform.platform(),
        "others_busy_percent": round(_busy_percent(), 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def _busy_percent(seconds: float = 0.5) -> float:
    """How busy the cores are while this process does nothing: the work of others. nan where it is not known."""

    def ticks() -> tuple[int, int]:
        values = [int(v) for v in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return sum(values), values[3] + values[4]  # all; idle, and waiting for disks

    try:
        all_before, idle_before = ticks()
        time.sleep(seconds)
        all_after, idle_after = ticks()
    except (OSError, ValueError, IndexError):
        return float("nan")
    return 100 * (1 - (idle_after - idle_before) / max(1, all_after - all_before))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(REPO), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " + changes" if git("status", "--porcelain", "--", "src") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Goal:
    """What a median should reach. A goal is shown, and never fails a run."""

    sense: Literal["<=", "<", ">="]
    bound: float

    def met(self, value: float) -> bool:
        return {"<=": value <= self.bound, "<": value < self.bound, ">=": value >= self.bound}[
            self.sense
        ]

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


@dataclass
class Report:
    """Results of one script: a JSON line each, and all of them as a table at the end."""

    name: str
    quick: bool
    settings: dict[str, Any] = field(default_factory=dict)
    """What the run was given; part of every line."""
    _rows: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        about = machine()
        self._begun = time.perf_counter()
        print(f"# {self.name}  {json.dumps(self.settings)}")
        print(
            f"# {about['cores']} cores, {about['cpu']}, Python {about['python']}, commit {about['commit']}",
            flush=True,
        )
        if self.quick:
            print("# quick: tiny sizes, the numbers mean nothing")
        elif about["others_busy_percent"] > 10:
            print(
                f"# others keep the cores {about['others_busy_percent']} % busy: the numbers will be off",
                flush=True,
            )

    def add(
        self,
        case: str,
        metric: str,
        values: float | Sequence[float],
        unit: str,
        goal: Goal | None = None,
        **more: Any,
    ) -> float:
        """Record one result; several values are repeats of one measurement. Gives their median."""
        listed = [float(v) for v in values] if isinstance(values, Sequence) else [float(values)]
        median = statistics.median(listed)
        line: dict[str, Any] = {
            "bench": self.name, "case": case, "metric": metric, "unit": unit,
            "median": median, "min": min(listed), "max": max(listed), "n": len(listed), "values": listed,
        }  # fmt: skip
        if goal is not None:
            line |= {"goal": str(goal), "met": None if self.quick else goal.met(median)}
        line |= more | {"settings": self.settings, "quick": self.quick, "machine": machine()}
        self._write(line)
        spread = f"{show(min(listed))} to {show(max(listed))}" if len(listed) > 1 else ""
        reached = (
            ""
            if goal is None
            else str(goal)
            if self.quick
            else f"{goal}  {'met' if goal.met(median) else 'MISSED'}"
        )
        self._rows.append((case, metric, show(median), unit, spread, reached))
        return median

    def note(self, case: str, words: Mapping[str, str], **more: Any) -> None:
        """Record what is no number."""
        line = {"bench": self.name, "case": case, "words": dict(words)}
        self._write(
            line | more | {"settings": self.settings, "quick": self.quick, "machine": machine()}
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / f"{self.name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Print the table."""
        print(table(("case", "metric", "median", "unit", "min to max", "goal"), self._rows))
        print(
            f"# {time.perf_counter() - self._begun:.0f} s; appended to {RESULTS / self.name}.jsonl\n",
            flush=True,
        )


def show(value: float) -> str:
    """A number with three digits that count."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return (
        f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}"
        if size >= 0.01
        else f"{value:.2g}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; numbers to the right. A case is named once."""
    right = {"median"}
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    before = ""
    for n, row in enumerate([head, ["-" * w for w in widths], *rows]):
        cells = list(row)
        if n > 1:
            cells[0], before = ("" if row[0] == before else row[0]), row[0]
        pairs = zip(head, cells, widths, strict=True)
        lines.append(
            "  ".join(c.rjust(w) if name in right else c.ljust(w) for name, c, w in pairs).rstrip()
        )
    return "\n".join(lines)

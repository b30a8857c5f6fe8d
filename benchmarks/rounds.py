"""Measuring: contenders in turn, each in a process of its own where it matters.

In:    functions or scripts.
Out:   a number for each of them in each round, and what is made of those.
Where: the script, and the contenders that it starts.
State: the processes; they end with the script.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def interleave(
    repeats: int, contenders: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Measure each contender once a round, so that all see the same weather; each is first in its turn."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for round in range(repeats):
        turn = round % len(names)
        for name in names[turn:] + names[:turn]:
            values[name].append(contenders[name]())
    return values


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: what slows a whole round cancels out."""
    return [a / b for a, b in zip(over, under, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def count(n: int) -> int:
    """Python and nothing else."""
    total = 0
    for i in range(n):
        total += i & 7
    return total


def timed(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def calibrate(seconds: float) -> int:
    """How far to `count` to take about so long on an idle core."""
    n = 100_000
    took = min(timed(lambda: count(n)) for _ in range(9))
    return max(1, int(n * seconds / took))


def wait_until_quiet(deadline_s: float = 10.0) -> None:
    """Until the process has used next to no CPU for a while: queues are full, nothing runs."""
    end = time.monotonic() + deadline_s
    quiet = 0
    while quiet < 3:
        if time.monotonic() > end:
            raise RuntimeError(
                f"a loader was still at work {deadline_s:.0f} s after nobody asked it any more"
            )
        before = time.process_time()
        time.sleep(0.02)
        quiet = quiet + 1 if time.process_time() - before < 0.001 else 0


class Contender:
    """A script in a process of its own that prepares itself and then measures whenever it is told to.

    So contenders do not share memory, caches of imports, or the tokenizer's idea of how much the
    process has grown; while one measures the others wait for a line and take no time.
    """

    def __init__(self, script: str, case: Mapping[str, Any], quick: bool) -> None:
        self._case = dict(case)
        command = [
            sys.executable,
            script,
            "--contender",
            json.dumps(self._case),
            *(["--quick"] if quick else []),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> Self:
        """Wait until it is prepared."""
        self._line()
        return self

    def measure(self) -> dict[str, Any]:
        """One measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the contender {self._case} ended with code {self._process.wait()}; see its error above"
            )
        return line

    def close(self) -> None:
        """End it by ending its input; its own exit must be clean."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(measure: Callable[[], dict[str, Any]]) -> None:
    """The contender's side: say that it is ready, then answer every line with a measurement."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def process_memory() -> dict[str, int]:
    """Bytes: `rss`, `anonymous` (what no file backs) and `peak` (of rss), from /proc/self/status."""
    names = {"VmRSS": "rss", "RssAnon": "anonymous", "VmHWM": "peak"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = int(value.split()[0]) * 1024
    return found

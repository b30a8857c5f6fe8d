"""Run a contender's process and observe it from outside: what it reports, memory, CPU, children too.

Reads /proc between the lines that the process prints. The process is killed with all its children
in any case.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from case import Case

HERE = Path(__file__).resolve().parent
LOOK_S = 0.1
"""Between two looks at memory, about a millisecond of work each."""
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
EXIT_S = 30.0
QUIET = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass
class Outcome:
    """What was seen of one process."""

    what: str = "silence"
    """How it ended: done, error, `not offered`, or silence until the deadline."""
    told: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    """From the start of the process to its first batch."""
    cpu_s: float = 0.0
    """Of process and children, from the steady batch to the end of the work."""
    peak_bytes: int = 0
    """Resident memory of process and children; what they share counts for each."""
    after_s: float = 0.0
    exit_s: float | None = None
    """From the word to end until the process was gone; None if it had to be killed."""
    last_words: str = ""

    @property
    def why(self) -> str:
        """What went wrong, in a line."""
        if self.what == "silence":
            return f"nothing for {self.after_s:.0f} s"
        told = f"{self.told.get('kind', '')}: {self.told.get('why', '')}".strip(": ")
        return told.partition("\n")[0][:200]


def run(
    interpreter: Path,
    what: str,
    case: Case,
    *options: str,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    scratch: Path | None = None,
) -> Outcome:
    """Run one contender. Its caches are in `scratch`, or in a folder that is deleted afterwards."""
    made = scratch or Path(tempfile.mkdtemp(prefix="penstock-peers-"))
    places = {"PENSTOCK_CACHE": f"{made}/penstock", "HF_HOME": f"{made}/hf", "TMPDIR": str(made)}
    variables = {**os.environ, **QUIET, **places, **(environment or {"HF_HUB_OFFLINE": "1"})}
    variables.pop("PYTHONPATH", None)
    command = [str(interpreter), str(HERE / "contend.py"), what, case.json(), *options]
    try:
        with tempfile.TemporaryFile("w+") as words:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=variables,
                start_new_session=True,
            )
            try:
                outcome = _watch(process, time.monotonic(), deadline_s)
            finally:
                with contextlib.suppress(
                    ProcessLookupError
                ):  # it has ended by itself, as it should
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(BrokenPipeError):
                    process.communicate(timeout=EXIT_S)
            words.seek(0)
            outcome.last_words = words.read()[-2000:]
            return outcome
    finally:
        if scratch is None:
            shutil.rmtree(made, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], begun: float, deadline_s: float) -> Outcome:
    outcome = Outcome()
    cpu_before = 0.0
    for line in _lines(process, begun + deadline_s, outcome):
        told = json.loads(line)
        if told["what"] == "first":
            outcome.first_s = told["at"] - begun
        if told["what"] in ("first", "steady"):
            cpu_before = cpu_s(process.pid)
            continue
        outcome.what, outcome.told = told["what"], told
        outcome.cpu_s = cpu_s(process.pid) - cpu_before
        outcome.peak_bytes = max(outcome.peak_bytes, memory(process.pid))
        break
    outcome.after_s = time.monotonic() - begun
    if outcome.what == "done":
        with contextlib.suppress(subprocess.TimeoutExpired):  # exit_s stays None
            process.communicate(b"end\n", EXIT_S)
            outcome.exit_s = time.monotonic() - begun - outcome.after_s
    return outcome


def _lines(process: subprocess.Popen[bytes], deadline: float, outcome: Outcome) -> Iterator[bytes]:
    """Yield what it prints until it ends or the deadline passes; look at memory meanwhile."""
    assert process.stdout is not None
    descriptor, held = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(LOOK_S):
                outcome.peak_bytes = max(outcome.peak_bytes, memory(process.pid))
                continue
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                return
            *lines, held = (held + piece).split(b"\n")
            yield from lines


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found, pending = [], [pid]
    while pending:
        found.append(pending.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            pending += map(int, _read(children).split())
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants, those that were waited for too."""
    stats = (_read(Path(f"/proc/{member}/stat")).rpartition(")")[2] for member in family(pid))
    return sum(int(value) for stat in stats for value in stat.split()[11:15]) / TICKS


def memory(pid: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    sizes = (_read(Path(f"/proc/{member}/statm")).split() for member in family(pid))
    return sum(int(fields[1]) * PAGE for fields in sizes if fields)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # the process has ended meanwhile
        return ""

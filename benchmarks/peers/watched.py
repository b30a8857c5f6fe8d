"""A contender's process, watched from outside: its words, its memory and its CPU time, children included.

In:    an interpreter, what contend.py shall do, a case.
Out:   an `Outcome`: when the first batch came, what was told at the end, memory, CPU time, how it ended.
Where: the driver's only thread: it waits for the process's words, and looks at /proc in between.
State: none beyond the process, which is ended with all its children in any case.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from case import Case

HERE = Path(__file__).resolve().parent
LOOK_S = 0.1
"""Between two looks at memory: about a millisecond of work each."""
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
EXIT_S = 30.0
QUIET = {
    "HF_HUB_DISABLE_XET": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONDONTWRITEBYTECODE": "",
}  # fmt: skip


@dataclass
class Outcome:
    """What was seen of one process."""

    what: str = "silence"
    """How it ended: done, error, `not offered`, or silence until the deadline."""
    first_s: float | None = None
    """From the start of the process to its first batch."""
    told: dict[str, Any] = field(default_factory=dict)
    cpu_s: float = 0.0
    """Of process and children, from the first batch, or the one from which on it is steady, to the end of the work."""
    cpu_all_s: float = 0.0
    """From the start."""
    peak_bytes: int = 0
    """Resident memory of process and children; what they share counts once for each."""
    after_s: float = 0.0
    """From the start of the process to its last word."""
    exit_s: float | None = None
    """From the word to end until the process was gone; None if it had to be killed."""
    last_words: str = ""

    @property
    def why(self) -> str:
        """What went wrong, in a line."""
        if self.what == "silence":
            return f"nothing for {self.after_s:.0f} s"
        return f"{self.told.get('kind', '')}: {self.told.get('why', '')}".strip(": ").partition(
            "\n"
        )[0][:200]


def run(
    interpreter: Path,
    what: str,
    case: Case,
    *options: str,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    scratch: Path | None = None,
) -> Outcome:
    """Run one contender. Its caches are in `scratch`, or nowhere."""
    made = Path(tempfile.mkdtemp(prefix="penstock-peers-")) if scratch is None else scratch
    variables = (
        dict(os.environ)
        | QUIET
        | {"PENSTOCK_CACHE": f"{made}/penstock", "HF_HOME": f"{made}/hf", "TMPDIR": str(made)}
    )
    variables |= environment or {"HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    command = [
        str(interpreter),
        str(HERE / "contend.py"),
        what,
        replace(case, scratch=str(made)).json(),
        *options,
    ]
    try:
        with tempfile.TemporaryFile("w+") as words:
            begun = time.monotonic()
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True, env=variables,
                start_new_session=True,
            )  # fmt: skip
            try:
                outcome = _watch(process, begun, deadline_s)
            finally:
                _end(process)
            words.seek(0)
            outcome.last_words = words.read()[-2000:]
            return outcome
    finally:
        if scratch is None:
            shutil.rmtree(made, ignore_errors=True)


def _watch(process: subprocess.Popen[str], begun: float, deadline_s: float) -> Outcome:
    outcome = Outcome()
    cpu_first = 0.0
    for line in _lines(process, begun + deadline_s, outcome):
        told = json.loads(line)
        if told["what"] == "first":
            outcome.first_s = told["at"] - begun
        if told["what"] in ("first", "steady"):
            cpu_first = cpu_s(process.pid)
            continue
        outcome.what, outcome.told = told["what"], told
        outcome.cpu_all_s = cpu_s(process.pid)
        outcome.cpu_s = outcome.cpu_all_s - cpu_first
        outcome.peak_bytes = max(outcome.peak_bytes, memory(process.pid))
        break
    outcome.after_s = time.monotonic() - begun
    if outcome.what == "done":
        asked = time.monotonic()
        assert process.stdin is not None
        try:
            process.stdin.write("end\n")
            process.stdin.close()
            process.wait(EXIT_S)
            outcome.exit_s = time.monotonic() - asked
        except (subprocess.TimeoutExpired, BrokenPipeError):
            outcome.exit_s = None
    return outcome


def _lines(process: subprocess.Popen[str], deadline: float, outcome: Outcome) -> Iterator[str]:
    """What it says, until it ends or the deadline passes; memory is looked at meanwhile."""
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
            for line in lines:
                yield line.decode()


def _end(process: subprocess.Popen[str]) -> None:
    """Nothing of it is left behind: it has a session of its own."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself, as it should
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(EXIT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found, open_ = [], [pid]
    while open_:
        found.append(open_.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            open_ += map(int, _read(children).split())
    return found


def cpu_s(pid: int) -> float:
    """Used by a process, its children, and those of them that have ended and were waited for."""
    total = 0
    for member in family(pid):
        fields = _read(Path(f"/proc/{member}/stat")).rpartition(")")[2].split()
        if fields:
            total += sum(map(int, fields[11:15]))
    return total / TICKS


def memory(pid: int) -> int:
    """Resident bytes."""
    sizes: Sequence[list[str]] = [
        _read(Path(f"/proc/{member}/statm")).split() for member in family(pid)
    ]
    return sum(int(fields[1]) * PAGE for fields in sizes if fields)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # it has ended meanwhile
        return ""

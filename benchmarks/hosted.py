"""The loopback Hub, as a process of its own.

In:    a folder, and what the network between is to be like.
Out:   its endpoint, and what it was asked for.
Where: beside whatever is measured.
State: the process; it ends with the script.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common import REPO, REPOSITORY


class Hub:
    """The loopback Hub of tests/servers in a process of its own, serving the one file of a folder under many names.

    Its log is there once it has ended. Whose request was whose is told by the time: all processes have the
    same monotonic clock.
    """

    def __init__(self, folder: Path, copies: int, *options: str) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="penstock-bench-")) / "requests.jsonl"
        self.requests: list[dict[str, Any]] = []
        """What it was asked for, in the order of arrival, with the fields of tests.servers.Request."""
        command = [
            sys.executable,
            "-m",
            "tests.servers",
            "hub",
            "--dir",
            str(folder.resolve()),
            "--repo",
            REPOSITORY,
        ]
        command += ["--copies", str(copies), "--log", str(self._log), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint:
            raise RuntimeError(
                f"the Hub ended with code {self._process.wait()}; see its error above"
            )

    def commit(self) -> str:
        """What its branch stands for."""
        with urllib.request.urlopen(
            f"{self.endpoint}/api/datasets/{REPOSITORY}/revision/main", timeout=30
        ) as reply:
            return str(json.load(reply)["sha"])

    def cpu_s(self) -> float:
        """CPU time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def between(self, begun: float, ended: float) -> list[dict[str, Any]]:
        """The requests that came in that time; to be called once it has ended."""
        return [request for request in self.requests if begun <= request["time"] <= ended]

    def close(self) -> None:
        """End it, and read what it wrote down."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
        self.requests = [json.loads(line) for line in self._log.read_text().splitlines()]
        shutil.rmtree(self._log.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

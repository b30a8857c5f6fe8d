"""Shared by every benchmark: folders, options, interleaved rounds, child processes, the loopback Hub.

Does not import Penstock, so that a script decides what is loaded before its clock starts.
PENSTOCK_BENCH_DIR is a folder for temporary files; PENSTOCK_BENCH_DATA is the folder with
books.parquet and gpt2-tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
RESULTS = HERE / "results"
SHARED = Path(os.environ.get("PENSTOCK_BENCH_DATA") or REPO.parent / "shared" / "data")
MB = 1_000_000

BATCH_SIZE, SEQ_LEN = 16, 1024
TOKENS = BATCH_SIZE * SEQ_LEN
COPIES = 8
"""The number of repetitions of the corpus in long runs."""

HOSTED = "text.parquet"
REPOSITORY = "bench/books"
"""The dataset in which the loopback Hub serves one file under many names."""
HUB_URL = f"hf://datasets/{REPOSITORY}"

Answer = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument(
        "--quick", action="store_true", help="tiny sizes: a smoke test, no measurement"
    )
    made.add_argument("--repeats", type=int, help="rounds; each measures every contender once")
    made.add_argument("--contender", type=json.loads, help=argparse.SUPPRESS)
    return made


def bench_folder(name: str) -> Path:
    """Return the folder for temporary files."""
    root = os.environ.get("PENSTOCK_BENCH_DIR")
    base = Path(root) if root else Path(tempfile.gettempdir()) / f"penstock-bench-{os.getuid()}"
    folder = base / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment with these variables and without settings of Penstock and the Hub."""
    prefixes, own = ("HF_", "PENSTOCK_", "NSA_", "USE_"), "PENSTOCK_BENCH_"
    kept = {n: v for n, v in os.environ.items() if n.startswith(own) or not n.startswith(prefixes)}
    return kept | {"HF_HUB_DISABLE_XET": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"} | more


def hide_torch() -> None:
    """Hide torch, so that batches are numpy arrays and no time is spent on its import."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def silence_warnings() -> None:
    """Disable the warning that workers are slower than a consumer without work."""
    logging.getLogger("penstock").setLevel(logging.ERROR)


# Numbers


def interleave(
    repeats: int, contenders: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Measure each contender once per round; the first one rotates."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(contenders[name]())
    return values


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide round by round, so that the load of the machine cancels out."""
    return [a / b for a, b in zip(over, under, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def take_steps(batches: Iterator[Any], steps: int, work: Callable[[], Any]) -> Answer:
    """Alternate next() and `work`. Return the wall seconds and those of each next()."""
    fetches = []
    begun = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        next(batches)
        fetches.append(time.perf_counter() - asked)
        work()
    return {"wall": time.perf_counter() - begun, "fetches": fetches}


def process_memory() -> dict[str, int]:
    """Return bytes: `rss`, `anonymous` (not backed by a file) and `peak` (of rss)."""
    names = {"VmRSS": "rss", "RssAnon": "anonymous", "VmHWM": "peak"}
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {short: int(found[name].split()[0]) * 1024 for name, short in names.items()}


# Processes


class Contender:
    """A script in its own process that prepares itself, then measures once for each line it reads.

    Contenders share no memory and no caches. Only one measures at a time.
    """

    def __init__(self, script: str, case: Mapping[str, Any], quick: bool = False) -> None:
        self._case = dict(case)
        command = [sys.executable, script, "--contender", json.dumps(self._case)]
        self._process = subprocess.Popen(
            command + ["--quick"] * quick, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> Self:
        """Wait until the contender is ready."""
        self._line()
        return self

    def measure(self) -> Answer:
        """Return one measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer: Answer = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the contender {self._case} exited with code {code}; see above")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def serve(measure: Callable[[], Answer]) -> None:
    """Run as a contender: report readiness, then measure once for every input line."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def measure_all(
    script: str,
    cases: Mapping[str, Mapping[str, Any]],
    repeats: int,
    *,
    quick: bool = False,
    fresh: bool = False,
) -> dict[str, list[Answer]]:
    """Measure each case once per round in its own process. `fresh`: restart it for every round."""
    answers: dict[str, list[Answer]] = {name: [] for name in cases}
    with ExitStack() as stack:
        running: dict[str, Contender] = {}

        def measuring(name: str) -> Callable[[], float]:
            def measure() -> float:
                if fresh:
                    with Contender(script, cases[name], quick) as process:
                        answers[name].append(process.ready().measure())
                else:
                    answers[name].append(running[name].measure())
                return 0.0

            return measure

        if not fresh:
            for name, case in cases.items():
                running[name] = stack.enter_context(Contender(script, case, quick))
            for process in running.values():
                process.ready()
        interleave(repeats, {name: measuring(name) for name in cases})
    return answers


class Hub:
    """The loopback Hub in its own process; it serves the one file of a folder under many names.

    Its log is read at the end. All processes share one monotonic clock, so the time of a request
    identifies its client.
    """

    def __init__(self, folder: Path, copies: int, *options: str) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="penstock-bench-")) / "requests.jsonl"
        self.requests: list[Answer] = []
        path = os.pathsep.join([str(REPO), str(REPO / "src")])
        command = [sys.executable, "-m", "tests.servers", "hub", "--dir", str(folder)]
        command += ["--repo", REPOSITORY, "--copies", str(copies), "--log", str(self._log)]
        self._process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(PYTHONPATH=path),
        )
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint:
            raise RuntimeError(f"the Hub exited with code {self._process.wait()}; see above")

    def commit(self) -> str:
        """Return the commit of its branch."""
        address = f"{self.endpoint}/api/datasets/{REPOSITORY}/revision/main"
        with urllib.request.urlopen(address, timeout=30) as reply:
            return str(json.load(reply)["sha"])

    def between(self, begun: float, ended: float) -> list[Answer]:
        """Return the requests in a period. Call this after the Hub has exited."""
        return [request for request in self.requests if begun <= request["time"] <= ended]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=30)
        self.requests = [json.loads(line) for line in self._log.read_text().splitlines()]
        shutil.rmtree(self._log.parent)


@contextmanager
def fresh_cache(endpoint: str = "") -> Iterator[str]:
    """Use an empty folder for the caches of this process. Call this before importing Penstock."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        os.environ |= {"PENSTOCK_CACHE": folder, "HF_HOME": folder}
        if endpoint:
            os.environ["HF_ENDPOINT"] = endpoint
        yield folder

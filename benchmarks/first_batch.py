"""How long is it from the start of the process to the first batch, where the text is on the Hub?

A loopback Hub with 50 ms before each answer, 100 MB/s, and a dataset of 2,400 files of 20 MB; beside
Penstock `datasets`, streaming, with `tokenizers` for the same vocabulary and the same batch.

Fresh processes, one after the other in turn, imports included. The clock starts just before the
process is created and is read by the child (all processes have the same monotonic clock). Neither
side needs torch for a batch of numpy arrays. `datasets` imports it wherever it is installed, so it
runs twice: as people write it, and at its best, which is without torch (USE_TORCH=0), with a commit
and a pattern that spare it questions, and the text column only. Penstock shuffles; `datasets` does
not, which is faster for it. Its children leave by os._exit: some of them never end otherwise.

on disk:  the same file, without any network: the interpreter, imports, the vocabulary, the first chunk.
cold:     nothing on disk; by the name of a branch.
manifest: listing and footers on disk, no tokens; by the name of a branch, and by a commit.
tokens:   tokens on disk too; by a commit. No request may be made: the Hub's log is looked at.
warm:     `datasets` a second time, with the HF_HOME of the first.

The Hub is a process of its own on the same cores as the child, so what it takes to answer delays
both sides; more so the one that asks for more. A new connection costs nothing extra here
(--connect-latency-ms says otherwise); elsewhere it costs a round trip, and two more for TLS.

The ledger of a case has the moments that the child tells and those at which requests arrived at the
Hub, in seconds since the process was created. "In a row" is the longest chain of requests of which
each may have waited for the answer to the one before it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosted import Hub
from record import Goal, Report, show
from rounds import interleave, ratios

from common import BATCH_SIZE, HOSTED, MB, REPOSITORY, SEQ_LEN, parser
from corpora import load_corpus

DOCUMENTS = 250
"""In a row group: 1.5 MB of text."""
FILL_CHUNKS = 40
"""Chunks whose tokens are at hand: more than a loader reads ahead before its first batch is taken."""
FOOTER_BYTES = 2 << 20
"""What reaches up to the end of a file, and is not longer, is taken for its footer."""
DEADLINE_S = 120.0
LEDGERS = (
    "Penstock, on disk", "Penstock, cold", "Penstock, manifest", "Penstock, manifest, pinned",
    "Penstock, tokens, pinned", "datasets at its best, cold",
)  # fmt: skip
"""The cases whose moments are shown."""

FRAME = """
import time
marks = [("interpreter", time.monotonic())]
def mark(part):
    marks.append((part, time.monotonic()))
def tell(inputs):
    import json, zlib
    inputs = inputs.astype("int64")
    print(json.dumps({{"marks": marks, "shape": inputs.shape, "crc": zlib.crc32(inputs.tobytes())}}), flush=True)
{body}
"""
PENSTOCK = """
from penstock import AsyncDataLoader, TextDataset
mark("names imported")
data = TextDataset({url!r}, tokenizer={tokenizer!r}, seq_len={seq_len}, cache={cache!r})
mark("dataset described")
with AsyncDataLoader(data, {batch_size}, shuffle={shuffle!r}, output="numpy", report_docs=0) as loader:
    mark("loader started")
    batch = next(loader)
    mark("first batch")
{more}
tell(batch.inputs)
"""
FILL = """
    while loader.stats().cache_written < {chunks}:
        next(loader)
"""
DATASETS = """
import os
import numpy
from datasets import load_dataset
from tokenizers import Tokenizer
mark("names imported")
tokenizer = Tokenizer.from_file({tokenizer!r})
end = tokenizer.token_to_id("<|endoftext|>")
mark("vocabulary loaded")
stream = load_dataset({repository!r}, split="train", streaming=True, **{options!r})
mark("dataset described")
wanted = {batch_size} * {seq_len}
ids = []
for row in stream:
    if not ids:
        mark("first document")
    ids += tokenizer.encode(row["text"]).ids
    ids.append(end)
    if len(ids) > wanted:
        break
inputs = numpy.array(ids[:wanted]).reshape({batch_size}, {seq_len})
targets = numpy.array(ids[1:wanted + 1]).reshape({batch_size}, {seq_len})
mark("first batch")
tell(inputs)
os._exit(0)
"""


@dataclass
class Case:
    """One kind of start."""

    code: str
    kept: Path | None = None
    """Where it finds what an earlier run left behind; None for an empty place each time."""
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)


@dataclass
class Run:
    """One start, with times in seconds since the process was created."""

    begun: float
    ended: float
    """By the monotonic clock: when the process was created, and when it was gone."""
    marks: list[tuple[str, float]]
    crc: int
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def first_batch(self) -> float:
        return dict(self.marks)["first batch"]

    def asked(self) -> list[dict[str, Any]]:
        """The requests that came before the first batch."""
        return [request for request in self.requests if request["at"] < self.first_batch]


class Starts:
    """Starts children against one Hub."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self._folder = folder
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "PENSTOCK_", "USE_"))
        }
        self._environment = kept | {
            "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        }  # fmt: skip
        (folder / "empty").mkdir()

    def run(self, case: Case) -> Run:
        """One child. It runs in an empty folder, so that it finds nothing to import there."""
        with tempfile.TemporaryDirectory(dir=self._folder) as fresh:
            kept = str(case.kept or fresh)
            environment = (
                self._environment
                | {"PENSTOCK_CACHE": kept, "HF_HOME": kept}
                | dict(case.environment)
            )
            begun = time.monotonic()
            process = subprocess.run(
                [sys.executable, "-c", FRAME.format(body=case.code)],
                stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S,
                cwd=self._folder / "empty", env=environment,
            )  # fmt: skip
            ended = time.monotonic()
        told = json.loads(process.stdout)
        if told["shape"] != [BATCH_SIZE, SEQ_LEN]:
            raise RuntimeError(f"a batch of {told['shape']} instead of {[BATCH_SIZE, SEQ_LEN]}")
        return Run(begun, ended, [(name, at - begun) for name, at in told["marks"]], told["crc"])


# What is compared


class Cases:
    """Every kind of start, prepared."""

    def __init__(
        self, starts: Starts, folder: Path, file: Path, tokenizer: Path, commit: str
    ) -> None:
        self._starts = starts
        self._folder = folder
        self._file = str(file)
        self._tokenizer = str(tokenizer)
        self._commit = commit

    def prepare(self) -> dict[str, Case]:
        """All of them. What earlier runs leave behind is left behind here; so everything is compiled, too."""
        branch, pinned = f"hf://datasets/{REPOSITORY}", f"hf://datasets/{REPOSITORY}@{self._commit}"
        best: dict[str, Any] = {
            "data_files": "data/*.parquet",
            "revision": self._commit,
            "columns": ["text"],
        }
        no_torch = {"USE_TORCH": "0"}
        return {
            "Penstock, on disk": self._kept("disk", self._penstock(self._file)),
            "Penstock, cold": Case(self._penstock(branch)),
            "Penstock, manifest": self._kept("manifest", self._penstock(branch, cache=False)),
            "Penstock, manifest, pinned": self._kept(
                "manifest-pinned", self._penstock(pinned, cache=False)
            ),
            "Penstock, tokens, pinned": self._kept(
                "tokens",
                self._penstock(pinned),
                self._penstock(pinned, more=FILL.format(chunks=FILL_CHUNKS)),
            ),
            "datasets, cold": Case(self._datasets({})),
            "datasets, warm": self._kept("warm", self._datasets({})),
            "datasets at its best, cold": Case(self._datasets(best), environment=no_torch),
            "datasets at its best, warm": self._kept(
                "warm-best", self._datasets(best), environment=no_torch
            ),
        }

    def in_order(self) -> int:
        """The checksum of the first batch if nothing is shuffled: that of `datasets` has to be the same."""
        return self._starts.run(Case(self._penstock(self._file, shuffle=False))).crc

    def _kept(
        self, name: str, code: str, before: str = "", environment: Mapping[str, str] | None = None
    ) -> Case:
        kept = self._folder / name
        kept.mkdir()
        case = Case(code, kept, environment or {})
        self._starts.run(Case(before or code, kept, environment or {}))
        return case

    def _penstock(
        self, url: str, *, cache: bool | str = "auto", shuffle: bool = True, more: str = ""
    ) -> str:
        return PENSTOCK.format(
            url=url, tokenizer=self._tokenizer, seq_len=SEQ_LEN, cache=cache, batch_size=BATCH_SIZE, shuffle=shuffle,
            more=more,
        )  # fmt: skip

    def _datasets(self, options: Mapping[str, Any]) -> str:
        return DATASETS.format(
            tokenizer=self._tokenizer, repository=REPOSITORY, options=dict(options), batch_size=BATCH_SIZE,
            seq_len=SEQ_LEN,
        )  # fmt: skip


# The ledger


def purpose(request: Mapping[str, Any], file_bytes: int) -> str:
    """What a request is for."""
    path, span = str(request["path"]), request["range"]
    if request["port"] == "cdn" or (span and "/resolve/" in path):
        at_end = span and span[1] in (None, file_bytes) and file_bytes - span[0] <= FOOTER_BYTES
        what = "footer" if at_end else "text"
        return f"{what} asked for" if request["port"] == "cdn" else f"address of a {what} asked for"
    if "/tree/" in path:
        return "listing asked for" + (", next page" if "cursor=" in request["query"] else "")
    if path.endswith("README.md"):
        return "card asked for"
    if "/revision/" in path or path == f"/api/datasets/{REPOSITORY}":
        return "commit asked for"
    return f"{path.rpartition('/')[2]} asked for"


def in_a_row(requests: Sequence[Mapping[str, Any]], latency_s: float, until: float) -> int:
    """The most requests of which each came after the one before it could have been answered."""
    count, free = 0, 0.0
    for request in requests:
        if free <= request["at"] <= until - latency_s:
            count, free = count + 1, request["at"] + latency_s
    return count


def moments(run: Run, file_bytes: int) -> dict[str, float]:
    """The child's own, and when each kind of request first arrived, up to the first batch."""
    found = dict(run.marks)
    for request in run.asked():
        found.setdefault(purpose(request, file_bytes), request["at"])
    return {name: at for name, at in found.items() if at <= run.first_batch}


def after_the_text(run: Run, file_bytes: int, latency_s: float, bytes_per_s: float) -> float | None:
    """Seconds from when the first text was here, by arithmetic, to the first batch; None if none was asked for."""
    for request in run.asked():
        if purpose(request, file_bytes) == "text asked for":
            return run.first_batch - float(
                request["at"] + latency_s + request["sent"] / bytes_per_s
            )
    return None


def print_timeline(name: str, run: Run, file_bytes: int) -> None:
    """Everything that happened in one run, in its order."""
    print(f"# {name}, in seconds since the process was created: the run of median length")
    lines = [(at, part, "") for part, at in run.marks if at <= run.first_batch]
    for request in run.asked():
        details = f"{request['method']} {request['status']}, {show(request['sent'])} bytes, "
        lines.append(
            (
                request["at"],
                purpose(request, file_bytes),
                details + f"connection {request['connection']}",
            )
        )
    before = 0.0
    for at, what, details in sorted(lines, key=lambda line: line[0]):
        print(f"  {at:7.3f}  +{at - before:5.3f}  {what:32}  {details}".rstrip())
        before = at
    print()


# Running


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--files", type=int, help="in the dataset (2400)")
    options.add_argument("--latency-ms", type=float, default=50.0, help="before each answer")
    options.add_argument(
        "--connect-latency-ms", type=float, default=0.0, help="once more on a new connection"
    )
    options.add_argument(
        "--bandwidth-mb", type=float, default=100.0, help="MB/s of all connections together"
    )
    options.add_argument("--documents", type=int, default=DOCUMENTS, help="in a row group")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 5)
    files = args.files or (50 if args.quick else 2400)
    corpus = load_corpus(args.quick)
    hosted = corpus.hosted("zstd", args.documents)
    file_bytes = (hosted / HOSTED).stat().st_size
    settings = {
        "corpus": corpus.name, "files": files, "file_mb": round(file_bytes / MB, 1), "documents": args.documents,
        "latency_ms": args.latency_ms, "connect_latency_ms": args.connect_latency_ms,
        "bandwidth_mb": args.bandwidth_mb, "batch": [BATCH_SIZE, SEQ_LEN], "repeats": repeats,
    }  # fmt: skip
    report = Report("first_batch", args.quick, settings)
    network = [
        "--latency-ms", str(args.latency_ms), "--connect-latency-ms", str(args.connect_latency_ms),
        "--bandwidth-mb", str(args.bandwidth_mb),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name, Hub(hosted, files, *network) as hub:
        folder = Path(name)
        starts = Starts(hub.endpoint, folder)
        starters = Cases(starts, folder, hosted / HOSTED, corpus.tokenizer, hub.commit())
        cases, crc = starters.prepare(), starters.in_order()

        def starting(case: Case) -> Callable[[], float]:
            def measure() -> float:
                case.runs.append(starts.run(case))
                return case.runs[-1].first_batch

            return measure

        seconds = interleave(repeats, {name: starting(case) for name, case in cases.items()})
    for name, case in cases.items():
        for run in case.runs:
            run.requests = [
                request | {"at": request["time"] - run.begun}
                for request in hub.between(run.begun, run.ended)
            ]
            if name.startswith("datasets") and run.crc != crc:
                raise RuntimeError(
                    f"{name}: its first batch has other ids than Penstock's in order: not the same work"
                )
    compare(report, seconds)
    for name, case in cases.items():
        account(report, name, case.runs, file_bytes, args.latency_ms / 1e3, args.bandwidth_mb * MB)
    report.close()
    for name in LEDGERS:
        runs = sorted(cases[name].runs, key=lambda run: run.first_batch)
        print_timeline(name, runs[(len(runs) - 1) // 2], file_bytes)
    asked = [request for run in cases["Penstock, tokens, pinned"].runs for request in run.requests]
    if asked:
        what = ", ".join(sorted({purpose(request, file_bytes) for request in asked}))
        raise RuntimeError(
            f"with the tokens at hand {len(asked)} requests were made, and none is needed: {what}"
        )


def compare(report: Report, seconds: Mapping[str, list[float]]) -> None:
    """When the first batch was there, and what that is of the time that `datasets` takes."""
    for name, values in seconds.items():
        warm = name == "Penstock, tokens, pinned"
        report.add(name, "first batch after", values, "s", Goal("<=", 0.8) if warm else None)
    pairs = [
        ("Penstock, cold", "cold"),
        ("Penstock, manifest", "warm"),
        ("Penstock, tokens, pinned", "warm"),
    ]
    for name, state in pairs:
        for peer in ("datasets", "datasets at its best"):
            goal = Goal("<=", 0.2) if state == "cold" and peer == "datasets at its best" else None
            of_peer = ratios(seconds[name], seconds[f"{peer}, {state}"])
            report.add(name, f"of {peer}, {state}", of_peer, "x", goal)


def account(
    report: Report,
    name: str,
    runs: Sequence[Run],
    file_bytes: int,
    latency_s: float,
    bytes_per_s: float,
) -> None:
    """The ledger of a case: what was asked for, and when what happened."""
    report.add(name, "process gone after", [run.ended - run.begun for run in runs], "s")
    none = Goal("<=", 0) if name == "Penstock, tokens, pinned" else None
    report.add(name, "requests, in all", [len(run.requests) for run in runs], "", none)
    asked = [run.asked() for run in runs]
    report.add(name, "requests, before the first batch", [len(requests) for requests in asked], "")
    chains = [
        in_a_row(requests, latency_s, run.first_batch) for run, requests in zip(runs, asked, strict=True)
    ]  # fmt: skip
    report.add(name, "requests, in a row", chains, "")
    report.add(
        name, "connections", [len({r["connection"] for r in requests}) for requests in asked], ""
    )
    report.add(name, "bytes", [sum(r["sent"] for r in requests) / MB for requests in asked], "MB")
    if name not in LEDGERS:
        return
    each = [moments(run, file_bytes) for run in runs]
    common = [part for part in each[0] if all(part in found for found in each)]
    for part in sorted(common, key=lambda part: statistics.median(found[part] for found in each)):
        report.add(f"{name}: ledger", part, [found[part] for found in each], "s")
    rest = [after_the_text(run, file_bytes, latency_s, bytes_per_s) for run in runs]
    if known := [value for value in rest if value is not None]:
        report.add(f"{name}: ledger", "of that, since the first text was here", known, "s")


if __name__ == "__main__":
    main()
